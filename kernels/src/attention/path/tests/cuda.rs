//! The CUDA kernels against recurrences in f64, over several levels of halves.

use burn::backend::Flex;
use burn::tensor::{FloatDType, Tensor, bf16};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::kernel::Case;
use super::numerics::Sample;
use super::{uniform, values};
use crate::Cuda;
use crate::attention::ExecPath;
use crate::attention::path::cuda::PathKvCache;
use crate::attention::path::op::{Path, PathInputs, path_attention};
use crate::backend::tensor;
use crate::device::DeviceKind;
use crate::testing::root_mean_square;

/// A case whose q, k and v are numbers of bf16.
fn case(what: &'static str, sample: Sample) -> Case {
    Case::new(what, sample.rounded())
}

/// Compares gradients with the recurrences: the root mean square of their errors may be `allowed` times that of the
/// gradient.
fn check(case: &Case, allowed: f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let upstream = uniform(&mut rng, 2 * case.sample.len() * case.sample.head_dim);
    let upstream: Vec<f32> = upstream.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    let got = case.gradients::<Cuda>(&upstream, FloatDType::BF16);
    let again = case.gradients::<Cuda>(&upstream, FloatDType::BF16);
    let want = case.expected(&upstream);
    for (n, name) in ["q", "k", "v", "w", "beta", "log decay"].iter().enumerate() {
        let what = format!("{}, gradient of {name}", case.what);
        assert!(got[n] == again[n], "{what}: two runs differ");
        let errors: Vec<f64> = got[n].iter().zip(&want[n]).map(|(got, want)| got - want).collect();
        let error = root_mean_square(&errors) / root_mean_square(&want[n]).max(1e-3);
        assert!(error <= allowed, "{what} is off by {error:.2e} of its root mean square");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_agree_with_recurrences_across_levels() {
    for len in [1, 15, 64, 65, 129, 300] {
        check(&case("64 channels", Sample::new(len, 64)), 0.01);
    }
    check(&case("128 channels", Sample::new(260, 128)), 0.01);
    check(&case("96 channels", Sample::new(150, 96)), 0.01);
    check(&case("32 channels", Sample::new(700, 32)), 0.01);
    // The last part of 1,024 tokens is shorter than a piece of their moves.
    check(&case("pieces of parts", Sample::new(3_100, 16)), 0.01);
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_of_extreme_transforms_agree_with_recurrences() {
    let sample = || Sample::new(270, 64);
    check(&case("reflections", sample().beta(|_| 2.0)), 0.01);
    check(&case("projections", sample().beta(|_| 1.0)), 0.01);
    check(&case("beta near 0", sample().beta(|_| 1e-6)), 0.01);
    for beta in [0.5, 1.0, 2.0] {
        check(&case("one direction", sample().one_direction().beta(|_| beta)), 0.01);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_with_windows_and_documents_agree_with_recurrences() {
    for window in [None, Some(2), Some(70), Some(200)] {
        for documents in [&[0][..], &[0, 1, 100, 257, 299]] {
            let case = case("masks", Sample::new(300, 64));
            check(&Case { window, documents, ..case }, 0.01);
        }
    }
    // Two blocks of queries in a thread block, of which one or both see no key before their block.
    for (head_dim, window, documents) in [
        (128, None, &[0, 64, 192][..]),
        (128, None, &[0, 128, 330]),
        (128, Some(70), &[0]),
        (96, Some(200), &[0, 64]),
    ] {
        let case = case("masks of wide heads", Sample::new(350, head_dim));
        check(&Case { window, documents, ..case }, 0.01);
    }
}

/// A prompt of many blocks, then tokens through which parts of several sizes merge, with and without a window.
#[test]
#[ignore = "needs a GPU"]
fn decoding_after_a_prompt_agrees_with_whole_sequences() {
    for (window, prompt, sample) in [
        (None, 447, Sample::new(520, 64)),
        (None, 1, Sample::new(140, 128)),
        (Some(100), 200, Sample::new(400, 32)),
    ] {
        let case = Case { window, ..case("decoding", sample) };
        let op = Path { window, ..case.sample.op() };
        let all: PathInputs<Flex> = case.sample.inputs(&Default::default());
        let want = values(path_attention(&op, all, None, ExecPath::Kernel(DeviceKind::Cpu)));

        let PathInputs { q, k, v, w, beta, log_decay }: PathInputs<Cuda> =
            case.sample.inputs(&Default::default());
        let [q, k, v] = [q, k, v].map(|x| x.cast(FloatDType::BF16));
        let cut = |first, len| {
            let of = |x: &Tensor<Cuda, 4>| x.clone().narrow(2, first, len);
            PathInputs {
                q: of(&q),
                k: of(&k),
                v: of(&v),
                w: of(&w),
                beta: of(&beta),
                log_decay: log_decay.as_ref().map(|x| x.clone().narrow(2, first, len)),
            }
            .tokens()
        };
        let (prefix, rest) = (cut(0, prompt), cut(prompt, case.sample.len() - prompt));
        let mut cache = PathKvCache::new(&prefix, 0);
        cache.fill(&op, &prefix, 1);
        let got = values(tensor::<Cuda, 4>(cache.extend(&op, &rest)));

        let row = case.sample.len() * case.sample.head_dim;
        let decoded = want.chunks(row).flat_map(|row| &row[prompt * case.sample.head_dim..]);
        let decoded: Vec<f64> = decoded.copied().collect();
        let errors: Vec<f64> = got.iter().zip(&decoded).map(|(got, want)| got - want).collect();
        let error = root_mean_square(&errors) / root_mean_square(&decoded);
        assert!(error <= 0.01, "outputs are off by {error:.2e} of their root mean square");
    }
}
