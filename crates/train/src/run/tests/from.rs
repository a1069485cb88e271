//! Runs that start from the weights of another.

use super::*;
use crate::checkpoint::WeightsSelector;

fn start(sandbox: &Sandbox, from: &Path, sets: &[&str]) -> Result<Outcome, TrainError> {
    start_at(sandbox, from, WeightsSelector::Model, sets)
}

fn start_at(
    sandbox: &Sandbox,
    from: &Path,
    weights: WeightsSelector,
    sets: &[&str],
) -> Result<Outcome, TrainError> {
    let config = sandbox.config(&[&["run.name=new"], sets].concat());
    let source = Source::open(from, weights)?;
    let stop = StopFlag::new();
    run_from(Some(source), Precision::F32, &config, RunStart::New, stop, &mut SilentConsole)
}

fn first_loss(run_dir: &Path) -> f32 {
    let loss = |record| if let Record::Step(step) = record { step.loss } else { None };
    losses(run_dir).into_iter().find_map(loss).unwrap()
}

fn tensors(run_dir: &Path) -> longwall_model::weights::TensorMap {
    let checkpoint = Checkpoint::open(run_dir, CheckpointSelector::Latest).unwrap();
    read_tensors(&checkpoint.weights().unwrap()).unwrap()
}

/// A zero learning rate keeps the weights: those of the first checkpoint are those of the source.
#[test]
fn a_run_starts_from_the_weights_of_another_with_a_new_optimiser_and_length() {
    let sandbox = Sandbox::new();
    let old = run(&sandbox.config(&["train.ema=0.9"]), RunStart::New).unwrap().run_dir;
    let sets = ["train.lr=1e-30", "train.optimiser={ kind = \"lion\" }", "train.tokens=512"];
    let new = start(&sandbox, &old, &sets).unwrap().run_dir;
    assert_eq!(tensors(&new), tensors(&old));
    let origin = run_folder::origin(&new).unwrap().unwrap();
    assert_eq!((origin.run.as_str(), origin.step, origin.tokens), ("tiny", 12, 1536));
    assert_eq!(origin.taken, tensors(&old).len());
    assert!(origin.new.is_empty() && origin.left_out.is_empty() && origin.changed.is_empty());
    assert!(origin.checkpoint.ends_with("checkpoints/step-12"));

    // A checkpoint of the run, and its averaged weights.
    let force = ["run.name=average", "train.lr=1e-30"];
    let at = old.join("checkpoints/step-10");
    let average = start_at(&sandbox, &at, WeightsSelector::Ema, &force).unwrap().run_dir;
    let expected = Checkpoint::at(&at).unwrap().ema().unwrap().unwrap();
    assert_eq!(tensors(&average), read_tensors(&expected).unwrap());
}

#[test]
fn a_resume_goes_on_from_the_run_itself_and_before_its_first_checkpoint_from_its_source() {
    let sandbox = Sandbox::new();
    let old = run(&sandbox.config(&[]), RunStart::New).unwrap().run_dir;
    let whole = start(&sandbox, &old, &["run.name=whole"]).unwrap().run_dir;
    let config = sandbox.config(&["run.name=broken"]);
    let source = Some(Source::open(&old, WeightsSelector::Model).unwrap());
    let stop = StopFlag::new();
    let mut console = After { step: 6, action: || stop.raise() };
    let (f32, new) = (Precision::F32, RunStart::New);
    run_from(source, f32, &config, new, stop.clone(), &mut console).unwrap();
    let dir = config.run_dir();
    run(&config, RunStart::Resume(dir.clone())).unwrap();
    assert_eq!(weights(&dir), weights(&whole));
    assert_eq!(losses(&dir), losses(&whole));

    // As if killed before the first checkpoint.
    let restart = |dir: &Path| {
        fs::remove_file(dir.join("finished.json")).unwrap();
        fs::remove_dir_all(dir.join("checkpoints")).unwrap();
        run(&config, RunStart::Resume(dir.to_owned()))
    };
    restart(&dir).unwrap();
    assert_eq!(weights(&dir), weights(&whole));

    let longer = sandbox.config(&["train.tokens=1792", "train.schedule.kind=constant"]);
    run(&longer, RunStart::Resume(old.clone())).unwrap();
    let moved = old.join("checkpoints/step-12");
    fs::remove_dir_all(&moved).unwrap();
    fs::rename(old.join("checkpoints/step-14"), &moved).unwrap();
    let error = restart(&dir).unwrap_err().to_string();
    assert!(error.contains("step 12") || error.contains("not those that it started"), "{error}");
}

/// The first loss is that of the source's function on the first batch: of the same weights with the kind that they
/// were trained with.
#[test]
fn rope_becomes_fox_or_wall_with_open_gates_and_computes_the_same_at_the_start() {
    let sandbox = Sandbox::new();
    // Large weights: scores differ, so that positions matter.
    let wide = "model.init_std=0.3";
    let old = run(&sandbox.config(&[wide]), RunStart::New).unwrap().run_dir;
    let same = start(&sandbox, &old, &["run.name=same"]).unwrap().run_dir;
    let expected = first_loss(&same);
    for (name, kind) in [
        ("fox", "{ kind = \"fox\", rope = true }"),
        ("wall", "{ kind = \"wall\", rope = true }"),
        ("wall_key", "{ kind = \"wall\", rope = true, gate_source = \"key\" }"),
        ("wall_fox", "{ kind = \"wall\", rope = true, forget_gate = true }"),
    ] {
        let sets = [format!("model.attention={kind}"), format!("run.name={name}")];
        let new = start(&sandbox, &old, &[&sets[0], &sets[1]]).unwrap().run_dir;
        let origin = run_folder::origin(&new).unwrap().unwrap();
        assert!(origin.changed.is_empty() && !origin.new.is_empty(), "{name}: {origin:?}");
        let found = first_loss(&new);
        assert!((found - expected).abs() < 5e-4, "{name}: {found} and {expected}");
        let last = run_folder::finished(&new).unwrap().unwrap();
        assert!(last.loss.unwrap() < found, "{name} does not learn");
    }
    // Without the rotation it is another function, and the record says so.
    let sets = ["model.attention={ kind = \"fox\" }", "run.name=unrotated"];
    let new = start(&sandbox, &old, &sets).unwrap().run_dir;
    let origin = run_folder::origin(&new).unwrap().unwrap();
    assert_eq!(origin.changed, ["fox in place of rope"]);
    let other = first_loss(&new);
    assert!((other - expected).abs() > 0.01, "{other} and {expected}");
}

#[test]
fn a_run_goes_on_with_longer_rows_and_scaled_positions() {
    let sandbox = Sandbox::new();
    let old = run(&sandbox.config(&["model.init_std=0.3"]), RunStart::New).unwrap().run_dir;
    let yarn = "scaling={ kind = \"yarn\", factor = 2, original_len = 16 }";
    let scaled = [&format!("model.attention.{yarn}"), "data.seq_len=32", "run.name=scaled"];
    let new = start(&sandbox, &old, &scaled).unwrap().run_dir;
    let origin = run_folder::origin(&new).unwrap().unwrap();
    assert_eq!(origin.changed, ["rope with other settings"]);
    let last = run_folder::finished(&new).unwrap().unwrap();
    assert!(last.loss.unwrap() < first_loss(&new), "it does not learn");

    // A kind with the same scaling goes on with the same function.
    let same = start(&sandbox, &new, &[&scaled[..2], &["run.name=same"]].concat()).unwrap();
    let fox = "model.attention={ kind = \"fox\", rope = true, scaling = { kind = \"yarn\", factor = 2, original_len = 16 } }";
    let fox = start(&sandbox, &new, &[fox, "data.seq_len=32", "run.name=fox"]).unwrap().run_dir;
    let origin = run_folder::origin(&fox).unwrap().unwrap();
    assert!(origin.changed.is_empty(), "{origin:?}");
    let (found, expected) = (first_loss(&fox), first_loss(&same.run_dir));
    assert!((found - expected).abs() < 5e-4, "{found} and {expected}");
}

#[test]
fn weights_of_a_kind_that_the_model_no_longer_has_are_left_out_and_named() {
    let sandbox = Sandbox::new();
    let fox = sandbox.config(&["model.attention={ kind = \"fox\" }"]);
    let old = run(&fox, RunStart::New).unwrap().run_dir;
    let new = start(&sandbox, &old, &["model.attention={ kind = \"tra\", rope = false }"]);
    let origin = run_folder::origin(&new.unwrap().run_dir).unwrap().unwrap();
    let gate = ["bias", "weight"].map(|part| format!("blocks.*.attention.forget_gate.{part}"));
    assert_eq!(origin.left_out, gate);
    assert!(origin.new.iter().all(|line| line.ends_with("(initial values)")), "{origin:?}");
    assert_eq!(origin.changed, ["tra in place of fox"]);
}

#[test]
fn weights_that_do_not_fit_are_all_named() {
    let sandbox = Sandbox::new();
    let old = run(&sandbox.config(&[]), RunStart::New).unwrap().run_dir;
    let error = |sets: &[&str]| {
        let text = start(&sandbox, &old, sets).unwrap_err().to_string();
        assert!(!sandbox.config(&["run.name=new"]).run_dir().exists(), "a folder is left");
        text.replace(&old.display().to_string(), "RUN")
    };
    let sets = ["model.layers=2", "model.tie_embeddings=false", "model.mlp_width=32"];
    insta::assert_snapshot!(error(&sets), @r"
    the model cannot start from the weights in RUN/checkpoints/step-12/weights.safetensors:
      blocks.0.mlp.up.weight has shape [64, 16], here [32, 16]
      blocks.0.mlp.down.weight has shape [16, 64], here [16, 32]
      blocks.1.attention_norm.weight is missing: the source does not have it
      blocks.1.attention.q.weight is missing: the source does not have it
      blocks.1.attention.k.weight is missing: the source does not have it
      blocks.1.attention.v.weight is missing: the source does not have it
      blocks.1.attention.output.weight is missing: the source does not have it
      blocks.1.mlp_norm.weight is missing: the source does not have it
      blocks.1.mlp.up.weight is missing: the source does not have it
      blocks.1.mlp.down.weight is missing: the source does not have it
      head is missing: the source does not have it
      hint: give the new configuration the source's [model] table and, with learned positions, its data.seq_len; only the attention kind may differ
    ");
    let other = error(&["model.attention={ kind = \"rwkv7\" }"]);
    assert!(other.contains("layer 0 has kind rwkv7, which cannot start from kind rope"), "{other}");
    let tokenizer = error(&["tokenizer.kind=gpt2"]);
    assert!(tokenizer.contains("use the tokenizer the run was trained with"), "{tokenizer}");
    let none = start_at(&sandbox, &old, WeightsSelector::Ema, &[]).unwrap_err().to_string();
    assert!(none.contains("has no average of the weights"), "{none}");
    let (source, config) = (Source::open(&old, WeightsSelector::Model), sandbox.config(&[]));
    let (source, stop, force) = (source.ok(), StopFlag::new(), RunStart::Force);
    let itself = run_from(source, Precision::F32, &config, force, stop, &mut SilentConsole);
    let itself = itself.unwrap_err().to_string();
    assert!(itself.contains("the folder of the new run"), "{itself}");
}
