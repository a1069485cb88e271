//! Output that its reader does not take.

use std::io::{PipeWriter, pipe};
use std::process::{Output, Stdio};

use crate::support::{CONFIG, Workspace};

/// The end to write of a pipe that nobody reads.
fn closed() -> PipeWriter {
    let (_, writer) = pipe().unwrap();
    writer
}

/// Runs the binary with this stdout; returns the exit code and stderr.
fn run_into(w: &Workspace, args: &[&str], stdout: impl Into<Stdio>) -> (Option<i32>, String) {
    let output = w.command(args).stdout(stdout).stderr(Stdio::piped()).output();
    let Output { status, stderr, .. } = output.expect("the binary starts");
    (status.code(), String::from_utf8(stderr).unwrap())
}

#[test]
fn a_closed_stdout_ends_a_command_quietly() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    let info = ["info", "--config", "tiny.toml"];
    let generate = ["generate", "--run", "runs/tiny", "--max-tokens", "2"];
    let verify = ["verify", "runs/tiny"];
    for args in [&["variants", "--json"][..], &["eval", "list"], &verify, &info, &generate] {
        let (code, log) = run_into(&w, args, closed());
        assert_eq!(code, Some(141), "{args:?}: {log}");
        assert!(!log.contains("error"), "{args:?}: {log}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_stdout_is_an_error() {
    let w = Workspace::new();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let (code, error) = run_into(&w, &["variants"], full);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.starts_with("error: cannot write to stdout: "), "{error}");
}

#[test]
fn training_goes_on_without_a_reader() {
    let w = Workspace::new();
    let eval = "[[eval]]\nsuite = \"extrapolate\"\nlengths = [16, 32]\n";
    w.write("both.toml", &format!("{CONFIG}\n{eval}{eval}out = \"again\"\n"));
    let train = ["train", "--config", "both.toml", "--set", "train.tokens=256"];
    let mut command = w.command(&train);
    assert!(command.stdout(closed()).stderr(closed()).status().unwrap().success());
    assert_eq!(w.list("runs/tiny/eval"), ["again", "extrapolate", "index.json"]);
}

#[test]
fn an_error_that_nobody_reads_is_an_error() {
    let w = Workspace::new();
    let mut command = w.command(&["verify", "absent"]);
    assert_eq!(command.stderr(closed()).status().unwrap().code(), Some(1));
}
