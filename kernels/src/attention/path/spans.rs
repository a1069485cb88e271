//! Consecutive tokens as later queries meet them.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::attention::blocks::copied;
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// Keys and values of consecutive tokens. The keys have met every transform after them up to the
/// last of these tokens: a query that stands there needs only the dot product.
#[derive(Clone, Debug)]
pub struct Keys<B: OpBackend> {
    /// Keys, `[rows, 1, tokens, head_dim]`.
    pub k: Tensor<B, 4>,
    /// Values, `[rows, 1, tokens, head_dim]`.
    pub v: Tensor<B, 4>,
    /// Σ ℓ over the tokens after each key, `[rows, group, 1, tokens]`.
    pub decay: Option<Tensor<B, 4>>,
    /// Position of the first token.
    pub first: usize,
}

impl<B: OpBackend> Keys<B> {
    /// The position after the last token.
    pub fn end(&self) -> usize {
        self.first + self.k.dims()[2]
    }

    /// The tokens at these positions.
    pub fn slice(&self, at: Range<usize>) -> Self {
        let from = at.start - self.first;
        Keys {
            k: self.k.clone().narrow(2, from, at.len()),
            v: self.v.clone().narrow(2, from, at.len()),
            decay: self.decay.as_ref().map(|x| x.clone().narrow(3, from, at.len())),
            first: at.start,
        }
    }

    /// Without the tokens before position `from`, all but the last of which may be.
    fn since(self, from: usize) -> Self {
        let from = from.clamp(self.first, self.end() - 1);
        self.slice(from..self.end())
    }

    /// The keys as they are after the tokens that `carry` describes.
    pub fn carried(self, carry: &Carry<B>) -> Self {
        Keys {
            k: self.k.clone() - self.k.mm(carry.removed.clone()),
            decay: added(self.decay, carry.decay.clone()),
            ..self
        }
    }
}

/// What some consecutive tokens do to the scores of those on their two sides.
#[derive(Clone, Debug)]
pub struct Carry<B: OpBackend> {
    /// I − P, where P is the product of the tokens' transforms in rising order,
    /// `[rows, 1, head_dim, head_dim]`.
    pub removed: Tensor<B, 4>,
    /// Σ ℓ over the tokens, `[rows, group, 1, 1]`.
    pub decay: Option<Tensor<B, 4>>,
}

impl<B: OpBackend> Carry<B> {
    /// These tokens followed by those of `later`.
    pub fn then(self, later: &Carry<B>) -> Self {
        // I − (I − A)(I − B) = A + B − A B.
        let (first, second) = (self.removed, later.removed.clone());
        Carry {
            removed: first.clone() + second.clone() - first.mm(second),
            decay: added(self.decay, later.decay.clone()),
        }
    }
}

/// Sums of ℓ over neighbouring tokens, where there is a forget gate.
pub fn added<B: OpBackend>(
    a: Option<Tensor<B, 4>>,
    b: Option<Tensor<B, 4>>,
) -> Option<Tensor<B, 4>> {
    a.zip(b).map(|(a, b)| a + b)
}

/// Consecutive tokens, as later ones meet them.
#[derive(Clone, Debug)]
pub struct Span<B: OpBackend> {
    /// Their keys and values.
    pub keys: Keys<B>,
    /// Their transforms and decays; `None` for the oldest tokens of all, which no query passes.
    pub carry: Option<Carry<B>>,
}

impl<B: OpBackend> Span<B> {
    /// Consecutive spans as one, without the keys before position `from`, in memory of its own:
    /// a slice would keep alive all that it was cut from.
    ///
    /// # Panics
    /// When there is no span, or one but the first lacks its transforms.
    pub fn join(mut spans: Vec<Span<B>>, from: usize) -> Self {
        let Some(Span { keys, mut carry }) = spans.pop() else { panic!("no span to join") };
        let mut parts = vec![keys.since(from)];
        for span in spans.into_iter().rev() {
            let Some(later) = carry else { panic!("only the oldest span may lack its transforms") };
            if span.keys.end() > from {
                parts.push(span.keys.since(from).carried(&later));
            }
            carry = span.carry.map(|carry| carry.then(&later));
        }
        parts.reverse();
        let keys = Keys {
            first: parts[0].first,
            k: joined(parts.iter().map(|x| x.k.clone()).collect(), 2),
            v: joined(parts.iter().map(|x| x.v.clone()).collect(), 2),
            decay: parts
                .iter()
                .map(|x| x.decay.clone())
                .collect::<Option<_>>()
                .map(|decays| joined(decays, 3)),
        };
        Span { keys, carry }
    }
}

/// Joins tensors into a new one.
fn joined<B: OpBackend>(mut parts: Vec<Tensor<B, 4>>, dim: usize) -> Tensor<B, 4> {
    if parts.len() == 1 { copied(parts.remove(0)) } else { Tensor::cat(parts, dim) }
}
