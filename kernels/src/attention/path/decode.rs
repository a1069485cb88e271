//! Decoding (section 3.4).
//!
//! The paper rewrites every cached key at every token, k ← (I − β_t w_t w_tᵀ) k. Here the cache is
//! rewritten once in 64 tokens: the oldest keys stay as they were at the end of the last full 64,
//! the newer ones are kept up to date, and so is the product of the transforms since. A query
//! meets the newer keys as it is and the older ones after that one head_dim² product; when 64 new
//! tokens have come, one matrix product brings the older keys up to date. That is half the
//! arithmetic of the paper's update with 64 channels, a 64th of its memory traffic and of its
//! roundings, and unlike keys that stay in 64-token blocks with a transform each it stores nothing
//! per block and has no chain of products from block to block.

use burn::tensor::Tensor;

use super::reference::{BLOCK, Tokens, Visible, attend};
use super::spans::{Carry, Keys, Span};
use crate::attention::DecodeState;
use crate::backend::OpBackend;

/// Keys and values of the tokens so far.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    /// The older tokens, as they were before those of `open`.
    closed: Option<Keys<B>>,
    /// The newer tokens, fewer than [`BLOCK`].
    open: Option<Span<B>>,
    /// The position of the next token.
    position: usize,
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        let of = |x: &Tensor<B, 4>| x.shape().num_elements();
        let keys = |x: &Keys<B>| of(&x.k) + of(&x.v) + x.decay.as_ref().map_or(0, of);
        let carry = |x: &Carry<B>| of(&x.removed) + x.decay.as_ref().map_or(0, of);
        let open = self.open.as_ref();
        self.closed.as_ref().map_or(0, keys)
            + open.map_or(0, |span| keys(&span.keys) + span.carry.as_ref().map_or(0, carry))
    }
}

/// Tokens of `closed` and `open` after `seq_len` single steps.
pub fn held(seq_len: usize, window: Option<usize>) -> [usize; 2] {
    let open = seq_len % BLOCK;
    let seen = window.map_or(seq_len, |w| w - 1);
    [(seq_len - open).min(seen), open]
}

impl<B: OpBackend> Default for State<B> {
    /// Before the first token.
    fn default() -> Self {
        State { closed: None, open: None, position: 0 }
    }
}

impl<B: OpBackend> State<B> {
    /// Appends tokens and returns their outputs `[rows, group, tokens, head_dim]`.
    pub fn extend(&mut self, tokens: &Tokens<B>, visible: &Visible<B>) -> Tensor<B, 4> {
        let closed = self.closed.take().map(|keys| Span { keys, carry: None });
        let open = self.open.take();
        let past: Vec<_> = closed.iter().chain(&open).cloned().collect();
        let (out, new) = attend(tokens, visible, &past, self.position);
        self.position += tokens.len();

        let newer: Vec<_> = open.into_iter().chain(new).collect();
        let count = newer.iter().map(|span| span.keys.end() - span.keys.first).sum::<usize>();
        if count < BLOCK {
            self.closed = closed.map(|span| span.keys);
            self.open = Some(Span::join(newer, 0));
            return out;
        }
        // The next query sees w − 1 of them.
        let seen = visible.window.map_or(self.position, |w| w - 1);
        if seen > 0 {
            let all = closed.into_iter().chain(newer).collect();
            self.closed = Some(Span::join(all, self.position.saturating_sub(seen)).keys);
        }
        out
    }
}
