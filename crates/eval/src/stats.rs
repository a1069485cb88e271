//! Means with standard errors, proportions with Wilson intervals, and 95 % confidence intervals of both.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The normal distribution's quantile at 97.5 %: 95 % of it lie within ±z.
const Z: f64 = 1.959_963_984_540_054;

/// Student's t at 97.5 %, for 1 to 30 degrees of freedom.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

/// A mean or a proportion, and how uncertain it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The mean or the proportion; none if a value was infinite or not a number.
    pub value: Option<f64>,
    /// Standard error of a mean; none for a single sample or a single document, and for a proportion,
    /// whose standard error would be 0 at 0 and 1 however few the samples.
    pub standard_error: Option<f64>,
    /// Lower end of the 95 % confidence interval: Wilson's for a proportion, Student's for a mean.
    pub low: Option<f64>,
    /// Upper end of the interval.
    pub high: Option<f64>,
    /// Number of samples.
    pub samples: usize,
}

impl Estimate {
    /// The share of correct samples, with [Wilson's interval](wilson). Has no value without samples.
    pub fn proportion(correct: usize, samples: usize) -> Self {
        if samples == 0 {
            return Estimate::default();
        }
        let p = correct as f64 / samples as f64;
        Estimate { value: Some(p), samples, ..Estimate::default() }
            .with_interval(Some(wilson(p, samples as f64)))
    }

    /// Mean of `(cluster, value)` pairs, with a standard error that allows values of the same cluster (one
    /// document) to be dependent.
    ///
    /// With `G` clusters and `n` values it is `sqrt(G / (G − 1) · Σ_g (Σ_{i∈g} (x_i − mean))²) / n`;
    /// if every cluster has one value, this is the usual `s / sqrt(n)`. The interval is
    /// `mean ± t · standard error`, with Student's t of `G − 1` degrees of freedom.
    pub fn clustered(values: impl IntoIterator<Item = (u64, f64)>) -> Self {
        Estimate::of_clusters(values).0
    }

    /// `Σ numerator / Σ denominator` over clusters, with the standard error of a ratio of dependent sums.
    ///
    /// With `G` clusters and ratio `R` it is
    /// `sqrt(G / (G − 1) · Σ_g (numerator_g − R · denominator_g)²) / Σ_g denominator_g`; the interval is
    /// Student's, with `G − 1` degrees of freedom. `samples` are the clusters. Has no value without
    /// clusters or if a sum is not finite.
    pub fn ratio(clusters: &[(f64, f64)]) -> Self {
        let samples = clusters.len();
        let denominator: f64 = clusters.iter().map(|(_, d)| d).sum();
        let ratio = clusters.iter().map(|(n, _)| n).sum::<f64>() / denominator;
        if !ratio.is_finite() {
            return Estimate { samples, ..Estimate::default() };
        }
        let standard_error = (samples > 1).then(|| {
            let square_sum: f64 = clusters.iter().map(|(n, d)| (n - ratio * d).powi(2)).sum();
            (samples as f64 / (samples as f64 - 1.0) * square_sum).sqrt() / denominator
        });
        let half = standard_error.map(|error| student(samples - 1) * error);
        Estimate { value: Some(ratio), standard_error, samples, ..Estimate::default() }
            .with_interval(half.map(|half| [ratio - half, ratio + half]))
    }

    /// The estimate and its uncertainty times a positive factor.
    pub fn scaled(self, factor: f64) -> Self {
        let scale = |x: Option<f64>| x.map(|x| x * factor);
        Estimate {
            value: scale(self.value),
            standard_error: scale(self.standard_error),
            low: scale(self.low),
            high: scale(self.high),
            samples: self.samples,
        }
    }

    /// Share of ones among `(cluster, 0 or 1)` pairs, with Wilson's interval for values that depend on
    /// others of their cluster (one sequence).
    ///
    /// The interval uses the effective number of samples: that of independent samples with the same
    /// [clustered](Self::clustered) standard error, at most all of them. At a share of 0 or 1 that error
    /// carries no information, and each cluster counts as one sample.
    pub fn clustered_proportion(values: impl IntoIterator<Item = (u64, f64)>) -> Self {
        let (mean, clusters) = Estimate::of_clusters(values);
        let interval = mean.value.filter(|_| clusters > 0).map(|p| {
            let variance = p * (1.0 - p);
            let effective = match mean.standard_error {
                Some(error) if error > 0.0 && variance > 0.0 => {
                    // `error` is that of a sample mean, √(p (1 − p) / (n − 1)).
                    (variance / (error * error) + 1.0).min(mean.samples as f64)
                }
                _ => clusters as f64,
            };
            wilson(p, effective)
        });
        Estimate { standard_error: None, ..mean }.with_interval(interval)
    }

    /// The mean, and the number of clusters.
    fn of_clusters(values: impl IntoIterator<Item = (u64, f64)>) -> (Self, usize) {
        let values: Vec<(u64, f64)> = values.into_iter().collect();
        let samples = values.len();
        let mean = values.iter().map(|(_, x)| x).sum::<f64>() / samples as f64;
        if !mean.is_finite() {
            return (Estimate { samples, ..Estimate::default() }, 0);
        }
        let mut residuals = BTreeMap::<u64, f64>::new();
        for (cluster, value) in values {
            *residuals.entry(cluster).or_default() += value - mean;
        }
        let clusters = residuals.len();
        let standard_error = (clusters > 1).then(|| {
            let square_sum: f64 = residuals.values().map(|sum| sum * sum).sum();
            let correction = clusters as f64 / (clusters as f64 - 1.0);
            (correction * square_sum).sqrt() / samples as f64
        });
        let half = standard_error.map(|error| student(clusters - 1) * error);
        let estimate =
            Estimate { value: Some(mean), standard_error, samples, ..Estimate::default() };
        (estimate.with_interval(half.map(|half| [mean - half, mean + half])), clusters)
    }

    fn with_interval(self, interval: Option<[f64; 2]>) -> Self {
        Estimate { low: interval.map(|ends| ends[0]), high: interval.map(|ends| ends[1]), ..self }
    }

    /// Whether this is a proportion: it has an interval, and no standard error.
    pub fn is_proportion(&self) -> bool {
        self.standard_error.is_none() && self.low.is_some()
    }

    /// The ends of the bar or band that a plot draws: the 95 % interval of a proportion, or one standard
    /// error around a mean.
    pub fn bar(&self) -> Option<(f64, f64)> {
        match (self.value, self.standard_error) {
            (Some(value), Some(error)) => Some((value - error, value + error)),
            _ => self.low.zip(self.high),
        }
    }

    /// `exp` of a mean loss: perplexity. Its standard error is that of the delta method,
    /// `perplexity · standard error of the loss`; its interval is `exp` of the loss's. A number that
    /// overflows is left out.
    pub fn exp(self) -> Self {
        let exp = |x: Option<f64>| x.map(f64::exp).filter(|x| x.is_finite());
        let value = exp(self.value);
        let standard_error = value.zip(self.standard_error).map(|(value, error)| value * error);
        let interval = exp(self.low).zip(exp(self.high)).filter(|_| value.is_some());
        Estimate { value, standard_error, samples: self.samples, ..Estimate::default() }
            .with_interval(interval.map(|(low, high)| [low, high]))
    }
}

/// Wilson's score interval at 95 % for a proportion `p` of `n` samples: all proportions that a score test
/// does not reject,
/// `(p + z²/2n ± z · sqrt(p (1 − p) / n + z²/4n²)) / (1 + z²/n)` with z = 1.96.
///
/// Unlike `p ± z · sqrt(p (1 − p) / n)` it stays within 0 and 1, and has a width even at `p` = 0 or 1.
///
/// Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal
/// of the American Statistical Association 22 (1927), 209–212.
pub fn wilson(p: f64, n: f64) -> [f64; 2] {
    let square = Z * Z / n;
    let middle = p + square / 2.0;
    let half = (square * (p * (1.0 - p) + square / 4.0)).sqrt();
    // Rounding must not take the ends past p, which they meet at 0 and 1.
    let low = ((middle - half) / (1.0 + square)).clamp(0.0, p);
    let high = ((middle + half) / (1.0 + square)).clamp(p, 1.0);
    [if p == 0.0 { 0.0 } else { low }, if p == 1.0 { 1.0 } else { high }]
}

/// Student's t at 97.5 %. Above 30 degrees of freedom the first terms of its expansion around the normal
/// quantile, `z + (z³ + z) / 4 ν + (5 z⁵ + 16 z³ + 3 z) / 96 ν²` (Abramowitz and Stegun, 26.7.5), are exact
/// to 0.001.
fn student(degrees: usize) -> f64 {
    match degrees.checked_sub(1).and_then(|at| T.get(at)) {
        Some(&t) => t,
        None => {
            let n = degrees as f64;
            let second = 5.0 * Z.powi(5) + 16.0 * Z.powi(3) + 3.0 * Z;
            Z + (Z.powi(3) + Z) / (4.0 * n) + second / (96.0 * n * n)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: [f64; 2], expected: [f64; 2]) {
        let near = |n: usize| (found[n] - expected[n]).abs() < 6e-5;
        assert!(near(0) && near(1), "{found:?}, not {expected:?}");
    }

    fn interval(estimate: Estimate) -> [f64; 2] {
        [estimate.low.unwrap(), estimate.high.unwrap()]
    }

    #[test]
    fn wilson_intervals_are_those_of_the_literature() {
        // Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        for (correct, samples, expected) in [
            (81, 263, [0.2553, 0.3662]),
            (15, 148, [0.0624, 0.1605]),
            (0, 20, [0.0, 0.1611]),
            (1, 29, [0.0061, 0.1718]),
        ] {
            let estimate = Estimate::proportion(correct, samples);
            close(interval(estimate), expected);
            let rest = Estimate::proportion(samples - correct, samples);
            close(interval(rest), [1.0 - expected[1], 1.0 - expected[0]]);
        }
    }

    #[test]
    fn wilson_intervals_hold_their_share_and_stay_within_0_and_1() {
        for samples in 1..200 {
            for correct in 0..=samples {
                let p = correct as f64 / samples as f64;
                let [low, high] = wilson(p, samples as f64);
                assert!(0.0 <= low && low <= p && p <= high && high <= 1.0, "{correct}/{samples}");
                assert!(high - low > 0.0);
                assert_eq!((low == 0.0, high == 1.0), (correct == 0, correct == samples));
            }
        }
    }

    #[test]
    fn a_proportion_has_an_interval_and_no_standard_error() {
        let estimate = Estimate::proportion(3, 4);
        assert_eq!((estimate.value, estimate.standard_error), (Some(0.75), None));
        assert!(estimate.is_proportion());
        assert_eq!(estimate.bar(), estimate.low.zip(estimate.high));
        assert_eq!(Estimate::proportion(0, 0), Estimate::default());
    }

    #[test]
    fn mean_of_independent_values_by_hand() {
        // 1, 2, 3, 4: mean 2.5, s = sqrt(5/3), s / sqrt(4) = sqrt(5/12); t of 3 degrees is 3.182.
        let estimate = Estimate::clustered([(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]);
        let error = (5.0f64 / 12.0).sqrt();
        assert_eq!(estimate.value, Some(2.5));
        assert!((estimate.standard_error.unwrap() - error).abs() < 1e-15);
        close(interval(estimate), [2.5 - 3.182 * error, 2.5 + 3.182 * error]);
        assert!(!estimate.is_proportion());
        let (low, high) = estimate.bar().unwrap();
        assert!((high - low - 2.0 * error).abs() < 1e-12, "a bar is one standard error each way");
    }

    #[test]
    fn student_is_that_of_the_tables() {
        for (degrees, t) in
            [(1, 12.706), (10, 2.228), (30, 2.042), (31, 2.040), (40, 2.021), (120, 1.980)]
        {
            assert!((student(degrees) - t).abs() < 1e-3, "{degrees}: {}", student(degrees));
        }
    }

    #[test]
    fn repeated_values_of_a_cluster_do_not_shrink_the_error() {
        let once = Estimate::clustered([(0, 1.0), (1, 3.0)]);
        let copies = (0..10).flat_map(|_| [(0, 1.0), (1, 3.0)]);
        let repeated = Estimate::clustered(copies);
        assert_eq!(once.value, repeated.value);
        assert!((once.standard_error.unwrap() - repeated.standard_error.unwrap()).abs() < 1e-12);
        let single = Estimate::clustered([(0, 1.0), (0, 3.0)]);
        assert_eq!((single.standard_error, single.low, single.high), (None, None, None));
    }

    #[test]
    fn intervals_of_clustered_proportions_by_hand() {
        // Ten of a hundred, each its own cluster: the textbook interval, 0.0552 to 0.1744.
        let values = (0..100).map(|n| (n, f64::from(u8::from(n < 10))));
        close(interval(Estimate::clustered_proportion(values)), [0.0552, 0.1744]);
        // None of a hundred in ten clusters: z² / (10 + z²).
        let none = (0..100).map(|n| (n / 10, 0.0));
        close(interval(Estimate::clustered_proportion(none)), [0.0, 0.27754]);
        // Copies do not narrow it.
        let copies = (0..1000).map(|n| (n / 10, f64::from(u8::from(n < 100))));
        close(interval(Estimate::clustered_proportion(copies)), [0.0552, 0.1744]);
        assert_eq!(Estimate::clustered_proportion([]), Estimate::default());
    }

    #[test]
    fn ratios_of_sums_by_hand() {
        // R = 12 / 6; residuals 1, −1, 0: sqrt(3/2 · 2) / 6.
        let ratio = Estimate::ratio(&[(3.0, 1.0), (3.0, 2.0), (6.0, 3.0)]);
        let error = 3f64.sqrt() / 6.0;
        assert_eq!((ratio.value, ratio.samples), (Some(2.0), 3));
        assert!((ratio.standard_error.unwrap() - error).abs() < 1e-12);
        close(interval(ratio), [2.0 - 4.303 * error, 2.0 + 4.303 * error]);
        close(interval(ratio.scaled(2.0)), [4.0 - 8.606 * error, 4.0 + 8.606 * error]);
        let single = Estimate::ratio(&[(3.0, 2.0)]);
        assert_eq!((single.value, single.standard_error, single.low), (Some(1.5), None, None));
        assert_eq!(Estimate::ratio(&[(f64::INFINITY, 2.0), (1.0, 1.0)]).value, None);
        assert_eq!(Estimate::ratio(&[]).value, None);
    }

    #[test]
    fn numbers_that_are_none_stay_visible() {
        assert_eq!(Estimate::clustered([(0, f64::NAN), (1, 1.0)]).value, None);
        assert_eq!(Estimate::clustered([]).value, None);
        let of = |value: f64, error: f64| Estimate {
            value: Some(value),
            standard_error: Some(error),
            low: Some(value - error),
            high: Some(value + error),
            samples: 2,
        };
        assert_eq!(of(1e4, 1.0).exp(), Estimate { samples: 2, ..Estimate::default() });
        let perplexity = of(0.0, 0.5).exp();
        assert_eq!((perplexity.value, perplexity.standard_error), (Some(1.0), Some(0.5)));
        close(interval(perplexity), [0.60653, 1.64872]);
    }
}
