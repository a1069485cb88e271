//! The model and the optimiser that a run opens with.

use burn::backend::Autodiff;
use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_model::weights::{self, EarlierNames};
use longwall_model::{LanguageModel, Precision};

use super::Source;
use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::distributed::World;
use crate::error::TrainError;
use crate::optimiser::Optimiser;
use crate::run_folder::Origin;

/// A model and its optimiser.
pub(super) struct OpenModel<B: OpBackend> {
    pub model: LanguageModel<Autodiff<B>>,
    pub optimiser: Optimiser<B>,
    /// Where the weights are from, if from another run.
    pub origin: Option<Origin>,
}

/// The model and its optimiser: initial, from the run's checkpoint, or with weights of another run.
pub(super) fn open_model<B: OpBackend>(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    (checkpoint, source): (Option<&Checkpoint>, Option<Source>),
    precision: Precision,
    world: World,
    device: &B::Device,
) -> Result<OpenModel<B>, TrainError> {
    let (vocab_size, seq_len) = (tokenizer.vocab_size(), config.data.seq_len);
    let step = checkpoint.map_or(0, |checkpoint| checkpoint.state.step);
    let (model, seed) = (config.model_after(step), config.run.seed);
    let mut model = LanguageModel::new(&model, vocab_size, seq_len, seed, device);
    let mut origin = None;
    if let Some(source) = source {
        let (loaded, from) = source.load(model, config, tokenizer)?;
        (model, origin) = (loaded, Some(from));
    }
    if let Some(checkpoint) = checkpoint {
        model = weights::load(model, &checkpoint.weights()?)?;
    }
    let mut optimiser = Optimiser::of_rank(world, &config.rules(), &model);
    if let Some(checkpoint) = checkpoint {
        optimiser.load(&checkpoint.optimizer()?, &EarlierNames::of(&model), device)?;
    }
    if config.train.ema.0.is_some() {
        // A run that turns the average on later starts it at its weights.
        let average = checkpoint.map(Checkpoint::ema).transpose()?.flatten();
        match average {
            Some(path) => optimiser.start_average(&weights::load(model.clone(), &path)?),
            None => {
                if checkpoint.is_some() {
                    tracing::info!("the average of the weights starts at those of step {step}");
                }
                optimiser.start_average(&model);
            }
        }
    }
    let model = optimiser.round(model, precision);
    Ok(OpenModel { model, optimiser, origin })
}
