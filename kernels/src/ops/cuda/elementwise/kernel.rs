//! Elementwise kernels. Each thread handles one of the vectors from `first` to `end`.

use cubecl::prelude::*;

/// x ← factor · x; with a factor of 1, x is neither read nor written.
///
/// - `factor`: `[1]`
#[cube(launch_unchecked)]
pub fn scale<E: Float, N: Size>(
    x: &mut Array<Vector<E, N>>,
    factor: &Array<f32>,
    first: u32,
    end: u32,
    #[define(E)] _dtype: StorageType,
) {
    let at = first as usize + ABSOLUTE_POS;
    let factor = factor[0];
    if at < end as usize {
        if factor != 1.0 {
            let value = Vector::<f32, N>::cast_from(x[at]);
            x[at] = Vector::cast_from(value * Vector::cast_from(factor));
        }
    }
}

/// y = x, in y's type.
#[cube(launch_unchecked)]
pub fn convert<I: Float, O: Float, N: Size>(
    x: &Array<Vector<I, N>>,
    y: &mut Array<Vector<O, N>>,
    first: u32,
    end: u32,
    #[define(I, O)] _dtypes: [StorageType; 2],
) {
    let at = first as usize + ABSOLUTE_POS;
    if at < end as usize {
        y[at] = Vector::cast_from(x[at]);
    }
}

/// out ← p, row by row.
///
/// - `p`: `[rows, columns]`, of `len` elements
/// - `out`: `[rows, stride]`
#[cube(launch_unchecked)]
pub fn store<E: Float>(
    p: &Array<E>,
    out: &mut Array<E>,
    len: u32,
    columns: u32,
    stride: u32,
    #[define(E)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS;
    if at < len as usize {
        let columns = columns as usize;
        out[at / columns * stride as usize + at % columns] = p[at];
    }
}
