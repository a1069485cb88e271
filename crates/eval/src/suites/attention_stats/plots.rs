//! One plot per metric: the layers' values by length.

use std::path::Path;

use super::LayerValues;
use crate::EvalError;
use crate::plot::{LineChart, Point, Scale, Series};

/// Writes `METRIC.svg`, a line for each layer; nothing if no value is finite.
pub(super) fn draw(
    metric: &str,
    layers: &[LayerValues],
    title: &str,
    train_seq_len: usize,
    dir: &Path,
) -> Result<(), EvalError> {
    let of_metric = || layers.iter().filter(|x| x.metric == metric);
    if of_metric().all(|x| x.value.is_none()) {
        return Ok(());
    }
    let last = of_metric().map(|x| x.layer).max().unwrap_or(0);
    let series = (0..=last).filter_map(|layer| {
        let of_layer = of_metric().filter(|x| x.layer == layer);
        let point = |x: &LayerValues| Point {
            x: x.length as f64,
            y: x.value.unwrap_or(f64::NAN),
            bar: None,
        };
        let points: Vec<Point> = of_layer.map(point).collect();
        let name = format!("layer {layer}");
        let series = Series { name, points, colour: layer, faint: false, dots: true, band: false };
        (!series.points.is_empty()).then_some(series)
    });
    LineChart {
        title: format!("{metric} by context length: {title}"),
        x_label: "context length (tokens)".to_string(),
        y_label: metric.to_string(),
        x_scale: Scale::Log2,
        y_scale: Scale::Linear,
        y_range: None,
        note: Some("means over the heads of a layer".to_string()),
        series: series.collect(),
        boundary: Some((train_seq_len as f64, "training length".to_string())),
    }
    .save(&dir.join(format!("{metric}.svg")))
}
