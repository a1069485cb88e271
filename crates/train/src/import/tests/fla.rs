//! Models of flash-linear-attention's classes: `scripts/fla_fixtures.py` compares these files with the classes.

use longwall_kernels::attention::AttentionConfig;

use super::*;

pub const FILES: &[(&str, &str)] = files![
    "fla":
    "forgetting_transformer",
    "forgetting_transformer_plain",
    "gated_deltanet",
    "gated_deltanet_plain",
    "kda",
    "gla",
    "linear_attn",
    "path_attn",
    "path_attn_grouped",
    "rwkv7",
    "rwkv7_plain",
];

/// The fixture called `name`.
fn fixture(name: &str) -> Fixture {
    Fixture::of(FILES, name)
}

/// The problems of an import of the fixture `name` with a changed config.json: keys and their values.
fn refused(name: &str, change: &[(&str, Value)]) -> String {
    error_with(&fixture(name), change)
}

#[test]
fn what_no_model_here_computes_is_refused_by_name() {
    let cases: &[(&str, &[(&str, Value)])] = &[
        (
            "forgetting_transformer",
            &[
                ("norm_eps", json!(1e-6)),
                ("hidden_act", json!("gelu")),
                ("qkv_bias", json!(true)),
                ("window_size", json!(16)),
                ("num_heads", json!(3)),
                ("attnres_block_size", json!(2)),
            ],
        ),
        (
            "gated_deltanet",
            &[
                ("use_short_conv", json!(false)),
                ("conv_size", json!(3)),
                ("output_gate_activation", json!("sigmoid")),
                ("num_v_heads", json!(3)),
                ("attn", json!({ "layers": [1], "num_heads": 2 })),
            ],
        ),
        (
            "kda",
            &[
                ("use_short_conv", json!(false)),
                ("num_v_heads", json!(8)),
                ("safe_gate", json!(true)),
                ("lower_bound", json!(-5.0)),
            ],
        ),
        (
            "gla",
            &[
                ("use_output_gate", json!(true)),
                ("expand_v", json!(1.0)),
                ("feature_map", json!("relu")),
                ("clamp_min", json!(-1.0)),
                ("elementwise_affine", json!(false)),
            ],
        ),
        (
            "linear_attn",
            &[
                ("feature_map", json!("relu")),
                ("norm_q", json!(true)),
                ("norm_k", json!(true)),
                ("norm_feature_map", json!(true)),
            ],
        ),
        ("path_attn", &[("use_forget_gate", json!(true)), ("use_w_shortconv", json!(false))]),
        (
            "rwkv7",
            &[
                ("fuse_norm", json!(true)),
                ("v_low_rank_dim", json!(16)),
                ("hidden_act", json!("swish")),
                ("value_dim", json!([32, 64])),
                ("head_dim", json!(7)),
            ],
        ),
    ];
    for (name, change) in cases {
        let error = refused(name, change);
        let found = error.matches("hint:").count();
        assert_eq!(found, change.len(), "{name}: {error}");
        for (key, value) in *change {
            let line = format!("\n{key} is {value}; allowed: ");
            assert!(error.contains(&line), "{line}: {error}");
        }
    }
}

/// The classes' own defaults: what config.json leaves out is read as they read it.
#[test]
fn what_a_configuration_leaves_out_has_the_default_of_its_class() {
    let without = |name: &str, keys: &[&str]| {
        let nulls: Vec<_> = keys.iter().map(|&key| (key, Value::Null)).collect();
        refused(name, &nulls)
    };
    let eps = without("forgetting_transformer", &["norm_eps", "qk_norm", "intermediate_size"]);
    assert!(eps.contains("norm_eps is 1e-6; allowed: 1e-5"), "{eps}");
    let gate = without("gla", &["use_output_gate", "expand_k", "expand_v"]);
    assert!(gate.contains("use_output_gate is true; allowed: false"), "{gate}");
    assert!(gate.contains("expand_v is 1.0; allowed: as expand_k, 0.5"), "{gate}");
    let map = without("linear_attn", &["feature_map"]);
    assert!(map.contains("feature_map is \"elementwise_product\""), "{map}");
    let fused = without("rwkv7", &["fuse_norm"]);
    assert!(fused.contains("fuse_norm is true"), "{fused}");
    // An MLP of 2/3 · 4 · 16 channels, rounded up to a multiple of 256, where the file has 24.
    let mlp = without("forgetting_transformer", &["intermediate_size"]);
    let shape = "model.layers.0.mlp.gate_proj.weight has shape [24, 16], expected [256, 16]";
    assert!(mlp.contains(shape), "{mlp}");
}

#[test]
fn norms_that_differ_between_heads_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [hf, run] = ["hf", "imported"].map(|name| folder.path().join(name));
    let fixture = fixture("forgetting_transformer");
    let mut weights = fixture.weights();
    let name = "model.layers.1.attn.k_norm.weight";
    let (_, (_, scales)) = weights.iter_mut().find(|(other, _)| other == name).unwrap();
    scales[0] += 0.5;
    let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
    let others = vec![("tokenizer.json", tokenizer.to_hugging_face().unwrap())];
    let files = WriteHf { config: &fixture.config, others, max_shard_bytes: u64::MAX };
    files.write(&hf, &weights).unwrap();
    let error = import_hugging_face(&hf, &run).unwrap_err().to_string();
    let expected = format!("{name} must have 2 equal parts, one of each head");
    assert!(error.contains(&expected) && !error.contains("q_norm"), "{error}");
}

/// Why the model of a `[model]` table cannot be exported in `layout`.
fn inexpressible(layout: Option<&str>, table: &str) -> String {
    let table = format!("layers = 2\nwidth = 32\nheads = 2\n{table}");
    let config = toml::from_str(&table).unwrap();
    let spec = ModelSpec { config: &config, vocab_size: 257, seq_len: 64 };
    layout_of(&spec, layout).err().expect("no layout has this").to_string()
}

#[test]
fn what_a_class_cannot_express_is_refused_by_name() {
    let llama = "arch = \"llama\"\n";
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "forgetting_transformer",
            "bias = true\nshort_conv = true\nwindow = 8\nhead_dim = 8\npositions = \"learned\"\n\
             attention = { kind = \"fox\", rope = true, sinks = true }",
            &[
                "short_conv",
                "window",
                "norm",
                "mlp",
                "positions",
                "bias",
                "attention.rope",
                "attention.sinks",
                "head_dim",
            ],
        ),
        (
            "gated_deltanet",
            "arch = \"llama\"\nqk_norm = true\noutput_gate = true\nkv_heads = 1\n\
             attention = { kind = \"gated_delta_net\", short_conv = false }",
            &["qk_norm", "output_gate", "attention.short_conv", "kv_heads"],
        ),
        (
            "kda",
            "arch = \"llama\"\nlogit_softcap = 30.0\nattention = { kind = \"kda\", rank = 4 }",
            &["logit_softcap", "attention.rank"],
        ),
        (
            "gla",
            "arch = \"llama\"\nqk_norm = true\noutput_gate = true\n\
             attention = { kind = \"linear\", gate = \"scalar\", rope = true, feature_map = \"elu\", normalise = true }",
            &[
                "qk_norm",
                "output_gate",
                "attention.gate",
                "attention.rope",
                "attention.feature_map",
                "attention.normalise",
            ],
        ),
        (
            "linear_attn",
            "arch = \"llama\"\nshort_conv = true\nattention = { kind = \"linear\" }",
            &["short_conv", "attention.gate"],
        ),
        (
            "path_attn",
            "arch = \"llama\"\nhead_dim = 8\nshort_conv = true\n\
             attention = { kind = \"path\", forget_gate = true, rank = 16 }",
            &[
                "short_conv",
                "attention.forget_gate",
                "attention.w_activation",
                "attention.rank",
                "head_dim",
            ],
        ),
        (
            "rwkv7",
            "kv_heads = 1\nbias = true\nattention = { kind = \"rwkv7\" }",
            &["bias", "mlp", "token_shift", "value_residual", "kv_heads"],
        ),
    ];
    for (layout, table, keys) in cases {
        let error = inexpressible(Some(layout), table);
        for key in *keys {
            assert!(error.contains(&format!("\n  model.{key} is ")), "{layout}, {key}: {error}");
            assert!(error.contains(&format!("in the {layout} layout")), "{error}");
        }
    }
    let mixed = format!(
        "{llama}pattern = [\"fox\", \"other\"]\nkinds.other = {{ kind = \"fox\", sinks = true }}"
    );
    let error = inexpressible(None, &mixed);
    assert!(error.contains("in layer 1; allowed: kind = \"fox\", the same in every"), "{error}");
    let error = inexpressible(None, &format!("{llama}attention = {{ kind = \"tra\" }}"));
    let kinds = "kind = \"tra\"; allowed: rope, fox, gated_delta_net, kda, linear, path, rwkv7";
    assert!(error.contains(kinds), "{error}");
}

/// With the layout found by the kind, and every tensor of the model in it.
#[test]
fn every_weight_of_a_model_is_in_its_layout() {
    let cases = [
        ("fox", "forgetting_transformer", "qk_norm = true\noutput_gate = true\nkv_heads = 1\n"),
        ("gated_delta_net", "gated_deltanet", "attention.key_heads = 1\nattention.value_dim = 5\n"),
        ("kda", "kda", "attention.value_dim = 5\n"),
        ("linear", "gla", "short_conv = true\nhead_dim = 24\nkv_heads = 1\n"),
        ("linear", "linear_attn", "attention.gate = \"none\"\nvocab_multiple = 64\n"),
        ("linear", "linear_attn", "attention.gate = \"none\"\nattention.feature_map = \"elu\"\n"),
        ("path", "path_attn", "attention.w_activation = \"silu\"\nattention.rank = \"full\"\n"),
        ("rwkv7", "rwkv7", "arch = \"rwkv7\"\n"),
    ];
    for (kind, name, keys) in cases {
        let arch = if keys.contains("arch") { "" } else { "arch = \"llama\"\n" };
        let table =
            format!("layers = 2\nwidth = 32\nheads = 2\n{arch}{keys}attention.kind = \"{kind}\"\n");
        let config: ModelConfig = toml::from_str(&table).unwrap();
        let spec = ModelSpec { config: &config, vocab_size: 257, seq_len: 64 };
        let (layout, json) = layout_of(&spec, None).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(layout.model_type(), name);
        // What is read from config.json is the model that was written, but for defaults that are now explicit.
        let mut problems = Problems::new();
        let back = layout.model(&json, &mut problems).unwrap();
        assert_eq!(problems, Problems::new(), "{name}");
        assert_eq!((back.vocab_rows, back.seq_len), (257, 64));
        if let [AttentionConfig::Linear(read), AttentionConfig::Linear(written)] =
            [&back.model, &config].map(|model| model.attention_of(0))
        {
            assert_eq!(read.feature_map, written.feature_map, "{name}");
        }
        let shapes = |config| {
            let mut shapes = weights::parameter_shapes(config, 257, 64);
            shapes.retain(|(name, _)| !["embedding", "head"].contains(&name.as_str()));
            shapes
        };
        assert_eq!(shapes(&back.model), shapes(&config), "{name}");
        let data = |at: usize, shape: &[usize]| {
            let count = shape.iter().product::<usize>();
            (0..count).map(|i| (at * 1000 + i) as f32).collect::<Vec<_>>()
        };
        let all = weights::parameter_shapes(&config, 257, 64).into_iter().enumerate();
        let ours: TensorMap =
            all.map(|(at, (name, shape))| (name, (shape.clone(), data(at, &shape)))).collect();
        let theirs: TensorMap = to_layout(layout, &spec, &ours).into_iter().collect();
        let spec = ModelSpec { config: &back.model, vocab_size: 257, seq_len: 64 };
        let found = from_layout(layout, &spec, theirs).unwrap();
        assert_eq!(found.len(), ours.len(), "{name}");
        for (name, (shape, data)) in &found {
            let (own_shape, own) = &ours[name];
            let padded = own_shape[0] - shape[0];
            let rest = own.len() - data.len();
            assert_eq!(rest, padded * own_shape[1..].iter().product::<usize>(), "{name}");
            assert_eq!(data[..], own[..data.len()], "{name}");
        }
    }
}
