//! How much memory a run needs: at least, and on a GPU by an estimate that decides its micro-batch.

use std::fmt::{self, Display};

use longwall_data::Rows;
use longwall_kernels::attention::Kernel;
use longwall_kernels::device::DeviceKind;
use longwall_kernels::ops::cross_entropy::cuda_workspace_bytes;
use longwall_model::Precision;
use longwall_model::activations::BlockActivations;
use longwall_model::cost::{Parameters, channels, state_elements as state_elements_of_row};
use serde::Serialize;

use crate::config::RunConfig;
use crate::optimiser::Rule;
use crate::timeline::{OpenStage, Stage};

/// Bytes of the device that training needs at least: weights, their gradients and the optimiser's state in
/// f32, what rows of streams hand over, and of the activations the input of each block for one micro-batch of
/// `[rows, seq_len]` tokens, in the type of `precision`. On the CPU also a step's inputs, targets and loss weights, and
/// the copy of weights and state that a checkpoint is written from.
pub fn least_for_training(
    config: &RunConfig,
    vocab_size: usize,
    [rows, seq_len]: [usize; 2],
    precision: Precision,
    device: DeviceKind,
) -> u128 {
    let model = &config.model;
    let parameters = Parameters::of(model, vocab_size, config.data.seq_len).total();
    let state = state_elements(config, vocab_size);
    let inputs = elements(&[model.layers, rows, seq_len, model.width]);
    let inputs = precision.parameter(2).size() as u128 * inputs;
    let (weights, state) = (4 * parameters as u128, 4 * state);
    let on_host = match device {
        DeviceKind::Cpu => weights + state + 12 * u128::from(most_batch_tokens(config)),
        DeviceKind::Cuda => 0,
    };
    let stage = config.base_stage();
    2 * weights + state + inputs + on_host + carried_bytes(config, stage.rows()) as u128
}

/// The most tokens of a step.
fn most_batch_tokens(config: &RunConfig) -> u64 {
    let timeline = config.timeline();
    timeline.stages().iter().map(|stage| stage.batch_tokens).max().unwrap_or_default()
}

/// Tokens that a GPU has of a micro-batch at most, unless the configuration sets its size: larger ones are no faster.
pub const GPU_MICRO_BATCH_TOKENS: usize = 1 << 16;

/// How much more than the estimate must be available: it may be 7 % low, and an update has buffers of its own.
const MARGIN: f64 = 1.15;

/// An estimate of the GPU memory that training needs at the peak, in bytes: the start of the backward pass, with
/// the gradients of earlier micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// f32 masters, and matrices in the precision's type if that is another.
    pub weights: f64,
    /// Gradients of all parameters, in f32.
    pub gradients: f64,
    /// The optimiser's state and the weights' average, in f32.
    pub optimiser: f64,
    /// What blocks keep for the backward pass, without their attention operations.
    pub activations: f64,
    /// What attention operations keep, as their kinds count it.
    pub attention: f64,
    /// A chunk of logits, and the gradients that the loss computes with it.
    pub loss: f64,
    /// The largest gradients of activations; where ranks share rows, also what they exchange, and what a validation
    /// takes, which computes whole rows, beyond all that training does.
    pub temporary: f64,
    /// With rows of streams, what a step's rows go on from and what they hand over, in f32.
    pub carried: f64,
}

impl Estimate {
    /// For the micro-batches of a stage, or of a rank's part of it, in `precision`.
    pub fn of(
        config: &RunConfig,
        vocab_size: usize,
        open: OpenStage,
        precision: Precision,
    ) -> Self {
        let (model, [micro_batch, seq_len]) = (&config.model_of(&open.stage), open.shape());
        let dtype = precision.parameter(2);
        let parameters = Parameters::of(model, vocab_size, config.data.seq_len).total();
        let copy = if precision.parameter(1) == dtype { 0 } else { dtype.size() };
        let state = state_elements(config, vocab_size);
        // Measuring the noise scale keeps the gradients before each micro-batch.
        let copies = if config.train.noise_scale.every.is_on() { 2.0 } else { 1.0 };
        let shared = open.stage.context_parallel > 1;
        let rows = micro_batch.saturating_mul(open.stage.tokens_of_rank());
        let tokens = rows as f64;
        let kernel = Kernel { device: DeviceKind::Cuda, dtype };
        let blocks = (0..model.layers)
            .map(|layer| BlockActivations::of(model, layer, kernel, micro_batch, seq_len));
        let (mut kept, mut attention, mut gradients) = (0.0, 0.0f64, 0.0f64);
        let (mut largest, mut whole) = ([0.0; 2], 0.0f64);
        for block in blocks {
            whole = whole.max(2.0 * block.input + block.layers + block.attention);
            kept += block.input;
            gradients = gradients.max(block.gradients);
            if config.train.recompute {
                // One block at a time is computed again.
                if block.layers + block.attention > largest[0] + largest[1] {
                    largest = [block.layers, block.attention];
                }
            } else {
                kept += block.layers;
                attention += block.attention;
            }
        }
        // The input and the output of the norm before the output layer.
        let last = 2.0 * (model.width * dtype.size()) as f64;
        let mut estimate = Estimate {
            weights: (4 + copy) as f64 * parameters as f64,
            gradients: copies * 4.0 * parameters as f64,
            optimiser: 4.0 * state as f64,
            activations: tokens * (kept + largest[0] + last),
            attention: tokens * (attention + largest[1]),
            loss: cuda_workspace_bytes(rows, model.padded_vocab(vocab_size), model.width, dtype),
            temporary: tokens * gradients,
            carried: carried_bytes(config, open.stage.rows()),
        };
        if shared {
            // What is sent and received, each before and after it is ordered by rank.
            let widest = (0..model.layers).flat_map(|layer| {
                let (kind, shape) = (model.attention_of(layer), model.attention_shape(layer));
                let outputs = shape.heads * kind.value_dim(&shape);
                channels(kind, &shape).into_iter().chain([outputs])
            });
            let widest = widest.max().unwrap_or_default();
            estimate.temporary += tokens * 4.0 * (widest * dtype.size()) as f64;
            if config.train.validate.every.is_on() {
                let Estimate { gradients, activations, attention, loss, temporary, .. } = estimate;
                let training = gradients + activations + attention + loss + temporary;
                let validation = rows.max(config.data.seq_len) as f64 * whole;
                estimate.temporary += (validation - training).max(0.0);
            }
        }
        estimate
    }

    /// For one of `ranks` ranks, which share masters, optimiser state and average.
    pub fn on_ranks(self, ranks: usize, precision: Precision) -> Self {
        let dtype = precision.parameter(2);
        let masters = match precision.parameter(1) == dtype {
            true => 0.0,
            false => self.weights * 4.0 / (4 + dtype.size()) as f64,
        };
        let elsewhere = 1.0 - 1.0 / ranks as f64;
        let optimiser = self.optimiser * (1.0 - elsewhere);
        Estimate { weights: self.weights - masters * elsewhere, optimiser, ..self }
    }

    /// Bytes in all.
    pub fn total(&self) -> u64 {
        let Estimate { weights, gradients, optimiser, activations, attention, .. } = *self;
        let Estimate { loss, temporary, carried, .. } = *self;
        // Saturates.
        (weights + gradients + optimiser + activations + attention + loss + temporary + carried)
            as u64
    }

    /// Whether it fits into `available` bytes, with a margin.
    pub fn fits(&self, available: u64) -> bool {
        self.total() as f64 * MARGIN <= available as f64
    }
}

impl Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: f64| bytes / 1e9;
        write!(
            f,
            "{:.1} GB (weights {:.1}, gradients {:.1}, optimiser {:.1}, activations {:.1}, attention {:.1}, \
             loss {:.1}, temporary {:.1}",
            gb(self.total() as f64),
            gb(self.weights),
            gb(self.gradients),
            gb(self.optimiser),
            gb(self.activations),
            gb(self.attention),
            gb(self.loss),
            gb(self.temporary),
        )?;
        if self.carried > 0.0 {
            write!(f, ", carried {:.1}", gb(self.carried))?;
        }
        f.write_str(")")
    }
}

/// The largest micro-batch of a stage of a new run on `ranks` GPUs, of which `stage` is one's part, in rows, that fits
/// into `available` bytes by the estimate, of those with at most [`GPU_MICRO_BATCH_TOKENS`] tokens; the largest of these
/// if it is not known what is available. `None` if one row does not fit.
pub fn largest_micro_batch(
    config: &RunConfig,
    stage: &Stage,
    vocab_size: usize,
    precision: Precision,
    ranks: usize,
    available: Option<u64>,
) -> Option<usize> {
    let fits = |rows: &usize| {
        let open = stage.open(*rows);
        let estimate =
            || Estimate::of(config, vocab_size, open, precision).on_ranks(ranks, precision);
        available.is_none_or(|available| estimate().fits(available))
    };
    stage.micro_batches(GPU_MICRO_BATCH_TOKENS).find(fits)
}

/// Bytes of what `rows` rows of streams go on from, and of what they hand over; 0 for other rows.
fn carried_bytes(config: &RunConfig, rows: usize) -> f64 {
    match config.data.rows {
        Rows::Streams => {
            let elements = state_elements_of_row(&config.model, config.data.seq_len);
            2.0 * 4.0 * rows as f64 * elements as f64
        }
        _ => 0.0,
    }
}

/// Elements of the optimiser's state, and of the weights' average.
fn state_elements(config: &RunConfig, vocab_size: usize) -> u128 {
    let averages = u128::from(config.train.ema.0.is_some());
    let rules = config.rules().all(vocab_size, config.data.seq_len);
    let of_one = |rule: &Rule| rule.state_elements() + averages * elements(&rule.parameter.shape);
    rules.iter().map(of_one).sum()
}

fn elements(shape: &[usize]) -> u128 {
    shape.iter().map(|&size| size as u128).product()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    use longwall_kernels::attention::{AttentionConfig, ExecPath};
    use serde::Deserialize;

    use super::*;
    use crate::testing::config;

    #[test]
    fn the_need_counts_weights_gradients_state_inputs_of_blocks_and_the_batch() {
        let config = config(&["model.layers=96", "model.width=12288", "model.heads=96"]);
        let parameters = Parameters::of(&config.model, 257, config.data.seq_len).total() as u128;
        let inputs = 96 * 4 * config.data.seq_len as u128 * 12288;
        let batch = 12 * u128::from(config.train.batch_tokens);
        let shape = [4, config.data.seq_len];
        let least = |precision, device| least_for_training(&config, 257, shape, precision, device);
        // AdamW keeps two moments.
        let on_gpu = least(Precision::Bf16, DeviceKind::Cuda);
        assert_eq!(on_gpu, 16 * parameters + 2 * inputs);
        assert_eq!(least(Precision::Fp8, DeviceKind::Cuda), on_gpu);
        let on_cpu = least(Precision::F32, DeviceKind::Cpu);
        assert_eq!(on_cpu, (16 + 12) * parameters + 4 * inputs + batch);
        assert!(parameters > 170_000_000_000, "{parameters}");
    }

    /// By hand, for two layers of softmax attention in bf16.
    #[test]
    fn the_estimate_counts_what_is_kept() {
        let sets = ["model.layers=2", "model.width=64", "model.heads=1", "data.seq_len=128"];
        let batch = ["train.batch_tokens=1024", "model.attention.kind=rope"];
        let set = |more: &[&str]| config(&[&sets[..], &batch, more].concat());
        let of = |config: &RunConfig, rows| {
            Estimate::of(config, 257, config.base_stage().open(rows), Precision::Bf16)
        };
        let plain = set(&[]);
        let parameters = Parameters::of(&plain.model, 257, 128).total() as f64;
        let estimate = of(&plain, 4);
        assert_eq!(estimate.weights, 6.0 * parameters);
        assert_eq!(estimate.gradients, 4.0 * parameters);
        assert_eq!(estimate.optimiser, 8.0 * parameters);
        let (tokens, w) = (4.0 * 128.0, 64.0);
        // The input, three of its size and eight of the MLP, in each block; and the last norm.
        assert_eq!(estimate.activations, 2.0 * tokens * (2.0 * 12.0 * w + 2.0 * w));
        // q, k, v, o and a statistic per row.
        assert_eq!(estimate.attention, tokens * 2.0 * (2.0 * 4.0 * w + 4.0));
        // All rows in one chunk; 257 tokens are padded to 320.
        let loss = 2.0 * (tokens * 320.0 + tokens * w + 320.0 * w) + 4.0 * 320.0 * w;
        assert_eq!(estimate.loss, loss);
        assert_eq!(of(&plain, 8).activations, 2.0 * estimate.activations);
        // Gradients of the block's output, and of the hidden layer before and after its activation.
        assert_eq!(estimate.temporary, 2.0 * tokens * 9.0 * w);

        let recomputed = of(&set(&["train.recompute=true"]), 4);
        assert_eq!(recomputed.attention, estimate.attention / 2.0);
        assert!(recomputed.activations < estimate.activations);
    }

    #[test]
    fn the_largest_micro_batch_that_fits_is_taken() {
        let sets = ["data.seq_len=128", "train.batch_tokens=1024", "model.attention.kind=rope"];
        let config = config(&sets);
        let stage = config.base_stage();
        let largest =
            |available| largest_micro_batch(&config, &stage, 257, Precision::Bf16, 1, available);
        assert_eq!(largest(None), Some(8));
        for rows in [1, 2, 4, 8] {
            let needed = Estimate::of(&config, 257, stage.open(rows), Precision::Bf16).total();
            assert_eq!(largest(Some((needed as f64 * MARGIN) as u64 + 2)), Some(rows));
        }
        assert_eq!(largest(Some(1000)), None);
    }

    /// Each has its part of what is kept; a validation computes whole rows.
    #[test]
    fn ranks_that_share_rows_keep_their_part() {
        let of = |shared: usize, validate: &str| {
            let shared = format!("train.context_parallel={shared}");
            let validate = format!("train.validate.every={validate}");
            let sizes = ["data.seq_len=16384", "train.batch_tokens=16384", "model.heads=4"];
            let sets = [&sizes[..], &["model.width=64", &shared, &validate]].concat();
            let config = config(&sets);
            Estimate::of(&config, 257, config.base_stage().open(1), Precision::Bf16)
        };
        let (one, four) = (of(1, "never"), of(4, "never"));
        assert_eq!(four.activations, one.activations / 4.0);
        assert_eq!(four.attention, one.attention / 4.0);
        assert!(four.total() < one.total() / 2);
        assert!(of(4, "10").temporary > four.temporary);
        assert_eq!(of(1, "10"), one);
    }

    #[test]
    fn ranks_share_masters_and_state() {
        let config = config(&["model.layers=2", "train.batch_tokens=1024"]);
        let of = |precision| Estimate::of(&config, 257, config.base_stage().open(1), precision);
        let parameters = Parameters::of(&config.model, 257, config.data.seq_len).total() as f64;
        let near = |x: f64, y: f64| assert!((x / y - 1.0).abs() < 1e-9, "{x} and {y}");
        let (one, four) = (of(Precision::Bf16), of(Precision::Bf16).on_ranks(4, Precision::Bf16));
        near(four.weights, 3.0 * parameters);
        near(four.optimiser, 2.0 * parameters);
        assert_eq!((four.gradients, four.activations), (one.gradients, one.activations));
        near(of(Precision::F32).on_ranks(4, Precision::F32).weights, 4.0 * parameters);
        assert_eq!(one.on_ranks(1, Precision::Bf16), one);
    }

    /// A case of benchmarks/memory.py.
    #[derive(Deserialize)]
    struct Measured {
        config: PathBuf,
        set: Vec<String>,
        peak_gb: f64,
    }

    #[derive(Deserialize)]
    struct Cases {
        measured: Vec<Measured>,
    }

    /// Every configuration in configs/gpu and every kind, with the memory that it took on a GPU.
    #[test]
    fn the_estimate_is_near_what_was_measured() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let Cases { measured } = toml::from_str(include_str!("memory/measured.toml")).unwrap();
        let (mut files, mut kinds) = (BTreeSet::new(), BTreeSet::new());
        for Measured { config: file, set, peak_gb } in measured {
            let config = RunConfig::load(&root.join(&file), &set).unwrap();
            let precision = config.run.precision.unwrap_or(Precision::Bf16);
            let [rows, seq_len] = [config.train.micro_batch.unwrap(), config.data.seq_len];
            let estimate = Estimate::of(&config, 50_257, config.base_stage().open(rows), precision);
            let ratio = estimate.total() as f64 / (1e9 * peak_gb);
            let kernel = Kernel { device: DeviceKind::Cuda, dtype: precision.parameter(2) };
            let by_kernels = (0..config.model.layers).all(|layer| {
                let (shape, kind) =
                    (config.model.attention_shape(layer), config.model.attention_of(layer));
                kinds.insert(kind.kind());
                kind.path(kernel, &shape, rows, Some(seq_len)) != ExecPath::Reference
            });
            // How much of a reference's intermediate results automatic differentiation holds differs by kind.
            let allowed = if by_kernels { 0.93..1.07 } else { 0.6..1.1 };
            assert!(allowed.contains(&ratio), "{set:?}: {estimate} for {peak_gb} GB, {ratio}");
            files.insert(file);
        }
        for file in fs::read_dir(root.join("configs/gpu")).unwrap() {
            let file = Path::new("configs/gpu").join(file.unwrap().file_name());
            assert!(files.contains(&file), "{file:?} is not measured: run benchmarks/memory.py");
        }
        for kind in AttentionConfig::KINDS.iter().map(|info| info.kind) {
            assert!(kinds.contains(kind), "{kind} is not measured: run benchmarks/memory.py");
        }
    }

    /// A reference's scores of visible keys: a micro-batch of a stage with a window may be larger.
    #[test]
    fn a_stage_needs_the_memory_of_its_window() {
        let config = config(&[
            "data.seq_len=1024",
            "train.batch_tokens=65536",
            "train.stages=[{ from = 0, window = 16 }, { from = 0.5, window = \"none\" }]",
        ]);
        let of = |stage: &Stage| Estimate::of(&config, 257, stage.open(1), Precision::F32);
        let timeline = config.timeline();
        let [narrow, whole] = [0, 1].map(|at| &timeline.stages()[at]);
        assert!(of(whole).attention > 5.0 * of(narrow).attention);
        assert_eq!(of(whole).activations, of(narrow).activations);
        let available = (2.0 * MARGIN * of(whole).total() as f64) as u64;
        let rows = |stage| {
            largest_micro_batch(&config, stage, 257, Precision::F32, 1, Some(available)).unwrap()
        };
        assert!(rows(narrow) > rows(whole), "{} and {}", rows(narrow), rows(whole));
    }

    /// References form all scores; kernels do not. No kind has a kernel in f32 on a GPU.
    #[test]
    fn references_need_more_than_kernels() {
        let attention = |kind: &str, precision| {
            let kind = format!("model.attention={{ kind = \"{kind}\" }}");
            let sizes = ["data.seq_len=1024", "model.width=128", "model.heads=2"];
            let config = config(&[&sizes[..], &[kind.as_str()]].concat());
            Estimate::of(&config, 257, config.base_stage().open(1), precision).attention
        };
        for kind in ["rope", "tra", "wall"] {
            let [kernel, reference] = [Precision::Bf16, Precision::F32].map(|p| attention(kind, p));
            assert!(reference > 5.0 * kernel, "{kind}: {reference} and {kernel}");
        }
        assert!(attention("tda", Precision::Bf16) > attention("tra", Precision::Bf16));
        assert!(attention("tra", Precision::Bf16) > attention("rope", Precision::Bf16));
    }
}
