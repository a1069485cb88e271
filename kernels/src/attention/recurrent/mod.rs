//! What the variants with a constant-size state share: a token's step in decoding, layouts, the step size of a decay,
//! and log decays that reset the state at the start of a document.

pub mod step;

use burn::tensor::ops::FloatTensor;
use burn::tensor::{Bool, Int, Tensor};
use longwall_config::Problems;

use super::{AttentionShape, DecodeState, DocumentStarts, ExecPath, Init};
use crate::backend::{OpBackend, StateOp, primitive, tensor};
use crate::ops::activation::log_sigmoid;
use crate::ops::rms_norm::rms_norm;

/// Log decay of the step into a new document: its exponential is exactly 0, and so is that of any
/// sum that contains it.
pub const FORGET: f32 = -1e5;

/// S after the tokens so far.
#[derive(Clone, Debug, Default)]
pub struct State<B: OpBackend> {
    /// `[batch · kv_heads, head_dim, value_dim]`; `None` before the first token.
    pub s: Option<Tensor<B, 3>>,
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        self.s.as_ref().map_or(0, |s| s.shape().num_elements())
    }
}

/// Runs an operation over whole rows on `path`. They go on from `state` `[batch, …]`, if there is one, which the
/// operation takes in `sizes`, and leave theirs in it.
pub fn run_rows<B: OpBackend, O: StateOp<N>, const N: usize>(
    path: ExecPath,
    op: &O,
    inputs: [FloatTensor<B>; N],
    state: Option<&mut Tensor<B, 2>>,
    sizes: [usize; 3],
) -> Tensor<B, 4> {
    let Some(state) = state else { return tensor(path.run::<B, O, N>(op, inputs, vec![])) };
    let before = primitive(state.clone().reshape(sizes));
    let [y, after] = path.run_from::<B, O, N>(op, inputs, vec![], before);
    *state = tensor::<B, 3>(after).reshape(state.dims());
    tensor(y)
}

/// Initial values of [`step_size`]'s bias: step sizes from 0.001 to 0.1, log-uniform as in the released code of Mamba
/// and its successors.
pub const STEP_BIAS: Init = Init::SoftplusLogUniform { low: 1e-3, high: 0.1 };

/// `[batch, heads, seq_len, channels]` to `[batch, seq_len, heads · channels]`.
pub fn by_token<B: OpBackend>(x: Tensor<B, 4>) -> Tensor<B, 3> {
    let [batch, heads, seq_len, channels] = x.dims();
    x.swap_dims(1, 2).reshape([batch, seq_len, heads * channels])
}

/// `[batch, seq_len, heads · channels]` to `[batch, heads, seq_len, channels]`.
pub fn by_head<B: OpBackend>(x: Tensor<B, 3>, heads: usize) -> Tensor<B, 4> {
    let [batch, seq_len, features] = x.dims();
    x.reshape([batch, seq_len, heads, features / heads]).swap_dims(1, 2)
}

/// The slices of `x` along dimension 1. They are taken by recursive halving: the gradient of a slice is as
/// large as the whole, so that slicing parts off one by one would make its cost quadratic.
pub fn one_by_one<B: OpBackend>(x: Tensor<B, 4>) -> Vec<Tensor<B, 3>> {
    let [rows, chunks, height, width] = x.dims();
    if chunks == 1 {
        return vec![x.reshape([rows, height, width])];
    }
    let half = chunks / 2;
    let mut parts = one_by_one(x.clone().narrow(1, 0, half));
    parts.extend(one_by_one(x.narrow(1, half, chunks - half)));
    parts
}

/// Records that `key_heads` is not a divisor of the shape's `kv_heads`; `key` is the path of the kind's table.
pub fn validate_key_heads(
    key: &str,
    key_heads: usize,
    shape: &AttentionShape,
    problems: &mut Problems,
) {
    problems.check(
        key_heads > 0 && shape.kv_heads.is_multiple_of(key_heads),
        format!("{key}.key_heads"),
        key_heads,
        format!("a divisor of the {} heads of values (model.kv_heads)", shape.kv_heads),
        "set key_heads = 1, or leave it out",
    );
}

/// Records a chunk that is not a power of two from 16 to 256; `key` is the path of the kind's table.
pub fn validate_chunk(key: &str, chunk: usize, problems: &mut Problems) {
    problems.check(
        chunk.is_power_of_two() && (16..=256).contains(&chunk),
        format!("{key}.chunk"),
        chunk,
        "16, 32, 64, 128 or 256",
        "set chunk = 64",
    );
}

/// The most channels of a head's values.
const MOST_VALUE_DIM: usize = 1 << 12;

/// Records a `value_dim` that is not from 1 to `MOST_VALUE_DIM`; `key` is the path of the kind's table.
pub fn validate_value_dim(key: &str, value_dim: Option<usize>, problems: &mut Problems) {
    problems.check(
        value_dim.is_none_or(|n| (1..=MOST_VALUE_DIM).contains(&n)),
        format!("{key}.value_dim"),
        value_dim.unwrap_or_default(),
        format!("from 1 to {MOST_VALUE_DIM}"),
        "leave it out for the default",
    );
}

/// x · length / √(‖x‖² + eps) over the last dimension.
pub fn unit<B: OpBackend>(x: Tensor<B, 4>, length: f32, eps: f32) -> Tensor<B, 4> {
    let d = x.dims()[3];
    let weight = Tensor::full([d], length / (d as f32).sqrt(), &x.device());
    rms_norm(x, weight, eps / d as f32)
}

/// Δ = softplus(x + b), the step size of a decay −e^a Δ (Dao and Gu, "Mamba-2", 2024): `logits` x and the
/// result are `[batch, seq_len, features]`, the bias b is `[features]`.
pub fn step_size<B: OpBackend>(logits: Tensor<B, 3>, bias: Tensor<B, 1>) -> Tensor<B, 3> {
    -log_sigmoid(-(logits + bias.reshape([1, 1, -1])))
}

/// The log decays −e^a Δ, `[batch, heads, seq_len, channels]`, of steps Δ `[batch, seq_len, heads · channels]`
/// and a `[heads]`.
pub fn decay_of_steps<B: OpBackend>(steps: Tensor<B, 3>, a: Tensor<B, 1>) -> Tensor<B, 4> {
    let [heads] = a.dims();
    by_head(steps, heads) * -a.exp().reshape([1, heads, 1, 1])
}

/// `log_decay` `[batch, heads, seq_len, channels]` with the first token of each document set so low that
/// it clears the state; not of documents that start at −1, before their row.
pub fn forget_at_starts<B: OpBackend>(
    log_decay: Tensor<B, 4>,
    documents: DocumentStarts<B>,
) -> Tensor<B, 4> {
    let Some(starts) = documents else { return log_decay };
    let [batch, seq_len] = starts.dims();
    let positions = Tensor::<B, 1, Int>::arange(0..seq_len as i64, &starts.device());
    let positions = positions.cast(starts.dtype()).reshape([1, seq_len]).expand([batch, seq_len]);
    let first: Tensor<B, 4, Bool> = starts.equal(positions).reshape([batch, 1, seq_len, 1]);
    let shape = log_decay.shape();
    log_decay.mask_fill(first.expand(shape), FORGET)
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn steps<B: OpBackend>(n: usize) -> Tensor<B, 2> {
        let steps: Vec<f32> = (0..2 * n).map(|t| -(t as f32 * 1.7).sin().abs()).collect();
        Tensor::<B, 1>::from_floats(&steps[..], &Default::default()).reshape([2, n])
    }

    fn to_vec<const D: usize>(x: Tensor<Flex, D>) -> Vec<f32> {
        x.into_data().to_vec().unwrap()
    }

    #[test]
    fn a_documents_start_forgets_everything() {
        let decay = steps::<Flex>(6).reshape([2, 1, 6, 1]);
        let starts = Tensor::<Flex, 1, Int>::from_ints(
            [0, 0, 2, 2, 2, 5, 0, 0, 0, 0, 4, 4],
            &Default::default(),
        );
        let got = to_vec(forget_at_starts(decay.clone(), Some(starts.reshape([2, 6]))));
        for (at, (got, was)) in got.iter().zip(to_vec(decay)).enumerate() {
            let want = if [0, 2, 5, 6, 10].contains(&at) { FORGET } else { was };
            assert_eq!(*got, want);
        }
    }
}
