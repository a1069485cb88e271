//! Runs a suite: trials in batches, samples written as they finish, then scores, plots and report.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use longwall_config::Problems;
use longwall_data::Tokenizer;

use crate::files::write_atomically;
use crate::journal::{Journal, Sample, compare, lines};
use crate::options::{SamplingOptions, SuiteOptions};
use crate::report::{Report, TokenizerReport};
use crate::suite::{
    Answer, Inspection, ModelCall, OpenContext, ProgressUpdate, Request, RunContext, Suite, Trial,
    show_tokens,
};
use crate::{EvalError, EvalModel};

/// Batches whose requests are built at a time: enough to sort by length, few enough for memory.
const BATCHES_AT_A_TIME: usize = 16;

/// Records every option of a suite that is out of range.
pub(crate) fn validate<S: Suite>(options: &SuiteOptions<S::Options>, problems: &mut Problems) {
    S::validate(&options.own, problems);
    options.sampling.validate(S::NAME, problems);
}

/// Checks that a suite can run on a model: its options, text, lengths and memory.
pub(crate) fn check_suite<S: Suite>(
    options: &SuiteOptions<S::Options>,
    model: &dyn EvalModel,
    context: &RunContext<'_>,
) -> Result<(), EvalError> {
    open_suite::<S>(options, model, context).map(|_| ())
}

/// The suite and its trials, of which every length fits the model and the memory.
fn open_suite<S: Suite>(
    options: &SuiteOptions<S::Options>,
    model: &dyn EvalModel,
    context: &RunContext<'_>,
) -> Result<(S, Vec<Trial>), EvalError> {
    let mut problems = Problems::new();
    validate::<S>(options, &mut problems);
    problems.into_result()?;
    let SuiteOptions { own, sampling } = options;
    let open = OpenContext {
        tokenizer: model.tokenizer(),
        train_seq_len: model.train_seq_len(),
        max_len: model.max_len(),
        device: &model.device(),
        seed: sampling.seed,
        held_out: context.held_out,
        metrics: &model.metrics(),
    };
    let stopped = EvalError::StoppedEarly { suite: S::NAME };
    let suite = context.interruptible(&stopped, || S::open(own, &open))?;
    let trials = suite.trials();
    check_lengths::<S>(&trials, model.max_len())?;
    check_memory::<S>(&trials, sampling, model)?;
    Ok((suite, trials))
}

/// Runs one suite from its options to its report, which rank 0 has.
pub(crate) fn run_suite<S: Suite>(
    options: &SuiteOptions<S::Options>,
    model: &mut dyn EvalModel,
    context: &RunContext<'_>,
) -> Result<Option<Report>, EvalError> {
    let ranks = context.ranks;
    let stopped = EvalError::StoppedEarly { suite: S::NAME };
    let wait = || ranks.gather(Ok(vec![]), context, &stopped).map(drop);
    // Rank 0 opens the suite first: it may write files of tokens, which the others read.
    if !ranks.is_first() {
        wait()?;
    }
    let opened = open_suite::<S>(options, &*model, context);
    if ranks.is_first() {
        wait()?;
    }
    let opened = opened.and_then(|(suite, trials)| {
        let mut report = blank_report(&suite, options, &*model, context);
        report.notes.extend(extrapolation_note(&trials, report.train_seq_len));
        let journal = match ranks.is_first() {
            true => {
                let (folder, git_hash) = (&context.out_dir, context.git_hash.as_deref());
                Some(Journal::open(folder, &settings(&report), git_hash, context.force)?)
            }
            false => None,
        };
        Ok((suite, trials, report, journal))
    });
    let (own, opened) = match opened {
        Ok(opened) => {
            let done = opened.3.as_ref().map(|(_, done)| done);
            let own = serde_json::to_vec(&(settings(&opened.2), done, context.stopped()));
            (Ok(own.expect("settings are plain data")), Some(opened))
        }
        Err(error) => (Err(error), None),
    };
    let (all, failure) = ranks.gather(own, context, &stopped)?;
    let (Some((suite, trials, mut report, journal)), None) = (opened, failure.as_ref()) else {
        return Err(failure.expect("a suite that did not open failed"));
    };
    let (done, asked) = agree(&all)?;
    let mut journal = journal.map(|(journal, _)| journal);
    let tokenizer = model.tokenizer().clone();
    context.progress.start(S::NAME, done.len() as u64, trials.len() as u64);
    let mut sampler = Sampler {
        suite: &suite,
        sampling: &options.sampling,
        tokenizer: &tokenizer,
        model,
        speed: Speed::new(&trials, &done),
        journal: journal.as_mut(),
        done,
        context,
    };
    let taken = match asked && !sampler.is_done() {
        true => Err(sampler.stopped()),
        false => sampler.take_all(&trials),
    };
    context.progress.finish();
    taken?;
    let stopped = sampler.stopped();

    let Some(journal) = journal else { return Ok(None) };
    report.git_hash = journal.git_hash().map(str::to_string);
    let Inspection { files, notes } =
        context.interruptible(&stopped, || suite.inspect(&mut *model))?;
    for (name, contents) in files {
        write_atomically(&journal.folder().join(name), &contents)?;
    }
    report.notes.extend(notes);
    let scoring = suite.score(&journal.outcomes(&trials)?);
    suite.draw(&scoring, &report.model(), journal.folder())?;
    report.samples = trials.len() as u64;
    report.headline = scoring.headline.iter().map(|(name, e)| (name.clone(), e.value)).collect();
    report.headline_estimates = scoring.headline;
    report.scores = scoring.scores;
    report.tables = scoring.tables;
    report.tables_only = scoring.tables_only;
    report.notes.extend(scoring.notes);
    report.details = scoring.details;
    report.shared = scoring.shared;
    report.save(journal.folder())?;
    Ok(Some(report))
}

/// The trials that rank 0 has found done, if all ranks have its settings, and whether any was asked to stop.
fn agree(all: &[Vec<u8>]) -> Result<(HashSet<u64>, bool), EvalError> {
    type Opened = (Value, Option<HashSet<u64>>, bool);
    let read = |message: &Vec<u8>| -> Opened {
        serde_json::from_slice(message).expect("another rank's settings")
    };
    let (ours, done, mut any_asked) = read(&all[0]);
    for (rank, message) in all.iter().enumerate().skip(1) {
        let (theirs, _, asked) = read(message);
        any_asked |= asked;
        let mut differences = Vec::new();
        compare("", &ours, &theirs, ["is, on rank 0,", "here"], &mut differences);
        if !differences.is_empty() {
            let reason = format!("it has other settings:\n{}", differences.join("\n"));
            return Err(EvalError::Rank { rank, reason });
        }
    }
    Ok((done.expect("rank 0 reads the journal"), any_asked))
}

/// Rejects lengths that the model cannot read, before the first sample.
fn check_lengths<S: Suite>(trials: &[Trial], max_len: Option<usize>) -> Result<(), EvalError> {
    let longest = trials.iter().map(|trial| trial.length).max().unwrap_or(0);
    match max_len {
        Some(max_len) if longest > max_len => {
            Err(EvalError::TooLong { suite: S::NAME, length: longest, max_len })
        }
        _ => Ok(()),
    }
}

/// Rejects lengths whose calls cannot fit into memory, before the first sample.
fn check_memory<S: Suite>(
    trials: &[Trial],
    sampling: &SamplingOptions,
    model: &dyn EvalModel,
) -> Result<(), EvalError> {
    let Some(available) = model.available_memory() else { return Ok(()) };
    let fits = |rows: usize, length: usize| {
        model.least_memory(rows, length, S::GENERATES).is_none_or(|needed| needed <= available)
    };
    for trials in trials.chunk_by(|a, b| a.length == b.length) {
        let length = trials[0].length;
        let rows = rows_of(sampling, length).min(trials.len());
        let Some(needed) = model.least_memory(rows, length, S::GENERATES) else { continue };
        if needed <= available {
            continue;
        }
        let remedy = if rows > 1 && fits(1, length) {
            "give --batch 1: one sequence at a time may fit".to_string()
        } else {
            let (mut fitting, mut beyond) = (0, length);
            while fitting + 1 < beyond {
                let middle = fitting + (beyond - fitting) / 2;
                if fits(1, middle) { fitting = middle } else { beyond = middle }
            }
            format!("ask for shorter --lengths, certainly below {beyond}, or use a larger machine")
        };
        let suite = S::NAME;
        return Err(EvalError::OutOfMemory { suite, length, rows, needed, available, remedy });
    }
    Ok(())
}

/// Says once which lengths are beyond the training length.
fn extrapolation_note(trials: &[Trial], train_seq_len: usize) -> Option<String> {
    let mut beyond: Vec<String> = trials
        .chunk_by(|a, b| a.length == b.length)
        .filter(|trials| trials[0].length > train_seq_len)
        .map(|trials| trials[0].length.to_string())
        .collect();
    let last = beyond.pop()?;
    let lengths = match beyond.len() {
        0 => format!("length {last} is"),
        1..=15 => format!("lengths {} and {last} are", beyond.join(", ")),
        more => format!("{} lengths from {} to {last} are", more + 1, beyond[0]),
    };
    Some(format!(
        "{lengths} beyond the training length, {train_seq_len}: such scores show how the model extrapolates"
    ))
}

/// How many sequences of a length run at a time.
fn rows_of(sampling: &SamplingOptions, length: usize) -> usize {
    sampling.batch.min(sampling.batch_tokens / length.max(1)).max(1)
}

/// The report before any sample.
fn blank_report<S: Suite>(
    suite: &S,
    options: &SuiteOptions<S::Options>,
    model: &dyn EvalModel,
    context: &RunContext<'_>,
) -> Report {
    let tokenizer = model.tokenizer();
    Report {
        suite: S::NAME.to_string(),
        suite_version: S::VERSION,
        run: context.run.clone(),
        checkpoint_step: context.checkpoint_step,
        model_changes: context.model_changes.clone(),
        git_hash: context.git_hash.clone(),
        longwall_version: env!("CARGO_PKG_VERSION").to_string(),
        device: model.device(),
        tokenizer: TokenizerReport {
            name: tokenizer.name().to_string(),
            fingerprint: tokenizer.fingerprint(),
            vocab_size: tokenizer.vocab_size(),
        },
        train_seq_len: model.train_seq_len(),
        seed: options.sampling.seed,
        config: serde_json::to_value(options).expect("options are plain data"),
        resolved: suite.resolved(),
        samples: 0,
        headline: Default::default(),
        headline_estimates: Default::default(),
        scores: Vec::new(),
        tables: Vec::new(),
        tables_only: false,
        notes: Vec::new(),
        details: Value::Null,
        shared: Default::default(),
    }
}

/// The settings that a resumed evaluation must share with the one it continues.
fn settings(report: &Report) -> Value {
    let mut options = report.config.clone();
    if let Some(options) = options.as_object_mut() {
        for name in SamplingOptions::SPEED_KEYS {
            options.remove(name);
        }
    }
    let mut settings = json!({
        "suite": report.suite,
        "suite_version": report.suite_version,
        "run": report.run,
        "checkpoint_step": report.checkpoint_step,
        "device": report.device,
        "tokenizer": report.tokenizer,
        "options": options,
        "resolved": report.resolved,
    });
    if !report.model_changes.is_empty() {
        settings["model_changes"] = report.model_changes.clone().into();
    }
    settings
}

/// Takes the samples of a suite.
struct Sampler<'a, S: Suite> {
    suite: &'a S,
    sampling: &'a SamplingOptions,
    tokenizer: &'a Tokenizer,
    model: &'a mut dyn EvalModel,
    /// Rank 0's.
    journal: Option<&'a mut Journal>,
    /// Trials that the journal holds.
    done: HashSet<u64>,
    speed: Speed,
    context: &'a RunContext<'a>,
}

impl<S: Suite> Sampler<'_, S> {
    /// Takes every sample that the journal does not hold.
    ///
    /// The batches are those of an uninterrupted run on one rank, minus what is done, so that a resumed evaluation
    /// takes its samples in the same order. Each round takes one batch on every rank.
    fn take_all(&mut self, trials: &[Trial]) -> Result<(), EvalError> {
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

    fn is_done(&self) -> bool {
        self.done.len() as u64 == self.speed.total
    }

    /// What an evaluation that stops here says.
    fn stopped(&self) -> EvalError {
        let (done, folder) = (self.done.len() as u64, self.context.out_dir.clone());
        EvalError::Stopped { done, total: self.speed.total, folder }
    }
}

/// What the model answered, as `samples.jsonl` keeps it: the text, or the predicted tokens' ids.
fn output(answer: &Answer) -> Option<String> {
    match answer {
        Answer::Text(text) => Some(text.clone()),
        Answer::Tokens(tokens) => Some(show_tokens(tokens)),
        _ => None,
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

/// Requests that share a call.
type Batch<'t> = Vec<(&'t Trial, Request)>;

/// Groups requests that may share a call into batches, as large as the options allow.
fn batches<'t>(mut requests: Batch<'t>, sampling: &SamplingOptions) -> Vec<Batch<'t>> {
    requests.sort_by_key(|(trial, request)| (request.call.batch_key(), trial.id));
    let (mut sizes, mut left) = (Vec::new(), &requests[..]);
    while let [(_, first), ..] = left {
        let may_share = |(_, request): &&(_, Request)| first.call.may_share_batch(&request.call);
        let (group, others) = left.split_at(left.iter().take_while(may_share).count());
        left = others;
        let calls = || group.iter().map(|(_, request)| &request.call);
        let rows = rows_of(sampling, calls().map(ModelCall::context_len).max().unwrap_or(0));
        let sequences = calls().map(ModelCall::sequences).max().unwrap_or(1);
        sizes.extend(group.chunks((rows / sequences).max(1)).map(<[_]>::len));
    }
    let mut requests = requests.into_iter();
    sizes.into_iter().map(|size| requests.by_ref().take(size).collect()).collect()
}

/// Runs the model for a batch of calls that may share one.
fn run_batch(
    model: &mut dyn EvalModel,
    tokenizer: &Tokenizer,
    sampling: &SamplingOptions,
    batch: &[(&Trial, Request)],
) -> Result<Vec<Answer>, EvalError> {
    let answers: Vec<Answer> = match batch[0].1.call {
        ModelCall::Generate { max_tokens, .. } => {
            let prompts: Vec<Vec<u32>> = inputs(batch, |call| match call {
                ModelCall::Generate { prompt, .. } => Some(prompt.clone()),
                _ => None,
            });
            let outputs = model.generate(&prompts, max_tokens)?;
            outputs.iter().map(|tokens| Answer::Text(tokenizer.decode(tokens))).collect()
        }
        ModelCall::LogLikelihoods { .. } => log_likelihoods(model, sampling, batch)?,
        ModelCall::RollingLogLikelihood { .. } => {
            let sequences: Vec<Vec<u32>> = inputs(batch, |call| match call {
                ModelCall::RollingLogLikelihood { tokens } => Some(tokens.clone()),
                _ => None,
            });
            let values = model.token_log_likelihoods(&sequences)?;
            for (values, sequence) in values.iter().zip(&sequences) {
                check_count("log-likelihoods of a sequence", values.len(), sequence.len() - 1)?;
            }
            values.into_iter().map(Answer::TokenLogProbs).collect()
        }
        ModelCall::Predict { .. } => {
            let calls: Vec<(Vec<u32>, Vec<usize>)> = inputs(batch, |call| match call {
                ModelCall::Predict { tokens, places } => Some((tokens.clone(), places.clone())),
                _ => None,
            });
            let (sequences, places): (Vec<_>, Vec<_>) = calls.into_iter().unzip();
            let found = model.predict(&sequences, &places)?;
            for (found, places) in found.iter().zip(&places) {
                check_count("predictions of a sequence", found.len(), places.len())?;
            }
            found.into_iter().map(Answer::Tokens).collect()
        }
        ModelCall::Observe { .. } => {
            let sequences: Vec<Vec<u32>> = inputs(batch, |call| match call {
                ModelCall::Observe { tokens } => Some(tokens.clone()),
                _ => None,
            });
            model.observe(&sequences)?.into_iter().map(Answer::Observations).collect()
        }
    };
    check_count("answers to a batch", answers.len(), batch.len())?;
    Ok(answers)
}

/// The log-likelihoods that each call of a batch asks for. A call with more sequences than the options allow at a
/// time takes several forward passes.
fn log_likelihoods(
    model: &mut dyn EvalModel,
    sampling: &SamplingOptions,
    batch: &[(&Trial, Request)],
) -> Result<Vec<Answer>, EvalError> {
    let calls: Vec<&[(Vec<u32>, Vec<u32>)]> = inputs(batch, |call| match call {
        ModelCall::LogLikelihoods { pairs } => Some(&pairs[..]),
        _ => None,
    });
    let longest = batch.iter().map(|(_, request)| request.call.input_len()).max().unwrap_or(0);
    let pairs = calls.concat();
    let mut values = Vec::with_capacity(pairs.len());
    for pairs in pairs.chunks(rows_of(sampling, longest)) {
        let found = model.log_likelihood(pairs)?;
        check_count("log-likelihoods of a batch", found.len(), pairs.len())?;
        values.extend(found);
    }
    let mut values = values.into_iter();
    let of_call = |pairs: &[_]| Answer::LogLikelihoods(values.by_ref().take(pairs.len()).collect());
    Ok(calls.into_iter().map(of_call).collect())
}

/// The inputs of a batch, whose calls are all of one kind.
fn inputs<'a, T>(
    batch: &'a [(&Trial, Request)],
    input: impl Fn(&'a ModelCall) -> Option<T>,
) -> Vec<T> {
    batch
        .iter()
        .map(|(_, request)| input(&request.call).expect("a batch holds calls of one kind"))
        .collect()
}

fn check_count(what: &str, found: usize, expected: usize) -> Result<(), EvalError> {
    if found == expected {
        return Ok(());
    }
    Err(EvalError::ModelContract {
        what: what.to_string(),
        found: format!("{found} values"),
        expected: expected.to_string(),
    })
}

/// Measures samples per second, and estimates the time left from the tokens left.
struct Speed {
    start: Instant,
    total: u64,
    samples: u64,
    tokens: u64,
    tokens_left: u64,
}

impl Speed {
    fn new(trials: &[Trial], done: &HashSet<u64>) -> Self {
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
