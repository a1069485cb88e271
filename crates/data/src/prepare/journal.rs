//! The saved state of an unfinished run.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{PrepareOptions, in_use};
use crate::corpus::{Inputs, Position};
use crate::shard::{
    LengthHistogram, Manifest, ShardEntry, Skipped, SplitState, SplitSummary, TokenizerStamp,
    write_json,
};
use crate::{DataError, Tokenizer};

/// The progress of a run. The documents before `position` are counted here and are in the shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) key: String,
    /// Hash of the list of inputs that `position` indexes.
    pub(super) listing: String,
    pub(super) position: Position,
    pub(super) train: SplitProgress,
    pub(super) validation: SplitProgress,
    pub(super) lengths: LengthHistogram,
    pub(super) skipped: Skipped,
}

/// One split's counts and open shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct SplitProgress {
    pub(super) documents: u64,
    pub(super) tokens: u64,
    pub(super) bytes: u64,
    pub(super) shards: SplitState,
}

impl SplitProgress {
    fn summary(self) -> SplitSummary {
        let shards: Vec<ShardEntry> = self.shards.shards;
        SplitSummary { documents: self.documents, tokens: self.tokens, bytes: self.bytes, shards }
    }
}

impl State {
    pub(super) fn new(key: &str, listing: &str) -> Self {
        State {
            key: key.into(),
            listing: listing.into(),
            position: Position::default(),
            train: SplitProgress::default(),
            validation: SplitProgress::default(),
            lengths: LengthHistogram::default(),
            skipped: Skipped::default(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.train.bytes + self.validation.bytes
    }

    pub(super) fn documents(&self) -> u64 {
        self.train.documents + self.validation.documents
    }

    pub(super) fn into_manifest(
        self,
        options: &PrepareOptions,
        tokenizer: &Tokenizer,
        inputs: &Inputs,
    ) -> Manifest {
        Manifest {
            format: Manifest::format(),
            documents: self.documents(),
            tokens: self.train.tokens + self.validation.tokens,
            bytes: self.bytes(),
            key: self.key,
            tokenizer: TokenizerStamp::of(tokenizer),
            corpus: options.corpus.describe(),
            inputs: inputs.files.len() as u64,
            lengths: self.lengths.summary(),
            skipped: self.skipped,
            train: self.train.summary(),
            validation: self.validation.summary(),
        }
    }
}

/// The file that holds the state.
pub(super) struct Journal {
    folder: PathBuf,
    path: PathBuf,
}

impl Journal {
    pub(super) fn new(folder: &Path) -> Self {
        Journal { folder: folder.to_path_buf(), path: folder.join(".prepare.json") }
    }

    /// The state of an interrupted run, if there was one.
    pub(super) fn load(&self, key: &str) -> Result<Option<State>, DataError> {
        let content = match std::fs::read(&self.path) {
            Ok(content) => content,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::read(&self.path, error)),
        };
        let state: State =
            serde_json::from_slice(&content).map_err(|error| DataError::Metadata {
                path: self.path.clone(),
                reason: error.to_string(),
                hint: format!("delete {} to start over", self.folder.display()),
            })?;
        if state.key != key {
            return Err(in_use(
                &self.folder,
                "holds an unfinished run with other text, options or tokenizer",
            ));
        }
        Ok(Some(state))
    }

    pub(super) fn save(&self, state: &State) -> Result<(), DataError> {
        write_json(&self.path, state)
    }

    pub(super) fn remove(&self) -> Result<(), DataError> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(DataError::write(&self.path, error))
            }
            _ => Ok(()),
        }
    }
}
