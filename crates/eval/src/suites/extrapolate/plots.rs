//! The suite's plots and its table of losses by position.

use std::path::Path;

use longwall_data::Binning;
use serde_json::Value;

use super::bins::Bin;
use crate::EvalError;
use crate::files::write_atomically;
use crate::plot::{LineChart, Point, Scale, Series};
use crate::suite::Scoring;

/// Writes `loss_by_length.svg`, `loss_by_position.svg`, `in_context_learning.svg` and
/// `positions.csv`. Plots without a finite loss are skipped, with a warning.
pub(super) fn draw(
    scoring: &Scoring,
    title: &str,
    train_seq_len: usize,
    dir: &Path,
) -> Result<(), EvalError> {
    let positions = scoring.details.get("positions").cloned().unwrap_or(Value::Null);
    let bins: Vec<Bin> = serde_json::from_value(positions).expect("the bins were written by score");
    write_atomically(&dir.join("positions.csv"), csv(&bins).as_bytes())?;
    if scoring.scores.iter().all(|score| score.estimate.value.is_none()) {
        tracing::warn!("no loss is finite: there is nothing to plot");
        return Ok(());
    }
    let train_length = Some((train_seq_len as f64, "training length".to_string()));
    let chart = |title: String, x_label: &str, x_scale, series| LineChart {
        title,
        x_label: x_label.to_string(),
        y_label: "loss (nats per token)".to_string(),
        x_scale,
        y_scale: Scale::Linear,
        y_range: None,
        note: Some("bars and bands: ± one standard error".to_string()),
        series,
        boundary: train_length.clone(),
    };
    let by_length = by_length(scoring);
    let title_ = format!("Loss by context length: {title}");
    chart(title_, "context length (tokens)", Scale::Log2, vec![by_length])
        .save(&dir.join("loss_by_length.svg"))?;
    let title_ = format!("Loss by position: {title}");
    let series = by_position(&bins, Binning::Linear);
    chart(title_, "position (tokens read)", Scale::Linear, series)
        .save(&dir.join("loss_by_position.svg"))?;
    let title_ = format!("In-context learning: {title}");
    let series = by_position(&bins, Binning::Logarithmic);
    chart(title_, "position (tokens read)", Scale::Log2, series)
        .save(&dir.join("in_context_learning.svg"))
}

fn by_length(scoring: &Scoring) -> Series {
    let losses = scoring.scores.iter().filter(|score| score.metric == "loss");
    let points = losses.filter_map(|score| {
        Some(Point {
            x: score.length? as f64,
            y: score.estimate.value.unwrap_or(f64::NAN),
            bar: score.estimate.bar(),
        })
    });
    let points = points.collect();
    Series { name: String::new(), points, colour: 0, faint: false, dots: true, band: false }
}

/// One line for each length, with a band: error bars of several lines would hide each other.
fn by_position(bins: &[Bin], binning: Binning) -> Vec<Series> {
    let kept: Vec<&Bin> = bins.iter().filter(|bin| bin.binning == binning).collect();
    kept.chunk_by(|a, b| a.length == b.length)
        .enumerate()
        .map(|(colour, bins)| Series {
            name: format!("length {}", bins[0].length),
            points: bins
                .iter()
                .map(|bin| Point {
                    x: bin.middle(),
                    y: bin.loss.value.unwrap_or(f64::NAN),
                    bar: bin.loss.bar(),
                })
                .collect(),
            colour,
            faint: false,
            dots: true,
            band: true,
        })
        .collect()
}

fn csv(bins: &[Bin]) -> String {
    let mut csv = String::from("length,binning,from,to,loss,standard_error,low,high,windows\n");
    for Bin { length, binning, from, to, loss } in bins {
        let binning = match binning {
            Binning::Linear => "linear",
            Binning::Logarithmic => "logarithmic",
        };
        let show = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
        csv += &format!(
            "{length},{binning},{from},{to},{},{},{},{},{}\n",
            show(loss.value),
            show(loss.standard_error),
            show(loss.low),
            show(loss.high),
            loss.samples
        );
    }
    csv
}
