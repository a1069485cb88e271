//! The error budget: what a kernel may err by, given how its reference errs.

use std::io::Write;

/// Largest absolute and root-mean-square error of `got` where `want` is known, beyond `own` times
/// each element.
pub(super) fn errors(got: &[f64], want: &[f64], own: f64) -> (f64, f64) {
    let mut worst: f64 = 0.0;
    let mut square = 0.0;
    for (&got, &want) in got.iter().zip(want) {
        // `max` would pass over a NaN.
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

/// Notes the error of the running test, relative to the largest value compared, in the file that
/// scripts/gpu_test.sh asks for.
pub fn record(error: f64) {
    let Some(path) = std::env::var_os("LONGWALL_TEST_ERRORS") else { return };
    let test = std::thread::current().name().unwrap_or("unnamed").to_owned();
    let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
    // One write, since several tests share the file.
    let line = format!("{test} {error:e}\n");
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file can be written");
}

/// Holds `kernel` to twice the error of `reference`, plus rounding; holds `reference` to f32's own
/// accuracy, so that a wrong reference fails too.
///
/// # Panics
/// When either is outside its budget.
pub fn assert_budget(what: &str, kernel: &[f64], reference: &[f64], want: &[f64]) {
    assert_rounded_budget(what, kernel, &[reference], want, Slack::default());
}

/// [`assert_budget`] with the larger of two references' errors: on the inputs, and on inputs that
/// differ in their last bit. What that does to an ill-conditioned result, any rounding does.
pub fn assert_conditioned_budget(
    what: &str,
    kernel: &[f64],
    references: [&[f64]; 2],
    want: &[f64],
) {
    assert_rounded_budget(what, kernel, &references, want, Slack::default());
}

/// What roundings to bf16 may add to errors.
#[derive(Clone, Copy, Default)]
pub(super) struct Slack {
    /// To each element, relative to it: the result's own rounding.
    pub own: f64,
    /// To each element, and to the root mean square of all: those on the way.
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
    assert_eq!(kernel.len(), want.len(), "{what}: number of elements");
    let scale = want.iter().fold(0.0f64, |a, x| a.max(x.abs())).max(1e-3);
    let rms = root_mean_square(want);
    let epsilon = f64::from(f32::EPSILON);
    let (mut reference_max, mut reference_rms) = (0.0f64, 0.0f64);
    for reference in references {
        assert_eq!(reference.len(), want.len(), "{what}: number of elements");
        let (worst, rms) = errors(reference, want, 0.0);
        (reference_max, reference_rms) = (reference_max.max(worst), reference_rms.max(rms));
    }
    let (kernel_max, kernel_rms) = errors(kernel, want, slack.own);
    record(errors(kernel, want, 0.0).0 / scale);
    assert!(
        reference_max <= 2e-5 * scale,
        "{what}: the reference is off by {reference_max:.2e}, largest value {scale:.2e}"
    );
    let [most, mean] = slack.inside;
    assert!(
        kernel_max <= 2.0 * reference_max + 8.0 * epsilon * scale + most
            && kernel_rms <= 2.0 * reference_rms + 4.0 * epsilon * rms.max(1e-3) + mean,
        "{what}: the kernel is off by {kernel_max:.2e} (rms {kernel_rms:.2e}), the reference by \
         {reference_max:.2e} (rms {reference_rms:.2e}), roundings by {most:.2e} (rms {mean:.2e}), \
         largest value {scale:.2e}"
    );
}
