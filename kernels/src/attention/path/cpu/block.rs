//! Blocks of up to 64 tokens: tiles merged in pairs, through their transforms as factors, I − Σ y_t w_tᵀ.

use std::ops::Range;

use super::tile::{TILE, TileGrads, TileInputs};
use super::{PathRow, Sizes};
use crate::cpu::gemm::{Mat, gemm};

/// Most tokens per block. From this length on, transforms are head_dim² matrices.
pub(super) const BLOCK: usize = 64;

/// A block's vectors, moved to the ends of the tiles of one size: queries `[group, tokens, head_dim]` and y to
/// before the first token of their tile, keys to its last; k and y are `[tokens, head_dim]`.
#[derive(Clone)]
pub(super) struct Moved {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub y: Vec<f32>,
}

/// A block of consecutive tokens after its own transforms.
pub(super) struct TokenBlock {
    /// Positions.
    pub tokens: Range<usize>,
    /// For tiles of 16 tokens, then of twice as many, up to the whole block.
    moved: Vec<Moved>,
    /// Scores inside the block, `[group, tokens, tokens]`; meaningless where the key is later.
    pub scores: Vec<f32>,
}

/// The gradients of a row's inputs, beside those of v and of the log decays.
pub(super) struct RowGrads<'a> {
    pub q: &'a mut [f32],
    pub k: &'a mut [f32],
    pub w: &'a mut [f32],
    pub beta: &'a mut [f32],
}

/// Two tiles of a block, the second of which may be shorter.
struct Pair {
    first: Range<usize>,
    second: Range<usize>,
}

/// The pairs of tiles of `size` tokens among `tokens`.
fn pairs(tokens: usize, size: usize) -> impl Iterator<Item = Pair> {
    (0..tokens).step_by(2 * size).filter(move |first| first + size < tokens).map(move |first| {
        let middle = first + size;
        Pair { first: first..middle, second: middle..(middle + size).min(tokens) }
    })
}

/// The rows `at` of a matrix with `d` columns.
fn rows<'a>(x: &'a [f32], at: &Range<usize>, d: usize) -> &'a [f32] {
    &x[at.start * d..at.end * d]
}

fn rows_mut<'a>(x: &'a mut [f32], at: &Range<usize>, d: usize) -> &'a mut [f32] {
    &mut x[at.start * d..at.end * d]
}

/// A row-major matrix with `cols` columns.
pub(super) fn mat(x: &[f32], cols: usize) -> Mat<'_> {
    Mat::new(x, x.len() / cols, cols, cols)
}

/// x aᵀ.
fn along(x: &[f32], a: &[f32], d: usize) -> Vec<f32> {
    let (n, r) = (x.len() / d, a.len() / d);
    let mut c = vec![0.0; n * r];
    gemm(&mut c, r, 1.0, mat(x, d), mat(a, d).t(), 0.0);
    c
}

/// x ← x − (x aᵀ) b, from its value before in `from`.
fn cross(x: &mut [f32], from: &[f32], [a, b]: [&[f32]; 2], d: usize) {
    let c = along(from, a, d);
    gemm(x, d, -1.0, mat(&c, a.len() / d), mat(b, d), 1.0);
}

/// The gradients of [`cross`]: that of its result in `grad` becomes that of `from`, those of a and b are
/// added to.
fn cross_backward(
    grad: &mut [f32],
    from: &[f32],
    [a, b]: [&[f32]; 2],
    [da, db]: [&mut [f32]; 2],
    d: usize,
) {
    let r = a.len() / d;
    let (c, dc) = (along(from, a, d), along(grad, b, d));
    gemm(db, d, -1.0, mat(&c, r).t(), mat(grad, d), 1.0);
    gemm(da, d, -1.0, mat(&dc, r).t(), mat(from, d), 1.0);
    gemm(grad, d, -1.0, mat(&dc, r), mat(a, d), 1.0);
}

impl TokenBlock {
    pub fn new(row: &PathRow, tokens: Range<usize>) -> Self {
        let Sizes { group, head_dim: d, .. } = row.sizes;
        let n = tokens.len();
        let mut block = TokenBlock { tokens, moved: vec![], scores: vec![0.0; group * n * n] };
        let mut moved = Moved {
            q: (0..group).flat_map(|h| row.q_of(h, &block.tokens).iter().copied()).collect(),
            k: row.k_of(&block.tokens).to_vec(),
            y: vec![0.0; n * d],
        };
        for at in block.tiles() {
            let mut q: Vec<_> =
                moved.q.chunks_exact_mut(n * d).map(|q| rows_mut(q, &at, d)).collect();
            let corner = at.start * n + at.start;
            let mut scores: Vec<_> =
                block.scores.chunks_exact_mut(n * n).map(|s| &mut s[corner..]).collect();
            let (k, y) = (rows_mut(&mut moved.k, &at, d), rows_mut(&mut moved.y, &at, d));
            row.tile(block.tokens.start, &at).forward(&mut q, k, y, (&mut scores, n));
        }
        block.moved.push(moved);
        let mut size = TILE;
        while size < n {
            block.merge(row, size);
            size *= 2;
        }
        block
    }

    /// The tiles, as ranges inside the block.
    fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let n = self.tokens.len();
        (0..n).step_by(TILE).map(move |first| first..(first + TILE).min(n))
    }

    /// The vectors moved to the ends of the block.
    pub fn last(&self) -> &Moved {
        self.moved.last().expect("a block has its tiles")
    }

    /// I − P of the block, Σ y_t w_tᵀ, `[head_dim, head_dim]`.
    pub fn removed(&self, row: &PathRow) -> Vec<f32> {
        let d = row.sizes.head_dim;
        let mut removed = vec![0.0; d * d];
        gemm(&mut removed, d, 1.0, mat(&self.last().y, d).t(), mat(row.w_of(&self.tokens), d), 0.0);
        removed
    }

    /// Scores between the tiles of each pair, and the vectors moved to the ends of the pair.
    fn merge(&mut self, row: &PathRow, size: usize) {
        let Sizes { group, head_dim: d, .. } = row.sizes;
        let n = self.tokens.len();
        let w = row.w_of(&self.tokens);
        let mut new = self.last().clone();
        let old = self.moved.last().expect("a block has its tiles");
        for Pair { first, second } in pairs(n, size) {
            let [w1, w2] = [&first, &second].map(|at| rows(w, at, d));
            let [y1, y2] = [&first, &second].map(|at| rows(&old.y, at, d));
            let keys = rows(&old.k, &first, d);
            for head in 0..group {
                let at = head * n + second.start..head * n + second.end;
                let queries = rows(&old.q, &at, d);
                let corner = &mut self.scores[(head * n + second.start) * n + first.start..];
                gemm(corner, n, 1.0, mat(queries, d), mat(keys, d).t(), 0.0);
                cross(rows_mut(&mut new.q, &at, d), queries, [w1, y1], d);
            }
            cross(rows_mut(&mut new.y, &second, d), y2, [w1, y1], d);
            cross(rows_mut(&mut new.k, &first, d), keys, [y2, w2], d);
        }
        self.moved.push(new);
    }

    /// Adds the gradients of the inputs, from those of the vectors moved to the ends of the block and of the
    /// scores, zero where the key is later.
    pub fn backward(
        &self,
        row: &PathRow,
        mut moved: Moved,
        d_scores: &[f32],
        grads: &mut RowGrads,
    ) {
        let (n, mut size) = (self.tokens.len(), TILE);
        for _ in 2..self.moved.len() {
            size *= 2;
        }
        for old in self.moved[..self.moved.len() - 1].iter().rev() {
            for pair in pairs(n, size) {
                self.pair_backward(row, &pair, old, d_scores, &mut moved, grads);
            }
            size /= 2;
        }
        for at in self.tiles() {
            self.tile_backward(row, &at, d_scores, &mut moved, grads);
        }
    }

    /// The gradients in `moved` before a pair was merged, from those after.
    fn pair_backward(
        &self,
        row: &PathRow,
        Pair { first, second }: &Pair,
        old: &Moved,
        d_scores: &[f32],
        moved: &mut Moved,
        grads: &mut RowGrads,
    ) {
        let Sizes { group, head_dim: d, .. } = row.sizes;
        let n = self.tokens.len();
        let w = row.w_of(&self.tokens);
        let [w1, w2] = [first, second].map(|at| rows(w, at, d));
        let [y1, y2] = [first, second].map(|at| rows(&old.y, at, d));
        let start = self.tokens.start * d;
        let dw = &mut grads.w[start..start + n * d];
        let (dw1, dw2) = dw[first.start * d..second.end * d].split_at_mut(first.len() * d);
        let dy = &mut moved.y[first.start * d..second.end * d];
        let (dy1, dy2) = dy.split_at_mut(first.len() * d);
        cross_backward(dy2, y2, [w1, y1], [dw1, dy1], d);
        let keys = rows(&old.k, first, d);
        let dk = rows_mut(&mut moved.k, first, d);
        cross_backward(dk, keys, [y2, w2], [dy2, dw2], d);
        for head in 0..group {
            let at = head * n + second.start..head * n + second.end;
            let (queries, dq) = (rows(&old.q, &at, d), rows_mut(&mut moved.q, &at, d));
            cross_backward(dq, queries, [w1, y1], [dw1, dy1], d);
            let corner = &d_scores[(head * n + second.start) * n + first.start..];
            let corner = Mat::new(corner, second.len(), first.len(), n);
            gemm(dq, d, 1.0, corner, mat(keys, d), 1.0);
            gemm(dk, d, 1.0, corner.t(), mat(queries, d), 1.0);
        }
    }

    fn tile_backward(
        &self,
        row: &PathRow,
        at: &Range<usize>,
        d_scores: &[f32],
        moved: &mut Moved,
        grads: &mut RowGrads,
    ) {
        let Sizes { group, head_dim: d, seq_len, .. } = row.sizes;
        let n = self.tokens.len();
        let tokens = self.tokens.start + at.start..self.tokens.start + at.end;
        let corner = at.start * n + at.start;
        let d_scores: Vec<_> = d_scores.chunks_exact(n * n).map(|s| &s[corner..]).collect();
        let dq: Vec<_> = moved.q.chunks_exact(n * d).map(|q| rows(q, at, d)).collect();
        assert_eq!(dq.len(), group);
        let of_moved = (&dq[..], rows(&moved.k, at, d), rows_mut(&mut moved.y, at, d));
        let mut into = TileGrads {
            q: grads.q.chunks_exact_mut(seq_len * d).map(|q| rows_mut(q, &tokens, d)).collect(),
            k: rows_mut(grads.k, &tokens, d),
            w: rows_mut(grads.w, &tokens, d),
            beta: &mut grads.beta[tokens.clone()],
        };
        let y = rows(&self.moved[0].y, at, d);
        row.tile(self.tokens.start, at).backward(y, of_moved, (&d_scores, n), &mut into);
    }
}

impl PathRow<'_> {
    /// The inputs of the tile at these tokens of the block that starts at `first`.
    fn tile(&self, first: usize, at: &Range<usize>) -> TileInputs<'_> {
        let tokens = first + at.start..first + at.end;
        TileInputs {
            q: (0..self.sizes.group).map(|h| self.q_of(h, &tokens)).collect(),
            k: self.k_of(&tokens),
            w: self.w_of(&tokens),
            beta: &self.beta[tokens],
            sizes: self.sizes,
        }
    }
}
