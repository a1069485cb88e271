//! Validation in the loop: loss, perplexity and bits per byte over the held-out rows.

use std::collections::BTreeMap;

use longwall_data::{Batch, DataError, Loader, Tokenizer};
use longwall_kernels::attention::probe::Probe;
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;

use crate::grad_accumulation::MicroBatch;

/// The held-out rows, and the bytes that each token encodes.
pub struct Validator {
    loader: Loader,
    token_bytes: Vec<u32>,
    micro_batch: usize,
}

/// The result of a pass over the validation rows.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationScores {
    /// Mean loss of the weighted targets, in nats.
    pub loss: f64,
    /// Total nats over `ln 2` and over the bytes that these targets encode. An end of text encodes no
    /// bytes, but its nats count: they are part of the cost of encoding the text.
    pub bits_per_byte: f64,
    /// Metrics that layers report on the first row, by name: each is the mean over the layers that
    /// report it.
    pub probe: BTreeMap<String, f64>,
}

/// Sums over validation rows.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    nats: f64,
    weight: f64,
    bytes: f64,
}

impl Sums {
    fn add(&mut self, batch: &Batch, losses: impl Iterator<Item = f32>, token_bytes: &[u32]) {
        let targets = batch.loss_weights.iter().zip(&batch.targets);
        for ((&weight, &target), loss) in targets.zip(losses).filter(|((w, _), _)| **w > 0.0) {
            let weight = f64::from(weight);
            self.nats += weight * f64::from(loss);
            self.weight += weight;
            self.bytes += weight * f64::from(token_bytes[target as usize]);
        }
    }

    fn scores(self, probe: &Probe) -> ValidationScores {
        ValidationScores {
            loss: self.nats / self.weight,
            bits_per_byte: self.nats / std::f64::consts::LN_2 / self.bytes,
            probe: probe.means().into_iter().map(|(name, x)| (name.to_owned(), x)).collect(),
        }
    }
}

impl Validator {
    /// Validates on all rows of `loader`, which is open on the validation split, `micro_batch` rows at
    /// a time.
    pub fn new(loader: Loader, tokenizer: &Tokenizer, micro_batch: usize) -> Self {
        Validator { loader, token_bytes: tokenizer.token_byte_lengths(), micro_batch }
    }

    /// One pass, over the same rows in the same order at every call.
    ///
    /// # Errors
    /// When a shard is damaged.
    pub fn run<B: OpBackend>(
        &self,
        model: &LanguageModel<B>,
        device: &B::Device,
    ) -> Result<ValidationScores, DataError> {
        let rows = self.loader.validation_rows().unwrap_or(0);
        let mut sums = Sums::default();
        for first in (0..rows).step_by(self.micro_batch) {
            // Rows past the last one have no weight, so that every batch has the same shape.
            let batch = self.loader.try_batch(first, self.micro_batch)?;
            let MicroBatch { inputs, targets, document_starts } =
                MicroBatch::<B>::new(&batch, 0..batch.rows, device);
            let losses = model.token_losses(inputs, targets, document_starts).into_data();
            sums.add(&batch, losses.iter::<f32>(), &self.token_bytes);
        }
        let first = MicroBatch::<B>::new(&self.loader.try_batch(0, 1)?, 0..1, device);
        Ok(sums.scores(&model.observe(first.inputs, first.document_starts)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_per_byte_count_the_bytes_of_weighted_targets() {
        let batch = Batch {
            rows: 1,
            seq_len: 4,
            inputs: vec![0; 4],
            targets: vec![1, 2, 0, 1],
            loss_weights: vec![1.0, 1.0, 1.0, 0.0],
            document_starts: None,
        };
        let mut sums = Sums::default();
        let nat = std::f32::consts::LN_2;
        sums.add(&batch, [nat, 3.0 * nat, 2.0 * nat, 100.0].into_iter(), &[0, 1, 5]);
        let scores = sums.scores(&Probe::default());
        assert!((scores.loss - 2.0 * f64::from(nat)).abs() < 1e-12);
        // 6 bits for the 1 + 5 + 0 bytes of three targets.
        assert!((scores.bits_per_byte - 1.0).abs() < 1e-6);
    }
}
