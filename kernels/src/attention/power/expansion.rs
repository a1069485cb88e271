//! The tiled symmetric power φ (Gelada et al., 2025, §4.1.1): φ(q)ᵀφ(k) = (qᵀk)^p.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;

use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// The products of p tiles of channels in non-decreasing order, each weighted with √(number of its
/// distinct permutations), in pieces that are expanded one at a time.
#[derive(Clone, Debug)]
pub struct Expansion {
    pub(super) pieces: Vec<Piece>,
    pub(super) head_dim: usize,
}

/// All products that share their first p − 1 tiles: (x_a ⊗ x_b ⊗ …) ⊗ (weights ⊙ x_rest).
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Channels of the first p − 1 tiles.
    pub tiles: Vec<Range<usize>>,
    /// Channels of the last factor: the last of those tiles and all after it.
    pub rest: Range<usize>,
    /// The weights of the channels in `rest`.
    pub weights: Vec<f32>,
    /// The channels of φ.
    pub place: Range<usize>,
}

/// Channels per tile: 8 for p = 2, 4 above (§4.1.1).
fn tile_width(p: u32) -> usize {
    if p == 2 { 8 } else { 4 }
}

/// Non-decreasing sequences of `len` numbers below `n`.
fn non_decreasing(len: u32, n: usize) -> Vec<Vec<usize>> {
    (0..len).fold(vec![vec![]], |shorter, _| {
        let longer = |s: Vec<usize>| {
            let first = s.last().copied().unwrap_or(0);
            (first..n).map(move |next| [&s[..], &[next]].concat())
        };
        shorter.into_iter().flat_map(longer).collect()
    })
}

/// Number of distinct permutations of a non-decreasing sequence.
fn orders(sequence: &[usize]) -> f32 {
    let mut orders = 1.0;
    let mut run = 0;
    for (at, x) in sequence.iter().enumerate() {
        run = if at > 0 && sequence[at - 1] == *x { run + 1 } else { 1 };
        orders *= (at + 1) as f32 / run as f32;
    }
    orders
}

/// A cache of expansions by p and head_dim: with p = 4 they are large.
static SHARED: Mutex<BTreeMap<(u32, usize), Arc<Expansion>>> = Mutex::new(BTreeMap::new());

impl Expansion {
    /// A cached [`Expansion::new`].
    pub fn shared(p: u32, head_dim: usize) -> Arc<Self> {
        let mut all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let made = all.entry((p, head_dim)).or_insert_with(|| Arc::new(Self::new(p, head_dim)));
        made.clone()
    }

    /// φ of `head_dim` channels; the last tile may be narrower than the others.
    pub fn new(p: u32, head_dim: usize) -> Self {
        let width = tile_width(p);
        let tiles: Vec<_> =
            (0..head_dim).step_by(width).map(|t| t..(t + width).min(head_dim)).collect();
        let mut dim = 0;
        let pieces = non_decreasing(p - 1, tiles.len()).into_iter().map(|prefix| {
            let last = prefix[prefix.len() - 1];
            let weights: Vec<f32> = (last..tiles.len())
                .flat_map(|next| {
                    let weight = orders(&[&prefix[..], &[next]].concat()).sqrt();
                    std::iter::repeat_n(weight, tiles[next].len())
                })
                .collect();
            let size = weights.len() * prefix.iter().map(|&t| tiles[t].len()).product::<usize>();
            dim += size;
            Piece {
                rest: tiles[last].start..head_dim,
                tiles: prefix.iter().map(|&t| tiles[t].clone()).collect(),
                weights,
                place: dim - size..dim,
            }
        });
        let pieces = pieces.collect();
        Expansion { pieces, head_dim }
    }

    /// D, the number of channels of φ.
    pub fn dim(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.place.end)
    }

    /// D without building the expansion: the sum over multisets of p tiles of the product of their sizes. At
    /// most `usize::MAX`.
    pub fn size(p: u32, head_dim: usize) -> usize {
        let width = tile_width(p);
        // Element n: for multisets of n tiles out of those so far.
        let mut sets = vec![0usize; p as usize + 1];
        sets[0] = 1;
        for start in (0..head_dim).step_by(width) {
            let tile = width.min(head_dim - start);
            // Ascending, so that a tile can be taken repeatedly.
            for n in 1..sets.len() {
                sets[n] = sets[n].saturating_add(sets[n - 1].saturating_mul(tile));
            }
        }
        sets[p as usize]
    }

    /// φ(x) · `sums`: `[rows, n, channels]` for `x` `[rows, n, head_dim]` and `sums`
    /// `[rows, D, channels]`.
    pub fn apply<B: OpBackend>(&self, x: &Tensor<B, 3>, sums: &Tensor<B, 3>) -> Tensor<B, 3> {
        let part = |piece: &Piece| piece.expand(x).mm(piece.of(sums));
        self.pieces.iter().map(part).reduce(|a, b| a + b).expect("head_dim is at least 1")
    }

    /// φ(x)ᵀ · `y`: `[rows, D, channels]` for `x` `[rows, n, head_dim]` and `y`
    /// `[rows, n, channels]`.
    pub fn collect<B: OpBackend>(&self, x: &Tensor<B, 3>, y: &Tensor<B, 3>) -> Tensor<B, 3> {
        let part = |piece: &Piece| piece.expand(x).transpose().mm(y.clone());
        Tensor::cat(self.pieces.iter().map(part).collect(), 1)
    }
}

impl Piece {
    fn of<B: OpBackend>(&self, sums: &Tensor<B, 3>) -> Tensor<B, 3> {
        sums.clone().narrow(1, self.place.start, self.place.len())
    }

    fn weights<B: OpBackend>(&self, device: &B::Device) -> Tensor<B, 3> {
        Tensor::<B, 1>::from_floats(&self.weights[..], device).unsqueeze()
    }

    /// This piece of φ(x), `[rows, n, place]`.
    fn expand<B: OpBackend>(&self, x: &Tensor<B, 3>) -> Tensor<B, 3> {
        let tiles = self.tiles.iter().map(|tile| channels(x, tile));
        let products = tiles.reduce(|a, b| outer(&a, &b)).expect("p is at least 2");
        outer(&products, &(channels(x, &self.rest) * self.weights(&x.device())))
    }
}

fn channels<B: OpBackend>(x: &Tensor<B, 3>, range: &Range<usize>) -> Tensor<B, 3> {
    x.clone().narrow(2, range.start, range.len())
}

/// x ⊗ y, `[rows, n, a · b]` for `[rows, n, a]` and `[rows, n, b]`.
fn outer<B: OpBackend>(x: &Tensor<B, 3>, y: &Tensor<B, 3>) -> Tensor<B, 3> {
    let part = |channel| y.clone() * x.clone().narrow(2, channel, 1);
    Tensor::cat((0..x.dims()[2]).map(part).collect(), 2)
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn wave(shape: [usize; 3]) -> Tensor<Flex, 3> {
        let data: Vec<f32> = (0..shape.iter().product()).map(|n| (n as f32 * 1.37).sin()).collect();
        Tensor::<Flex, 1>::from_floats(&data[..], &Default::default()).reshape(shape)
    }

    #[test]
    fn products_of_expansions_are_powers_of_products() {
        for (p, head_dim) in [(2, 1), (2, 8), (2, 20), (2, 64), (4, 1), (4, 4), (4, 10), (4, 16)] {
            let phi = Expansion::new(p, head_dim);
            let (q, k) = (wave([2, 5, head_dim]), wave([2, 3, head_dim]) + 0.1);
            let one_hot = Tensor::<Flex, 2>::eye(3, &Default::default()).unsqueeze::<3>();
            let sums = phi.collect(&k, &one_hot.expand([2, 3, 3]));
            assert_eq!([sums.dims()[1], Expansion::size(p, head_dim)], [phi.dim(); 2]);
            let want = q.clone().mm(k.clone().transpose()).powi_scalar(p as i32);
            let error = (phi.apply(&q, &sums) - want).abs().max().into_scalar();
            // Terms of φ cancel: rounding is relative to the vectors' norms.
            let length = |x: Tensor<Flex, 3>| (x.clone() * x).sum_dim(2).max().into_scalar();
            let largest = (length(q) * length(k)).powi(p as i32 / 2);
            assert!(error <= 1e-6 * largest, "off by {error} where a product can be {largest}");
        }
    }

    #[test]
    fn the_width_is_that_of_the_tiled_symmetric_power() {
        let binomial =
            |n: usize, k: usize| (0..k).map(|i| n - i).product::<usize>() / [1, 1, 2, 6, 24][k];
        for d in [8, 32, 64, 128] {
            assert_eq!(Expansion::new(2, d).dim(), binomial(d / 8 + 1, 2) * 64);
        }
        for d in [4, 8, 32] {
            assert_eq!(Expansion::new(4, d).dim(), binomial(d / 4 + 3, 4) * 256);
        }
    }
}
