//! Blocks by taking every vector through one transform after another, in f64.

use burn::tensor::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::super::layout::BLOCK;
use crate::attention::path::tests::{dot, householder};

/// The shape of a call, and its masks.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub batch: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub tokens: usize,
    pub d: usize,
    pub window: Option<usize>,
    /// Tokens of each document, if there are documents.
    pub documents: Option<usize>,
    /// The strongest decay per token, if there is a decay.
    pub decay: Option<f32>,
}

/// Inputs and upstream gradients, contiguous, heads before tokens.
pub struct Case {
    pub shape: Shape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub w: Vec<f32>,
    pub beta: Vec<f32>,
    pub log_decay: Vec<f32>,
    /// Σ ℓ within each block, as the kernels get it in f32; set before a decay's results are asked for.
    pub decay_sums: Vec<f64>,
    pub d_o: Vec<f32>,
    /// Added to the log-sum-exps of the blocks: the other keys' share.
    pub beyond: Vec<f32>,
    pub delta: Vec<f32>,
    /// Of the moved queries and keys, v and R, in the layout of the kernels.
    pub moved: [Vec<f32>; 4],
    pub ds: [Vec<f32>; 2],
}

/// Everything that the kernels write, in their layouts.
#[derive(Clone, Default)]
pub struct Results {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub r: Vec<f64>,
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub d_q: Vec<f64>,
    pub d_k: Vec<f64>,
    pub d_v: Vec<f64>,
    pub d_w: Vec<f64>,
    pub d_beta: Vec<f64>,
    pub ds: [Vec<f64>; 2],
}

impl Shape {
    /// One sequence and kv head, without masks.
    pub fn new(tokens: usize, d: usize, group: usize) -> Self {
        let (window, documents, decay) = (None, None, None);
        Shape { batch: 1, kv_heads: 1, group, tokens, d, window, documents, decay }
    }

    pub fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    pub fn blocks(&self) -> usize {
        self.tokens.div_ceil(BLOCK)
    }

    pub fn padded(&self) -> usize {
        self.blocks() * BLOCK
    }

    pub fn scale(&self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    /// The start of a token's document.
    pub fn document(&self, token: usize) -> usize {
        self.documents.map_or(0, |each| token / each * each)
    }

    fn first_visible(&self, token: usize) -> usize {
        let window = self.window.map_or(0, |w| (token + 1).saturating_sub(w));
        window.max(self.document(token))
    }
}

impl Case {
    /// Random inputs with β in (0, 2).
    pub fn new(shape: Shape) -> Self {
        let Shape { batch, kv_heads, tokens, d, .. } = shape;
        let (heads, padded) = (shape.heads(), shape.padded());
        let mut rng = ChaCha8Rng::seed_from_u64((tokens * d + shape.group) as u64);
        let mut random = |n: usize| (0..n).map(|_| rng.random_range(-1.7f32..1.7)).collect();
        let rounded = |x: Vec<f32>| x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
        let [q, d_o] = [(); 2].map(|()| rounded(random(batch * heads * tokens * d)));
        let [k, v] = [(); 2].map(|()| rounded(random(batch * kv_heads * tokens * d)));
        let mut w: Vec<f32> = random(batch * kv_heads * tokens * d);
        for w in w.chunks_exact_mut(d) {
            let length = w.iter().map(|x| x * x).sum::<f32>().sqrt();
            w.iter_mut().for_each(|x| *x /= length);
        }
        let unit = |x: Vec<f32>| x.iter().map(|x| (x + 1.7) / 3.4).collect::<Vec<_>>();
        let beta = unit(random(batch * kv_heads * tokens)).iter().map(|x| 2.0 * x).collect();
        let decays = unit(random(batch * heads * tokens));
        let log_decay = decays.iter().map(|x| -x * shape.decay.unwrap_or(0.0)).collect();
        let beyond = unit(random(batch * heads * tokens));
        let delta = random(batch * heads * tokens);
        let moved = [
            random(batch * padded * heads * d),
            random(batch * padded * kv_heads * d),
            random(batch * padded * kv_heads * d),
            random(batch * shape.blocks() * kv_heads * d * d),
        ];
        let ds = [(); 2].map(|()| random(batch * heads * tokens));
        let decay_sums = vec![];
        Case { shape, q, k, v, w, beta, log_decay, decay_sums, d_o, beyond, delta, moved, ds }
    }

    /// One direction at all tokens, with this β.
    pub fn one_direction(self, beta: f32) -> Self {
        let w = self.w[..self.shape.d].repeat(self.w.len() / self.shape.d);
        Case { w, beta: vec![beta; self.beta.len()], ..self }
    }

    /// All results.
    pub fn expected(&self) -> Results {
        let Shape { batch, kv_heads, tokens, d, .. } = self.shape;
        let (heads, padded, blocks) =
            (self.shape.heads(), self.shape.padded(), self.shape.blocks());
        let of_queries = batch * heads * tokens;
        let of_keys = batch * kv_heads * tokens;
        let zeros = |n: usize| vec![0.0; n];
        let mut results = Results {
            q: zeros(batch * padded * heads * d),
            k: zeros(batch * padded * kv_heads * d),
            r: zeros(batch * blocks * kv_heads * d * d),
            o: zeros(of_queries * d),
            lse: zeros(of_queries),
            d_q: zeros(of_queries * d),
            d_k: zeros(of_keys * d),
            d_v: zeros(of_keys * d),
            d_w: zeros(of_keys * d),
            d_beta: zeros(of_keys),
            ds: self.ds.each_ref().map(|x| x.iter().map(|&x| f64::from(x)).collect()),
        };
        for row in 0..batch * kv_heads {
            for block in 0..blocks {
                let first = block * BLOCK;
                let count = BLOCK.min(tokens - first);
                let (batch, kv_head) = (row / kv_heads, row % kv_heads);
                Walk { case: self, batch, kv_head, block, first, count }.run(&mut results);
            }
        }
        results
    }
}

/// One block of one kv head of one sequence.
struct Walk<'a> {
    case: &'a Case,
    batch: usize,
    kv_head: usize,
    block: usize,
    first: usize,
    count: usize,
}

fn row(x: &[f32], at: usize, d: usize) -> Vec<f64> {
    x[at * d..][..d].iter().map(|&x| f64::from(x)).collect()
}

fn add(dst: &mut [f64], at: usize, factor: f64, x: &[f64]) {
    dst[at * x.len()..][..x.len()].iter_mut().zip(x).for_each(|(dst, x)| *dst += factor * x);
}

impl Walk<'_> {
    /// The index of token t of the block among those of its kv head.
    fn key(&self, t: usize) -> usize {
        let Shape { kv_heads, tokens, .. } = self.case.shape;
        (self.batch * kv_heads + self.kv_head) * tokens + self.first + t
    }

    fn query(&self, head: usize, t: usize) -> usize {
        (self.batch * self.case.shape.heads() + head) * self.case.shape.tokens + self.first + t
    }

    /// The index of row t in a padded tensor of this many heads.
    fn padded(&self, head: usize, heads: usize, t: usize) -> usize {
        (self.batch * self.case.shape.padded() + self.first + t) * heads + head
    }

    fn w(&self, t: usize) -> (Vec<f64>, f64) {
        let at = self.key(t);
        (row(&self.case.w, at, self.case.shape.d), f64::from(self.case.beta[at]))
    }

    /// x through the transforms of `order`, and x before each.
    fn through(
        &self,
        mut x: Vec<f64>,
        order: impl Iterator<Item = usize>,
    ) -> (Vec<f64>, Vec<Vec<f64>>) {
        let mut before = vec![];
        for t in order {
            before.push(x.clone());
            let (w, beta) = self.w(t);
            householder(&mut x, &w, beta);
        }
        (x, before)
    }

    /// From the gradient after token t's transform to that before it; adds those of w and β.
    fn back(&self, g: &mut [f64], x: &[f64], t: usize, results: &mut Results) {
        let (w, beta) = self.w(t);
        let (wx, wg) = (dot(&w, x), dot(&w, g));
        results.d_beta[self.key(t)] -= wx * wg;
        add(&mut results.d_w, self.key(t), -beta * wx, g);
        add(&mut results.d_w, self.key(t), -beta * wg, x);
        householder(g, &w, beta);
    }

    fn run(&self, results: &mut Results) {
        let Shape { kv_heads, group, d, .. } = self.case.shape;
        let [_, d_k, d_v, d_r] = &self.case.moved;
        for t in 0..self.count {
            let (k, before) = self.through(row(&self.case.k, self.key(t), d), t + 1..self.count);
            let at = self.padded(self.kv_head, kv_heads, t);
            add(&mut results.k, at, 1.0, &k);
            let mut g = row(d_k, at, d);
            for s in (t + 1..self.count).rev() {
                self.back(&mut g, &before[s - t - 1], s, results);
            }
            add(&mut results.d_k, self.key(t), 1.0, &g);
            add(&mut results.d_v, self.key(t), 1.0, &row(d_v, at, d));
        }
        let blocks = self.case.shape.blocks();
        let transform = (self.batch * blocks + self.block) * kv_heads + self.kv_head;
        for a in 0..d {
            let unit: Vec<_> = (0..d).map(|b| f64::from(u8::from(a == b))).collect();
            let (x, before) = self.through(unit.clone(), 0..self.count);
            add(&mut results.r, transform * d + a, 1.0, &unit);
            add(&mut results.r, transform * d + a, -1.0, &x);
            let mut g: Vec<_> = row(d_r, transform * d + a, d).iter().map(|x| -x).collect();
            for t in (0..self.count).rev() {
                self.back(&mut g, &before[t], t, results);
            }
        }
        for head in self.kv_head * group..(self.kv_head + 1) * group {
            for i in 0..self.count {
                self.query_row(head, i, results);
            }
        }
    }

    /// One query: its results and its contributions to gradients.
    fn query_row(&self, head: usize, i: usize, results: &mut Results) {
        let (case, shape) = (self.case, self.case.shape);
        let (d, scale) = (shape.d, f64::from(shape.scale()));
        let own = self.query(head, i);
        let q: Vec<_> = row(&case.q, own, d).iter().map(|x| x * scale).collect();
        let (x, before) = self.through(q, (0..=i).rev());
        // Before the transform of token j.
        let met = |j: usize| &before[i - j];
        let moved = self.padded(head, shape.heads(), i);
        add(&mut results.q, moved, 1.0, &x);
        let first = shape.first_visible(self.first + i).saturating_sub(self.first);
        let sum = |t| case.decay_sums[self.query(head, t)];
        let decay = |j| if shape.decay.is_some() { -sum(j) } else { 0.0 };
        let score = |j: usize| dot(met(j), &row(&case.k, self.key(j), d)) + decay(j);
        let scores: Vec<_> = (first..=i).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
        results.lse[own] = lse;
        let d_o = row(&case.d_o, own, d);
        let at = (self.batch * shape.tokens + self.first + i) * shape.heads() + head;
        let mut ds = vec![0.0; i + 1];
        for (j, s) in (first..=i).zip(&scores) {
            let v = row(&case.v, self.key(j), d);
            add(&mut results.o, at, (s - lse).exp(), &v);
            let weight = (s - lse - f64::from(case.beyond[own])).exp();
            add(&mut results.d_v, self.key(j), weight, &d_o);
            ds[j] = weight * (dot(&d_o, &v) - f64::from(case.delta[own]));
            results.ds[0][own] += ds[j];
            results.ds[1][self.query(head, j)] += ds[j];
        }
        let mut g = row(&case.moved[0], moved, d);
        for j in 0..=i {
            self.back(&mut g, met(j), j, results);
            let k = row(&case.k, self.key(j), d);
            g.iter_mut().zip(&k).for_each(|(g, k)| *g += ds[j] * k);
            add(&mut results.d_k, self.key(j), ds[j], met(j));
        }
        add(&mut results.d_q, own, scale, &g);
    }
}
