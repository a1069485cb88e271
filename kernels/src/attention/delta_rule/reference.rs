//! The corrected values in plain tensor operations, chunk by chunk.

use burn::tensor::Tensor;

use super::CorrectedValues;
use crate::attention::linear::reference::{decays, pad, segments_of};
use crate::attention::recurrent::one_by_one;
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

impl CorrectedValues {
    /// w `[rows, seq_len, value_dim]` of k, v, β and the log decays by row, where `start` is the state before the first
    /// token, `[rows, head_dim, value_dim]`, 0 if `None`. A row is a kv head of a sequence.
    pub(super) fn forward<B: OpBackend>(
        &self,
        inputs: [Tensor<B, 3>; 4],
        start: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let [rows, seq_len, _] = inputs[0].dims();
        let size = self.chunk.min(seq_len.next_power_of_two());
        // Padding neither decays nor enters the state: its β is 0.
        let padded = inputs.map(|x| pad(x, seq_len.next_multiple_of(size)));
        let inverse = inverses(&padded, size);
        let [k, v, beta, log_decay] = padded.map(|x| segments_of(&x, size, 1, 0));
        let [to_token, to_end] = decays(&log_decay);
        let chunks = Chunks {
            from_values: inverse.clone().mm(beta.clone() * v),
            from_state: inverse.mm(beta * k.clone() * to_token),
            keys: k * to_end,
            decay: log_decay.sum_dim(1).exp(),
        };
        chunks.values(rows, start).narrow(1, 0, seq_len)
    }
}

/// X = (I + diag(β) A)⁻¹ of each chunk of `size` tokens, `[rows · chunks, size, size]`.
///
/// By blocks: where the diagonal blocks of half the size have the inverses X₁ and X₂, and L lies below them, the
/// inverse has −X₂ L X₁ there. All intermediate values are parts of the result.
fn inverses<B: OpBackend>(
    [k, _, beta, log_decay]: &[Tensor<B, 3>; 4],
    size: usize,
) -> Tensor<B, 3> {
    let [rows, seq_len, _] = k.dims();
    let mut inverse = Tensor::ones([rows * seq_len, 1, 1], &k.device());
    let mut half = 1;
    while half < size {
        let side = |x: &Tensor<B, 3>, side| segments_of(x, half, 2, side);
        let [to_query, _] = decays(&side(log_decay, 1));
        let [_, to_end] = decays(&side(log_decay, 0));
        let queries = side(beta, 1) * side(k, 1) * to_query;
        let keys = side(k, 0) * to_end;
        let blocks = inverse.clone().reshape([-1, 2, (half * half) as i32]);
        let at = |side| blocks.clone().narrow(1, side, 1).reshape([-1, half as i32, half as i32]);
        let (first, second): (Tensor<B, 3>, Tensor<B, 3>) = (at(0), at(1));
        // 1 × 1 matrix products would be slow.
        let below = match half {
            1 => (queries * keys).sum_dim(2),
            _ => second.clone().mm(queries.mm(keys.transpose())).mm(first.clone()),
        };
        let above = below.zeros_like();
        let top = Tensor::cat(vec![first, above], 2);
        let bottom = Tensor::cat(vec![-below, second], 2);
        inverse = Tensor::cat(vec![top, bottom], 1);
        half *= 2;
    }
    inverse
}

/// What each chunk's values are made of, `[rows · chunks, …]`.
struct Chunks<B: OpBackend> {
    /// X diag(β) V, `[…, size, value_dim]`.
    from_values: Tensor<B, 3>,
    /// X diag(β) (K ⊙ e^P), `[…, size, head_dim]`.
    from_state: Tensor<B, 3>,
    /// Keys decayed to the chunk's end, `[…, size, head_dim]`.
    keys: Tensor<B, 3>,
    /// The state's decay over the chunk, `[…, 1, 1 or head_dim]`.
    decay: Tensor<B, 3>,
}

impl<B: OpBackend> Chunks<B> {
    /// w of all tokens, `[rows, tokens, value_dim]`.
    fn values(self, rows: usize, start: Option<Tensor<B, 3>>) -> Tensor<B, 3> {
        let [all, size, values] = self.from_values.dims();
        let (chunks, d) = (all / rows, self.keys.dims()[2]);
        let device = self.keys.device();
        let parts = [self.from_values, self.from_state, self.keys, self.decay].map(|x| {
            let [_, height, width] = x.dims();
            one_by_one(x.reshape([rows, chunks, height, width])).into_iter()
        });
        let [from_values, from_state, keys, decay] = parts;
        let steps = from_values.zip(from_state).zip(keys).zip(decay);
        let mut state = start.unwrap_or_else(|| Tensor::zeros([rows, d, values], &device));
        let mut all = Vec::with_capacity(chunks);
        for (((from_values, from_state), keys), decay) in steps {
            let w = from_values - from_state.mm(state.clone());
            state = state * decay.transpose() + keys.transpose().mm(w.clone());
            all.push(w);
        }
        Tensor::stack::<4>(all, 1).reshape([rows, chunks * size, values])
    }
}
