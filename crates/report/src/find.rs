//! The folders of runs in the paths that a user gives.

use std::path::{Path, PathBuf};

use crate::ReportError;

/// Levels of folders below a given one in which runs are looked for: a sweep's, and a folder of sweeps.
const DEPTH: usize = 2;

/// The folders of runs among `paths`: a run's own, or those of all runs in a folder, by name. Each once.
pub(crate) fn run_folders(paths: &[PathBuf]) -> Result<Vec<PathBuf>, ReportError> {
    let mut found: Vec<PathBuf> = Vec::new();
    for path in paths {
        let mut here = Vec::new();
        search(path, DEPTH, &mut here)?;
        if here.is_empty() {
            return Err(ReportError::NoRuns { path: path.clone() });
        }
        here.retain(|folder| !found.contains(folder));
        found.extend(here);
    }
    Ok(found)
}

fn search(path: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), ReportError> {
    if path.join("config.toml").is_file() {
        found.push(path.to_owned());
        return Ok(());
    }
    let mut folders = subfolders(path)?;
    folders.sort();
    match depth {
        0 => Ok(()),
        _ => folders.iter().try_for_each(|folder| search(folder, depth - 1, found)),
    }
}

/// The folders in `path`.
pub(crate) fn subfolders(path: &Path) -> Result<Vec<PathBuf>, ReportError> {
    let entries = std::fs::read_dir(path).map_err(ReportError::read(path))?;
    let paths = entries.map(|entry| Ok(entry.map_err(ReportError::read(path))?.path()));
    let paths: Vec<PathBuf> = paths.collect::<Result<_, ReportError>>()?;
    Ok(paths.into_iter().filter(|path| path.is_dir()).collect())
}
