//! AdamW on the CPU.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::AdamwStep;
use crate::cpu::{contiguous, slice};

/// One step in one pass: the new parameter, m and v.
pub fn adamw(step: &AdamwStep, [p, g, m, v]: [FlexTensor; 4]) -> [FlexTensor; 3] {
    const TASK: usize = 1 << 14;
    let [mut p, mut m, mut v] =
        [p, m, v].map(|x| if x.is_contiguous() { x } else { contiguous(&x) });
    let g = contiguous(&g);
    let AdamwStep { lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = *step;
    let [c1, c2] = step.corrections();
    let (keep, rate, inv2) = (1.0 - lr * weight_decay, lr / c1, 1.0 / c2);
    let update = |p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]| {
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * grad_scale;
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * (g * g);
            *p = keep * *p - rate * *m / ((inv2 * *v).sqrt() + eps);
        }
    };
    let grad = slice(&g);
    p.storage_mut::<f32>()
        .par_chunks_mut(TASK)
        .zip(grad.par_chunks(TASK))
        .zip(
            m.storage_mut::<f32>()
                .par_chunks_mut(TASK)
                .zip(v.storage_mut::<f32>().par_chunks_mut(TASK)),
        )
        .for_each(|((p, g), (m, v))| update(p, g, m, v));
    [p, m, v]
}
