//! The suite of kernels in bf16: outputs and the gradients of every input, packing, windows,
//! decoding, causality, determinism on a full device.
//!
//! Outputs are compared with the f64 oracle, gradients with those in f32 on the CPU, which `in_f32`
//! compares with the oracle's central differences. The allowed error of both is that of
//! [`Conformance::roundings`] to bf16. Each size, option and mask compiles its own kernel, which takes
//! seconds.

use std::iter;
use std::ops::Range;

use burn::backend::Flex;
use burn::tensor::{Tensor, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::carried::{InPieces, refuses_a_state};
use super::problem::windows;
use super::run::{Decoding, attend, gradients, largest_difference, to_vec};
use super::{Conformance, Problem, Sizes, observed_pruning};
use crate::backend::OpBackend;
use crate::testing::{Tensor64, record, root_mean_square};

/// Lengths below, at and above tiles of 64 and 128 tokens.
const LENGTHS: [usize; 9] = [1, 2, 33, 63, 64, 65, 100, 129, 257];

/// Outputs and gradients: ragged lengths, grouped heads, head dims up to the widest.
pub fn agrees_with_the_oracle<V: Conformance, K: OpBackend>() {
    for (at, variant) in V::kernel_cases().into_iter().enumerate() {
        let check = |sizes: Sizes| {
            if sizes[2] <= V::WIDEST_HEAD {
                check::<V, K>(&variant, Problem::new(&variant, sizes, None));
            }
        };
        for seq_len in LENGTHS {
            check([2, 2, 64, 1, seq_len]);
        }
        check([4, 2, 64, 2, 100]);
        if at == 0 {
            check([2, 1, 16, 1, 33]);
            check([2, 2, 80, 1, 129]);
            check([2, 1, 128, 1, 140]);
            check([2, 1, 192, 1, 70]);
            check([2, 2, 256, 1, 100]);
        }
    }
}

/// Windows of one token, within and beyond a tile, and longer than the sequence.
pub fn windows_agree_with_the_oracle<V: Conformance, K: OpBackend>() {
    for (at, variant) in V::kernel_cases().into_iter().enumerate() {
        for window in windows(&variant, &[1, 65, 97, 300]).into_iter().flatten() {
            let check = |sizes| {
                check::<V, K>(&variant, Problem::new(&variant, sizes, Some(window)));
            };
            check([4, 2, 64, 2, 200]);
            if at == 0 {
                check([2, 1, 128, 1, 140]);
            }
        }
    }
}

/// Packed documents, of one token and of several tiles, with and without a window.
pub fn documents_do_not_see_each_other<V: Conformance, K: OpBackend>() {
    for variant in V::kernel_cases() {
        for window in windows(&variant, &[70]) {
            for (seq_len, starts) in [(200, &[0, 1, 90, 130, 199][..]), (129, &[0, 40, 128][..])] {
                let problem = Problem::new(&variant, [4, 1, 64, 2, seq_len], window);
                check::<V, K>(&variant, problem.packed(starts));
            }
        }
    }
}

/// A prompt in pieces, then single tokens, equal the full pass.
pub fn decoding_equals_the_full_pass<V: Conformance, K: OpBackend>() {
    for (at, variant) in V::kernel_cases().into_iter().enumerate() {
        for window in windows(&variant, &[70]) {
            let check = |sizes: Sizes| {
                if sizes[2] <= V::WIDEST_HEAD {
                    check_decoding::<V, K>(&variant, Problem::new(&variant, sizes, window));
                }
            };
            if at == 0 {
                check([40, 2, 80, 1, 70]);
                check([2, 2, 128, 3, 700]);
                check([2, 1, 256, 1, 90]);
            }
            check([4, 1, 64, 2, 130]);
        }
    }
}

/// Rows in pieces, each from the state after the one before: outputs equal those of whole rows, and gradients those of
/// the last piece there.
pub fn rows_go_on_from_a_state<V: Conformance, K: OpBackend>() {
    for (at, variant) in V::kernel_cases().into_iter().enumerate() {
        if !variant.carries_state() {
            refuses_a_state::<V, K>(&variant);
            continue;
        }
        let check = |sizes, pieces| {
            for problem in InPieces::all(&variant, sizes, pieces) {
                check_pieces::<V, K>(&variant, problem);
            }
        };
        check([4, 2, 64, 2], [64, 36, 100]);
        if at == 0 {
            check([2, 1, 128, 1], [70, 1, 64]);
        }
    }
}

fn check_pieces<V: Conformance, K: OpBackend>(variant: &V, pieces: InPieces) {
    let pieces = InPieces { problem: pieces.problem.in_bf16(), ..pieces };
    let mut upstream = pieces.upstream(variant);
    upstream.data.iter_mut().for_each(|x| *x = bf16::from_f64(*x).to_f64());
    let got = pieces.results::<V, K>(variant, &upstream);
    let want = pieces.expected(variant, &upstream);
    assert_eq!(got.len(), want.len(), "results of {variant:?}");
    let nudged: Vec<_> = nudges(&pieces.problem)
        .map(|problem| InPieces { problem, ..pieces.clone() }.expected(variant, &upstream))
        .collect();
    let least = variant.vanished() * root_mean_square(&want[1..].concat());
    let what = format!(
        "{variant:?}, pieces of {:?} tokens, documents {:?}",
        pieces.pieces, pieces.problem.documents[0]
    );
    for (result, (got, want)) in got.iter().zip(&want).enumerate() {
        let what = format!("{what}, result {result} (outputs, then gradients)");
        let inputs = &pieces.problem.inputs;
        let shape = result.checked_sub(1).map(|input| &inputs[input].shape);
        if shape.is_some_and(|shape| shape.len() == 1) {
            // A learned vector's gradient is a sum over all tokens, which may cancel.
            let vectors = inputs.iter().filter(|x| x.shape.len() > 1).count();
            let spec = &variant.parameters(&pieces.problem.shape)[result - 1 - vectors];
            let of = |x: &Vec<Vec<f64>>| x[result].clone();
            check_parameter(&what, variant, spec.name, [got, want], nudged.iter().map(of), least);
            continue;
        }
        let vector = shape.and_then(|shape| shape.last().copied());
        let vector = vector.unwrap_or_else(|| variant.value_dim(&pieces.problem.shape));
        let (count, kinks) = (variant.roundings(), variant.has_kinks());
        let least = if shape.is_some() { least } else { 0.0 };
        let moved = || nudged.iter().map(|x| x[result].clone());
        Roundings { count, least, vector, kinks }.check_beside(&what, got, want, moved);
    }
    assert_eq!(got, pieces.results::<V, K>(variant, &upstream), "{what}: two runs differ");
}

/// A later token changes no earlier output, not by a bit; it does change its own.
pub fn is_causal<V: Conformance, K: OpBackend>() {
    for variant in V::kernel_cases() {
        let problem = Problem::new(&variant, [4, 2, 64, 2, 100], None);
        let value_dim = variant.value_dim(&problem.shape);
        let attend = |problem: Problem| attend::<V, K>(&variant, &problem.in_bf16());
        for from in [1, 63, 64, 70, 99] {
            let (before, after) = (attend(problem.clone()), attend(problem.changed(from)));
            let rows = before.chunks_exact(value_dim).zip(after.chunks_exact(value_dim));
            for (at, (before, after)) in rows.enumerate() {
                let t = at % 100;
                assert_eq!(before == after, t < from, "{variant:?} at position {t}");
            }
        }
    }
}

/// A NaN in q, k or v propagates to the output.
pub fn a_nan_shows<V: Conformance, K: OpBackend>() {
    for variant in V::kernel_cases() {
        for input in 0..3 {
            let mut problem = Problem::new(&variant, [4, 2, 64, 2, 100], None).in_bf16();
            problem.inputs[input].data[3] = f64::NAN;
            let shows = attend::<V, K>(&variant, &problem).iter().any(|x| x.is_nan());
            assert!(shows, "{variant:?}: NaN in input {input}");
        }
    }
}

/// Equal bits in many runs that fill the device: a race between blocks shows in only a few runs.
pub fn is_deterministic_on_a_full_device<V: Conformance, K: OpBackend>() {
    const RUNS: usize = 8;
    let variant = &V::kernel_cases()[0];
    // Also many sequences of one tile, where a block's work on one ends as soon as it has begun.
    for sizes in [[12, 12, 64, 24, 1024], [16, 4, 128, 8, 1024], [12, 12, 64, 64, 64]] {
        let problem = Problem::new(variant, sizes, None).in_bf16();
        let queries = &problem.inputs[0];
        let [batch, _, seq_len, _] = queries.shape[..] else {
            unreachable!("q has four dimensions")
        };
        let output = [batch, problem.shape.heads, seq_len, variant.value_dim(&problem.shape)];
        let elements = output.iter().product();
        // There may be fewer queries than outputs.
        let values = queries.data.iter().copied().cycle().take(elements);
        let upstream = &Tensor64::new(&output, values.collect());
        let mut prefilled = Decoding::<V, K>::new(variant, &problem);
        prefilled.extend(problem.seq_len - 1);
        let run = || {
            let decoded = to_vec(prefilled.clone().extend(1));
            let gradients = gradients::<V, K>(variant, &problem, upstream);
            (attend::<V, K>(variant, &problem), gradients, decoded)
        };
        let (output, gradients, decoded) = run();
        for at in 1..RUNS {
            let (again, gradients_again, decoded_again) = run();
            assert!(again == output, "outputs of {:?} in run {at}", problem.shape);
            assert!(gradients_again == gradients, "gradients of {:?} in run {at}", problem.shape);
            assert!(decoded_again == decoded, "decoding of {:?} in run {at}", problem.shape);
        }
        // Decoding from copies has not changed the state.
        let last = to_vec(prefilled.extend(1));
        assert!(last == decoded, "decoding of {:?} after copies", problem.shape);
    }
}

/// As [`agrees_with_the_oracle`], for one variant and size.
pub fn agrees_at<V: Conformance, K: OpBackend>(variant: &V, sizes: Sizes, window: Option<usize>) {
    check::<V, K>(variant, Problem::new(variant, sizes, window));
}

/// As [`agrees_at`], for a problem whose inputs the caller has changed.
pub fn agrees_on<V: Conformance, K: OpBackend>(variant: &V, problem: Problem) {
    check::<V, K>(variant, problem);
}

/// As [`decodes_at`], for a problem whose inputs the caller has changed.
pub fn decodes_on<V: Conformance, K: OpBackend>(variant: &V, problem: Problem) {
    check_decoding::<V, K>(variant, problem);
}

/// As [`agrees_at`], with documents that begin at `starts`, where pruning leaves something out.
pub fn agrees_pruned_and_packed<V: Conformance, K: OpBackend>(
    variant: &V,
    sizes: Sizes,
    starts: &[usize],
) {
    let problem = Problem::new(variant, sizes, None).packed(starts);
    let inputs = problem.clone().in_bf16().tensors::<K>();
    let pruned = observed_pruning(variant, &problem.shape, inputs, problem.documents());
    assert!(pruned.is_some_and(|pruned| pruned > 0.0), "{pruned:?} of {sizes:?} pruned");
    check::<V, K>(variant, problem);
}

/// As [`decoding_equals_the_full_pass`], for one variant and size.
pub fn decodes_at<V: Conformance, K: OpBackend>(variant: &V, sizes: Sizes) {
    check_decoding::<V, K>(variant, Problem::new(variant, sizes, None));
}

/// Compares a prompt in pieces, then single tokens, with the full pass in f32 on the CPU.
fn check_decoding<V: Conformance, K: OpBackend>(variant: &V, problem: Problem) {
    let problem = problem.in_bf16();
    let want = attend::<V, Flex>(variant, &problem.in_f32());
    let mut decoding = Decoding::<V, K>::new(variant, &problem);
    let prompt = problem.seq_len - 6;
    // Long prompts begin with a single token; pieces end inside, at and after a tile of 64 tokens.
    let pieces = match prompt {
        200.. => vec![1, 62, 1, 1, 64, 1, 13, prompt - 143],
        _ => vec![prompt * 2 / 3, prompt - prompt * 2 / 3],
    };
    let pieces = pieces.into_iter().map(|n| decoding.extend(n)).collect();
    let prefilled = Tensor::cat(pieces, 2);
    let steps = (prompt..problem.seq_len).map(|_| decoding.extend(1)).collect();
    let what = format!("{variant:?}, {:?}, decoding {}", problem.shape, problem.seq_len);
    let value_dim = prefilled.dims()[3];
    // The elements of some tokens, in the order of `to_vec`.
    let of = |all: &[f64], tokens: &Range<usize>| -> Vec<f64> {
        let rows = all.chunks_exact(problem.seq_len * value_dim);
        rows.flat_map(|row| &row[tokens.start * value_dim..tokens.end * value_dim])
            .copied()
            .collect()
    };
    let count = variant.roundings();
    let budget = Roundings { count, least: 0.0, vector: value_dim, kinks: false };
    let parts = [(prefilled, 0..prompt), (Tensor::cat(steps, 2), prompt..problem.seq_len)];
    for (got, tokens) in parts {
        let nudged = || nudges(&problem).map(|x| of(&attend::<V, Flex>(variant, &x), &tokens));
        budget.check_beside(&what, &to_vec(got), &of(&want, &tokens), nudged);
    }
}

/// Checks outputs and the gradients of every input; equal bits in two runs.
fn check<V: Conformance, K: OpBackend>(variant: &V, problem: Problem) {
    let problem = problem.in_bf16();
    let what = format!("{variant:?}, {:?}, seq_len {}", problem.shape, problem.seq_len);
    let roundings = variant.roundings();
    let mut upstream = problem.oracle(variant);
    let output = attend::<V, K>(variant, &problem);
    let vector = variant.value_dim(&problem.shape);
    let budget = Roundings { count: roundings, least: 0.0, vector, kinks: false };
    let nudged = || nudges(&problem).map(|x| attend::<V, Flex>(variant, &x));
    budget.check_beside(&what, &output, &upstream.data, nudged);
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut draw = || bf16::from_f32(rng.random_range(-1.0f32..1.0)).to_f64();
    upstream.data.iter_mut().for_each(|x| *x = draw());
    let got = gradients::<V, K>(variant, &problem, &upstream);
    let want = gradients::<V, Flex>(variant, &problem.in_f32(), &upstream);
    // The gradients of q and k may vanish, as for a single key, while v's do not.
    let least = variant.vanished() * root_mean_square(&want.concat());
    let is_parameter = |input: usize| problem.inputs[input].shape.len() == 1;
    for (input, (got, want)) in got.iter().zip(&want).enumerate().filter(|x| !is_parameter(x.0)) {
        let what = format!("{what}, gradient of input {input}");
        let vector = *problem.inputs[input].shape.last().expect("a dimension");
        let kinks = variant.has_kinks();
        let nudged = || {
            nudges(&problem)
                .map(|x| gradients::<V, Flex>(variant, &x, &upstream).swap_remove(input))
        };
        let budget = Roundings { count: roundings, least, vector, kinks };
        budget.check_beside(&what, got, want, nudged);
    }
    if (0..want.len()).any(is_parameter) {
        check_parameters(&what, variant, &problem, &upstream, [&got, &want], least);
    }
    assert_eq!(got, gradients::<V, K>(variant, &problem, &upstream), "{what}: two runs differ");
}

/// The root mean square of the relative errors of rounding to bf16.
const NUDGE: f64 = 1.0 / 512.0;

/// The problem in f32, in each of four draws with every input but the learned vectors, which are never rounded,
/// changed by as much as a rounding: this estimates the effect of one rounding on a result.
fn nudges(problem: &Problem) -> impl Iterator<Item = Problem> {
    (0..4).map(|draw| {
        let mut nudged = problem.in_f32().nudged(NUDGE, draw);
        let vectors = nudged.inputs.iter_mut().zip(&problem.inputs);
        vectors.filter(|(_, x)| x.shape.len() == 1).for_each(|(to, x)| to.clone_from(x));
        nudged
    })
}

/// Checks the gradients of learned vectors against the effect of `roundings` roundings: an element is a sum
/// over all tokens, which may cancel. Where that effect vanishes, as for a single key, errors are relative to
/// `least`, the size of the other gradients.
fn check_parameters<V: Conformance>(
    what: &str,
    variant: &V,
    problem: &Problem,
    upstream: &Tensor64,
    [got, want]: [&[Vec<f64>]; 2],
    least: f64,
) {
    let nudged: Vec<_> =
        nudges(problem).map(|x| gradients::<V, Flex>(variant, &x, upstream)).collect();
    let vectors = (0..want.len()).filter(|&input| problem.inputs[input].shape.len() == 1);
    for (input, spec) in vectors.zip(variant.parameters(&problem.shape)) {
        let nudged = nudged.iter().map(|x| x[input].clone());
        check_parameter(what, variant, spec.name, [&got[input], &want[input]], nudged, least);
    }
}

/// As [`check_parameters`], of the vector `name`, whose gradient is `nudged` for [`nudges`].
fn check_parameter<V: Conformance>(
    what: &str,
    variant: &V,
    name: &str,
    [got, want]: [&[f64]; 2],
    nudged: impl Iterator<Item = Vec<f64>>,
    least: f64,
) {
    assert!(got.iter().all(|x| x.is_finite()), "{what}, gradient of {name}: {got:?}");
    if variant.cancelling().contains(&name) {
        return;
    }
    let roundings = f64::from(variant.roundings()).sqrt();
    let differences = |x: &[f64]| x.iter().zip(want).map(|(a, b)| a - b).collect::<Vec<_>>();
    let moved: Vec<f64> = nudged.flat_map(|x| differences(&x)).collect();
    let largest = moved.iter().fold(NUDGE * least, |a, x| a.max(x.abs()));
    let moved = root_mean_square(&moved).max(NUDGE * least);
    let (worst, mean) = (largest_difference(got, want), root_mean_square(&differences(got)));
    record(worst / want.iter().fold(least, |a, x| a.max(x.abs())));
    assert!(
        worst <= 5f64.sqrt() * roundings * largest && mean <= 2.0 * roundings * moved,
        "{what}, gradient of {name}: off by {worst:.2e}, root mean square \
         {mean:.2e}; one rounding moves it by {largest:.2e}, root mean square {moved:.2e}",
    );
}

/// The allowed error of results that kernels in bf16 compute.
///
/// Each of `count` independent roundings has a relative error of at most 2⁻⁸, and of 2⁻⁹ in the root mean
/// square. The root mean square error may be √count · 2⁻⁹ times the results' root mean square. Errors
/// within a vector share their causes, so that the root mean square over n vectors fluctuates by 1/√(2n):
/// two such deviations are allowed on top. The largest error may be √5 times as much of the largest result:
/// with five roundings of many vectors that is its own, 2⁻⁸, plus three times 2⁻⁹.
#[derive(Clone, Copy)]
pub struct Roundings {
    pub count: u32,
    /// The size below which results count as vanished.
    pub least: f64,
    /// Elements of a vector.
    pub vector: usize,
    /// Whether single results may be off by their own size, see [`Conformance::has_kinks`].
    pub kinks: bool,
}

impl Roundings {
    /// # Panics
    /// When `got` differs from `want` by more.
    pub fn check(self, what: &str, got: &[f64], want: &[f64]) {
        self.check_beside(what, got, want, iter::empty);
    }

    /// As [`Roundings::check`]; `nudged` computes the results of [`nudges`]. Where results amplify roundings of
    /// the inputs, as quotients of small numbers do, their effect counts as that of one rounding.
    fn check_beside<I: Iterator<Item = Vec<f64>>>(
        self,
        what: &str,
        got: &[f64],
        want: &[f64],
        nudged: impl Fn() -> I,
    ) {
        assert_eq!(got.len(), want.len(), "{what}");
        assert!(got.iter().all(|x| x.is_finite()), "{what}: not finite");
        let largest = want.iter().fold(self.least, |a, x| a.max(x.abs()));
        let size = root_mean_square(want).max(self.least);
        let errors: Vec<f64> = got.iter().zip(want).map(|(a, b)| a - b).collect();
        let (worst, mean) = (largest_difference(got, want), root_mean_square(&errors));
        let vectors = got.len() as f64 / self.vector as f64;
        let fluctuation = 1.0 + (2.0 / vectors).sqrt();
        let roundings = f64::from(self.count).sqrt() * fluctuation;
        // What one rounding may do, at most and in the root mean square.
        let mut one = [NUDGE * if self.kinks { f64::INFINITY } else { largest }, NUDGE * size];
        let limits = |[most, usual]: [f64; 2]| [5f64.sqrt() * roundings * most, roundings * usual];
        if worst > limits(one)[0] || mean > limits(one)[1] {
            let moved: Vec<f64> = nudged()
                .flat_map(|x| x.into_iter().zip(want).map(|(x, want)| x - want).collect::<Vec<_>>())
                .collect();
            let most = moved.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            one = [one[0].max(most), one[1].max(root_mean_square(&moved))];
        }
        let [allowed_worst, allowed] = limits(one);
        // Where all results are 0, the largest error itself.
        record(if largest > 0.0 { worst / largest } else { worst });
        assert!(
            worst <= allowed_worst && mean <= allowed,
            "{what}: off by {worst:.2e} of {largest:.2e}, allowed {allowed_worst:.2e}; root mean \
             square {mean:.2e}, allowed {allowed:.2e}"
        );
    }
}
