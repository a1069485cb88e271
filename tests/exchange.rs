//! Models in Hugging Face's format, and metrics for other programs.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::Workspace;

const GPT2: [&str; 3] =
    ["model.positions=learned", "model.attention.position=none", "train.tokens=640"];
const LLAMA: [&str; 2] = ["model.arch=llama", "train.tokens=640"];
const FOX: [&str; 4] = [
    "model.arch=llama",
    "model.attention={ kind = \"fox\" }",
    "model.output_gate=true",
    "train.tokens=640",
];
const RWKV7: [&str; 3] =
    ["model.arch=rwkv7", "model.attention={ kind = \"rwkv7\" }", "train.tokens=640"];

#[test]
fn an_exported_run_generates_the_same_text_when_it_is_imported() {
    let w = Workspace::new();
    let cases = [
        ("gpt2", &GPT2[..]),
        ("llama", &LLAMA[..]),
        ("forgetting_transformer", &FOX[..]),
        ("rwkv7", &RWKV7[..]),
    ];
    for (layout, sets) in cases {
        w.train(layout, sets);
        let (run, hf, back) =
            (format!("runs/{layout}"), format!("hf/{layout}"), format!("runs/{layout}-back"));
        w.succeed(&["export", "--run", &run, "--hf", &hf]);
        let files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
        assert_eq!(w.list(&hf), files);
        let config: serde_json::Value =
            serde_json::from_str(&w.read(&format!("{hf}/config.json"))).unwrap();
        assert_eq!(
            (config["model_type"].as_str(), config["eos_token_id"].as_u64()),
            (Some(layout), Some(256))
        );
        w.succeed(&["import", "--hf", &hf, "--out", &back]);
        let text = |run: &str| {
            let options = ["--prompt", "The cat", "--max-tokens", "20", "--temperature", "0"];
            w.succeed(&[&["generate", "--run", run][..], &options[..]].concat())
        };
        assert_eq!(text(&back), text(&run));
        // An imported model is the start of another run.
        let tokenizer = format!("tokenizer={{ kind = \"file\", path = \"{hf}/tokenizer.json\" }}");
        let name = format!("run.name={layout}-tuned");
        let mut train = vec!["train", "--config", "tiny.toml", "--from", &back];
        train.extend(["--set", &name, "--set", &tokenizer]);
        // GPT-2's layout has biases.
        let bias = if layout == "gpt2" { "model.bias=true" } else { "model.bias=false" };
        for set in sets.iter().chain([&bias]) {
            train.extend(["--set", set]);
        }
        w.succeed(&train);
        let resumed = w.fail(&["train", "--resume", &back]);
        assert!(resumed.contains("has weights only, which cannot be resumed"), "{resumed}");
    }
}

#[test]
fn what_a_layout_cannot_express_is_refused_by_name() {
    let w = Workspace::new();
    let sets = [
        "model.attention={ kind = \"fox\" }",
        "model.qk_norm=true",
        "model.logit_softcap=30",
        "train.tokens=640",
    ];
    w.train("fox", &sets);
    let export = ["export", "--run", "runs/fox", "--hf", "hf", "--layout", "llama"];
    let error = w.fail(&export);
    for key in [
        "model.qk_norm is set",
        "model.logit_softcap is set; allowed: none in the Llama layout",
        "model.attention is { bias_init = 0.0, kind = \"fox\"",
        "model.mlp is \"gelu\"",
        "model.norm is \"layer-norm\"",
    ] {
        assert!(error.contains(key), "{key}: {error}");
    }
    // Without --layout, only the layouts of its kind are tried.
    let error = w.fail(&["export", "--run", "runs/fox", "--hf", "hf"]);
    assert!(error.contains("in the layout of forgetting_transformer:"), "{error}");
    assert!(error.contains("model.mlp is \"gelu\"; allowed: \"swiglu\" in the"), "{error}");
    assert!(!error.contains("GPT-2") && !error.contains("model.qk_norm"), "{error}");
    assert!(!w.path("hf").exists() && !w.path("hf.tmp").exists());
    let missing = w.fail(&["import", "--hf", "hf", "--out", "runs/x"]);
    assert!(missing.contains("cannot read hf/config.json"), "{missing}");
    assert_eq!(w.run(&["export", "--hf", "hf", "--layout", "bert"]).status.code(), Some(2));
}

#[test]
fn metrics_are_written_as_csv_and_as_events() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=1280"]);
    w.succeed(&["log", "export", "runs/tiny", "--csv", "tiny.csv", "--tensorboard", "events"]);
    let csv = w.read("tiny.csv");
    assert_eq!(csv.lines().count(), 11);
    assert!(
        csv.starts_with("step,tokens,train/loss,") && csv.contains(",validation/loss"),
        "{csv}"
    );
    assert_eq!(w.list("events").len(), 1);
    let nothing = w.fail(&["log", "export", "runs/tiny"]);
    assert!(nothing.contains("add --csv FILE, --tensorboard DIR, or both"), "{nothing}");
    let no_run = w.fail(&["log", "export", "runs/none", "--csv", "a.csv"]);
    assert!(no_run.contains("give the folder of a run that has trained"), "{no_run}");
}

#[test]
fn uploads_have_the_scalars_of_the_csv_and_send_no_step_twice() {
    let w = Workspace::new();
    let sets = ["train.tokens=1280", "train.norms.every=5", "train.ema=0.9"];
    w.train("tiny", &sets);
    w.succeed(&["log", "export", "runs/tiny", "--csv", "tiny.csv"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/wandb_upload.py");
    let upload = |options: &[&str]| {
        let mut command = Command::new("python3");
        command.arg("-B").arg(&script).args(options).current_dir(w.path("."));
        command.output().expect("Python 3.11 or newer")
    };
    let sent = |options: &[&str]| -> Vec<Value> {
        let output = upload(&[options, &["--dry-run"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let lines = sent(&["runs/tiny", "--name", "a b/c"]);
    assert_eq!((&lines[0]["id"], &lines[0]["project"]), (&"a-b-c".into(), &"longwall".into()));
    assert_eq!(lines[0]["config"]["model"]["width"], 16);

    let csv = w.read("tiny.csv");
    let mut rows = csv.lines().map(|row| row.split(',').collect::<Vec<_>>());
    let names = rows.next().unwrap();
    assert!(
        names.contains(&"layers/embedding/update_ratio") && names.contains(&"validation/ema_loss")
    );
    assert_eq!(lines.len(), 11);
    for (line, row) in lines[1..].iter().zip(rows) {
        let expected: BTreeMap<&str, f64> = names
            .iter()
            .zip(row)
            .filter(|(_, cell)| !cell.is_empty())
            .map(|(name, cell)| (*name, cell.parse().unwrap()))
            .collect();
        let found = line.as_object().unwrap().iter();
        let found: BTreeMap<&str, f64> =
            found.map(|(name, value)| (name.as_str(), value.as_f64().unwrap())).collect();
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        // The CSV has floats as f64, the metrics as the shortest text of f32.
        for (name, value) in &found {
            assert!((value - expected[name]).abs() <= 1e-6 * value.abs(), "{name}: {line}");
        }
    }

    w.write("runs/tiny/uploads.json", r#"{"wandb/longwall/tiny": 7}"#);
    let steps = |lines: &[Value]| -> Vec<u64> {
        lines[1..].iter().map(|line| line["step"].as_u64().unwrap()).collect()
    };
    assert_eq!(steps(&sent(&["runs/tiny"])), [8, 9, 10]);
    assert_eq!(sent(&["runs/tiny", "--to", "trackio"]).len(), 11, "another destination");
    std::fs::remove_file(w.path("runs/tiny/finished.json")).unwrap();
    assert_eq!(steps(&sent(&["runs/tiny"])), [8, 9], "the last step may get a validation");

    let output = upload(&["runs/none", "--dry-run"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("give the folder of a run"), "{error}");
}
