//! Ranks as processes. They need GPUs to train; without one, they connect, and refuse in words.

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Workspace, list, wait_until};

fn free_port() -> String {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port().to_string()
}

/// Rank `rank` of two, with further arguments.
fn rank(w: &Workspace, rank: usize, port: &str, args: &[&str]) -> Command {
    let mut command = w.command(&[&["train", "--config", "tiny.toml"], args].concat());
    let rank = rank.to_string();
    command.envs([("RANK", rank.as_str()), ("LOCAL_RANK", rank.as_str()), ("WORLD_SIZE", "2")]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The errors of both ranks, which must fail.
fn errors(w: &Workspace, args: [&[&str]; 2]) -> [String; 2] {
    let port = free_port();
    let children = [0, 1].map(|at| rank(w, at, &port, args[at]).spawn().unwrap());
    children.map(|child| {
        let Output { status, stderr, .. } = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(stderr).unwrap();
        assert!(!status.success(), "{stderr}");
        stderr[stderr.find("error: ").expect("an error")..].to_owned()
    })
}

#[test]
fn several_ranks_on_the_cpu_are_refused() {
    let w = Workspace::new();
    let error = w.fail(&["train", "--config", "tiny.toml", "--gpus", "2"]);
    insta::assert_snapshot!(error, @r#"
    error: run.device is "cpu", but there are 2 ranks; allowed: "auto", "cuda"
      hint: several ranks train on NVIDIA GPUs, one each; on the CPU, one process uses all cores
    "#);
    assert!(!w.path("runs").exists());
    for error in errors(&w, [&[], &[]]) {
        assert!(error.contains("run.device is \"cpu\", but there are 2 ranks"), "{error}");
    }
}

#[test]
fn more_gpus_than_there_are_are_refused() {
    let w = Workspace::new();
    let args = ["train", "--config", "tiny.toml", "--device", "auto", "--gpus", "4096"];
    let error = w.fail(&args);
    assert!(error.starts_with("error: --gpus is 4096"), "{error}");
    let reason = error.contains("no NVIDIA driver") || error.contains("the GPUs that the driver");
    assert!(reason || error.contains("NVIDIA driver"), "{error}");
}

#[test]
fn one_gpu_is_a_run_as_without_the_option() {
    let w = Workspace::new();
    w.train("plain", &["train.tokens=1280"]);
    let sets = ["--set", "run.name=one", "--set", "train.tokens=1280"];
    w.succeed(&[&["train", "--config", "tiny.toml", "--gpus", "1"], &sets[..]].concat());
    assert_eq!(w.metrics("runs/one"), w.metrics("runs/plain"));
}

#[test]
fn ranks_of_different_configurations_are_refused_by_the_key() {
    let w = Workspace::new();
    let [first, second] = errors(&w, [&[], &["--set", "train.lr=0.5"]]);
    let reason = "has train.lr 0.5, but rank 0 has 0.01";
    assert!(first.starts_with("error: rank 1 (") && first.contains(reason), "{first}");
    assert!(second.starts_with("error: rank 0 refuses rank 1: "), "{second}");
    assert!(second.contains(reason), "{second}");
    let of = |weights| ["--from", "runs/old", "--weights", weights];
    let [first, _] = errors(&w, [&of("model"), &of("ema")]);
    assert!(first.contains("has --weights ema, but rank 0 has model"), "{first}");
}

/// As after a run has started: the exit code is that of the signal.
#[test]
fn ctrl_c_ends_a_rank_that_waits_for_the_others() {
    let w = Workspace::new();
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let port = free_port();
        let child = rank(&w, 0, &port, &[]).spawn().unwrap();
        // Once it listens, it handles signals.
        while TcpListener::bind(("127.0.0.1", port.parse().unwrap())).is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let kill = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        assert!(kill.unwrap().success());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains("stopped: the ranks were not connected yet"), "{stderr}");
    }
}

#[test]
fn the_option_and_the_variables_exclude_each_other() {
    let w = Workspace::new();
    let output = rank(&w, 0, "29500", &["--gpus", "2"]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let reason = "--gpus is 2, but the environment says that this process is rank 0 of 2";
    assert!(stderr.contains(reason), "{stderr}");
}

#[test]
fn a_port_in_use_and_missing_variables_are_named() {
    let w = Workspace::new();
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = rank(&w, 0, &port, &[]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains(&format!("cannot listen at 127.0.0.1:{port}")), "{stderr}");
    assert!(stderr.contains("choose another MASTER_PORT"), "{stderr}");
    let output = rank(&w, 0, &port, &[]).env_remove("MASTER_PORT").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("WORLD_SIZE is set, but MASTER_PORT is not"), "{stderr}");
}

/// Rank 1 waits for rank 0, which ends before all are there.
#[test]
fn a_rank_that_is_killed_at_the_start_ends_the_other() {
    let w = Workspace::new();
    let port = free_port();
    let mut command = rank(&w, 0, &port, &[]);
    command.env("WORLD_SIZE", "3");
    let mut first = command.spawn().unwrap();
    let mut command = rank(&w, 1, &port, &[]);
    command.env("WORLD_SIZE", "3");
    let second = command.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    first.kill().unwrap();
    first.wait().unwrap();
    let started = Instant::now();
    let output = second.wait_with_output().unwrap();
    assert!(started.elapsed() < Duration::from_secs(30));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("rank 0 does not answer at 127.0.0.1:"), "{stderr}");
    assert!(stderr.contains("the connection ended"), "{stderr}");
}

/// The files of an evaluation with `--out NAME`.
fn evaluated(w: &Workspace, name: &str) -> Vec<(String, Vec<u8>)> {
    let dir = w.path("runs/plain/eval").join(name);
    let files = list(&dir).into_iter();
    files.map(|file| (file.clone(), std::fs::read(dir.join(file)).unwrap())).collect()
}

/// An evaluation of `runs/plain` by passkeys, as many of each length as `trials`, in batches of two.
fn passkey<'a>(out: &'a str, gpus: &'a str, trials: &'a str) -> Vec<&'a str> {
    let suite = ["eval", "passkey", "--run", "runs/plain", "--lengths", "300,320", "--batch", "2"];
    [&suite[..], &["--trials", trials, "--out", out, "--gpus", gpus]].concat()
}

#[test]
fn an_evaluation_does_not_depend_on_the_number_of_processes() {
    let w = Workspace::new();
    w.train("plain", &["train.tokens=1280"]);
    let reports = ["1", "2", "3"].map(|gpus| w.succeed(&passkey(gpus, gpus, "5")));
    for gpus in ["2", "3"] {
        assert_eq!(evaluated(&w, gpus), evaluated(&w, "1"), "{gpus} processes");
    }
    assert!(reports[0].contains("accuracy") && reports[1] == reports[0], "{}", reports[1]);

    // Text, of which rank 0 prepares the files.
    let text = ["eval", "extrapolate", "--run", "runs/plain", "--lengths", "16,32", "--batch", "1"];
    w.succeed(&[&text[..], &["--out", "text-1"]].concat());
    w.succeed(&[&text[..], &["--out", "text-3", "--gpus", "3"]].concat());
    assert_eq!(evaluated(&w, "text-3"), evaluated(&w, "text-1"));
}

#[test]
fn an_evaluation_whose_process_is_killed_names_it_and_goes_on_with_another_number() {
    let w = Workspace::new();
    w.train("plain", &["train.tokens=1280"]);
    let lines = |name: &str| {
        let text =
            std::fs::read_to_string(w.path("runs/plain/eval").join(name).join("samples.jsonl"));
        text.map_or(0, |text| text.lines().count())
    };
    let mut command = w.command(&passkey("broken", "3", "60"));
    let mut parent = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("some samples", || lines("broken") >= 6 || parent.try_wait().unwrap().is_some());
    let rank = child_of_rank(parent.id(), 1);
    assert!(Command::new("kill").args(["-9", &rank.to_string()]).status().unwrap().success());
    let Output { status, stderr, .. } = parent.wait_with_output().unwrap();
    let error = String::from_utf8(stderr).unwrap();
    assert!(!status.success(), "{error}");
    let told = format!("rank 1 (process {rank} on this machine) was ended by signal 9 (SIGKILL)");
    assert!(error.contains(&told), "{error}");
    assert!(error.contains("run the same command again to go on"), "{error}");
    let done = lines("broken");
    assert!((6..120).contains(&done), "{done}");

    // The samples that were done stay as they are.
    let file = "runs/plain/eval/broken/samples.jsonl";
    let before = w.read(file);
    w.succeed(&passkey("broken", "2", "60"));
    assert!(w.read(file).starts_with(&before));
    w.succeed(&passkey("whole", "1", "60"));
    assert_eq!(evaluated(&w, "broken"), evaluated(&w, "whole"));
}

/// The process of a rank that `parent` has started.
fn child_of_rank(parent: u32, rank: usize) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let is_rank = |process: &u32| {
        let variables = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|x| x == format!("RANK={rank}").as_bytes())
    };
    let children = children.unwrap();
    let mut children = children.split_whitespace().map(|process| process.parse().unwrap());
    children.find(is_rank).expect("the rank runs")
}

#[test]
fn impossible_evaluations_on_several_gpus_are_refused() {
    let w = Workspace::new();
    w.train("plain", &["train.tokens=1280"]);
    let fail = |args: &[&str]| w.fail(&[&["eval", "--run", "runs/plain"], args].concat());
    let usage = |args: &[&str]| {
        let output = w.run(&[&["eval", "--run", "runs/plain"], args].concat());
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let error = usage(&["passkey", "--gpus", "0"]);
    assert!(error.contains("invalid value '0' for '--gpus <N>'"), "{error}");
    let error = usage(&["parskey", "--gpus", "2"]);
    assert!(error.contains("unrecognized subcommand 'parskey'"), "{error}");
    let error = fail(&["passkey", "--device", "auto", "--gpus", "4096"]);
    assert!(error.starts_with("error: --gpus is 4096"), "{error}");
    // Found on all ranks, told once.
    let error = fail(&["passkey", "--lengths", "9", "--gpus", "2"]);
    assert_eq!(error.matches("length 9 is too short").count(), 1, "{error}");
    assert!(!w.path("runs/plain/eval").exists());
}
