//! The whole pipeline, from text to plots.

use crate::support::Workspace;

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn prepare_train_generate_evaluate_and_plot() {
    let w = Workspace::new();
    w.succeed(&[
        "prepare",
        "corpus",
        "--out",
        "shards",
        "--name",
        "stories",
        "--tokenizer",
        "bytes",
        "--validation-fraction",
        "0.2",
    ]);
    assert_eq!(
        w.list("shards"),
        ["manifest.json", "stories_train_000001.bin", "stories_val_000000.bin"]
    );

    let shards =
        "data.sources.0={ kind = \"shards\", train = [\"shards\"], validation = [\"shards\"] }";
    w.train("shards", &[shards]);
    let metrics = w.read("runs/shards/metrics.jsonl");
    let losses: Vec<f64> = metrics.lines().filter_map(|line| json(line)["loss"].as_f64()).collect();
    assert_eq!(losses.len(), 40);
    assert!(losses[39] < losses[0] - 1.0, "the loss fell from {} to {}", losses[0], losses[39]);
    let validations: Vec<f64> =
        metrics.lines().filter_map(|line| json(line)["validation_loss"].as_f64()).collect();
    assert_eq!(validations.len(), 4);
    assert!(validations[3] < validations[0]);
    for file in ["config.toml", "loss.svg", "checkpoints/step-40/weights.safetensors"] {
        assert!(w.path("runs/shards").join(file).is_file(), "{file}");
    }

    let generate =
        ["generate", "--run", "runs/shards", "--prompt", "The cat", "--max-tokens", "20"];
    let text = w.succeed(&generate);
    assert!(text.starts_with("The cat") && text.trim_end().len() > 7, "{text}");
    assert_eq!(text, w.succeed(&generate), "the same seed gives the same text");

    let report = json(&w.succeed(&[
        "eval",
        "extrapolate",
        "--run",
        "runs/shards",
        "--lengths",
        "16,32,64",
        "--json",
    ]));
    assert_eq!(report["suite"], "extrapolate");
    assert!(w.path("runs/shards/eval/extrapolate/loss_by_length.svg").is_file());
    let table = w.succeed(&[
        "eval",
        "passkey",
        "--run",
        "runs/shards",
        "--lengths",
        "500",
        "--trials",
        "3",
    ]);
    assert!(table.contains("500"), "{table}");
    assert_eq!(w.read("runs/shards/eval/passkey/samples.jsonl").lines().count(), 3);
    w.succeed(&[
        "eval",
        "niah",
        "--run",
        "runs/shards",
        "--lengths",
        "500",
        "--depths",
        "2",
        "--haystack",
        "noise",
    ]);
    assert!(w.path("runs/shards/eval/niah/heatmap.svg").is_file());
    let table = w.succeed(&[
        "eval",
        "fflm",
        "--run",
        "runs/shards",
        "--lengths",
        "32,64",
        "--sequences",
        "3",
        "--sparse-sequences",
        "2",
        "--dense-sequences",
        "1",
    ]);
    assert!(table.contains("error_sparse"), "{table}");
    assert_eq!(w.read("runs/shards/eval/fflm/samples.jsonl").lines().count(), 12);

    w.succeed(&["plot", "runs/shards", "--out", "both.png", "--x", "steps"]);
    assert_eq!(&std::fs::read(w.path("both.png")).unwrap()[1..4], b"PNG");

    w.succeed(&["plot", "runs/shards", "--y", "train/grad_norm", "--out", "norm.svg"]);
    assert!(w.read("norm.svg").contains("train/grad_norm"));
    let unknown = w.fail(&["plot", "runs/shards", "--y", "gradient_noise/scale"]);
    assert!(
        unknown.contains("has no scalar gradient_noise/scale; it has: train/loss"),
        "{unknown}"
    );
    assert!(unknown.contains("hint: name one of these; gradient_noise needs"), "{unknown}");

    // Two runs in one plot.
    w.train("beside", &[shards, "model.attention={ kind = \"fox\" }"]);
    w.succeed(&["plot", "runs/shards", "runs/beside", "--out", "two.svg", "--max-loss", "4"]);
    let svg = w.read("two.svg");
    for run in ["shards", "beside"] {
        for loss in ["training", "validation"] {
            assert!(svg.contains(&format!("{run}: {loss}")), "{run}: {loss}");
        }
    }
}

#[test]
fn sparsity_is_measured_at_validations_and_for_every_head() {
    let w = Workspace::new();
    w.train("sparse", &["model.attention={ kind = \"tda\" }", "train.tokens=1280"]);
    let metrics = w.read("runs/sparse/metrics.jsonl");
    let validation = metrics.lines().map(json).find(|line| line["validation_loss"].is_number());
    let probe = validation.expect("a validation")["probe"].clone();
    for metric in ["nonzero_fraction", "nonzero_tile_fraction", "empty_row_fraction"] {
        assert!(probe[metric].as_f64().is_some_and(|x| (0.0..=1.0).contains(&x)), "{probe}");
    }
    let stats = ["eval", "attention-stats", "--run", "runs/sparse", "--lengths", "16,32"];
    let table = w.succeed(&stats);
    assert!(table.contains("nonzero_fraction by layer") && table.contains("1, view 1"), "{table}");
    // A header, then at two lengths for two layers three metrics of zeros and four of weights, of two views of two heads,
    // and the correlation of the views of two heads.
    let heads = w.read("runs/sparse/eval/attention-stats/heads.csv");
    assert_eq!(heads.lines().count(), 1 + ((3 + 4) * 2 * 2 + 2) * 2 * 2);
    let report = json(&w.succeed(&[&stats[..], &["--json"]].concat()));
    assert!(report["headline"]["nonzero_fraction@16"].is_number(), "{report}");

    w.train("state", &["model.attention={ kind = \"linear\" }", "train.tokens=256"]);
    let error = w.fail(&["eval", "attention-stats", "--run", "runs/state", "--tokens", "a b"]);
    assert!(error.contains("no layer of the model has weights of keys"), "{error}");
}

#[test]
fn a_trained_tokenizer_trains_a_model() {
    let w = Workspace::new();
    w.succeed(&["tokenizer", "train", "corpus", "--out", "bpe.json", "--vocab-size", "300"]);
    w.train("bpe", &["tokenizer={ kind = \"file\", path = \"bpe.json\" }", "train.tokens=256"]);
    let text = w.succeed(&["generate", "--run", "runs/bpe", "--max-tokens", "3"]);
    assert!(!text.is_empty());
}

#[test]
fn info_counts_what_training_makes() {
    let w = Workspace::new();
    for (name, multiple, padded) in [("plain", 1, 257), ("padded", 64, 320)] {
        let set = format!("model.vocab_multiple={multiple}");
        let info = w.succeed(&["info", "--config", "tiny.toml", "--json", "--set", &set]);
        let info = json(&info);
        w.train(name, &["train.tokens=128", &set]);
        let weights = format!("runs/{name}/checkpoints/step-1/weights.safetensors");
        let weights = std::fs::read(w.path(&weights)).unwrap();
        let header = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
        let elements = (weights.len() - 8 - header) / 4;
        assert_eq!(info["parameters_total"], elements);
        assert_eq!([&info["vocab_size"], &info["padded_vocab_size"]], [257, padded]);
        let bytes = |key: &str| info[key].as_f64().unwrap();
        assert!(bytes("train_memory_estimate_bytes") > bytes("train_memory_bytes"));
        // What is sampled is text again: no token is past the vocabulary.
        let run = format!("runs/{name}");
        w.succeed(&["generate", "--run", &run, "--max-tokens", "20", "--temperature", "3"]);
        w.succeed(&["train", "--resume", &run, "--set", "train.tokens=256"]);
    }
}
