//! Evaluations beside each other, and those that cannot run.

use std::process::Command;

use crate::support::Workspace;

/// `eval passkey` on `runs/tiny` with further arguments.
fn passkey<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let args = ["eval", "passkey", "--run", "runs/tiny", "--lengths", "300"];
    args.into_iter().chain(more.iter().copied()).collect()
}

#[test]
fn evaluations_of_one_suite_stand_side_by_side() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    w.succeed(&passkey(&["--trials", "2"]));
    w.succeed(&passkey(&["--trials", "3", "--out", "passkey-three"]));
    assert_eq!(w.list("runs/tiny/eval"), ["index.json", "passkey", "passkey-three"]);
    let samples = |name: &str| w.read(&format!("runs/tiny/eval/{name}/samples.jsonl"));
    assert_eq!(
        (samples("passkey").lines().count(), samples("passkey-three").lines().count()),
        (2, 3)
    );

    let index: serde_json::Value =
        serde_json::from_str(&w.read("runs/tiny/eval/index.json")).unwrap();
    let entry = |at: usize| (&index[at]["name"], &index[at]["suite"], &index[at]["samples"]);
    assert_eq!(entry(0), (&"passkey".into(), &"passkey".into(), &2.into()));
    assert_eq!(entry(1), (&"passkey-three".into(), &"passkey".into(), &3.into()));
    assert!(index[1]["headline"]["accuracy"]["high"].is_number());

    // An interrupted evaluation goes on where it stopped, in its own folder.
    let whole = samples("passkey-three");
    let first = whole.lines().next().unwrap().to_owned() + "\n";
    w.write("runs/tiny/eval/passkey-three/samples.jsonl", &first);
    w.succeed(&passkey(&["--trials", "3", "--out", "passkey-three"]));
    assert_eq!(samples("passkey-three"), whole);
    // Other settings are refused there, too.
    let error = w.fail(&passkey(&["--trials", "4", "--out", "passkey-three"]));
    assert!(
        error.contains("eval/passkey-three holds an evaluation with other settings"),
        "{error}"
    );
}

#[test]
fn results_stay_in_the_runs_folder_and_out_of_other_suites() {
    let w = Workspace::new();
    for name in ["../away", "a/b", "a\\b", "..", ".hidden", ""] {
        let output = w.run(&passkey(&["--out", name]));
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {error}");
        assert!(error.contains("allowed: the name of a folder"), "{name}: {error}");
    }
    let error = w.fail(&passkey(&["--out", "niah"]));
    assert!(error.contains("--out is niah, the folder of another suite"), "{error}");
}

#[test]
fn an_evaluation_beyond_the_memory_does_not_start() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    let sizes =
        ["--lengths", "16M", "--trials", "1000", "--batch", "1000", "--batch-tokens", "100B"];
    let args = ["eval", "passkey", "--run", "runs/tiny"].into_iter().chain(sizes);
    let error = w.fail(&args.collect::<Vec<_>>());
    assert!(error.contains("length 16000000 needs at least"), "{error}");
    assert!(
        error.contains("for 1000 sequences at a time") && error.contains("are free"),
        "{error}"
    );
    assert!(!w.path("runs/tiny/eval").exists());
}

#[test]
fn the_next_commands_work_as_printed() {
    let w = Workspace::new();
    let text = w.succeed(&[
        "train",
        "--config",
        "tiny.toml",
        "--set",
        "run.out_dir=it's my runs",
        "--set",
        "train.tokens=256",
    ]);
    let (_, next) = text.split_once("Next, for example:\n").unwrap();
    let commands: Vec<&str> = next.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(commands.len() >= 2, "{text}");
    for command in commands {
        let output =
            Command::new("sh").args(["-c", command]).current_dir(w.path("")).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {error}");
    }
}
