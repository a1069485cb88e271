//! `longwall verify PATH…`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use longwall_data::{MANIFEST_FILE, verify_shards};
use longwall_train::verify::verify_run;

use crate::output::outln;
use crate::progress::DataProgress;

/// Arguments of `longwall verify`.
#[derive(clap::Args)]
pub struct Args {
    /// Folders of runs, and of shards that `longwall prepare` wrote
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

/// Prints one line per file; fails if one is damaged.
pub fn run(args: Args) -> Result<()> {
    let mut unsound = 0;
    let mut total = 0;
    for path in &args.paths {
        let (bad, count) = verify(path)?;
        unsound += bad;
        total += count;
    }
    if unsound > 0 {
        bail!("{unsound} of {total} files are not sound\n  hint: restore them from a copy");
    }
    outln!("{total} files are sound")
}

/// Checks one folder; returns how many of its files are not sound, and how many it has.
fn verify(path: &Path) -> Result<(usize, usize)> {
    if path.join(MANIFEST_FILE).is_file() {
        let report = verify_shards(path, &DataProgress::new(None))?;
        report.shards.iter().try_for_each(|shard| outln!("{shard}"))?;
        return Ok((report.unsound().count(), report.shards.len()));
    }
    if !path.join("config.toml").is_file() {
        bail!(
            "{} is no folder of a run (config.toml) or of shards ({MANIFEST_FILE})\n  \
             hint: give for example runs/NAME, or the folder that `longwall prepare --out` wrote",
            path.display()
        );
    }
    let files = verify_run(path)?;
    files.iter().try_for_each(|file| outln!("{file}"))?;
    Ok((files.iter().filter(|file| file.problem.is_some()).count(), files.len()))
}
