//! Commands killed at arbitrary moments, and called again until they finish.
//!
//! `LONGWALL_KILLS` sets how often each command is killed at least (3 by default).

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::support::{Workspace, sweep};

/// The longest time between two checkpoints of `tiny.toml`, in steps.
const CHECKPOINT_EVERY: usize = 5;

fn least_kills() -> usize {
    let kills = std::env::var("LONGWALL_KILLS");
    kills.map_or(3, |kills| kills.parse().expect("LONGWALL_KILLS is a number"))
}

/// The time that `command` takes, which must succeed.
fn time(mut command: Command) -> Duration {
    let start = Instant::now();
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    start.elapsed()
}

/// What a kill reaches.
#[derive(Clone, Copy)]
enum Reach {
    /// The process that was started.
    Process,
    /// Its children, too.
    Group,
}

/// Kills a process that leads a group of its own.
fn kill(child: &mut Child, reach: Reach) {
    if let Reach::Group = reach {
        let group = format!("-{}", child.id());
        let status = Command::new("kill").args(["-s", "KILL", "--", &group]).status();
        assert!(status.unwrap().success());
    } else {
        child.kill().unwrap();
    }
    child.wait().unwrap();
}

/// Kills what `command` starts, at moments spread evenly over `whole`, the time it takes undisturbed, until
/// it has been killed often enough. `killed` is called after each kill, `finished` when a command got
/// through; that call removes its results, so that the next starts from nothing.
fn kill_often(
    reach: Reach,
    whole: Duration,
    command: impl Fn() -> Command,
    killed: impl Fn(),
    finished: impl Fn(),
) {
    let mut kills = 0;
    for attempt in 1.. {
        let enough = kills >= least_kills();
        // Multiples of the golden ratio spread evenly.
        let part = (f64::from(attempt) * 0.618_033_988_749_895).fract();
        let deadline = Instant::now() + whole.mul_f64(part);
        let mut command = command();
        command.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut status = None;
        while status.is_none() && (enough || Instant::now() < deadline) {
            status = child.try_wait().unwrap();
            sleep(Duration::from_millis(1));
        }
        match status {
            Some(status) => {
                let output = child.wait_with_output().unwrap();
                let stderr = String::from_utf8_lossy(&output.stderr);
                assert!(status.success(), "after {kills} kills: {stderr}");
                finished();
                if enough {
                    return;
                }
            }
            None => {
                kill(&mut child, reach);
                kills += 1;
                killed();
            }
        }
    }
}

/// The steps in a run's metrics, up to a line that is cut off.
fn steps(w: &Workspace, run: &str) -> usize {
    let metrics = fs::read_to_string(w.path(&format!("{run}/metrics.jsonl")));
    metrics.map_or(0, |text| text.lines().filter(|line| line.contains("\"loss\"")).count())
}

/// The steps of a run's checkpoints.
fn checkpoints(w: &Workspace, run: &str) -> Vec<usize> {
    let Ok(folder) = fs::read_dir(w.path(&format!("{run}/checkpoints"))) else { return vec![] };
    let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<usize> =
        names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// All checkpoints that a killed run left are sound, and at most two intervals are lost: the one begun, and
/// that of the checkpoint under way.
fn is_sound(w: &Workspace, run: &str) {
    let checkpoints = checkpoints(w, run);
    if !checkpoints.is_empty() {
        w.succeed(&["verify", run]);
    }
    let (done, kept) = (steps(w, run), checkpoints.last().copied().unwrap_or(0));
    assert!(done <= kept + 2 * CHECKPOINT_EVERY, "{done} steps were done, {kept} are kept");
}

/// Metrics, samples and checkpoints of two runs are the same, except for times.
fn are_equal(w: &Workspace, run: &str, other: &str) {
    assert_eq!(w.metrics(run), w.metrics(other));
    assert_eq!(checkpoints(w, run), checkpoints(w, other));
    let mut files = vec!["samples.txt".to_string()];
    for step in checkpoints(w, run) {
        for file in ["weights", "optimizer"] {
            files.push(format!("checkpoints/step-{step}/{file}.safetensors"));
        }
    }
    for file in files {
        let read = |run: &str| fs::read(w.path(&format!("{run}/{file}"))).unwrap();
        assert!(read(run) == read(other), "{file} of {run} and {other} differ");
    }
}

/// A larger corpus of one file.
fn write_large_corpus(w: &Workspace) {
    let text = w.read("corpus/00.txt");
    let documents = (0..60_000).map(|i| format!("{{\"text\": \"{i} {text}\"}}\n"));
    w.write("large.jsonl", &documents.collect::<String>());
}

/// Training, with the preparation of its data before, validation, samples and checkpoints.
#[test]
fn a_killed_run_ends_as_an_undisturbed_one() {
    let w = Workspace::new();
    write_large_corpus(&w);
    let sets = [
        "train.sample.every=10",
        "train.sample.prompts=[\"The \"]",
        "train.checkpoint.best=true",
        "data.sources.0.paths=[\"large.jsonl\"]",
    ];
    let start = |name: &str| {
        let (name, cache) = (format!("run.name={name}"), format!("data.cache_dir={name}-cache"));
        let mut command = w.command(&["train", "--config", "tiny.toml", "--set", &name]);
        command.args(["--set", &cache]);
        for set in sets {
            command.args(["--set", set]);
        }
        command
    };
    let whole = time(start("whole"));
    let command = || match w.path("runs/killed/config.toml").exists() {
        true => w.command(&["train", "--resume", "runs/killed"]),
        false => start("killed"),
    };
    kill_often(
        Reach::Process,
        whole,
        command,
        || is_sound(&w, "runs/killed"),
        || {
            are_equal(&w, "runs/killed", "runs/whole");
            fs::remove_dir_all(w.path("runs/killed")).unwrap();
            fs::remove_dir_all(w.path("killed-cache")).unwrap();
        },
    );
}

#[test]
fn killed_preparation_leaves_the_same_shards() {
    let w = Workspace::new();
    write_large_corpus(&w);
    let prepare = |out: &str| {
        let args = ["--tokenizer", "bytes", "--validation-fraction", "0.1", "--name", "large"];
        let mut command = w.command(&["prepare", "large.jsonl", "--out", out]);
        command.args(args);
        command
    };
    let whole = time(prepare("whole"));
    kill_often(
        Reach::Process,
        whole,
        || prepare("killed"),
        || {},
        || {
            w.succeed(&["verify", "killed"]);
            assert_eq!(w.list("killed"), w.list("whole"));
            for file in w.list("whole") {
                let read = |folder: &str| fs::read(w.path(folder).join(&file)).unwrap();
                assert!(read("killed") == read("whole"), "{file} differs");
            }
            fs::remove_dir_all(w.path("killed")).unwrap();
        },
    );
}

#[test]
fn a_killed_evaluation_gives_the_same_scores() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=640"]);
    let eval = || {
        w.command(&["eval", "passkey", "--run", "runs/tiny", "--lengths", "300", "--trials", "40"])
    };
    let samples = "runs/tiny/eval/passkey/samples.jsonl";
    let whole = time(eval());
    let undisturbed = w.read(samples);
    fs::remove_dir_all(w.path("runs/tiny/eval")).unwrap();
    kill_often(
        Reach::Process,
        whole,
        eval,
        || {},
        || {
            assert_eq!(w.read(samples), undisturbed);
            fs::remove_dir_all(w.path("runs/tiny/eval")).unwrap();
        },
    );
}

fn kill_sweeps(reach: Reach) {
    let w = Workspace::new();
    for name in ["whole.toml", "killed.toml"] {
        w.write(name, &sweep("0", 2560));
    }
    let runs = ["rope-seed0", "fox-seed0"];
    let whole = time(w.command(&["sweep", "whole.toml"]));
    kill_often(
        reach,
        whole,
        || w.command(&["sweep", "killed.toml"]),
        || match reach {
            // Its job goes on.
            Reach::Process => {}
            Reach::Group => runs.iter().for_each(|run| is_sound(&w, &format!("runs/killed/{run}"))),
        },
        || {
            for run in runs {
                let [killed, whole] = ["killed", "whole"].map(|s| format!("runs/{s}/{run}"));
                are_equal(&w, &killed, &whole);
                let scores = |run: &str| w.read(&format!("{run}/eval/extrapolate/grid.csv"));
                assert_eq!(scores(&killed), scores(&whole));
            }
            fs::remove_dir_all(w.path("runs/killed")).unwrap();
        },
    );
}

#[test]
fn a_killed_sweep_ends_as_an_undisturbed_one() {
    kill_sweeps(Reach::Group);
}

/// The job that the killed sweep leaves behind is waited for.
#[test]
fn a_sweep_killed_without_its_job_ends_as_an_undisturbed_one() {
    kill_sweeps(Reach::Process);
}
