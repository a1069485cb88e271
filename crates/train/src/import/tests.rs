mod fla;

use burn::tensor::{Int, Tensor as BurnTensor, TensorData};
use longwall_model::LanguageModel;
use longwall_model::exchange::{Tensor as HfTensor, WriteHf, layout_of, to_layout};
use longwall_model::weights::{TensorMap, read_tensors};
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::{Checkpoint, CheckpointSelector};
use crate::testing::TestBackend;

/// A model whose weights are given by a formula, and its logits as `transformers` 5.24 computes them in f32 with
/// `GPT2LMHeadModel` and `LlamaForCausalLM`, and with the classes of flash-linear-attention 0.6.
struct Fixture {
    config: Value,
    /// Names and shapes of its tensors; `*` stands for the number of a layer.
    tensors: Vec<(String, Vec<usize>)>,
    /// Logits of the tokens 0, 100 and 256 after the first, the twelfth and the last token.
    logits: [[f32; 3]; 3],
}

const TOKENS: usize = 24;

fn gpt2() -> Fixture {
    Fixture {
        config: json!({
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 257,
            "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": null,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": true, "scale_attn_by_inverse_layer_idx": false,
            "add_cross_attention": false, "tie_word_embeddings": true,
        }),
        tensors: named([
            ("transformer.wte.weight", vec![257, 16]),
            ("transformer.wpe.weight", vec![32, 16]),
            ("transformer.h.*.ln_1.weight", vec![16]),
            ("transformer.h.*.ln_1.bias", vec![16]),
            ("transformer.h.*.attn.c_attn.weight", vec![16, 48]),
            ("transformer.h.*.attn.c_attn.bias", vec![48]),
            ("transformer.h.*.attn.c_proj.weight", vec![16, 16]),
            ("transformer.h.*.attn.c_proj.bias", vec![16]),
            ("transformer.h.*.ln_2.weight", vec![16]),
            ("transformer.h.*.ln_2.bias", vec![16]),
            ("transformer.h.*.mlp.c_fc.weight", vec![16, 64]),
            ("transformer.h.*.mlp.c_fc.bias", vec![64]),
            ("transformer.h.*.mlp.c_proj.weight", vec![64, 16]),
            ("transformer.h.*.mlp.c_proj.bias", vec![16]),
            ("transformer.ln_f.weight", vec![16]),
            ("transformer.ln_f.bias", vec![16]),
        ]),
        logits: [
            [0.662761, -2.93923, -2.787981],
            [0.053913, -3.220245, -3.128487],
            [0.481277, -3.036992, -2.903102],
        ],
    }
}

fn llama() -> Fixture {
    Fixture {
        config: json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257,
            "max_position_embeddings": 64, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 6, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": false,
            "mlp_bias": false, "tie_word_embeddings": false,
            "rope_parameters": { "rope_type": "default", "rope_theta": 500.0 },
        }),
        tensors: named([
            ("model.embed_tokens.weight", vec![257, 16]),
            ("model.layers.*.input_layernorm.weight", vec![16]),
            ("model.layers.*.self_attn.q_proj.weight", vec![24, 16]),
            ("model.layers.*.self_attn.k_proj.weight", vec![12, 16]),
            ("model.layers.*.self_attn.v_proj.weight", vec![12, 16]),
            ("model.layers.*.self_attn.o_proj.weight", vec![16, 24]),
            ("model.layers.*.post_attention_layernorm.weight", vec![16]),
            ("model.layers.*.mlp.gate_proj.weight", vec![24, 16]),
            ("model.layers.*.mlp.up_proj.weight", vec![24, 16]),
            ("model.layers.*.mlp.down_proj.weight", vec![16, 24]),
            ("model.norm.weight", vec![16]),
            ("lm_head.weight", vec![257, 16]),
        ]),
        logits: [
            [-0.219091, 0.29605, 0.264057],
            [-0.021071, -0.22004, -0.216493],
            [0.018522, -0.181933, -0.175047],
        ],
    }
}

/// [`llama`] with scaled angles.
fn scaled_llamas() -> [Fixture; 2] {
    let scaled = |rope_parameters: Value, logits| {
        let mut fixture = llama();
        fixture.config["rope_parameters"] = rope_parameters;
        Fixture { logits, ..fixture }
    };
    let yarn = json!({
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
        "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.25,
    });
    let llama3 = json!({
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0,
        "original_max_position_embeddings": 16, "low_freq_factor": 0.25, "high_freq_factor": 2.0,
    });
    [
        scaled(
            yarn,
            [
                [-0.219091, 0.29605, 0.264057],
                [0.004089, -0.091234, -0.088352],
                [0.037563, -0.043682, -0.038386],
            ],
        ),
        scaled(
            llama3,
            [
                [-0.219091, 0.29605, 0.264057],
                [0.01105, -0.06067, -0.057838],
                [0.045734, 0.005103, 0.009999],
            ],
        ),
    ]
}

/// Tensors whose names have `*`.
fn named<const N: usize>(tensors: [(&str, Vec<usize>); N]) -> Vec<(String, Vec<usize>)> {
    tensors.map(|(name, shape)| (name.to_owned(), shape)).into()
}

/// All of them.
fn fixtures() -> impl Iterator<Item = Fixture> {
    [gpt2(), llama()].into_iter().chain(scaled_llamas()).chain(fla::fixtures())
}

impl Fixture {
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
        let mut all = vec![];
        for (name, shape) in &self.tensors {
            let layers = if name.contains('*') { 2 } else { 1 };
            for layer in 0..layers {
                let name = name.replace('*', &layer.to_string());
                let count = shape.iter().product();
                let data = (0..count).map(|at| value(&name, shape, at)).collect();
                all.push((name, (shape.clone(), data)));
            }
        }
        all
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
