//! The losses of a run over steps, tokens, FLOPs and time.

use longwall_train::metrics::{PositionLoss, Record, StepRecord, ValidationRecord};
use serde::Serialize;

/// Longer curves are averaged over groups of steps: this many points fill a screen.
const MOST_POINTS: usize = 800;

/// A curve in columns: one entry of each for every point.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Curve {
    pub step: Vec<u64>,
    pub tokens: Vec<u64>,
    pub flops: Vec<Option<f64>>,
    pub seconds: Vec<f64>,
    pub loss: Vec<Option<f32>>,
}

impl Curve {
    fn push(&mut self, at: (u64, u64, Option<f64>, f64), loss: f64) {
        let (step, tokens, flops, seconds) = at;
        self.step.push(step);
        self.tokens.push(tokens);
        self.flops.push(flops);
        self.seconds.push((seconds * 10.0).round() / 10.0);
        self.loss.push(Some(loss as f32).filter(|loss| loss.is_finite()));
    }

    /// The training loss: means over groups of steps that were not skipped, each at its last step.
    pub fn of_training(records: &[Record]) -> Self {
        let taken = records.iter().filter_map(|record| match record {
            Record::Step(step) if !step.skipped && step.loss.is_some() => Some(step),
            _ => None,
        });
        let taken: Vec<&StepRecord> = taken.collect();
        let mut curve = Curve::default();
        for group in taken.chunks(taken.len().div_ceil(MOST_POINTS).max(1)) {
            let sum: f64 = group.iter().filter_map(|step| step.loss).map(f64::from).sum();
            let last = group[group.len() - 1];
            let at = (last.step, last.tokens, last.flops, last.seconds);
            curve.push(at, sum / group.len() as f64);
        }
        curve
    }

    /// The validation loss, or another number of each validation.
    pub fn of_validations(
        validations: &[&ValidationRecord],
        value: impl Fn(&ValidationRecord) -> f64,
    ) -> Self {
        let mut curve = Curve::default();
        for record in validations {
            let at = (record.step, record.tokens, record.flops, record.seconds);
            curve.push(at, value(record));
        }
        curve
    }
}

/// The loss by position of one validation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ByPosition {
    pub step: u64,
    /// Tokens read at the end of each bin, and the mean loss there.
    pub points: Vec<(usize, Option<f64>)>,
}

impl ByPosition {
    pub fn of(validation: &ValidationRecord) -> Option<Self> {
        let point = |bin: &PositionLoss| (bin.to, Some(bin.loss).filter(|loss| loss.is_finite()));
        let points: Vec<_> = validation.loss_by_position.iter().map(point).collect();
        (!points.is_empty()).then_some(ByPosition { step: validation.step, points })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: Option<f32>) -> Record {
        Record::Step(StepRecord {
            step,
            tokens: step * 10,
            flops: Some(step as f64),
            loss,
            z_loss: None,
            grad_norm: None,
            lr: 1e-3,
            batch_tokens: None,
            seq_len: None,
            window: None,
            tokens_per_second: 1.0,
            mfu: None,
            seconds: step as f64 / 3.0,
            skipped: loss.is_none(),
        })
    }

    #[test]
    fn long_curves_are_means_and_end_at_the_last_step() {
        let records: Vec<Record> =
            (1..=1601).map(|n| step(n, (n != 3).then_some(n as f32))).collect();
        let curve = Curve::of_training(&records);
        assert_eq!(curve.loss.len(), 800);
        // Step 3 was skipped.
        assert_eq!((curve.step[1], curve.loss[1]), (5, Some(4.5)));
        assert_eq!((curve.step[799], curve.tokens[799]), (1601, 16_010));
        assert_eq!(curve.seconds[0], 0.7);
        let short = Curve::of_training(&records[..2]);
        assert_eq!((short.step, short.loss), (vec![1, 2], vec![Some(1.0), Some(2.0)]));
        assert_eq!(Curve::of_training(&[]), Curve::default());
    }
}
