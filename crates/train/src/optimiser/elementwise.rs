//! Tensor operations that several kinds share.

use burn::tensor::Tensor;
use burn::tensor::ops::FloatTensor;
use longwall_config::Problems;
use longwall_kernels::backend::{OpBackend, primitive, tensor};

/// `x` as a tensor of shape `shape`, which has as many elements.
pub(super) fn shaped<B: OpBackend, const D: usize>(
    x: FloatTensor<B>,
    shape: [usize; D],
) -> Tensor<B, D> {
    tensor(B::float_reshape(x, shape.into()))
}

/// The elements of `x`, in one dimension.
pub(super) fn flat<B: OpBackend>(x: FloatTensor<B>, shape: &[usize]) -> Tensor<B, 1> {
    shaped(x, [shape.iter().product()])
}

/// `x` in the shape `shape`.
pub(super) fn unflat<B: OpBackend, const D: usize>(
    x: Tensor<B, D>,
    shape: &[usize],
) -> FloatTensor<B> {
    B::float_reshape(primitive(x), shape.to_vec().into())
}

/// p − rate · p, the decay of one update p ← p − u. With `cautious` only elements decay that the update moves
/// towards zero or not at all, u ⊙ p ≥ 0 (Chen et al., 2025, "Cautious weight decay", algorithm 1).
///
/// `direction` has the signs of u.
pub(super) fn decayed<B: OpBackend, const D: usize>(
    p: Tensor<B, D>,
    direction: &Tensor<B, D>,
    rate: f64,
    cautious: bool,
) -> Tensor<B, D> {
    match (rate == 0.0, cautious) {
        (true, _) => p,
        (false, false) => p * (1.0 - rate),
        (false, true) => {
            let agree = (p.clone() * direction.clone()).greater_equal_elem(0.0).float();
            p.clone() - p * agree * rate
        }
    }
}

/// Records the problem of a decay rate of moments that is not in `0..1`.
pub(super) fn check_rate(table: &str, key: &str, rate: f64, remedy: &str, problems: &mut Problems) {
    problems.check(
        (0.0..1.0).contains(&rate),
        format!("{table}.{key}"),
        rate,
        "0 up to but not including 1",
        remedy,
    );
}

/// Records the problem of a negative weight decay.
pub(super) fn check_decay(table: &str, decay: f64, problems: &mut Problems) {
    problems.check(
        decay.is_finite() && decay >= 0.0,
        format!("{table}.weight_decay"),
        decay,
        "0 or more",
        "use 0.1, or 0 for no decay",
    );
}
