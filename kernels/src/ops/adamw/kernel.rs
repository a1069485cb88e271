//! The kernel of AdamW. Each thread handles one of the vectors from `first` to `end`.

use cubecl::prelude::*;

/// The numbers of an AdamW step.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Numbers {
    /// Factor on the gradient.
    pub grad_scale: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// 1 − `beta1`.
    pub rest1: f32,
    /// 1 − `beta2`.
    pub rest2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// 1 − lr · weight decay.
    pub keep: f32,
    /// lr / (1 − β₁ᵗ).
    pub rate: f32,
    /// 1 / (1 − β₂ᵗ).
    pub inverse2: f32,
}

/// One AdamW step in place; with `copied`, also writes the new parameter to `copy` in its type.
#[cube(launch_unchecked)]
pub fn adamw<G: Float, C: Float, N: Size>(
    p: &mut Array<Vector<f32, N>>,
    g: &Array<Vector<G, N>>,
    m: &mut Array<Vector<f32, N>>,
    v: &mut Array<Vector<f32, N>>,
    copy: &mut Array<Vector<C, N>>,
    first: u32,
    end: u32,
    numbers: Numbers,
    #[comptime] copied: bool,
    #[define(G, C)] _dtypes: [StorageType; 2],
) {
    let at = first as usize + ABSOLUTE_POS;
    if at < end as usize {
        let g = Vector::<f32, N>::cast_from(g[at]) * Vector::cast_from(numbers.grad_scale);
        let m_new = m[at] * Vector::cast_from(numbers.beta1) + g * Vector::cast_from(numbers.rest1);
        let v_new =
            v[at] * Vector::cast_from(numbers.beta2) + g * g * Vector::cast_from(numbers.rest2);
        let root = Vector::sqrt(v_new * Vector::cast_from(numbers.inverse2));
        let update =
            m_new * Vector::cast_from(numbers.rate) / (root + Vector::cast_from(numbers.eps));
        let p_new = p[at] * Vector::cast_from(numbers.keep) - update;
        p[at] = p_new;
        m[at] = m_new;
        v[at] = v_new;
        if copied {
            copy[at] = Vector::cast_from(p_new);
        }
    }
}
