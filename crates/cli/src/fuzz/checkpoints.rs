//! Checkpoints: weights, the optimiser's state, and the text files beside them. Checksums notice damage
//! first; here the readers below them must hold by themselves.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::backend::Autodiff;
use longwall_data::NoProgress;
use longwall_fuzzing::{
    Folder, JSON, TOML, TextFormat, checked, fuzz, has_hint, mutated_safetensors, mutated_text,
};
use longwall_kernels::Cpu;
use longwall_kernels::backend::OpBackend;
use longwall_model::weights::{self, EarlierNames};
use longwall_model::{LanguageModel, Precision};
use longwall_train::TrainError;
use longwall_train::checkpoint::{Checkpoint, CheckpointFolder, CheckpointSelector};
use longwall_train::config::RunConfig;
use longwall_train::console::SilentConsole;
use longwall_train::evaluation::NoEvaluations;
use longwall_train::optimiser::Optimiser;
use longwall_train::run::{Outcome, RunStart, TrainOptions, train};
use longwall_train::run_folder::config_of;
use longwall_train::signals::StopFlag;

const CONFIG: &str = r#"
[data]
seq_len = 16
validation_tokens = 64

[[data.sources]]
kind = "fflm"
instructions = 8
p_write = 0.3
p_ignore = 0.6

[model]
layers = 2
width = 16
heads = 2
attention = { kind = "fox" }

[train]
tokens = 96
batch_tokens = 32
lr = 1e-3
schedule = { kind = "constant", warmup = 0 }
skip = { outlier_z = 6, window = 8 }
checkpoint = { every = 2 }
"#;

/// Steps of the whole run; its last checkpoint is removed, so that a resume has a step to do.
const STEPS: u64 = 3;
const STEP_DIR: &str = "checkpoints/step-2";

fn config(out_dir: &Path) -> RunConfig {
    let out_dir = toml::Value::String(out_dir.display().to_string());
    let sets = [format!("run.out_dir={out_dir}")];
    RunConfig::parse(CONFIG, Path::new("tiny.toml"), &sets).unwrap()
}

fn model<B: OpBackend>(config: &RunConfig) -> LanguageModel<B> {
    // The bytes and the end of text.
    let (vocab, seq_len) = (257, config.data.seq_len);
    LanguageModel::new(&config.model, vocab, seq_len, config.run.seed, &Default::default())
}

fn run(config: &RunConfig, start: RunStart) -> Result<Outcome, Box<TrainError>> {
    let options = TrainOptions {
        start,
        from: None,
        verify: false,
        stop: StopFlag::new(),
        progress: &NoProgress,
        device_name: "the CPU".to_owned(),
        precision: Precision::F32,
        compiles: false,
        peak_flops: Some(1e9),
        available_memory: None,
        memory: None,
    };
    let (console, evaluator) = (&mut SilentConsole, &mut NoEvaluations);
    train::<Cpu>(config, &Default::default(), &options, console, evaluator).map_err(Box::new)
}

/// The files of a run that was killed after its second step, by path.
fn killed_run() -> BTreeMap<String, Vec<u8>> {
    let folder = Folder::new();
    let config = config(folder.path());
    assert_eq!(run(&config, RunStart::New).unwrap().step, STEPS);
    let run_dir = config.run_dir();
    fs::remove_file(run_dir.join("finished.json")).unwrap();
    fs::remove_dir_all(run_dir.join("checkpoints/step-3")).unwrap();
    let best = "{\"step\": 2, \"validation_loss\": 5.5}";
    fs::write(run_dir.join("checkpoints/best.json"), best).unwrap();
    let mut files = BTreeMap::new();
    for folder in ["", "checkpoints", STEP_DIR] {
        for entry in fs::read_dir(run_dir.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                let name = path.strip_prefix(&run_dir).unwrap().to_str().unwrap().to_owned();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    assert!(files.contains_key(&format!("{STEP_DIR}/checksums.json")), "{:?}", files.keys());
    files
}

/// Opens the checkpoint in every way, and resumes the run.
fn use_run(run_dir: &Path) -> Option<Outcome> {
    let folder = CheckpointFolder::new(run_dir);
    checked(folder.best());
    if let Some(files) = checked(folder.verify(2)) {
        files.iter().filter_map(|(_, error)| error.as_ref()).for_each(has_hint);
    }
    for wanted in [CheckpointSelector::Latest, CheckpointSelector::Best] {
        let Some(checkpoint) = checked(Checkpoint::open(run_dir, wanted)) else { continue };
        checked(checkpoint.weights());
        checked(checkpoint.optimizer());
    }
    let config = config_of(run_dir, &[]).unwrap();
    checked(run(&config, RunStart::Resume(run_dir.to_owned())))
}

/// Changes one text file of a checkpoint that has no checksums.
fn fuzz_file(target: &str, name: &str, format: TextFormat) {
    let files = killed_run();
    let seed = files[name].clone();
    let lines = ["\"step\": 1,", "\"micro_batch\": 2,", "[model]"].map(str::to_owned);
    let inputs = mutated_text(vec![seed.clone()], format, &lines);
    fuzz(target, inputs, 64 << 20, |content| {
        let folder = Folder::new();
        let has_sums = name.ends_with("checksums.json");
        for (name, content) in &files {
            if has_sums || !name.ends_with("checksums.json") {
                folder.put(name, content);
            }
        }
        folder.put(name, &content);
        let outcome = use_run(folder.path());
        if let Some(outcome) = &outcome {
            assert_eq!(outcome.step, STEPS);
        }
        assert!(outcome.is_some() || content != seed);
    });
}

#[test]
fn states() {
    fuzz_file("states", &format!("{STEP_DIR}/state.json"), JSON);
}

#[test]
fn configurations_in_checkpoints() {
    fuzz_file("configurations_in_checkpoints", &format!("{STEP_DIR}/config.toml"), TOML);
}

#[test]
fn checksums() {
    fuzz_file("checksums", &format!("{STEP_DIR}/checksums.json"), JSON);
}

#[test]
fn best_files() {
    fuzz_file("best_files", "checkpoints/best.json", JSON);
}

/// The names that an earlier version gave to two tensors of each layer.
fn with_earlier_names(file: &[u8]) -> Vec<u8> {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
    let renamed = tensors.tensors().into_iter().map(|(name, tensor)| {
        let name = name.replace("forget_gate.", "projections.0.outer.");
        (name, tensor)
    });
    let renamed = safetensors::serialize(renamed, None).unwrap();
    assert_ne!(renamed, file);
    renamed
}

/// The seeds of one tensor file of a checkpoint.
fn tensor_files(name: &str) -> Vec<Vec<u8>> {
    let file = killed_run()[&format!("{STEP_DIR}/{name}")].clone();
    vec![with_earlier_names(&file), file]
}

#[test]
fn weights_files() {
    let config = config(Path::new("runs"));
    let seeds = tensor_files("weights.safetensors");
    fuzz("weights_files", mutated_safetensors(seeds.clone()), 64 << 20, |content| {
        let folder = Folder::new();
        let path = folder.put("weights.safetensors", &content);
        let loaded = checked(weights::load(model::<Cpu>(&config), &path));
        assert!(loaded.is_some() || !seeds.contains(&content));
    });
}

#[test]
fn optimiser_files() {
    let config = config(Path::new("runs"));
    let seeds = tensor_files("optimizer.safetensors");
    let model = model::<Autodiff<Cpu>>(&config);
    let earlier = EarlierNames::of(&model);
    fuzz("optimiser_files", mutated_safetensors(seeds.clone()), 64 << 20, |content| {
        let folder = Folder::new();
        let path = folder.put("optimizer.safetensors", &content);
        let mut optimiser = Optimiser::<Cpu>::new(&config.rules(), &model);
        let loaded = checked(optimiser.load(&path, &earlier, &Default::default()));
        assert!(loaded.is_some() || !seeds.contains(&content));
    });
}
