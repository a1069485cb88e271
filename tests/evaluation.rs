//! Evaluations beside each other, and those that cannot run.

use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Workspace, wait_until};

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
fn a_configuration_lists_evaluations_of_one_suite_by_name() {
    let w = Workspace::new();
    let eval = |more: &str| {
        format!("[[eval]]\nsuite = \"passkey\"\nlengths = [300]\ntrials = 1\n{more}\n")
    };
    let config = |last: &str| format!("{}{}{}", crate::support::CONFIG, eval(""), eval(last));
    w.write("both.toml", &config("out = \"passkey-again\""));
    w.succeed(&["train", "--config", "both.toml", "--set", "train.tokens=256"]);
    assert_eq!(w.list("runs/tiny/eval"), ["index.json", "passkey", "passkey-again"]);

    w.write("both.toml", &config(""));
    let error = w.fail(&["train", "--config", "both.toml"]);
    assert!(error.contains("eval.1.out is missing; allowed: a name of its own"), "{error}");
    w.write("both.toml", &config("out = \"niah\""));
    let error = w.fail(&["train", "--config", "both.toml"]);
    assert!(error.contains("eval.1.out is niah, the folder of another suite"), "{error}");
}

/// Two suites in the loop, one of which generates and one of which reads the validation split.
const IN_THE_LOOP: &str = r#"
[[train.evaluate]]
suite = "passkey"
every = 20
lengths = [300]
trials = 4

[[train.evaluate]]
suite = "extrapolate"
out = "losses"
steps = [15]
lengths = [16, 32]
"#;

/// The samples of every evaluation of a run, by folder.
fn all_samples(w: &Workspace, run: &str) -> Vec<(String, String)> {
    let names = w.list(&format!("{run}/eval")).into_iter().filter(|name| name != "index.json");
    names.map(|name| (name.clone(), w.read(&format!("{run}/eval/{name}/samples.jsonl")))).collect()
}

/// An evaluation of the average during training gives what `eval --weights ema` gives of the checkpoint.
#[test]
fn the_average_is_evaluated_in_the_loop_as_it_is_afterwards() {
    let w = Workspace::new();
    let table = "[[train.evaluate]]\nsuite = \"extrapolate\"\nout = \"average\"\nsteps = [40]\nlengths = [16, 32]\n";
    w.write("ema.toml", &format!("{}\n{table}weights = \"ema\"\n", crate::support::CONFIG));
    let without = w.fail(&["train", "--config", "ema.toml"]);
    assert!(
        without.contains("train.evaluate.0.weights is \"ema\" in a run that keeps no"),
        "{without}"
    );
    let run = ["train", "--config", "ema.toml", "--set", "train.ema=0.9", "--set", "run.name=ema"];
    w.succeed(&run);
    let eval = ["eval", "extrapolate", "--run", "runs/ema", "--lengths", "16,32", "--out"];
    w.succeed(&[&eval[..], &["after", "--weights", "ema"]].concat());
    w.succeed(&[&eval[..], &["model"]].concat());
    let results = |name: &str| -> serde_json::Value {
        let text = w.read(&format!("runs/ema/eval/{name}/results.json"));
        serde_json::from_str(&text).unwrap()
    };
    let [inside, after, model] = ["average-step-40", "after", "model"].map(results);
    assert_eq!(inside["headline"], after["headline"]);
    assert_eq!(inside["model_changes"], after["model_changes"]);
    assert_ne!(inside["headline"], model["headline"]);
}

#[test]
fn evaluations_during_training_change_nothing_and_survive_a_resume() {
    let w = Workspace::new();
    w.write("loop.toml", &format!("{}{IN_THE_LOOP}", crate::support::CONFIG));
    w.train("plain", &[]);
    let log = w.run(&["train", "--config", "loop.toml", "--set", "run.name=evaluated"]).stderr;
    let log = String::from_utf8(log).unwrap();
    assert!(log.contains("step 20: passkey: accuracy "), "{log}");
    assert_eq!(w.metrics("runs/evaluated"), w.metrics("runs/plain"));
    let checkpoint = "checkpoints/step-40/weights.safetensors";
    let weights = |run: &str| std::fs::read(w.path(&format!("runs/{run}/{checkpoint}"))).unwrap();
    assert_eq!(weights("evaluated"), weights("plain"));
    let folders = ["losses-step-15", "passkey-step-20", "passkey-step-40"];
    let whole = all_samples(&w, "runs/evaluated");
    assert_eq!(whole.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), folders);
    let index: serde_json::Value =
        serde_json::from_str(&w.read("runs/evaluated/eval/index.json")).unwrap();
    assert_eq!(index[1]["checkpoint_step"], 20);

    // As if killed while step 40 was evaluated, after its checkpoint.
    let last = "runs/evaluated/eval/passkey-step-40";
    let first = whole[2].1.lines().next().unwrap().to_owned() + "\n";
    w.write(&format!("{last}/samples.jsonl"), &first);
    std::fs::remove_file(w.path(&format!("{last}/results.json"))).unwrap();
    w.succeed(&["train", "--resume", "runs/evaluated"]);
    assert_eq!(all_samples(&w, "runs/evaluated"), whole);
    assert!(w.path(&format!("{last}/results.json")).exists());

    // As if killed in step 38: what is trained again is evaluated again.
    std::fs::remove_file(w.path("runs/evaluated/finished.json")).unwrap();
    std::fs::remove_dir_all(w.path("runs/evaluated/checkpoints/step-40")).unwrap();
    w.write(&format!("{last}/samples.jsonl"), "of another training\n");
    let output = w.run(&["train", "--resume", "runs/evaluated"]);
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && log.contains("passkey-step-40 is discarded"), "{log}");
    assert_eq!(all_samples(&w, "runs/evaluated"), whole);
    assert_eq!(w.metrics("runs/evaluated"), w.metrics("runs/plain"));
}

#[test]
fn evaluations_during_training_are_checked_before_it_starts() {
    let w = Workspace::new();
    let error = |table: &str| {
        let text = format!("{}\n[[train.evaluate]]\n{table}", crate::support::CONFIG);
        w.write("loop.toml", &text);
        let error = w.fail(&["train", "--config", "loop.toml"]);
        assert!(!w.path("runs").exists(), "a run that cannot start leaves nothing");
        error
    };
    let suite = "suite = \"passkey\"\n";
    insta::assert_snapshot!(
        "evaluation_in_the_loop_of_no_suite",
        error("suite = \"pass\"\nevery = 5")
    );
    insta::assert_snapshot!(
        "evaluation_in_the_loop_with_an_unknown_option",
        error(&format!("{suite}every = 5\nlenghts = [300]"))
    );
    insta::assert_snapshot!("evaluation_in_the_loop_that_is_never_due", error(suite));
    insta::assert_snapshot!(
        "evaluation_in_the_loop_after_the_last_step",
        error(&format!("{suite}steps = [10, 41]"))
    );
    insta::assert_snapshot!(
        "evaluation_in_the_loop_shorter_than_its_prompt",
        error(&format!("{suite}every = 5\nlengths = [100]"))
    );
}

#[test]
fn evaluations_after_training_are_checked_before_it_starts() {
    let w = Workspace::new();
    for (table, reason) in [
        ("suite = \"passkey\"\nlengths = [100]", "eval.1: passkey: length 100 is too short"),
        ("suite = \"extrapolate\"\nout = \"absent\"\ntext = [\"absent.txt\"]", "absent.txt"),
    ] {
        let good = "[[eval]]\nsuite = \"extrapolate\"\nlengths = [16, 32]";
        w.write("after.toml", &format!("{}\n{good}\n[[eval]]\n{table}\n", crate::support::CONFIG));
        let error = w.fail(&["train", "--config", "after.toml"]);
        assert!(error.contains(reason), "{error}");
        assert!(!w.path("runs").exists(), "a run that cannot start leaves nothing");
    }
}

#[test]
fn suites_are_listed_without_a_run() {
    let w = Workspace::new();
    let list = w.succeed(&["eval", "list"]);
    assert_eq!(list.lines().count(), 16, "{list}");
    assert!(list.contains("\nperplexity       Word and byte perplexity"), "{list}");
    let json: serde_json::Value =
        serde_json::from_str(&w.succeed(&["eval", "list", "--json"])).unwrap();
    assert!(json["word-problem"].as_str().unwrap().starts_with("The word problem"));
}

#[test]
fn a_preset_runs_its_suites_and_writes_one_summary() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    let all = ["eval", "all", "--preset", "small", "--run", "runs/tiny"];
    let text = w.succeed(&all);
    let summary = |w: &Workspace| -> serde_json::Value {
        serde_json::from_str(&w.read("runs/tiny/eval/summary-small.json")).unwrap()
    };
    let suites = summary(&w)["suites"].as_array().unwrap().clone();
    assert_eq!(suites.len(), 9, "{text}");
    for suite in &suites {
        assert!(suite["error"].is_null() && suite["samples"].as_u64().unwrap() > 0, "{suite}");
        assert!(text.contains(suite["suite"].as_str().unwrap()), "{text}");
        let folder = suite["folder"].as_str().unwrap();
        assert!(w.path(&format!("runs/tiny/eval/{folder}/results.json")).exists());
    }
    // Again, it only reads what is there.
    assert_eq!(w.succeed(&all), text);

    // A suite that cannot run does not keep the others from running.
    let edited = w.read("runs/tiny/eval/small-mqrar/settings.json").replace("768", "512");
    w.write("runs/tiny/eval/small-mqrar/settings.json", &edited);
    let error = w.fail(&all);
    assert!(error.contains("1 of 9 suites did not run"), "{error}");
    let suites = summary(&w)["suites"].as_array().unwrap().clone();
    let failed: Vec<_> = suites.iter().filter(|suite| !suite["error"].is_null()).collect();
    assert!(failed.len() == 1 && failed[0]["suite"] == "mqrar", "{suites:?}");
    assert!(w.fail(&[&all[..], &["--out", "x"]].concat()).contains("--out is given beside all"));
}

/// Sends Ctrl-C to a child, and returns what it left and how long it took to end.
#[cfg(unix)]
fn interrupt(child: Child) -> (Output, Duration) {
    let (pid, sent) = (child.id().to_string(), Instant::now());
    assert!(Command::new("kill").args(["-s", "INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    (output, sent.elapsed())
}

/// In the middle of a batch that takes minutes.
#[test]
#[cfg(unix)]
fn ctrl_c_ends_an_evaluation_at_once() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    let more = ["--lengths", "100000", "--trials", "4", "--batch-tokens", "1M"];
    let mut command = w.command(&passkey(&more));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let samples = w.path("runs/tiny/eval/passkey/samples.jsonl");
    let lines = || std::fs::read_to_string(&samples).map_or(0, |text| text.lines().count());
    wait_until("the first length", || lines() == 4);
    let (output, time) = interrupt(child);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(time < Duration::from_secs(2), "it took {time:?}");
    assert!(stderr.contains("stopped: 4 of 8 samples are done"), "{stderr}");
    assert!(stderr.contains("hint: run the same command again to go on"), "{stderr}");
    assert_eq!(lines(), 4);
    assert!(!w.path("runs/tiny/eval/passkey/results.json").exists());
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_generation_at_once() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    let args =
        ["generate", "--run", "runs/tiny", "--max-tokens", "1000000", "--prompt-file", "long"];
    w.write("long", &"once upon a time ".repeat(3500));
    let mut command = w.command(&args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The prompt, which fits into the pipe, is written before the prefill, which takes long.
    let mut first = [0; 4];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    let (output, time) = interrupt(child);
    assert!(!output.status.success());
    assert!(time < Duration::from_secs(2), "it took {time:?}");
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

/// `[[eval]]` and a sweep's evaluations give, with `weights = "ema"`, what `eval --weights ema` gives.
#[test]
fn a_run_on_generated_examples_is_told_which_suites_need_text() {
    let w = Workspace::new();
    let sources = "data.sources=[{ kind = \"niah\" }, { kind = \"multi-needle\", needles = [2] }]";
    let sizes = ["--set", "data.seq_len=800", "--set", "train.batch_tokens=1600"];
    let short = ["--set", "train.tokens=3200", "--set", "data.validation_tokens=1600"];
    let train = ["train", "--config", "tiny.toml", "--set", sources];
    let text = w.succeed(&[&train[..], &sizes, &short].concat());
    assert!(text.contains(" eval multi-needle --run runs/tiny\n"), "{text}");
    assert!(text.contains(" eval niah --run runs/tiny --text FILES\n"), "{text}");
    let niah = ["eval", "niah", "--run", "runs/tiny", "--lengths", "500", "--trials", "1"];
    let error = w.fail(&niah);
    assert!(error.contains("trained on generated examples, so it has no held-out text"), "{error}");
    w.succeed(&[&niah[..], &["--text", "corpus"]].concat());
}

#[test]
fn the_average_is_evaluated_after_training_and_in_sweeps() {
    let w = Workspace::new();
    let suite = "[[eval]]\nsuite = \"extrapolate\"\nlengths = [16, 32]\n";
    let tables = format!("{suite}out = \"model\"\n{suite}out = \"average\"\nweights = \"ema\"\n");
    w.write("ema.toml", &format!("{}\n{tables}", crate::support::CONFIG));
    let without = w.fail(&["train", "--config", "ema.toml"]);
    assert!(without.contains("eval.1.weights is \"ema\" in a run that keeps no"), "{without}");
    let run = ["train", "--config", "ema.toml", "--set", "train.ema=0.9", "--set", "run.name=ema"];
    let reports = w.succeed(&run);
    assert_eq!(reports.matches(", weights=ema").count(), 1, "{reports}");
    let eval = ["eval", "extrapolate", "--run", "runs/ema", "--lengths", "16,32", "--out"];
    w.succeed(&[&eval[..], &["after", "--weights", "ema"]].concat());
    let results = |path: &str| -> serde_json::Value {
        serde_json::from_str(&w.read(&format!("runs/{path}/results.json"))).unwrap()
    };
    let [average, after, model] =
        ["average", "after", "model"].map(|name| results(&format!("ema/eval/{name}")));
    assert_eq!(average["headline"], after["headline"]);
    assert_eq!(average["model_changes"], serde_json::json!(["weights=ema"]));
    assert_ne!(average["headline"], model["headline"]);

    let sweep = |set: &str| {
        format!("base = \"tiny.toml\"\n{set}\n{suite}out = \"average\"\nweights = \"ema\"\n")
    };
    w.write("averages.toml", &sweep(""));
    let without = w.fail(&["sweep", "averages.toml", "--dry-run"]);
    assert!(without.contains("the sweep: eval.0.weights is \"ema\" in a run that"), "{without}");
    w.write("averages.toml", &sweep("set = { \"train.ema\" = 0.9 }"));
    let table = w.succeed(&["sweep", "averages.toml"]);
    assert!(table.contains("average: of the averaged weights"), "{table}");
    assert_eq!(results("averages/seed0/eval/average")["headline"], after["headline"]);
}
