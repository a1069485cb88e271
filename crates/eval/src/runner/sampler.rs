//! Takes the samples of a suite, in rounds of one batch a rank, and writes them as they finish.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use longwall_data::Tokenizer;

use super::calls::{Batch, batches, output, run_batch};
use crate::journal::{Journal, Sample, lines};
use crate::options::SamplingOptions;
use crate::suite::{ProgressUpdate, Request, RunContext, Suite, Trial};
use crate::{EvalError, EvalModel};

/// Batches whose requests are built at a time: enough to sort by length, few enough for memory.
const BATCHES_AT_A_TIME: usize = 16;

/// Takes the samples of a suite.
pub(super) struct Sampler<'a, S: Suite> {
    pub suite: &'a S,
    pub sampling: &'a SamplingOptions,
    pub tokenizer: &'a Tokenizer,
    pub model: &'a mut dyn EvalModel,
    /// Rank 0's.
    pub journal: Option<&'a mut Journal>,
    /// Trials that the journal holds.
    pub done: HashSet<u64>,
    pub speed: Speed,
    pub context: &'a RunContext<'a>,
}

impl<S: Suite> Sampler<'_, S> {
    /// Takes every sample that the journal does not hold.
    ///
    /// The batches are those of an uninterrupted run on one rank, minus what is done, so that a resumed evaluation
    /// takes its samples in the same order. Each round takes one batch on every rank.
    pub(super) fn take_all(&mut self, trials: &[Trial]) -> Result<(), EvalError> {
        let size = self.context.ranks.size;
        let mut queue = Vec::new();
        for trials in trials.chunk_by(|a, b| a.length == b.length) {
            for chunk in trials.chunks(self.sampling.batch * BATCHES_AT_A_TIME) {
                if chunk.iter().all(|trial| self.done.contains(&trial.id)) {
                    continue;
                }
                let requests = self.context.interruptible(&self.stopped(), || {
                    let request =
                        |trial| Ok((trial, checked_request(self.suite, trial, self.tokenizer)?));
                    chunk.iter().map(request).collect::<Result<Vec<_>, EvalError>>()
                });
                let requests = match requests {
                    Ok(requests) => requests,
                    Err(error) => return self.fail(error),
                };
                for mut batch in batches(requests, self.sampling) {
                    batch.retain(|(trial, _)| !self.done.contains(&trial.id));
                    if !batch.is_empty() {
                        queue.push(batch);
                    }
                    if queue.len() == size {
                        self.take_round(&std::mem::take(&mut queue))?;
                    }
                }
            }
        }
        if !queue.is_empty() {
            self.take_round(&queue)?;
        }
        // The others must learn if rank 0 could not write the last round.
        self.gather(Ok(vec![]))?.1.map_or(Ok(()), Err)
    }

    /// Takes a batch on each rank; rank 0 writes them.
    fn take_round(&mut self, round: &[Batch<'_>]) -> Result<(), EvalError> {
        let own = match round.get(self.context.ranks.rank) {
            Some(batch) => self.take(batch),
            None => Ok(vec![]),
        };
        // A stop that was asked for on any rank is one of all.
        let own = own.map(|lines| [&[u8::from(self.context.stopped())], &lines[..]].concat());
        let (all, failure) = self.gather(own)?;
        let asked = all.iter().any(|message| message.first() == Some(&1));
        let lines: Vec<&[u8]> = all.iter().filter_map(|message| message.get(1..)).collect();
        let lines = lines.concat();
        if let Some(journal) = self.journal.as_mut().filter(|_| !lines.is_empty())
            && let Err(error) = journal.append(&lines)
        {
            return match failure {
                Some(failure) => Err(failure),
                None => self.fail(error),
            };
        }
        for (batch, _) in round.iter().zip(&all).filter(|(_, message)| message.len() > 1) {
            self.done.extend(batch.iter().map(|(trial, _)| trial.id));
            self.speed.add(batch);
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        if asked && !self.is_done() {
            return Err(self.stopped());
        }
        self.context.progress.update(&self.speed.update(&round[0], self.done.len() as u64));
        Ok(())
    }

    /// The lines of a batch of samples.
    fn take(&mut self, batch: &[(&Trial, Request)]) -> Result<Vec<u8>, EvalError> {
        let stopped = self.stopped();
        let call = || run_batch(self.model, self.tokenizer, self.sampling, batch);
        let answers = self.context.interruptible(&stopped, call)?;
        let outputs: Vec<Option<String>> = answers.iter().map(output).collect();
        let samples = batch.iter().zip(&answers).zip(&outputs);
        Ok(lines(samples.map(|(((trial, request), answer), output)| {
            let verdict = self.suite.judge(trial, request, answer);
            let fields = self.suite.fields(trial, request, &verdict);
            let score = S::sample_score(&verdict);
            Sample { trial, request, output: output.as_deref(), verdict, score, fields }
        })))
    }

    /// Ends this rank's work with `error`, and that of the others in their next exchange.
    fn fail(&self, error: EvalError) -> Result<(), EvalError> {
        self.gather(Err(error))?.1.map_or(Ok(()), Err)
    }

    fn gather(
        &self,
        own: Result<Vec<u8>, EvalError>,
    ) -> Result<(Vec<Vec<u8>>, Option<EvalError>), EvalError> {
        self.context.ranks.gather(own, self.context, &self.stopped())
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.len() as u64 == self.speed.total
    }

    /// What an evaluation that stops here says.
    pub(super) fn stopped(&self) -> EvalError {
        let (done, folder) = (self.done.len() as u64, self.context.out_dir.clone());
        EvalError::Stopped { done, total: self.speed.total, folder }
    }
}

/// A trial's request. Panics if it needs more context than the trial's length: a bug in the suite.
fn checked_request<S: Suite>(
    suite: &S,
    trial: &Trial,
    tokenizer: &Tokenizer,
) -> Result<Request, EvalError> {
    let request = suite.request(trial, tokenizer)?;
    let context_len = request.call.context_len();
    assert!(
        context_len <= trial.length,
        "{}: trial {} needs {context_len} tokens of context; its length is {}",
        S::NAME,
        trial.id,
        trial.length
    );
    Ok(request)
}

/// Measures samples per second, and estimates the time left from the tokens left.
pub(super) struct Speed {
    start: Instant,
    total: u64,
    samples: u64,
    tokens: u64,
    tokens_left: u64,
}

impl Speed {
    pub(super) fn new(trials: &[Trial], done: &HashSet<u64>) -> Self {
        let left = trials.iter().filter(|trial| !done.contains(&trial.id));
        Speed {
            start: Instant::now(),
            total: trials.len() as u64,
            samples: 0,
            tokens: 0,
            tokens_left: left.map(|trial| trial.length as u64).sum(),
        }
    }

    /// Counts a finished batch.
    fn add(&mut self, batch: &[(&Trial, Request)]) {
        let tokens = batch.iter().map(|(trial, _)| trial.length as u64).sum();
        self.samples += batch.len() as u64;
        self.tokens += tokens;
        self.tokens_left = self.tokens_left.saturating_sub(tokens);
    }

    /// The progress after a round that began with `batch`.
    fn update(&self, batch: &[(&Trial, Request)], done: u64) -> ProgressUpdate {
        let seconds = self.start.elapsed().as_secs_f64();
        let left = seconds * self.tokens_left as f64 / self.tokens as f64;
        ProgressUpdate {
            done,
            total: self.total,
            length: batch[0].0.length,
            samples_per_second: (seconds > 0.0).then(|| self.samples as f64 / seconds),
            time_left: Duration::try_from_secs_f64(left).ok(),
        }
    }
}
