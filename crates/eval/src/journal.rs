//! `samples.jsonl`: one line for each finished trial, appended as trials finish, so that an
//! interrupted evaluation continues where it stopped.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::EvalError;
use crate::files::{create_dir, remove, write_atomically};
use crate::suite::{Discard, Outcome, Request, Trial};

/// A line of `samples.jsonl`.
#[derive(Serialize)]
struct Line<'a, V> {
    id: u64,
    length: usize,
    depth: Option<f64>,
    index: usize,
    prompt_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<&'a str>,
    verdict: &'a V,
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f64>,
    #[serde(flatten)]
    fields: &'a Map<String, Value>,
    prompt: &'a str,
}

/// A finished trial.
pub(crate) struct Sample<'a, V> {
    pub trial: &'a Trial,
    pub request: &'a Request,
    /// What the model generated, if anything.
    pub output: Option<&'a str>,
    pub verdict: V,
    /// [`Suite::sample_score`](crate::Suite::sample_score).
    pub score: Option<f64>,
    /// [`Suite::fields`](crate::Suite::fields).
    pub fields: Map<String, Value>,
}

/// The part of a line that is read back: all but the texts.
#[derive(Deserialize)]
struct ReadLine<V> {
    id: u64,
    length: usize,
    depth: Option<f64>,
    verdict: V,
}

/// The contents of `settings.json`.
#[derive(Deserialize)]
struct Written {
    git_hash: Option<String>,
    settings: Value,
}

/// The samples of an evaluation on disk, and the settings they were taken with.
pub(crate) struct Journal {
    folder: PathBuf,
    path: PathBuf,
    file: File,
    git_hash: Option<String>,
}

impl Journal {
    /// Opens the folder's samples: none yet, or those of an earlier run with the same `settings`; `discard` says which are
    /// removed. Also returns the ids of the trials that are done.
    pub(crate) fn open(
        folder: &Path,
        settings: &Value,
        git_hash: Option<&str>,
        discard: Discard,
    ) -> Result<(Self, HashSet<u64>), EvalError> {
        create_dir(folder)?;
        let path = folder.join("samples.jsonl");
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(EvalError::write(&path))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(EvalError::Busy { folder: folder.to_path_buf() });
            }
            // If the file system has no locks, the user must ensure it.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        let mut journal = Journal {
            folder: folder.to_path_buf(),
            path,
            file,
            git_hash: git_hash.map(str::to_string),
        };
        journal.ensure_settings(settings, discard)?;
        let done = journal.recover()?;
        Ok((journal, done))
    }

    /// Ensures that any samples in the folder were taken with `settings`.
    fn ensure_settings(&mut self, settings: &Value, discard: Discard) -> Result<(), EvalError> {
        let path = self.folder.join("settings.json");
        if discard == Discard::All {
            self.clear()?;
        }
        let replaces = |journal: &Self| match discard {
            Discard::Nothing | Discard::All => false,
            Discard::Outdated => {
                let then = journal.written(&path).ok().flatten();
                let step = |settings: &Value| settings["checkpoint_step"].clone();
                let other_step = then.is_none_or(|then| step(&then.settings) != step(settings));
                other_step || !journal.folder.join("results.json").exists()
            }
            Discard::OtherSettings => true,
        };
        match self.check_settings(&path, settings) {
            Err(EvalError::OtherSettings { folder, differences }) if replaces(self) => {
                let (folder, differences) = (folder.display(), differences.join("\n"));
                tracing::warn!(
                    "{folder}: samples with other settings are discarded:\n{differences}"
                );
                self.clear()?;
            }
            Ok(false) => {}
            there => return there.map(drop),
        }
        let written = json!({ "git_hash": self.git_hash, "settings": settings });
        let json = serde_json::to_string_pretty(&written).expect("settings are plain data");
        write_atomically(&path, (json + "\n").as_bytes())
    }

    /// Removes the samples and the results, the settings last.
    fn clear(&self) -> Result<(), EvalError> {
        remove(&self.folder.join("results.json"))?;
        self.file.set_len(0).map_err(EvalError::write(&self.path))?;
        remove(&self.folder.join("settings.json"))
    }

    /// Compares the settings on disk, if there are any, with the current ones. The commit may differ: then the report
    /// names the one at which sampling began. Returns whether there are settings.
    fn check_settings(&mut self, path: &Path, now: &Value) -> Result<bool, EvalError> {
        let Some(then) = self.written(path)? else {
            let length = self.file.metadata().map_err(EvalError::read(&self.path))?.len();
            let differences = vec!["  samples.jsonl is there without settings.json".to_string()];
            return match length {
                0 => Ok(false),
                _ => Err(EvalError::OtherSettings { folder: self.folder.clone(), differences }),
            };
        };
        let mut differences = Vec::new();
        compare("", &then.settings, now, ["was", "now it is"], &mut differences);
        if !differences.is_empty() {
            return Err(EvalError::OtherSettings { folder: self.folder.clone(), differences });
        }
        if then.git_hash != self.git_hash {
            tracing::warn!(
                "the samples in {} were begun at commit {:?}, which the report will name; now it is {:?}",
                self.folder.display(),
                then.git_hash,
                self.git_hash
            );
            self.git_hash = then.git_hash;
        }
        Ok(true)
    }

    /// The settings on disk.
    fn written(&self, path: &Path) -> Result<Option<Written>, EvalError> {
        if !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(path).map_err(EvalError::read(path))?;
        serde_json::from_str(&text).map(Some).map_err(|error| EvalError::Damaged {
            path: path.to_path_buf(),
            line: error.line(),
            reason: format!("not the settings of an evaluation: {error}"),
        })
    }

    /// The commit at which sampling began.
    pub(crate) fn git_hash(&self) -> Option<&str> {
        self.git_hash.as_deref()
    }

    /// Reads which trials are done, and removes an incomplete last line.
    fn recover(&mut self) -> Result<HashSet<u64>, EvalError> {
        #[derive(Deserialize)]
        struct Id {
            id: u64,
        }
        let mut done = HashSet::new();
        let whole = self.each_line(|journal, number, line| {
            let Id { id } = journal.parse(number, line)?;
            if !done.insert(id) {
                return Err(journal.damaged(number, format!("sample {id} stands here twice")));
            }
            Ok(())
        })?;
        self.file.set_len(whole).map_err(EvalError::write(&self.path))?;
        Ok(done)
    }

    /// Calls `each` with the number and the bytes of every complete line; returns their total length.
    fn each_line(
        &self,
        mut each: impl FnMut(&Self, usize, &[u8]) -> Result<(), EvalError>,
    ) -> Result<u64, EvalError> {
        let file = File::open(&self.path).map_err(EvalError::read(&self.path))?;
        let mut reader = BufReader::new(file);
        let (mut line, mut number, mut whole) = (Vec::new(), 0, 0);
        loop {
            line.clear();
            reader.read_until(b'\n', &mut line).map_err(EvalError::read(&self.path))?;
            if line.last() != Some(&b'\n') {
                return Ok(whole);
            }
            number += 1;
            each(self, number, &line)?;
            whole += line.len() as u64;
        }
    }

    fn parse<T: DeserializeOwned>(&self, number: usize, line: &[u8]) -> Result<T, EvalError> {
        serde_json::from_slice(line)
            .map_err(|error| self.damaged(number, format!("not a sample of this suite: {error}")))
    }

    fn damaged(&self, line: usize, reason: String) -> EvalError {
        EvalError::Damaged { path: self.path.clone(), line, reason }
    }

    /// The evaluation's folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Appends the lines of finished trials.
    pub(crate) fn append(&mut self, lines: &[u8]) -> Result<(), EvalError> {
        let write = |file: &mut File| file.write_all(lines).and_then(|()| file.sync_data());
        write(&mut self.file).map_err(EvalError::write(&self.path))
    }

    /// The outcomes of all `trials`, in order, read from the file: a resumed and an uninterrupted
    /// evaluation are scored from the same bytes.
    pub(crate) fn outcomes<V: DeserializeOwned>(
        &self,
        trials: &[Trial],
    ) -> Result<Vec<Outcome<V>>, EvalError> {
        let mut outcomes: Vec<Option<Outcome<V>>> = trials.iter().map(|_| None).collect();
        self.each_line(|journal, number, line| {
            let line: ReadLine<V> = journal.parse(number, line)?;
            let trial = trials.get(line.id as usize).filter(|trial| trial.length == line.length);
            let Some(trial) = trial else {
                let reason =
                    format!("sample {} of length {} is none of this suite", line.id, line.length);
                return Err(journal.damaged(number, reason));
            };
            outcomes[line.id as usize] =
                Some(Outcome { trial: trial.clone(), depth: line.depth, verdict: line.verdict });
            Ok(())
        })?;
        let count = outcomes.len();
        let found: Vec<Outcome<V>> = outcomes.into_iter().flatten().collect();
        if found.len() != count {
            let reason = format!("{} samples are here, {count} were taken", found.len());
            return Err(self.damaged(found.len(), reason));
        }
        Ok(found)
    }
}

/// The lines of finished trials.
pub(crate) fn lines<'a, V: Serialize + 'a>(
    samples: impl IntoIterator<Item = Sample<'a, V>>,
) -> Vec<u8> {
    let mut lines = Vec::new();
    for Sample { trial, request, output, verdict, score, fields } in samples {
        let line = Line {
            id: trial.id,
            length: trial.length,
            depth: request.depth,
            index: trial.index,
            prompt_tokens: request.call.input_len(),
            expected: request.expected.as_deref(),
            output,
            verdict: &verdict,
            score,
            fields: &fields,
            prompt: &request.prompt,
        };
        serde_json::to_writer(&mut lines, &line).expect("a sample is plain data");
        lines.push(b'\n');
    }
    lines
}

/// Adds a line for each setting that differs, with the words before its two values.
pub(crate) fn compare(
    name: &str,
    then: &Value,
    now: &Value,
    words: [&str; 2],
    differences: &mut Vec<String>,
) {
    if let (Value::Object(a), Value::Object(b)) = (then, now) {
        let mut keys: Vec<&String> = a.keys().chain(b.keys()).collect();
        keys.sort();
        keys.dedup();
        for key in keys {
            let path = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
            let (a, b) = (a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null));
            compare(&path, a, b, words, differences);
        }
    } else if then != now {
        let [was, is] = words;
        differences.push(format!("  {name} {was} {then}, {is} {now}"));
    }
}
