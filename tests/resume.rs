//! Exact resume.

use std::process::Stdio;

use crate::support::{Workspace, wait_until};

/// The lines of metrics.jsonl without the times.
fn metrics(w: &Workspace, run: &str) -> Vec<String> {
    let text = w.read(&format!("runs/{run}/metrics.jsonl"));
    text.lines()
        .map(|line| {
            let mut record: serde_json::Map<String, serde_json::Value> =
                serde_json::from_str(line).unwrap();
            for key in ["seconds", "tokens_per_second", "mfu"] {
                record.remove(key);
            }
            serde_json::to_string(&record).unwrap()
        })
        .collect()
}

fn lines(w: &Workspace, run: &str) -> usize {
    let metrics = std::fs::read_to_string(w.path(&format!("runs/{run}/metrics.jsonl")));
    metrics.map_or(0, |text| text.lines().count())
}

/// A run killed repeatedly at arbitrary moments ends with the losses and weights of an uninterrupted
/// one, bit for bit.
#[test]
fn a_killed_run_resumes_exactly() {
    let w = Workspace::new();
    w.train("whole", &[]);
    let mut kills = 0;
    let mut first = true;
    loop {
        let mut command = if first {
            w.command(&["train", "--config", "tiny.toml", "--set", "run.name=broken"])
        } else {
            w.command(&["train", "--resume", "runs/broken"])
        };
        let before = lines(&w, "broken");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        first = false;
        // Let it get past the checkpoint it started from, then kill it wherever it is.
        let mut finished = false;
        wait_until("progress", || {
            finished = child.try_wait().unwrap().is_some();
            finished || lines(&w, "broken") >= before.max(5) + 7
        });
        if finished {
            assert!(child.wait().unwrap().success());
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        assert!(kills < 30, "the run makes no progress");
    }
    assert!(kills >= 2, "the run was killed {kills} times only");
    assert_eq!(metrics(&w, "broken"), metrics(&w, "whole"));
    let weights = |run: &str| {
        std::fs::read(w.path(&format!("runs/{run}/checkpoints/step-40/weights.safetensors")))
    };
    assert!(weights("broken").unwrap() == weights("whole").unwrap(), "the weights differ");
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
        assert_eq!(metrics(&w, signal), metrics(&w, "whole"));
    }
}

/// Two runs of one seed are equal; another seed is not.
#[test]
fn equal_seeds_give_equal_losses() {
    let w = Workspace::new();
    w.train("a", &["train.tokens=1280"]);
    w.train("b", &["train.tokens=1280"]);
    w.train("c", &["train.tokens=1280", "run.seed=1"]);
    assert_eq!(metrics(&w, "a"), metrics(&w, "b"));
    assert_ne!(metrics(&w, "a"), metrics(&w, "c"));
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
