//! Decoding in plain tensor operations (section 3.4).
//!
//! The paper rewrites every cached key at every token, k ← (I − β_t w_t w_tᵀ) k. Here the cache is
//! rewritten once in 64 tokens: older keys are transformed up to the end of the last full 64, newer ones
//! are updated at every token, and so is the product of the transforms since then. A query attends to
//! the newer keys directly and to the older ones after one head_dim² product; after 64 new tokens, one
//! matrix product updates the older keys. With 64 channels that is half the arithmetic of the paper's
//! update, a 64th of its memory traffic and of its roundings. Compared with keys in 64-token blocks with
//! one transform each, it stores nothing per block and has no chain of products over blocks.

use burn::tensor::Tensor;

use super::reference::{BLOCK, Tokens, Visible, attend};
use super::token_blocks::{BlockTransform, TokenBlock, TransformedKv};
use crate::attention::DecodeState;
use crate::backend::OpBackend;

/// Keys and values of the tokens so far.
#[derive(Clone, Debug)]
pub struct TensorState<B: OpBackend> {
    /// The older tokens, transformed up to those of `open`.
    closed: Option<TransformedKv<B>>,
    /// The newer tokens, fewer than [`BLOCK`].
    open: Option<TokenBlock<B>>,
    /// The position of the next token.
    position: usize,
}

impl<B: OpBackend> DecodeState for TensorState<B> {
    fn elements(&self) -> usize {
        let of = |x: &Tensor<B, 4>| x.shape().num_elements();
        let keys = |x: &TransformedKv<B>| of(&x.k) + of(&x.v) + x.decay.as_ref().map_or(0, of);
        let transform = |x: &BlockTransform<B>| of(&x.removed) + x.decay.as_ref().map_or(0, of);
        let open = self.open.as_ref();
        self.closed.as_ref().map_or(0, keys)
            + open.map_or(0, |block| {
                keys(&block.keys) + block.transform.as_ref().map_or(0, transform)
            })
    }
}

/// Tokens of `closed` and `open` after `seq_len` single-token steps.
pub fn held(seq_len: usize, window: Option<usize>) -> [usize; 2] {
    let open = seq_len % BLOCK;
    let seen = window.map_or(seq_len, |w| w - 1);
    [(seq_len - open).min(seen), open]
}

impl<B: OpBackend> Default for TensorState<B> {
    /// The state before the first token.
    fn default() -> Self {
        TensorState { closed: None, open: None, position: 0 }
    }
}

impl<B: OpBackend> TensorState<B> {
    /// Appends tokens and returns their outputs `[rows, group, tokens, head_dim]`.
    pub fn extend(&mut self, tokens: &Tokens<B>, visible: &Visible<B>) -> Tensor<B, 4> {
        let closed = self.closed.take().map(|keys| TokenBlock { keys, transform: None });
        let open = self.open.take();
        let past: Vec<_> = closed.iter().chain(&open).cloned().collect();
        let (out, new) = attend(tokens, visible, &past, self.position);
        self.position += tokens.len();

        let newer: Vec<_> = open.into_iter().chain(new).collect();
        let count = newer.iter().map(|block| block.keys.end() - block.keys.first).sum::<usize>();
        if count < BLOCK {
            self.closed = closed.map(|block| block.keys);
            self.open = Some(TokenBlock::join(newer, 0));
            return out;
        }
        // The next query sees w − 1 earlier tokens.
        let seen = visible.window.map_or(self.position, |w| w - 1);
        if seen > 0 {
            let all = closed.into_iter().chain(newer).collect();
            self.closed = Some(TokenBlock::join(all, self.position.saturating_sub(seen)).keys);
        }
        out
    }
}
