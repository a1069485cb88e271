//! Validation in the loop: loss, perplexity and bits per byte over the held-out rows.

use std::collections::BTreeMap;

use longwall_data::{Batch, Binning, DataError, Loader, Tokenizer};
use longwall_kernels::attention::probe::Probe;
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;

use crate::distributed::Collective;
use crate::error::TrainError;
use crate::grad_accumulation::MicroBatch;
use crate::metrics::PositionLoss;

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
    /// Mean loss by the number of tokens read, in logarithmic bins: the in-context-learning curve.
    pub loss_by_position: Vec<PositionLoss>,
    /// The lowest mean loss of a linear bucket of positions, among those that hold at least half of the
    /// tokens of an equal share; none if no loss is finite.
    pub best_context_loss: Option<f64>,
    /// Metrics that layers report on the first row, by name: each is the mean over the layers that
    /// report it.
    pub probe: BTreeMap<String, f64>,
}

/// Sums over validation rows.
#[derive(Clone, Debug)]
struct Sums {
    nats: f64,
    weight: f64,
    bytes: f64,
    /// Nats and weight of each position: 0 has read one token of its context.
    positions: Vec<(f64, f64)>,
}

impl Sums {
    fn new(seq_len: usize) -> Self {
        Sums { nats: 0.0, weight: 0.0, bytes: 0.0, positions: vec![(0.0, 0.0); seq_len] }
    }

    fn add(&mut self, batch: &Batch, losses: impl Iterator<Item = f32>, token_bytes: &[u32]) {
        let targets = batch.loss_weights.iter().zip(&batch.targets).enumerate();
        for ((at, (&weight, &target)), loss) in targets.zip(losses) {
            if weight <= 0.0 {
                continue;
            }
            // The context begins with the row, or with the document where attention does not look past it.
            let start = batch.document_starts.as_ref().map_or(0, |starts| starts[at] as usize);
            let (weight, position) = (f64::from(weight), at % batch.seq_len - start);
            let nats = weight * f64::from(loss);
            self.nats += nats;
            self.weight += weight;
            self.bytes += weight * f64::from(token_bytes[target as usize]);
            self.positions[position].0 += nats;
            self.positions[position].1 += weight;
        }
    }

    /// The mean loss of each group of positions that has a token, with its weight.
    fn by_position(&self, binning: Binning) -> Vec<(PositionLoss, f64)> {
        let mean = |(from, to)| {
            let add = |sum: (f64, f64), x: &(f64, f64)| (sum.0 + x.0, sum.1 + x.1);
            let (nats, weight) = self.positions[from..to].iter().fold((0.0, 0.0), add);
            (weight > 0.0).then(|| (PositionLoss { from, to, loss: nats / weight }, weight))
        };
        binning.edges(self.positions.len()).into_iter().filter_map(mean).collect()
    }

    fn best_context_loss(&self) -> Option<f64> {
        let buckets = self.by_position(Binning::Linear);
        let share = self.weight / buckets.len() as f64;
        let counted = buckets.iter().filter(|(_, weight)| *weight >= share / 2.0);
        counted
            .map(|(bucket, _)| bucket.loss)
            .filter(|loss| loss.is_finite())
            .min_by(f64::total_cmp)
    }

    fn scores(&self, probe: &Probe) -> ValidationScores {
        let curve = self.by_position(Binning::Logarithmic);
        ValidationScores {
            loss: self.nats / self.weight,
            bits_per_byte: self.nats / std::f64::consts::LN_2 / self.bytes,
            loss_by_position: curve.into_iter().map(|(bin, _)| bin).collect(),
            best_context_loss: self.best_context_loss(),
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

    /// One pass, over the same rows in the same order at every call. Ranks compute micro-batches in turn; rank 0 adds
    /// all losses in the order of the rows, so that the scores do not depend on the number of ranks. It alone has them.
    ///
    /// # Errors
    /// When a shard is damaged, or a rank is lost.
    pub fn run<B: OpBackend>(
        &self,
        model: &LanguageModel<B>,
        device: &B::Device,
        collective: &dyn Collective<B>,
    ) -> Result<Option<ValidationScores>, TrainError> {
        let world = collective.world();
        let rows = self.loader.validation_rows().unwrap_or(0);
        let firsts: Vec<u64> = (0..rows).step_by(self.micro_batch).collect();
        let mut sums = Sums::new(self.loader.seq_len());
        for round in firsts.chunks(world.size) {
            let own = match round.get(world.rank) {
                Some(&first) => self.losses(model, first, device)?,
                None => vec![],
            };
            let own = own.into_iter().flat_map(f32::to_le_bytes).collect();
            let all = collective.all_gather(own)?;
            for (&first, losses) in round.iter().zip(&all).filter(|_| world.is_first()) {
                let (losses, _) = losses.as_chunks::<4>();
                let losses = losses.iter().map(|bytes| f32::from_le_bytes(*bytes));
                sums.add(&self.batch(first)?, losses, &self.token_bytes);
            }
        }
        if !world.is_first() {
            return Ok(None);
        }
        let first = MicroBatch::<B>::new(&self.loader.try_batch(0, 1)?, 0..1, device);
        Ok(Some(sums.scores(&model.observe(first.inputs, first.document_starts))))
    }

    /// The micro-batch that begins with row `first`. Rows past the last one have no weight, so that every batch has the
    /// same shape.
    fn batch(&self, first: u64) -> Result<Batch, DataError> {
        self.loader.try_batch(first, self.micro_batch)
    }

    /// The losses of its targets.
    fn losses<B: OpBackend>(
        &self,
        model: &LanguageModel<B>,
        first: u64,
        device: &B::Device,
    ) -> Result<Vec<f32>, DataError> {
        let batch = self.batch(first)?;
        let MicroBatch { inputs, targets, document_starts } =
            MicroBatch::<B>::new(&batch, 0..batch.rows, device);
        let losses = model.token_losses(inputs, targets, document_starts).into_data();
        Ok(losses.iter::<f32>().collect())
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
            goes_on: None,
        };
        let mut sums = Sums::new(4);
        let nat = std::f32::consts::LN_2;
        sums.add(&batch, [nat, 3.0 * nat, 2.0 * nat, 100.0].into_iter(), &[0, 1, 5]);
        let scores = sums.scores(&Probe::default());
        assert!((scores.loss - 2.0 * f64::from(nat)).abs() < 1e-12);
        // 6 bits for the 1 + 5 + 0 bytes of three targets.
        assert!((scores.bits_per_byte - 1.0).abs() < 1e-6);
    }

    /// Rows of 16 tokens whose losses are those of their positions: 16, 15, … 1.
    fn falling(starts: Option<Vec<i32>>, weights: Vec<f32>) -> ValidationScores {
        let rows = weights.len() / 16;
        let batch = Batch {
            rows,
            seq_len: 16,
            inputs: vec![0; rows * 16],
            targets: vec![1; rows * 16],
            loss_weights: weights,
            document_starts: starts,
            goes_on: None,
        };
        let mut sums = Sums::new(16);
        sums.add(&batch, (0..rows * 16).map(|at| (16 - at % 16) as f32), &[0, 1]);
        sums.scores(&Probe::default())
    }

    #[test]
    fn losses_by_position_are_means_over_rows() {
        let scores = falling(None, vec![1.0; 32]);
        let curve: Vec<(usize, usize, f64)> =
            scores.loss_by_position.iter().map(|bin| (bin.from, bin.to, bin.loss)).collect();
        let expected = [
            (0, 1, 16.0),
            (1, 2, 15.0),
            (2, 3, 14.0),
            (3, 4, 13.0),
            (4, 6, 11.5),
            (6, 8, 9.5),
            (8, 11, 7.0),
            (11, 16, 3.0),
        ];
        assert_eq!(curve, expected);
        assert_eq!(scores.loss, 8.5);
        // The last of eight buckets has the losses 2 and 1.
        assert_eq!(scores.best_context_loss, Some(1.5));
    }

    #[test]
    fn positions_count_from_the_start_of_a_masked_document() {
        let starts = (0..16).map(|at| if at < 8 { 0 } else { 8 }).collect();
        let scores = falling(Some(starts), vec![1.0; 16]);
        let last = scores.loss_by_position.last().unwrap();
        assert_eq!((last.from, last.to), (6, 8), "no document has read more than 8 tokens");
        assert_eq!(scores.loss_by_position[0].loss, (16.0 + 8.0) / 2.0);
    }

    #[test]
    fn a_bucket_of_few_tokens_is_not_the_best_context() {
        // Of the last two positions, with the lowest losses, only one in four rows counts.
        let weight = |at: usize| if at % 16 < 14 || at < 16 { 1.0 } else { 0.0 };
        let scores = falling(None, (0..64).map(weight).collect());
        assert_eq!(scores.best_context_loss, Some(3.5));
        assert_eq!(falling(None, vec![0.0; 16]).best_context_loss, None);
    }
}
