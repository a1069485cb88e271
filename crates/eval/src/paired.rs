//! Paired tests: whether two models differ on the same samples, or two settings on the same seeds.

use serde::{Deserialize, Serialize};
use statrs::distribution::{Binomial, ContinuousCDF, DiscreteCDF, StudentsT};

/// Which test gave a p-value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PairedTest {
    /// McNemar's test, exact.
    #[serde(rename = "McNemar")]
    McNemar,
    /// Student's paired t-test.
    #[serde(rename = "paired t")]
    PairedT,
}

/// The difference of two paired samples, and how likely one as large is without a true difference.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairedDifference {
    /// Mean of the differences, second minus first.
    pub mean: f64,
    /// Pairs.
    pub n: usize,
    /// The test.
    pub test: PairedTest,
    /// Two-sided p-value; none if the differences do not vary, or if there is only one.
    pub p: Option<f64>,
}

impl PairedDifference {
    /// Compares pairs of numbers; none without pairs, or if a number is not finite.
    ///
    /// If every number is 0 or 1, the test is McNemar's: of the pairs that differ, `b` in one direction and `c`
    /// in the other, `p = min(1, 2 · P(X ≤ min(b, c)))` with X binomial of `b + c` draws at 1/2 (McNemar, 1947).
    /// Otherwise it is Student's: `t = mean / (s / √n)` with `n − 1` degrees of freedom.
    pub fn of(pairs: &[(f64, f64)]) -> Option<Self> {
        let differences: Vec<f64> = pairs.iter().map(|(first, second)| second - first).collect();
        let n = differences.len();
        let mean = differences.iter().sum::<f64>() / n as f64;
        if !mean.is_finite() {
            return None;
        }
        let is_binary = pairs.iter().all(|(a, b)| [0.0, 1.0].contains(a) && [0.0, 1.0].contains(b));
        let (test, p) = match is_binary {
            true => (PairedTest::McNemar, mcnemar(&differences)),
            false => (PairedTest::PairedT, paired_t(&differences, mean)),
        };
        Some(PairedDifference { mean, n, test, p })
    }
}

fn mcnemar(differences: &[f64]) -> Option<f64> {
    let up = differences.iter().filter(|d| **d > 0.0).count() as u64;
    let down = differences.iter().filter(|d| **d < 0.0).count() as u64;
    let binomial = Binomial::new(0.5, up + down).ok()?;
    Some((2.0 * binomial.cdf(up.min(down))).min(1.0))
}

fn paired_t(differences: &[f64], mean: f64) -> Option<f64> {
    let n = differences.len() as f64;
    let variance = differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let t = mean / (variance / n).sqrt();
    // Not a number with one pair; infinite where all differences are the same.
    let student = StudentsT::new(0.0, 1.0, n - 1.0).ok().filter(|_| t.is_finite())?;
    Some(2.0 * student.cdf(-t.abs()))
}

/// Holm's adjustment of p-values for their number, in their order: the i-th smallest of m is multiplied by
/// `m − i + 1`, is at most 1, and no smaller than the one before it (Holm, 1979). The chance of any false
/// finding among those below 0.05 is then at most 5 %.
pub fn holm(p_values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|a, b| p_values[*a].total_cmp(&p_values[*b]));
    let mut adjusted = vec![0.0; p_values.len()];
    let mut least = 0f64;
    for (rank, at) in order.into_iter().enumerate() {
        least = least.max(p_values[at] * (p_values.len() - rank) as f64).min(1.0);
        adjusted[at] = least;
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(pairs: &[(f64, f64)]) -> PairedDifference {
        PairedDifference::of(pairs).unwrap()
    }

    #[test]
    fn p_values_of_the_t_test_are_those_of_the_tables() {
        // Differences 1, 2, 3: mean 2, s 1, t = 2 √3 with two degrees of freedom.
        let found = difference(&[(0.0, 1.0), (0.5, 2.5), (1.0, 4.0)]);
        assert_eq!((found.mean, found.n, found.test), (2.0, 3, PairedTest::PairedT));
        // With two degrees, P(|T| > t) = 1 − t / √(t² + 2).
        let t = 12f64.sqrt();
        assert!((found.p.unwrap() - (1.0 - t / (t * t + 2.0).sqrt())).abs() < 1e-9);
        // Student's t at 97.5 % and four degrees is 2.776: p is 0.05.
        let spread = [-1.0, -0.5, 0.0, 0.5, 1.0];
        let mean = 2.776_445 * (0.625f64 / 5.0).sqrt();
        let pairs: Vec<(f64, f64)> = spread.iter().map(|d| (0.25, 0.25 + d + mean)).collect();
        assert!((difference(&pairs).p.unwrap() - 0.05).abs() < 1e-6);
    }

    #[test]
    fn mcnemar_counts_the_pairs_that_differ() {
        // Six of six one way: 2 / 2⁶. Pairs that agree do not count.
        let pairs: Vec<(f64, f64)> =
            (0..20).map(|n| (0.0, if n < 6 { 1.0 } else { 0.0 })).collect();
        let found = difference(&pairs);
        assert_eq!((found.n, found.test, found.mean), (20, PairedTest::McNemar, 0.3));
        assert!((found.p.unwrap() - 2.0 / 64.0).abs() < 1e-12);
        let even = [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)];
        assert_eq!(difference(&even).p, Some(1.0));
        assert_eq!(difference(&[(1.0, 1.0)]).p, Some(1.0));
    }

    #[test]
    fn what_shows_nothing_has_no_p_value() {
        assert_eq!(difference(&[(1.5, 2.5)]).p, None);
        assert_eq!(difference(&[(0.5, 2.5), (1.5, 3.5)]).p, None);
        assert_eq!(PairedDifference::of(&[]), None);
        assert_eq!(PairedDifference::of(&[(f64::NAN, 1.0), (1.0, 2.0)]), None);
    }

    #[test]
    fn holm_multiplies_the_smallest_most() {
        // Holm's example by hand: 0.01 · 4, 0.02 · 3, then no less than before, 0.04 · 1 raised to 0.06.
        let adjusted = holm(&[0.02, 0.01, 0.04, 0.03]);
        let expected = [0.06, 0.04, 0.06, 0.06];
        assert!(adjusted.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{adjusted:?}");
        assert_eq!(holm(&[0.9, 0.8]), [1.0, 1.0]);
        assert_eq!(holm(&[]), [0.0; 0]);
    }
}
