//! What attention layers measure of themselves while the model reads held-out text, by layer, view, head and context
//! length: every metric that a layer of the model reports (weights of keys, retention of gates, sparsity, pruning).
//!
//! The text is cut as in `extrapolate`: all lengths read the same tokens, and differ only in their context. A value
//! is the mean over the windows of a length; standard errors are over documents.
//!
//! One short text instead also gives all its weights, as a file to draw.

mod layers;
mod one_text;
mod plots;

use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_kernels::attention::AttentionConfig;
use longwall_kernels::attention::probe::{Metric, Observation};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use self::layers::LayerValues;
use self::one_text::OneText;
pub use self::one_text::{LayerMap, TextWeights, WEIGHTS_FILE};
use super::stretches::{Stretches, TextOptions};
use crate::files::remove;
use crate::options::{MOST_SAMPLES, check_count, optional_sizes, parse_size};
use crate::report::Score;
use crate::stats::Estimate;
use crate::suite::{
    Answer, Inspection, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial,
};
use crate::{EvalError, EvalModel};

/// Options of `longwall eval attention-stats`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct AttentionStatsOptions {
    /// Context lengths in tokens of the model's tokenizer; the longest must be a multiple of each
    /// [default: 1/4, 1/2, 1, 2 and 4 times the training length, as far as text and model reach]
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size)]
    #[serde(deserialize_with = "optional_sizes", skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Vec<usize>>,
    /// Stretches of text of the longest length to read
    #[arg(long, default_value_t = AttentionStatsOptions::default().sequences)]
    pub sequences: usize,
    /// Text files or folders, one file is one document [default: the run's validation split, its
    /// documents joined]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub text: Vec<PathBuf>,
    /// Join the documents of --text, each ended by end of text, instead of leaving out short ones
    #[arg(long)]
    pub packed: bool,
    /// Read this text alone, of at most 512 tokens, and write the weights of every layer and head to
    /// weights.json, which longwall report draws; @FILE reads the text from a file
    #[arg(long, value_name = "TEXT|@FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<String>,
}

impl Default for AttentionStatsOptions {
    fn default() -> Self {
        AttentionStatsOptions {
            lengths: None,
            sequences: 4,
            text: Vec::new(),
            packed: false,
            tokens: None,
        }
    }
}

impl AttentionStatsOptions {
    fn text(&self) -> TextOptions<'_> {
        TextOptions {
            suite: AttentionStats::NAME,
            lengths: self.lengths.as_deref(),
            sequences: self.sequences,
            text: &self.text,
            packed: self.packed,
        }
    }
}

/// The parts of the training length that divide it, and its multiples as far as the model can read.
fn default_lengths(context: &OpenContext<'_>) -> Vec<usize> {
    let train = context.train_seq_len;
    let parts =
        [4, 2].into_iter().filter(|part| train.is_multiple_of(*part)).map(|part| train / part);
    let readable = |length: &usize| context.max_len.is_none_or(|most| *length <= most);
    parts.chain([train]).chain([2 * train, 4 * train].into_iter().filter(readable)).collect()
}

/// One layer's measurement of one window; a value that is infinite or not a number is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerMetric {
    /// The metric's name.
    pub metric: String,
    /// Index of the layer, from 0.
    pub layer: usize,
    /// The layer's value.
    pub value: Option<f64>,
    /// The value of each head in each view, `[views][heads]`; empty where only the layer is measured.
    pub heads: Vec<Vec<Option<f64>>>,
    /// The value of each channel of each head, `[heads][channels]`, at the longest length; else, and where channels are
    /// not measured, empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub channels: Vec<Vec<Option<f64>>>,
}

impl LayerMetric {
    fn new(observation: &Observation, with_channels: bool) -> Self {
        let finite = |x: f64| Some(x).filter(|x| x.is_finite());
        let view = |heads: &Vec<f64>| heads.iter().map(|x| finite(*x)).collect();
        LayerMetric {
            metric: observation.metric.0.to_string(),
            layer: observation.layer,
            value: finite(observation.value),
            heads: observation.heads.iter().map(view).collect(),
            channels: observation.channels.iter().filter(|_| with_channels).map(view).collect(),
        }
    }
}

/// What is read.
enum Source {
    Stretches(Stretches),
    OneText(OneText),
}

impl Source {
    fn longest(&self) -> usize {
        match self {
            Source::Stretches(stretches) => stretches.longest(),
            Source::OneText(text) => text.tokens.len(),
        }
    }
}

/// The error of a model without a layer that does what `lacks` says, which kinds of `does` do.
fn no_layer(lacks: &'static str, does: impl Fn(&AttentionConfig) -> bool) -> EvalError {
    let kinds = AttentionConfig::defaults().into_iter().filter(does);
    let kinds = kinds.map(|kind| kind.kind()).collect();
    EvalError::NoMetrics { suite: AttentionStats::NAME, lacks, kinds }
}

/// The suite.
pub struct AttentionStats {
    source: Source,
    metrics: Vec<Metric>,
    train_seq_len: usize,
}

impl Suite for AttentionStats {
    type Options = AttentionStatsOptions;
    type Verdict = Vec<LayerMetric>;

    const NAME: &'static str = "attention-stats";
    const VERSION: u32 = 2;
    /// Empty: its samples are places in the text.
    const STREAMS: Range<u64> = 0..0;
    const GENERATES: bool = false;
    const READS_TEXT: bool = true;

    fn validate(options: &AttentionStatsOptions, problems: &mut Problems) {
        options.text().validate(problems);
        one_text::validate(options, problems);
        let remedy = "more --sequences give smaller standard errors; 4 is usual";
        let (key, allowed) = ("attention-stats.sequences", 1..=MOST_SAMPLES);
        check_count(key, options.sequences, allowed, remedy, problems);
    }

    fn open(options: &AttentionStatsOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        if context.metrics.is_empty() {
            return Err(no_layer("measures anything", |kind| !kind.thorough_metrics().is_empty()));
        }
        let source = match &options.tokens {
            Some(text) => Source::OneText(OneText::open(text, context)?),
            None => {
                let default = default_lengths(context);
                Source::Stretches(Stretches::open(&options.text(), default, context)?)
            }
        };
        let (metrics, train_seq_len) = (context.metrics.to_vec(), context.train_seq_len);
        Ok(AttentionStats { source, metrics, train_seq_len })
    }

    fn resolved(&self) -> Value {
        let mut resolved = match &self.source {
            Source::Stretches(stretches) => stretches.describe(),
            Source::OneText(text) => text.describe(),
        };
        resolved["metrics"] = self.metrics.iter().map(|metric| metric.0).collect();
        resolved
    }

    /// A trial's index counts windows: first those of the first stretch, then of the second, and so on.
    fn trials(&self) -> Vec<Trial> {
        match &self.source {
            Source::Stretches(stretches) => stretches.trials(),
            Source::OneText(text) => vec![Trial { length: text.tokens.len(), ..Trial::default() }],
        }
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let tokens = match &self.source {
            // Without the last token, which a loss would predict.
            Source::Stretches(stretches) => {
                stretches.window(trial.length, trial.index)[..trial.length].to_vec()
            }
            Source::OneText(text) => text.tokens.clone(),
        };
        Ok(Request {
            prompt: tokenizer.decode(&tokens),
            call: ModelCall::Observe { tokens },
            expected: None,
            depth: None,
        })
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> Vec<LayerMetric> {
        let Answer::Observations(observations) = answer else {
            unreachable!("a request to observe was answered by {answer:?}");
        };
        let longest = self.source.longest() == trial.length;
        observations.iter().map(|observation| LayerMetric::new(observation, longest)).collect()
    }

    fn inspect(&self, model: &mut dyn EvalModel) -> Result<Inspection, EvalError> {
        match &self.source {
            Source::Stretches(_) => Ok(Inspection::default()),
            Source::OneText(text) => text.weights(model),
        }
    }

    fn score(&self, outcomes: &[Outcome<Vec<LayerMetric>>]) -> Scoring {
        let mut scoring = Scoring::default();
        let mut layers = Vec::new();
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            let length = outcomes[0].trial.length;
            for metric in self.measured(outcomes) {
                let estimate = self.mean_over_layers(outcomes, metric);
                let (metric, depth) = (metric.0.to_string(), None);
                scoring.headline.insert(format!("{metric}@{length}"), estimate);
                scoring.scores.push(Score { metric, length: Some(length), depth, estimate });
            }
            layers.extend(layers::means(outcomes));
        }
        let absent =
            self.metrics.iter().filter(|metric| !layers.iter().any(|x| x.metric == metric.0));
        scoring.notes = absent.map(|metric| absent_note(*metric)).collect();
        scoring.tables =
            self.metrics.iter().filter_map(|metric| layers::table(metric.0, &layers)).collect();
        scoring.details = json!({ "layers": layers });
        scoring
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let layers = scoring.details.get("layers").cloned().unwrap_or(Value::Null);
        let layers: Vec<LayerValues> =
            serde_json::from_value(layers).expect("the layers were written by score");
        if let Source::Stretches(_) = self.source {
            // Of an earlier evaluation that was discarded.
            remove(&dir.join(WEIGHTS_FILE))?;
        }
        layers::write_csv(&layers, dir)?;
        layers::write_channels(&layers, dir)?;
        self.metrics
            .iter()
            .try_for_each(|metric| plots::draw(metric.0, &layers, title, self.train_seq_len, dir))
    }
}

impl AttentionStats {
    /// The metrics that were reported.
    fn measured(&self, outcomes: &[Outcome<Vec<LayerMetric>>]) -> impl Iterator<Item = Metric> {
        let reported = |metric: &Metric| {
            outcomes.iter().any(|o| o.verdict.iter().any(|of_layer| of_layer.metric == metric.0))
        };
        self.metrics.iter().copied().filter(reported).collect::<Vec<_>>().into_iter()
    }

    /// The mean over windows of the mean over the layers that report the metric.
    fn mean_over_layers(&self, outcomes: &[Outcome<Vec<LayerMetric>>], metric: Metric) -> Estimate {
        Estimate::clustered(outcomes.iter().map(|outcome| {
            let Trial { length, index, .. } = outcome.trial;
            let document = match &self.source {
                Source::Stretches(stretches) => stretches.document(length, index),
                Source::OneText(_) => 0,
            };
            let reported = outcome.verdict.iter().filter(|x| x.metric == metric.0);
            let values: Vec<f64> = reported.map(|x| x.value.unwrap_or(f64::NAN)).collect();
            (document as u64, values.iter().sum::<f64>() / values.len() as f64)
        }))
    }
}

fn absent_note(metric: Metric) -> String {
    format!("no layer reported {}: the code that measures it does not run on this device", metric.0)
}
