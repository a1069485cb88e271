//! `longwall bench`: measurements that need no data and leave nothing behind.

use std::fs;

use crate::support::Workspace;

#[test]
fn training_is_timed_without_data_and_without_a_run_folder() {
    let w = Workspace::new();
    fs::remove_dir_all(w.path("corpus")).unwrap();
    let args = ["bench", "train", "--config", "tiny.toml", "--steps", "4", "--warmup", "2"];
    let json = w.succeed(&[&args[..], &["--json"]].concat());
    let results: serde_json::Value = serde_json::from_str(&json).unwrap();
    for (key, expected) in [("steps", 4), ("warmup", 2), ("batch_tokens", 128), ("micro_batch", 2)]
    {
        assert_eq!(results[key], expected, "{key}");
    }
    assert_eq!(results["precision"], "f32");
    let number = |path: &str| {
        let value = results.pointer(path).and_then(serde_json::Value::as_f64);
        value.unwrap_or_else(|| panic!("{path} is no number in {json}"))
    };
    let [min, median, max] =
        ["min", "median", "max"].map(|of| number(&format!("/tokens_per_second/{of}")));
    assert!(0.0 < min && min <= median && median <= max, "{json}");
    assert!(number("/step_milliseconds/median") > 0.0 && number("/mfu") > 0.0);
    assert!(number("/peak_memory_bytes") > 1e6);
    assert!((number("/first_loss") - 257f64.ln()).abs() < 0.5, "{json}");

    let table = w.succeed(&args);
    for line in ["device", "precision       f32", "tokens/s", "ms a step", "peak memory", "loss"] {
        assert!(table.lines().any(|found| found.starts_with(line)), "{line} is not in\n{table}");
    }
    assert_eq!(w.list("."), ["tiny.toml"], "something was left behind");
}

#[test]
fn a_benchmark_of_no_steps_is_a_mistake_in_its_use() {
    let w = Workspace::new();
    let output = w.run(&["bench", "train", "--config", "tiny.toml", "--steps", "0"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("0 is not in 1..=1000000"), "{error}");
}

#[test]
fn a_benchmark_without_a_configuration_names_the_path() {
    let w = Workspace::new();
    let error = w.fail(&["bench", "train", "--config", "absent.toml"]);
    assert!(error.starts_with("error: cannot read the configuration absent.toml"), "{error}");
}
