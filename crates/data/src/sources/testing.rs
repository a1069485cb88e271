//! Helpers shared by the tests of several kinds.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::{OpenContext, RowGenerator, SourceConfig, SourceData};
use crate::corpus::{Corpus, Decoded, Position, ReadBytes, read};
use crate::shard::{SplitWriter, Width};
use crate::{DataConfig, DataError, Loader, NoProgress, Rows, Split, Tokenizer, TokenizerConfig};

/// End of text in the tokenizer of the tests.
pub(crate) const END: u32 = 256;

/// A source for the tests that every kind gets.
pub(crate) trait Example: Into<SourceConfig> {
    /// Tokens in the rows of the tests.
    const SEQ_LEN: usize = 300;

    /// A source for rows of [`SEQ_LEN`](Self::SEQ_LEN) byte tokens; if it reads text, it writes some into `folder`.
    fn example(folder: &Path) -> Self;

    /// The contents that decide whether an example, of which these are the tokens without the end of text, is for
    /// training or for tests. A source of text has none: its documents are divided.
    fn held_out(_example: &[u32]) -> Vec<Vec<u8>> {
        vec![]
    }
}

/// The examples in the first rows of a source that generates them: their tokens without the end of text, and those
/// of them that count for the loss.
pub(crate) fn examples_of(
    source: &SourceConfig,
    seq_len: usize,
    split: Split,
) -> Vec<(Vec<u32>, Vec<u32>)> {
    let rows = generator(source, seq_len, 1, split).unwrap();
    let mut found = vec![];
    for index in 0..30 {
        let (tokens, _, weights) = labelled_row(&*rows, index, seq_len);
        let tokens: Vec<u32> = tokens.into_iter().map(|token| token as u32).collect();
        let mut start = 0;
        for end in (0..tokens.len()).filter(|&at| tokens[at] == END) {
            let counts = |at: &usize| *at > 0 && weights[at - 1] == 1.0;
            let counted = (start..end).filter(counts).map(|at| tokens[at]).collect();
            if end > start {
                found.push((tokens[start..end].to_vec(), counted));
            }
            start = end + 1;
        }
    }
    found
}

/// Examples of the training split, as text, and what of each counts for the loss.
pub(crate) fn answers_of(source: &SourceConfig, seq_len: usize) -> Vec<(String, String)> {
    let text = |tokens: &[u32]| tokenizer().decode(tokens);
    let examples = examples_of(source, seq_len, Split::Train);
    examples.iter().map(|(example, counted)| (text(example), text(counted))).collect()
}

pub(crate) fn tokenizer() -> Tokenizer {
    Tokenizer::load(&TokenizerConfig::Bytes).unwrap()
}

pub(crate) fn config(dir: &TempDir, seq_len: usize, sources: Vec<SourceConfig>) -> DataConfig {
    DataConfig {
        seq_len,
        rows: Rows::Packed,
        document_mask: true,
        validation_fraction: 0.1,
        validation_tokens: 8 * seq_len as u64,
        cache_dir: dir.path().join("cache"),
        sources,
    }
}

pub(crate) fn open(config: &DataConfig, seed: u64, split: Split) -> Result<Loader, DataError> {
    Loader::open(config, &tokenizer(), seed, split, &NoProgress)
}

/// The message of the error of [`open`].
pub(crate) fn message(dir: &TempDir, config: &DataConfig, split: Split) -> String {
    without_folder(dir, &open(config, 0, split).unwrap_err())
}

/// An error's message with `DIR` for the folder.
pub(crate) fn without_folder(dir: &TempDir, error: &DataError) -> String {
    error.to_string().replace(&dir.path().display().to_string(), "DIR")
}

/// Writes a file into a folder, and creates its parent folders.
pub(crate) fn put(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, content).unwrap();
    path
}

/// Writes one shard of `tokens`.
pub(crate) fn shard(folder: &Path, stem: &str, tokens: &[u32]) -> PathBuf {
    let mut writer = SplitWriter::new(folder, stem.into(), 1, Width::U16, 1 << 30);
    writer.push(tokens).unwrap();
    folder.join(&writer.finish().unwrap()[0].file)
}

/// Documents of `lengths` tokens, end of text included; every document repeats its own token.
pub(crate) fn documents(lengths: &[usize]) -> Vec<u32> {
    let document = |(n, &length): (usize, &usize)| {
        let mut tokens = vec![n as u32 % 256; length];
        tokens[length - 1] = END;
        tokens
    };
    lengths.iter().enumerate().flat_map(document).collect()
}

/// The rows of a source that generates them.
pub(crate) fn generator(
    source: &SourceConfig,
    seq_len: usize,
    seed: u64,
    split: Split,
) -> Result<Box<dyn RowGenerator>, DataError> {
    let dir = tempfile::tempdir().unwrap();
    let (data, tokenizer) = (config(&dir, seq_len, vec![]), tokenizer());
    let context = OpenContext {
        kind: source.kind(),
        data: &data,
        tokenizer: &tokenizer,
        split,
        seed,
        progress: &NoProgress,
    };
    match source.source().open(&context)? {
        SourceData::Generated { rows, .. } => Ok(rows),
        SourceData::Stream(_) => panic!("{source:?} generates nothing"),
    }
}

/// Row `index`: its tokens, and the weights of its targets, which are the next tokens.
pub(crate) fn row(rows: &dyn RowGenerator, index: u64, seq_len: usize) -> (Vec<i32>, Vec<f32>) {
    let (tokens, targets, weights) = labelled_row(rows, index, seq_len);
    assert_eq!(targets, tokens[1..]);
    (tokens, weights)
}

/// Row `index`: its tokens, its targets and their weights.
pub(crate) fn labelled_row(
    rows: &dyn RowGenerator,
    index: u64,
    seq_len: usize,
) -> (Vec<i32>, Vec<i32>, Vec<f32>) {
    let (mut tokens, mut targets) = (vec![-1; seq_len + 1], vec![-1; seq_len]);
    let mut weights = vec![-1.0; seq_len];
    rows.fill(index, &mut tokens, &mut targets, &mut weights);
    (tokens, targets, weights)
}

/// The texts of a corpus from `start` on, each with the position after it; `-` for an empty
/// document, `#` for a binary file.
pub(crate) fn texts_from(
    corpus: &dyn Corpus,
    start: Position,
) -> Result<Vec<(String, Position)>, DataError> {
    let inputs = corpus.find()?;
    let mut texts = Vec::new();
    let mut failure = Ok(());
    read(corpus, &inputs, start, &ReadBytes::default(), &mut |document, next| {
        match document.text(&inputs) {
            Ok(Decoded::Document(text)) => texts.push((text.text, next)),
            Ok(Decoded::Empty) => texts.push(("-".into(), next)),
            Ok(Decoded::Binary) => texts.push(("#".into(), next)),
            Err(error) => failure = Err(error),
        }
        failure.is_ok()
    })?;
    failure.map(|()| texts)
}

/// All texts of a corpus.
pub(crate) fn texts(corpus: &dyn Corpus) -> Result<Vec<String>, DataError> {
    Ok(texts_from(corpus, Position::default())?.into_iter().map(|(text, _)| text).collect())
}

/// The message of the error of [`texts`].
pub(crate) fn texts_message(dir: &TempDir, corpus: &dyn Corpus) -> String {
    without_folder(dir, &texts(corpus).unwrap_err())
}

/// The warnings and info lines that `work` logs on this thread.
pub(crate) fn logged(work: impl FnOnce()) -> Vec<String> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    tracing::subscriber::with_default(Lines(lines.clone()), work);
    let lines = lines.lock().unwrap();
    lines.clone()
}

struct Lines(Arc<Mutex<Vec<String>>>);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = event.metadata().level().to_string();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            if field.name() == "message" {
                line += &format!(" {value:?}");
            }
        });
        self.0.lock().unwrap().push(line);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
