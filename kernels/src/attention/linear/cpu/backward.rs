//! The backward pass of a row.
//!
//! The states before chunks are recomputed, then chunks are visited from the last. For a product
//! (q e^F)(k e^E)ᵀ v the gradients of the exponents are the decayed factors times their own gradients,
//! ∂F = q̃ ⊙ ∂q̃ and ∂E = k̃ ⊙ ∂k̃, and those of the log decays are sums of these:
//! ∂ℓ_t = Σ_{i≥t} ∂F_i over the queries, Σ_{j<t} ∂E_j over the keys.

use std::ops::Range;

use super::decays::{product, scale_rows};
use super::{Buffers, HalfPair, LinearRow, RowSizes};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::math;

/// The gradients of a row.
pub(super) struct Grads<'a> {
    pub q: &'a mut [f32],
    pub k: &'a mut [f32],
    pub v: &'a mut [f32],
    pub log_decay: &'a mut [f32],
}

/// `dst` += x ⊙ y.
fn add_product(dst: &mut [f32], x: &[f32], y: &[f32]) {
    for ((dst, x), y) in dst.iter_mut().zip(x).zip(y) {
        *dst += x * y;
    }
}

impl LinearRow<'_> {
    /// `state` is that before the first token.
    pub(super) fn backward(&self, state: &[f32], grad: &[f32], own_keys: bool, grads: &mut Grads) {
        let RowSizes { head_dim: d, value_dim: values, .. } = self.sizes;
        let mut buffers = Buffers::default();
        let mut states = vec![];
        let mut state = state.to_vec();
        for chunk in self.chunks() {
            states.push(state.clone());
            self.advance(&chunk, &mut state, &mut buffers);
        }
        // Gradient of the state after the chunk.
        let mut later = vec![0.0; d * values];
        for (chunk, state) in self.chunks().rev().zip(states.into_iter().rev()) {
            self.backward_state(&chunk, &state, &mut later, grad, &mut buffers, grads);
            if own_keys {
                self.backward_own(&chunk, grad, grads);
            }
            for pair in self.pairs(chunk) {
                self.backward_pair(&pair, grad, &mut buffers, grads);
            }
        }
    }

    /// Gradients through the states before and after a chunk; `later`, the gradient of the state after it,
    /// becomes that of the state before it.
    fn backward_state(
        &self,
        chunk: &Range<usize>,
        state: &[f32],
        later: &mut [f32],
        grad: &[f32],
        buffers: &mut Buffers,
        grads: &mut Grads,
    ) {
        let RowSizes { head_dim: d, value_dim: values, .. } = self.sizes;
        let n = chunk.len();
        // The chunk's tokens, which were added to the state.
        let chunk_decay = self.decays.until_end(chunk, &mut buffers.k_factors);
        product(&mut buffers.k, self.k_of(chunk), &buffers.k_factors);
        buffers.d_k.resize(n * d, 0.0);
        let after = Mat::new(later, d, values, values);
        gemm(&mut buffers.d_k, d, 1.0, self.v_of(chunk), after.t(), 0.0);
        let k = Mat::new(&buffers.k, n, d, d);
        gemm(&mut grads.v[self.v_at(chunk)], values, 1.0, k, after, 1.0);
        self.add_key_gradients(chunk, buffers, grads);
        // The state's decay over the chunk, which every step contributes to.
        let rows = state.chunks_exact(values).zip(later.chunks_exact(values)).zip(&chunk_decay);
        let lost: Vec<f32> =
            rows.map(|((s, d), chunk_decay)| math::dot(s, d) * chunk_decay).collect();
        for t in chunk.clone() {
            self.add_to_step(t, &lost, grads.log_decay);
        }
        scale_rows(later, &chunk_decay);
        // The chunk's queries, which read the state before it.
        self.decays.since_start(chunk, &mut buffers.q_factors);
        self.start_queries(n, buffers);
        for head in 0..self.sizes.group {
            product(&mut buffers.q, &self.q[self.q_at(head, chunk)], &buffers.q_factors);
            let grad = Mat::new(&grad[self.o_at(head, chunk)], n, values, values);
            gemm(&mut buffers.d_q, d, 1.0, grad, Mat::new(state, d, values, values).t(), 0.0);
            gemm(later, values, 1.0, Mat::new(&buffers.q, n, d, d).t(), grad, 1.0);
            self.add_query_gradients(head, chunk, buffers, grads);
        }
        self.add_from(chunk, buffers, grads);
    }

    fn backward_own(&self, chunk: &Range<usize>, grad: &[f32], grads: &mut Grads) {
        let RowSizes { group, head_dim: d, value_dim: values, .. } = self.sizes;
        for head in 0..group {
            for t in chunk.clone() {
                let token = t..t + 1;
                let (q_at, v_at) = (self.q_at(head, &token), self.v_at(&token));
                let (q, k, v) = (&self.q[q_at.clone()], self.k_of(&token), &self.v[v_at.clone()]);
                let grad = &grad[self.o_at(head, &token)];
                let (score, d_score) = (math::dot(q, k), math::dot(grad, v));
                let add = |dst: &mut [f32], factor: f32, x: &[f32]| {
                    dst.iter_mut().zip(x).for_each(|(dst, x)| *dst += factor * x);
                };
                add(&mut grads.q[q_at], d_score, k);
                add(&mut grads.k[t * d..][..d], d_score, q);
                add(&mut grads.v[t * values..][..values], score, grad);
            }
        }
    }

    fn backward_pair(
        &self,
        pair: &HalfPair,
        grad: &[f32],
        buffers: &mut Buffers,
        grads: &mut Grads,
    ) {
        let RowSizes { group, head_dim: d, value_dim: values, .. } = self.sizes;
        let (n, m) = (pair.queries.len(), pair.keys.len());
        self.decays.since_start(&pair.queries, &mut buffers.q_factors);
        self.decays.until_end(&pair.keys, &mut buffers.k_factors);
        product(&mut buffers.k, self.k_of(&pair.keys), &buffers.k_factors);
        self.start_queries(n, buffers);
        buffers.d_k.clear();
        buffers.d_k.resize(m * d, 0.0);
        for scores in [&mut buffers.scores, &mut buffers.d_scores] {
            scores.resize(n * m, 0.0);
        }
        for head in 0..group {
            product(&mut buffers.q, &self.q[self.q_at(head, &pair.queries)], &buffers.q_factors);
            let (q, k) = (Mat::new(&buffers.q, n, d, d), Mat::new(&buffers.k, m, d, d));
            let grad = Mat::new(&grad[self.o_at(head, &pair.queries)], n, values, values);
            gemm(&mut buffers.scores, m, 1.0, q, k.t(), 0.0);
            gemm(&mut buffers.d_scores, m, 1.0, grad, self.v_of(&pair.keys).t(), 0.0);
            let scores = Mat::new(&buffers.scores, n, m, m);
            let d_scores = Mat::new(&buffers.d_scores, n, m, m);
            gemm(&mut grads.v[self.v_at(&pair.keys)], values, 1.0, scores.t(), grad, 1.0);
            gemm(&mut buffers.d_q, d, 1.0, d_scores, k, 0.0);
            gemm(&mut buffers.d_k, d, 1.0, d_scores.t(), q, 1.0);
            self.add_query_gradients(head, &pair.queries, buffers, grads);
        }
        self.add_from(&pair.queries, buffers, grads);
        self.add_key_gradients(&pair.keys, buffers, grads);
    }

    /// Buffers for the gradients of `n` queries.
    fn start_queries(&self, n: usize, buffers: &mut Buffers) {
        buffers.d_q.resize(n * self.sizes.head_dim, 0.0);
        buffers.d_from.clear();
        buffers.d_from.resize(n * self.sizes.head_dim, 0.0);
    }

    /// The gradients of one head's queries and their exponents, from the gradient of the decayed queries.
    fn add_query_gradients(
        &self,
        head: usize,
        queries: &Range<usize>,
        buffers: &mut Buffers,
        grads: &mut Grads,
    ) {
        let at = self.q_at(head, queries);
        let n = at.len();
        add_product(&mut grads.q[at], &buffers.d_q[..n], &buffers.q_factors);
        add_product(&mut buffers.d_from, &buffers.d_q[..n], &buffers.q);
    }

    /// The gradients of the log decays, from those of the queries' exponents.
    fn add_from(&self, queries: &Range<usize>, buffers: &mut Buffers, grads: &mut Grads) {
        let d = self.sizes.head_dim;
        let mut sums = vec![0.0; d];
        for (t, d_from) in queries.clone().zip(buffers.d_from.chunks_exact(d)).rev() {
            math::add_to(&mut sums, d_from);
            self.add_to_step(t, &sums, grads.log_decay);
        }
    }

    /// The gradients of the keys and the log decays, from those of the decayed keys.
    fn add_key_gradients(&self, keys: &Range<usize>, buffers: &mut Buffers, grads: &mut Grads) {
        let d = self.sizes.head_dim;
        let d_keys = &mut grads.k[keys.start * d..keys.end * d];
        add_product(d_keys, &buffers.d_k, &buffers.k_factors);
        let mut sums = vec![0.0; d];
        let decayed = buffers.k.chunks_exact(d).zip(buffers.d_k.chunks_exact(d));
        for (t, (k, d_k)) in keys.clone().zip(decayed) {
            self.add_to_step(t, &sums, grads.log_decay);
            add_product(&mut sums, k, d_k);
        }
    }

    /// Adds gradients per channel of k to a token's log decays.
    fn add_to_step(&self, token: usize, grads: &[f32], log_decay: &mut [f32]) {
        let channels = self.sizes.channels;
        match &mut log_decay[token * channels..][..channels] {
            [one] => *one += math::sum(grads),
            all => math::add_to(all, grads),
        }
    }
}
