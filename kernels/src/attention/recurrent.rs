//! What the variants with a constant-size state share: log decays that reset the state at the start
//! of a document.

use burn::tensor::{Bool, Int, Tensor};

use super::DocumentStarts;
use crate::backend::OpBackend;

/// Log decay of the step into a new document: its exponential is exactly 0, and so is that of any
/// sum that contains it.
const FORGET: f32 = -1e5;

/// `log_decay` `[batch, heads, seq_len, channels]` with the first token of each document set so low that
/// it clears the state.
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
