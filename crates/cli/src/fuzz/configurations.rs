//! Run configurations and sweeps, from their text to what they cost.
//!
//! A line `#set key=value` of the text is a `--set` of the command line.

use std::path::{Path, PathBuf};

use longwall_eval::memory::CallMemory;
use longwall_fuzzing::{Folder, TOML, checked, fuzz, mutated_text};
use longwall_kernels::attention::AttentionConfig;
use longwall_kernels::device::DeviceKind;
use longwall_model::Precision;
use longwall_model::cost;
use longwall_train::config::RunConfig;
use longwall_train::memory;
use longwall_train::sweep::{Plan, SweepConfig};

use crate::commands::eval::suites_of;
use crate::commands::info::{Info, LONGEST};

/// Optional keys, with values that are often valid.
const KEYS: [&str; 64] = [
    "run.threads=1",
    "run.precision=\"f32\"",
    "run.seed=7",
    "data.sources=[{ kind = \"passkey\", min_len = 16 }, { kind = \"fflm\", instructions = 16 }]",
    "data.sources=[{ kind = \"text\", paths = [\"a\"], separator = \"b\", weight = 2 }]",
    "data.sources=[{ kind = \"mqar\", length = 16 }, { kind = \"mqrar\", length = 16 }]",
    "data.sources=[{ kind = \"word-problem\" }, { kind = \"phonebook\", answer_only = false }]",
    "data.sources.0.weight=1e308",
    "data.validation_tokens=\"1M\"",
    "model.kv_heads=1",
    "model.head_dim=64",
    "model.heads=1",
    "model.layers=1024",
    "model.width=262144",
    "model.mlp_width=262144",
    "model.window=64",
    "model.logit_softcap=30",
    "model.arch=\"llama\"",
    "model.arch=\"rwkv7\"",
    "model.positions=\"learned\"",
    "model.norm_position=\"sandwich\"",
    "model.value_residual=\"gated\"",
    "model.value_residual=\"learned\"",
    "model.output_gate=true",
    "model.token_shift=true",
    "model.short_conv=true",
    "model.pattern=[\"rope\", \"wall\"]",
    "model.kinds.rope={ kind = \"rope\", window = \"none\" }",
    "train.micro_batch=1",
    "train.batch_tokens=4294967296",
    "train.tokens=9e15",
    "train.recompute=true",
    "train.clip=\"off\"",
    "train.z_loss=1e-4",
    "train.optimiser.kind=\"adamw\"",
    "train.optimiser={ kind = \"muon\", per_head = true, adamw = { eps = 1e-6 } }",
    "train.optimiser={ kind = \"normuon\", coefficients = \"polar-express\" }",
    "train.groups=[{ match = [\"*.mlp.*\", \"e?bedding\"], lr = 2, optimiser = { kind = \"lion\" } }]",
    "train.groups.0.match=\"*\"",
    "train.ema=0.999",
    "train.norms.every=1",
    "model.init_std=0.1",
    "model.scale_residual_init=false",
    "train.stages=[{ from = 0, seq_len = 16 }, { from = 0.5, batch_tokens = \"64k\" }]",
    "train.stages=[{ from = \"1k tokens\", batch_tokens = 8192, micro_batch = 2 }]",
    "train.stages.0.from=1",
    "train.stages=[{ from = 0, window = 8 }, { from = 2, window = \"none\" }]",
    "model.window=\"none\"",
    "train.noise_scale={ every = 5, decay = 0.5 }",
    "train.evaluate=[{ suite = \"passkey\", steps = [1], weights = \"ema\" }]",
    "train.stages.0.seq_len=64",
    "train.schedule={ kind = \"wsd\", decay = 0.5, warmup = 1 }",
    "train.schedule={ kind = \"linear\", warmup = 9, initial_lr_ratio = 0.5 }",
    "train.skip={ outlier_z = 6, window = 8, max_in_a_row = 1 }",
    "train.sample={ every = 1, tokens = 1, prompts = [\"\"] }",
    "train.checkpoint={ every = \"never\", keep_last = 1 }",
    "eval=[{ suite = \"passkey\", trials = 1, depths = 2 }, { suite = \"fflm\" }]",
    "eval=[{ suite = \"niah\", min_length = 64, max_length = 4096, length_count = 3 }]",
    "eval=[{ suite = \"extrapolate\", lengths = [64, 128], sequences = 2, batch = 1 }]",
    "eval=[{ suite = \"mqar\", form = \"compositional\", pairs = [4, 9] }, { suite = \"ruler\" }]",
    "eval=[{ suite = \"mqrar\", keys = 4 }, { suite = \"word-problem\", group = \"s5\" }]",
    "eval=[{ suite = \"perplexity\", stride = 8 }, { suite = \"babilong\", tasks = [\"qa4\"] }]",
    "eval.0.batch_tokens=\"64k\"",
    "eval.0.weights=\"ema\"",
];

/// The files of a folder of configurations.
fn files_of(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(folder);
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_toml = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "toml");
    let mut files: Vec<PathBuf> = entries.filter(is_toml).collect();
    files.sort();
    assert!(!files.is_empty());
    files
}

/// Optional keys, and those of every kind of attention.
fn lines() -> Vec<String> {
    let kinds = AttentionConfig::KINDS.iter().flat_map(|known| {
        let whole = format!("model.attention={{ kind = \"{}\" }}", known.kind);
        let keys = (known.keys)().iter().map(|key| format!("model.attention.{key}=1"));
        std::iter::once(whole).chain(keys)
    });
    KEYS.into_iter().map(str::to_owned).chain(kinds).map(|key| format!("#set {key}")).collect()
}

/// The configurations as they are shipped, and with all their defaults.
fn configurations() -> Vec<Vec<u8>> {
    let files = [files_of(""), files_of("gpu")].concat();
    let texts = files.iter().flat_map(|path| {
        let whole = RunConfig::load(path, &[]).unwrap();
        [std::fs::read_to_string(path).unwrap(), whole.to_toml()]
    });
    texts.map(String::into_bytes).collect()
}

/// A path from which `extends` finds the bases of the shipped configurations.
fn beside_the_bases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/gpu/run.toml")
}

fn sets_in(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_prefix("#set ")).map(str::to_owned).collect()
}

/// What the configuration costs: all figures are numbers, and none has wrapped around.
fn check_costs(config: &RunConfig) {
    let (model, seq_len) = (&config.model, config.data.seq_len);
    // The bytes' vocabulary, and the largest that a file may have.
    for vocab in [257, 1 << 24] {
        let info = serde_json::to_value(Info::of(config, vocab, seq_len)).unwrap();
        let number = |key: &str| info[key].as_f64().unwrap_or_else(|| panic!("{key} in {info}"));
        let hidden = model.mlp_hidden() as f64;
        let least = model.width as f64 * (vocab as f64 + 2.0 * model.layers as f64 * hidden);
        let parameters = number("parameters_total");
        assert!((least * 0.999..1e18).contains(&parameters), "{parameters} parameters");
        assert!(number("forward_flops_per_token") > 0.0);
        assert!(number("train_flops") > 0.0);
        // Weights, gradients, and at least one moment.
        assert!(number("train_memory_bytes") >= 12.0 * parameters);
        for stage in config.timeline().stages() {
            let micro_batch = stage.micro_batch_rows(1 << 16);
            assert!(micro_batch > 0 && stage.rows().is_multiple_of(micro_batch));
            let (shape, precision) = ([micro_batch, stage.seq_len], Precision::F32);
            let least =
                memory::least_for_training(config, vocab, shape, precision, DeviceKind::Cpu);
            assert!(least as f64 >= 12.0 * parameters);
        }
    }
    for length in [1, seq_len, LONGEST] {
        let state = cost::state_elements(model, length);
        let kinds = cost::by_kind(model, length);
        let sum = kinds.iter().map(|kind| u128::from(kind.state_elements)).sum::<u128>();
        assert_eq!(u128::from(state), sum.min(u64::MAX.into()));
        assert!(cost::weight_state_ratio(model, length) > 0.0);
        let call = CallMemory::new(model, Precision::F32).least(16, length, true);
        assert!(call >= state.saturating_mul(4));
    }
}

fn check_schedule(config: &RunConfig) {
    let train = &config.train;
    let timeline = config.timeline();
    let (schedule, steps) = (train.lr_schedule(&timeline), timeline.total_steps());
    assert!(steps > 0);
    assert!(timeline.tokens(steps) >= train.tokens && timeline.tokens(steps - 1) < train.tokens);
    for step in [0, 1, steps / 2, steps - 1, steps, u64::MAX] {
        let lr = schedule.lr(step);
        assert!(lr.is_finite() && lr >= 0.0, "learning rate {lr} at step {step}");
        timeline.is_due(train.validate.every, step);
    }
}

#[test]
fn run_configurations() {
    let inputs = mutated_text(configurations(), TOML, &lines());
    let path = &beside_the_bases();
    fuzz("run_configurations", inputs, 64 << 20, |content| {
        let Ok(text) = String::from_utf8(content) else { return };
        let Some(config) = checked(RunConfig::parse(&text, path, &sets_in(&text))) else { return };
        // What a run folder gets is the configuration again.
        let written = config.to_toml();
        let again = RunConfig::parse(&written, path, &[]).unwrap();
        assert_eq!(again.to_toml(), written);
        assert_eq!(config.differences(&again), []);
        check_costs(&config);
        check_schedule(&config);
        if let Some(suites) = checked(suites_of("eval", &config.eval, path)) {
            assert_eq!(suites.len(), config.eval.len());
        }
    });
}

/// The sweeps, with the paths of their bases in full.
fn sweeps(base: &Path) -> Vec<Vec<u8>> {
    let grid = r#"
base = "../quickstart.toml"
seeds = [3]

[set]
data = { seq_len = 128 }

[[axes]]
values = [{ "train.lr" = 1e-3 }, { "train.lr" = 2e-3, model = { layers = 2 } }]
names = ["low", "high"]

[[axes]]
key = "model.width"
values = [96, 192]
"#;
    let read = |path: PathBuf| {
        let base = SweepConfig::load(&path).unwrap().base;
        (std::fs::read_to_string(path).unwrap(), base)
    };
    let files = [files_of("sweeps"), files_of("sweeps/cpu")].concat();
    let texts = files.into_iter().map(read).chain([(grid.to_owned(), base.to_owned())]);
    let on_base = |(text, base): (String, PathBuf)| {
        let base = format!("base = \"{}\"", base.canonicalize().unwrap().display());
        let lines = text.lines().map(|line| if line.starts_with("base = ") { &base } else { line });
        lines.collect::<Vec<_>>().join("\n").into_bytes()
    };
    texts.map(on_base).collect()
}

/// The most runs of a sweep: conditions may leave some out.
fn most_runs(sweep: &SweepConfig) -> usize {
    sweep.axes.iter().fold(sweep.seeds.len(), |n, axis| n * axis.points().len())
}

#[test]
fn sweep_files() {
    let folder = Folder::new();
    let base = files_of("").into_iter().find(|path| path.ends_with("quickstart.toml")).unwrap();
    let lines: Vec<String> = [
        "seeds = [0, 1, 2]",
        "[[axes]]\nkey = \"train.lr\"\nvalues = [1e-3, 2e-3]",
        "[[axes]]\nkey = \"model.attention\"\nvalues = [{ kind = \"fox\" }, { kind = \"linear\" }]",
        "[[axes]]\nvalues = [{ \"run.threads\" = 1 }]\nnames = [\"a\"]",
        "[[eval]]\nsuite = \"passkey\"",
        "out_dir = \"\"",
        "name = \"a\"",
        "set = {}",
    ]
    .map(str::to_owned)
    .into();
    let path = folder.path().join("sweep.toml");
    let base_of = |text: &Vec<u8>| {
        SweepConfig::parse(std::str::from_utf8(text).unwrap(), &path).unwrap().base
    };
    let bases: Vec<PathBuf> = sweeps(&base).iter().map(base_of).collect();
    fuzz("sweep_files", mutated_text(sweeps(&base), TOML, &lines), 64 << 20, |content| {
        let Ok(text) = String::from_utf8(content) else { return };
        let Some(sweep) = checked(SweepConfig::parse(&text, &path)) else { return };
        checked(suites_of("eval", &sweep.eval, &path));
        // Only a base that is no device may be read.
        if !bases.contains(&sweep.base) {
            return;
        }
        let most = most_runs(&sweep);
        if let Some(plan) = checked(Plan::new(sweep)) {
            assert!(plan.runs.len() <= most);
            checked(plan.describe());
        }
    });
}

#[test]
fn the_shipped_configurations_pass() {
    for text in configurations() {
        let text = String::from_utf8(text).unwrap();
        let config = RunConfig::parse(&text, &beside_the_bases(), &[]).unwrap();
        check_costs(&config);
        check_schedule(&config);
    }
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/quickstart.toml");
    for text in sweeps(&base) {
        let text = String::from_utf8(text).unwrap();
        let sweep = SweepConfig::parse(&text, Path::new("sweep.toml")).unwrap();
        let most = most_runs(&sweep);
        let runs = Plan::new(sweep).unwrap().runs.len();
        assert!((2..=most).contains(&runs), "{runs} of {most} runs");
    }
}
