//! From the configuration to open sources.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::source::{Order, Source, Windows};
use super::{Loader, Plan, SourceSummary, Split};
use crate::input::discover::expand;
use crate::mixture::{BLOCK_ROWS, Mixture, derive_key, largest_remainder};
use crate::prepare::{PrepareOptions, prepare_cached};
use crate::shard::{MANIFEST_FILE, Manifest, Shard, ShardEntry, TokenStream};
use crate::synthetic::fflm::FlipFlop;
use crate::synthetic::rows::{FlipFlopRows, PasskeyRows};
use crate::{Corpus, DataConfig, DataError, Progress, SourceConfig, Tokenizer};

/// What all sources are opened with.
struct Context<'a> {
    config: &'a DataConfig,
    tokenizer: &'a Tokenizer,
    seed: u64,
    split: Split,
    progress: &'a dyn Progress,
}

pub(super) fn open(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    seed: u64,
    split: Split,
    progress: &dyn Progress,
) -> Result<Loader, DataError> {
    let context = Context { config, tokenizer, seed, split, progress };
    let (mut sources, mut summaries, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let mut without = Vec::new();
    for at in 0..config.sources.len() {
        match context.open_source(at)? {
            Opened::Source(source, summary) => {
                sources.push(source);
                summaries.push(summary);
                weights.push(config.sources[at].weight());
            }
            Opened::TooShort { name, tokens } => {
                without.push(format!("{name} has {tokens} tokens for it"))
            }
        }
    }
    if sources.is_empty() {
        return Err(DataError::NoValidation { sources: without.join(", ") });
    }
    for source in &without {
        tracing::warn!("validation leaves out a source: {source}");
    }
    let plan = match split {
        Split::Train => train_plan(&weights, seed, &mut summaries),
        Split::Validation => validation_plan(config, &weights, &mut sources, &mut summaries),
    };
    Ok(Loader {
        seq_len: config.seq_len,
        seed,
        document_mask: config.document_mask,
        end_of_text: tokenizer.end_of_text() as i32,
        tokenizer: tokenizer.fingerprint(),
        sources,
        summaries,
        weights,
        plan,
    })
}

fn train_plan(weights: &[f64], seed: u64, summaries: &mut [SourceSummary]) -> Plan {
    let mixture = Mixture::new(weights, seed);
    for (at, summary) in summaries.iter_mut().enumerate() {
        summary.share = mixture.rows_in_block(at) as f64 / BLOCK_ROWS as f64;
    }
    Plan::Train(mixture)
}

/// Shares the rows of a pass among the sources by weight; a source with fewer gives what it has.
fn validation_plan(
    config: &DataConfig,
    weights: &[f64],
    sources: &mut [Source],
    summaries: &mut [SourceSummary],
) -> Plan {
    let rows = (config.validation_tokens / config.seq_len as u64).max(1);
    let mut starts = vec![0];
    for (at, mut share) in largest_remainder(weights, rows).into_iter().enumerate() {
        if let Source::Text(windows) = &mut sources[at] {
            share = share.min(windows.count);
            windows.spread(share);
            summaries[at].rows = Some(share);
        }
        starts.push(starts[at] + share);
    }
    let total = starts[sources.len()].max(1);
    for (at, summary) in summaries.iter_mut().enumerate() {
        summary.share = (starts[at + 1] - starts[at]) as f64 / total as f64;
    }
    Plan::Validation(starts)
}

enum Opened {
    Source(Source, SourceSummary),
    /// A validation split without a single row.
    TooShort {
        name: String,
        tokens: u64,
    },
}

impl Context<'_> {
    fn open_source(&self, at: usize) -> Result<Opened, DataError> {
        let source = &self.config.sources[at];
        let name = format!("data.sources[{at}] ({})", source.kind());
        let summary = |tokens, rows, fingerprint| SourceSummary {
            name: name.clone(),
            kind: source.kind(),
            tokens,
            rows,
            share: 0.0,
            fingerprint,
        };
        let seed = derive_key("source", &[self.seed, at as u64]);
        if let Some((source, settings)) = self.generated(source, seed)? {
            return Ok(Opened::Source(source, summary(None, None, settings)));
        }
        let stream = TokenStream::new(self.open_shards(source)?);
        let needed = self.config.seq_len as u64 + 1;
        if stream.tokens() < needed {
            return self.too_short(name, stream.tokens(), needed);
        }
        self.look_for_documents(&name, &stream);
        let order = match self.split {
            Split::Train => Order::Shuffled { key: seed },
            Split::Validation => Order::Spread { rows: 1 },
        };
        let windows = Windows::new(stream, self.config.seq_len, self.tokenizer.vocab_size(), order);
        let summary = summary(Some(windows.tokens()), Some(windows.count), windows.fingerprint());
        Ok(Opened::Source(Source::Text(windows), summary))
    }

    /// A source that makes its rows itself, and the settings these depend on.
    fn generated(
        &self,
        source: &SourceConfig,
        seed: u64,
    ) -> Result<Option<(Source, String)>, DataError> {
        let (tokenizer, split) = (self.tokenizer, self.split);
        Ok(match *source {
            SourceConfig::Passkey { min_len, max_len, answer_only, .. } => {
                let max_len = max_len.unwrap_or(self.config.seq_len);
                let rows = PasskeyRows::new(tokenizer, min_len, max_len, answer_only, seed, split)?;
                let settings = format!("passkey {min_len:?} {max_len} {answer_only}");
                Some((Source::Passkey(Box::new(rows)), settings))
            }
            SourceConfig::Fflm { instructions, p_write, p_read, reads_only, .. } => {
                let task = FlipFlop { instructions, p_write, p_read };
                let rows = FlipFlopRows::new(tokenizer, task, reads_only, seed, split)?;
                let settings = format!("fflm {instructions} {p_write} {p_read} {reads_only}");
                Some((Source::FlipFlop(rows), settings))
            }
            SourceConfig::Text { .. }
            | SourceConfig::CargoSources { .. }
            | SourceConfig::Shards { .. } => None,
        })
    }

    /// Warns when documents cannot be told apart: shards made elsewhere may end them otherwise.
    fn look_for_documents(&self, name: &str, stream: &TokenStream) {
        let mut head = vec![0; stream.tokens().min(1 << 20) as usize];
        stream.read(0, &mut head);
        if self.config.document_mask && !head.contains(&(self.tokenizer.end_of_text() as i32)) {
            tracing::warn!(
                source = name,
                "no end of text among the first {} tokens: document_mask has no effect there",
                head.len()
            );
        }
    }

    fn too_short(&self, name: String, tokens: u64, needed: u64) -> Result<Opened, DataError> {
        if self.split == Split::Validation {
            return Ok(Opened::TooShort { name, tokens });
        }
        Err(DataError::TooShort {
            source_name: name,
            split: self.split.name(),
            tokens,
            needed,
            hint: "give more text, lower data.seq_len, or lower data.validation_fraction".into(),
        })
    }

    fn open_shards(&self, source: &SourceConfig) -> Result<Vec<Shard>, DataError> {
        if let Some(corpus) = Corpus::of_source(source) {
            return self.prepared(corpus, source.kind());
        }
        let SourceConfig::Shards { train, validation, .. } = source else {
            unreachable!("generated sources have no shards")
        };
        let paths = match self.split {
            Split::Train => shard_files(train, self.split)?,
            Split::Validation => shard_files(validation, self.split)?,
        };
        self.foreign(&paths)
    }

    /// Text, through the cache.
    fn prepared(&self, corpus: Corpus, name: &str) -> Result<Vec<Shard>, DataError> {
        let mut options = PrepareOptions::new(corpus, PathBuf::new(), name);
        options.validation_fraction = self.config.validation_fraction;
        let cache = &self.config.cache_dir;
        let (folder, manifest) = prepare_cached(options, cache, self.tokenizer, self.progress)?;
        let split = match self.split {
            Split::Train => &manifest.train,
            Split::Validation => &manifest.validation,
        };
        let open = |shard: &ShardEntry| {
            let path = folder.join(&shard.file);
            if path.exists() {
                return Shard::open(&path);
            }
            let hint = format!("delete {}, and it is prepared again", folder.display());
            Err(DataError::Missing { what: "prepared shard", path, hint })
        };
        split.shards.iter().map(open).collect()
    }

    /// Shards that the user named: checked against the manifest beside them, or, without one,
    /// against the vocabulary.
    fn foreign(&self, paths: &[PathBuf]) -> Result<Vec<Shard>, DataError> {
        let mut manifests: HashMap<PathBuf, Option<Manifest>> = HashMap::new();
        let mut shards = Vec::new();
        for path in paths {
            let shard = Shard::open(path)?;
            let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
            let manifest = match manifests.get(&folder) {
                Some(manifest) => manifest,
                None => {
                    let read = Manifest::read(&folder)?;
                    manifests.entry(folder.clone()).or_insert(read)
                }
            };
            let listed = manifest.as_ref().filter(|manifest| manifest.lists(path));
            match listed {
                Some(manifest) => self.check_manifest(&folder, manifest)?,
                None => shard.check_vocabulary(self.tokenizer)?,
            }
            shards.push(shard);
        }
        Ok(shards)
    }

    fn check_manifest(&self, folder: &Path, manifest: &Manifest) -> Result<(), DataError> {
        let ours = self.tokenizer.fingerprint();
        if manifest.tokenizer.fingerprint == ours {
            return Ok(());
        }
        let short = |fingerprint: &str| fingerprint.chars().take(16).collect();
        Err(DataError::OtherTokenizer {
            path: folder.join(MANIFEST_FILE),
            theirs: manifest.tokenizer.name.clone(),
            their_fingerprint: short(&manifest.tokenizer.fingerprint),
            ours: self.tokenizer.name().into(),
            our_fingerprint: short(&ours),
        })
    }
}

/// The shards that `paths` lead to. Files that are named count for whatever split they are named
/// for; of folders and patterns, `_val_` in the name decides.
fn shard_files(paths: &[PathBuf], split: Split) -> Result<Vec<PathBuf>, DataError> {
    let found = expand(paths, "shard")?;
    let place =
        || paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    let chosen: Vec<PathBuf> = found
        .into_iter()
        .filter(|file| {
            file.named
                || (is_shard(&file.path)
                    && is_validation(&file.path) == (split == Split::Validation))
        })
        .map(|file| file.path)
        .collect();
    if chosen.is_empty() && !paths.is_empty() {
        let (what, hint) = match split {
            Split::Train => (
                "training shard",
                "training shards end in .bin and have no _val_ in their names; name a file to use it in any case",
            ),
            Split::Validation => (
                "validation shard",
                "validation shards end in .bin and have _val_ in their names; name a file to use it in any case",
            ),
        };
        return Err(DataError::NothingFound { what, place: place(), hint: hint.into() });
    }
    Ok(chosen)
}

fn is_shard(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "bin")
}

fn is_validation(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains("_val_"))
}
