//! One short text, whose weights are written in full for a picture.

use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_kernels::attention::AttentionConfig;
use longwall_kernels::attention::weights::LARGEST_WEIGHT;
use longwall_model::layers::{LayerWeights, MapScale, WeightMap};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{AttentionStats, AttentionStatsOptions};
use crate::suite::{Inspection, OpenContext};
use crate::text::read_text;
use crate::{EvalError, EvalModel, Suite};

/// The file of the weights in the suite's folder.
pub const WEIGHTS_FILE: &str = "weights.json";

/// Most tokens of the text.
const MOST_TOKENS: usize = 512;

/// The contents of `weights.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextWeights {
    /// The text of each token; bytes that are no character by themselves as `\xNN`.
    pub tokens: Vec<String>,
    /// The layers that weigh keys.
    pub layers: Vec<LayerMap>,
}

/// The weights of one layer, rounded to four digits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerMap {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// The layer's attention kind.
    pub kind: String,
    /// Whether each query's weights are divided by the sum of their sizes.
    pub shares: bool,
    /// `[heads][queries][keys]`, with the keys up to the query's own; none where a weight is not finite.
    pub heads: Vec<Vec<Vec<Option<f32>>>>,
}

/// The text of `--tokens`.
pub(super) struct OneText {
    pub(super) tokens: Vec<u32>,
    source: String,
    texts: Vec<String>,
}

/// Records options that choose other text beside `tokens`.
pub(super) fn validate(options: &AttentionStatsOptions, problems: &mut Problems) {
    let others = [
        ("lengths", options.lengths.is_some()),
        ("sequences", options.sequences != AttentionStatsOptions::default().sequences),
        ("text", !options.text.is_empty()),
        ("packed", options.packed),
    ];
    for (key, given) in others {
        problems.check(
            options.tokens.is_none() || !given,
            format!("{}.{key}", AttentionStats::NAME),
            "given beside tokens",
            "only without tokens, which is read alone and as a whole",
            format!("leave out --{key}, or --tokens"),
        );
    }
}

impl OneText {
    /// Reads `option`: a text or, behind an @, the path of a file.
    pub(super) fn open(option: &str, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        if !context.metrics.contains(&LARGEST_WEIGHT) {
            let weighs = |kind: &AttentionConfig| kind.thorough_metrics().contains(&LARGEST_WEIGHT);
            let lacks = "has weights of keys, which --tokens writes";
            return Err(super::no_layer(lacks, weighs));
        }
        let (text, source) = match option.strip_prefix('@') {
            Some(path) => (read_text(Path::new(path))?, format!("the file {path} of --tokens")),
            None => (option.to_string(), "the text of --tokens".to_string()),
        };
        let tokens = context.tokenizer.encode(&text);
        let most = context.max_len.map_or(MOST_TOKENS, |most| most.min(MOST_TOKENS));
        if !(1..=most).contains(&tokens.len()) {
            let (suite, count, name) =
                (AttentionStats::NAME, tokens.len(), context.tokenizer.name());
            return Err(EvalError::Text {
                what: format!(
                    "{suite}: {source} has {count} tokens of the {name} tokenizer; allowed: 1 to {most}"
                ),
                remedy: match count {
                    0 => "give a text, or @FILE for that of a file".to_string(),
                    _ => "give a shorter text: a map has a row and a column for each token"
                        .to_string(),
                },
            });
        }
        let texts = tokens.iter().map(|token| token_text(*token, context.tokenizer)).collect();
        Ok(OneText { tokens, source, texts })
    }

    pub(super) fn describe(&self) -> Value {
        let bytes: Vec<u8> = self.tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        json!({
            "lengths": [self.tokens.len()],
            "text": self.source,
            "text_sha256": format!("{:x}", Sha256::digest(&bytes)),
        })
    }

    /// The weights of all layers, as a file.
    pub(super) fn weights(&self, model: &mut dyn EvalModel) -> Result<Inspection, EvalError> {
        let all = model.attention_weights(&self.tokens)?;
        let notes = without_weights(&all);
        let map = |(layer, LayerWeights { kind, map }): (usize, LayerWeights)| {
            let WeightMap { scale, heads } = map?;
            Some(LayerMap {
                layer,
                kind: kind.to_string(),
                shares: scale == MapScale::Shares,
                heads: heads
                    .iter()
                    .map(|rows| rows.iter().map(|row| rounded(row)).collect())
                    .collect(),
            })
        };
        let layers = all.into_iter().enumerate().filter_map(map).collect();
        let weights = TextWeights { tokens: self.texts.clone(), layers };
        let json = serde_json::to_vec(&weights).expect("weights are plain data");
        Ok(Inspection { files: vec![(WEIGHTS_FILE, json)], notes: notes.into_iter().collect() })
    }
}

/// Says which layers have no weights.
fn without_weights(layers: &[LayerWeights]) -> Option<String> {
    let without = layers.iter().enumerate().filter(|(_, layer)| layer.map.is_none());
    let names: Vec<String> = without.map(|(at, layer)| format!("{at} ({})", layer.kind)).collect();
    let layers = if names.len() > 1 { "layers" } else { "layer" };
    (!names.is_empty()).then(|| {
        let names = names.join(", ");
        format!("{WEIGHTS_FILE} is without {layers} {names}: kinds whose past is a state have no weights of keys")
    })
}

fn rounded(weights: &[f32]) -> Vec<Option<f32>> {
    let round = |weight: &f32| format!("{weight:.3e}").parse().expect("a number");
    weights.iter().map(round).map(|weight: f32| Some(weight).filter(|x| x.is_finite())).collect()
}

fn token_text(token: u32, tokenizer: &Tokenizer) -> String {
    let bytes = tokenizer.decode_bytes(&[token]);
    String::from_utf8(bytes).unwrap_or_else(|error| error.as_bytes().escape_ascii().to_string())
}
