//! Counts against an f64 oracle of each kind, and that nothing is measured without a probe.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::Flex;
use burn::tensor::{Bool, Int, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{EMPTY_ROW_FRACTION, METRICS, NONZERO_FRACTION, NONZERO_TILE_FRACTION, TILE};
use crate::Cuda;
use crate::attention::conformance::rowwise::{cosine, dot};
use crate::attention::probe::{Metric, Probe};
use crate::attention::rectified::Rectified;
use crate::attention::rotary::Rotary;
use crate::attention::rowwise::{Rowwise, RowwiseCall, Weights};
use crate::attention::{
    AttentionShape, ExecPath, Inputs, Variant, diff_rela, dispatch, entmax, lssar, rela, tda, tra,
};
use crate::backend::OpBackend;
use crate::testing::Tensor64;

/// Channels of a head.
const HEAD_DIM: usize = 4;

/// Two sequences of random queries and keys of 4 heads, which share 2 key heads; a constant added to both makes
/// them more alike.
struct Problem {
    shape: AttentionShape,
    views: usize,
    q: Tensor64,
    k: Tensor64,
    /// The start of each token's document.
    starts: Option<[Vec<usize>; 2]>,
}

impl Problem {
    fn new(views: usize, tokens: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(tokens as u64);
        let mut random = |heads| {
            let shape = [2, heads, tokens, HEAD_DIM];
            let mut draw = || f64::from(rng.random_range(-1.5f32..1.5));
            Tensor64::new(&shape, (0..shape.iter().product()).map(|_| draw()).collect())
        };
        let shape = AttentionShape::new(16, 4, 2, HEAD_DIM);
        Problem { shape, views, q: random(4 * views), k: random(2 * views), starts: None }
    }

    fn tokens(&self) -> usize {
        self.q.shape[2]
    }

    fn window(self, window: usize) -> Self {
        Problem { shape: AttentionShape { window: Some(window), ..self.shape }, ..self }
    }

    /// The sequences are documents that begin at tenths of their length.
    fn packed(self) -> Self {
        let tokens = self.tokens();
        let starts = |tenths: &[usize]| {
            let begin = |t| tenths.iter().map(|n| n * tokens / 10).filter(|at| *at <= t).max();
            (0..tokens).map(|t| begin(t).expect("the first is 0")).collect()
        };
        Problem { starts: Some([starts(&[0, 7]), starts(&[0, 1, 2, 6])]), ..self }
    }

    fn inputs<B: OpBackend>(&self, parameters: Vec<Tensor<B, 1>>) -> Inputs<B> {
        let device = Default::default();
        let tensor = |x: &Tensor64| {
            let data: Vec<f32> = x.data.iter().map(|x| *x as f32).collect();
            Tensor::from_data(TensorData::new(data, x.shape.clone()), &device)
        };
        let v = Tensor::ones([2, 2, self.tokens(), HEAD_DIM], &device);
        Inputs { q: tensor(&self.q), k: tensor(&self.k), v, projections: vec![], parameters }
    }

    /// What a kind reports of each head of each view, in the order of [`METRICS`].
    fn observed<B: OpBackend, V: Variant>(&self, kind: &V) -> [Vec<Vec<f64>>; 3] {
        let device = Default::default();
        let parameter = |elements: usize| Tensor::full([elements], 0.5, &device);
        let specs = kind.parameters(&self.shape);
        let inputs = self.inputs::<B>(specs.iter().map(|spec| parameter(spec.elements)).collect());
        let documents = self.starts.as_ref().map(|starts| {
            let starts: Vec<i32> = starts.concat().iter().map(|at| *at as i32).collect();
            Tensor::<B, 2, Int>::from_data(TensorData::new(starts, [2, self.tokens()]), &device)
        });
        let mut probe = Probe::default();
        dispatch::observe(kind, &self.shape, inputs, documents, &mut probe);
        assert_eq!(probe.observations().len(), 3);
        METRICS.map(|metric| {
            let of_metric = |o: &&crate::attention::probe::Observation| o.metric == metric;
            let observation = probe.observations().iter().find(of_metric).expect("reported");
            observation.heads.clone()
        })
    }

    /// The same, counted pair by pair. `weights(at, keys)` gives the weights of the keys that a query, at
    /// `[view, b, h, i]`, sees.
    fn counted(
        &self,
        weights: impl Fn([usize; 4], std::ops::Range<usize>) -> Vec<f64>,
    ) -> [Vec<Vec<f64>>; 3] {
        let tokens = self.tokens();
        let tiles = tokens.div_ceil(TILE);
        let head = |view: usize, h: usize| {
            let (mut pairs, mut visible, mut empty) = (0, 0, 0);
            let (mut full_tiles, mut visible_tiles) = (0, 0);
            for b in 0..2 {
                let (mut full, mut seen) = (vec![false; tiles * tiles], vec![false; tiles * tiles]);
                for i in 0..tokens {
                    let start = self.starts.as_ref().map_or(0, |starts| starts[b][i]);
                    let window = self.shape.window.map_or(0, |w| (i + 1).saturating_sub(w));
                    let keys = start.max(window)..i + 1;
                    let weights = weights([view, b, h, i], keys.clone());
                    visible += weights.len();
                    empty += usize::from(weights.iter().all(|w| *w == 0.0));
                    for (j, weight) in keys.zip(weights) {
                        let tile = i / TILE * tiles + j / TILE;
                        seen[tile] = true;
                        pairs += usize::from(weight != 0.0);
                        full[tile] |= weight != 0.0;
                    }
                }
                full_tiles += full.iter().filter(|x| **x).count();
                visible_tiles += seen.iter().filter(|x| **x).count();
            }
            let share = |part: usize, all: usize| part as f64 / all as f64;
            [share(pairs, visible), share(full_tiles, visible_tiles), share(empty, 2 * tokens)]
        };
        [0, 1, 2].map(|metric| {
            let view = |view| (0..4).map(|h| head(view, h)[metric]).collect();
            (0..self.views).map(view).collect()
        })
    }

    fn cosine(&self, [view, b, h, i]: [usize; 4], j: usize) -> f64 {
        cosine(&self.shape, [&self.q, &self.k], [view, b, h, i, j])
    }

    fn score(&self, [view, b, h, i]: [usize; 4], j: usize) -> f64 {
        dot(&self.shape, [&self.q, &self.k], [view, b, h, i, j]) / (HEAD_DIM as f64).sqrt()
    }

    /// max(cosine − τ_i, 0) with β = 0.5, as the parameters are, or 3, and κ = 1.
    fn above_threshold(&self, beta: f64) -> [Vec<Vec<f64>>; 3] {
        self.counted(|at, keys| {
            let [_, b, _, i] = at;
            let position = i - self.starts.as_ref().map_or(0, |starts| starts[b][i]);
            let tau = beta * (2.0 * (position as f64 + 1.0).ln() / HEAD_DIM as f64).sqrt();
            keys.map(|j| (self.cosine(at, j) - tau).max(0.0)).collect()
        })
    }

    fn positive(&self) -> [Vec<Vec<f64>>; 3] {
        self.counted(|at, keys| keys.map(|j| self.score(at, j).max(0.0)).collect())
    }

    /// 1.5-entmax, its threshold by bisection.
    fn entmax(&self) -> [Vec<Vec<f64>>; 3] {
        self.counted(|at, keys| {
            let scores: Vec<f64> = keys.map(|j| self.score(at, j) / 2.0).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights = |tau: f64| scores.iter().map(move |s| (s - tau).max(0.0).powi(2));
            let (mut low, mut high) = (max - 1.0, max);
            for _ in 0..60 {
                let middle = (low + high) / 2.0;
                if weights(middle).sum::<f64>() > 1.0 { low = middle } else { high = middle }
            }
            weights(low).collect()
        })
    }

    fn lssar(&self) -> [Vec<Vec<f64>>; 3] {
        self.counted(|at, keys| {
            let n = keys.len() as f64;
            let scale = (HEAD_DIM as f64).ln() * n.ln();
            let phi: Vec<f64> = keys.map(|j| (scale * self.cosine(at, j)).exp().ln_1p()).collect();
            let mean = phi.iter().sum::<f64>() / n;
            let offset = if n <= 3.0 { 0.0 } else { 1.0 };
            phi.iter().map(|phi| (phi / mean - offset).max(0.0)).collect()
        })
    }
}

/// Sequences shorter than a tile, of one tile, and with an incomplete last one; windows; documents.
fn problems(views: usize) -> Vec<Problem> {
    vec![
        Problem::new(views, 1),
        Problem::new(views, 37).packed(),
        Problem::new(views, 64),
        Problem::new(views, 131),
        Problem::new(views, 131).window(3),
        Problem::new(views, 200).window(70).packed(),
        Problem::new(views, 256).packed(),
    ]
}

fn assert_close(got: &[Vec<Vec<f64>>; 3], want: &[Vec<Vec<f64>>; 3], most: f64, what: &str) {
    for ((got, want), metric) in got.iter().zip(want).zip(METRICS) {
        let sizes = |x: &[Vec<f64>]| x.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(got), sizes(want), "{what}: {}", metric.0);
        for (got, want) in got.concat().iter().zip(want.concat()) {
            assert!((got - want).abs() <= most, "{what}: {} is {got}, not {want}", metric.0);
        }
    }
}

/// Compares a kind with an oracle on every problem, allowing fractions to differ by `most`; returns them, to show
/// that they vary.
fn agrees<B: OpBackend, V: Variant>(
    kind: &V,
    most: f64,
    oracle: impl Fn(&Problem) -> [Vec<Vec<f64>>; 3],
) -> Vec<f64> {
    let mut all = vec![];
    for problem in problems(kind.views()) {
        let (got, want) = (problem.observed::<B, V>(kind), oracle(&problem));
        let (tokens, window) = (problem.tokens(), problem.shape.window);
        assert_close(&got, &want, most, &format!("{kind:?}, {tokens} tokens, window {window:?}"));
        all.extend(got.iter().flat_map(|views| views.concat()));
    }
    all
}

fn no_rotation() -> Rotary {
    Rotary::new(false)
}

fn all_kinds_agree<B: OpBackend>(most: f64) {
    let rotary = no_rotation;
    // Parameters are 0.5, β among them.
    let thresholded = tra::Config { rotary: rotary(), ..Default::default() };
    let shares = agrees::<B, _>(&thresholded, most, |problem| problem.above_threshold(0.5));
    assert!(shares.iter().any(|x| (0.01..0.99).contains(x)), "{shares:?}");
    let views = tda::Config { rotary: rotary(), ..Default::default() };
    agrees::<B, _>(&views, most, |problem| problem.above_threshold(0.5));
    let rela = rela::Config { rotary: rotary(), ..Default::default() };
    agrees::<B, _>(&rela, most, Problem::positive);
    let diff_rela = diff_rela::Config { rotary: rotary(), ..Default::default() };
    agrees::<B, _>(&diff_rela, most, Problem::positive);
    agrees::<B, _>(&entmax::Config { rotary: rotary() }, most, Problem::entmax);
    agrees::<B, _>(&lssar::Config { p: 3, rotary: rotary() }, most, Problem::lssar);
}

#[test]
fn counts_are_those_of_an_oracle() {
    all_kinds_agree::<Flex>(1e-12);
}

/// Other rounding may move single pairs across a threshold: one of the shortest sequences' 74 rows.
#[test]
#[ignore = "needs a GPU"]
fn cuda_counts_are_those_of_an_oracle() {
    all_kinds_agree::<Cuda>(0.014);
}

/// With β = 3, τ is above 1 from the second token of a document on.
#[test]
fn rows_without_a_survivor_are_counted() {
    let config =
        tra::Config { beta: 3.0, learn_beta: false, rotary: no_rotation(), ..Default::default() };
    agrees::<Flex, _>(&config, 1e-12, |problem| problem.above_threshold(3.0));
    let [pairs, tiles, empty] = Problem::new(1, 131).observed::<Flex, _>(&config);
    assert!(empty.concat().iter().all(|x| *x >= 130.0 / 131.0), "{empty:?}");
    assert!(pairs.concat().iter().all(|x| *x <= 1.0 / (131.0 * 66.0)), "{pairs:?}");
    assert!(tiles.concat().iter().all(|x| *x <= 1.0 / 6.0), "{tiles:?}");
}

/// Sequences whose scores take several blocks.
#[test]
fn blocks_of_queries_change_nothing() {
    for (rows, tokens, window) in [(1 << 14, 700, None), (1 << 14, 700, Some(100)), (3, 90, None)] {
        let blocks: Vec<_> = super::blocks_of_tiles(rows, tokens, window).collect();
        assert_eq!(blocks.len() > 1, rows > 3);
        let mut next = 0;
        for block in blocks {
            assert_eq!(block.queries.start, next);
            assert!(block.queries.start % TILE == 0 && block.keys.start % TILE == 0);
            assert_eq!(block.keys.end, block.queries.end);
            let seen_from = window.map_or(0, |w| (next + 1).saturating_sub(w));
            assert!((0..TILE).contains(&(seen_from - block.keys.start)), "{block:?}");
            next = block.queries.end;
        }
        assert_eq!(next, tokens);
    }
    let shape = AttentionShape { window: Some(900), ..AttentionShape::new(4, 1, 1, 4) };
    let x = || Tensor::<Flex, 4>::ones([1, 1, 5000, 4], &Default::default());
    let inputs = Inputs { q: x(), k: x(), v: x(), projections: vec![], parameters: vec![] };
    let config = rela::Config { rotary: no_rotation(), ..Default::default() };
    let mut probe = Probe::default();
    dispatch::observe(&config, &shape, inputs, None, &mut probe);
    let want: [(Metric, f64); 3] =
        [(NONZERO_FRACTION, 1.0), (NONZERO_TILE_FRACTION, 1.0), (EMPTY_ROW_FRACTION, 0.0)];
    for (metric, want) in want {
        assert_eq!(probe.mean(metric), Some(want), "{}", metric.0);
    }
}

/// Rectified scores that count how often weights are computed.
#[derive(Clone, Debug, Default)]
struct Counting(Arc<AtomicUsize>);

impl Weights for Counting {
    fn weigh<B: OpBackend>(&self, scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> Tensor<B, 4> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Rectified { power: 1 }.weigh(scores, mask)
    }

    fn vjp<B: OpBackend>(
        &self,
        scores: Tensor<B, 4>,
        mask: Tensor<B, 4, Bool>,
        d_weights: Tensor<B, 4>,
    ) -> [Tensor<B, 4>; 2] {
        Rectified { power: 1 }.vjp(scores, mask, d_weights)
    }
}

#[test]
fn weights_are_measured_for_a_probe_only() {
    let x = || Tensor::<Flex, 4>::ones([1, 2, 70, 4], &Default::default());
    let weights = Counting::default();
    let op = Rowwise { weights: weights.clone(), scale: 1.0, window: None };
    let path = ExecPath::Reference;
    let call = RowwiseCall { op, q: x(), k: x(), v: x(), offsets: None, documents: None, path };
    call.clone().attend();
    assert_eq!(weights.0.load(Ordering::Relaxed), 1);
    let mut probe = Probe::default();
    call.report_sparsity(1, &mut probe);
    assert_eq!(weights.0.load(Ordering::Relaxed), 2);
    assert_eq!(probe.mean(NONZERO_FRACTION), Some(1.0));
}
