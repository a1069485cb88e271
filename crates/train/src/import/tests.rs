mod fla;

use burn::tensor::{Int, Tensor as BurnTensor, TensorData};
use longwall_model::LanguageModel;
use longwall_model::exchange::{Tensor as HfTensor, WriteHf, layout_of, to_layout};
use longwall_model::weights::{TensorMap, read_tensors};
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::{Checkpoint, CheckpointSelector};
use crate::testing::TestBackend;

/// A model whose weights are given by a formula, and its logits in f32: those of `transformers` 5.24, or of the classes
/// of flash-linear-attention 0.6. `scripts/hf_fixtures.py` and `scripts/fla_fixtures.py` write the files.
struct Fixture {
    config: Value,
    /// Names and shapes of its tensors.
    tensors: Vec<(String, Vec<usize>)>,
    /// Logits of the tokens 0, 100 and 256 after the first, the twelfth and the last token.
    logits: [[f32; 3]; 3],
}

const TOKENS: usize = 24;

/// The names and the contents of the fixtures in `folder`.
macro_rules! files {
    ($folder:literal: $($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!($folder, "/", $name, ".json")))),+]
    };
}
use files;

const HF_FILES: &[(&str, &str)] =
    files!["tests/hf": "gpt2", "gpt2_untied", "llama", "llama_tied", "llama_yarn", "llama_llama3"];

fn gpt2() -> Fixture {
    Fixture::of(HF_FILES, "gpt2")
}

fn llama() -> Fixture {
    Fixture::of(HF_FILES, "llama")
}

/// All of them.
fn fixtures() -> impl Iterator<Item = Fixture> {
    let files = HF_FILES.iter().chain(fla::FILES);
    files.map(|(_, json)| Fixture::parse(json))
}

impl Fixture {
    /// The one called `name`.
    fn of(files: &[(&str, &str)], name: &str) -> Self {
        let (_, json) =
            files.iter().find(|(other, _)| *other == name).expect("a file of this name");
        Fixture::parse(json)
    }

    fn parse(json: &str) -> Self {
        let mut json: Value = serde_json::from_str(json).unwrap();
        let tensors = json["tensors"].as_object().unwrap().iter();
        let tensors = tensors
            .map(|(name, shape)| (name.clone(), serde_json::from_value(shape.clone()).unwrap()))
            .collect();
        let logits = serde_json::from_value(json["logits"].take()).unwrap();
        Fixture { config: json["config"].take(), tensors, logits }
    }

    /// w_i = sin(0.37 i + the sum of the name's bytes): 1 + w/10 in norms' weights, else 0.3 w. Norms of heads repeat
    /// the values of one head.
    fn weights(&self) -> Vec<(String, HfTensor)> {
        let size = |key: &str| self.config[key].as_u64().map(|size| size as usize);
        let head_dim = size("hidden_size").zip(size("num_heads")).map(|(all, heads)| all / heads);
        let value = |name: &str, shape: &[usize], at: usize| {
            let of_heads = name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight");
            let at = head_dim.filter(|_| of_heads).map_or(at, |head_dim| at % head_dim);
            let phase: u64 = name.bytes().map(u64::from).sum();
            let wave = (at as f64 * 0.37 + phase as f64).sin();
            let is_scale = name.ends_with("weight") && shape.len() == 1;
            (if is_scale { 1.0 + 0.1 * wave } else { 0.3 * wave }) as f32
        };
        let tensor = |(name, shape): &(String, Vec<usize>)| {
            let data = (0..shape.iter().product()).map(|at| value(name, shape, at)).collect();
            (name.clone(), (shape.clone(), data))
        };
        self.tensors.iter().map(tensor).collect()
    }

    /// Writes the model in Hugging Face's format.
    fn write(&self, folder: &Path, max_shard_bytes: u64) {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let others = vec![("tokenizer.json", tokenizer.to_hugging_face().unwrap())];
        let files = WriteHf { config: &self.config, others, max_shard_bytes };
        files.write(folder, &self.weights()).unwrap();
    }
}

/// The logits of the model of the run in `run`, `[tokens, vocabulary]`.
fn logits(run: &Path) -> Vec<Vec<f32>> {
    let checkpoint = Checkpoint::open(run, CheckpointSelector::Latest).unwrap();
    let config = &checkpoint.config;
    let (vocab, seq_len) = (checkpoint.state.tokenizer.vocab_size, config.data.seq_len);
    let device = Default::default();
    let model = LanguageModel::<TestBackend>::new(&config.model, vocab, seq_len, 0, &device);
    let model = weights::load(model, &checkpoint.weights().unwrap()).unwrap();
    let tokens: Vec<i32> = (0..TOKENS as i32).map(|t| (t * 37 + 11) % 257).collect();
    let tokens =
        BurnTensor::<TestBackend, 2, Int>::from_data(TensorData::new(tokens, [1, TOKENS]), &device);
    let data = model.logits(tokens).into_data().to_vec::<f32>().unwrap();
    data.chunks(vocab).map(<[f32]>::to_vec).collect()
}

#[test]
fn imported_models_compute_the_logits_of_transformers() {
    for fixture in fixtures() {
        let folder = tempfile::tempdir().unwrap();
        let [hf, run] = ["hf", "runs/imported"].map(|name| folder.path().join(name));
        fixture.write(&hf, u64::MAX);
        import_hugging_face(&hf, &run).unwrap();
        let found = logits(&run);
        for (at, expected) in [0, 11, TOKENS - 1].into_iter().zip(fixture.logits) {
            for (token, expected) in [0, 100, 256].into_iter().zip(expected) {
                let found = found[at][token];
                let layout = &fixture.config["model_type"];
                assert!((found - expected).abs() < 1e-4, "{layout}: {found} and {expected}");
            }
        }
    }
}

#[test]
fn a_tied_output_layer_has_no_tensor_and_an_untied_one_has_its_own() {
    for (name, tied) in
        [("gpt2", true), ("gpt2_untied", false), ("llama", false), ("llama_tied", true)]
    {
        let fixture = Fixture::of(HF_FILES, name);
        let has_output = fixture.tensors.iter().any(|(tensor, _)| tensor == "lm_head.weight");
        assert_eq!(has_output, !tied, "{name}");
        let folder = tempfile::tempdir().unwrap();
        let [hf, run] = ["hf", "imported"].map(|name| folder.path().join(name));
        fixture.write(&hf, u64::MAX);
        assert_eq!(import_hugging_face(&hf, &run).unwrap().model.tie_embeddings, tied, "{name}");
    }
}

#[test]
fn an_exported_model_has_the_tensors_and_the_configuration_it_was_imported_with() {
    for fixture in fixtures() {
        let folder = tempfile::tempdir().unwrap();
        let [hf, run] = ["hf", "imported"].map(|name| folder.path().join(name));
        // Several files of weights.
        fixture.write(&hf, 4096);
        assert!(hf.join("model.safetensors.index.json").is_file());
        let config = import_hugging_face(&hf, &run).unwrap();
        let spec =
            ModelSpec { config: &config.model, vocab_size: 257, seq_len: config.data.seq_len };
        let (layout, json) = layout_of(&spec, None).unwrap();
        let checkpoint = Checkpoint::open(&run, CheckpointSelector::Latest).unwrap();
        let ours = read_tensors(&checkpoint.weights().unwrap()).unwrap();
        let written: TensorMap = to_layout(layout, &spec, &ours).into_iter().collect();
        let expected: TensorMap = fixture.weights().into_iter().collect();
        assert_eq!(written, expected);
        for (key, value) in fixture.config.as_object().unwrap() {
            let same = json.get(key) == Some(value);
            assert!(same || json.get(key).is_none() || value.is_null(), "{key}: {}", json[key]);
        }
    }
}

#[test]
fn an_imported_run_is_sound_and_starts_runs_but_cannot_be_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let [hf, run] = ["hf", "imported"].map(|name| folder.path().join(name));
    llama().write(&hf, u64::MAX);
    import_hugging_face(&hf, &run).unwrap();
    let files = crate::verify::verify_run(&run).unwrap();
    assert!(files.iter().all(|file| file.problem.is_none()), "{files:?}");
    let checkpoint = Checkpoint::open(&run, CheckpointSelector::Latest).unwrap();
    let error = checkpoint.check_resumable().unwrap_err().to_string();
    assert!(error.contains("weights only") && error.contains("--from"), "{error}");
    let error = import_hugging_face(&hf, &run).unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
}

/// The error of a fixture with a changed config.json.
fn error_with(fixture: &Fixture, change: &[(&str, Value)]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let [hf, run] = ["hf", "imported"].map(|name| folder.path().join(name));
    let mut config = fixture.config.clone();
    for (key, value) in change {
        config[*key] = value.clone();
    }
    let changed = Fixture { config, tensors: fixture.tensors.clone(), logits: fixture.logits };
    changed.write(&hf, u64::MAX);
    let error = import_hugging_face(&hf, &run).unwrap_err().to_string();
    assert!(!run.exists(), "something is left");
    error.replace(&folder.path().display().to_string(), "FOLDER")
}

#[test]
fn what_has_no_counterpart_is_refused_by_name() {
    let changes = [
        ("rms_norm_eps", json!(1e-6)),
        ("hidden_act", json!("gelu")),
        ("rope_parameters", json!({ "rope_type": "llama3", "factor": 8.0 })),
        ("attention_bias", json!(true)),
    ];
    insta::assert_snapshot!(error_with(&llama(), &changes), @r#"
    FOLDER/hf/config.json cannot be imported: the configuration has 4 problems:
    mlp_bias is false; allowed: as attention_bias: all linear layers have biases, or none
      hint: no model here computes that: import another model
    hidden_act is "gelu"; allowed: silu
      hint: no model here computes that: import another model
    rms_norm_eps is 1e-6; allowed: 1e-5
      hint: no model here computes that: import another model
    rope_parameters is {"factor":8.0,"rope_type":"llama3"}; allowed: none, or rope_type "default", "linear", "yarn" (without truncate = false) or "llama3", with its numbers
      hint: no model here computes that: import another model
    "#);
    let unknown = error_with(&llama(), &[("model_type", json!("mamba"))]);
    assert!(unknown.contains("model_type \"mamba\"; allowed: gpt2, llama, "), "{unknown}");
    let deeper = error_with(&gpt2(), &[("n_layer", json!(3))]);
    assert!(deeper.contains("transformer.h.2.ln_1.weight is missing"), "{deeper}");
    let shallow = error_with(&gpt2(), &[("n_layer", json!(1))]);
    assert!(shallow.contains("transformer.h.1.ln_1.bias is left over"), "{shallow}");
    let rows = error_with(&gpt2(), &[("vocab_size", json!(200))]);
    assert!(rows.contains("200 rows of embedding, and its tokenizer.json 257 tokens"), "{rows}");
    let missing = error_with(&gpt2(), &[("n_embd", Value::Null)]);
    assert!(missing.contains("n_embd is missing"), "{missing}");
}
