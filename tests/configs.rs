//! Every shipped configuration is valid.

use std::path::{Path, PathBuf};

use longwall_train::config::RunConfig;
use longwall_train::sweep::{Plan, SweepConfig};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "toml") {
            found.push(path);
        }
    }
}

#[test]
fn every_shipped_configuration_is_valid() {
    // Sweeps name their base relative to the repository.
    std::env::set_current_dir(repository()).unwrap();
    let mut found = vec![];
    files(Path::new("configs"), &mut found);
    assert!(found.len() >= 4, "{found:?}");
    for path in found {
        if path.starts_with("configs/sweeps") {
            let sweep = SweepConfig::load(&path).unwrap_or_else(|e| panic!("{e}"));
            let plan = Plan::new(sweep).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(plan.runs.len() > 1, "{}", path.display());
        } else {
            let config = RunConfig::load(&path, &[]).unwrap_or_else(|e| panic!("{e}"));
            let again = RunConfig::parse(&config.to_toml(), &path, &[]).unwrap();
            assert_eq!(config, again, "{}", path.display());
        }
    }
}
