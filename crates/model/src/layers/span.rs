//! Which part of its rows a call computes.
//!
//! Ranks that share rows compute a part of the tokens each: embeddings, projections, MLPs and the loss need no other
//! tokens. Attention needs all tokens of a row, but only its own heads: its inputs are exchanged, so that each rank has
//! all tokens of a part of the heads, and its outputs are exchanged back (Jacobs et al., "DeepSpeed Ulysses", 2023).
//! Short convolutions and token shifts read the last inputs of the part before.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor};
use longwall_kernels::attention::{
    AttentionConfig, AttentionShape, Division, DocumentStarts, Inputs,
};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::all_to_all::{Peers, all_to_all};

use super::attention::split_heads;
use super::time::Preceding;

/// Which part of its rows a call computes.
#[derive(Clone, Debug)]
pub enum Span<B: OpBackend> {
    /// Whole rows, of one or several packed documents.
    Whole(DocumentStarts<B>),
    /// This rank's part of rows that several ranks share.
    Part(SharedRows<B>),
}

impl<B: OpBackend> Span<B> {
    /// Where the documents of the whole rows start.
    pub fn documents(&self) -> &DocumentStarts<B> {
        match self {
            Span::Whole(documents) => documents,
            Span::Part(rows) => &rows.documents,
        }
    }

    /// What precedes the call's tokens.
    pub(super) fn preceding<H>(&self) -> Preceding<'_, B, H> {
        match self {
            Span::Whole(documents) => Preceding::Nothing(documents),
            Span::Part(rows) => Preceding::Part(rows),
        }
    }

    /// The place in its row of the first of a call's `n` tokens, and where the documents of these tokens start in their
    /// rows.
    pub(crate) fn positions(&self, n: usize) -> (usize, DocumentStarts<B>) {
        match self {
            Span::Whole(documents) => (0, documents.clone()),
            Span::Part(rows) => {
                let first = rows.peers.rank() * n;
                let documents = rows.documents.clone();
                (first, documents.map(|starts| starts.narrow(1, first, n)))
            }
        }
    }

    /// Causal attention over whole rows: `inputs` are those of the call's tokens, and so is the result,
    /// `[batch, heads, n, value_dim]`.
    ///
    /// # Panics
    /// When ranks share rows and the heads have no such parts, see [`AttentionConfig::head_parts`].
    pub(super) fn attend(
        &self,
        variant: &AttentionConfig,
        shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Tensor<B, 4> {
        match self {
            Span::Whole(documents) => variant.attend(shape, inputs, documents.clone()),
            Span::Part(rows) => rows.attend(variant, shape, inputs),
        }
    }
}

impl<B: OpBackend> Span<Autodiff<B>> {
    /// The same without a graph.
    pub fn inner(&self) -> Span<B> {
        let inner = |documents: &DocumentStarts<Autodiff<B>>| documents.clone().map(Tensor::inner);
        match self {
            Span::Whole(documents) => Span::Whole(inner(documents)),
            Span::Part(SharedRows { peers, documents, own_documents }) => Span::Part(SharedRows {
                peers: Arc::clone(peers),
                documents: inner(documents),
                own_documents: inner(own_documents),
            }),
        }
    }
}

/// This rank's part of `len` elements, such as the tokens of shared rows: the n-th of equal parts for rank n.
///
/// # Panics
/// When the ranks do not divide `len`.
pub fn own_part(peers: &dyn Peers, len: usize) -> Range<usize> {
    let (rank, size) = (peers.rank(), peers.size());
    assert!(len.is_multiple_of(size), "{len} elements for {size} ranks");
    let part = len / size;
    rank * part..(rank + 1) * part
}

/// Rows that several ranks share. Rank n has the n-th of equal parts of their tokens.
#[derive(Clone, Debug)]
pub struct SharedRows<B: OpBackend> {
    peers: Arc<dyn Peers>,
    /// Of the whole rows.
    documents: DocumentStarts<B>,
    /// Of this rank's tokens, as places among them; −1 of documents that began before.
    own_documents: DocumentStarts<B>,
}

impl<B: OpBackend> SharedRows<B> {
    /// Rows that `peers` share, with the `documents` of the whole rows, `[batch, seq_len]`.
    ///
    /// # Panics
    /// As [`own_part`], if there are documents.
    pub fn new(peers: Arc<dyn Peers>, documents: DocumentStarts<B>) -> Self {
        let own_documents = documents.clone().map(|starts: Tensor<B, 2, Int>| {
            let own = own_part(peers.as_ref(), starts.dims()[1]);
            (starts.narrow(1, own.start, own.len()) - own.start as i64).clamp_min(-1)
        });
        SharedRows { peers, documents, own_documents }
    }

    /// Where the documents of this rank's tokens start among them, `[batch, n]`; −1 of those that began before.
    pub(super) fn own_documents(&self) -> &DocumentStarts<B> {
        &self.own_documents
    }

    /// What the rank of the part before passes as `x`, `[batch, n, channels]`; 0 for the first part.
    pub(super) fn of_part_before(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let (rank, size) = (self.peers.rank(), self.peers.size());
        // The last sends to the first, which puts 0 in place of it, so that all ranks have the same graph and exchange
        // the same gradients.
        let next = (rank + 1) % size;
        let zeros = x.zeros_like();
        let to = |other| if other == next { x.clone() } else { zeros.clone() };
        let sent = Tensor::stack::<4>((0..size).map(to).collect(), 0);
        let got = all_to_all(sent, &self.peers).narrow(0, (rank + size - 1) % size, 1);
        let first = Tensor::<B, 1, Int>::full([1], i64::from(rank == 0), &x.device()).equal_elem(1);
        let first = first.reshape([1, 1, 1, 1]).expand(got.dims());
        got.mask_fill(first, 0.0).squeeze_dim(0)
    }

    /// As [`Span::attend`].
    fn attend(
        &self,
        variant: &AttentionConfig,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
    ) -> Tensor<B, 4> {
        let part = variant.head_parts(shape, self.peers.size());
        let part = part.expect("the heads were to be divided");
        let heads = |x: Tensor<B, 4>, views, division| {
            let [batch, heads, n, channels] = x.dims();
            let x = x.swap_dims(1, 2).reshape([batch, n, heads * channels]);
            split_heads(self.all_tokens(x, views, division), channels)
        };
        let own = |(x, division): (Tensor<B, 1>, &Division)| match division {
            Division::Shared => x,
            Division::Split => {
                let own = own_part(self.peers.as_ref(), x.dims()[0]);
                x.narrow(0, own.start, own.len())
            }
        };
        let projections = projections.into_iter().zip(&part.projections);
        let inputs = Inputs {
            q: heads(q, variant.views(), part.q),
            k: heads(k, variant.views(), part.k),
            v: heads(v, 1, Division::Split),
            projections: projections
                .map(|(x, division)| self.all_tokens(x, 1, *division))
                .collect(),
            parameters: parameters.into_iter().zip(&part.parameters).map(own).collect(),
        };
        self.all_heads(part.variant.attend(&part.shape, inputs, self.documents.clone()))
    }

    /// Gathers the tokens of all ranks: `x` `[batch, n, features]` to `[batch, size · n, features]`, or if features are
    /// split to `[batch, size · n, features / size]`, in which each of `views` equal pieces of the features is split.
    fn all_tokens(&self, x: Tensor<B, 3>, views: usize, division: Division) -> Tensor<B, 3> {
        let ([batch, n, features], size) = (x.dims(), self.peers.size());
        match division {
            Division::Split => {
                let part = features / views / size;
                let x = x.reshape([batch, n, views, size, part]).permute([3, 0, 1, 2, 4]);
                let x = all_to_all(x, &self.peers).permute([1, 0, 2, 3, 4]);
                x.reshape([batch, size * n, views * part])
            }
            Division::Shared => {
                let x = x.unsqueeze::<4>().expand([size, batch, n, features]);
                let x = all_to_all(x, &self.peers).permute([1, 0, 2, 3]);
                x.reshape([batch, size * n, features])
            }
        }
    }

    /// Gathers the heads of all ranks: `o` `[batch, heads / size, size · n, channels]` to
    /// `[batch, heads, n, channels]`.
    fn all_heads(&self, o: Tensor<B, 4>) -> Tensor<B, 4> {
        let ([batch, heads, tokens, channels], size) = (o.dims(), self.peers.size());
        let (n, part) = (tokens / size, heads * channels);
        let o = o.swap_dims(1, 2).reshape([batch, size, n, part]).permute([1, 0, 2, 3]);
        let o = all_to_all(o, &self.peers).permute([1, 2, 0, 3]);
        split_heads(o.reshape([batch, n, size * part]), channels)
    }
}
