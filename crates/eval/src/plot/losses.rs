//! Loss curves of one or several runs.

use std::path::Path;

use super::{LineChart, Point, Scale, Series};
use crate::EvalError;

/// Longer curves are thinned to this many points: a plot has no pixels to show more.
const MOST_POINTS: usize = 2000;

/// The losses of one run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// The run's name, for the legend.
    pub name: String,
    /// Training loss: (x, nats per token), by increasing x.
    pub train: Vec<(f64, f64)>,
    /// Validation loss: (x, nats per token), by increasing x.
    pub validation: Vec<(f64, f64)>,
}

/// The unit of a curve's x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XAxis {
    /// Optimiser steps.
    Steps,
    /// Training tokens.
    Tokens,
    /// FLOPs of training.
    Flops,
    /// Seconds of training.
    Seconds,
}

impl XAxis {
    pub(super) fn label(self) -> &'static str {
        match self {
            XAxis::Steps => "step",
            XAxis::Tokens => "training tokens",
            XAxis::Flops => "training FLOPs",
            XAxis::Seconds => "seconds of training",
        }
    }
}

/// Draws the losses of runs into one `.svg` or `.png` file.
///
/// The training loss is a pale line and, if `smoothing` is above 0, its exponential moving average a
/// second line (`smoothing` is the weight of the past, 0 to below 1, with bias correction); the
/// validation loss is dots joined by a line. Each run has one colour. Losses above `max_loss` are left
/// out, so that the curves' ends fill the plot.
///
/// # Errors
/// [`EvalError::Plot`] for a path that ends in neither `.svg` nor `.png`, a smoothing out of range,
/// and when no curve has a finite point at or below `max_loss`.
pub fn plot_losses(
    curves: &[Curve],
    x_axis: XAxis,
    path: &Path,
    smoothing: f64,
    max_loss: Option<f64>,
) -> Result<(), EvalError> {
    check_smoothing(smoothing, path)?;
    let max_loss = max_loss.unwrap_or(f64::INFINITY);
    let mut series = Vec::new();
    for (colour, curve) in curves.iter().enumerate() {
        let raw = thin(&curve.train);
        let line = |name: String, points: Vec<(f64, f64)>, faint: bool, dots: bool| Series {
            faint,
            dots,
            ..up_to(max_loss, name, points, colour)
        };
        let name = format!("{}: training", curve.name);
        if smoothing > 0.0 {
            series.push(line(String::new(), raw, true, false));
            series.push(line(name, thin(&smooth(&curve.train, smoothing)), false, false));
        } else {
            series.push(line(name, raw, !curve.validation.is_empty(), false));
        }
        if !curve.validation.is_empty() {
            let name = format!("{}: validation", curve.name);
            series.push(line(name, thin(&curve.validation), false, true));
        }
    }
    let drawn = |series: &Series| series.points.iter().any(|point| point.y.is_finite());
    if max_loss.is_finite() && !series.iter().any(drawn) {
        return Err(EvalError::Plot {
            path: path.to_path_buf(),
            reason: format!("no loss is at or below {max_loss}"),
            remedy: "give a larger limit, or none",
        });
    }
    let names: Vec<&str> = curves.iter().map(|curve| curve.name.as_str()).collect();
    let chart = LineChart {
        title: match names.as_slice() {
            [name] => format!("Loss of {name}"),
            _ => format!("Loss of {} runs", names.len()),
        },
        x_label: x_axis.label().to_string(),
        y_label: "loss (nats per token)".to_string(),
        x_scale: Scale::Linear,
        y_scale: Scale::Linear,
        y_range: None,
        note: None,
        series,
        boundary: None,
    };
    chart.save(path)
}

/// Draws a scalar of runs into one `.svg` or `.png` file: `curves` are the runs' names, each with its points (x,
/// value) by increasing x. As in [`plot_losses`], the values are a pale line and their moving average a second one,
/// and values above `most` are left out.
///
/// # Errors
/// As [`plot_losses`].
pub fn plot_scalar(
    curves: &[(String, Vec<(f64, f64)>)],
    scalar: &str,
    x_axis: XAxis,
    path: &Path,
    smoothing: f64,
    most: Option<f64>,
) -> Result<(), EvalError> {
    check_smoothing(smoothing, path)?;
    let most = most.unwrap_or(f64::INFINITY);
    let mut series = Vec::new();
    for (colour, (name, points)) in curves.iter().enumerate() {
        if smoothing > 0.0 {
            let raw = up_to(most, String::new(), thin(points), colour);
            series.push(Series { faint: true, ..raw });
        }
        series.push(up_to(most, name.clone(), thin(&smooth(points, smoothing)), colour));
    }
    let chart = LineChart {
        title: scalar.to_owned(),
        x_label: x_axis.label().to_string(),
        y_label: scalar.to_owned(),
        x_scale: Scale::Linear,
        y_scale: Scale::Linear,
        y_range: None,
        note: None,
        series,
        boundary: None,
    };
    chart.save(path)
}

/// A line with gaps where values are above `most`.
fn up_to(most: f64, name: String, points: Vec<(f64, f64)>, colour: usize) -> Series {
    let point = |(x, y)| Point { x, y: if y > most { f64::NAN } else { y }, bar: None };
    let points = points.into_iter().map(point).collect();
    Series { name, points, colour, faint: false, dots: false, band: false }
}

fn check_smoothing(smoothing: f64, path: &Path) -> Result<(), EvalError> {
    match (0.0..1.0).contains(&smoothing) {
        true => Ok(()),
        false => Err(EvalError::Plot {
            path: path.to_path_buf(),
            reason: format!("the smoothing is {smoothing}; allowed: 0 (none) to below 1"),
            remedy: "give a smoothing such as 0.9",
        }),
    }
}

/// Exponential moving average with bias correction, as in Adam (Kingma and Ba, 2015, algorithm 1): the
/// first value is the curve's own first value, not one drawn towards 0. Values that are not finite remain
/// gaps.
pub(super) fn smooth(points: &[(f64, f64)], weight: f64) -> Vec<(f64, f64)> {
    let (mut sum, mut total) = (0.0, 0.0);
    points
        .iter()
        .map(|&(x, y)| {
            if !y.is_finite() {
                return (x, y);
            }
            sum = weight * sum + (1.0 - weight) * y;
            total = weight * total + (1.0 - weight);
            (x, sum / total)
        })
        .collect()
}

/// At most [`MOST_POINTS`] of the points, evenly spaced, including the last.
pub(super) fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let step = points.len().div_ceil(MOST_POINTS).max(1);
    let mut thinned: Vec<(f64, f64)> = points.iter().step_by(step).copied().collect();
    if let Some(last) = points.last().filter(|_| !(points.len() - 1).is_multiple_of(step)) {
        thinned.push(*last);
    }
    thinned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_a_constant_changes_nothing() {
        let smoothed = smooth(&[(0.0, 2.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 2.0)], 0.9);
        assert!((smoothed[0].1 - 2.0).abs() < 1e-12 && (smoothed[3].1 - 2.0).abs() < 1e-12);
        assert!(smoothed[2].1.is_nan());
    }

    #[test]
    fn smoothing_starts_at_the_first_value() {
        let smoothed = smooth(&[(1.0, 9.0), (2.0, 5.0), (3.0, 5.0)], 0.9);
        assert!((smoothed[0].1 - 9.0).abs() < 1e-12);
        // Weights 0.09 and 0.1 of two values.
        let second = (0.09 * 9.0 + 0.1 * 5.0) / 0.19;
        assert!((smoothed[1].1 - second).abs() < 1e-12, "{}", smoothed[1].1);
        let gap_first = smooth(&[(1.0, f64::NAN), (2.0, 5.0)], 0.9);
        assert!((gap_first[1].1 - 5.0).abs() < 1e-12);
    }

    #[test]
    fn thinning_keeps_both_ends() {
        let points: Vec<(f64, f64)> = (0..10_001).map(|n| (f64::from(n), 0.0)).collect();
        let thinned = thin(&points);
        assert!(thinned.len() <= MOST_POINTS + 1);
        assert_eq!((thinned[0].0, thinned[thinned.len() - 1].0), (0.0, 10_000.0));
        assert_eq!(thin(&[]), []);
    }
}
