//! Blocks of consecutive tokens as later queries attend to them.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::attention::blocks::copied;
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// Keys and values of consecutive tokens. Every transform between a key and the last of these tokens has
/// been applied to the key: a query at that position needs only the dot product.
#[derive(Clone, Debug)]
pub struct TransformedKv<B: OpBackend> {
    /// Keys, `[rows, 1, tokens, head_dim]`.
    pub k: Tensor<B, 4>,
    /// Values, `[rows, 1, tokens, head_dim]`.
    pub v: Tensor<B, 4>,
    /// Σ ℓ over the tokens after each key, `[rows, group, 1, tokens]`.
    pub decay: Option<Tensor<B, 4>>,
    /// Position of the first token.
    pub first: usize,
}

impl<B: OpBackend> TransformedKv<B> {
    /// The position after the last token.
    pub fn end(&self) -> usize {
        self.first + self.k.dims()[2]
    }

    /// The tokens at these positions.
    pub fn slice(&self, at: Range<usize>) -> Self {
        let from = at.start - self.first;
        TransformedKv {
            k: self.k.clone().narrow(2, from, at.len()),
            v: self.v.clone().narrow(2, from, at.len()),
            decay: self.decay.as_ref().map(|x| x.clone().narrow(3, from, at.len())),
            first: at.start,
        }
    }

    /// Drops the tokens before position `from`, but at least keeps the last one.
    fn since(self, from: usize) -> Self {
        let from = from.clamp(self.first, self.end() - 1);
        self.slice(from..self.end())
    }

    /// The keys transformed over the tokens of `transform`, which follow them.
    pub fn carried(self, transform: &BlockTransform<B>) -> Self {
        TransformedKv {
            k: self.k.clone() - self.k.mm(transform.removed.clone()),
            decay: added(self.decay, transform.decay.clone()),
            ..self
        }
    }
}

/// The transform over consecutive tokens, for scores between tokens on either side of them.
#[derive(Clone, Debug)]
pub struct BlockTransform<B: OpBackend> {
    /// I − P, where P is the product of the tokens' transforms in rising order,
    /// `[rows, 1, head_dim, head_dim]`.
    pub removed: Tensor<B, 4>,
    /// Σ ℓ over the tokens, `[rows, group, 1, 1]`.
    pub decay: Option<Tensor<B, 4>>,
}

impl<B: OpBackend> BlockTransform<B> {
    /// The transform over these tokens followed by those of `later`.
    pub fn then(self, later: &BlockTransform<B>) -> Self {
        // I − (I − A)(I − B) = A + B − A B.
        let (first, second) = (self.removed, later.removed.clone());
        BlockTransform {
            removed: first.clone() + second.clone() - first.mm(second),
            decay: added(self.decay, later.decay.clone()),
        }
    }
}

/// The sum of two decays; `None` without a forget gate.
pub fn added<B: OpBackend>(
    a: Option<Tensor<B, 4>>,
    b: Option<Tensor<B, 4>>,
) -> Option<Tensor<B, 4>> {
    a.zip(b).map(|(a, b)| a + b)
}

/// A block of consecutive tokens.
#[derive(Clone, Debug)]
pub struct TokenBlock<B: OpBackend> {
    /// Their keys and values.
    pub keys: TransformedKv<B>,
    /// Their transform and decay; `None` for the oldest block, which no query passes.
    pub transform: Option<BlockTransform<B>>,
}

impl<B: OpBackend> TokenBlock<B> {
    /// Joins consecutive blocks into one, without the keys before position `from`. The result has its own
    /// memory: a slice would keep the whole buffer alive.
    ///
    /// # Panics
    /// When there is no block, or a block other than the first has no transform.
    pub fn join(mut blocks: Vec<TokenBlock<B>>, from: usize) -> Self {
        let Some(TokenBlock { keys, mut transform }) = blocks.pop() else {
            panic!("no block to join")
        };
        let mut parts = vec![keys.since(from)];
        for block in blocks.into_iter().rev() {
            let Some(later) = transform else {
                panic!("only the oldest block may lack its transforms")
            };
            if block.keys.end() > from {
                parts.push(block.keys.since(from).carried(&later));
            }
            transform = block.transform.map(|transform| transform.then(&later));
        }
        parts.reverse();
        let keys = TransformedKv {
            first: parts[0].first,
            k: joined(parts.iter().map(|x| x.k.clone()).collect(), 2),
            v: joined(parts.iter().map(|x| x.v.clone()).collect(), 2),
            decay: parts
                .iter()
                .map(|x| x.decay.clone())
                .collect::<Option<_>>()
                .map(|decays| joined(decays, 3)),
        };
        TokenBlock { keys, transform }
    }
}

/// Joins tensors into a new one.
fn joined<B: OpBackend>(mut parts: Vec<Tensor<B, 4>>, dim: usize) -> Tensor<B, 4> {
    if parts.len() == 1 { copied(parts.remove(0)) } else { Tensor::cat(parts, dim) }
}
