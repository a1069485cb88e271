//! The steps of a run as stages: stretches of steps whose batches have one shape, and attention one window.
//!
//! A run without `train.stages` has one stage. All positions in a run (tokens, rows, learning rate, what is
//! due) are functions of the step and of the stages, so that a resumed run needs no other state.

use longwall_config::Interval;
use longwall_model::config::Window;
use serde::Serialize;

use crate::config::{Every, PhaseLength, StageConfig};
use crate::distributed::World;
use crate::error::TrainError;

/// A stretch of steps whose batches have one shape, and whose attention has one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Stage {
    /// Steps of the run before the stage.
    pub first_step: u64,
    /// Tokens of the run before the stage.
    pub first_token: u64,
    /// Tokens of a step.
    pub batch_tokens: u64,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Rows of one forward and backward pass, if the configuration sets them.
    pub micro_batch: Option<usize>,
    /// `model.window` during the stage, in tokens.
    pub window: Option<usize>,
    /// How many micro-batches a step must have: two, if the gradient noise scale is measured.
    #[serde(skip)]
    pub least_micro_batches: usize,
    /// Ranks that share each row, at least 1.
    #[serde(skip)]
    pub context_parallel: usize,
}

impl Default for Stage {
    fn default() -> Self {
        Stage {
            first_step: 0,
            first_token: 0,
            batch_tokens: 0,
            seq_len: 0,
            micro_batch: None,
            window: None,
            least_micro_batches: 0,
            context_parallel: 1,
        }
    }
}

impl Stage {
    /// Rows of a step.
    pub fn rows(&self) -> usize {
        self.batch_tokens as usize / self.seq_len.max(1)
    }

    /// Tokens of a row that one rank computes.
    pub fn tokens_of_rank(&self) -> usize {
        self.seq_len / self.context_parallel
    }

    /// Rows of one forward and backward pass: `micro_batch` if it is set, else the largest divisor of a step's rows
    /// within `budget_tokens`, at least one row.
    pub fn micro_batch_rows(&self, budget_tokens: usize) -> usize {
        let largest = || self.micro_batches(budget_tokens).next().unwrap_or(1);
        self.micro_batch.unwrap_or_else(largest)
    }

    /// The divisors of a step's rows within `budget_tokens` of a rank, the largest first, that leave enough
    /// micro-batches; always one row.
    pub fn micro_batches(&self, budget_tokens: usize) -> impl Iterator<Item = usize> + use<> {
        let rows = self.rows();
        let most = rows / self.least_micro_batches.max(1);
        let most = most.min(budget_tokens / self.tokens_of_rank().max(1)).max(1);
        (1..=most).rev().filter(move |n| rows.is_multiple_of(*n))
    }

    /// One rank's part of a step: the batch of the rows that it computes, alone or with the ranks that it shares them
    /// with, and how many micro-batches it must have of it.
    ///
    /// # Errors
    /// When the ranks do not divide into groups that share rows, or the rows do not divide by the number of groups.
    pub fn of_rank(&self, world: World) -> Result<Self, TrainError> {
        let (rows, ranks) = (self.rows(), world.size);
        let Stage { batch_tokens, seq_len, context_parallel, .. } = *self;
        if !ranks.is_multiple_of(context_parallel) {
            return Err(TrainError::RanksOfRows { context_parallel, ranks });
        }
        let groups = world.groups(context_parallel).size;
        if groups > 1 && !rows.is_multiple_of(groups) {
            let shared = context_parallel;
            return Err(TrainError::RowsOfRanks { rows, batch_tokens, seq_len, ranks, shared });
        }
        let least_micro_batches = self.least_micro_batches.div_ceil(groups);
        Ok(Stage { batch_tokens: batch_tokens / groups as u64, least_micro_batches, ..*self })
    }

    /// The stage with micro-batches of `micro_batch` rows.
    pub fn open(self, micro_batch: usize) -> OpenStage {
        OpenStage { stage: self, micro_batch }
    }

    /// Steps of the stage until a run of `tokens` tokens has reached `from`.
    fn steps_until(&self, from: PhaseLength, tokens: u64) -> u64 {
        let batch = self.batch_tokens.max(1);
        match from {
            PhaseLength::Steps(step) => step.saturating_sub(self.first_step),
            PhaseLength::Tokens(token) => token.saturating_sub(self.first_token).div_ceil(batch),
            PhaseLength::Fraction(share) => {
                let left = share * tokens as f64 - self.first_token as f64;
                (left / batch as f64).round().max(0.0) as u64
            }
        }
    }

    /// The stage that follows after `steps` steps of this one.
    fn followed_by(&self, next: &StageConfig, steps: u64) -> Self {
        Stage {
            first_step: self.first_step.saturating_add(steps),
            first_token: self.first_token.saturating_add(steps.saturating_mul(self.batch_tokens)),
            batch_tokens: next.batch_tokens.unwrap_or(self.batch_tokens),
            seq_len: next.seq_len.unwrap_or(self.seq_len),
            micro_batch: next.micro_batch.or(self.micro_batch),
            window: next.window.map_or(self.window, Window::tokens),
            least_micro_batches: self.least_micro_batches,
            context_parallel: self.context_parallel,
        }
    }
}

/// A stage with its micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenStage {
    /// The stage.
    pub stage: Stage,
    /// Rows of one forward and backward pass.
    pub micro_batch: usize,
}

impl OpenStage {
    /// Rows of a micro-batch, and their length.
    pub fn shape(&self) -> [usize; 2] {
        [self.micro_batch, self.stage.seq_len]
    }
}

/// Steps whose batches have one shape, and whose attention has one window; the next stretch differs in one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Steps of the run before the stretch.
    pub first_step: u64,
    /// As [`Stage::batch_tokens`].
    pub batch_tokens: u64,
    /// As [`Stage::seq_len`].
    pub seq_len: usize,
    /// As [`Stage::window`].
    pub window: Option<usize>,
}

/// The stages of a run, and its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// In their order; the first starts at step 0.
    stages: Vec<Stage>,
    total_steps: u64,
    /// Whether the configuration has stages: one from step 0 leaves a single stage.
    staged: bool,
}

impl Timeline {
    /// A run of `tokens` tokens, rounded up to whole steps, that begins with steps as those of `base` and
    /// changes them as `changes` say. Also returns the stage that each change begins.
    ///
    /// A change that is not after the one before it replaces it; a valid configuration has none.
    pub(crate) fn new(base: Stage, changes: &[StageConfig], tokens: u64) -> (Self, Vec<Stage>) {
        let mut stages = vec![base];
        let mut begun = Vec::with_capacity(changes.len());
        for change in changes {
            let last = stages[stages.len() - 1];
            let steps = last.steps_until(change.from, tokens);
            let next = last.followed_by(change, steps);
            if steps == 0 {
                stages.pop();
            }
            stages.push(next);
            begun.push(next);
        }
        let last = stages[stages.len() - 1];
        let steps = tokens.saturating_sub(last.first_token).div_ceil(last.batch_tokens.max(1));
        let total_steps = last.first_step.saturating_add(steps);
        (Timeline { stages, total_steps, staged: !changes.is_empty() }, begun)
    }

    /// Steps of the run.
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Whether the configuration has stages, be it a single one from step 0.
    pub fn is_staged(&self) -> bool {
        self.staged
    }

    /// The stages, in their order.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The place in [`stages`](Self::stages) of the stage of `step`, counted from 0.
    pub fn index(&self, step: u64) -> usize {
        self.stages.partition_point(|stage| stage.first_step <= step) - 1
    }

    /// The stage of the last one of `step` finished steps; before the first step, the first stage.
    pub fn last_stage(&self, step: u64) -> &Stage {
        &self.stages[self.index(step.saturating_sub(1))]
    }

    /// Whether the window changes during the run.
    pub fn has_windows(&self) -> bool {
        self.stages.iter().any(|stage| stage.window != self.stages[0].window)
    }

    /// Tokens of the first `step` steps. `None` if that is more than a number holds.
    pub fn checked_tokens(&self, step: u64) -> Option<u64> {
        let stage = &self.stages[self.index(step)];
        let tokens = (step - stage.first_step).checked_mul(stage.batch_tokens)?;
        stage.first_token.checked_add(tokens)
    }

    /// Tokens of the first `step` steps.
    pub fn tokens(&self, step: u64) -> u64 {
        self.checked_tokens(step).unwrap_or(u64::MAX)
    }

    /// Tokens that each stage has of the first `step` steps.
    pub fn tokens_by_stage(&self, step: u64) -> impl Iterator<Item = u64> + '_ {
        let ends = self.stages[1..].iter().map(move |next| next.first_step.min(step));
        let ends = ends.chain([step]);
        let of =
            move |(stage, end): (&Stage, u64)| self.tokens(end).saturating_sub(stage.first_token);
        self.stages.iter().zip(ends).map(of)
    }

    /// Tokens of the first `step` steps, in batches of the first stage: without further stages, `step` itself.
    pub fn position(&self, step: u64) -> f64 {
        match self.stages[..] {
            [_] => step as f64,
            _ => self.tokens(step) as f64 / self.stages[0].batch_tokens.max(1) as f64,
        }
    }

    /// Whether something that happens at intervals happens after `step` finished steps.
    pub fn is_due(&self, every: Every, step: u64) -> bool {
        let Some(interval) = every.0.filter(|_| step > 0) else { return false };
        match (interval, &self.stages[..]) {
            // After the first step at or past each multiple.
            (Interval::Tokens(tokens), [_, _, ..]) => {
                self.tokens(step) / tokens.max(1) > self.tokens(step - 1) / tokens.max(1)
            }
            (interval, stages) => step.is_multiple_of(interval.steps(stages[0].batch_tokens)),
        }
    }

    /// The steps of a phase at the start of the run. A share is one of the run's tokens.
    pub fn steps_of_first(&self, length: PhaseLength) -> u64 {
        let total = self.tokens(self.total_steps);
        let from = match length {
            PhaseLength::Steps(steps) => return steps,
            PhaseLength::Tokens(tokens) => tokens as f64,
            PhaseLength::Fraction(share) => share * total as f64,
        };
        let begun = self.stages.iter().rev().find(|stage| stage.first_token as f64 <= from);
        let stage = begun.unwrap_or(&self.stages[0]);
        let batch = stage.batch_tokens.max(1);
        stage.first_step.saturating_add(match length {
            PhaseLength::Fraction(share) => {
                let batches = |tokens: u64| tokens as f64 / batch as f64;
                (share * batches(total) - batches(stage.first_token)).round() as u64
            }
            _ => stage.steps_until(length, total),
        })
    }

    /// The steps of a phase at the end of the run. A share is one of the run's tokens.
    pub fn steps_of_last(&self, length: PhaseLength) -> u64 {
        if let PhaseLength::Steps(steps) = length {
            return steps;
        }
        let total = self.tokens(self.total_steps);
        let mut end = (self.total_steps, total);
        for (at, stage) in self.stages.iter().enumerate().rev() {
            let batch = stage.batch_tokens.max(1);
            let after = total - end.1;
            let steps = match length {
                PhaseLength::Fraction(share) => {
                    let batches = |tokens: u64| tokens as f64 / batch as f64;
                    (share * batches(total) - batches(after)).round().max(0.0) as u64
                }
                PhaseLength::Tokens(tokens) => tokens.saturating_sub(after).div_ceil(batch),
                PhaseLength::Steps(_) => unreachable!("returned above"),
            };
            if at == 0 || steps <= end.0 - stage.first_step {
                return (self.total_steps - end.0).saturating_add(steps);
            }
            end = (stage.first_step, stage.first_token.min(total));
        }
        unreachable!("a timeline has a stage")
    }

    /// The stretches of the first `step` steps: two runs that agree in them had the same batches and the same attention.
    pub fn past(&self, step: u64) -> Vec<Stretch> {
        let begun = self.stages.iter().take_while(|stage| stage.first_step < step);
        let mut stretches: Vec<Stretch> = begun
            .map(|&Stage { first_step, batch_tokens, seq_len, window, .. }| Stretch {
                first_step,
                batch_tokens,
                seq_len,
                window,
            })
            .collect();
        stretches.dedup_by(|next, last| *next == Stretch { first_step: next.first_step, ..*last });
        stretches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(batch_tokens: u64) -> Stage {
        let (seq_len, micro_batch) = (32, None);
        Stage { batch_tokens, seq_len, micro_batch, ..Stage::default() }
    }

    fn change(from: &str, batch_tokens: u64) -> StageConfig {
        toml::from_str(&format!("from = {from}\nbatch_tokens = {batch_tokens}")).unwrap()
    }

    /// Steps of 64 tokens, from token 640 of 128, from token 1,920 of 256; 4,480 tokens.
    fn staged() -> Timeline {
        let changes = [change("10", 128), change("\"1900 tokens\"", 256)];
        Timeline::new(base(64), &changes, 4400).0
    }

    #[test]
    fn every_step_has_the_batch_of_its_stage() {
        let timeline = staged();
        assert_eq!(timeline.total_steps(), 30);
        let tokens: Vec<u64> = [0, 1, 10, 11, 20, 21, 30].map(|step| timeline.tokens(step)).into();
        assert_eq!(tokens, [0, 64, 640, 768, 1920, 2176, 4480]);
        let index: Vec<usize> = [0, 9, 10, 19, 20, 99].map(|step| timeline.index(step)).into();
        assert_eq!(index, [0, 0, 1, 1, 2, 2]);
        assert_eq!(timeline.position(20), 30.0);
        assert_eq!(timeline.checked_tokens(u64::MAX), None);
    }

    #[test]
    fn a_stage_from_the_start_replaces_the_base() {
        let (timeline, begun) = Timeline::new(base(64), &[change("0", 32)], 320);
        assert_eq!(timeline.stages(), begun);
        assert_eq!((timeline.total_steps(), timeline.stages()[0].rows()), (10, 1));
    }

    #[test]
    fn shares_are_shares_of_the_tokens() {
        let timeline = Timeline::new(base(64), &[change("0.25", 128)], 6400).0;
        assert_eq!(timeline.stages()[1].first_step, 25);
        // A quarter of the tokens in 25 steps, the rest in 38 of twice the size.
        assert_eq!(timeline.total_steps(), 63);
        let first = |share| timeline.steps_of_first(PhaseLength::Fraction(share));
        assert_eq!([first(0.0), first(0.1), first(1.0)], [0, 10, 63]);
        let last = |share| timeline.steps_of_last(PhaseLength::Fraction(share));
        assert_eq!([last(0.0), last(0.5), last(1.0)], [0, 25, 63]);
    }

    #[test]
    fn lengths_in_tokens_are_rounded_up_across_stages() {
        let timeline = staged();
        let first = |tokens| timeline.steps_of_first(PhaseLength::Tokens(tokens));
        assert_eq!([first(1), first(640), first(641), first(1921)], [1, 10, 11, 21]);
        let last = |tokens| timeline.steps_of_last(PhaseLength::Tokens(tokens));
        // 2,560 tokens in the last ten steps, 1,280 in the ten before.
        assert_eq!([last(1), last(2560), last(2561), last(3841)], [1, 10, 11, 21]);
        assert_eq!(timeline.steps_of_last(PhaseLength::Steps(7)), 7);
    }

    #[test]
    fn one_stage_counts_phases_in_steps() {
        let timeline = Timeline::new(base(10), &[], 950).0;
        assert_eq!(timeline.total_steps(), 95);
        for steps in [Timeline::steps_of_first, Timeline::steps_of_last] {
            assert_eq!(steps(&timeline, PhaseLength::Fraction(0.1)), 10);
            assert_eq!(steps(&timeline, PhaseLength::Steps(7)), 7);
            assert_eq!(steps(&timeline, PhaseLength::Tokens(21)), 3);
        }
    }

    #[test]
    fn intervals_are_due_at_their_multiples_only() {
        let due = |timeline: &Timeline, interval| -> Vec<u64> {
            (0..=30).filter(|step| timeline.is_due(Every(Some(interval)), *step)).collect()
        };
        let plain = Timeline::new(base(10), &[], 450).0;
        assert_eq!(due(&plain, Interval::Tokens(100)), [10, 20, 30]);
        assert!(!(0..100).any(|step| plain.is_due(Every(None), step)));
        let staged = staged();
        assert_eq!(due(&staged, Interval::Steps(10)), [10, 20, 30]);
        // 1,000, 2,000, 3,000, 4,000 tokens.
        assert_eq!(due(&staged, Interval::Tokens(1000)), [13, 21, 25, 29]);
    }

    #[test]
    fn the_past_does_not_depend_on_later_stages() {
        let early = Timeline::new(base(64), &[change("10", 128)], 4400).0;
        assert_eq!(early.past(20), staged().past(20));
        assert_ne!(early.past(21), staged().past(21));
    }

    #[test]
    fn a_stage_keeps_the_window_until_it_is_changed() {
        let changes =
            ["from = 2\nwindow = 8", "from = 4\nbatch_tokens = 32", "from = 6\nwindow = \"none\""];
        let changes = changes.map(|table| toml::from_str::<StageConfig>(table).unwrap());
        let start = Stage { window: Some(4), ..base(64) };
        let timeline = Timeline::new(start, &changes, 640).0;
        let windows: Vec<_> = timeline.stages().iter().map(|stage| stage.window).collect();
        assert_eq!(windows, [Some(4), Some(8), Some(8), None]);
        let after = |step| timeline.last_stage(step).window;
        assert_eq!(
            [0, 1, 2, 3, 6, 7].map(after),
            [Some(4), Some(4), Some(4), Some(8), Some(8), None]
        );
        assert!(timeline.has_windows() && !staged().has_windows());
        let without = Timeline::new(start, &changes[1..], 640).0;
        assert_eq!(without.past(2), timeline.past(2));
        assert_ne!(without.past(3), timeline.past(3));
    }

    #[test]
    fn a_stage_that_changes_no_batch_does_not_change_the_past() {
        let micro_batch: StageConfig = toml::from_str("from = 4\nmicro_batch = 1").unwrap();
        let (plain, changed) = (Timeline::new(base(64), &[], 640).0, [micro_batch]);
        let changed = Timeline::new(base(64), &changed, 640).0;
        assert_eq!(changed.stages().len(), 2);
        assert_eq!(plain.past(8), changed.past(8));
    }
}
