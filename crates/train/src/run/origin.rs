//! A run that starts from the weights of another: `longwall train --from`.

use std::path::Path;

use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;
use longwall_model::start::{ModelSpec, StartReport, start_from};

use crate::checkpoint::{Checkpoint, WeightsSelector};
use crate::config::RunConfig;
use crate::error::TrainError;
use crate::run_folder::{self, Origin};

/// The weights that a new run starts from.
#[derive(Clone, Debug)]
pub struct Source {
    /// The checkpoint that has them.
    pub checkpoint: Checkpoint,
    /// Which of its weights.
    pub weights: WeightsSelector,
}

impl Source {
    /// The weights of a checkpoint's folder, or of the newest checkpoint of a run's folder.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn open(path: &Path, weights: WeightsSelector) -> Result<Self, TrainError> {
        Ok(Source { checkpoint: Checkpoint::at(path)?, weights })
    }

    /// The source of a run without a checkpoint: `from` for a new one, else what the run in the folder `resumed`
    /// records.
    pub(super) fn of(
        config: &RunConfig,
        from: Option<&Self>,
        resumed: Option<&Path>,
    ) -> Result<Option<Self>, TrainError> {
        match (from, resumed) {
            (_, Some(run_dir)) => Self::recorded(run_dir),
            (Some(source), None) => {
                source.check_elsewhere(config)?;
                Ok(Some(source.clone()))
            }
            (None, None) => Ok(None),
        }
    }

    /// The source of the run in `run_dir`, which has no checkpoint of its own yet; `None` if it starts with initial
    /// weights.
    ///
    /// # Errors
    /// When the source is no longer there, or was trained further.
    fn recorded(run_dir: &Path) -> Result<Option<Self>, TrainError> {
        let Some(origin) = run_folder::origin(run_dir)? else { return Ok(None) };
        let source = Self::open(&origin.checkpoint, origin.weights)?;
        if source.crc32c() != origin.crc32c {
            return Err(TrainError::OtherSource { path: origin.checkpoint });
        }
        Ok(Some(source))
    }

    fn crc32c(&self) -> Option<u32> {
        self.checkpoint.crc32c(self.weights)
    }

    /// Refuses a run whose own folder holds the source: it would be deleted.
    fn check_elsewhere(&self, config: &RunConfig) -> Result<(), TrainError> {
        let real = |path: &Path| path.canonicalize().ok();
        let (run, new) = (self.checkpoint.run_dir(), config.run_dir());
        match real(&new).is_some_and(|new| Some(new) == run.and_then(|run| real(&run))) {
            true => Err(TrainError::FromItself { run_dir: new }),
            false => Ok(()),
        }
    }

    /// `model`, which has initial weights, with those of the source; and what became of them.
    pub(super) fn load<B: OpBackend>(
        &self,
        model: LanguageModel<B>,
        config: &RunConfig,
        tokenizer: &Tokenizer,
    ) -> Result<(LanguageModel<B>, Origin), TrainError> {
        // With the windows of the first step here, and of the last one there.
        let config = &RunConfig { model: config.model_after(0), ..config.clone() };
        let theirs = &self.checkpoint.trained_config();
        let vocab_size = tokenizer.vocab_size();
        let [spec, source] = [config, theirs].map(|config| ModelSpec {
            config: &config.model,
            vocab_size,
            seq_len: config.data.seq_len,
        });
        let path = self.checkpoint.selected(self.weights)?;
        let (model, report) = start_from(model, &spec, &source, &path)?;
        self.log(theirs, config, &report);
        Ok((model, self.origin(report)))
    }

    /// Says what was taken over, and what differs.
    fn log(&self, theirs: &RunConfig, config: &RunConfig, report: &StartReport) {
        let path = self.checkpoint.path.display();
        tracing::info!("starting from {path}: {} tensors taken over", report.taken);
        for (what, names) in [("new", &report.new), ("left out", &report.left_out)] {
            if !names.is_empty() {
                tracing::info!("{what}: {}", names.join(", "));
            }
        }
        for change in theirs.differences(config) {
            if change.key.starts_with("model.") {
                let (was, is) = (change.ours, change.theirs);
                tracing::info!("{} was {was} in the source, and is {is} here", change.key);
            }
        }
        for change in &report.changed {
            tracing::warn!("{change}: at the start these layers compute another function");
        }
    }

    fn origin(&self, report: StartReport) -> Origin {
        let StartReport { taken, new, left_out, changed } = report;
        let path = &self.checkpoint.path;
        Origin {
            run: self.checkpoint.config.run.name.clone(),
            checkpoint: path.canonicalize().unwrap_or_else(|_| path.clone()),
            step: self.checkpoint.state.step,
            tokens: self.checkpoint.state.tokens,
            weights: self.weights,
            crc32c: self.crc32c(),
            taken,
            new,
            left_out,
            changed,
        }
    }
}
