//! The conformance of a kind's bf16 kernels: outputs, gradients and decoding against the f64 oracle.

use std::ops::Range;

use burn::backend::Flex;
use burn::tensor::{Tensor, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Conformance, Problem, cut, dispatch, gradients, largest_difference, to_vec, windows};
use crate::backend::{OpBackend, with_reference};
use crate::testing::served::served;
use crate::testing::{record, root_mean_square};

/// The tests of a kind with bf16 kernels on CUDA.
macro_rules! bf16_suite {
    ($v:ty) => {
        #[test]
        #[ignore = "needs a GPU"]
        fn cuda_bf16_agrees_with_the_oracle() {
            crate::attention::conformance::bf16_agrees_with_the_oracle::<$v, crate::Cuda>();
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn cuda_bf16_is_deterministic_on_a_full_device() {
            crate::attention::conformance::bf16_is_deterministic_on_a_full_device::<
                $v,
                crate::Cuda,
            >();
        }

        #[test]
        #[ignore = "needs a GPU"]
        fn cuda_bf16_is_causal_and_shows_a_nan() {
            crate::attention::conformance::bf16_is_causal_and_shows_a_nan::<$v, crate::Cuda>();
        }
    };
}
pub(crate) use bf16_suite;

/// Outputs and gradients of q, k, v and the projections in bf16, for a kind with a kernel for it.
pub fn bf16_agrees_with_the_oracle<V: Conformance, K: OpBackend>() {
    // Each size and mask is a kernel of its own, which takes seconds to compile.
    for (at, variant) in V::cases().into_iter().enumerate() {
        let check = |sizes, window| {
            check_bf16::<V, K>(&variant, Problem::new(&variant, sizes, window));
        };
        let check_decoding = |sizes, window| {
            check_bf16_decoding::<V, K>(&variant, Problem::new(&variant, sizes, window));
        };
        if at == 0 {
            check([2, 2, 64, 1, 1], None);
            check([2, 1, 16, 1, 33], None);
            check([2, 2, 80, 1, 129], None);
            check([2, 1, 192, 1, 70], None);
            check([2, 2, 256, 1, 100], None);
            for window in windows(&variant, &[1, 65]) {
                check([2, 1, 128, 1, 140], window);
            }
        }
        check([4, 2, 64, 2, 100], None);
        let packed = Problem::new(&variant, [4, 1, 64, 2, 200], None).packed(&[0, 1, 90, 130, 199]);
        check_bf16::<V, K>(&variant, packed);
        for window in windows(&variant, &[70]) {
            if at == 0 {
                check_decoding([40, 2, 80, 1, 70], window);
                check_decoding([2, 2, 128, 3, 700], window);
                check_decoding([2, 1, 256, 1, 90], window);
            }
            check_decoding([4, 1, 64, 2, 130], window);
        }
    }
}

/// As [`bf16_agrees_with_the_oracle`], of one variant at one size.
pub fn bf16_agrees_at<V: Conformance, K: OpBackend>(
    variant: &V,
    sizes: super::Sizes,
    window: Option<usize>,
) {
    check_bf16::<V, K>(variant, Problem::new(variant, sizes, window));
}

/// As [`bf16_agrees_at`], with documents that begin at `starts`, where pruning leaves something out.
pub fn bf16_agrees_pruned_and_packed<V: Conformance, K: OpBackend>(
    variant: &V,
    sizes: super::Sizes,
    starts: &[usize],
) {
    let problem = Problem::new(variant, sizes, None).packed(starts);
    let (shape, documents) = (problem.shape, problem.documents());
    let share = dispatch::share_left_out(
        variant,
        &shape,
        problem.clone().in_bf16().tensors::<K>(),
        documents,
    );
    assert!(share.is_some_and(|share| share > 0.0), "{share:?} left out of {sizes:?}");
    check_bf16::<V, K>(variant, problem);
}

/// Decoding in bf16, as in [`bf16_agrees_with_the_oracle`], of one variant at one size.
pub fn bf16_decodes_at<V: Conformance, K: OpBackend>(variant: &V, sizes: super::Sizes) {
    check_bf16_decoding::<V, K>(variant, Problem::new(variant, sizes, None));
}

/// The same bits in many runs that fill the device: a block that reads what is being overwritten
/// shows in few of them.
pub fn bf16_is_deterministic_on_a_full_device<V: Conformance, K: OpBackend>() {
    const RUNS: usize = 8;
    let variant = &V::cases()[0];
    for sizes in [[12, 12, 64, 24, 1024], [16, 4, 128, 8, 1024]] {
        let problem = Problem::new(variant, sizes, None).in_bf16();
        let upstream = &problem.inputs[0];
        let mut state = dispatch::State::<_, K>::new(0);
        let inputs = problem.tensors::<K>();
        dispatch::extend(variant, &problem.shape, cut(&inputs, 0, problem.seq_len - 1), &mut state);
        let run = || {
            let token = cut(&inputs, problem.seq_len - 1, 1);
            let decoded =
                to_vec(dispatch::extend(variant, &problem.shape, token, &mut state.clone()));
            let gradients = gradients::<V, K>(variant, &problem, upstream);
            (problem.attend::<V, K>(variant), gradients, decoded)
        };
        let (output, gradients, decoded) = run();
        for at in 1..RUNS {
            let (again, gradients_again, decoded_again) = run();
            assert!(again == output, "outputs of {:?} in run {at}", problem.shape);
            assert!(gradients_again == gradients, "gradients of {:?} in run {at}", problem.shape);
            assert!(decoded_again == decoded, "decoding of {:?} in run {at}", problem.shape);
        }
        // What its copies decoded has not changed the state.
        let token = cut(&inputs, problem.seq_len - 1, 1);
        let last = to_vec(dispatch::extend(variant, &problem.shape, token, &mut state));
        assert!(last == decoded, "decoding of {:?} after copies", problem.shape);
    }
}

/// A later token changes no earlier output, not by a bit, but its own; a NaN in the input shows.
pub fn bf16_is_causal_and_shows_a_nan<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        let problem = Problem::new(&variant, [4, 2, 64, 2, 100], None);
        let attend = |problem: Problem| problem.in_bf16().attend::<V, K>(&variant);
        for from in [1, 63, 64, 70, 99] {
            let (before, after) = (attend(problem.clone()), attend(problem.changed(from)));
            let rows = before.chunks_exact(64).zip(after.chunks_exact(64));
            for (at, (before, after)) in rows.enumerate() {
                let t = at % 100;
                assert_eq!(before == after, t < from, "{variant:?} at position {t}");
            }
        }
        for input in 0..3 {
            let mut problem = problem.clone();
            problem.inputs[input].data[3] = f64::NAN;
            assert!(attend(problem).iter().any(|x| x.is_nan()), "NaN in input {input}");
        }
    }
}

/// Holds a prompt in pieces and then single tokens to the whole pass in f32 on the CPU.
fn check_bf16_decoding<V: Conformance, K: OpBackend>(variant: &V, problem: Problem) {
    let problem = problem.in_bf16();
    let want = problem.in_f32().attend::<V, Flex>(variant);
    let inputs = problem.tensors::<K>();
    let mut state = dispatch::State::<_, K>::new(0);
    let prompt = problem.seq_len - 6;
    // Long ones begin with a single token; pieces end within tiles of 64 tokens, with one, and after one.
    let pieces = match prompt {
        200.. => vec![1, 62, 1, 1, 64, 1, 13, prompt - 143],
        _ => vec![prompt * 2 / 3, prompt - prompt * 2 / 3],
    };
    let mut first = 0;
    let pieces = pieces.into_iter().map(|n| {
        first += n;
        dispatch::extend(variant, &problem.shape, cut(&inputs, first - n, n), &mut state)
    });
    let prefilled = Tensor::cat(pieces.collect(), 2);
    let steps = (prompt..problem.seq_len)
        .map(|t| dispatch::extend(variant, &problem.shape, cut(&inputs, t, 1), &mut state))
        .collect();
    let what = format!("{variant:?}, {:?}, decoding {}", problem.shape, problem.seq_len);
    let head_dim = prefilled.dims()[3];
    // The elements of some tokens, as `to_vec` has them.
    let of = |tokens: Range<usize>| {
        let rows = want.chunks_exact(problem.seq_len * head_dim);
        rows.flat_map(|row| &row[tokens.start * head_dim..tokens.end * head_dim]).copied().collect()
    };
    let parts = [(prefilled, 0..prompt), (Tensor::cat(steps, 2), prompt..problem.seq_len)];
    for (got, tokens) in parts {
        let want: Vec<f64> = of(tokens);
        assert_roundings(&what, &to_vec(got), &want, variant.roundings(), 0.0);
    }
}

/// Holds outputs to the oracle, and gradients to those in f32 on the CPU, which the other tests hold
/// to the oracle's central differences.
fn check_bf16<V: Conformance, K: OpBackend>(variant: &V, problem: Problem) {
    let problem = problem.in_bf16();
    let what = format!("{variant:?}, {:?}, seq_len {}", problem.shape, problem.seq_len);
    let roundings = variant.roundings();
    let mut upstream = variant.oracle(&problem.shape, &problem.inputs, &problem.documents);
    let (output, served) = served(|| problem.attend::<V, K>(variant));
    let of_attention = |op: &&&str| op.contains("::attention::");
    let by_reference: Vec<_> = served.references.iter().filter(of_attention).collect();
    assert!(by_reference.is_empty(), "{what}: {by_reference:?} ran references");
    assert!(served.kernels.iter().any(|op| of_attention(&op)), "{what}: no kernel ran");
    assert_roundings(&what, &output, &upstream.data, roundings, 0.0);
    if problem.seq_len > 32 && problem.shape.window != Some(1) {
        // The reference rounds once, at its end, so that some element differs, unless each output is
        // one key's value.
        let reference = with_reference(|| problem.attend::<V, K>(variant));
        assert!(output != reference, "{what}: no kernel ran");
    }
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut draw = || bf16::from_f32(rng.random_range(-1.0f32..1.0)).to_f64();
    upstream.data.iter_mut().for_each(|x| *x = draw());
    let got = gradients::<V, K>(variant, &problem, &upstream);
    let want = gradients::<V, Flex>(variant, &problem.in_f32(), &upstream);
    // Those of q and k may vanish, as for a single key, where v's do not.
    let least = variant.vanished() * root_mean_square(&want.concat());
    for (input, (got, want)) in got.iter().zip(&want).enumerate() {
        if problem.inputs[input].shape.len() > 1 {
            let what = format!("{what}, gradient of input {input}");
            assert_roundings(&what, got, want, roundings, least);
        }
    }
    assert_eq!(got, gradients::<V, K>(variant, &problem, &upstream), "{what}: two runs differ");
}

/// Allows for `roundings` to bf16, each at most 2⁻⁸ of what it rounds and 2⁻⁹ in the root mean
/// square, and independent: the mean over all results errs by the root of their number times that, of
/// their size, which counts as `least` at least. A single one errs by √5 times as much, of the largest
/// result: with five roundings that is its own, 2⁻⁸, and three times 2⁻⁹.
pub fn assert_roundings(what: &str, got: &[f64], want: &[f64], roundings: u32, least: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    assert!(got.iter().all(|x| x.is_finite()), "{what}: not finite");
    let largest = want.iter().fold(least, |a, x| a.max(x.abs()));
    let size = root_mean_square(want).max(least);
    let errors: Vec<f64> = got.iter().zip(want).map(|(a, b)| a - b).collect();
    let (worst, mean) = (largest_difference(got, want), root_mean_square(&errors));
    let relative = f64::from(roundings).sqrt() * 2f64.powi(-9);
    let allowed = relative * size;
    record(worst / largest);
    assert!(
        worst <= 5f64.sqrt() * relative * largest && mean <= allowed,
        "{what}: off by {worst:.2e} of {largest:.2e}, root mean square {mean:.2e}, allowed \
         {allowed:.2e}"
    );
}
