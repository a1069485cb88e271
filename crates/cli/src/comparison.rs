//! The pictures that a sweep ends with: its variants beside each other.

use std::path::{Path, PathBuf};

use anyhow::Result;
use longwall_eval::{CurveGroup, DotChart, DotRow, EvalError, XAxis, plot_group_losses};
use longwall_train::sweep::{Comparison, Plan, Status, SweepResults, VariantFigure};

use crate::commands::plot::{Axis, curve};

/// Weight of the past in the smoothed training losses, as in `longwall plot`.
const SMOOTHING: f64 = 0.9;

/// Draws the losses, the final validation and the evaluations' headline scores of the finished runs into the
/// sweep's folder, as SVG and PNG. Returns the files.
pub fn draw_comparison(plan: &Plan, results: &SweepResults) -> Result<Vec<PathBuf>> {
    let dir = plan.sweep.dir();
    let mut drawn = Vec::new();
    let groups = curve_groups(plan, results)?;
    if !groups.is_empty() {
        let losses = |path: &Path| plot_group_losses(&groups, XAxis::Tokens, path, SMOOTHING);
        drawn.extend(save(&dir, "loss", losses)?);
    }
    for comparison in results.comparisons() {
        let chart = chart(&plan.sweep.name, &comparison);
        drawn.extend(save(&dir, &comparison.figure, |path| chart.save(path))?);
    }
    Ok(drawn)
}

/// Draws one picture as SVG and as PNG.
fn save(
    dir: &Path,
    name: &str,
    draw: impl Fn(&Path) -> Result<(), EvalError>,
) -> Result<Vec<PathBuf>> {
    let paths = ["svg", "png"].map(|extension| dir.join(format!("{name}.{extension}")));
    paths.iter().try_for_each(|path| draw(path))?;
    Ok(paths.into())
}

/// The losses of the finished runs, one group for each combination of the axes that has some.
fn curve_groups(plan: &Plan, results: &SweepResults) -> Result<Vec<CurveGroup>> {
    let mut groups: Vec<CurveGroup> = Vec::new();
    for (planned, run) in plan.runs.iter().zip(&results.runs) {
        if run.status != Status::Finished {
            continue;
        }
        let (name, curve) = (run.variant(), curve(&planned.dir(), Axis::Tokens)?);
        match groups.last_mut().filter(|group| group.name == name) {
            Some(group) => group.curves.push(curve),
            None => groups.push(CurveGroup { name, curves: vec![curve] }),
        }
    }
    Ok(groups)
}

fn chart(sweep: &str, comparison: &Comparison) -> DotChart {
    let several = comparison.variants.iter().any(|variant| variant.seeds.len() > 1);
    let bars = match (comparison.is_proportion, several) {
        (true, true) => {
            "bars: 95 % intervals (Wilson), averaged over the seeds; rings: single seeds"
        }
        (true, false) => "bars: 95 % intervals (Wilson)",
        (false, true) => "bars: standard error over the seeds; rings: single seeds",
        (false, false) => "bars: standard error over the evaluation's samples, where it is known",
    };
    let row = |variant: &VariantFigure| DotRow {
        name: variant.name.clone(),
        value: variant.mean,
        bar: variant.bar,
        parts: variant.seeds.clone(),
    };
    DotChart {
        title: format!("{}: {}", sweep, comparison.figure),
        x_label: match comparison.figure.as_str() {
            "validation_loss" => "validation loss after the last step (nats per token)".to_owned(),
            figure => figure.to_owned(),
        },
        x_range: comparison.is_proportion.then_some((0.0, 1.0)),
        note: bars.to_owned(),
        rows: comparison.variants.iter().map(row).collect(),
    }
}
