//! Every shipped configuration is valid.

use std::path::{Path, PathBuf};

use longwall_model::cost::Parameters;
use longwall_train::config::RunConfig;
use longwall_train::sweep::{Plan, SweepConfig};

use crate::support::Workspace;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "toml") {
            found.push(path);
        }
    }
}

#[test]
fn every_shipped_configuration_is_valid() {
    // Sweeps name their base relative to the repository.
    std::env::set_current_dir(repository()).unwrap();
    let mut found = vec![];
    files(Path::new("configs"), &mut found);
    assert!(found.len() >= 60, "{} files: {found:?}", found.len());
    for path in found {
        if path.starts_with("configs/sweeps") {
            let sweep = SweepConfig::load(&path).unwrap_or_else(|e| panic!("{e}"));
            let plan = Plan::new(sweep).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(plan.runs.len() > 1, "{}", path.display());
        } else {
            let config = RunConfig::load(&path, &[]).unwrap_or_else(|e| panic!("{e}"));
            let again = RunConfig::parse(&config.to_toml(), &path, &[]).unwrap();
            assert_eq!(config, again, "{}", path.display());
        }
    }
}

/// The eleven models of Huang et al. (2026), table 2, differ in their attention only, and train for the paper's
/// steps.
#[test]
fn the_comparison_of_kinds_changes_the_attention_alone() {
    let sweep = SweepConfig::load(&repository().join("configs/sweeps/gpt2_162m_kinds.toml"));
    let plan = Plan::new(sweep.unwrap_or_else(|e| panic!("{e}"))).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(plan.runs.len(), 11);
    let first = &plan.runs[0].config;
    assert_eq!(first.total_steps(), 190_730);
    assert_eq!(first.model.padded_vocab(50_257), 50_304);
    for run in &plan.runs {
        let mut config = run.config.clone();
        config.run = first.run.clone();
        config.model.attention = first.model.attention.clone();
        config.model.output_gate = first.model.output_gate;
        assert_eq!(&config, first, "{}", run.name);
    }
}

/// The models that the PaTH paper compares differ in their attention only, at every size.
#[test]
fn the_comparisons_with_path_change_the_attention_alone() {
    let folder = repository().join("configs/gpu");
    let load = |name: String| RunConfig::load(&folder.join(name), &[]).unwrap();
    for size in ["124m", "350m", "760m"] {
        let path_fox = load(format!("path_fox_{size}.toml"));
        for (name, kind) in [
            (format!("path_{size}.toml"), "path"),
            (format!("rope_{size}_as_path.toml"), "rope"),
            (format!("fox_{size}_as_path.toml"), "fox"),
        ] {
            let mut config = load(name.clone());
            assert_eq!(config.model.attention.as_ref().map(|a| a.kind()), Some(kind), "{name}");
            assert_ne!(config.model, path_fox.model, "{name}");
            config.model.attention = path_fox.model.attention.clone();
            config.run.name = path_fox.run.name.clone();
            assert_eq!(config, path_fox, "{name}");
        }
        let schedule = path_fox.train.lr_schedule(&path_fox.timeline());
        assert!((schedule.lr(0) - 3e-5).abs() < 1e-12, "{}", schedule.lr(0));
        let last = schedule.lr(path_fox.total_steps());
        assert!((last - 3e-5).abs() < 1e-12, "{last}");
    }
    let paper = load("path_fox_760m.toml".to_owned());
    let parameters = Parameters::of(&paper.model, 32_000, paper.data.seq_len).total();
    assert!((740_000_000..800_000_000).contains(&parameters), "{parameters}");
}

/// The models of Wall's paper differ in their attention only, at every size, and have the paper's sizes and batches.
#[test]
fn the_family_of_wall_changes_the_attention_alone() {
    let folder = repository().join("configs/gpu");
    let load = |name: String| RunConfig::load(&folder.join(name), &[]).unwrap();
    for size in ["124m", "400m", "1b"] {
        let wall = load(format!("wall_muon_{size}.toml"));
        for kind in ["rope", "fox", "wall_rope", "wall_fox"] {
            let mut config = load(format!("{kind}_muon_{size}.toml"));
            let layers = config.model.layers_by_kind();
            let kinds: Vec<&str> = layers.iter().map(|layers| layers.attention.kind()).collect();
            let expected: &[&str] = match kind {
                "wall_rope" | "wall_fox" => &["wall"],
                kind => &[kind],
            };
            assert_eq!(kinds, expected, "{kind}, {size}");
            assert_ne!(config.model, wall.model, "{kind}, {size}");
            config.model.attention = wall.model.attention.clone();
            config.model.pattern = None;
            config.model.kinds = wall.model.kinds.clone();
            config.run.name = wall.run.name.clone();
            assert_eq!(config, wall, "{kind}, {size}");
        }
    }
    let parameters = |config: &RunConfig| Parameters::of(&config.model, 50_257, 8192).total();
    let small = load("wall_muon_400m.toml".to_owned());
    assert!((395_000_000..415_000_000).contains(&parameters(&small)));
    assert_eq!((small.data.seq_len, small.total_steps()), (8192, 13_352));
    let large = load("wall_muon_1b.toml".to_owned());
    assert!((1_200_000_000..1_600_000_000).contains(&parameters(&large)));
    assert_eq!((large.train.batch_tokens, large.train.tokens), (1 << 22, 70_000_000_000));
}

/// Each model of FoX's paper differs from its baseline in attention, heads and rate only, and a Pro block from Llama's in
/// what is named.
#[test]
fn the_family_of_fox_changes_what_its_files_name() {
    let folder = repository().join("configs/gpu");
    let load = |name: String| RunConfig::load(&folder.join(name), &[]).unwrap();
    let rates = [
        ("125m", [2e-3, 2e-3, 2e-3, 2e-3], 5120),
        ("360m", [2e-3, 2e-3, 2e-3, 2e-3], 14_336),
        ("760m", [1e-3, 2e-3, 5e-4, 1e-3], 92_160),
    ];
    for (size, rates, steps) in rates {
        let names = ["fox_llama_#", "fox_pro_#", "rope_llama_#_as_fox", "rope_pro_#_as_fox"];
        let configs = names.map(|name| load(format!("{}.toml", name.replace('#', size))));
        let parameters = |config: &RunConfig| {
            Parameters::of(&config.model, 50_257, config.data.seq_len).total() as f64
        };
        for (config, lr) in configs.iter().zip(rates) {
            assert_eq!((config.train.lr, config.total_steps()), (lr, steps), "{size}");
            let (some, first) = (parameters(config), parameters(&configs[0]));
            assert!((some / first - 1.0).abs() < 0.02, "{size}: {some} and {first} parameters");
            let kind = config.model.attention.as_ref().map(|attention| attention.kind());
            let is_pro = config.model.qk_norm;
            assert_eq!(config.model.output_gate, is_pro, "{size}");
            let mut config = config.clone();
            let [llama, pro, ..] = &configs;
            let base = if is_pro { pro } else { llama };
            if kind != Some("fox") {
                assert_eq!(kind, Some("rope"), "{size}");
                config.model.attention = base.model.attention.clone();
                config.model.heads = base.model.heads;
                config.model.kv_heads = base.model.kv_heads;
                config.model.head_dim = base.model.head_dim;
            }
            config.train.lr = base.train.lr;
            config.run.name = base.run.name.clone();
            assert_eq!(&config, base, "{size}");
        }
    }
}

/// The kinds that are compared at equal parameters, and at equal FLOPs of training.
#[test]
fn kinds_are_compared_at_equal_cost() {
    let plan = |name: &str| {
        let sweep = SweepConfig::load(&repository().join(format!("configs/sweeps/{name}.toml")));
        Plan::new(sweep.unwrap_or_else(|e| panic!("{e}"))).unwrap_or_else(|e| panic!("{e}"))
    };
    let spread = |values: Vec<f64>| {
        let most = values.iter().copied().fold(0.0, f64::max);
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(values.len() > 5);
        most / least - 1.0
    };
    let parameters = plan("kinds_equal_parameters").runs.into_iter().map(|run| {
        Parameters::of(&run.config.model, 50_257, run.config.data.seq_len).total() as f64
    });
    let parameters: Vec<f64> = parameters.collect();
    assert!(spread(parameters.clone()) < 2e-4, "{parameters:?}");
    let flops = plan("kinds_equal_flops").runs.into_iter();
    let flops: Vec<f64> = flops.map(|run| run.config.train_flops(50_257)).collect();
    assert!(spread(flops.clone()) < 1e-4, "{flops:?}");
}

/// Overrides that make a configuration small.
fn small(w: &Workspace, path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let name = path.file_stem().unwrap().to_str().unwrap();
    w.write(&format!("{name}.toml"), &text);
    let config = RunConfig::load(path, &[]).unwrap();
    let mut sets = vec![
        "data.seq_len=64",
        "data.validation_tokens=128",
        "train.tokens=12800",
        "train.batch_tokens=256",
        "train.schedule.warmup=5 steps",
        "model.width=24",
        "run.threads=1",
    ];
    if config.data.sources[0].kind() == "cargo-sources" {
        sets.push("data.sources.0={ kind = \"text\", paths = [\"corpus\"] }");
        sets.push("data.validation_fraction=0.2");
    }
    let mut sets: Vec<String> = sets.into_iter().map(str::to_owned).collect();
    // Every kind of a pattern needs a layer.
    let layers = config.model.pattern.as_ref().map_or(2, Vec::len);
    sets.push(format!("model.layers={layers}"));
    if let Some(head_dim) = config.model.head_dim {
        // Keeps the ratio of head size to width.
        sets.push(format!("model.head_dim={}", 24 * head_dim / config.model.width));
    }
    sets
}

/// Whether all data of a configuration are generated.
fn is_task(path: &Path) -> bool {
    let config = RunConfig::load(path, &[]).unwrap();
    config.data.sources.iter().all(|source| source.is_generated())
}

/// 50 steps of each, small: the loss falls, and equal seeds give equal losses.
#[test]
fn every_configuration_for_the_cpu_trains() {
    let w = Workspace::new();
    let mut trained = 0;
    for entry in std::fs::read_dir(repository().join("configs")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() || is_task(&path) {
            continue; // These tasks need the full size.
        }
        let sets = small(&w, &path);
        let losses = |run: &str| -> Vec<f64> {
            let file = format!("{name}.toml");
            let run_name = format!("run.name={name}_{run}");
            let mut args = vec!["train", "--config", &file, "--set", &run_name];
            args.extend(sets.iter().flat_map(|set| ["--set", set.as_str()]));
            w.succeed(&args);
            let metrics = w.read(&format!("runs/{name}_{run}/metrics.jsonl"));
            let line = |line: &str| -> serde_json::Value { serde_json::from_str(line).unwrap() };
            metrics.lines().filter_map(|text| line(text)["loss"].as_f64()).collect()
        };
        let first = losses("a");
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let (start, end) = (mean(&first[..5]), mean(&first[first.len() - 5..]));
        assert!(end < start - 0.5, "{name}: the loss went from {start} to {end}");
        assert_eq!(first, losses("b"), "{name}: equal seeds, other losses");
        trained += 1;
    }
    assert!(trained >= 29, "{trained} configurations");
}
