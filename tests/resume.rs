//! Exact resume.

use std::process::Stdio;

use crate::support::{Workspace, wait_until};

fn lines(w: &Workspace, run: &str) -> usize {
    let metrics = std::fs::read_to_string(w.path(&format!("runs/{run}/metrics.jsonl")));
    metrics.map_or(0, |text| text.lines().count())
}

/// TERM and Ctrl-C leave a checkpoint and end the run cleanly, with the exit code that shells give to
/// processes that these signals end.
#[test]
#[cfg(unix)]
fn a_stopped_run_leaves_a_checkpoint_and_resumes_exactly() {
    let w = Workspace::new();
    w.train("whole", &[]);
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let name = format!("run.name={signal}");
        let mut command = w.command(&["train", "--config", "tiny.toml", "--set", &name]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("steps", || lines(&w, signal) >= 8);
        let pid = child.id().to_string();
        let status = std::process::Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(status.unwrap().success());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains("stopping after this micro-batch"), "{stderr}");
        assert!(stderr.contains("stopped: "), "{stderr}");
        let resume = format!("runs/{signal}");
        assert!(stderr.contains(&format!("--resume {resume}")), "{stderr}");
        w.succeed(&["train", "--resume", &resume]);
        assert_eq!(w.metrics(&format!("runs/{signal}")), w.metrics("runs/whole"));
    }
}

/// Two runs of one seed are equal; another seed is not.
#[test]
fn equal_seeds_give_equal_losses() {
    let w = Workspace::new();
    w.train("a", &["train.tokens=1280"]);
    w.train("b", &["train.tokens=1280"]);
    w.train("c", &["train.tokens=1280", "run.seed=1"]);
    assert_eq!(w.metrics("runs/a"), w.metrics("runs/b"));
    assert_ne!(w.metrics("runs/a"), w.metrics("runs/c"));
}

/// Up to rounding, the loss does not depend on how the batch is split into micro-batches.
#[test]
fn accumulation_changes_only_the_rounding() {
    let w = Workspace::new();
    let losses = |run: &str| -> Vec<f64> {
        let text = w.read(&format!("runs/{run}/metrics.jsonl"));
        let record = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
        text.lines().filter_map(|line| record(line)["loss"].as_f64()).collect()
    };
    w.train("one", &["train.tokens=1280", "train.micro_batch=1"]);
    w.train("four", &["train.tokens=1280", "train.micro_batch=4"]);
    let (one, four) = (losses("one"), losses("four"));
    assert_eq!(one.len(), 10);
    for (one, four) in one.iter().zip(&four) {
        assert!((one - four).abs() < 2e-4, "{one} and {four}");
    }
}
