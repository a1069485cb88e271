//! The record of the last run on a GPU, kernels/gpu_tested.toml.

use std::collections::BTreeMap;
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
    let mut tests: Vec<&str> =
        tests.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    tests.sort_unstable();
    let recorded: Vec<&str> = record.tests.keys().map(String::as_str).collect();
    assert_eq!(recorded, tests, "tests in kernels/gpu_tested.toml and those that need a GPU");
    assert_eq!(
        record.sources, now,
        "kernels changed after kernels/gpu_tested.toml was written; run scripts/gpu_test.sh on a \
         machine with a GPU and commit the record"
    );
}
