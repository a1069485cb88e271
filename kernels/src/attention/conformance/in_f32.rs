//! The suite in f32: outputs and the gradients of every input against f64, packing, windows,
//! decoding, causality, determinism.
//!
//! The code under test may have twice the error of the reference, plus rounding. A kind without a kernel
//! is its own reference, and is then only compared with the oracle.

use burn::backend::Flex;
use burn::tensor::Tensor;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::carried::{InPieces, refuses_a_state};
use super::problem::{cut, windows};
use super::run::{Decoding, attend, gradients, largest_difference, to_vec};
use super::{Conformance, Problem};
use crate::attention::dispatch;
use crate::backend::{OpBackend, with_reference};
use crate::testing::{CHECKED, Tensor64, assert_conditioned_budget, differences, record};

/// One unit in the last place, relative to a number: the perturbation of inputs that shows how well a
/// problem is conditioned.
const EPSILON: f64 = f32::EPSILON as f64;

/// The problem with its inputs changed in their last bits, several times: one draw may leave the largest errors out.
fn nudges(problem: &Problem) -> [Problem; 4] {
    [17, 18, 19, 20].map(|seed| problem.nudged(EPSILON, seed))
}

/// As [`assert_conditioned_budget`], with the reference's results first.
fn assert_within(what: &str, kernel: &[f64], references: &[Vec<f64>; 5], want: &[f64]) {
    assert_conditioned_budget(what, kernel, &references.each_ref().map(Vec::as_slice), want);
}

fn check_outputs<V: Conformance, K: OpBackend>(variant: &V, problem: &Problem) {
    let want = problem.oracle(variant);
    let kernel = attend::<V, K>(variant, problem);
    let reference = |problem: &Problem| with_reference(|| attend::<V, K>(variant, problem));
    let [a, b, c, d] = nudges(problem).each_ref().map(reference);
    let what = format!("{variant:?}, {:?}, seq_len {}", problem.shape, problem.seq_len);
    assert_within(&what, &kernel, &[reference(problem), a, b, c, d], &want.data);
}

impl Problem {
    /// Asserts that the CPU's outputs and gradients agree with the oracle's.
    pub fn agrees_with_the_oracle<V: Conformance>(&self, variant: &V) {
        check_outputs::<V, Flex>(variant, self);
        check_gradients::<V, Flex>(variant, self);
    }
}

/// The gradients for one upstream gradient, by the kernel and the reference, which also has those of [`nudges`].
struct UpstreamGrads {
    upstream: Tensor64,
    kernel: Vec<Vec<f64>>,
    references: [Vec<Vec<f64>>; 5],
}

impl UpstreamGrads {
    fn new<V: Conformance, K: OpBackend>(
        variant: &V,
        problem: &Problem,
        mut upstream: Tensor64,
        seed: u64,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        upstream.data.iter_mut().for_each(|x| *x = f64::from(rng.random_range(-1.0f32..1.0)));
        let kernel = gradients::<V, K>(variant, problem, &upstream);
        let reference =
            |problem: &Problem| with_reference(|| gradients::<V, K>(variant, problem, &upstream));
        let [a, b, c, d] = nudges(problem).each_ref().map(reference);
        let references = [reference(problem), a, b, c, d];
        UpstreamGrads { upstream, kernel, references }
    }
}

/// The compared gradients of one input.
#[derive(Clone, Default)]
struct GradSample {
    kernel: Vec<f64>,
    references: [Vec<f64>; 5],
    want: Vec<f64>,
}

/// A sample of each input's gradients; asserts equal bits in two runs.
fn gradient_samples<V: Conformance, K: OpBackend>(
    variant: &V,
    problem: &Problem,
) -> Vec<GradSample> {
    let oracle = |inputs: &[Tensor64]| variant.oracle(&problem.shape, inputs, &problem.documents);
    let output = oracle(&problem.inputs);
    let mut upstream_grads: Vec<UpstreamGrads> = vec![];
    let mut samples = vec![GradSample::default(); problem.inputs.len()];
    for (input, sample) in samples.iter_mut().enumerate() {
        // An input of few elements is compared for several upstream gradients, until the sample is large
        // enough: the rounding error of one number means nothing.
        for draw in 0..CHECKED.div_ceil(problem.inputs[input].data.len()) {
            if upstream_grads.len() == draw {
                let seed = 5 + draw as u64;
                upstream_grads.push(UpstreamGrads::new::<V, K>(
                    variant,
                    problem,
                    output.clone(),
                    seed,
                ));
            }
            let upstream_grads = &upstream_grads[draw];
            let (places, want) =
                differences(&problem.inputs, input, &upstream_grads.upstream, V::STEP, &oracle);
            sample.kernel.extend(places.iter().map(|&p| upstream_grads.kernel[input][p]));
            for (all, of_draw) in sample.references.iter_mut().zip(&upstream_grads.references) {
                all.extend(places.iter().map(|&p| of_draw[input][p]));
            }
            sample.want.extend(want);
        }
    }
    let again = gradients::<V, K>(variant, problem, &upstream_grads[0].upstream);
    assert_eq!(upstream_grads[0].kernel, again, "{variant:?}: gradients of two runs differ");
    samples
}

fn check_gradients<V: Conformance, K: OpBackend>(variant: &V, problem: &Problem) {
    let samples = gradient_samples::<V, K>(variant, problem);
    for (input, GradSample { kernel, references, want }) in samples.into_iter().enumerate() {
        let what = format!("{variant:?}, {:?}, gradient of input {input}", problem.shape);
        assert_within(&what, &kernel, &references, &want);
    }
}

/// Gradients for a single token. Those of q and k may vanish by cancellation, so that errors relative to
/// them mean nothing: errors are relative to the largest gradient of any input.
fn check_gradients_of_one_token<V: Conformance, K: OpBackend>(variant: &V) {
    let problem = Problem::new(variant, [2, 2, 8, 1, 1], None);
    let samples = gradient_samples::<V, K>(variant, &problem);
    let mut all = GradSample::default();
    for GradSample { kernel, references, want } in samples {
        all.kernel.extend(kernel);
        all.references.iter_mut().zip(references).for_each(|(all, x)| all.extend(x));
        all.want.extend(want);
    }
    let what = format!("{variant:?}, gradients for one token");
    assert_within(&what, &all.kernel, &all.references, &all.want);
}

/// Outputs at awkward lengths, with and without grouped heads.
pub fn agrees_with_the_oracle<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for seq_len in [1, 63, 64, 100, 257] {
            check_outputs::<V, K>(&variant, &Problem::new(&variant, [2, 2, 8, 1, seq_len], None));
        }
        check_outputs::<V, K>(&variant, &Problem::new(&variant, [6, 2, 16, 2, 70], None));
        check_outputs::<V, K>(&variant, &Problem::new(&variant, [4, 1, 32, 1, 33], None));
    }
    for head_dim in [64, 96, 128] {
        let variant = &V::cases()[0];
        check_outputs::<V, K>(variant, &Problem::new(variant, [2, 1, head_dim, 1, 40], None));
    }
}

/// Gradients of every input.
pub fn gradients_agree_with_the_oracle<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        check_gradients_of_one_token::<V, K>(&variant);
        for sizes in [[2, 2, 8, 1, 12], [4, 2, 8, 2, 9], [2, 1, 16, 1, 33]] {
            check_gradients::<V, K>(&variant, &Problem::new(&variant, sizes, None));
        }
        for window in windows(&variant, &[5]) {
            check_gradients::<V, K>(&variant, &Problem::new(&variant, [2, 1, 8, 1, 70], window));
        }
        let packed = Problem::new(&variant, [2, 2, 8, 2, 70], None).packed(&[0, 1, 30, 66]);
        check_gradients::<V, K>(&variant, &packed);
    }
}

/// Windows shorter and longer than the sequence.
pub fn windows_agree_with_the_oracle<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in windows(&variant, &[1, 3, 64, 65, 200]) {
            check_outputs::<V, K>(&variant, &Problem::new(&variant, [2, 1, 8, 1, 130], window));
        }
    }
}

/// Packed documents agree with the oracle, and with each document alone.
pub fn documents_do_not_see_each_other<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in windows(&variant, &[7]) {
            let problem = Problem::new(&variant, [4, 2, 8, 2, 100], window);
            check_outputs::<V, K>(&variant, &problem.packed(&[0, 1, 17, 64, 99]));
            // The last token is alone in its piece.
            let problem = Problem::new(&variant, [2, 1, 8, 2, 129], window);
            check_outputs::<V, K>(&variant, &problem.packed(&[0, 40, 128]));
        }
        let problem = Problem::new(&variant, [2, 2, 8, 1, 100], None).packed(&[0, 40]);
        let inputs = problem.tensors::<K>();
        let part =
            |first, n| dispatch::attend(&variant, &problem.shape, cut(&inputs, first, n), None);
        // Each document alone, without packing.
        let apart = to_vec(Tensor::cat(vec![part(0, 40), part(40, 60)], 2));
        assert_close(&attend::<V, K>(&variant, &problem), &apart);
    }
}

fn assert_close(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-3f64, |a, x| a.max(x.abs()));
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 1e-5 * scale, "{got} where {want} is right");
    }
}

/// A later token changes no earlier output, not by a bit; it does change its own.
pub fn is_causal<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        let problem = Problem::new(&variant, [2, 1, 8, 1, 100], None);
        let before = attend::<V, K>(&variant, &problem);
        let from = 70;
        let after = attend::<V, K>(&variant, &problem.changed(from));
        for (at, (before, after)) in before.iter().zip(&after).enumerate() {
            let t = at / variant.value_dim(&problem.shape) % 100;
            assert_eq!(before == after, t < from, "{variant:?} at position {t}");
        }
    }
}

/// A thorough probe gets every metric, and the weights' as they are defined.
pub fn a_thorough_probe_measures_weights_and_gates<V: Conformance, K: OpBackend>() {
    crate::attention::weights::tests::agree_with_their_definitions::<V, K>();
}

/// A prefill and then steps, alone and in small groups, equal the full forward pass.
pub fn decoding_equals_the_full_pass<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in windows(&variant, &[1, 6]) {
            for steps in [&[17, 1, 1, 3, 1, 20, 17][..], &[127, 1, 1, 1]] {
                let tokens = steps.iter().sum();
                let problem = Problem::new(&variant, [4, 2, 8, 2, tokens], window);
                let full = attend::<V, K>(&variant, &problem);
                let mut decoding = Decoding::<V, K>::new(&variant, &problem);
                let outputs = steps.iter().map(|&n| decoding.extend(n)).collect();
                assert_close(&to_vec(Tensor::cat(outputs, 2)), &full);
            }
        }
    }
}

/// Rows in pieces, each from the state after the one before: outputs equal those of whole rows, and gradients those of
/// the last piece there.
pub fn rows_go_on_from_a_state<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        if !variant.carries_state() {
            refuses_a_state::<V, K>(&variant);
            continue;
        }
        for pieces in [[33, 1, 36], [64, 64, 1], [3, 70, 27]] {
            for problem in InPieces::all(&variant, [4, 2, 8, 2], pieces) {
                check_pieces::<V, K>(&variant, &problem);
            }
        }
    }
}

fn check_pieces<V: Conformance, K: OpBackend>(variant: &V, pieces: &InPieces) {
    let upstream = pieces.upstream(variant);
    let got = pieces.results::<V, K>(variant, &upstream);
    let want = pieces.expected(variant, &upstream);
    let near = nudges(&pieces.problem)
        .map(|problem| InPieces { problem, ..pieces.clone() }.expected(variant, &upstream));
    assert_eq!(got.len(), want.len(), "results of {variant:?}");
    // A single token's gradients of q and k may vanish: errors are relative to those of all inputs.
    let largest = want[1..].iter().flatten().fold(0.0f64, |a, x| a.max(x.abs()));
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!(got.len(), want.len(), "{variant:?}, result {i}");
        let scale = want.iter().fold(1e-2 * largest, |a, x| a.max(x.abs()));
        let own = near.iter().map(|near| largest_difference(&near[i], want));
        let allowed = (2e-5 * scale).max(4.0 * own.fold(0.0, f64::max));
        let off = largest_difference(got, want);
        record(off / scale);
        assert!(
            off <= allowed,
            "{variant:?}, pieces of {:?} tokens, documents {:?}, result {i} (outputs, then gradients): off by \
             {off:.2e}, allowed {allowed:.2e}, largest value {scale:.2e}",
            pieces.pieces,
            pieces.problem.documents[0]
        );
    }
}

/// The state has the documented size, up to a factor of two either way.
pub fn the_state_is_as_large_as_documented<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in windows(&variant, &[1, 40]) {
            let batch = 2;
            let problem = Problem::new(&variant, [4, 2, 8, batch, 300], window);
            let mut decoding = Decoding::<V, K>::new(&variant, &problem);
            for t in 0..300 {
                decoding.extend(1);
                let documented = variant.state_elements(&problem.shape, t + 1) as usize;
                let held = decoding.elements() / batch;
                assert!(
                    documented <= 2 * held && held <= 2 * documented,
                    "{variant:?}, window {window:?}: {held} elements after {} tokens, documented \
                     {documented}",
                    t + 1
                );
            }
        }
    }
}

/// Two runs give the same bits.
pub fn is_deterministic<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        let problem = Problem::new(&variant, [4, 2, 16, 2, 130], None);
        assert_eq!(attend::<V, K>(&variant, &problem), attend::<V, K>(&variant, &problem));
    }
}

/// A NaN in the input propagates: a training step must be able to detect it.
pub fn a_nan_shows<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for input in 0..3 {
            let mut problem = Problem::new(&variant, [1, 1, 8, 1, 20], None);
            problem.inputs[input].data[3] = f64::NAN;
            let shows = attend::<V, K>(&variant, &problem).iter().any(|x| x.is_nan());
            assert!(shows, "input {input}");
        }
    }
}

/// Outputs and gradients at a training step's sizes, where burn may choose other kernels, agree with the
/// CPU's: to 2e-5 of the largest value, or to the CPU's own change when each input changes in its last bit
/// (sums over a batch that cancel, for example, have few significant digits).
pub fn agrees_with_the_cpu_at_a_models_size<V: Conformance, K: OpBackend>() {
    let variant = &V::cases()[0];
    for starts in [&[0][..], &[0, 1, 100, 161]] {
        let mut problem = Problem::new(variant, [3, 3, 64, 16, 256], None).packed(starts);
        // Away from scores of zero: power attention divides a row's only key by its score.
        problem.inputs[..2].iter_mut().flat_map(|x| &mut x.data).for_each(|x| *x += 0.5);
        let shape = &problem.shape;
        let sizes = [problem.batch, shape.heads, problem.seq_len, variant.value_dim(shape)];
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let draw = |_| f64::from(rng.random_range(-1.0f32..1.0));
        let upstream = Tensor64::new(&sizes, (0..sizes.iter().product()).map(draw).collect());
        let got = results::<V, K>(variant, &problem, &upstream);
        let want = results::<V, Flex>(variant, &problem, &upstream);
        let near = nudges(&problem).map(|x| results::<V, Flex>(variant, &x, &upstream));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let scale = want.iter().fold(1e-3f64, |a, x| a.max(x.abs()));
            let own = near.iter().map(|near| largest_difference(&near[i], want));
            let allowed = (2e-5 * scale).max(4.0 * own.fold(0.0, f64::max));
            let off = largest_difference(got, want);
            record(off / scale);
            assert!(
                off <= allowed,
                "{variant:?}, documents at {starts:?}, result {i} (output, then gradients): off by \
                 {off:.2e}, allowed {allowed:.2e}, largest value {scale:.2e}"
            );
        }
    }
}

/// The output, then every input's gradient.
fn results<V: Conformance, K: OpBackend>(
    variant: &V,
    problem: &Problem,
    upstream: &Tensor64,
) -> Vec<Vec<f64>> {
    let mut results = vec![attend::<V, K>(variant, problem)];
    results.extend(gradients::<V, K>(variant, problem, upstream));
    results
}
