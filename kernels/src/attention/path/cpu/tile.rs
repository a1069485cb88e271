//! Tiles of up to 16 tokens: their transforms by forward substitution, and the gradients.
//!
//! With a_ts = w_tᵀw_s: y_t = β_t (w_t − Σ_{s<t} a_ts y_s), so that H_first ⋯ H_i = I − Σ_{s≤i} y_s w_sᵀ,
//! and m_bj = β_b (w_bᵀk_j − Σ_{j<s<b} a_bs m_sj), so that H_b ⋯ H_{j+1} k_j = k_j − Σ_{j<s≤b} m_sj w_s.
//! With c_is = q_iᵀw_s for s ≤ i:
//! q̃ = q − c y, k̃ = k − mᵀ w, scores q kᵀ − c m.

use super::Sizes;
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::math;

/// Most tokens per tile. Forward substitution over longer tiles amplifies rounding where directions repeat.
pub(super) const TILE: usize = 16;

/// A tile's tokens as given: q of each head, k and w `[tokens, head_dim]`, β `[tokens]`.
pub(super) struct TileInputs<'a> {
    pub q: Vec<&'a [f32]>,
    pub k: &'a [f32],
    pub w: &'a [f32],
    pub beta: &'a [f32],
    pub sizes: Sizes,
}

/// The gradients of a tile's inputs, which are added to.
pub(super) struct TileGrads<'a> {
    pub q: Vec<&'a mut [f32]>,
    pub k: &'a mut [f32],
    pub w: &'a mut [f32],
    pub beta: &'a mut [f32],
}

/// The small matrices of a tile, `[tokens, tokens]`, row-major.
struct Solved {
    /// a, of which only s < t is used.
    a: Vec<f32>,
    /// w_bᵀk_j, of which only j < b is used.
    wk: Vec<f32>,
    /// m, zero where j ≥ b.
    m: Vec<f32>,
}

/// `dst` −= factor · x.
fn subtract(dst: &mut [f32], factor: f32, x: &[f32]) {
    dst.iter_mut().zip(x).for_each(|(dst, x)| *dst -= factor * x);
}

/// Sets the elements of a square matrix right of column `row + past` to zero.
fn lower(x: &mut [f32], n: usize, past: usize) {
    for (row, x) in x.chunks_exact_mut(n).enumerate() {
        x[(row + past).min(n)..].fill(0.0);
    }
}

impl TileInputs<'_> {
    fn len(&self) -> usize {
        self.beta.len()
    }

    fn mat<'a>(&self, x: &'a [f32]) -> Mat<'a> {
        Mat::new(x, self.len(), self.sizes.head_dim, self.sizes.head_dim)
    }

    fn square<'a>(&self, x: &'a [f32]) -> Mat<'a> {
        Mat::new(x, self.len(), self.len(), self.len())
    }

    /// x yᵀ of two matrices `[tokens, head_dim]`.
    fn products(&self, x: &[f32], y: &[f32]) -> Vec<f32> {
        let n = self.len();
        let mut dst = vec![0.0; n * n];
        gemm(&mut dst, n, 1.0, self.mat(x), self.mat(y).t(), 0.0);
        dst
    }

    fn solve(&self) -> Solved {
        let n = self.len();
        let (a, wk) = (self.products(self.w, self.w), self.products(self.w, self.k));
        let mut m = vec![0.0; n * n];
        for b in 1..n {
            let (done, row) = m.split_at_mut(b * n);
            let row = &mut row[..b];
            row.copy_from_slice(&wk[b * n..][..b]);
            for s in 1..b {
                subtract(&mut row[..s], a[b * n + s], &done[s * n..][..s]);
            }
            row.iter_mut().for_each(|x| *x *= self.beta[b]);
        }
        Solved { a, wk, m }
    }

    /// c of one head.
    fn along(&self, q: &[f32]) -> Vec<f32> {
        let mut c = self.products(q, self.w);
        lower(&mut c, self.len(), 1);
        c
    }

    /// Overwrites y, and q of each head and k with q̃ and k̃, which hold the inputs; `scores` receives each
    /// head's scores, with `stride` elements between rows.
    pub fn forward(
        &self,
        q: &mut [&mut [f32]],
        k: &mut [f32],
        y: &mut [f32],
        (scores, stride): (&mut [&mut [f32]], usize),
    ) {
        let (n, d) = (self.len(), self.sizes.head_dim);
        let Solved { a, m, .. } = self.solve();
        y.copy_from_slice(self.w);
        for t in 0..n {
            let (done, y) = y.split_at_mut(t * d);
            let y = &mut y[..d];
            for (s, done) in done.chunks_exact(d).enumerate() {
                subtract(y, a[t * n + s], done);
            }
            y.iter_mut().for_each(|y| *y *= self.beta[t]);
        }
        for ((given, q), scores) in self.q.iter().zip(q).zip(scores) {
            let c = self.along(given);
            gemm(scores, stride, 1.0, self.mat(given), self.mat(self.k).t(), 0.0);
            gemm(scores, stride, -1.0, self.square(&c), self.square(&m), 1.0);
            gemm(q, d, -1.0, self.square(&c), self.mat(y), 1.0);
        }
        gemm(k, d, -1.0, self.square(&m).t(), self.mat(self.w), 1.0);
    }

    /// Adds the gradients of the inputs, from those of q̃ (each head's), k̃, y, and the scores with `stride`
    /// elements between rows, zero where j > i. `dy` is overwritten.
    pub fn backward(
        &self,
        y: &[f32],
        (dq, dk, dy): (&[&[f32]], &[f32], &mut [f32]),
        (d_scores, stride): (&[&[f32]], usize),
        grads: &mut TileGrads,
    ) {
        let (n, d) = (self.len(), self.sizes.head_dim);
        let solved = self.solve();
        let mut dm = vec![0.0; n * n];
        let mut dc = vec![0.0; n * n];
        for (head, given) in self.q.iter().enumerate() {
            let c = self.along(given);
            let d_scores = Mat::new(d_scores[head], n, n, stride);
            let (dq_moved, into) = (self.mat(dq[head]), &mut *grads.q[head]);
            gemm(&mut dm, n, -1.0, self.square(&c).t(), d_scores, 1.0);
            gemm(&mut dc, n, -1.0, d_scores, self.square(&solved.m).t(), 0.0);
            gemm(&mut dc, n, -1.0, dq_moved, self.mat(y).t(), 1.0);
            lower(&mut dc, n, 1);
            gemm(dy, d, -1.0, self.square(&c).t(), dq_moved, 1.0);
            math::add_to(into, dq[head]);
            gemm(into, d, 1.0, d_scores, self.mat(self.k), 1.0);
            gemm(into, d, 1.0, self.square(&dc), self.mat(self.w), 1.0);
            gemm(grads.k, d, 1.0, d_scores.t(), self.mat(given), 1.0);
            gemm(grads.w, d, 1.0, self.square(&dc).t(), self.mat(given), 1.0);
        }
        math::add_to(grads.k, dk);
        gemm(&mut dm, n, -1.0, self.mat(self.w), self.mat(dk).t(), 1.0);
        gemm(grads.w, d, -1.0, self.square(&solved.m), self.mat(dk), 1.0);
        let mut da = vec![0.0; n * n];
        self.backward_m(&solved, &mut dm, &mut da, grads);
        self.backward_y(&solved.a, y, dy, &mut da, grads);
        gemm(grads.w, d, 1.0, self.square(&da), self.mat(self.w), 1.0);
        gemm(grads.w, d, 1.0, self.square(&da).t(), self.mat(self.w), 1.0);
    }

    /// The substitution of m backwards; adds to `da`.
    fn backward_m(&self, solved: &Solved, dm: &mut [f32], da: &mut [f32], grads: &mut TileGrads) {
        let (n, d) = (self.len(), self.sizes.head_dim);
        let Solved { a, wk, m } = solved;
        for b in (0..n).rev() {
            let (earlier, row) = dm.split_at_mut(b * n);
            let (row, rest) = row[..n].split_at_mut(b);
            rest.fill(0.0);
            let mut d_beta = math::dot(row, &wk[b * n..][..b]);
            for s in 0..b {
                let along = math::dot(&row[..s], &m[s * n..][..s]);
                d_beta -= a[b * n + s] * along;
                da[b * n + s] -= self.beta[b] * along;
            }
            grads.beta[b] += d_beta;
            row.iter_mut().for_each(|x| *x *= self.beta[b]);
            for s in 1..b {
                subtract(&mut earlier[s * n..][..s], a[b * n + s], &row[..s]);
            }
        }
        // Now the gradient of w_bᵀk_j.
        gemm(grads.w, d, 1.0, self.square(dm), self.mat(self.k), 1.0);
        gemm(grads.k, d, 1.0, self.square(dm).t(), self.mat(self.w), 1.0);
    }

    /// The substitution of y backwards; adds to `da`.
    fn backward_y(
        &self,
        a: &[f32],
        y: &[f32],
        dy: &mut [f32],
        da: &mut [f32],
        grads: &mut TileGrads,
    ) {
        let (n, d) = (self.len(), self.sizes.head_dim);
        for t in (0..n).rev() {
            let (earlier, dy) = dy.split_at_mut(t * d);
            let dy = &mut dy[..d];
            let mut d_beta = math::dot(dy, &self.w[t * d..][..d]);
            for (s, y) in y.chunks_exact(d).enumerate().take(t) {
                let along = math::dot(dy, y);
                d_beta -= a[t * n + s] * along;
                da[t * n + s] -= self.beta[t] * along;
            }
            grads.beta[t] += d_beta;
            dy.iter_mut().for_each(|x| *x *= self.beta[t]);
            for (s, earlier) in earlier.chunks_exact_mut(d).enumerate() {
                subtract(earlier, a[t * n + s], dy);
            }
            math::add_to(&mut grads.w[t * d..][..d], dy);
        }
    }
}
