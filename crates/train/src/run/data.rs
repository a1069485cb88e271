//! The data of a run, and the tokenizer they are encoded with.

use std::collections::BTreeSet;

use burn::backend::Autodiff;
use longwall_data::{Loader, Rows, Split, Tokenizer, verify_shards};
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;

use super::{RunStart, Source, TrainOptions};
use crate::carried::Carried;
use crate::checkpoint::{Checkpoint, TokenizerIdentity};
use crate::config::RunConfig;
use crate::distributed::World;
use crate::error::TrainError;
use crate::run_folder::load_tokenizer;
use crate::timeline::OpenStage;
use crate::validation::Validator;

/// The data, and the tokenizer it was encoded with.
pub(super) struct Data {
    pub tokenizer: Tokenizer,
    pub loader: Loader,
    pub validator: Option<Validator>,
}

/// Opens the tokenizer, and checks that it and the configuration match the checkpoint.
pub(super) fn open_tokenizer(
    config: &RunConfig,
    checkpoint: Option<&Checkpoint>,
    source: Option<&Source>,
    options: &TrainOptions,
) -> Result<Tokenizer, TrainError> {
    let tokenizer = match &options.start {
        RunStart::Resume(run_dir) => load_tokenizer(run_dir, &config.tokenizer)?,
        RunStart::New | RunStart::Force => Tokenizer::load(&config.tokenizer)?,
    };
    if let Some(checkpoint) = checkpoint {
        checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
        checkpoint.check_config(config)?;
    }
    if let Some(source) = source {
        source.checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
    }
    Ok(tokenizer)
}

/// Opens the loaders, and checks that they match the checkpoint.
pub(super) fn open_data(
    config: &RunConfig,
    tokenizer: Tokenizer,
    checkpoint: Option<&Checkpoint>,
    stages: &[OpenStage],
    options: &TrainOptions,
    world: World,
) -> Result<Data, TrainError> {
    let (seed, progress) = (config.run.seed, options.progress);
    let open = |split| Loader::open(&config.data, &tokenizer, seed, split, progress);
    let loader = open(Split::Train)?;
    if options.verify && world.is_first() {
        for folder in loader.prepared_folders() {
            let report = verify_shards(&folder, progress)?.into_result()?;
            tracing::info!(
                "{} shards in {} are as they were written",
                report.shards.len(),
                folder.display()
            );
        }
    }
    if world.is_first() {
        warn_of_cut_examples(&loader, stages);
    }
    if let Some(checkpoint) = checkpoint {
        loader.check_cursor(&checkpoint.state.cursor)?;
    }
    let validator = match config.train.validate.every.is_on() {
        true => {
            let rows = validation_rows(stages, config.data.seq_len);
            Some(Validator::new(open(Split::Validation)?, &tokenizer, rows))
        }
        false => None,
    };
    Ok(Data { tokenizer, loader, validator })
}

/// What this rank's rows of the next step go on from, if they are rows of streams: those of a valid configuration are as
/// many in all stages.
pub(super) fn open_carried<B: OpBackend>(
    loader: &Loader,
    checkpoint: Option<&Checkpoint>,
    stages: &[OpenStage],
    model: &LanguageModel<Autodiff<B>>,
    world: World,
    device: &B::Device,
) -> Result<Option<Carried<B>>, TrainError> {
    if loader.rows() != Rows::Streams {
        return Ok(None);
    }
    let rows = stages[0].stage.rows();
    loader.check_streams(rows)?;
    let path = checkpoint.map(Checkpoint::carried).transpose()?.flatten();
    Ok(Some(match path {
        Some(path) => Carried::load(&path, model, rows, world, device)?,
        None => Carried::nothing(model, world.part(rows).len(), device),
    }))
}

/// Warns of stages with rows that are shorter than generated examples: those lose their ends, where often all their
/// targets are.
fn warn_of_cut_examples(loader: &Loader, stages: &[OpenStage]) {
    let lengths: BTreeSet<usize> = stages.iter().map(|open| open.stage.seq_len).collect();
    for seq_len in lengths.into_iter().filter(|&seq_len| seq_len < loader.seq_len()) {
        for (name, share) in loader.cut_examples(seq_len) {
            tracing::warn!(
                "{name}: a stage has rows of {seq_len} tokens, which keep {:.1} % of the examples' targets; what is \
                 longer is cut\n  hint: make the examples shorter (max_len, or less of what they are made of), or \
                 begin with longer rows",
                100.0 * share
            );
        }
    }
}

/// Rows of `seq_len` tokens that are validated at a time: as many tokens as a rank has of the largest micro-batch.
fn validation_rows(stages: &[OpenStage], seq_len: usize) -> usize {
    let rows = stages.iter().map(|open| open.micro_batch * open.stage.tokens_of_rank() / seq_len);
    rows.max().unwrap_or_default().max(1)
}
