//! A model with layers of several attention kinds, through every command that reads its configuration.

use crate::support::{CONFIG, Workspace};

/// A folder with `hybrid.toml`: two layers with a window, one with a state, in five layers.
fn workspace() -> Workspace {
    let w = Workspace::new();
    let uniform = "layers = 2\nwidth = 16\nheads = 2\n\n[model.attention]\nkind = \"rope\"\n";
    assert!(CONFIG.contains(uniform));
    let hybrid = "layers = 5\nwidth = 16\nheads = 2\npattern = [\"local\", \"local\", \"rwkv7\"]\n\n\
                  [model.kinds.local]\nkind = \"rope\"\nwindow = 8\n";
    w.write("hybrid.toml", &CONFIG.replace(uniform, hybrid).replace("\"tiny\"", "\"hybrid\""));
    w
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_hybrid_is_trained_evaluated_and_continued() {
    let w = workspace();
    w.succeed(&["train", "--config", "hybrid.toml", "--set", "train.tokens=1280"]);
    let losses: Vec<f64> = w
        .read("runs/hybrid/metrics.jsonl")
        .lines()
        .filter_map(|line| json(line)["loss"].as_f64())
        .collect();
    assert!(losses[9] < losses[0] - 0.5, "{losses:?}");
    w.succeed(&["train", "--resume", "runs/hybrid", "--set", "train.tokens=1536"]);
    let text = w.succeed(&["generate", "--run", "runs/hybrid", "--prompt", "The cat"]);
    assert!(!text.is_empty());
    w.succeed(&["eval", "extrapolate", "--run", "runs/hybrid", "--lengths", "16,32"]);

    let resolved = w.read("runs/hybrid/config.toml");
    assert!(resolved.contains("[model.kinds.rwkv7]"), "{resolved}");
    let error =
        w.fail(&["train", "--resume", "runs/hybrid", "--set", "model.kinds.local.window=4"]);
    assert!(error.contains("model.kinds.local.window was 8, and is 4 now"), "{error}");
}

#[test]
fn info_lists_the_layers_of_each_kind() {
    let w = workspace();
    let info = w.succeed(&["info", "--config", "hybrid.toml"]);
    for part in ["local (rope)", "rwkv7"] {
        assert!(info.contains(part), "{info}");
    }
    let info = json(&w.succeed(&["info", "--config", "hybrid.toml", "--json"]));
    assert_eq!(info["attention"], "local (rope) ×4, rwkv7 ×1");
    let layers = info["layers"].as_array().unwrap();
    assert_eq!(layers[0]["layers"], serde_json::json!([0, 1, 3, 4]));
    assert_eq!(layers[1]["layers"], serde_json::json!([2]));
    assert_eq!((&layers[0]["window"], &layers[1]["window"]), (&8.into(), &serde_json::Value::Null));
    let sum = |key: &str| layers.iter().map(|group| group[key].as_f64().unwrap()).sum::<f64>();
    for key in ["attention_flops_per_token", "state_bytes_per_sequence"] {
        assert_eq!(Some(sum(key)), info[key].as_f64(), "{key}");
    }
    assert_eq!(Some(sum("attention_parameters")), info["parameters"]["attention"].as_f64());
}

#[test]
fn a_hybrid_is_timed() {
    let w = workspace();
    let results = json(&w.succeed(&[
        "bench",
        "train",
        "--config",
        "hybrid.toml",
        "--steps",
        "2",
        "--warmup",
        "1",
        "--json",
    ]));
    assert_eq!(results["attention"], "local (rope) ×4, rwkv7 ×1");
}

#[test]
fn a_sweep_compares_patterns() {
    let w = workspace();
    let sweep = r#"
        base = "hybrid.toml"
        set = { "train.tokens" = 256, "model.kinds" = {} }
        [[axes]]
        key = "model.pattern"
        values = [["rope"], ["wall", "wall", "rope"]]
        names = ["uniform", "hybrid"]
        "#;
    w.write("patterns.toml", sweep);
    let table = w.succeed(&["sweep", "patterns.toml"]);
    assert!(table.contains("uniform") && table.contains("hybrid"), "{table}");
    assert_eq!(w.read("runs/patterns/results.csv").lines().count(), 3);
}
