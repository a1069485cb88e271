//! Softmax attention on the CPU: blocks of queries against the keys they can see.
//!
//! Memory is linear in the sequence length: a task holds the scores of one block of queries. The
//! forward pass runs one task per block. The backward pass runs one per kv head, which owns that
//! head's dk and dv, so that the order of sums does not depend on the number of threads.

use burn::backend::Flex;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{Gradients, Softmax, prune};
use crate::attention::blocks::sum_views;
use crate::backend::{Forward, primitive, tensor};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::heads::{HeadView, HeadsOut};
use crate::cpu::{contiguous, dims, from_vec, int_vec, math, slice};

/// Queries per block.
const BLOCK_QUERIES: usize = 64;

/// The sizes and tensors of one call, shared by all tasks.
struct SoftmaxParams<'a> {
    op: &'a Softmax,
    q: HeadView<'a>,
    k: HeadView<'a>,
    v: HeadView<'a>,
    /// Σ_{s≤j} ℓ_s for each batch and head, in f64: differences stay exact at any length.
    decay: Vec<Vec<f64>>,
    /// For each batch and head, the first key of each query that is not pruned; empty without pruning.
    pruned: Vec<Vec<usize>>,
    /// `[heads]`, or empty.
    sinks: &'a [f32],
    documents: Option<Vec<i32>>,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    /// Heads of v; those of k are as many in each view.
    value_heads: usize,
    queries: usize,
    keys: usize,
    head_dim: usize,
    value_dim: usize,
}

/// The scores of one block of queries.
struct ScoreBlock {
    /// Queries `first..first + rows`.
    first: usize,
    rows: usize,
    /// Keys `lo..lo + cols` are those that any of the queries sees.
    lo: usize,
    cols: usize,
    /// For each row the visible columns, `start..end`.
    visible: Vec<(usize, usize)>,
}

impl<'a> SoftmaxParams<'a> {
    fn new(
        op: &'a Softmax,
        [q, k, v]: [&'a FlexTensor; 3],
        log_decay: Option<&FlexTensor>,
        sinks: Option<&'a FlexTensor>,
        documents: Option<&FlexTensor>,
    ) -> Self {
        let [batch, heads, queries, head_dim] = dims(q)[..] else { panic!("q has 4 dimensions") };
        let [_, kv_heads, keys, _] = dims(k)[..] else { panic!("k has 4 dimensions") };
        let [_, value_heads, _, value_dim] = dims(v)[..] else { panic!("v has 4 dimensions") };
        let decay = match log_decay {
            Some(log_decay) => prefix_sums(slice(log_decay), keys),
            None if op.slopes.is_empty() => vec![],
            None => {
                // ALiBi is a constant decay per step.
                let line = |slope: &f32| (0..keys).map(|j| -f64::from(*slope) * j as f64).collect();
                let heads: Vec<Vec<f64>> = op.slopes.iter().map(line).collect();
                (0..batch).flat_map(|_| heads.clone()).collect()
            }
        };
        let documents = documents.map(int_vec);
        let [q, k, v] = [q, k, v].map(HeadView::new);
        let mut params = SoftmaxParams {
            op,
            q,
            k,
            v,
            decay,
            pruned: vec![],
            sinks: sinks.map_or(&[], slice),
            documents,
            batch,
            heads,
            kv_heads,
            value_heads,
            queries,
            keys,
            head_dim,
            value_dim,
        };
        if op.prune && log_decay.is_some() {
            let rows = (0..batch * heads).into_par_iter();
            params.pruned = rows.map(|row| params.first_keys(row / heads, row % heads)).collect();
        }
        params
    }

    /// Keys from `lo` on of the values of a head of k.
    fn values(&self, batch: usize, kv_head: usize, lo: usize, cols: usize) -> Mat<'_> {
        self.v.rows(batch, kv_head % self.value_heads, lo, cols)
    }

    /// The first key of each query of a head that is not pruned.
    fn first_keys(&self, batch: usize, head: usize) -> Vec<usize> {
        let kv_head = head / (self.heads / self.kv_heads);
        let norm = |row: &[f32]| math::dot(row, row).sqrt();
        let q_norms = (0..self.queries).map(|i| norm(self.q.row(batch, head, i)));
        let k_norms = (0..self.keys).map(|j| norm(self.k.row(batch, kv_head, j)));
        prune::first_keys(self.op, q_norms, k_norms, &self.decay[batch * self.heads + head])
    }

    /// The block of queries that starts at `first`, with its visible keys.
    fn block(&self, batch: usize, head: usize, first: usize) -> ScoreBlock {
        let rows = BLOCK_QUERIES.min(self.queries - first);
        let position = |row: usize| self.keys - self.queries + first + row;
        let start = |row: usize| {
            let i = position(row);
            let window = self.op.window.map_or(0, |w| (i + 1).saturating_sub(w));
            let document = self.documents.as_ref().map_or(0, |d| d[batch * self.keys + i] as usize);
            let pruned = self.pruned.get(batch * self.heads + head).map_or(0, |x| x[first + row]);
            window.max(document).max(pruned)
        };
        let starts: Vec<usize> = (0..rows).map(start).collect();
        let lo = *starts.iter().min().expect("a block has rows");
        let visible = starts.iter().enumerate().map(|(r, s)| (s - lo, position(r) + 1 - lo));
        ScoreBlock {
            first,
            rows,
            lo,
            cols: position(rows - 1) + 1 - lo,
            visible: visible.collect(),
        }
    }

    /// Scaled and capped scores plus decay; −∞ where masked. With a softcap, `slopes` receives
    /// the cap's derivative.
    fn scores(
        &self,
        batch: usize,
        head: usize,
        block: &ScoreBlock,
        scores: &mut Vec<f32>,
        slopes: &mut Vec<f32>,
    ) {
        let ScoreBlock { first, rows, lo, cols, .. } = *block;
        let kv_head = head / (self.heads / self.kv_heads);
        scores.resize(rows * cols, 0.0);
        let q = self.q.rows(batch, head, first, rows);
        let k = self.k.rows(batch, kv_head, lo, cols);
        gemm(scores, cols, self.op.scale, q, k.t(), 0.0);
        if let Some(cap) = self.op.softcap {
            slopes.resize(rows * cols, 0.0);
            for (score, slope) in scores.iter_mut().zip(slopes) {
                let tanh = math::tanh(*score / cap);
                *slope = 1.0 - tanh * tanh;
                *score = cap * tanh;
            }
        }
        let decay = (!self.decay.is_empty()).then(|| &self.decay[batch * self.heads + head]);
        for (row, scores) in scores.chunks_exact_mut(cols).enumerate() {
            let (start, end) = block.visible[row];
            if let Some(decay) = decay {
                let at = decay[self.keys - self.queries + first + row];
                for (score, before) in scores[start..end].iter_mut().zip(&decay[lo + start..]) {
                    *score += (at - before) as f32;
                }
            }
            scores[..start].fill(f32::NEG_INFINITY);
            scores[end..].fill(f32::NEG_INFINITY);
        }
    }
}

/// Inclusive prefix sums of each row of `keys` elements, in f64.
pub(in crate::attention) fn prefix_sums(log_decay: &[f32], keys: usize) -> Vec<Vec<f64>> {
    let row = |row: &[f32]| {
        let mut sum = 0.0;
        row.iter()
            .map(|&x| {
                sum += f64::from(x);
                sum
            })
            .collect()
    };
    log_decay.chunks_exact(keys).map(row).collect()
}

/// What the forward pass keeps for the backward pass.
pub(in crate::attention) struct Saved {
    /// q, k and v.
    inputs: [FlexTensor; 3],
    o: FlexTensor,
    /// Log-sum-exp of each row, natural logarithm, `[batch, heads, queries]`.
    lse: FlexTensor,
    log_decay: Option<FlexTensor>,
    sinks: Option<FlexTensor>,
}

impl Saved {
    fn pack(self) -> Vec<FlexTensor> {
        let [q, k, v] = self.inputs;
        [q, k, v, self.o, self.lse].into_iter().chain(self.log_decay).chain(self.sinks).collect()
    }

    /// The inverse of [`Saved::pack`]; `decays` says whether a log decay was saved.
    pub fn unpack(saved: Vec<FlexTensor>, decays: bool) -> Self {
        let mut saved = saved.into_iter();
        let mut next = || saved.next().expect("the forward pass saves five tensors");
        let (inputs, o, lse) = ([next(), next(), next()], next(), next());
        let log_decay = decays.then(next);
        Saved { inputs, o, lse, log_decay, sinks: saved.next() }
    }
}

/// The output and, if `save` is set, the tensors that [`backward`] needs.
///
/// `log_decay` is `[batch, heads, keys]`, `sinks` is `[heads]`.
pub(in crate::attention) fn forward(
    op: &Softmax,
    [q, k, v]: [&FlexTensor; 3],
    (log_decay, sinks): (Option<&FlexTensor>, Option<&FlexTensor>),
    documents: Option<&FlexTensor>,
    save: bool,
) -> Forward<FlexTensor> {
    let [log_decay, sinks] = [log_decay, sinks].map(|x| x.map(contiguous));
    let params = SoftmaxParams::new(op, [q, k, v], log_decay.as_ref(), sinks.as_ref(), documents);
    let SoftmaxParams { batch, heads, queries, value_dim, .. } = params;
    let blocks = queries.div_ceil(BLOCK_QUERIES);
    let out = HeadsOut::new(batch, heads, queries, value_dim);
    let lse: Vec<Vec<f32>> = (0..batch * heads * blocks)
        .into_par_iter()
        .map_init(
            || (vec![], vec![], vec![]),
            |(scores, slopes, o), task| {
                let (head, first) = (task / blocks, task % blocks * BLOCK_QUERIES);
                let (b, h) = (head / heads, head % heads);
                let block = params.block(b, h, first);
                params.scores(b, h, &block, scores, slopes);
                o.resize(block.rows * value_dim, 0.0);
                let lse = attend_block(&params, b, h, &block, scores, o);
                // SAFETY: no two tasks share a block of queries of a head.
                unsafe { out.write(b, h, first, o) };
                lse
            },
        )
        .collect();
    let output = out.into_tensor();
    let mut saved = vec![];
    if save {
        let lse = from_vec(lse.concat(), &[batch, heads, queries]);
        let inputs = [q, k, v].map(Clone::clone);
        saved = Saved { inputs, o: output.clone(), lse, log_decay, sinks }.pack();
    }
    Forward { output, saved }
}

/// Softmax over the block's scores, times v, into `o`; returns each row's log-sum-exp.
fn attend_block(
    params: &SoftmaxParams,
    batch: usize,
    head: usize,
    block: &ScoreBlock,
    scores: &mut [f32],
    o: &mut [f32],
) -> Vec<f32> {
    let ScoreBlock { rows, lo, cols, .. } = *block;
    let kv_head = head / (params.heads / params.kv_heads);
    let mut lse = vec![0.0; rows];
    let mut inverse = vec![0.0; rows];
    for (row, scores) in scores.chunks_exact_mut(cols).enumerate() {
        let (start, end) = block.visible[row];
        let max = math::max(&scores[start..end]);
        let sum = math::exp_shifted(&mut scores[start..end], max);
        scores[..start].fill(0.0);
        scores[end..].fill(0.0);
        lse[row] = max + sum.ln();
        inverse[row] = 1.0 / sum;
        if let Some(&sink) = params.sinks.get(head) {
            let larger = lse[row].max(sink);
            let with_sink = larger + ((lse[row] - larger).exp() + (sink - larger).exp()).ln();
            inverse[row] *= (lse[row] - with_sink).exp();
            lse[row] = with_sink;
        }
    }
    let p = Mat::new(scores, rows, cols, cols);
    gemm(o, params.value_dim, 1.0, p, params.values(batch, kv_head, lo, cols), 0.0);
    for (o, inverse) in o.chunks_exact_mut(params.value_dim).zip(&inverse) {
        o.iter_mut().for_each(|o| *o *= inverse);
    }
    lse
}

/// Buffers that a backward task reuses from block to block.
#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    slopes: Vec<f32>,
    dp: Vec<f32>,
    dq: Vec<f32>,
}

/// The gradients that a backward task owns: one kv head's.
struct HeadGrads {
    dk: Vec<f32>,
    dv: Vec<f32>,
    /// d/d(prefix sum of ℓ) of each query head of the group.
    decay: Vec<Vec<f64>>,
    /// d/d(sink) of each query head of the group.
    sinks: Vec<f64>,
}

/// What the backward pass reads beside [`SoftmaxParams`].
struct Upstream<'a> {
    o: HeadView<'a>,
    grad: HeadView<'a>,
    lse: &'a [f32],
}

/// The gradients of all inputs.
pub(in crate::attention) fn backward(
    op: &Softmax,
    Saved { inputs, o, lse, log_decay, sinks }: Saved,
    documents: Option<&FlexTensor>,
    grad: FlexTensor,
) -> Gradients<FlexTensor> {
    let params =
        SoftmaxParams::new(op, inputs.each_ref(), log_decay.as_ref(), sinks.as_ref(), documents);
    let upstream = Upstream { o: HeadView::new(&o), grad: HeadView::new(&grad), lse: slice(&lse) };
    let SoftmaxParams { batch, heads, kv_heads, queries, keys, head_dim, value_dim, .. } = params;
    let dq = HeadsOut::new(batch, heads, queries, head_dim);
    let dk = HeadsOut::new(batch, kv_heads, keys, head_dim);
    // The part of each head of k.
    let dv = HeadsOut::new(batch, kv_heads, keys, value_dim);
    let (decay, d_sinks): (Vec<Vec<Vec<f64>>>, Vec<Vec<f64>>) = (0..batch * kv_heads)
        .into_par_iter()
        .map(|task| {
            let (b, kv_head) = (task / kv_heads, task % kv_heads);
            let grads = backward_kv_head(&params, &upstream, b, kv_head, log_decay.is_some(), &dq);
            // SAFETY: no two tasks share a kv head.
            unsafe {
                dk.write(b, kv_head, 0, &grads.dk);
                dv.write(b, kv_head, 0, &grads.dv);
            }
            (grads.decay, grads.sinks)
        })
        .unzip();
    let dlog_decay = log_decay.as_ref().map(|_| {
        let rows = decay.into_iter().flatten().flat_map(suffix_sums).collect();
        from_vec(rows, &[batch, heads, keys])
    });
    let d_sinks = sinks.as_ref().map(|_| {
        let all: Vec<f64> = d_sinks.into_iter().flatten().collect();
        let of_head = |h: usize| (0..batch).map(|b| all[b * heads + h]).sum::<f64>() as f32;
        from_vec((0..heads).map(of_head).collect(), &[heads])
    });
    let dv = tensor::<Flex, 4>(dv.into_tensor());
    Gradients {
        q: dq.into_tensor(),
        k: dk.into_tensor(),
        v: primitive(sum_views(dv, kv_heads / params.value_heads)),
        log_decay: dlog_decay,
        sinks: d_sinks,
    }
}

/// dℓ_s = Σ_{t≥s} dP_t.
pub(in crate::attention) fn suffix_sums(mut decay: Vec<f64>) -> impl Iterator<Item = f32> {
    let mut sum = 0.0;
    for d in decay.iter_mut().rev() {
        sum += *d;
        *d = sum;
    }
    decay.into_iter().map(|d| d as f32)
}

/// All gradients of one kv head; dq of its query heads is written to `dq`.
fn backward_kv_head(
    params: &SoftmaxParams,
    upstream: &Upstream,
    batch: usize,
    kv_head: usize,
    with_decay: bool,
    dq: &HeadsOut,
) -> HeadGrads {
    let group = params.heads / params.kv_heads;
    let zeros = |channels: usize| vec![0.0; params.keys * channels];
    let (dk, dv) = (zeros(params.head_dim), zeros(params.value_dim));
    let mut grads = HeadGrads { dk, dv, decay: vec![], sinks: vec![] };
    let mut scratch = Scratch::default();
    for head in kv_head * group..(kv_head + 1) * group {
        let mut decay = vec![0.0; if with_decay { params.keys } else { 0 }];
        grads.sinks.push(0.0);
        for first in (0..params.queries).step_by(BLOCK_QUERIES) {
            let block = params.block(batch, head, first);
            backward_block(
                params,
                upstream,
                [batch, head],
                &block,
                &mut scratch,
                &mut grads,
                &mut decay,
            );
            // SAFETY: only this task writes the query heads of its kv head.
            unsafe { dq.write(batch, head, first, &scratch.dq) };
        }
        if with_decay {
            grads.decay.push(decay);
        }
    }
    grads
}

/// One block of one query head: P from the saved log-sum-exp; dv += Pᵀ do; dP = do vᵀ;
/// dS = P ⊙ (dP − Σ o·do); dq = scale·dS k; dk += scale·dSᵀ q.
fn backward_block(
    params: &SoftmaxParams,
    upstream: &Upstream,
    [batch, head]: [usize; 2],
    block: &ScoreBlock,
    scratch: &mut Scratch,
    grads: &mut HeadGrads,
    decay: &mut [f64],
) {
    let ScoreBlock { first, rows, lo, cols, .. } = *block;
    let (d, values, scale) = (params.head_dim, params.value_dim, params.op.scale);
    let kv_head = head / (params.heads / params.kv_heads);
    let Scratch { scores, slopes, dp, dq } = scratch;
    params.scores(batch, head, block, scores, slopes);
    let lse = &upstream.lse[(batch * params.heads + head) * params.queries + first..][..rows];
    for (scores, lse) in scores.chunks_exact_mut(cols).zip(lse) {
        scores.iter_mut().for_each(|s| *s = math::exp(*s - lse));
    }
    let grad = upstream.grad.rows(batch, head, first, rows);
    let p = Mat::new(scores, rows, cols, cols);
    gemm(&mut grads.dv[lo * values..(lo + cols) * values], values, 1.0, p.t(), grad, 1.0);
    dp.resize(rows * cols, 0.0);
    gemm(dp, cols, 1.0, grad, params.values(batch, kv_head, lo, cols).t(), 0.0);
    for row in 0..rows {
        let at = row * cols..(row + 1) * cols;
        let o = upstream.o.row(batch, head, first + row);
        let delta = math::dot(o, upstream.grad.row(batch, head, first + row));
        if let Some(&sink) = params.sinks.get(head) {
            // A sink has no value vector: dP = 0, so dS = −p·δ.
            let of_head = grads.sinks.last_mut().expect("pushed for each head");
            *of_head -= f64::from((sink - lse[row]).exp() * delta);
        }
        for (dp, p) in dp[at.clone()].iter_mut().zip(&scores[at.clone()]) {
            *dp = p * (*dp - delta);
        }
        if !decay.is_empty() {
            let mut sum = 0.0;
            for (dp, decay) in dp[at.clone()].iter().zip(&mut decay[lo..]) {
                *decay -= f64::from(*dp);
                sum += f64::from(*dp);
            }
            decay[params.keys - params.queries + first + row] += sum;
        }
    }
    if params.op.softcap.is_some() {
        dp.iter_mut().zip(slopes.iter()).for_each(|(dp, slope)| *dp *= slope);
    }
    let ds = Mat::new(dp, rows, cols, cols);
    dq.resize(rows * d, 0.0);
    gemm(dq, d, scale, ds, params.k.rows(batch, kv_head, lo, cols), 0.0);
    let q = params.q.rows(batch, head, first, rows);
    gemm(&mut grads.dk[lo * d..(lo + cols) * d], d, scale, ds.t(), q, 1.0);
}
