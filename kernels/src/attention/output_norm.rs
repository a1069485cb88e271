//! The key `norm_eps` of kinds that normalise a head's outputs and let the configuration choose what the
//! norm adds under its root.

use longwall_config::Problems;

/// The least `norm_eps`: below it, the gradient of a row of zeros, divided by its root, could leave f32's range.
const LEAST_EPS: f32 = 1e-20;

/// Records a `norm_eps` that is not from [`LEAST_EPS`] to 1; `key` is the path of the kind's table, `default`
/// the kind's own value.
pub fn validate_norm_eps(key: &str, eps: f32, default: f32, problems: &mut Problems) {
    problems.check(
        (LEAST_EPS..=1.0).contains(&eps),
        format!("{key}.norm_eps"),
        eps,
        format!("a number from {LEAST_EPS:e} to 1"),
        format!("set norm_eps = {default:e}, or leave it out"),
    );
}
