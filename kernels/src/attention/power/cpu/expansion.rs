//! φ on slices, for the CPU kernel: expanded piece by piece for one tile of tokens, never stored.

use crate::attention::power::expansion::{Expansion, Piece};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::math;

/// Channels of φ whose products are summed in f32. A query that is nearly orthogonal to the keys reads a
/// small difference of large terms, so longer sums are in f64.
const SUMMED: usize = 256;

/// Buffers that are reused from piece to piece.
#[derive(Default)]
pub(super) struct ExpansionScratch {
    phi: Vec<f32>,
    part: Vec<f32>,
    total: Vec<f64>,
    token: TokenScratch,
}

/// The factors of a piece of one token, and gradients.
#[derive(Default)]
struct TokenScratch {
    /// Products of the first tile, of the first two, ….
    products: Vec<Vec<f32>>,
    /// The weighted last factor.
    rest: Vec<f32>,
    d_product: Vec<f32>,
    d_shorter: Vec<f32>,
    d_rest: Vec<f32>,
}

impl Expansion {
    /// φ(x) · `sums` into `out`, `[n, width]`, for `x` `[n, head_dim]` and `sums` `[D, width]`.
    pub(super) fn apply_rows(
        &self,
        x: &[f32],
        sums: &[f32],
        width: usize,
        out: &mut Vec<f32>,
        scratch: &mut ExpansionScratch,
    ) {
        let n = x.len() / self.head_dim;
        let mut part = std::mem::take(&mut scratch.part);
        let mut total = std::mem::take(&mut scratch.total);
        part.resize(n * width, 0.0);
        total.clear();
        total.resize(n * width, 0.0);
        for piece in &self.pieces {
            self.expand_rows(piece, x, scratch);
            let size = piece.place.len();
            for first in (0..size).step_by(SUMMED) {
                let summed = SUMMED.min(size - first);
                let phi = Mat::new(&scratch.phi[first..], n, summed, size);
                let sums = &sums[(piece.place.start + first) * width..];
                gemm(&mut part, width, 1.0, phi, Mat::new(sums, summed, width, width), 0.0);
                total.iter_mut().zip(&part).for_each(|(total, x)| *total += f64::from(*x));
            }
        }
        out.clear();
        out.extend(total.iter().map(|&x| x as f32));
        (scratch.part, scratch.total) = (part, total);
    }

    /// `sums` += φ(x)ᵀ · `y` for `y` `[n, width]` and `sums` `[D, width]`.
    pub(super) fn add_collected(
        &self,
        x: &[f32],
        y: &[f32],
        sums: &mut [f32],
        scratch: &mut ExpansionScratch,
    ) {
        let n = x.len() / self.head_dim;
        let width = y.len() / n;
        for piece in &self.pieces {
            let phi = self.expand_rows(piece, x, scratch);
            let place = &mut sums[piece.place.start * width..piece.place.end * width];
            gemm(place, width, 1.0, phi.t(), Mat::new(y, n, width, width), 1.0);
        }
    }

    /// `grad` += the gradient of Σ `y` ⊙ (φ(x) · `sums`) = Σ `sums` ⊙ (φ(x)ᵀ · `y`) with respect to `x`.
    pub(super) fn add_gradient(
        &self,
        x: &[f32],
        sums: &[f32],
        y: &[f32],
        grad: &mut [f32],
        scratch: &mut ExpansionScratch,
    ) {
        let d = self.head_dim;
        let n = x.len() / d;
        let width = y.len() / n;
        let ExpansionScratch { phi: d_phi, token, .. } = scratch;
        for piece in &self.pieces {
            let size = piece.place.len();
            d_phi.resize(n * size, 0.0);
            let y = Mat::new(y, n, width, width);
            gemm(d_phi, size, 1.0, y, piece.rows_of(sums, width).t(), 0.0);
            let rows = x.chunks_exact(d).zip(grad.chunks_exact_mut(d));
            for ((x, grad), d_phi) in rows.zip(d_phi.chunks_exact(size)) {
                piece.vjp(x, d_phi, grad, token);
            }
        }
    }

    /// A piece of φ(x) for every row of `x`.
    fn expand_rows<'a>(
        &self,
        piece: &Piece,
        x: &[f32],
        scratch: &'a mut ExpansionScratch,
    ) -> Mat<'a> {
        let size = piece.place.len();
        let n = x.len() / self.head_dim;
        let ExpansionScratch { phi, token, .. } = scratch;
        phi.resize(n * size, 0.0);
        for (x, phi) in x.chunks_exact(self.head_dim).zip(phi.chunks_exact_mut(size)) {
            piece.factors(x, token);
            let rest = &token.rest;
            let products = &token.products[piece.tiles.len() - 1];
            for (product, phi) in products.iter().zip(phi.chunks_exact_mut(rest.len())) {
                phi.iter_mut().zip(rest).for_each(|(phi, rest)| *phi = product * rest);
            }
        }
        Mat::new(phi, n, size, size)
    }
}

impl Piece {
    fn rows_of<'a>(&self, sums: &'a [f32], width: usize) -> Mat<'a> {
        Mat::new(&sums[self.place.start * width..], self.place.len(), width, width)
    }

    /// The products of the first tiles of one token, and its weighted last factor.
    fn factors(&self, x: &[f32], scratch: &mut TokenScratch) {
        let TokenScratch { products, rest, .. } = scratch;
        products.resize(self.tiles.len(), vec![]);
        for (level, tile) in self.tiles.iter().enumerate() {
            let (shorter, product) = products.split_at_mut(level);
            let (tile, product) = (&x[tile.clone()], &mut product[0]);
            product.clear();
            match shorter.last() {
                None => product.extend_from_slice(tile),
                Some(shorter) => {
                    shorter.iter().for_each(|left| product.extend(tile.iter().map(|x| left * x)));
                }
            }
        }
        rest.clear();
        rest.extend(x[self.rest.clone()].iter().zip(&self.weights).map(|(x, weight)| x * weight));
    }

    /// Adds to `grad` the vector-Jacobian product of this piece of one token for `d_phi`.
    fn vjp(&self, x: &[f32], d_phi: &[f32], grad: &mut [f32], scratch: &mut TokenScratch) {
        self.factors(x, scratch);
        let TokenScratch { products, rest, d_product, d_shorter, d_rest } = scratch;
        d_rest.clear();
        d_rest.resize(rest.len(), 0.0);
        outer_gradients(&products[self.tiles.len() - 1], rest, d_phi, d_product, d_rest);
        let weighted = d_rest.iter().zip(&self.weights);
        grad[self.rest.clone()].iter_mut().zip(weighted).for_each(|(grad, (d, w))| *grad += d * w);
        for level in (1..self.tiles.len()).rev() {
            let tile = self.tiles[level].clone();
            let d_tile = &mut grad[tile.clone()];
            outer_gradients(&products[level - 1], &x[tile], d_product, d_shorter, d_tile);
            std::mem::swap(d_product, d_shorter);
        }
        math::add_to(&mut grad[self.tiles[0].clone()], d_product);
    }
}

/// The gradients of x and y from that of x ⊗ y: writes x's to `d_x`, adds y's to `d_y`.
fn outer_gradients(x: &[f32], y: &[f32], d: &[f32], d_x: &mut Vec<f32>, d_y: &mut [f32]) {
    d_x.clear();
    for (x, d) in x.iter().zip(d.chunks_exact(y.len())) {
        d_x.push(math::dot(d, y));
        d_y.iter_mut().zip(d).for_each(|(d_y, d)| *d_y += d * x);
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::tensor::Tensor;

    use super::*;

    type Ad = Autodiff<Flex>;

    fn wave(shape: [usize; 3], step: f32) -> Tensor<Ad, 3> {
        let data: Vec<f32> = (0..shape.iter().product()).map(|n| (n as f32 * step).sin()).collect();
        let x = Tensor::<Ad, 1>::from_floats(&data[..], &Default::default());
        x.reshape(shape).require_grad()
    }

    fn to_vec(x: Tensor<Flex, 3>) -> Vec<f32> {
        x.into_data().to_vec().unwrap()
    }

    fn assert_equal(got: &[f32], want: &[f32]) {
        let size = want.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 3e-6 * size, "{got} where {want} is right");
        }
    }

    #[test]
    fn slices_give_what_tensors_give() {
        for (p, d) in [(2, 1), (2, 20), (4, 1), (4, 10)] {
            let phi = Expansion::new(p, d);
            let (x, y) = (wave([1, 5, d], 1.37), wave([1, 5, 3], 0.91));
            let sums = wave([1, phi.dim(), 3], 2.11);
            let read = phi.apply(&x, &sums);
            let grads = (read.clone() * y.clone()).sum().backward();
            let (want, d_x) = (to_vec(read.inner()), to_vec(x.grad(&grads).unwrap()));
            let d_sums = to_vec(sums.grad(&grads).unwrap());
            let [x, sums, y] = [x, sums, y].map(|x| to_vec(x.inner()));

            let (mut scratch, mut got) = (ExpansionScratch::default(), vec![]);
            phi.apply_rows(&x, &sums, 3, &mut got, &mut scratch);
            assert_equal(&got, &want);
            let mut got = vec![0.0; x.len()];
            phi.add_gradient(&x, &sums, &y, &mut got, &mut scratch);
            assert_equal(&got, &d_x);
            let mut got = vec![0.0; sums.len()];
            phi.add_collected(&x, &y, &mut got, &mut scratch);
            assert_equal(&got, &d_sums);
        }
    }
}
