//! Runs a suite: trials in batches, samples written as they finish, then scores, plots and report.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use longwall_config::Problems;
use longwall_data::Tokenizer;

use crate::files::write_atomically;
use crate::journal::{Journal, Sample};
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

/// Runs one suite from its options to its report.
pub(crate) fn run_suite<S: Suite>(
    options: &SuiteOptions<S::Options>,
    model: &mut dyn EvalModel,
    context: &RunContext<'_>,
) -> Result<Report, EvalError> {
    let (suite, trials) = open_suite::<S>(options, &*model, context)?;
    let (sampling, tokenizer) = (&options.sampling, model.tokenizer().clone());
    let mut report = blank_report(&suite, options, &*model, context);
    report.notes.extend(extrapolation_note(&trials, report.train_seq_len));
    let git_hash = context.git_hash.as_deref();
    let mut journal = Journal::open(&context.out_dir, &settings(&report), git_hash, context.force)?;
    report.git_hash = journal.git_hash().map(str::to_string);
    context.progress.start(S::NAME, journal.len(), trials.len() as u64);
    let taken = take_samples(&suite, sampling, &trials, &tokenizer, model, &mut journal, context);
    context.progress.finish();
    taken?;

    let stopped = stopped_at(&journal, trials.len() as u64);
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
    Ok(report)
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

/// Takes every sample that the journal does not hold.
///
/// The batches are those of an uninterrupted run, minus what is done, so that a resumed evaluation
/// takes its samples in the same order.
fn take_samples<S: Suite>(
    suite: &S,
    sampling: &SamplingOptions,
    trials: &[Trial],
    tokenizer: &Tokenizer,
    model: &mut dyn EvalModel,
    journal: &mut Journal,
    context: &RunContext<'_>,
) -> Result<(), EvalError> {
    let mut speed = Speed::new(trials, journal);
    for trials in trials.chunk_by(|a, b| a.length == b.length) {
        for chunk in trials.chunks(sampling.batch * BATCHES_AT_A_TIME) {
            if chunk.iter().all(|trial| journal.has(trial)) {
                continue;
            }
            let stopped = stopped_at(journal, speed.total);
            let mut requests = context.interruptible(&stopped, || {
                let request = |trial| Ok((trial, checked_request(suite, trial, tokenizer)?));
                chunk.iter().map(request).collect::<Result<Vec<_>, EvalError>>()
            })?;
            for batch in batches(&mut requests, sampling) {
                let pending: Vec<_> =
                    batch.iter().filter(|(trial, _)| !journal.has(trial)).collect();
                if pending.is_empty() {
                    continue;
                }
                let stopped = stopped_at(journal, speed.total);
                if context.stopped() {
                    return Err(stopped);
                }
                let call = || run_batch(model, tokenizer, sampling, &pending);
                let answers = context.interruptible(&stopped, call)?;
                let outputs: Vec<Option<String>> = answers.iter().map(output).collect();
                journal.append(pending.iter().zip(&answers).zip(&outputs).map(
                    |(((trial, request), answer), output)| {
                        let verdict = suite.judge(trial, request, answer);
                        let fields = suite.fields(trial, request, &verdict);
                        let score = S::sample_score(&verdict);
                        let output = output.as_deref();
                        Sample { trial, request, output, verdict, score, fields }
                    },
                ))?;
                context.progress.update(&speed.after(&pending, journal.len()));
            }
        }
    }
    Ok(())
}

/// What the model answered, as `samples.jsonl` keeps it: the text, or the predicted tokens' ids.
fn output(answer: &Answer) -> Option<String> {
    match answer {
        Answer::Text(text) => Some(text.clone()),
        Answer::Tokens(tokens) => Some(show_tokens(tokens)),
        _ => None,
    }
}

/// What an evaluation that stops here says.
fn stopped_at(journal: &Journal, total: u64) -> EvalError {
    EvalError::Stopped { done: journal.len(), total, folder: journal.folder().to_path_buf() }
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

/// Groups requests that may share a call into batches, as large as the options allow.
fn batches<'r, 't>(
    requests: &'r mut [(&'t Trial, Request)],
    sampling: &SamplingOptions,
) -> Vec<&'r [(&'t Trial, Request)]> {
    requests.sort_by_key(|(trial, request)| (request.call.batch_key(), trial.id));
    let mut batches = Vec::new();
    for group in requests.chunk_by(|a, b| a.1.call.batch_key() == b.1.call.batch_key()) {
        let calls = || group.iter().map(|(_, request)| &request.call);
        let rows = rows_of(sampling, calls().map(ModelCall::context_len).max().unwrap_or(0));
        let sequences = calls().map(ModelCall::sequences).max().unwrap_or(1);
        batches.extend(group.chunks((rows / sequences).max(1)));
    }
    batches
}

/// Runs the model for a batch of calls that may share one.
fn run_batch(
    model: &mut dyn EvalModel,
    tokenizer: &Tokenizer,
    sampling: &SamplingOptions,
    batch: &[&(&Trial, Request)],
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
    batch: &[&(&Trial, Request)],
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
    batch: &'a [&(&Trial, Request)],
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
    fn new(trials: &[Trial], journal: &Journal) -> Self {
        let left = trials.iter().filter(|trial| !journal.has(trial));
        Speed {
            start: Instant::now(),
            total: trials.len() as u64,
            samples: 0,
            tokens: 0,
            tokens_left: left.map(|trial| trial.length as u64).sum(),
        }
    }

    fn after(&mut self, batch: &[&(&Trial, Request)], done: u64) -> ProgressUpdate {
        let length = batch[0].0.length;
        let tokens = (length * batch.len()) as u64;
        self.samples += batch.len() as u64;
        self.tokens += tokens;
        self.tokens_left = self.tokens_left.saturating_sub(tokens);
        let seconds = self.start.elapsed().as_secs_f64();
        let left = seconds * self.tokens_left as f64 / self.tokens as f64;
        ProgressUpdate {
            done,
            total: self.total,
            length,
            samples_per_second: (seconds > 0.0).then(|| self.samples as f64 / seconds),
            time_left: Duration::try_from_secs_f64(left).ok(),
        }
    }
}
