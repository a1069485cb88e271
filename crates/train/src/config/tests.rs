use std::path::Path;

use super::*;
use crate::checkpoint::WeightsSelector;
use crate::testing::CONFIG as BASE;

fn parse(source: &str, sets: &[&str]) -> Result<RunConfig, ConfigError> {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    RunConfig::parse(source, Path::new("configs/small.toml"), &sets)
}

fn error(sets: &[&str]) -> String {
    parse(BASE, sets).unwrap_err().to_string()
}

fn error_of(from: &str, to: &str) -> String {
    assert!(BASE.contains(from), "the test replaces {from:?}, which is not there");
    parse(&BASE.replace(from, to), &[]).unwrap_err().to_string()
}

#[test]
fn the_name_defaults_to_the_files() {
    assert_eq!(parse(BASE, &[]).unwrap().run.name, "small");
    assert_eq!(parse(BASE, &["run.name=other"]).unwrap().run_dir(), Path::new("runs/other"));
}

#[test]
fn overrides_reach_tables_and_arrays() {
    let config = parse(BASE, &["train.lr=6e-4", "train.tokens=2M", "train.schedule.kind=wsd"]);
    let config = config.unwrap();
    assert_eq!((config.train.lr, config.train.tokens), (6e-4, 2_000_000));
    assert!(matches!(config.train.schedule, crate::schedule::ScheduleConfig::Wsd { .. }));
    assert!(parse(BASE, &["data.sources.0.weight=2"]).is_ok());
}

#[test]
fn the_resolved_configuration_reads_back_as_itself() {
    let config = parse(BASE, &["run.threads=2", "train.sample.every=1M tokens"]).unwrap();
    assert_eq!(parse(&config.to_toml(), &[]).unwrap(), config);
}

#[test]
fn differences_name_the_keys() {
    let config = parse(BASE, &[]).unwrap();
    let other = parse(BASE, &["train.lr=2e-3", "run.threads=1"]).unwrap();
    assert_eq!(config.differences(&config), []);
    let differences: Vec<String> = config
        .differences(&other)
        .iter()
        .map(|d| format!("{}: {} | {}", d.key, d.ours, d.theirs))
        .collect();
    assert_eq!(differences, ["run.threads: (unset) | 1", "train.lr: 0.001 | 0.002"]);
}

#[test]
fn unknown_keys_are_errors_with_a_suggestion() {
    insta::assert_snapshot!(error_of("lr = 1e-3", "lr = 1e-3\nclipp = 2.0"), @r"
    configs/small.toml:25: train.clipp is no known key; allowed here: tokens, batch_tokens, micro_batch, recompute, context_parallel, lr, z_loss, clip, optimiser, groups, stages, schedule, ema, skip, norms, noise_scale, validate, evaluate, sample, checkpoint
      hint: did you mean `clip`?
    ");
    insta::assert_snapshot!(error_of("layers = 2", "layers = 2\nqqqq = 1"), @r"
    configs/small.toml:17: model.qqqq is no known key; allowed here: arch, layers, width, heads, kv_heads, head_dim, mlp, mlp_width, norm, norm_position, embedding_norm, bias, norm_bias, tie_embeddings, vocab_multiple, logit_softcap, init_std, scale_residual_init, positions, qk_norm, output_gate, short_conv, token_shift, value_residual, window, pattern, attention, kinds
      hint: remove model.qqqq, or use one of the keys above
    ");
    insta::assert_snapshot!(error_of("kind = \"rope\"", "kind = \"rope\", theda = 1"), @r"
    configs/small.toml:19: model.attention.theda is no known key; allowed here: position, theta, rotary_fraction, scaling, softcap, ssmax, sinks
      hint: did you mean `theta`?
    ");
    insta::assert_snapshot!(error_of("max_bytes", "max_byte"), @r"
    configs/small.toml:10: data.sources.0.max_byte is no known key; allowed here: weight, max_bytes, path
      hint: did you mean `max_bytes`?
    ");
    insta::assert_snapshot!(error_of("[tokenizer]", "[tokeniser]"), @r"
    configs/small.toml:12: tokeniser is no known key; allowed here: run, data, tokenizer, model, train, eval
      hint: did you mean `tokenizer`?
    ");
    insta::assert_snapshot!(error(&["train.learning_rate=1"]), @r"
    --set train.learning_rate=1: train.learning_rate is no known key; allowed here: tokens, batch_tokens, micro_batch, recompute, context_parallel, lr, z_loss, clip, optimiser, groups, stages, schedule, ema, skip, norms, noise_scale, validate, evaluate, sample, checkpoint
      hint: did you mean `lr`?
    ");
}

#[test]
fn values_of_the_wrong_type_are_named() {
    insta::assert_snapshot!(error_of("lr = 1e-3", "lr = \"high\""), @r#"
    configs/small.toml:24: train.lr is "high"; expected a number
      hint: change the value of train.lr
    "#);
    insta::assert_snapshot!(error_of("tokens = \"1M\"", "tokens = true"), @r#"
    configs/small.toml:22: train.tokens is true; expected a whole number, or text such as "10M"
      hint: change the value of train.tokens
    "#);
    insta::assert_snapshot!(error_of("tokens = \"1M\"", "tokens = \"lots\""), @r#"
    configs/small.toml:22: train.tokens is "lots"; `lots` is not a count; allowed: a whole number with an optional k, M or B, for example 20k or 1.5M
      hint: change the value of train.tokens
    "#);
    insta::assert_snapshot!(error_of("max_bytes = \"8M\"", "weight = \"big\""), @r#"
    configs/small.toml:10: data.sources.0.weight is "big"; expected a number
      hint: change the value of data.sources.0.weight
    "#);
    insta::assert_snapshot!(error_of("kind = \"rope\"", "kind = \"ropee\""), @r#"
    configs/small.toml:19: model.attention.kind is "ropee"; allowed: rope, fox, wall, path, power, tra, tda, rela, diff, dex, diff_rela, lssar, entmax, stick_breaking, linear, rwkv7, gated_delta_net, kda, mamba2
      hint: did you mean "rope"?
    "#);
    insta::assert_snapshot!(error(&["train.checkpoint.every=sometimes"]), @r#"
    --set train.checkpoint.every=sometimes: train.checkpoint.every is "sometimes"; `sometimes` is not an interval; allowed: a count above 0 of steps or tokens, for example 100, "100 steps" or "10M tokens", or "never"
      hint: change the value of train.checkpoint.every
    "#);
    insta::assert_snapshot!(error(&["train.schedule={kind=\"wsd\",shape=\"lin\"}"]), @r#"
    --set train.schedule={kind="wsd",shape="lin"}: train.schedule.shape is "lin"; allowed: linear, one-minus-sqrt, cosine
      hint: did you mean "linear"?
    "#);
    insta::assert_snapshot!(error(&["run.name=12"]), @r#"
    --set run.name=12: run.name is 12; expected a string
      hint: put it in quotes: run.name = "12"
    "#);
}

#[test]
fn a_value_in_place_of_a_table_is_refused_with_the_tables_form() {
    for (key, kind) in
        [("model.attention", "fox"), ("train.optimiser", "muon"), ("train.schedule", "linear")]
    {
        let found = error(&[&format!("{key}={kind}")]);
        let expected = format!(
            "{key} is \"{kind}\"; allowed: a table such as {{ kind = \"{kind}\" }}, with kind one of "
        );
        assert!(found.contains(&expected), "{found}");
        assert!(
            found.ends_with(&format!("hint: write {key} = {{ kind = \"{kind}\" }}")),
            "{found}"
        );
    }
    insta::assert_snapshot!(error(&["tokenizer=[\"gpt2\"]"]), @r#"
    --set tokenizer=["gpt2"]: tokenizer is ["gpt2"]; allowed: a table such as { kind = "gpt2" }, with kind one of gpt2, bytes, file
      hint: write tokenizer = { kind = "gpt2" }
    "#);
    insta::assert_snapshot!(error(&["train.norms=never"]), @r#"
    --set train.norms=never: train.norms is "never"; allowed: a table with the keys every
      hint: write train.norms = { every = … }
    "#);
    for (key, array) in [
        ("run", "[\"a\"]"),
        ("model.attention", "[\"rope\"]"),
        ("model.attention.scaling", "[\"none\"]"),
        ("train.schedule", "[\"linear\"]"),
        ("train.norms", "[\"never\"]"),
        ("train.stages.0", "[0.5, 8192]"),
    ] {
        let set = format!("{key}={array}");
        let stages = "train.stages=[{ from = 0.5, batch_tokens = 8192 }]";
        let found = error(&[stages, &set]);
        assert!(found.contains(&format!("{key} is {array}; allowed: a table")), "{found}");
    }
}

#[test]
fn missing_keys_are_named() {
    insta::assert_snapshot!(error_of("lr = 1e-3", ""), @r"
    configs/small.toml:21: train.lr is missing
      hint: add `lr = …` under [train]
    ");
    insta::assert_snapshot!(parse("", &[]).unwrap_err(), @r"
    configs/small.toml: data is missing
      hint: add a table [data]; the files in configs/ show one
    ");
    insta::assert_snapshot!(error_of("[tokenizer]\nkind", "[tokenizer]\npath"), @r"
    configs/small.toml:12: tokenizer.kind is missing
      hint: add `kind = …` under [tokenizer]
    ");
}

#[test]
fn a_file_that_is_no_toml_shows_the_line() {
    insta::assert_snapshot!(error_of("seed = 3", "seed = "), @r"
    configs/small.toml is not valid TOML
    TOML parse error at line 3, column 8
      |
    3 | seed = 
      |        ^
    string values must be quoted, expected literal string
      hint: correct the file at that place; configs/ holds ready-made ones
    ");
}

#[test]
fn a_missing_file_is_an_error_with_a_hint() {
    let error = RunConfig::load(Path::new("no/such.toml"), &[]).unwrap_err();
    insta::assert_snapshot!(error, @r"
    cannot read the configuration no/such.toml: No such file or directory (os error 2)
      hint: check the path; configs/ holds ready-made ones
    ");
}

#[test]
fn values_out_of_range_are_reported_together() {
    let sets = ["run.name=\"a/b\"", "model.heads=5", "train.lr=0", "train.batch_tokens=1000"];
    insta::assert_snapshot!(error(&sets), @r#"
    configs/small.toml: the configuration has 4 problems:
    run.name is "a/b"; allowed: the name of a folder, which holds no / or \ and does not begin with a dot
      hint: use for example "wall-124m"; run.out_dir says where the folder goes
    model.heads is 5; allowed: a divisor of model.width, 64
      hint: change heads or width, or set model.head_dim
    train.batch_tokens is 1000; allowed: a multiple of data.seq_len (512) above 0
      hint: use 512 or 1024
    train.lr is 0; allowed: a number above 0, at most 1e38
      hint: use for example 6e-4
    "#);
}

/// [`BASE`] with another choice of attention, `keys`, in its `[model]` table.
fn hybrid(keys: &str) -> String {
    BASE.replace("attention = { kind = \"rope\" }", keys)
}

fn hybrid_error(keys: &str) -> String {
    parse(&hybrid(keys), &[]).unwrap_err().to_string()
}

#[test]
fn a_pattern_of_kinds_repeats_over_the_layers() {
    let keys = "layers = 5\nwindow = 128\npattern = [\"local\", \"fox\"]\n\
                kinds.local = { kind = \"rope\", theta = 500.0, window = \"none\" }";
    let source = hybrid(keys).replacen("layers = 2\n", "", 1);
    let config = parse(&source, &[]).unwrap();
    let windows = |config: &RunConfig| {
        let window = |layer| config.model.attention_shape(layer).window;
        (0..5).map(window).collect::<Vec<_>>()
    };
    let kinds: Vec<_> = (0..5).map(|layer| config.model.attention_of(layer).kind()).collect();
    assert_eq!(kinds, ["rope", "fox", "rope", "fox", "rope"]);
    assert_eq!(windows(&config), [None, Some(128), None, Some(128), None]);
    assert_eq!(config.model.attention_label(), "local (rope) ×3, fox ×2");
    assert_eq!(parse(&config.to_toml(), &[]).unwrap(), config);

    let config = parse(&source, &["model.kinds.local.window=64"]).unwrap();
    assert_eq!(windows(&config), [Some(64), Some(128), Some(64), Some(128), Some(64)]);
    assert_eq!(parse(&config.to_toml(), &[]).unwrap(), config);
    let config = parse(&source, &["model.pattern=[\"local\"]"]).unwrap();
    assert_eq!(config.model.attention_label(), "local (rope) ×5");
}

#[test]
fn a_wrong_choice_of_kinds_is_told_in_full() {
    insta::assert_snapshot!(hybrid_error(""), @r#"
    configs/small.toml: the configuration has 1 problem:
    model.attention is missing; allowed: a table with `kind`, or model.pattern with the kinds of the layers
      hint: add for example [model.attention] with kind = "rope"
    "#);
    insta::assert_snapshot!(hybrid_error("pattern = []"), @r#"
    configs/small.toml: the configuration has 1 problem:
    model.pattern is []; allowed: at least one name
      hint: name the kinds of the first layers, for example pattern = ["wall", "rope"]
    "#);
    insta::assert_snapshot!(hybrid_error(
        "pattern = [\"rope\", \"lokal\"]\n\
         kinds.local = { kind = \"rope\", window = 64 }"
    ), @r#"
    configs/small.toml: the configuration has 2 problems:
    model.pattern.1 is "lokal"; allowed: the name of a table under model.kinds or of a kind: local, rope, fox, wall, path, power, tra, tda, rela, diff, dex, diff_rela, lssar, entmax, stick_breaking, linear, rwkv7, gated_delta_net, kda, mamba2
      hint: add a table [model.kinds.lokal] with its `kind`, or use one of these
    model.kinds.local is a table that no layer uses; allowed: tables that model.pattern names
      hint: put "local" into model.pattern, or remove the table
    "#);
    insta::assert_snapshot!(hybrid_error(
        "pattern = [\"rope\", \"fox\", \"fox\"]\nattention = { kind = \"rope\", theta = 0.0 }"
    ), @r"
    configs/small.toml: the configuration has 3 problems:
    model.pattern is set beside model.attention; allowed: one of the two: one kind for all layers, or a pattern of kinds
      hint: remove the table [model.attention], or model.pattern
    model.pattern is 3 names; allowed: at most model.layers, 2: every name has a layer
      hint: set model.layers to 3 or more, or shorten the pattern
    model.attention.theta is 0; allowed: a number above 1
      hint: set theta = 10000
    ");
    insta::assert_snapshot!(hybrid_error(
        "attention = { kind = \"rope\" }\nkinds.local = { kind = \"rope\" }"
    ), @r#"
    configs/small.toml: the configuration has 1 problem:
    model.kinds.local is a table that no layer uses; allowed: tables that model.pattern names
      hint: put model.pattern with "local" in place of model.attention, or remove the table
    "#);
}

#[test]
fn a_kinds_problems_are_told_where_they_can_be_changed() {
    insta::assert_snapshot!(hybrid_error(
        "window = 64\npattern = [\"linear\", \"a\"]\n\
         kinds.a = { kind = \"rope\", theta = 0.5, window = 0 }"
    ), @r#"
    configs/small.toml: the configuration has 3 problems:
    model.window is 64; allowed: no window with this configuration of kind = "linear"
      hint: leave model.window out, or set model.kinds.linear.window = "none"
    model.kinds.a.window is 0; allowed: from 1 to 16777216
      hint: set a window of at least 1, or leave model.kinds.a.window out
    model.kinds.a.theta is 0.5; allowed: a number above 1
      hint: set theta = 10000
    "#);
    insta::assert_snapshot!(hybrid_error(
        "pattern = [\"a\", \"b\"]\nhead_dim = 15\nvalue_residual = \"learned\"\n\
         kinds.a = { kind = \"rwkv7\", window = 8 }\nkinds.b = { kind = \"diff\" }"
    ), @r#"
    configs/small.toml: the configuration has 3 problems:
    model.kinds.a.window is 8; allowed: no window with this configuration of kind = "rwkv7"
      hint: leave model.kinds.a.window out
    model.head_dim is 15; allowed: an even number with rotary positions
      hint: set model.kinds.b.rope = false, or choose an even width / heads
    model.value_residual is set, but values differ in channels (15 of a, 30 of b); allowed: kinds with as many channels in each head's values
      hint: set model.value_residual = "none", or choose other kinds
    "#);
}

#[test]
fn a_kinds_table_is_read_as_an_attention_table() {
    insta::assert_snapshot!(hybrid_error(
        "pattern = [\"a\"]\nkinds.a = { kind = \"rope\", windows = 8 }"
    ), @r"
    configs/small.toml:20: model.kinds.a.windows is no known key; allowed here: position, theta, rotary_fraction, scaling, softcap, ssmax, sinks, window
      hint: did you mean `window`?
    ");
    insta::assert_snapshot!(hybrid_error(
        "pattern = [\"a\"]\nkinds.a = { kind = \"rope\", window = \"full\" }"
    ), @r#"
    configs/small.toml:20: model.kinds.a.window is "full"; expected a number of tokens, or "none"
      hint: change the value of model.kinds.a.window
    "#);
    insta::assert_snapshot!(hybrid_error(
        "pattern = [\"a\"]\nkinds.a = { kind = \"rope\", window = -1 }"
    ), @r#"
    configs/small.toml:20: model.kinds.a.window is -1; expected a number of tokens, or "none"
      hint: change the value of model.kinds.a.window
    "#);
    insta::assert_snapshot!(hybrid_error("pattern = [\"a\"]\nkinds.a = { kind = \"roap\" }"), @r#"
    configs/small.toml:20: model.kinds.a.kind is "roap"; allowed: rope, fox, wall, path, power, tra, tda, rela, diff, dex, diff_rela, lssar, entmax, stick_breaking, linear, rwkv7, gated_delta_net, kda, mamba2
      hint: did you mean "rope"?
    "#);
    insta::assert_snapshot!(hybrid_error("pattern = [\"rope\"]\nkinds.rope = { window = 8 }"), @r"
    configs/small.toml:20: model.kinds.rope.kind is missing
      hint: add `kind = …` under [model.kinds.rope]
    ");
    insta::assert_snapshot!(hybrid_error("pattern = \"rope\""), @r#"
    configs/small.toml:19: model.pattern is "rope"; expected an array [...]
      hint: change the value of model.pattern
    "#);
}

#[test]
fn a_softcap_that_is_no_number_above_0_is_refused() {
    insta::assert_snapshot!(error(&["model.logit_softcap=0"]), @r"
    configs/small.toml: the configuration has 1 problem:
    model.logit_softcap is 0; allowed: a number above 0
      hint: leave it out for no cap, or set logit_softcap = 30.0
    ");
    for cap in ["-1.0", "nan", "inf", "1e-60", "1e60"] {
        assert!(parse(BASE, &[&format!("model.logit_softcap={cap}")]).is_err(), "{cap}");
    }
    let config = parse(BASE, &["model.logit_softcap=30"]).unwrap();
    assert_eq!(config.model.logit_softcap, Some(30.0));
}

#[test]
fn bf16_and_fp8_on_the_cpu_are_refused() {
    insta::assert_snapshot!(error(&["run.precision=fp8", "run.device=cpu"]), @r#"
    configs/small.toml: the configuration has 1 problem:
    run.precision is "fp8" with run.device = "cpu"; allowed: "f32" on the CPU
      hint: leave it out: bf16 is the default on CUDA, f32 on the CPU
    "#);
    insta::assert_snapshot!(error(&["run.precision=bf16", "run.device=cpu"]), @r#"
    configs/small.toml: the configuration has 1 problem:
    run.precision is "bf16" with run.device = "cpu"; allowed: "f32" on the CPU
      hint: leave it out: bf16 is the default on CUDA, f32 on the CPU
    "#);
    insta::assert_snapshot!(error(&["run.precision=fp16"]), @r#"
    --set run.precision=fp16: run.precision is "fp16"; allowed: f32, tf32, fp8, bf16
      hint: did you mean "bf16"?
    "#);
    for sets in [
        ["run.precision=bf16", "run.device=cuda"],
        ["run.precision=tf32", "run.device=cuda"],
        ["run.precision=fp8", "run.device=cuda"],
        ["run.precision=f32", "run.device=cpu"],
    ] {
        let config = parse(BASE, &sets).unwrap();
        assert_eq!(parse(&config.to_toml(), &[]).unwrap(), config);
    }
}

#[test]
fn a_very_long_key_is_refused_without_a_suggestion() {
    let key = "layer".repeat(100_000);
    let error = error_of("layers = 2", &format!("layers = 2\n{key} = 1"));
    assert!(error.contains("hint: remove model.layer"), "{}", &error[error.len() - 200..]);
}

#[test]
fn evaluations_in_the_loop_have_an_interval_or_steps() {
    let evaluate = |tables: &str| format!("train.evaluate=[{tables}]");
    let good = evaluate(
        "{ suite = \"passkey\", every = \"1k steps\", lengths = [500, \"1k\"] }, \
         { suite = \"passkey\", out = \"early\", steps = [1, 2] }, { suite = \"niah\", every = \"never\" }",
    );
    let config = parse(BASE, &[&good]).unwrap();
    assert_eq!(parse(&config.to_toml(), &[]).unwrap(), config);
    assert_eq!(config.train.evaluate[0].eval["lengths"].as_array().unwrap().len(), 2);
    let due = |step| config.train.evaluations_due(step, &config.timeline());
    assert_eq!(due(2), [1]);
    assert_eq!(due(1000), [0]);
    assert_eq!(due(config.total_steps()), [0]);

    let bad = evaluate(
        "{ suite = \"passkey\" }, { suite = \"passkey\", every = 5 }, { steps = [0] }, \
         { suite = \"fflm\", out = \"../up\", steps = [1000000000] }",
    );
    insta::assert_snapshot!(error(&[&bad]));
}

#[test]
fn a_kind_changed_alone_says_that_the_other_keys_belong_to_the_old_one() {
    let muon = crate::testing::config(&["train.optimiser={ kind = \"muon\" }"]).to_toml();
    let sets = ["train.optimiser.kind=adamw".to_owned()];
    let error = RunConfig::parse(&muon, Path::new("config.toml"), &sets).unwrap_err().to_string();
    let hint = "hint: set the whole table: --set 'train.optimiser={ kind = \"adamw\" }'";
    assert!(error.starts_with("--set train.optimiser.kind=adamw: train.optimiser."), "{error}");
    assert!(error.contains("belongs to the kind that the file has"), "{error}");
    assert!(error.ends_with(hint), "{error}");
    let sets = ["train.optimiser={ kind = \"adamw\" }".to_owned()];
    assert!(RunConfig::parse(&muon, Path::new("config.toml"), &sets).is_ok());
}

#[test]
fn an_average_can_only_be_evaluated_if_there_is_one() {
    let tables = "train.evaluate=[{ suite = \"passkey\", every = 5, weights = \"ema\" }]";
    let config = parse(BASE, &[tables, "train.ema=0.9"]).unwrap();
    assert_eq!(parse(&config.to_toml(), &[]).unwrap(), config);
    assert_eq!(eval_weights(&config.train.evaluate[0].eval), WeightsSelector::Ema);
    let after = "eval=[{ suite = \"fflm\" }, { suite = \"passkey\", weights = \"ema\" }]";
    let config = parse(BASE, &[after, "train.ema=0.9"]).unwrap();
    assert_eq!(parse(&config.to_toml(), &[]).unwrap(), config);
    let weights: Vec<_> = config.eval.iter().map(eval_weights).collect();
    assert_eq!(weights, [WeightsSelector::Model, WeightsSelector::Ema]);
    insta::assert_snapshot!(error(&[tables, after]), @r#"
    configs/small.toml: the configuration has 2 problems:
    train.evaluate.0.weights is "ema" in a run that keeps no average; allowed: "model", or "ema" with train.ema
      hint: set for example train.ema = 0.999, or leave weights out
    eval.1.weights is "ema" in a run that keeps no average; allowed: "model", or "ema" with train.ema
      hint: set for example train.ema = 0.999, or leave weights out
    "#);
    let unknown = [tables, after].map(|set| set.replace("\"ema\"", "3"));
    insta::assert_snapshot!(error(&[&unknown[0], &unknown[1]]), @r#"
    configs/small.toml: the configuration has 2 problems:
    train.evaluate.0.weights is 3; allowed: "model", "ema"
      hint: use "ema" for the moving average that train.ema keeps, or leave weights out
    eval.1.weights is 3; allowed: "model", "ema"
      hint: use "ema" for the moving average that train.ema keeps, or leave weights out
    "#);
}

#[test]
fn rows_of_generated_sources_are_not_cut() {
    let sets = [
        "data.sources=[{ kind = \"passkey\" }]",
        "train.stages=[{ from = 0.5, batch_tokens = 8192 }, { from = 0.6, seq_len = 64 }]",
    ];
    let found = error(&sets);
    assert!(
        found.contains("train.stages.1.seq_len is 64 with a source of kind \"passkey\""),
        "{found}"
    );
    assert!(found.contains("hint: remove seq_len from the stages"), "{found}");
    for rows in ["documents", "cut-documents"] {
        parse(BASE, &[&sets[..], &[&format!("data.rows={rows}")]].concat()).unwrap();
    }
}

/// The stages of [`BASE`] with other windows.
fn windows(values: [&str; 2]) -> String {
    let [first, second] = values;
    format!("train.stages=[{{ from = 0, window = {first} }}, {{ from = 0.5, window = {second} }}]")
}

#[test]
fn a_stage_may_have_a_window_of_its_own() {
    let config = parse(BASE, &[&windows(["64", "\"none\""]), "model.window=8"]).unwrap();
    assert_eq!(parse(&config.to_toml(), &[]).unwrap(), config);
    let steps = config.total_steps();
    let after = |step| config.model_after(step).window;
    assert_eq!([0, 1, steps / 2, steps].map(after), [Some(64), Some(64), Some(64), None]);
    assert_eq!((config.widest_model().window, config.model.window), (None, Some(8)));
    // Two halves of the FLOPs that each window takes.
    let with = |window: &str| parse(BASE, &[&format!("model.window={window}")]).unwrap();
    let [narrow, whole] = ["64", "\"none\""].map(|window| with(window).train_flops(257));
    let share = (config.train_flops(257) - narrow) / (whole - narrow);
    assert!(narrow < whole && (share - 0.5).abs() < 0.01, "{narrow}, {whole}, {share}");
}

#[test]
fn a_window_that_the_model_cannot_have_is_refused_in_stages_too() {
    insta::assert_snapshot!(error(&[&windows(["0", "99999999"])]), @r"
    configs/small.toml: the configuration has 2 problems:
    train.stages.0.window is 0; allowed: from 1 to 16777216
      hint: set a window of at least 1, or leave train.stages.0.window out
    train.stages.1.window is 99999999; allowed: from 1 to 16777216
      hint: set a window of at least 1, or leave train.stages.1.window out
    ");
    let wall = "model.attention={ kind = \"wall\", prune = true }";
    insta::assert_snapshot!(error(&[wall, &windows(["\"none\"", "64"])]), @r#"
    configs/small.toml: the configuration has 1 problem:
    train.stages.1.window is 64; allowed: no window with this configuration of kind = "wall"
      hint: leave train.stages.1.window out
    "#);
    let evicts = "model.attention={ kind = \"wall\", evict_below = 0.1 }";
    assert!(error(&[evicts, &windows(["\"none\"", "64"])]).contains("train.stages.1.window is 64"));
    assert!(parse(BASE, &[wall, &windows(["\"none\"", "\"none\""])]).is_ok());
    insta::assert_snapshot!(error(&[&windows(["-1", "\"all\""])]), @r#"
    --set train.stages=[{ from = 0, window = -1 }, { from = 0.5, window = "all" }]: train.stages.0.window is -1; expected a number of tokens, or "none"
      hint: change the value of train.stages.0.window
    "#);
}

#[test]
fn a_stages_window_is_that_of_layers_without_their_own() {
    let hybrid = |keys: &str| {
        let source = BASE.replace("layers = 2", &format!("layers = 2\n{keys}"));
        source.replace("attention = { kind = \"rope\" }", "")
    };
    let stages = windows(["16", "32"]);
    let mixed =
        hybrid("pattern = [\"local\", \"rope\"]\nkinds.local = { kind = \"rope\", window = 4 }");
    let last = parse(&mixed, &[&stages]).unwrap().model_after(u64::MAX);
    assert_eq!([0, 1].map(|layer| last.attention_shape(layer).window), [Some(4), Some(32)]);

    let linear = hybrid("pattern = [\"linear\", \"rope\"]");
    insta::assert_snapshot!(parse(&linear, &[&stages]).unwrap_err().to_string(), @r#"
    configs/small.toml: the configuration has 2 problems:
    train.stages.0.window is 16; allowed: no window with this configuration of kind = "linear"
      hint: leave train.stages.0.window out, or set model.kinds.linear.window = "none"
    train.stages.1.window is 32; allowed: no window with this configuration of kind = "linear"
      hint: leave train.stages.1.window out, or set model.kinds.linear.window = "none"
    "#);
    let own = hybrid("pattern = [\"a\"]\nkinds.a = { kind = \"rope\", window = 4 }");
    insta::assert_snapshot!(parse(&own, &[&windows(["16", "\"none\""])]).unwrap_err().to_string(), @r"
    configs/small.toml: the configuration has 2 problems:
    train.stages.0.window is 16; allowed: a window that some layer takes: every table of model.kinds has its own
      hint: leave train.stages.0.window out, or remove window from the tables of the layers that it is for
    train.stages.1.window is none; allowed: a window that some layer takes: every table of model.kinds has its own
      hint: leave train.stages.1.window out, or remove window from the tables of the layers that it is for
    ");
}

#[test]
fn streams_ask_for_states_and_for_batches_of_one_shape() {
    let hybrid = [
        "data.rows=\"streams\"",
        "model.attention={ kind = \"linear\", rope = true }",
        "model.positions=\"learned\"",
        "train.stages=[{ from = 0.5, batch_tokens = 8192 }]",
    ];
    insta::assert_snapshot!(error(&hybrid), @r#"
    configs/small.toml: the configuration has 3 problems:
    data.rows is "streams" with kind = "linear" in layers 0, 1; allowed: kinds whose past is a state, without rotated keys: linear, rwkv7, gated_delta_net, kda, mamba2
      hint: set data.rows = "packed", or give the layers such a kind
    data.rows is "streams" with model.positions = "learned"; allowed: no learned positions: a document may be longer than a row
      hint: set data.rows = "packed", or model.positions = "none"
    train.stages is batches of another shape with data.rows = "streams"; allowed: train.batch_tokens and data.seq_len in all steps: each row of a batch is one stream
      hint: remove batch_tokens and seq_len from the stages, or set data.rows = "packed"
    "#);
    let softmax = ["data.rows=\"streams\"", "model.layers=1"];
    insta::assert_snapshot!(error(&softmax), @r#"
    configs/small.toml: the configuration has 1 problem:
    data.rows is "streams" with kind = "rope" in layer 0; allowed: kinds whose past is a state, without rotated keys: linear, rwkv7, gated_delta_net, kda, mamba2
      hint: set data.rows = "packed", or give the layer such a kind
    "#);
    let states = ["data.rows=\"streams\"", "model.attention={ kind = \"kda\" }"];
    assert_eq!(crate::testing::config(&states).data.rows, longwall_data::Rows::Streams);
}

#[test]
fn ranks_that_share_rows_divide_heads_and_rows() {
    let shared = "train.context_parallel=4";
    let streams = ["data.rows=\"streams\"", "train.noise_scale.every=10"];
    let linear = [shared, "model.attention={ kind = \"linear\" }"];
    insta::assert_snapshot!(error(&[&linear[..], &streams].concat()), @r#"
    configs/small.toml: the configuration has 2 problems:
    train.noise_scale.every is set, with train.context_parallel = 4; allowed: "never": no rank has the gradient of a micro-batch
      hint: set it to "never", or leave context_parallel out
    data.rows is "streams" with train.context_parallel = 4; allowed: "packed", "documents" or "cut-documents" if ranks share rows
      hint: set data.rows = "packed", or leave train.context_parallel out
    "#);
    insta::assert_snapshot!(error(&[shared, "model.kv_heads=2"]), @r#"
    configs/small.toml: the configuration has 1 problem:
    train.context_parallel is 4; allowed: 1, 2 with the 2 heads of keys and values and kind = "rope" of layer 0
      hint: leave train.context_parallel out, or give the layer other heads, or another kind or configuration
    "#);
    insta::assert_snapshot!(error(&[shared, "model.attention.position=alibi"]), @r#"
    configs/small.toml: the configuration has 1 problem:
    train.context_parallel is 4; allowed: 1 with the 4 heads of keys and values and kind = "rope" of layer 0
      hint: leave train.context_parallel out, or give the layer other heads, or another kind or configuration
    "#);
    insta::assert_snapshot!(error(&["train.context_parallel=0"]), @r"
    configs/small.toml: the configuration has 1 problem:
    train.context_parallel is 0; allowed: a divisor of the 512 tokens of a row that leaves each rank 16 or more
      hint: leave it out, or set 2, 4 or 8 for as many GPUs
    ");
    insta::assert_snapshot!(error(&[shared, "data.seq_len=32"]), @r"
    configs/small.toml: the configuration has 1 problem:
    train.context_parallel is 4; allowed: a divisor of the 32 tokens of a row that leaves each rank 16 or more
      hint: leave it out, or set 2, 4 or 8 for as many GPUs
    ");
    // One whose norm spans the heads that share a head of k.
    let mamba2 = |key_heads: usize| {
        format!("model.attention={{ kind = \"mamba2\", key_heads = {key_heads} }}")
    };
    assert!(error(&[shared, &mamba2(1)]).contains("allowed: 1 with the 4 heads"));
    assert_eq!(parse(BASE, &[shared, &mamba2(4)]).unwrap().train.context_parallel, 4);
}
