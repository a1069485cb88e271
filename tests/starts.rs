//! Runs that start from weights, and trained models with other weights or settings.

use crate::support::Workspace;

fn json(w: &Workspace, path: &str) -> serde_json::Value {
    serde_json::from_str(&w.read(path)).unwrap()
}

const EVAL: [&str; 8] =
    ["eval", "extrapolate", "--run", "runs/old", "--lengths", "32", "--sequences", "4"];

fn eval(w: &Workspace, more: &[&str]) -> String {
    w.succeed(&[&EVAL[..], more].concat())
}

#[test]
fn a_run_starts_from_another_ones_weights_and_its_average_is_evaluated() {
    let w = Workspace::new();
    w.train("old", &["train.ema=0.9"]);
    let start = ["train", "--from", "runs/old", "--config", "tiny.toml", "--set", "run.name=new"];
    let fox = ["--set", "model.attention={ kind = \"fox\", rope = true }"];
    let output = w.run(&[&start[..], &fox[..]].concat());
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
    assert!(log.contains("starting from runs/old/checkpoints/step-40"), "{log}");
    assert!(log.contains("new: blocks.*.attention.forget_gate.weight = 0"), "{log}");
    let origin = json(&w, "runs/new/started_from.json");
    assert_eq!((origin["run"].as_str(), origin["step"].as_u64()), (Some("old"), Some(40)));

    let plain = eval(&w, &[]);
    let average = eval(&w, &["--weights", "ema", "--out", "average"]);
    assert!(average.contains("run old, step 40, weights=ema,") && !plain.contains("weights="));
    let loss = |name: &str| {
        json(&w, &format!("runs/old/eval/{name}/results.json"))["headline"]["loss@32"].as_f64()
    };
    assert!(loss("average").unwrap() != loss("extrapolate").unwrap());
    let set = ["--set", "model.attention.theta=50", "--out", "theta"];
    eval(&w, &set);
    assert!(loss("theta").unwrap() != loss("extrapolate").unwrap());
    let results = json(&w, "runs/old/eval/theta/results.json");
    assert_eq!(results["model_changes"][0], "model.attention.theta=50.0");
    // A softcap changes the logits and no weight.
    eval(&w, &["--set", "model.logit_softcap=0.5", "--out", "capped"]);
    assert!(loss("capped").unwrap() > loss("extrapolate").unwrap());
    let yarn = "model.attention.scaling={ kind = \"yarn\", factor = 2, original_len = 32 }";
    eval(&w, &["--set", yarn, "--out", "yarn"]);
    assert!(loss("yarn").unwrap() != loss("extrapolate").unwrap());
    // The same folder does not mix both.
    let mixed = w.fail(&[&EVAL[..], &["--weights", "ema"]].concat());
    assert!(mixed.contains("model_changes was null, now it is [\"weights=ema\"]"), "{mixed}");
    let text =
        w.succeed(&["generate", "--run", "runs/old", "--weights", "ema", "--prompt", "The "]);
    assert!(text.starts_with("The "), "{text}");
}

#[test]
fn what_a_trained_model_cannot_have_is_refused() {
    let w = Workspace::new();
    w.train("old", &["train.tokens=640"]);
    let error = |more: &[&str]| w.fail(&[&EVAL[..], more].concat());
    insta::assert_snapshot!(error(&["--weights", "ema"]), @r"
    error: runs/old/checkpoints/step-5 has no average of the weights: the run was trained without train.ema
      hint: leave out --weights, or train with --set train.ema=0.999
    ");
    insta::assert_snapshot!(error(&["--set", "model.attention.sinks=true"]), @r"
    error: --set model.attention.sinks=true changes the model's weights (blocks.0.attention.sinks); allowed with a trained model: keys of [model] that leave them as they are
      hint: train a model with this setting, or start one from these weights: longwall train --from
    ");
    insta::assert_snapshot!(error(&["--set", "train.lr=1"]), @r"
    error: --set changes train.lr; allowed with a trained model: keys of [model] that leave its weights as they are
      hint: leave it out; for example model.attention.theta, model.attention.scaling and model.window may change
    ");
    let from = ["train", "--config", "tiny.toml", "--from"];
    insta::assert_snapshot!(w.fail(&[&from[..], &["runs/none"]].concat()), @r"
    error: runs/none is no checkpoint: there is no state.json in it
      hint: give the folder of a checkpoint, for example runs/NAME/checkpoints/step-1000, or of a run
    ");
    let both = w.run(&[&from[..], &["runs/old", "--resume", "runs/old"]].concat());
    assert_eq!(both.status.code(), Some(2));
}

/// A trained model has the window of its checkpoint's last step, whatever uses it.
#[test]
fn a_checkpoint_is_used_with_the_window_it_was_trained_with() {
    let w = Workspace::new();
    let stages = "train.stages=[{ from = 0, window = 3 }, { from = 0.5, window = \"none\" }]";
    let in_the_loop = "train.evaluate=[{ suite = \"extrapolate\", out = \"loop\", steps = [20, 40], \
                       lengths = [32], sequences = 4 }]";
    let sets =
        [stages, in_the_loop, "model.arch=llama", "model.window=9", "train.checkpoint.keep_last=9"];
    w.train("old", &sets);
    let results = |name: &str| json(&w, &format!("runs/old/eval/{name}/results.json"));
    let at_20 = ["--checkpoint", "20", "--out"];
    eval(&w, &[&at_20[..], &["narrow"]].concat());
    eval(&w, &[&at_20[..], &["opened", "--set", "model.window=none"]].concat());
    eval(&w, &["--out", "whole"]);
    for (name, inside) in [("narrow", "loop-step-20"), ("whole", "loop-step-40")] {
        assert_eq!(results(name)["headline"], results(inside)["headline"], "{name}");
        assert!(results(name)["model_changes"].is_null(), "{name}");
    }
    assert_ne!(results("opened")["headline"], results("narrow")["headline"]);
    assert_eq!(results("opened")["model_changes"], serde_json::json!(["model.window=(unset)"]));

    // A model without a window can be expressed in other formats.
    let export = |step: &'static str, hf: &'static str| {
        ["export", "--run", "runs/old", "--checkpoint", step, "--hf", hf]
    };
    assert!(w.fail(&export("20", "hf/narrow")).contains("model.window"));
    w.succeed(&export("40", "hf/whole"));
    let prompt = ["--prompt", "The ", "--max-tokens", "12", "--temperature", "0"];
    let text = |run: &[&str]| w.succeed(&[&["generate"], run, &prompt[..]].concat());
    w.succeed(&["import", "--hf", "hf/whole", "--out", "runs/back"]);
    assert_eq!(text(&["--run", "runs/old"]), text(&["--run", "runs/back"]));

    let start = ["train", "--from", "runs/old/checkpoints/step-20", "--config", "tiny.toml"];
    let sets = ["--set", "run.name=new", "--set", "model.arch=llama", "--set", "train.tokens=256"];
    let output = w.run(&[&start[..], &sets].concat());
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
    assert!(log.contains("model.window was 3 in the source, and is (unset) here"), "{log}");

    let info = w.succeed(&["info", "--run", "runs/old"]);
    assert!(info.contains("tokens, with the last stage's window (none)"), "{info}");
    assert!(info.contains("rows of 32, window 3, after 0 tokens: "), "{info}");
    let info: serde_json::Value =
        serde_json::from_str(&w.succeed(&["info", "--run", "runs/old", "--json"])).unwrap();
    let costs = |key: &str| [0, 1].map(|at| info["stages"][at][key].as_f64().unwrap());
    let [narrow, whole] = costs("train_flops_per_token");
    assert!(narrow < whole && info["train_flops_per_token"] == whole, "{info}");
    let total: f64 = costs("train_flops_per_token").map(|flops| 2560.0 * flops).iter().sum();
    assert_eq!(info["train_flops"].as_f64(), Some(total));
}
