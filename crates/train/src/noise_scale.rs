//! The gradient noise scale (McCandlish et al., 2018, "An empirical model of large-batch training", appendix A.1).
//!
//! A batch's gradient is the true one, G, and noise whose covariance is Σ over the batch's size: E|G_B|² =
//! |G|² + tr Σ / B. Two sizes of batches give both unknowns; here, a step's micro-batches and the whole step. The noise
//! scale tr Σ / |G|² is the batch size at which noise and gradient are equally large: smaller batches waste steps,
//! larger ones waste tokens.

use longwall_kernels::backend::OpBackend;
use serde::{Deserialize, Serialize};

use crate::distributed::{Collective, CollectiveError, gather_numbers};

/// The gradient of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MicroBatchNorm {
    /// The sum of its loss weights: how many tokens it has.
    pub weight: f64,
    /// Σ g² of what it adds to the step's gradient.
    pub square: f64,
}

impl MicroBatchNorm {
    /// Those of all ranks, in the order of the ranks, from those of this one.
    ///
    /// # Errors
    /// When a rank is lost.
    pub(crate) fn of_ranks<B: OpBackend>(
        own: &[Self],
        collective: &dyn Collective<B>,
    ) -> Result<Vec<Self>, CollectiveError> {
        let own = own.iter().flat_map(|norm| [norm.weight, norm.square]).map(f64::to_bits);
        let numbers = gather_numbers(collective, own)?.concat();
        let norm = |pair: &[u64]| {
            let [weight, square] = [pair[0], pair[1]].map(f64::from_bits);
            MicroBatchNorm { weight, square }
        };
        Ok(numbers.chunks_exact(2).map(norm).collect())
    }
}

/// Unbiased estimates from one step. Either may be negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NoiseSample {
    /// tr Σ, for batches counted in tokens.
    pub noise_trace: f64,
    /// |G|².
    pub gradient_square: f64,
}

impl NoiseSample {
    /// The estimates of a step whose gradient has the norm `grad_norm`. `None` with fewer than two micro-batches that
    /// have tokens, or with norms that are not finite.
    pub fn of(micro_batches: &[MicroBatchNorm], grad_norm: f64) -> Option<Self> {
        let counted: Vec<_> = micro_batches.iter().filter(|of| of.weight > 0.0).collect();
        if counted.len() < 2 {
            return None;
        }
        let whole: f64 = counted.iter().map(|of| of.weight).sum();
        let mean = |value: &dyn Fn(&MicroBatchNorm) -> f64| {
            counted.iter().map(|of| value(of)).sum::<f64>() / counted.len() as f64
        };
        // Gradients of the micro-batches' own mean losses. Their sizes may differ: E|G_b|² is linear in 1/b.
        let small = mean(&|of| of.square * (whole / of.weight).powi(2));
        let big = grad_norm * grad_norm;
        let (per_small, per_big) = (mean(&|of| 1.0 / of.weight), 1.0 / whole);
        let noise_trace = (small - big) / (per_small - per_big);
        let gradient_square = big - noise_trace * per_big;
        let sample = NoiseSample { noise_trace, gradient_square };
        (noise_trace.is_finite() && gradient_square.is_finite()).then_some(sample)
    }
}

/// Exponential moving averages of both estimates, which are averaged before they are divided. Part of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoiseAverages {
    noise_trace: f64,
    gradient_square: f64,
}

impl NoiseAverages {
    /// Adds a step's estimates; `decay` is the weight of the past.
    pub fn push(&mut self, sample: NoiseSample, decay: f64) {
        self.noise_trace = decay * self.noise_trace + sample.noise_trace;
        self.gradient_square = decay * self.gradient_square + sample.gradient_square;
    }

    /// The noise scale, in tokens. `None` while the averages are not both above 0.
    pub fn scale(&self) -> Option<f64> {
        let scale = self.noise_trace / self.gradient_square;
        (self.noise_trace > 0.0 && self.gradient_square > 0.0 && scale.is_finite()).then_some(scale)
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const DIMENSIONS: usize = 20;

    /// A number near the standard normal distribution.
    fn normal(rng: &mut ChaCha8Rng) -> f64 {
        (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0
    }

    /// The squared norm of a sum of gradients of tokens, over `all`.
    fn square(sum: &[f64], all: f64) -> f64 {
        sum.iter().map(|x| (x / all).powi(2)).sum()
    }

    /// Tokens have the gradient G = (0.1, 0.1, …) and unit noise: |G|² = 0.2 and tr Σ = 20.
    #[test]
    fn the_averages_find_the_noise_scale_of_known_noise() {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut averages = NoiseAverages::default();
        for step in 0..2000 {
            // Micro-batches of different sizes.
            let sizes = [16, 8 + step % 5, 0, 32];
            let all = sizes.iter().sum::<usize>() as f64;
            let mut whole = vec![0.0; DIMENSIONS];
            let mut parts = vec![];
            for size in sizes {
                let mut sum = vec![0.0; DIMENSIONS];
                for _ in 0..size {
                    sum.iter_mut().for_each(|x| *x += 0.1 + normal(&mut rng));
                }
                whole.iter_mut().zip(&sum).for_each(|(whole, part)| *whole += part);
                parts.push(MicroBatchNorm { weight: size as f64, square: square(&sum, all) });
            }
            let sample = NoiseSample::of(&parts, square(&whole, all).sqrt()).unwrap();
            averages.push(sample, 0.999);
        }
        let scale = averages.scale().unwrap();
        assert!((scale / 100.0 - 1.0).abs() < 0.15, "{scale}");
    }

    #[test]
    fn without_noise_the_scale_is_unknown_and_the_gradient_exact() {
        let part = MicroBatchNorm { weight: 10.0, square: 1.0 };
        let sample = NoiseSample::of(&[part, part], 2.0).unwrap();
        assert_eq!(sample, NoiseSample { noise_trace: 0.0, gradient_square: 4.0 });
        let mut averages = NoiseAverages::default();
        averages.push(sample, 0.9);
        assert_eq!(averages.scale(), None);
    }

    #[test]
    fn one_micro_batch_or_a_norm_that_is_not_finite_gives_no_estimate() {
        let part = MicroBatchNorm { weight: 10.0, square: 1.0 };
        let empty = MicroBatchNorm { weight: 0.0, square: 0.0 };
        assert_eq!(NoiseSample::of(&[part, empty], 1.0), None);
        assert_eq!(NoiseSample::of(&[part, part], f64::NAN), None);
    }
}
