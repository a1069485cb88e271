//! Ranks as processes. They need GPUs to train; without one, they connect, and refuse in words.

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::Workspace;

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
