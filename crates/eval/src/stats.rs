//! Means and their standard errors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The mean; none if a value was infinite or not a number.
    pub value: Option<f64>,
    /// Standard error of the mean; none for a single sample or a single document.
    pub standard_error: Option<f64>,
    /// Number of samples.
    pub samples: usize,
}

impl Estimate {
    /// Share of correct samples, with the standard error of a sample mean,
    /// `sqrt(p (1 − p) / (n − 1))`.
    ///
    /// By this formula a score of 0 or 1 has a standard error of 0, however few the samples: read it
    /// together with `samples`.
    pub fn proportion(correct: usize, samples: usize) -> Self {
        if samples == 0 {
            return Estimate { value: None, standard_error: None, samples };
        }
        let p = correct as f64 / samples as f64;
        let standard_error = (samples > 1).then(|| (p * (1.0 - p) / (samples as f64 - 1.0)).sqrt());
        Estimate { value: Some(p), standard_error, samples }
    }

    /// Mean of `(cluster, value)` pairs, with a standard error that allows values of the same cluster (one
    /// document) to be dependent.
    ///
    /// With `G` clusters and `n` values it is `sqrt(G / (G − 1) · Σ_g (Σ_{i∈g} (x_i − mean))²) / n`;
    /// if every cluster has one value, this is the usual `s / sqrt(n)`.
    pub fn clustered(values: impl IntoIterator<Item = (u64, f64)>) -> Self {
        let values: Vec<(u64, f64)> = values.into_iter().collect();
        let samples = values.len();
        let mean = values.iter().map(|(_, x)| x).sum::<f64>() / samples as f64;
        if !mean.is_finite() {
            return Estimate { value: None, standard_error: None, samples };
        }
        let mut residuals = BTreeMap::<u64, f64>::new();
        for (cluster, value) in values {
            *residuals.entry(cluster).or_default() += value - mean;
        }
        let clusters = residuals.len() as f64;
        let standard_error = (residuals.len() > 1).then(|| {
            let square_sum: f64 = residuals.values().map(|sum| sum * sum).sum();
            (clusters / (clusters - 1.0) * square_sum).sqrt() / samples as f64
        });
        Estimate { value: Some(mean), standard_error, samples }
    }

    /// The 95 % confidence interval of a share of `samples` in `clusters` (documents, sequences): Wilson's
    /// score interval (1927, with z = 1.96), which is valid for few samples and shares near 0 or 1.
    ///
    /// It uses the effective number of samples: that of independent samples with the same standard error,
    /// at most all of them. At a share of 0 or 1 the standard error carries no information, and each
    /// cluster counts as one sample. None if there is no value or no cluster.
    pub fn share_interval(&self, clusters: usize) -> Option<[f64; 2]> {
        let p = self.value.filter(|_| clusters > 0)?;
        let variance = p * (1.0 - p);
        let n = match self.standard_error {
            Some(error) if error > 0.0 && variance > 0.0 => {
                // `error` is that of a sample mean, √(p (1 − p) / (n − 1)).
                (variance / (error * error) + 1.0).min(self.samples as f64)
            }
            _ => clusters as f64,
        };
        let square = 1.96f64.powi(2) / n;
        let middle = (p + square / 2.0) / (1.0 + square);
        let half = (square * (variance + square / 4.0)).sqrt() / (1.0 + square);
        Some([(middle - half).max(0.0), (middle + half).min(1.0)])
    }

    /// `exp` of a mean loss: perplexity. Its standard error is that of the delta method,
    /// `perplexity · standard error of the loss`. Has no value if it overflows.
    pub fn exp(self) -> Self {
        let value = self.value.map(f64::exp).filter(|value| value.is_finite());
        let standard_error = value.zip(self.standard_error).map(|(value, error)| value * error);
        Estimate { value, standard_error, samples: self.samples }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proportion_by_hand() {
        // Three of four: sqrt(0.75 · 0.25 / 3) = 0.25.
        let estimate = Estimate::proportion(3, 4);
        assert_eq!((estimate.value, estimate.standard_error), (Some(0.75), Some(0.25)));
        assert_eq!(Estimate::proportion(1, 1).standard_error, None);
        assert_eq!(Estimate::proportion(0, 0).value, None);
    }

    #[test]
    fn mean_of_independent_values_by_hand() {
        // 1, 2, 3, 4: mean 2.5, s = sqrt(5/3), s / sqrt(4) = sqrt(5/12).
        let estimate = Estimate::clustered([(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]);
        assert_eq!(estimate.value, Some(2.5));
        assert!((estimate.standard_error.unwrap() - (5.0f64 / 12.0).sqrt()).abs() < 1e-15);
    }

    #[test]
    fn repeated_values_of_a_cluster_do_not_shrink_the_error() {
        let once = Estimate::clustered([(0, 1.0), (1, 3.0)]);
        let copies = (0..10).flat_map(|_| [(0, 1.0), (1, 3.0)]);
        let repeated = Estimate::clustered(copies);
        assert_eq!(once.value, repeated.value);
        assert!((once.standard_error.unwrap() - repeated.standard_error.unwrap()).abs() < 1e-12);
        assert_eq!(Estimate::clustered([(0, 1.0), (0, 3.0)]).standard_error, None);
    }

    #[test]
    fn intervals_of_shares_by_hand() {
        let close = |got: Option<[f64; 2]>, want: [f64; 2]| {
            let got = got.unwrap();
            assert!((got[0] - want[0]).abs() < 1e-4 && (got[1] - want[1]).abs() < 1e-4, "{got:?}");
        };
        // Ten of a hundred, each its own cluster: the textbook interval, 0.0552 to 0.1744.
        let values = (0..100).map(|n| (n, f64::from(u8::from(n < 10))));
        close(Estimate::clustered(values).share_interval(100), [0.0552, 0.1744]);
        // None of a hundred in ten clusters: z² / (10 + z²).
        let none = Estimate::clustered((0..100).map(|n| (n / 10, 0.0)));
        close(none.share_interval(10), [0.0, 0.2775]);
        // Copies do not narrow it.
        let copies = Estimate::clustered((0..1000).map(|n| (n / 10, f64::from(u8::from(n < 100)))));
        close(copies.share_interval(100), [0.0552, 0.1744]);
        assert_eq!(Estimate::clustered([]).share_interval(0), None);
    }

    #[test]
    fn numbers_that_are_none_stay_visible() {
        assert_eq!(Estimate::clustered([(0, f64::NAN), (1, 1.0)]).value, None);
        assert_eq!(Estimate::clustered([]).value, None);
        let huge = Estimate { value: Some(1e4), standard_error: Some(1.0), samples: 2 };
        assert_eq!(huge.exp().value, None);
        let loss = Estimate { value: Some(0.0), standard_error: Some(0.5), samples: 2 };
        assert_eq!(
            loss.exp(),
            Estimate { value: Some(1.0), standard_error: Some(0.5), samples: 2 }
        );
    }
}
