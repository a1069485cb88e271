//! Training a byte-level BPE on the user's text.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as HfTokenizer};

use super::{END_OF_TEXT, Tokenizer, TokenizerConfig};
use crate::corpus::{Decoded, Inputs, Position, ReadBytes, read};
use crate::shard::write_atomically;
use crate::{Corpus, DataError, Progress, files};

/// Bytes and end of text.
const LEAST_VOCAB: usize = 257;

/// What [`train_bpe`] reads and writes.
#[derive(Clone, Debug)]
pub struct TrainBpe {
    /// The text to learn from.
    pub corpus: Arc<dyn Corpus>,
    /// The `tokenizer.json` to write; its folder is created if it does not exist.
    pub out: PathBuf,
    /// Tokens in the vocabulary, at least 257: the bytes, end of text, and the merges.
    pub vocab_size: usize,
    /// How often a pair must occur to be merged.
    pub min_frequency: u64,
    /// Most bytes of text to read; `None` reads everything. Word counts are kept in memory.
    pub max_bytes: Option<u64>,
}

/// The result of [`train_bpe`].
#[derive(Clone, Debug)]
pub struct TrainBpeReport {
    /// The file written.
    pub out: PathBuf,
    /// Tokens in the vocabulary; fewer than requested if the text has no more pairs to merge.
    pub vocab_size: usize,
    /// Documents read.
    pub documents: u64,
    /// Bytes of text read.
    pub bytes: u64,
    /// Seconds taken.
    pub seconds: f64,
}

/// Trains a byte-level BPE with GPT-2's pre-tokenizer and writes it as a Hugging Face
/// `tokenizer.json`, atomically. `<|endoftext|>` is its only special token, id 0. The same text gives
/// the same file.
///
/// # Errors
/// When the options or the text cannot be used, or the file cannot be written.
pub fn train_bpe(options: &TrainBpe, progress: &dyn Progress) -> Result<TrainBpeReport, DataError> {
    let started = Instant::now();
    check(options)?;
    let inputs = options.corpus.find()?;
    prepare_out(&options.out).map_err(|source| DataError::write(&options.out, source))?;
    progress.start("training a tokenizer", Some(inputs.total_bytes));
    let (made, read) = train(options, &inputs, progress)?;
    if read.bytes == 0 {
        let hint = "give at least one file with text in it".into();
        return Err(DataError::EmptyCorpus { inputs: inputs.files.len() as u64, hint });
    }
    let json = made.to_string(false).map_err(|error| failed(&error.to_string()))?;
    write_atomically(&options.out, json.as_bytes())?;
    let vocab_size =
        Tokenizer::load(&TokenizerConfig::File { path: options.out.clone() })?.vocab_size();
    if vocab_size < options.vocab_size {
        tracing::warn!(
            vocab_size,
            asked = options.vocab_size,
            "the text has no more pairs to merge"
        );
    }
    progress.finish(&format!("{vocab_size} tokens in {}", options.out.display()));
    let seconds = started.elapsed().as_secs_f64();
    Ok(TrainBpeReport {
        out: options.out.clone(),
        vocab_size,
        documents: read.documents,
        bytes: read.bytes,
        seconds,
    })
}

fn check(options: &TrainBpe) -> Result<(), DataError> {
    let fail = |key, value: String, allowed: &str, hint: &str| {
        Err(DataError::Option { key, value, allowed: allowed.into(), hint: hint.into() })
    };
    if options.vocab_size < LEAST_VOCAB {
        let hint = "256 bytes and end of text are always there; a common size is 32768";
        return fail("vocab_size", options.vocab_size.to_string(), "257 or more", hint);
    }
    if options.min_frequency == 0 {
        return fail("min_frequency", "0".into(), "1 or more", "2 is the usual choice");
    }
    if options.max_bytes == Some(0) {
        return fail("max_bytes", "0".into(), "1 or more", "leave it out to read everything");
    }
    if options.out.is_dir() || options.out.as_os_str().as_encoded_bytes().ends_with(b"/") {
        let (out, file) = (options.out.display(), options.out.join("tokenizer.json"));
        let hint = format!("name a file, for example {}", file.display());
        return fail("out", format!("the folder {out}"), "a file", &hint);
    }
    Ok(())
}

/// Creates the folder of `out` and tries a file in it: training takes long.
fn prepare_out(out: &Path) -> io::Result<()> {
    if let Some(folder) = out.parent() {
        fs::create_dir_all(folder)?;
    }
    let trial = files::with_suffix(out, &format!(".{}.trial", std::process::id()));
    File::create(&trial)?;
    fs::remove_file(&trial)
}

fn failed(reason: &str) -> DataError {
    DataError::TrainTokenizer {
        reason: reason.into(),
        hint: "try with less text (max_bytes) or a smaller vocab_size".into(),
    }
}

/// How much was read.
#[derive(Default)]
struct ReadCounts {
    documents: u64,
    bytes: u64,
}

fn train(
    options: &TrainBpe,
    inputs: &Inputs,
    progress: &dyn Progress,
) -> Result<(HfTokenizer, ReadCounts), DataError> {
    let byte_level = ByteLevel::new(false, true, true);
    let mut made = HfTokenizer::new(BPE::default());
    made.with_pre_tokenizer(Some(byte_level)).with_decoder(Some(byte_level));
    let mut trainer: TrainerWrapper = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(options.vocab_size)
        .min_frequency(options.min_frequency)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build()
        .into();
    let read = std::thread::scope(|scope| {
        let (send, texts): (_, Receiver<String>) = sync_channel(64);
        let reader = scope.spawn(move || read_texts(options, inputs, progress, send));
        let trained = made.train(&mut trainer, texts.into_iter());
        let read = reader.join().map_err(|_| failed("the reader stopped"))?;
        trained.map_err(|error| failed(&error.to_string()))?;
        read
    })?;
    Ok((made, read))
}

fn read_texts(
    options: &TrainBpe,
    inputs: &Inputs,
    progress: &dyn Progress,
    send: SyncSender<String>,
) -> Result<ReadCounts, DataError> {
    let read_bytes = ReadBytes::default();
    let (mut done, mut failure) = (ReadCounts::default(), None);
    let most = options.max_bytes.unwrap_or(u64::MAX);
    read(&*options.corpus, inputs, Position::default(), &read_bytes, &mut |document, _| {
        match document.text(inputs) {
            Ok(Decoded::Document(mut text)) => {
                let room = usize::try_from(most - done.bytes).unwrap_or(usize::MAX);
                text.text.truncate(text.text.floor_char_boundary(room));
                done.documents += 1;
                done.bytes += text.text.len() as u64;
                progress.advance(read_bytes.take());
                send.send(text.text).is_ok() && done.bytes + 4 <= most
            }
            Ok(Decoded::Empty | Decoded::Binary) => true,
            Err(error) => {
                failure = Some(error);
                false
            }
        }
    })?;
    match failure {
        Some(error) => Err(error),
        None => Ok(done),
    }
}
