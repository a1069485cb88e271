//! `index.json`: the finished evaluations of a run, in the folder that holds theirs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

use serde::Serialize;

use crate::files::write_atomically;
use crate::stats::Estimate;
use crate::{EvalError, Report};

/// The name of the index in a run's folder of evaluations.
const INDEX: &str = "index.json";

/// Between the name of an evaluation in the training loop and its step, in the name of its folder.
pub const IN_LOOP: &str = "-step-";

/// One evaluation in the index.
#[derive(Serialize)]
struct Entry {
    /// Its folder beside the index.
    name: String,
    suite: String,
    suite_version: u32,
    checkpoint_step: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    model_changes: Vec<String>,
    samples: u64,
    headline: BTreeMap<String, Estimate>,
}

/// Writes `index.json` into `folder`: the name, suite, checkpoint, samples and headline of every finished
/// evaluation there, by name. Folders without a readable `results.json` are left out. Processes that call it at a time wait
/// for each other, so that the last one lists all.
///
/// # Errors
/// [`EvalError::Io`] when the folder cannot be read or written.
pub fn write_index(folder: &Path) -> Result<(), EvalError> {
    // A file system without locks does without.
    let _lock = File::open(folder).and_then(|lock| lock.lock().map(|()| lock));
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(EvalError::read(folder))? {
        let entry = entry.map_err(EvalError::read(folder))?;
        let results = entry.path().join("results.json");
        if !results.is_file() {
            continue;
        }
        match Report::load(&results) {
            Ok(report) => entries.push(Entry {
                name: entry.file_name().to_string_lossy().into_owned(),
                suite: report.suite,
                suite_version: report.suite_version,
                checkpoint_step: report.checkpoint_step,
                model_changes: report.model_changes,
                samples: report.samples,
                headline: report.headline_estimates,
            }),
            Err(error) => tracing::warn!("left out of {INDEX}: {error}"),
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let json = serde_json::to_string_pretty(&entries).expect("an index is plain data");
    write_atomically(&folder.join(INDEX), (json + "\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn processes_may_write_it_at_the_same_time() {
        let folder = tempfile::tempdir().unwrap();
        thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| (0..20).try_for_each(|_| write_index(folder.path()))))
                .collect();
            for writer in writers {
                writer.join().unwrap().unwrap();
            }
        });
        let written = fs::read_to_string(folder.path().join(INDEX)).unwrap();
        assert_eq!(written, "[]\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
