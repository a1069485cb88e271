//! Loss curves of variants, each the mean over several runs.

use std::collections::BTreeMap;
use std::path::Path;

use super::losses::{smooth, thin};
use super::{Curve, LineChart, Point, Scale, Series, XAxis};
use crate::EvalError;

/// The runs of one variant, one per seed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CurveGroup {
    /// The variant's name, for the legend.
    pub name: String,
    /// The losses of its runs.
    pub curves: Vec<Curve>,
}

/// Draws the losses of variants into one `.svg` or `.png` file.
///
/// Each variant has one colour: a line for the training loss of all its runs, smoothed as in
/// [`plot_losses`](super::plot_losses), and dots for the validation loss. Both are means over the runs, at
/// the places that all of them have; the bands reach from the lowest run to the highest.
///
/// # Errors
/// [`EvalError::Plot`] for a path that ends in neither `.svg` nor `.png`, and when no curve has a point.
pub fn plot_group_losses(
    groups: &[CurveGroup],
    x_axis: XAxis,
    path: &Path,
    smoothing: f64,
) -> Result<(), EvalError> {
    let mut series = Vec::new();
    for (colour, group) in groups.iter().enumerate() {
        let line = |name: &str, curves: Vec<Vec<(f64, f64)>>, dots: bool| Series {
            name: format!("{}: {name}", group.name),
            band: curves.len() > 1,
            points: means(&curves),
            colour,
            faint: false,
            dots,
        };
        let training = group.curves.iter().map(|curve| thin(&smooth(&curve.train, smoothing)));
        series.push(line("training", training.collect(), false));
        let validation: Vec<_> = group.curves.iter().map(|curve| thin(&curve.validation)).collect();
        if validation.iter().any(|curve| !curve.is_empty()) {
            series.push(line("validation", validation, true));
        }
    }
    let seeds = groups.iter().any(|group| group.curves.len() > 1);
    let chart = LineChart {
        title: format!("Loss of {} variants", groups.len()),
        x_label: x_axis.label().to_string(),
        y_label: "loss (nats per token)".to_string(),
        x_scale: Scale::Linear,
        y_scale: Scale::Linear,
        y_range: None,
        note: seeds.then(|| "means over the seeds; bands: lowest to highest seed".to_string()),
        series,
        boundary: None,
    };
    chart.save(path)
}

/// The mean of the curves at every x that all of them have, with the lowest and the highest as its bar.
fn means(curves: &[Vec<(f64, f64)>]) -> Vec<Point> {
    // Places are counts, at least 0: their bits sort as they do.
    let mut places = BTreeMap::<u64, Vec<f64>>::new();
    for &(x, y) in curves.iter().flatten().filter(|(_, y)| y.is_finite()) {
        places.entry(x.to_bits()).or_default().push(y);
    }
    let complete = places.into_iter().filter(|(_, values)| values.len() == curves.len());
    complete
        .map(|(x, values)| {
            let low = values.iter().copied().fold(f64::INFINITY, f64::min);
            let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            Point { x: f64::from_bits(x), y: mean, bar: (values.len() > 1).then_some((low, high)) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_over_the_places_that_all_runs_have() {
        let curves =
            [vec![(0.0, 4.0), (64.0, 2.0), (128.0, f64::NAN)], vec![(64.0, 3.0), (128.0, 1.0)]];
        let points = means(&curves);
        assert_eq!(points, [Point { x: 64.0, y: 2.5, bar: Some((2.0, 3.0)) }]);
        assert_eq!(means(&curves[1..]).len(), 2);
        assert!(means(&curves[1..]).iter().all(|point| point.bar.is_none()));
    }
}
