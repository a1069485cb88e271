//! The suites of `[[train.evaluate]]`, as the training loop calls them; those of `[[eval]]` are only checked here.

use std::path::{Path, PathBuf};

use longwall_data::Tokenizer;
use longwall_eval::memory::CallMemory;
use longwall_eval::{
    Discard, EvalError, IN_LOOP, Ranks, Report, RunContext, Silent, StopRequest, TrainedModel,
    write_index,
};
use longwall_kernels::backend::OpBackend;
use longwall_model::{LanguageModel, ModelConfig, Precision};
use longwall_train::config::{RunConfig, eval_weights};
use longwall_train::distributed::{Collective, World};
use longwall_train::evaluation::{Evaluated, EvaluationError, Evaluator};
use longwall_train::signals::StopFlag;

use crate::commands::eval::{NamedSuite, ValidationText, git_hash};
use crate::context::change_of_weights;

/// Runs suites during training. Their files go to `eval/NAME-step-N/` in the run's folder.
pub struct LoopEvaluator<'a, B: OpBackend> {
    /// The run's configuration.
    pub config: &'a RunConfig,
    /// The folder `eval` of the run.
    pub folder: PathBuf,
    /// The suites of `train.evaluate`, in its order.
    pub suites: &'a [NamedSuite],
    /// The suites of `[[eval]]`, in its order, which run after training.
    pub after: &'a [NamedSuite],
    /// Asks to stop.
    pub stop: &'a StopFlag,
    /// The type that the model runs in.
    pub precision: Precision,
    /// The device.
    pub device: B::Device,
    /// The run's tokenizer, known once it is opened.
    pub tokenizer: Option<Tokenizer>,
    /// The ranks that take the samples.
    pub collective: &'a dyn Collective<B>,
}

/// A stop request between batches. A signal must not end the process in the middle of one, as it does in
/// `longwall eval`: the loop still has to write its checkpoint.
struct StopBetweenBatches<'a>(&'a StopFlag);

impl StopRequest for StopBetweenBatches<'_> {
    fn is_raised(&self) -> bool {
        self.0.is_raised()
    }
}

fn name((suite, name): &NamedSuite) -> &str {
    name.as_deref().unwrap_or(suite.name())
}

impl<B: OpBackend> LoopEvaluator<'_, B> {
    /// The folder of an evaluation after `step`.
    fn out_dir(&self, suite: &NamedSuite, step: u64) -> PathBuf {
        self.folder.join(format!("{}{IN_LOOP}{step}", name(suite)))
    }

    /// The step in the name of a folder of one of the suites.
    fn step_of(&self, path: &Path) -> Option<u64> {
        let (name_there, step) = path.file_name()?.to_str()?.rsplit_once(IN_LOOP)?;
        self.suites.iter().find(|suite| name(suite) == name_there)?;
        step.parse().ok()
    }

    /// Calls `work` with the model, which has the settings `of_model`, and the context of an evaluation after `step`:
    /// a suite, and its table in the configuration.
    fn with_context<T>(
        &self,
        (suite, table): (&NamedSuite, &toml::Table),
        step: u64,
        (model, of_model): (&LanguageModel<B>, ModelConfig),
        work: impl FnOnce(TrainedModel<B>, RunContext<'_>) -> T,
    ) -> T {
        let config = self.config;
        let tokenizer = self.tokenizer.as_ref().expect("the trainer checks before it evaluates");
        let memory = CallMemory::new(&of_model, self.precision);
        let weights = eval_weights(table);
        let (seq_len, device) = (config.data.seq_len, self.device.clone());
        let model = TrainedModel::new(model.clone(), tokenizer.clone(), seq_len, memory, device);
        let held_out = ValidationText { config, tokenizer, stop: self.stop };
        let stop = StopBetweenBatches(self.stop);
        let World { rank, size } = self.collective.world();
        let exchange = |message| self.collective.all_gather(message).map_err(Into::into);
        let context = RunContext {
            out_dir: self.out_dir(suite, step),
            run: config.run.name.clone(),
            checkpoint_step: Some(step),
            model_changes: change_of_weights(weights).into_iter().collect(),
            git_hash: git_hash(),
            // Samples of this step that were taken before the options changed.
            discard: Discard::Outdated,
            held_out: Some(&held_out),
            progress: &Silent,
            stop: Some(&stop),
            ranks: Ranks { rank, size, exchange: &exchange },
        };
        work(model, context)
    }

    /// Checks that the evaluations of the list `key`, each a suite and its table, can run on a model with the settings
    /// `of_model`. Writes nothing into the run's folder, so it does not matter after which step. Too little memory counts
    /// `beside_training` alone.
    fn check_list<'t>(
        &self,
        key: &str,
        evaluations: impl Iterator<Item = (&'t NamedSuite, &'t toml::Table)>,
        (model, of_model): (&LanguageModel<B>, &ModelConfig),
        beside_training: bool,
    ) -> Result<(), EvaluationError> {
        for (at, evaluation) in evaluations.enumerate() {
            let model = (model, of_model.clone());
            let checked = self.with_context(evaluation, 0, model, |model, context| {
                longwall_eval::check(&evaluation.0.0, &model, &context)
            });
            match checked {
                Err(EvalError::OutOfMemory { .. }) if !beside_training => {}
                checked => checked.map_err(|error| format!("{key}.{at}: {error}"))?,
            }
        }
        Ok(())
    }
}

impl<B: OpBackend> Evaluator<B> for LoopEvaluator<'_, B> {
    fn check(
        &mut self,
        tokenizer: &Tokenizer,
        model: &LanguageModel<B>,
    ) -> Result<(), EvaluationError> {
        self.tokenizer = Some(tokenizer.clone());
        let config = self.config;
        let tables = config.train.evaluate.iter().map(|table| &table.eval);
        let model_of_loop = (model, &config.widest_model());
        self.check_list("train.evaluate", self.suites.iter().zip(tables), model_of_loop, true)?;
        // They run on the last checkpoint, when the memory of training is free.
        let last_model = (model, &config.model_after(config.timeline().total_steps()));
        self.check_list("eval", self.after.iter().zip(&config.eval), last_model, false)
    }

    fn discard_after(&mut self, step: u64) -> Result<(), EvaluationError> {
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(cannot("read", &self.folder, &error)),
        };
        let mut discarded = false;
        for entry in entries {
            let path = entry.map_err(|error| cannot("read", &self.folder, &error))?.path();
            if self.step_of(&path).is_some_and(|of| of > step) {
                tracing::info!("{} is discarded: the run goes on from step {step}", path.display());
                std::fs::remove_dir_all(&path).map_err(|error| cannot("remove", &path, &error))?;
                discarded = true;
            }
        }
        if discarded {
            write_index(&self.folder)?;
        }
        Ok(())
    }

    fn evaluate(
        &mut self,
        at: usize,
        step: u64,
        model: &LanguageModel<B>,
    ) -> Result<Option<Evaluated>, EvaluationError> {
        let suite = &self.suites[at];
        let there = self.out_dir(suite, step).join("results.json").is_file();
        let model = (model, self.config.model_after(step));
        let evaluation = (suite, &self.config.train.evaluate[at].eval);
        let report = self.with_context(evaluation, step, model, |mut model, context| {
            if context.ranks.of_first(there)? {
                return Ok(None);
            }
            longwall_eval::run_on_rank(&suite.0, &mut model, &context)
        });
        match report {
            Err(EvalError::Stopped { .. } | EvalError::StoppedEarly { .. }) => Ok(None),
            // Rank 0 names the rank that failed.
            Err(EvalError::Rank { .. }) if !self.collective.world().is_first() => Ok(None),
            report => {
                let Some(report) = report? else { return Ok(None) };
                write_index(&self.folder)?;
                Ok(Some(evaluated(name(suite), &report)))
            }
        }
    }
}

fn evaluated(name: &str, report: &Report) -> Evaluated {
    let scores = report.headline.iter().map(|(score, x)| (score.clone(), x.unwrap_or(f64::NAN)));
    Evaluated { name: name.to_owned(), scores: scores.collect() }
}

fn cannot(action: &str, path: &Path, error: &std::io::Error) -> EvaluationError {
    let hint = "check the permissions of the run's folder";
    format!("train.evaluate: cannot {action} {}: {error}\n  hint: {hint}", path.display()).into()
}
