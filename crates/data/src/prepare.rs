//! Encodes text into token shards: in parallel, in bounded memory, with the same result for any number
//! of threads, and resumable after an interruption.

mod holdout;
mod journal;
mod options;
mod pipeline;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use sha2::{Digest, Sha256};

use crate::corpus::Inputs;
use crate::shard::Manifest;
use crate::tokenizer::hex;
use crate::{DataError, Progress, Tokenizer};
use journal::{Journal, State};

pub use options::{PrepareOptions, PrepareReport, PrepareStart};

/// Encodes a corpus into token shards, with a manifest beside them.
///
/// The shards are a function of the corpus, the tokenizer and the options; they do not depend on the
/// number of threads or on interruptions. A run that was stopped, even killed, continues when it is
/// started again, and a complete folder is left unchanged. Memory is bounded by the largest document
/// and a few batches. Bytes that are not UTF-8 become U+FFFD; affected documents are counted.
///
/// # Errors
/// When the input is missing, empty or malformed, when the folder cannot be written or holds
/// something else, or when `progress` reports that the user cancelled.
pub fn prepare(
    options: &PrepareOptions,
    tokenizer: &Tokenizer,
    progress: &dyn Progress,
) -> Result<PrepareReport, DataError> {
    options.check()?;
    let inputs = options.corpus.find()?;
    let key = key(options, tokenizer, Some(&inputs));
    let report = prepare_inputs(options, tokenizer, &inputs, &key, progress)?;
    let documents = report.manifest.documents;
    if report.manifest.validation.tokens == 0 && options.validation_fraction > 0.0 {
        tracing::warn!(
            "no text is held out for validation: none of {documents} documents has a hash below the validation fraction of {}; give more documents, or a greater fraction",
            options.validation_fraction
        );
    }
    Ok(report)
}

/// Prepares into a folder of `cache` whose name is derived from everything that determines the
/// content. Once a corpus that is frozen in the cache is there, its input files are not read again.
pub(crate) fn prepare_cached(
    mut options: PrepareOptions,
    cache: &Path,
    tokenizer: &Tokenizer,
    progress: &dyn Progress,
) -> Result<(PathBuf, Manifest), DataError> {
    options.check()?;
    let frozen = options.corpus.is_frozen_in_cache();
    let inputs = if frozen { None } else { Some(options.corpus.find()?) };
    let key = key(&options, tokenizer, inputs.as_ref());
    options.out = cache.join(format!("{}-{}", options.name, &key[..16]));
    if let Some(manifest) = Manifest::read(&options.out)? {
        tracing::info!(folder = %options.out.display(), tokens = manifest.tokens, "using prepared shards");
        return Ok((options.out, manifest));
    }
    let inputs = inputs.map_or_else(|| options.corpus.find(), Ok)?;
    let report = prepare_inputs(&options, tokenizer, &inputs, &key, progress)?;
    Ok((report.out, report.manifest))
}

fn prepare_inputs(
    options: &PrepareOptions,
    tokenizer: &Tokenizer,
    inputs: &Inputs,
    key: &str,
    progress: &dyn Progress,
) -> Result<PrepareReport, DataError> {
    let started = Instant::now();
    let made_folder = !options.out.exists();
    let lock = Lock::take(&options.out)?;
    let journal = Journal::new(&options.out);
    if let Some(manifest) = Manifest::read(&options.out)? {
        if manifest.key != key {
            return Err(in_use(&options.out, "holds shards of other text, options or tokenizer"));
        }
        // A run killed after it wrote the manifest leaves its journal.
        journal.remove()?;
        lock.release();
        return Ok(report(options, manifest, PrepareStart::Complete, 0, started));
    }
    let listing = listing(inputs);
    let saved = journal.load(key)?.filter(|saved| {
        let same = saved.listing == listing;
        if !same {
            tracing::warn!(folder = %options.out.display(), "the files to read have changed since the interrupted run; starting over");
            discard(options, &journal);
        }
        same
    });
    if saved.is_none() && holds_shards(&options.out) {
        return Err(in_use(&options.out, "holds shards without a manifest, made elsewhere"));
    }
    let start = if saved.is_some() { PrepareStart::Resumed } else { PrepareStart::Fresh };
    let state = saved.unwrap_or_else(|| State::new(key, &listing));
    journal.save(&state)?;
    let before = state.bytes();

    progress.start(&format!("preparing {}", options.name), Some(inputs.total_bytes));
    let done = pipeline::run(options, tokenizer, inputs, state, &journal, progress)
        .and_then(|state| complete(state, options, tokenizer, inputs));
    match done {
        Ok(manifest) => {
            if options.holds_out_tail(inputs) && manifest.validation.tokens > 0 {
                let (held_out, all) = (manifest.validation.tokens, manifest.tokens);
                tracing::info!(
                    "the corpus is one text file: its last {held_out} of {all} tokens ({:.2} %) are held out for validation",
                    100.0 * held_out as f64 / all as f64
                );
            }
            journal.remove()?;
            lock.release();
            progress
                .finish(&format!("{} documents, {} tokens", manifest.documents, manifest.tokens));
            let encoded_bytes = manifest.bytes - before;
            Ok(report(options, manifest, start, encoded_bytes, started))
        }
        // A later run can continue from what was written.
        Err(
            error @ (DataError::Write { .. }
            | DataError::Read { .. }
            | DataError::Interrupted { .. }),
        ) => Err(error),
        // The input must be changed, so nothing written so far can be used.
        Err(error) => {
            discard(options, &journal);
            lock.release();
            if made_folder && let Err(error) = std::fs::remove_dir(&options.out) {
                tracing::debug!(%error, folder = %options.out.display(), "the folder stays behind");
            }
            Err(error)
        }
    }
}

fn complete(
    state: State,
    options: &PrepareOptions,
    tokenizer: &Tokenizer,
    inputs: &Inputs,
) -> Result<Manifest, DataError> {
    let manifest = state.into_manifest(options, tokenizer, inputs);
    if manifest.tokens == 0 {
        let hint = "give at least one file with text in it".into();
        return Err(DataError::EmptyCorpus { inputs: manifest.inputs, hint });
    }
    manifest.write(&options.out)?;
    Ok(manifest)
}

fn report(
    options: &PrepareOptions,
    manifest: Manifest,
    start: PrepareStart,
    encoded_bytes: u64,
    started: Instant,
) -> PrepareReport {
    let seconds = started.elapsed().as_secs_f64();
    PrepareReport { out: options.out.clone(), manifest, start, encoded_bytes, seconds }
}

/// Removes the shards of a failed run; the folder had none before.
fn discard(options: &PrepareOptions, journal: &Journal) {
    let stems = [format!("{}_train_", options.name), format!("{}_val_", options.name)];
    let entries = std::fs::read_dir(&options.out).into_iter().flatten().flatten();
    let ours = entries.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.strip_prefix('.').unwrap_or(&name);
        stems.iter().any(|stem| name.starts_with(stem))
            && (name.ends_with(".bin") || name.ends_with(".partial"))
    });
    let left = ours.filter(|path| std::fs::remove_file(path).is_err()).count();
    if journal.remove().is_err() || left > 0 {
        tracing::warn!(folder = %options.out.display(), "could not remove everything that the failed run had written");
    }
}

fn in_use(out: &Path, reason: &str) -> DataError {
    DataError::OutputInUse {
        path: out.to_path_buf(),
        reason: reason.into(),
        hint: "choose another folder, or delete this one".into(),
    }
}

fn holds_shards(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .into_iter()
        .any(|entry| entry.path().extension().is_some_and(|extension| extension == "bin"))
}

/// SHA-256 of everything that determines the shards: options, tokenizer, and, unless the corpus is
/// frozen in the cache, the inputs' paths, sizes and modification times. With another key, nothing is
/// reused.
fn key(options: &PrepareOptions, tokenizer: &Tokenizer, inputs: Option<&Inputs>) -> String {
    let settings = (
        Manifest::format(),
        options.corpus.settings(),
        &options.name,
        options.validation_fraction,
        options.shard_tokens,
        tokenizer.fingerprint(),
    );
    let mut sha = Sha256::new_with_prefix(format!("{settings:?}"));
    if let Some(inputs) = inputs.filter(|_| !options.corpus.is_frozen_in_cache()) {
        sha.update(listing(inputs));
        if options.holds_out_tail(inputs) {
            sha.update("its end is held out");
        }
    }
    hex(&sha.finalize())
}

/// SHA-256 of the inputs' paths, sizes and modification times, in order.
fn listing(inputs: &Inputs) -> String {
    let mut sha = Sha256::new();
    for file in &inputs.files {
        let path = file.path.canonicalize().unwrap_or_else(|_| file.path.clone());
        sha.update(path.as_os_str().as_encoded_bytes());
        sha.update([0]);
        sha.update(file.bytes.to_le_bytes());
        sha.update(file.modified.to_le_bytes());
    }
    hex(&sha.finalize())
}

/// Locks a folder, waiting for another process that holds the lock, and creates it if it is missing. The ranks of a
/// distributed run all open the loader: one of them prepares, and the others find the result.
struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    fn take(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(".lock");
        let fail = |source| DataError::write(&path, source);
        loop {
            std::fs::create_dir_all(folder).map_err(|source| DataError::write(folder, source))?;
            let file = File::create(&path).map_err(fail)?;
            if file.try_lock().is_err() {
                tracing::info!(folder = %folder.display(), "another process prepares this folder; waiting for it");
                match file.lock() {
                    Err(error) if error.kind() == std::io::ErrorKind::Unsupported => {
                        tracing::warn!(folder = %folder.display(), "the file system has no locks; let one process prepare at a time");
                    }
                    result => result.map_err(fail)?,
                }
            }
            // The other process may have removed the file that it had locked, and a third may hold a new one.
            if is_file_at(&file, &path) {
                return Ok(Lock { path, _file: file });
            }
        }
    }

    /// Removes the lock file.
    fn release(self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, path = %self.path.display(), "the lock's file stays behind");
        }
    }
}

/// Whether `path` names the open `file`.
#[cfg(unix)]
fn is_file_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |metadata: &std::fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((&file.metadata(), &path.metadata()), (Ok(open), Ok(named)) if id(open) == id(named))
}

/// Whether `path` names the open `file`: a file that is open stays.
#[cfg(not(unix))]
fn is_file_at(_file: &File, _path: &Path) -> bool {
    true
}

#[cfg(test)]
mod tests;
