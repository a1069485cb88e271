//! The record of the last run on a GPU, kernels/gpu_tested.toml.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

#[derive(serde::Deserialize)]
struct Record {
    sources: BTreeMap<String, String>,
    tests: BTreeMap<String, f64>,
}

#[test]
fn the_kernels_are_those_that_were_tested_on_a_gpu() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace's folder");
    let listed = Command::new("bash").arg(root.join("scripts/kernel_sources.sh")).output();
    let listed = listed.expect("bash runs");
    assert!(listed.status.success(), "{listed:?}");
    let now = String::from_utf8(listed.stdout).expect("names are UTF-8");
    let named = |line: &str| {
        let (name, value) = line.split_once(' ').expect("a name and a value");
        (name.to_owned(), value.to_owned())
    };
    let now: BTreeMap<String, String> = now.lines().map(named).collect();
    let record = std::fs::read_to_string(root.join("kernels/gpu_tested.toml"));
    let record: Record = toml::from_str(&record.expect("the record exists")).expect("it is TOML");
    let program = std::env::current_exe().expect("the tests' own path");
    let tests = Command::new(program).args(["--list", "--ignored", "--format=terse"]).output();
    let tests = String::from_utf8(tests.expect("the tests run").stdout).expect("names are UTF-8");
    let recorded: BTreeSet<&str> = record.tests.keys().map(String::as_str).collect();
    let tests: BTreeSet<&str> =
        tests.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    let sources = record.sources.iter().filter(|(name, value)| now.get(*name) != Some(value));
    let sources = sources.chain(now.iter().filter(|(name, _)| !record.sources.contains_key(*name)));
    let changed: Vec<&str> = sources
        .map(|(name, _)| name.as_str())
        .chain(recorded.symmetric_difference(&tests).copied())
        .collect();
    assert!(
        changed.is_empty(),
        "sources or tests changed after kernels/gpu_tested.toml was written: {changed:#?}; run \
         scripts/gpu_test.sh on a machine with a GPU and commit the record"
    );
}
