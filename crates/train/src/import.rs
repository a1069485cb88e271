//! A run folder made of a model in Hugging Face's format: to evaluate, to sample from, or to start runs from.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::{Cursor, DataError, Tokenizer, TokenizerConfig, files};
use longwall_model::exchange::{ExchangeError, HfFolder, ImportedModel, from_layout, layout_named};
use longwall_model::start::ModelSpec;
use longwall_model::weights::NamedTensors;
use longwall_model::{ModelConfig, weights};

use crate::checkpoint::{CheckpointError, CheckpointFolder, State, TokenizerIdentity};
use crate::config::{ConfigError, RunConfig};
use crate::guard::GuardState;
use crate::run_folder::{RunFolder, RunFolderError};

/// Why a model cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The folder cannot be read, or its model does not exist here.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// Its tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] DataError),
    /// The embedding has fewer rows than the tokenizer has tokens, or more than padding explains.
    #[error("{} has {rows} rows of embedding, and its tokenizer.json {tokens} tokens; allowed: as many, or padding up to a multiple\n  hint: take the tokenizer.json that belongs to the model", path.display())]
    Vocabulary {
        /// The folder.
        path: PathBuf,
        /// Rows of the embedding.
        rows: usize,
        /// Tokens of the tokenizer.
        tokens: usize,
    },
    /// The model's sizes are out of range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It has no tokenizer.
    #[error("{} is missing\n  hint: put the tokenizer.json there that belongs to the model", path.display())]
    NoTokenizer {
        /// The file.
        path: PathBuf,
    },
    /// The run's folder exists.
    #[error("{} exists already\n  hint: choose another --out", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The run's folder cannot be written.
    #[error("cannot write {}: {source}\n  hint: check its permissions and the room on the disk, or choose another --out", path.display())]
    Write {
        /// The folder or file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The run's folder cannot be used for another reason.
    #[error(transparent)]
    Folder(RunFolderError),
    /// The checkpoint cannot be written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl From<RunFolderError> for ImportError {
    fn from(error: RunFolderError) -> Self {
        match error {
            RunFolderError::Exists { path } => ImportError::Exists { path },
            RunFolderError::Io { path, source } => ImportError::Write { path, source },
            other => ImportError::Folder(other),
        }
    }
}

/// Reads the model in the folder `hf` and writes it as the run folder `out`, with one checkpoint, of step 0.
///
/// The run's `[data]` and `[train]` stand in for what is not known; it cannot be resumed.
///
/// # Errors
/// When the folder cannot be read, or its model cannot be expressed here; nothing is written then.
pub fn import_hugging_face(hf: &Path, out: &Path) -> Result<RunConfig, ImportError> {
    let folder = HfFolder::open(hf)?;
    let layout = layout_named(&folder.config, &folder.config_path())?;
    let mut problems = Problems::new();
    let imported = layout.model(&folder.config, &mut problems);
    let unsupported =
        |problems| ExchangeError::Unsupported { path: folder.config_path(), problems };
    problems.into_result().map_err(unsupported)?;
    let ImportedModel { model, vocab_rows, seq_len } = imported.expect("no problem was recorded");
    let source = hf.join(TOKENIZER);
    if !source.is_file() {
        return Err(ImportError::NoTokenizer { path: source });
    }
    let tokenizer = Tokenizer::load(&TokenizerConfig::File { path: source.clone() })?;
    let tokens = tokenizer.vocab_size();
    let model = padded(model, vocab_rows, tokens).ok_or_else(|| ImportError::Vocabulary {
        path: hf.to_owned(),
        rows: vocab_rows,
        tokens,
    })?;
    let config = run_config(&model, seq_len, out)?;
    let spec = ModelSpec { config: &config.model, vocab_size: tokens, seq_len };
    let tensors = from_layout(layout, &spec, folder.tensors()?)
        .map_err(|tensors| ExchangeError::Tensors { path: hf.to_owned(), tensors })?;
    let shapes = weights::parameter_shapes(&config.model, tokens, seq_len);
    let mut tensors = tensors;
    let named: NamedTensors = shapes
        .into_iter()
        .map(|(name, shape)| {
            let (_, data) = tensors.remove(&name).expect("the layout has every weight");
            (name, shape, data)
        })
        .collect();
    let state = state(&config, &tokenizer);
    let run = RunFolder::create(out, false)?;
    write(&run, &config, &source, &named, &state).inspect_err(|_| {
        let _ = fs::remove_dir_all(out);
    })?;
    Ok(config)
}

const TOKENIZER: &str = "tokenizer.json";

/// The model with a `vocab_multiple` that gives `rows` rows for `tokens` tokens, if there is one.
fn padded(model: ModelConfig, rows: usize, tokens: usize) -> Option<ModelConfig> {
    let with = |vocab_multiple| ModelConfig { vocab_multiple, ..model.clone() };
    let multiples = [64, 128, 256, 8, 2, rows].map(Some).into_iter();
    std::iter::once(None)
        .chain(multiples)
        .map(with)
        .find(|model| model.padded_vocab(tokens) == rows)
}

/// The run's configuration. `[data]` and `[train]` are the least that is valid.
fn run_config(model: &ModelConfig, seq_len: usize, out: &Path) -> Result<RunConfig, ConfigError> {
    let name = out.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let out_dir = out.parent().filter(|parent| !parent.as_os_str().is_empty());
    let out_dir = out_dir.unwrap_or(Path::new(".")).display().to_string();
    let text = |value: String| toml::Value::String(value).to_string();
    let mut table = toml::Table::new();
    table.insert("model".to_owned(), toml::Value::try_from(model).expect("a model is a table"));
    let source = format!(
        "[run]\nname = {}\nout_dir = {}\n\
         [data]\nseq_len = {seq_len}\nvalidation_tokens = {seq_len}\nsources = [{{ kind = \"passkey\" }}]\n\
         [tokenizer]\nkind = \"file\"\npath = {}\n\
         [train]\ntokens = {seq_len}\nbatch_tokens = {seq_len}\nlr = 1e-3\n\
         schedule = {{ kind = \"constant\", warmup = 0 }}\nvalidate = {{ every = \"never\" }}\n{table}",
        text(name),
        text(out_dir),
        text(out.join(TOKENIZER).display().to_string()),
    );
    RunConfig::parse(&source, &out.join("config.toml"), &[])
}

fn state(config: &RunConfig, tokenizer: &Tokenizer) -> State {
    State {
        step: 0,
        tokens: 0,
        updates: 0,
        seed: config.run.seed,
        cursor: Cursor {
            next_row: 0,
            seed: config.run.seed,
            seq_len: config.data.seq_len,
            rows: config.data.rows,
            tokenizer: tokenizer.fingerprint(),
            sources: vec![],
        },
        guard: GuardState::default(),
        loss: None,
        best: None,
        validation: None,
        metrics_bytes: 0,
        samples_bytes: 0,
        seconds: 0.0,
        micro_batch: 1,
        micro_batches: vec![],
        noise: Default::default(),
        tokenizer: TokenizerIdentity::of(tokenizer),
        model: config.model.clone(),
    }
}

/// Writes the run's files, its configuration last.
fn write(
    run: &RunFolder,
    config: &RunConfig,
    tokenizer: &Path,
    weights: &NamedTensors,
    state: &State,
) -> Result<(), ImportError> {
    let io = |source| RunFolderError::Io { path: run.path().to_owned(), source };
    let json = fs::read(tokenizer).map_err(io)?;
    files::write_atomically(&run.path().join(TOKENIZER), &json).map_err(io)?;
    fs::write(run.metrics(), "").map_err(io)?;
    CheckpointFolder::new(run.path()).write_weights(weights, config, state)?;
    Ok(run.start(config)?)
}

#[cfg(test)]
mod tests;
