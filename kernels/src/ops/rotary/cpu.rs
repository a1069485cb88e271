//! The rotary position embedding on the CPU.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::RotaryEmbedding;
use crate::cpu::rows::{RowOrder, with_whole_rows};
use crate::cpu::{buffer, rows_per_task};

/// The rotation, or with `direction` −1 its transpose, in the memory order of `x`.
pub fn rotate(op: &RotaryEmbedding, x: &FlexTensor, direction: f32) -> FlexTensor {
    let x = with_whole_rows(x);
    let order = RowOrder::of(&x);
    let (xs, time) = (order.view(&x), order.index(2));
    let (width, half) = (order.width(), op.rotary_dims / 2);
    let angles = op.recent_angles(x.layout().shape()[2]);
    let mut y = buffer(order.rows() * width);
    let rows = rows_per_task(width, 1 << 14);
    y.par_chunks_mut(rows * width).enumerate().for_each(|(task, y)| {
        for (i, y) in y.chunks_exact_mut(width).enumerate() {
            let row = task * rows + i;
            let (x, t) = (xs.row(row), time(row));
            let [cos, sin] = [&angles.cos, &angles.sin].map(|a| &a[t * half..][..half]);
            let (a, b) = x[..2 * half].split_at(half);
            let (first, second) = y[..2 * half].split_at_mut(half);
            for i in 0..half {
                let sin = sin[i] * direction;
                first[i] = a[i] * cos[i] - b[i] * sin;
                second[i] = b[i] * cos[i] + a[i] * sin;
            }
            y[2 * half..].copy_from_slice(&x[2 * half..]);
        }
    });
    order.tensor(y)
}
