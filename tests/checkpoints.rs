//! Commands that read one checkpoint's folder, in its run and away from it.

use std::fs;
use std::path::Path;

use crate::support::Workspace;

const PASSKEY: [&str; 6] = ["eval", "passkey", "--lengths", "300", "--trials", "2"];

fn passkey<'a>(more: &[&'a str]) -> Vec<&'a str> {
    PASSKEY.into_iter().chain(more.iter().copied()).collect()
}

/// A copy of a checkpoint's files.
fn copy(w: &Workspace, from: &str, to: &str) {
    fs::create_dir_all(w.path(to)).unwrap();
    for name in w.list(from) {
        fs::copy(w.path(from).join(&name), w.path(to).join(name)).unwrap();
    }
}

fn step(w: &Workspace, results: &str) -> Option<u64> {
    let results: serde_json::Value = serde_json::from_str(&w.read(results)).unwrap();
    results["checkpoint_step"].as_u64()
}

/// `longwall` in another folder than the workspace's own.
fn succeed_in(w: &Workspace, folder: &str, args: &[&str]) {
    let output = w.command(args).current_dir(w.path(folder)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_checkpoint_in_its_run_is_evaluated_like_the_run() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=1280"]);
    let report = w.succeed(&passkey(&["--checkpoint", "runs/tiny/checkpoints/step-5"]));
    assert!(report.contains("run tiny, step 5"), "{report}");
    assert_eq!(step(&w, "runs/tiny/eval/passkey/results.json"), Some(5));
    // The same evaluation, which finds its samples there.
    assert_eq!(w.succeed(&passkey(&["--run", "runs/tiny", "--checkpoint", "5"])), report);
    // From within the run, and the newest of a run's folder.
    succeed_in(&w, "runs/tiny/checkpoints", &passkey(&["--checkpoint", "./step-5"]));
    succeed_in(&w, "runs/tiny/checkpoints/step-5", &passkey(&["--checkpoint", "."]));
    w.succeed(&passkey(&["--checkpoint", "runs/tiny", "--out", "newest"]));
    assert_eq!(step(&w, "runs/tiny/eval/newest/results.json"), Some(10));
    assert_eq!(w.list("runs/tiny/eval"), ["index.json", "newest", "passkey"]);
    assert!(!w.path("runs/tiny/checkpoints/step-5/eval").exists());
}

#[test]
fn a_checkpoint_away_from_its_run_keeps_its_results() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=1280"]);
    copy(&w, "runs/tiny/checkpoints/step-5", "kept/five");
    copy(&w, "runs/tiny/checkpoints/step-10", "kept/ten");
    let here = w.succeed(&passkey(&["--run", "runs/tiny", "--checkpoint", "5"]));
    fs::remove_dir_all(w.path("runs")).unwrap();
    assert_eq!(w.succeed(&passkey(&["--checkpoint", "kept/five"])), here);
    succeed_in(&w, "kept", &passkey(&["--checkpoint", "ten"]));
    for (name, wanted) in [("five", 5), ("ten", 10)] {
        assert_eq!(w.list(&format!("kept/{name}/eval")), ["index.json", "passkey"]);
        assert_eq!(step(&w, &format!("kept/{name}/eval/passkey/results.json")), Some(wanted));
    }
    let generate =
        ["generate", "--checkpoint", "kept/five", "--max-tokens", "1", "--prompt", "The"];
    assert!(w.succeed(&generate).starts_with("The"));
    // Damage is found, and no other run is named as a remedy.
    w.damage("kept/five/weights.safetensors", |bytes| bytes[200] ^= 1);
    let error = w.fail(&generate);
    assert!(error.contains("kept/five/weights.safetensors is damaged"), "{error}");
    assert!(error.contains("hint: remove the file, or restore it from a copy"), "{error}");
}

#[test]
fn a_copied_checkpoint_needs_its_tokenizer() {
    let w = Workspace::new();
    let train = ["tokenizer", "train", "corpus", "--out", "bpe.json", "--vocab-size", "300"];
    w.succeed(&train);
    w.train("bpe", &["tokenizer={ kind = \"file\", path = \"bpe.json\" }", "train.tokens=256"]);
    copy(&w, "runs/bpe/checkpoints/step-2", "copy");
    let eval = passkey(&["--checkpoint", "copy"]);
    fs::rename(w.path("bpe.json"), w.path("moved.json")).unwrap();
    insta::assert_snapshot!(w.fail(&eval), @r"
    error: copy has no tokenizer: there is no tokenizer.json in copy, and bpe.json, which it was trained with, is not there
      hint: copy tokenizer.json from the run's folder into copy
    ");
    fs::copy(w.path("runs/bpe/tokenizer.json"), w.path("copy/tokenizer.json")).unwrap();
    w.succeed(&eval);
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=1280"]);
    let error = |args: &[&str]| w.fail(&passkey(args));
    insta::assert_snapshot!(error(&["--checkpoint", "runs/tiny/checkpoints/step-7"]), @r"
    error: runs/tiny has no step-7 checkpoint; there: step 5, step 10
      hint: choose one of these
    ");
    insta::assert_snapshot!(error(&["--checkpoint", "corpus"]), @r"
    error: corpus is no checkpoint: there is no state.json in it
      hint: give the folder of a checkpoint, for example runs/NAME/checkpoints/step-1000, or of a run
    ");
    insta::assert_snapshot!(error(&["--checkpoint", "runs/none/step-5"]), @r"
    error: runs/none/step-5 is no checkpoint: there is no state.json in it
      hint: give the folder of a checkpoint, for example runs/NAME/checkpoints/step-1000, or of a run
    ");
    let folder = "runs/tiny/checkpoints/step-5";
    insta::assert_snapshot!(error(&["--run", "runs/tiny", "--checkpoint", folder]), @r"
    error: --checkpoint is the folder runs/tiny/checkpoints/step-5, beside --run; allowed beside --run: latest, best, or a step such as 1000
      hint: leave out --run
    ");
    insta::assert_snapshot!(error(&["--checkpoint", "5"]), @r"
    error: --checkpoint is step-5, and no run was given
      hint: add --run runs/NAME, or give the checkpoint's folder: --checkpoint runs/NAME/checkpoints/step-1000
    ");
    insta::assert_snapshot!(error(&[]), @r"
    error: no run was given
      hint: add --run runs/NAME, the folder of a trained run, or --checkpoint DIR, that of a checkpoint
    ");
    let output = w.run(&passkey(&["--checkpoint", "newest"]));
    assert_eq!(output.status.code(), Some(2));
    let usage = String::from_utf8(output.stderr).unwrap();
    let allowed = "allowed: latest, best, or a step such as 1000, or the folder of a checkpoint";
    assert!(usage.contains(allowed), "{usage}");
    assert!(!Path::new(&w.path("corpus/eval")).exists());
}
