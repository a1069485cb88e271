//! The corrected values on the CPU: one task per row, by forward substitution in chunks.
//!
//! [`System::solve`] computes r and x with x_t = a_t − β_t r_t and r_t = Σ_{s<t} A_ts x_s (notation of the parent
//! module). With a = diag(β) v, x is w. In reversed time, with the upstream gradient times β for a, x is β h and r is
//! r'.

use std::ops::Range;

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::CorrectedValues;
use crate::attention::linear::GatedLinear;
use crate::attention::linear::cpu::decays::{Decays, product, scale_rows};
use crate::attention::linear::cpu::{first_states, part_of};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, slice};

/// Tokens that are substituted one by one; larger blocks are halved, and use matrix products.
const BASE: usize = 8;

/// Sizes of a row.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    seq_len: usize,
    head_dim: usize,
    value_dim: usize,
    /// Log decays per token.
    channels: usize,
    chunk: usize,
}

/// A row's system.
struct System<'a> {
    /// `[seq_len, head_dim]`
    k: &'a [f32],
    /// `[seq_len, value_dim]`
    a: &'a [f32],
    /// `[seq_len]`
    beta: &'a [f32],
    decays: Decays<'a>,
    sizes: Sizes,
}

/// r and x of a row, `[seq_len, value_dim]`.
struct Solution<'a> {
    r: &'a mut [f32],
    x: &'a mut [f32],
}

/// Buffers that a task reuses.
#[derive(Default)]
struct Buffers {
    q_factors: Vec<f32>,
    k_factors: Vec<f32>,
    /// Keys decayed as queries and as keys.
    queries: Vec<f32>,
    keys: Vec<f32>,
    scores: Vec<f32>,
}

impl System<'_> {
    fn keys_of(&self, tokens: &Range<usize>) -> &[f32] {
        let d = self.sizes.head_dim;
        &self.k[tokens.start * d..tokens.end * d]
    }

    fn values_at(&self, tokens: &Range<usize>) -> Range<usize> {
        tokens.start * self.sizes.value_dim..tokens.end * self.sizes.value_dim
    }

    /// `state` is that before the first token.
    fn solve(&self, mut state: Vec<f32>, solution: &mut Solution) {
        let Sizes { seq_len, head_dim: d, value_dim: values, chunk, .. } = self.sizes;
        let mut buffers = Buffers::default();
        for first in (0..seq_len).step_by(chunk) {
            let tokens = first..(first + chunk).min(seq_len);
            let n = tokens.len();
            // r from the state before the chunk.
            self.decays.since_start(&tokens, &mut buffers.q_factors);
            product(&mut buffers.queries, self.keys_of(&tokens), &buffers.q_factors);
            let queries = Mat::new(&buffers.queries, n, d, d);
            let at = self.values_at(&tokens);
            let before = Mat::new(&state, d, values, values);
            gemm(&mut solution.r[at.clone()], values, 1.0, queries, before, 0.0);
            self.solve_within(tokens.clone(), &mut buffers, solution);
            // The state after the chunk.
            let chunk_decay = self.decays.until_end(&tokens, &mut buffers.k_factors);
            product(&mut buffers.keys, self.keys_of(&tokens), &buffers.k_factors);
            scale_rows(&mut state, &chunk_decay);
            let keys = Mat::new(&buffers.keys, n, d, d);
            gemm(
                &mut state,
                values,
                1.0,
                keys.t(),
                Mat::new(&solution.x[at], n, values, values),
                1.0,
            );
        }
    }

    /// Adds what the tokens read of each other to r, and computes their x; r holds what they read of the tokens
    /// before them.
    fn solve_within(&self, tokens: Range<usize>, buffers: &mut Buffers, solution: &mut Solution) {
        if tokens.len() <= BASE {
            return self.substitute(tokens, buffers, solution);
        }
        let middle = tokens.start + tokens.len().next_power_of_two() / 2;
        let (first, second) = (tokens.start..middle, middle..tokens.end);
        self.solve_within(first.clone(), buffers, solution);
        self.read_between(&first, &second, buffers, solution);
        self.solve_within(second, buffers, solution);
    }

    /// Adds what `second` reads of `first`, the tokens right before it.
    fn read_between(
        &self,
        first: &Range<usize>,
        second: &Range<usize>,
        buffers: &mut Buffers,
        solution: &mut Solution,
    ) {
        let Sizes { head_dim: d, value_dim: values, .. } = self.sizes;
        let (n, m) = (second.len(), first.len());
        self.decays.since_start(second, &mut buffers.q_factors);
        self.decays.until_end(first, &mut buffers.k_factors);
        product(&mut buffers.queries, self.keys_of(second), &buffers.q_factors);
        product(&mut buffers.keys, self.keys_of(first), &buffers.k_factors);
        buffers.scores.resize(n * m, 0.0);
        let (queries, keys) =
            (Mat::new(&buffers.queries, n, d, d), Mat::new(&buffers.keys, m, d, d));
        gemm(&mut buffers.scores, m, 1.0, queries, keys.t(), 0.0);
        let x = Mat::new(&solution.x[self.values_at(first)], m, values, values);
        let scores = Mat::new(&buffers.scores, n, m, m);
        gemm(&mut solution.r[self.values_at(second)], values, 1.0, scores, x, 1.0);
    }

    /// [`System::solve_within`], token by token.
    fn substitute(&self, tokens: Range<usize>, buffers: &mut Buffers, solution: &mut Solution) {
        let Sizes { head_dim: d, value_dim: values, .. } = self.sizes;
        // The keys before the token, decayed to it.
        buffers.keys.clear();
        for t in tokens.clone() {
            self.decays.of_token(t, &mut buffers.q_factors);
            let key = self.keys_of(&(t..t + 1));
            let at = self.values_at(&(t..t + 1));
            let r = &mut solution.r[at.clone()];
            for (s, earlier) in (tokens.start..t).zip(buffers.keys.chunks_exact_mut(d)) {
                earlier.iter_mut().zip(&buffers.q_factors).for_each(|(k, factor)| *k *= factor);
                let score = math::dot(key, earlier);
                let x = &solution.x[s * values..][..values];
                r.iter_mut().zip(x).for_each(|(r, x)| *r += score * x);
            }
            let beta = self.beta[t];
            let x = solution.x[at.clone()].iter_mut().zip(r.iter()).zip(&self.a[at]);
            x.for_each(|((x, r), a)| *x = a - beta * r);
            buffers.keys.extend_from_slice(key);
        }
    }
}

/// The rows `[seq_len, width]` of `x` from the last to the first.
fn reversed(x: &[f32], width: usize) -> Vec<f32> {
    x.chunks_exact(width).rev().flatten().copied().collect()
}

/// The log decays in reversed time: between two tokens lie the same steps, so each moves to the token that
/// follows its own there.
fn reversed_decays(log_decay: &[f32], channels: usize) -> Vec<f32> {
    let mut steps = vec![0.0; channels];
    steps.extend(reversed(&log_decay[channels..], channels));
    steps
}

/// Each row `[width]` of `x` times its factor.
fn by_token(x: &[f32], factors: &[f32], width: usize) -> Vec<f32> {
    let rows = x.chunks_exact(width).zip(factors);
    rows.flat_map(|(row, factor)| row.iter().map(move |x| factor * x)).collect()
}

/// The elementwise sum of two tensors of one shape.
pub(super) fn sum(a: &FlexTensor, b: &FlexTensor) -> FlexTensor {
    let sum = slice(a).iter().zip(slice(b)).map(|(a, b)| a + b).collect();
    from_vec(sum, &dims(a))
}

/// The gradients of a row that the reversed system gives.
struct RowGrads<'a> {
    v: &'a mut [f32],
    beta: &'a mut [f32],
    /// w, recomputed.
    w: &'a mut [f32],
    /// −β h, the upstream gradient of what keys read.
    reads: &'a mut [f32],
}

impl CorrectedValues {
    fn sizes(&self, inputs: &[FlexTensor]) -> Sizes {
        let [batch, kv_heads, seq_len, head_dim] = dims(&inputs[0])[..] else {
            panic!("k of 4 dimensions")
        };
        let (value_dim, channels) = (dims(&inputs[1])[3], dims(&inputs[3])[3]);
        let chunk = self.chunk.min(seq_len.next_power_of_two());
        let rows = batch * kv_heads;
        Sizes { rows, seq_len, head_dim, value_dim, channels, chunk }
    }

    /// w and r; `before` is the state before the first token, `[batch · kv_heads, head_dim, value_dim]`, 0 if `None`.
    pub(super) fn run(
        &self,
        inputs: &[FlexTensor; 4],
        before: Option<&FlexTensor>,
    ) -> (FlexTensor, FlexTensor) {
        let inputs = inputs.each_ref().map(contiguous);
        let sizes = self.sizes(&inputs);
        let len = sizes.seq_len * sizes.value_dim;
        let [mut w, mut r] = [(); 2].map(|()| buffer(sizes.rows * len));
        let states = first_states(before, sizes.rows * sizes.state());
        let solutions = w.par_chunks_mut(len).zip(r.par_chunks_mut(len));
        let solutions = solutions.zip(states.par_chunks(sizes.state())).enumerate();
        solutions.for_each(|(row, ((x, r), state))| {
            let [k, v, beta, log_decay] = inputs.each_ref().map(|x| part_of(x, row, sizes.rows));
            let a = by_token(v, beta, sizes.value_dim);
            let system = sizes.system(k, &a, beta, log_decay);
            system.solve(state.to_vec(), &mut Solution { r, x });
        });
        let shape = dims(&inputs[1]);
        (from_vec(w, &shape), from_vec(r, &shape))
    }

    /// The gradients of k, v, β and the log decays, where `grad` is that of w; `saved` are these and r, `before` is as
    /// in [`CorrectedValues::run`].
    pub(super) fn gradients(
        &self,
        saved: &[FlexTensor],
        before: Option<&FlexTensor>,
        grad: &FlexTensor,
    ) -> [FlexTensor; 4] {
        let saved: Vec<FlexTensor> = saved.iter().map(contiguous).collect();
        let grad = contiguous(grad);
        let sizes = self.sizes(&saved);
        let (seq_len, len) = (sizes.seq_len, sizes.seq_len * sizes.value_dim);
        let mut beta = buffer(sizes.rows * seq_len);
        let [mut v, mut w, mut reads] = [(); 3].map(|()| buffer(sizes.rows * len));
        v.par_chunks_mut(len)
            .zip(w.par_chunks_mut(len))
            .zip(reads.par_chunks_mut(len))
            .zip(beta.par_chunks_mut(seq_len))
            .enumerate()
            .for_each(|(row, (((v, w), reads), beta))| {
                let part = |x| part_of(x, row, sizes.rows);
                let inputs = [&saved[0], &saved[1], &saved[2], &saved[3], &saved[4]].map(part);
                sizes.gradients(inputs, part(&grad), RowGrads { v, beta, w, reads });
            });
        let shapes = [0, 1, 2].map(|at| dims(&saved[at]));
        let reads = from_vec(reads, &shapes[1]);
        let linear = GatedLinear { chunk: self.chunk };
        let k = || saved[0].clone();
        let inputs = [k(), k(), from_vec(w, &shapes[1]), saved[3].clone()];
        let [as_query, as_key, _, log_decay] = linear.gradients(&inputs, before, &reads, false);
        let k = slice(&as_query).iter().zip(slice(&as_key)).map(|(a, b)| a + b).collect();
        [from_vec(k, &shapes[0]), from_vec(v, &shapes[1]), from_vec(beta, &shapes[2]), log_decay]
    }
}

impl Sizes {
    /// Elements of a row's state.
    fn state(&self) -> usize {
        self.head_dim * self.value_dim
    }

    fn system<'a>(
        self,
        k: &'a [f32],
        a: &'a [f32],
        beta: &'a [f32],
        log_decay: &'a [f32],
    ) -> System<'a> {
        let Sizes { channels, head_dim, .. } = self;
        System { k, a, beta, decays: Decays { log_decay, channels, head_dim }, sizes: self }
    }

    /// A row's gradients from k, v, β, the log decays and r, where `grad` is that of w.
    fn gradients(self, [k, v, beta, log_decay, r]: [&[f32]; 5], grad: &[f32], grads: RowGrads) {
        let values = self.value_dim;
        // In reversed time: β h, and r'.
        let (k, late_beta) = (reversed(k, self.head_dim), reversed(beta, 1));
        let a = by_token(&reversed(grad, values), &late_beta, values);
        let log_decay = reversed_decays(log_decay, self.channels);
        let [mut late, mut late_h] = [(); 2].map(|()| vec![0.0; grad.len()]);
        let mut solution = Solution { r: &mut late, x: &mut late_h };
        // After the last token nothing reads.
        let none = vec![0.0; self.state()];
        self.system(&k, &a, &late_beta, &log_decay).solve(none, &mut solution);
        let (late, beta_h) = (reversed(&late, values), reversed(&late_h, values));

        grads.v.copy_from_slice(&beta_h);
        grads.reads.iter_mut().zip(&beta_h).for_each(|(reads, beta_h)| *reads = -beta_h);
        for (t, at) in (0..self.seq_len).map(|t| (t, t * values..(t + 1) * values)) {
            let mut of_beta = 0.0;
            for i in at {
                let error = v[i] - r[i];
                grads.w[i] = beta[t] * error;
                of_beta += (grad[i] - late[i]) * error;
            }
            grads.beta[t] = of_beta;
        }
    }
}
