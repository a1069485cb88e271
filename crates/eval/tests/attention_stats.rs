//! What layers measure, by length, layer, view and head.

use std::path::Path;

use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_data::{Tokenizer, TokenizerConfig};
use longwall_eval::memory::CallMemory;
use longwall_eval::suites::attention_stats::{AttentionStatsOptions, TextWeights};
use longwall_eval::{
    Discard, EvalError, Ranks, Report, RunContext, Silent, SuiteConfig, TrainedModel, run,
};
use longwall_kernels::attention::probe::{Metric, Observation, PRUNED_FRACTION};
use longwall_kernels::attention::rowwise::sparsity;
use longwall_kernels::attention::{retention, weights};
use longwall_model::{LanguageModel, ModelConfig, Precision};

use crate::common::{FakeModel, Tokens, evaluate_with, files, samples};

const ENTROPY: Metric = Metric("entropy");

/// What layer 1 leaves out; means of it are exact.
const PRUNED: f64 = 1.0 / 1024.0;

fn held_out() -> Tokens {
    Tokens((0..400).map(|t| 97 + t * t % 23).collect())
}

fn config(lengths: &[usize]) -> SuiteConfig {
    let lengths = Some(lengths.to_vec());
    SuiteConfig::from(AttentionStatsOptions { lengths, sequences: 3, ..Default::default() })
}

/// Layers 0 and 2 measure ENTROPY of two views of two heads, layer 1 PRUNED_FRACTION of itself. Entropies are
/// length + 100 · layer + 10 · view + head, and 0 for the first head; in odd windows they are 0.5 more.
fn measuring() -> FakeModel {
    let observe = |tokens: &[u32]| -> Vec<Observation> {
        let more = if tokens[0].is_multiple_of(2) { 0.0 } else { 0.5 };
        let entropy = |layer: usize| {
            let at = |view: usize, head: usize| {
                (tokens.len() + 100 * layer + 10 * view + head) as f64 + more
            };
            let heads = vec![vec![0.0, at(0, 1)], vec![at(1, 0), at(1, 1)]];
            let value = heads.concat().iter().sum::<f64>() / 4.0;
            Observation { layer, metric: ENTROPY, value, heads, channels: vec![] }
        };
        let pruned = Observation {
            layer: 1,
            metric: PRUNED_FRACTION,
            value: PRUNED,
            heads: vec![],
            channels: vec![],
        };
        vec![entropy(0), pruned, entropy(2)]
    };
    FakeModel {
        train_seq_len: 64,
        metrics: vec![ENTROPY, PRUNED_FRACTION],
        observe: Box::new(observe),
        ..FakeModel::bytes(|_| String::new())
    }
}

fn evaluate(config: &SuiteConfig, model: &mut FakeModel, dir: &Path) -> Result<Report, EvalError> {
    evaluate_with(config, model, dir, false, Some(&held_out()))
}

#[test]
fn every_metric_has_its_layers_views_and_heads_by_length() {
    let dir = tempfile::tempdir().unwrap();
    let report = evaluate(&config(&[32, 128]), &mut measuring(), dir.path()).unwrap();
    // Three stretches of 128 tokens, each of four windows of 32.
    assert_eq!(samples(dir.path()).len(), 12 + 3);
    let headline: Vec<_> = report.headline.keys().map(String::as_str).collect();
    let want = ["entropy@128", "entropy@32", "pruned_fraction@128", "pruned_fraction@32"];
    assert_eq!(headline, want);
    assert_eq!(report.headline["pruned_fraction@32"], Some(PRUNED));

    let layers = report.details["layers"].as_array().unwrap();
    let places: Vec<_> = layers
        .iter()
        .map(|x| (x["length"].as_u64().unwrap(), x["layer"].as_u64().unwrap()))
        .collect();
    assert_eq!(places, [(32, 0), (32, 1), (32, 2), (128, 0), (128, 1), (128, 2)]);
    assert_eq!(layers[1]["heads"].as_array().unwrap().len(), 0);
    // The mean over the windows.
    let odd = samples(dir.path())
        .iter()
        .filter(|x| x["length"] == 32 && x["verdict"][2]["heads"][1][1] != 243.0)
        .count();
    let heads = &layers[2]["heads"];
    assert_eq!(heads[0][0], 0.0);
    let last = heads[1][1].as_f64().unwrap();
    assert!((last - (243.0 + 0.5 * odd as f64 / 12.0)).abs() < 1e-9, "{last}, {odd} odd windows");

    let csv = std::fs::read_to_string(dir.path().join("heads.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 2 * (4 + 1 + 4));
    assert!(csv.contains(&format!("pruned_fraction,128,1,,,{PRUNED},3\n")), "{csv}");
    assert!(csv.contains(&format!("entropy,32,2,1,1,{last},12\n")), "{csv}");
    let written = files(dir.path());
    for file in ["entropy.svg", "pruned_fraction.svg", "results.json", "grid.csv"] {
        assert!(written.iter().any(|name| name == file), "{file} of {written:?}");
    }
    let loaded = Report::load(&dir.path().join("results.json")).unwrap();
    assert_eq!(loaded, Report { tables: vec![], ..report });
}

#[test]
fn the_table_has_a_row_for_each_layer_and_view() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = measuring();
    let observe = model.observe;
    model.observe = Box::new(move |tokens| observe(&tokens.iter().map(|_| 0).collect::<Vec<_>>()));
    let report = evaluate(&config(&[32, 128]), &mut model, dir.path()).unwrap();
    insta::assert_snapshot!(report.to_string(), @"
    attention-stats (version 2): run wall, step 100, 15 samples, seed 0, fake
    length          entropy      pruned_fraction
        32  104.500 ± 0.000  0.000977 ± 0.000000
       128  176.500 ± 0.000  0.000977 ± 0.000000

    entropy by layer and length: mean of the heads (lowest to highest head)
        layer                            32                           128
    0, view 0      16.500 (0.000 to 33.000)     64.500 (0.000 to 129.000)
    0, view 1     42.500 (42.000 to 43.000)  138.500 (138.000 to 139.000)
    2, view 0    116.500 (0.000 to 233.000)    164.500 (0.000 to 329.000)
    2, view 1  242.500 (242.000 to 243.000)  338.500 (338.000 to 339.000)

    pruned_fraction by layer and length: mean of the heads (lowest to highest head)
    layer       32      128
        1  9.77e-4  9.77e-4
    lengths in tokens of the bytes tokenizer (trained at 64); ± is the standard error
    note: length 128 is beyond the training length, 64: such scores show how the model extrapolates
    ");
}

#[test]
fn a_metric_that_no_layer_reports_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel { observe: Box::new(|_| Vec::new()), ..measuring() };
    let report = evaluate(&config(&[64]), &mut model, dir.path()).unwrap();
    assert!(report.scores.is_empty() && report.headline.is_empty());
    insta::assert_snapshot!(report.notes.join("\n"), @"
    no layer reported entropy: the code that measures it does not run on this device
    no layer reported pruned_fraction: the code that measures it does not run on this device
    ");
}

#[test]
fn a_value_that_is_no_number_is_null_and_said_to_be() {
    let dir = tempfile::tempdir().unwrap();
    let heads = || vec![vec![f64::NAN, 1.0]];
    let observe = move |_: &[u32]| {
        vec![Observation {
            layer: 0,
            metric: ENTROPY,
            value: f64::NAN,
            heads: heads(),
            channels: vec![],
        }]
    };
    let mut model = FakeModel { observe: Box::new(observe), ..measuring() };
    let report = evaluate(&config(&[64]), &mut model, dir.path()).unwrap();
    let layer = &report.details["layers"][0];
    assert!(layer["value"].is_null() && layer["heads"][0][0].is_null(), "{layer}");
    assert_eq!(layer["heads"][0][1], 1.0);
    assert!(report.to_string().contains("not finite"), "{report}");
    assert!(!files(dir.path()).contains(&"entropy.svg".to_string()));
}

#[test]
fn a_model_that_measures_nothing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel { metrics: vec![], ..measuring() };
    let error = evaluate(&config(&[64]), &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @"
    attention-stats: no layer of the model measures anything; allowed: models with a layer of a kind that does, such as rope, fox, wall, path, power, tra, tda, rela, diff, dex, diff_rela, lssar, entmax, stick_breaking, linear, rwkv7, gated_delta_net, kda, mamba2
      hint: docs/evaluation.md lists the metrics, and which settings of a kind report them
    ");
    assert!(model.calls.is_empty());
}

#[test]
fn bad_options_are_reported_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let options = AttentionStatsOptions {
        lengths: Some(vec![48, 64, 0]),
        sequences: 0,
        packed: true,
        ..Default::default()
    };
    let error = evaluate(&SuiteConfig::from(options), &mut measuring(), dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @"
    the configuration has 4 problems:
    attention-stats.lengths is 0; allowed: lengths above 0, in tokens
      hint: remove the 0
    attention-stats.lengths is 48; allowed: divisors of the longest length, 64
      hint: use powers of two: all lengths are scored on the same tokens
    attention-stats.packed is true without attention-stats.text; allowed: only beside --text
      hint: leave out --packed: the validation split is packed anyway
    attention-stats.sequences is 0; allowed: 1 to 100000000
      hint: more --sequences give smaller standard errors; 4 is usual
    ");
    let error = evaluate(&config(&[1024]), &mut measuring(), dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @"
    attention-stats: the text has 400 tokens (validation split of a test); length 1024 needs 1025
      hint: give more text, or shorter --lengths
    ");
    let mut bounded = FakeModel { max_len: Some(64), ..measuring() };
    let error = evaluate(&config(&[128]), &mut bounded, dir.path()).unwrap_err();
    assert!(matches!(error, EvalError::TooLong { length: 128, max_len: 64, .. }), "{error}");
}

#[test]
fn default_lengths_are_parts_and_multiples_of_the_training_length() {
    let lengths = |model: &mut FakeModel| {
        let dir = tempfile::tempdir().unwrap();
        let config = SuiteConfig::from(AttentionStatsOptions::default());
        let report = evaluate(&config, model, dir.path()).unwrap();
        report.resolved["lengths"].to_string()
    };
    // Four stretches of 128 would need 513 tokens.
    assert_eq!(lengths(&mut measuring()), "[16,32,64]");
    assert_eq!(lengths(&mut FakeModel { train_seq_len: 18, ..measuring() }), "[9,18,36,72]");
    let mut bounded = FakeModel { train_seq_len: 15, max_len: Some(30), ..measuring() };
    assert_eq!(lengths(&mut bounded), "[15,30]");
}

/// Evaluates a model of three layers with these kinds; returns the model and the report.
fn evaluate_trained(pattern: &str, lengths: &[usize], dir: &Path) -> (LanguageModel<Flex>, Report) {
    let options = AttentionStatsOptions {
        lengths: Some(lengths.to_vec()),
        sequences: 1,
        ..Default::default()
    };
    let (model, report) = evaluate_layers(pattern, options, dir, false);
    (model, report.unwrap())
}

fn evaluate_layers(
    pattern: &str,
    options: AttentionStatsOptions,
    dir: &Path,
    force: bool,
) -> (LanguageModel<Flex>, Result<Report, EvalError>) {
    let table = format!("layers = 3\nwidth = 16\nheads = 2\nqk_norm = true\npattern = {pattern}");
    let config: ModelConfig = toml::from_str(&table).unwrap();
    let device = Default::default();
    let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
    let model = LanguageModel::<Flex>::new(&config, tokenizer.vocab_size(), 64, 1, &device);
    let memory = CallMemory::new(&config, Precision::F32);
    let mut trained = TrainedModel::new(model.clone(), tokenizer, 64, memory, device);
    let held_out = held_out();
    let context = RunContext {
        out_dir: dir.to_path_buf(),
        run: "sparse".to_string(),
        checkpoint_step: None,
        model_changes: vec![],
        git_hash: None,
        discard: if force { Discard::All } else { Discard::Nothing },
        held_out: Some(&held_out),
        progress: &Silent,
        stop: None,
        ranks: Ranks::ALONE,
    };
    let report = run(&SuiteConfig::from(options), &mut trained, &context);
    (model, report)
}

#[test]
fn a_trained_model_reports_what_its_layers_observe() {
    let dir = tempfile::tempdir().unwrap();
    let (model, report) = evaluate_trained("[\"rope\", \"tra\", \"tda\"]", &[100], dir.path());
    let window = samples(dir.path())[0]["prompt"].as_str().unwrap().as_bytes().to_vec();
    let tokens: Vec<i32> = window.iter().map(|byte| i32::from(*byte)).collect();
    let tokens =
        Tensor::<Flex, 2, Int>::from_data(TensorData::new(tokens, [1, 100]), &Default::default());
    let observations = model.observe_thoroughly(tokens);
    let layers = report.details["layers"].as_array().unwrap();
    let of_weights = [1, 1, 2].map(weights::metrics).concat().len();
    assert_eq!(layers.len(), of_weights + 2 * sparsity::METRICS.len());
    for (got, want) in layers.iter().zip(observations.observations()) {
        assert_eq!((&got["layer"], &got["metric"]), (&want.layer.into(), &want.metric.0.into()));
        assert_eq!(got["heads"], serde_json::to_value(&want.heads).unwrap());
        let views = if want.layer == 2 && want.metric != weights::VIEW_CORRELATION { 2 } else { 1 };
        assert_eq!(want.heads.len(), views, "{} of layer {}", want.metric.0, want.layer);
    }
}

#[test]
fn gates_are_measured_by_channel_at_the_longest_length() {
    let dir = tempfile::tempdir().unwrap();
    evaluate_trained("[\"wall\", \"fox\", \"rope\"]", &[50, 100], dir.path());
    let csv = std::fs::read_to_string(dir.path().join("channels.csv")).unwrap();
    let rows: Vec<Vec<&str>> = csv.lines().skip(1).map(|line| line.split(',').collect()).collect();
    let count = |metric: Metric, layer: &str| {
        rows.iter().filter(|row| row[0] == metric.0 && row[2] == layer).count()
    };
    // Wall has a gate for each channel of two heads, fox one for each head.
    assert_eq!([0, 1, 2].map(|layer| count(retention::RETENTION, &layer.to_string())), [16, 2, 0]);
    assert_eq!(rows.len(), 2 * 18);
    for row in rows {
        assert_eq!(row[1], "100");
        let value: f64 = row[5].parse().unwrap();
        assert!((0.0..=1.0).contains(&value), "{row:?}");
    }
}

fn one_text(text: &str) -> AttentionStatsOptions {
    AttentionStatsOptions { tokens: Some(text.to_string()), ..Default::default() }
}

fn weights_of(dir: &Path) -> TextWeights {
    serde_json::from_slice(&std::fs::read(dir.join("weights.json")).unwrap()).unwrap()
}

#[test]
fn the_weights_of_one_text_are_written_and_its_metrics_measured() {
    let dir = tempfile::tempdir().unwrap();
    let kinds = "[\"rope\", \"gated_delta_net\", \"diff\"]";
    let (model, report) =
        evaluate_layers(kinds, one_text("Zwei Bäume, one tree."), dir.path(), false);
    let report = report.unwrap();
    assert_eq!((report.samples, &report.resolved["lengths"]), (1, &serde_json::json!([22])));
    assert!(report.headline["entropy@22"].is_some(), "{:?}", report.headline);
    insta::assert_snapshot!(report.notes.join("\n"), @"weights.json is without layer 1 (gated_delta_net): kinds whose past is a state have no weights of keys");

    let weights = weights_of(dir.path());
    assert_eq!(weights.tokens[5..8], ["B", "\\xc3", "\\xa4"]);
    let layers: Vec<_> = weights.layers.iter().map(|x| (x.layer, &x.kind[..], x.shares)).collect();
    assert_eq!(layers, [(0, "rope", false), (2, "diff", true)]);
    let tokens: Vec<i32> = "Zwei Bäume, one tree.".bytes().map(i32::from).collect();
    let tokens =
        Tensor::<Flex, 2, Int>::from_data(TensorData::new(tokens, [1, 22]), &Default::default());
    let all = model.attention_weights(tokens);
    for layer in &weights.layers {
        let map = all[layer.layer].map.as_ref().unwrap();
        for (got, want) in layer.heads.iter().flatten().zip(map.heads.iter().flatten()) {
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                assert!((got.unwrap() - want).abs() <= 1e-3 * want.abs(), "{got:?}, not {want}");
            }
        }
    }
    let least = weights.layers[1].heads.iter().flatten().flatten().flatten().copied();
    assert!(least.fold(0.0, f32::min) < -0.01, "no weight of diff is negative");

    // A later evaluation of other text has no such file.
    let other = AttentionStatsOptions { lengths: Some(vec![32]), ..Default::default() };
    evaluate_layers(kinds, other, dir.path(), true).1.unwrap();
    assert!(!files(dir.path()).contains(&"weights.json".to_string()));
}

#[test]
fn the_text_may_be_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    std::fs::write(&path, "x").unwrap();
    let out = dir.path().join("out");
    let option = one_text(&format!("@{}", path.display()));
    evaluate_layers("[\"rope\"]", option, &out, false).1.unwrap();
    let weights = weights_of(&out);
    assert_eq!(
        (weights.tokens, &weights.layers[0].heads[1]),
        (vec!["x".into()], &vec![vec![Some(1.0)]])
    );
}

#[test]
fn a_text_that_has_no_map_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |kinds: &str, options| {
        evaluate_layers(kinds, options, dir.path(), false).1.unwrap_err().to_string()
    };
    insta::assert_snapshot!(refused("[\"mamba2\", \"kda\"]", one_text("ab")), @"
    attention-stats: no layer of the model has weights of keys, which --tokens writes; allowed: models with a layer of a kind that does, such as rope, fox, wall, path, power, tra, tda, rela, diff, dex, diff_rela, lssar, entmax, stick_breaking
      hint: docs/evaluation.md lists the metrics, and which settings of a kind report them
    ");
    insta::assert_snapshot!(refused("[\"rope\"]", one_text("")), @"
    attention-stats: the text of --tokens has 0 tokens of the bytes tokenizer; allowed: 1 to 512
      hint: give a text, or @FILE for that of a file
    ");
    insta::assert_snapshot!(refused("[\"rope\"]", one_text(&"ab ".repeat(171))), @"
    attention-stats: the text of --tokens has 513 tokens of the bytes tokenizer; allowed: 1 to 512
      hint: give a shorter text: a map has a row and a column for each token
    ");
    insta::assert_snapshot!(refused("[\"rope\"]", one_text("@/none/text.txt")), @"
    cannot read /none/text.txt: No such file or directory (os error 2)
      hint: check that the path exists and that you may read it
    ");
    let options = AttentionStatsOptions {
        lengths: Some(vec![8]),
        sequences: 2,
        text: vec!["a.txt".into()],
        packed: true,
        ..one_text("ab")
    };
    insta::assert_snapshot!(refused("[\"rope\"]", options), @"
    the configuration has 4 problems:
    attention-stats.lengths is given beside tokens; allowed: only without tokens, which is read alone and as a whole
      hint: leave out --lengths, or --tokens
    attention-stats.sequences is given beside tokens; allowed: only without tokens, which is read alone and as a whole
      hint: leave out --sequences, or --tokens
    attention-stats.text is given beside tokens; allowed: only without tokens, which is read alone and as a whole
      hint: leave out --text, or --tokens
    attention-stats.packed is given beside tokens; allowed: only without tokens, which is read alone and as a whole
      hint: leave out --packed, or --tokens
    ");
}
