//! Opening a trained model.

use std::path::{Path, PathBuf};

use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_model::{LanguageModel, weights};

use crate::checkpoint::{Checkpoint, TokenizerIdentity, Which};
use crate::config::RunConfig;
use crate::error::TrainError;

/// A checkpoint's model, with what is needed to use it.
pub struct LoadedModel<B: OpBackend> {
    /// The run's configuration.
    pub config: RunConfig,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The model.
    pub model: LanguageModel<B>,
    /// Steps it was trained for.
    pub step: u64,
    /// The checkpoint's folder.
    pub path: PathBuf,
}

/// Loads the model of a run's checkpoint.
///
/// # Errors
/// When the checkpoint is not there or damaged, or the tokenizer that its configuration names is
/// not the one it was trained with.
pub fn load_model<B: OpBackend>(
    run_dir: &Path,
    which: Which,
    device: &B::Device,
) -> Result<LoadedModel<B>, TrainError> {
    let checkpoint = Checkpoint::open(run_dir, which)?;
    let tokenizer = Tokenizer::load(&checkpoint.config.tokenizer)?;
    checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
    let config = &checkpoint.config;
    let model = LanguageModel::new(
        &config.model,
        tokenizer.vocab_size(),
        config.data.seq_len,
        config.run.seed,
        device,
    );
    let model = weights::load(model, &checkpoint.weights())?;
    let (step, path) = (checkpoint.state.step, checkpoint.path.clone());
    Ok(LoadedModel { config: checkpoint.config, tokenizer, model, step, path })
}
