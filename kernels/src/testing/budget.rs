//! The error budget: the allowed error of a kernel, given its reference's error.

use std::io::Write;

/// Largest absolute and root-mean-square error of `got` against `want`, beyond `own` times each element.
pub(super) fn errors(got: &[f64], want: &[f64], own: f64) -> (f64, f64) {
    let mut worst: f64 = 0.0;
    let mut square = 0.0;
    for (&got, &want) in got.iter().zip(want) {
        // `max` would ignore a NaN.
        let error = (got - want).abs();
        assert!(error.is_finite(), "found {got} where {want} is right");
        let error = (error - own * want.abs()).max(0.0);
        worst = worst.max(error);
        square += error * error;
    }
    (worst, (square / want.len().max(1) as f64).sqrt())
}

pub fn root_mean_square(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

/// Appends the error of the running test, relative to the largest value compared, to the file that
/// scripts/gpu_test.sh names.
pub fn record(error: f64) {
    let Some(path) = std::env::var_os("LONGWALL_TEST_ERRORS") else { return };
    let test = std::thread::current().name().unwrap_or("unnamed").to_owned();
    let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
    // One write, because several tests share the file.
    let line = format!("{test} {error:e}\n");
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file can be written");
}

/// Asserts that `kernel` has at most twice the error of `reference`, plus rounding, and `reference` at most
/// f32's own error, so that a wrong reference also fails.
///
/// # Panics
/// When either is outside its budget.
pub fn assert_budget(what: &str, kernel: &[f64], reference: &[f64], want: &[f64]) {
    assert_rounded_budget(what, kernel, &[reference], want, Slack::default());
}

/// [`assert_budget`] with the largest of several references' errors: on the inputs, and on inputs that differ in
/// their last bit, which shows how much rounding affects an ill-conditioned result.
pub fn assert_conditioned_budget(what: &str, kernel: &[f64], references: &[&[f64]], want: &[f64]) {
    assert_rounded_budget(what, kernel, references, want, Slack::default());
}

/// The error that roundings to bf16 may add.
#[derive(Clone, Copy, Default)]
pub(super) struct Slack {
    /// The result's own rounding, relative to each element.
    pub own: f64,
    /// Roundings inside the kernel: for each element, and for the root mean square of all.
    pub inside: [f64; 2],
}

/// [`assert_budget`] with `slack` for the kernel.
pub(super) fn assert_rounded_budget(
    what: &str,
    kernel: &[f64],
    references: &[&[f64]],
    want: &[f64],
    slack: Slack,
) {
    for results in [&kernel].into_iter().chain(references) {
        assert_eq!(results.len(), want.len(), "{what}: number of elements");
    }
    let scale = want.iter().fold(0.0f64, |a, x| a.max(x.abs())).max(1e-3);
    let rms = root_mean_square(want);
    let epsilon = f64::from(f32::EPSILON);
    let (mut reference_max, mut reference_rms) = errors(references[0], want, 0.0);
    assert!(
        reference_max <= 2e-5 * scale,
        "{what}: the reference is off by {reference_max:.2e}, largest value {scale:.2e}"
    );
    for reference in &references[1..] {
        let (worst, rms) = errors(reference, want, 0.0);
        (reference_max, reference_rms) = (reference_max.max(worst), reference_rms.max(rms));
    }
    let (kernel_max, kernel_rms) = errors(kernel, want, slack.own);
    record(errors(kernel, want, 0.0).0 / scale);
    let [most, mean] = slack.inside;
    assert!(
        kernel_max <= 2.0 * reference_max + 8.0 * epsilon * scale + most
            && kernel_rms <= 2.0 * reference_rms + 4.0 * epsilon * rms.max(1e-3) + mean,
        "{what}: the kernel is off by {kernel_max:.2e} (rms {kernel_rms:.2e}), the reference by \
         {reference_max:.2e} (rms {reference_rms:.2e}), roundings by {most:.2e} (rms {mean:.2e}), \
         largest value {scale:.2e}"
    );
}
