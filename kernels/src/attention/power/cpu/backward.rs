//! The backward pass of a row.

use super::{Buffers, PowerRow, RowSizes, RowSums, TILE_TOKENS, TokenTile, powered};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::math;

/// What the backward pass reads for a row beside its inputs.
pub(super) struct Upstream<'a> {
    pub o: &'a [f32],
    pub root: &'a [f32],
    pub total: &'a [f32],
    pub grad: &'a [f32],
}

/// The gradients of a row.
pub(super) struct Grads<'a> {
    pub q: &'a mut [f32],
    pub k: &'a mut [f32],
    pub v: &'a mut [f32],
    pub log_decay: &'a mut [f32],
}

impl PowerRow<'_> {
    pub(super) fn backward(&self, upstream: &Upstream, grads: &mut Grads) {
        let mut buffers = Buffers::default();
        let chunk = self.chunk();
        let starts: Vec<_> = (0..self.sizes.seq_len).step_by(chunk).collect();
        let mut pasts: Vec<Option<RowSums>> = vec![None; starts.len()];
        for at in 2..starts.len() {
            let (first, end) = (starts[at - 2], starts[at - 1]);
            pasts[at] = Some(self.fold(pasts[at - 1].as_ref(), first, end, &mut buffers));
        }
        // Gradient of the sums that the next chunk reads.
        let mut later: Option<Vec<f32>> = None;
        for (at, &start) in starts.iter().enumerate().rev() {
            let past = pasts[at].take();
            let mut d_past = past.as_ref().map(|past| vec![0.0; past.sums.len()]);
            for tile in self.tiles(start) {
                let read = past.as_ref().zip(d_past.as_deref_mut());
                self.backward_tile(&tile, read, upstream, &mut buffers, grads);
            }
            if let Some(later) = later.take() {
                let (first, end) = (starts[at - 1], start);
                self.backward_fold(past.as_ref(), [first, end], &later, &mut buffers, grads);
                if let Some(d_past) = &mut d_past {
                    let decay_over_chunk = powered(self.decay_root(first, end), self.op.p);
                    d_past
                        .iter_mut()
                        .zip(&later)
                        .for_each(|(d, later)| *d += later * decay_over_chunk);
                }
            }
            later = d_past;
        }
    }

    /// The gradients of a tile, for all heads of the group.
    fn backward_tile(
        &self,
        tile: &TokenTile,
        mut read: Option<(&RowSums, &mut [f32])>,
        upstream: &Upstream,
        buffers: &mut Buffers,
        grads: &mut Grads,
    ) {
        self.decays(tile, &mut buffers.decay);
        buffers.d_logs.clear();
        buffers.d_logs.resize(tile.n * tile.cols(), 0.0);
        buffers.d_reach.clear();
        buffers.d_reach.resize(tile.n, 0.0);
        for head in 0..self.sizes.group {
            self.upstream_of(head, tile, upstream, &mut buffers.d_read);
            let roots = &upstream.root[self.at(head, tile)];
            self.backward_near(head, tile, roots, buffers, grads);
            if let Some((past, d_past)) = &mut read {
                self.backward_read(head, tile, roots, (past, d_past), buffers, grads);
            }
        }
        self.decay_gradients(tile, &buffers.d_logs, &buffers.d_reach, grads.log_decay);
    }

    /// Gradients of the sum over values and of the total, `[n, value_dim + 1]`: do / total and
    /// −doᵀo / total.
    fn upstream_of(
        &self,
        head: usize,
        tile: &TokenTile,
        upstream: &Upstream,
        d_read: &mut Vec<f32>,
    ) {
        let values = self.sizes.value_dim;
        let at = self.at(head, tile);
        d_read.resize(tile.n * (values + 1), 0.0);
        for (row, d) in at.zip(d_read.chunks_exact_mut(values + 1)) {
            let of = row * values..(row + 1) * values;
            let inverse = 1.0 / upstream.total[row];
            let grad = &upstream.grad[of.clone()];
            d[..values].iter_mut().zip(grad).for_each(|(d, grad)| *d = grad * inverse);
            d[values] = -math::dot(&d[..values], &upstream.o[of]);
        }
    }

    /// Gradients through the keys that a tile of one head reads directly.
    fn backward_near(
        &self,
        head: usize,
        tile: &TokenTile,
        roots: &[f32],
        buffers: &mut Buffers,
        grads: &mut Grads,
    ) {
        let RowSizes { head_dim: d, value_dim: values, .. } = self.sizes;
        let (n, cols) = (tile.n, tile.cols());
        let Buffers { decay, weights, slopes, d_logs, d_weights, d_read, .. } = buffers;
        self.roots_of_weights(head, tile, decay, weights);
        slopes.resize(n * cols, 0.0);
        for (i, root) in roots.iter().enumerate() {
            let at = i * cols..(i + 1) * cols;
            let inverse = 1.0 / root;
            let slopes = slopes[at.clone()].iter_mut().zip(&decay[at.clone()]);
            for (t, (slope, decay)) in weights[at].iter_mut().zip(slopes) {
                let x = *t * inverse;
                let shorter = if self.op.p == 2 { x } else { x * x * x };
                *slope = shorter * self.op.p as f32 * (decay * inverse);
                *t = shorter * x;
            }
        }
        let d_sum = Mat::new(d_read, n, values, values + 1);
        let weighted = Mat::new(weights, n, cols, cols);
        gemm(&mut grads.v[tile.lo * values..], values, 1.0, weighted.t(), d_sum, 1.0);
        d_weights.resize(n * cols, 0.0);
        gemm(d_weights, cols, 1.0, d_sum, self.values(tile).t(), 0.0);
        for i in 0..n {
            let (at, d_total) = (i * cols..(i + 1) * cols, d_read[i * (values + 1) + values]);
            let inputs = weights[at.clone()].iter().zip(&slopes[at.clone()]);
            let outputs = d_weights[at.clone()].iter_mut().zip(&mut d_logs[at]);
            for ((weight, slope), (d, d_log)) in inputs.zip(outputs) {
                let d_weight = *d + d_total;
                *d_log += weight * d_weight;
                *d = slope * d_weight;
            }
        }
        let d_scores = Mat::new(d_weights, n, cols, cols);
        let rows = self.at(head, tile);
        gemm(&mut grads.q[rows.start * d..rows.end * d], d, 1.0, d_scores, self.keys(tile), 1.0);
        let q = Mat::new(self.q_of(head, tile), n, d, d);
        gemm(&mut grads.k[tile.lo * d..], d, 1.0, d_scores.t(), q, 1.0);
    }

    /// Gradients through the sums over older tokens. φ is homogeneous of degree p, so xᵀ∂/∂x = p·φᵀ∂/∂φ
    /// gives the gradient of the decay to each query, which is added to `d_reach`.
    fn backward_read(
        &self,
        head: usize,
        tile: &TokenTile,
        roots: &[f32],
        (past, d_past): (&RowSums, &mut [f32]),
        buffers: &mut Buffers,
        grads: &mut Grads,
    ) {
        let (d, width) = (self.sizes.head_dim, self.sizes.value_dim + 1);
        let Buffers { d_read, d_reach, read: through, expansion, .. } = buffers;
        for (i, d_read) in d_read.chunks_exact_mut(width).enumerate() {
            let factor = self.factor(tile, i, roots[i]);
            d_read.iter_mut().for_each(|x| *x *= factor);
        }
        let q = self.q_of(head, tile);
        through.clear();
        through.resize(tile.n * d, 0.0);
        self.op.expansion().add_gradient(q, &past.sums, d_read, through, expansion);
        self.op.expansion().add_collected(q, d_read, d_past, expansion);
        let rows = self.at(head, tile);
        math::add_to(&mut grads.q[rows.start * d..rows.end * d], through);
        for ((q, through), d_reach) in q.chunks_exact(d).zip(through.chunks_exact(d)).zip(d_reach) {
            *d_reach += math::dot(q, through) / self.op.p as f32;
        }
    }

    /// Adds the gradients of the log decays: the gradients of the weights' logarithms summed over j < t ≤ i,
    /// and those of the sums' contribution to query i for all t from the first near key to i.
    fn decay_gradients(
        &self,
        tile: &TokenTile,
        d_logs: &[f32],
        d_reach: &[f32],
        grads: &mut [f32],
    ) {
        let (cols, before) = (tile.cols(), tile.first - tile.lo);
        let mut columns = vec![0.0; cols];
        let mut reach = 0.0;
        for (i, row) in d_logs.chunks_exact(cols).enumerate().rev() {
            math::add_to(&mut columns, row);
            reach += d_reach[i];
            grads[tile.first + i] += math::sum(&columns[..before + i]) + reach;
        }
        let mut sum = 0.0;
        for (grad, column) in grads[tile.lo..tile.first].iter_mut().zip(&columns) {
            *grad += sum;
            sum += column;
        }
        grads[tile.near..tile.first].iter_mut().for_each(|grad| *grad += reach);
    }

    /// Gradients of the tokens of a chunk, where `later` is the gradient of the sums after it.
    fn backward_fold(
        &self,
        past: Option<&RowSums>,
        [start, end]: [usize; 2],
        later: &[f32],
        buffers: &mut Buffers,
        grads: &mut Grads,
    ) {
        let RowSizes { head_dim: d, value_dim: values, .. } = self.sizes;
        let decay_over_chunk = past.map_or(0.0, |past| {
            math::dot(&past.sums, later) * powered(self.decay_root(start, end), self.op.p)
        });
        // Σ over the chunk's tokens so far: a step decays all tokens before it.
        let mut before = decay_over_chunk;
        for first in (start..end).step_by(TILE_TOKENS) {
            let n = TILE_TOKENS.min(end - first);
            let k = &self.k[first * d..][..n * d];
            self.entered(first, n, end, &mut buffers.read);
            let (d_k, scratch) = (&mut buffers.weights, &mut buffers.expansion);
            d_k.clear();
            d_k.resize(n * d, 0.0);
            self.op.expansion().add_gradient(k, later, &buffers.read, d_k, scratch);
            let d_entered = &mut buffers.slopes;
            self.op.expansion().apply_rows(k, later, values + 1, d_entered, scratch);
            math::add_to(&mut grads.k[first * d..][..n * d], d_k);
            for j in 0..n {
                let decay = buffers.read[j * (values + 1) + values];
                let d_v = &mut grads.v[(first + j) * values..][..values];
                let d_entered = &d_entered[j * (values + 1)..][..values];
                d_v.iter_mut().zip(d_entered).for_each(|(d_v, d)| *d_v += d * decay);
                grads.log_decay[first + j] += before;
                let of = j * d..(j + 1) * d;
                before += math::dot(&d_k[of.clone()], &k[of]) / self.op.p as f32;
            }
        }
    }
}
