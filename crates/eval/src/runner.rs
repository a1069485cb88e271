//! Runs a suite: trials in batches, samples written as they finish, then scores, plots and report.

mod calls;
mod checks;
mod sampler;

use std::collections::HashSet;

use serde_json::{Value, json};

use longwall_config::Problems;

use self::checks::{check_lengths, check_memory, extrapolation_note};
use self::sampler::{Sampler, Speed};
use crate::files::write_atomically;
use crate::journal::{Journal, compare};
use crate::options::{SamplingOptions, SuiteOptions};
use crate::report::{Report, TokenizerReport};
use crate::suite::{Inspection, OpenContext, RunContext, Suite, Trial};
use crate::{EvalError, EvalModel};

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
                Some(Journal::open(folder, &settings(&report), git_hash, context.discard)?)
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
