//! The means of each layer and head, as a table and as `heads.csv`.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::LayerMetric;
use crate::EvalError;
use crate::files::write_atomically;
use crate::report::TextTable;
use crate::suite::Outcome;

/// A metric of one layer at one length: means over windows, none where a window has none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerValues {
    /// The metric's name.
    pub metric: String,
    /// Length in tokens.
    pub length: usize,
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Windows.
    pub samples: usize,
    /// The layer's value.
    pub value: Option<f64>,
    /// The value of each head in each view, `[views][heads]`; empty where only the layer is measured.
    pub heads: Vec<Vec<Option<f64>>>,
    /// The value of each channel of each head, `[heads][channels]`; empty where channels are not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub channels: Vec<Vec<Option<f64>>>,
}

/// The means of every layer and metric over outcomes of one length, in the order of the reports.
pub(super) fn means(outcomes: &[Outcome<Vec<LayerMetric>>]) -> Vec<LayerValues> {
    let Some(first) = outcomes.first() else { return vec![] };
    let (length, samples) = (first.trial.length, outcomes.len());
    let mean = |values: &mut dyn Iterator<Item = Option<f64>>| {
        values.sum::<Option<f64>>().map(|sum| sum / samples as f64)
    };
    let of_layer = |LayerMetric { metric, layer, heads, channels, .. }: &LayerMetric| {
        let same: Vec<&LayerMetric> = outcomes
            .iter()
            .filter_map(|o| o.verdict.iter().find(|x| (&x.metric, x.layer) == (metric, *layer)))
            .collect();
        assert_eq!(same.len(), samples, "every window has {metric} of layer {layer}");
        let head = |view: usize, h: usize| mean(&mut same.iter().map(|x| x.heads[view][h]));
        let view = |(at, heads): (usize, &Vec<_>)| (0..heads.len()).map(|h| head(at, h)).collect();
        let channel = |head: usize, c: usize| mean(&mut same.iter().map(|x| x.channels[head][c]));
        let channels_of =
            |(at, all): (usize, &Vec<_>)| (0..all.len()).map(|c| channel(at, c)).collect();
        LayerValues {
            metric: metric.clone(),
            length,
            layer: *layer,
            samples,
            value: mean(&mut same.iter().map(|x| x.value)),
            heads: heads.iter().enumerate().map(view).collect(),
            channels: channels.iter().enumerate().map(channels_of).collect(),
        }
    };
    first.verdict.iter().map(of_layer).collect()
}

/// The layers of a metric by length; none if no layer reported it.
pub(super) fn table(metric: &str, layers: &[LayerValues]) -> Option<TextTable> {
    let layers: Vec<&LayerValues> = layers.iter().filter(|x| x.metric == metric).collect();
    let lengths: Vec<usize> = distinct(layers.iter().map(|x| x.length));
    let mut header = vec!["layer".to_string()];
    header.extend(lengths.iter().map(usize::to_string));
    let mut rows = vec![header];
    for layer in distinct(layers.iter().map(|x| x.layer)) {
        let of_layer: Vec<_> = layers.iter().filter(|x| x.layer == layer).collect();
        let views = of_layer.first()?.heads.len();
        // A layer that is measured as a whole, or has one view, has one row.
        for view in 0..views.max(1) {
            let name = if views > 1 { format!("{layer}, view {view}") } else { layer.to_string() };
            let mut row = vec![name];
            row.extend(lengths.iter().map(|&length| {
                let found = of_layer.iter().find(|x| x.length == length);
                found.map_or(String::new(), |x| cell(x, view))
            }));
            rows.push(row);
        }
    }
    let title = format!("{metric} by layer and length: mean of the heads (lowest to highest head)");
    (rows.len() > 1).then_some(TextTable { title, rows })
}

/// The mean of a view's heads and their range, or the layer's value.
fn cell(layer: &LayerValues, view: usize) -> String {
    let not_finite = || "not finite".to_string();
    let Some(heads) = layer.heads.get(view) else {
        return layer.value.map_or_else(not_finite, number);
    };
    let Some(heads) = heads.iter().copied().collect::<Option<Vec<f64>>>() else {
        return not_finite();
    };
    let mean = heads.iter().sum::<f64>() / heads.len() as f64;
    let lowest = heads.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = heads.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{} ({} to {})", number(mean), number(lowest), number(highest))
}

/// Three digits after the point, or three significant digits of a small number.
fn number(x: f64) -> String {
    if x == 0.0 || x.abs() >= 0.01 { format!("{x:.3}") } else { format!("{x:.2e}") }
}

/// Each value once, in the order of first appearance.
fn distinct(values: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut distinct = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}

/// Writes `heads.csv`: one line per metric, length, layer, view and head, counted from 0. Where only the layer is
/// measured, view and head are empty.
pub(super) fn write_csv(layers: &[LayerValues], dir: &Path) -> Result<(), EvalError> {
    let mut csv = String::from("metric,length,layer,view,head,value,samples\n");
    for LayerValues { metric, length, layer, samples, value, heads, .. } in layers {
        let mut line = |view: &str, head: &str, value: Option<f64>| {
            let value = value.map_or(String::new(), |value| value.to_string());
            csv += &format!("{metric},{length},{layer},{view},{head},{value},{samples}\n");
        };
        if heads.is_empty() {
            line("", "", *value);
        }
        for (view, heads) in heads.iter().enumerate() {
            for (head, value) in heads.iter().enumerate() {
                line(&view.to_string(), &head.to_string(), *value);
            }
        }
    }
    write_atomically(&dir.join("heads.csv"), csv.as_bytes())
}

/// Writes `channels.csv`, if a metric has channels: one line per metric, layer, head and channel, counted from 0.
pub(super) fn write_channels(layers: &[LayerValues], dir: &Path) -> Result<(), EvalError> {
    let mut csv = String::from("metric,length,layer,head,channel,value,samples\n");
    let measured: Vec<_> = layers.iter().filter(|x| !x.channels.is_empty()).collect();
    if measured.is_empty() {
        return Ok(());
    }
    for LayerValues { metric, length, layer, samples, channels, .. } in measured {
        for (head, channels) in channels.iter().enumerate() {
            for (channel, value) in channels.iter().enumerate() {
                let value = value.map_or(String::new(), |value| value.to_string());
                csv += &format!("{metric},{length},{layer},{head},{channel},{value},{samples}\n");
            }
        }
    }
    write_atomically(&dir.join("channels.csv"), csv.as_bytes())
}
