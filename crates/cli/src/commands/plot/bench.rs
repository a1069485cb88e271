//! `longwall plot --bench FILE…`: reports of `longwall bench kernels --json` over the length.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use longwall_eval::plot::{LineChart, Point, Scale, Series};
use serde::Deserialize;

/// What is read of a report.
#[derive(Deserialize)]
struct Report {
    device: String,
    precision: String,
    results: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    kind: String,
    settings: Vec<String>,
    /// Batch, heads, seq_len, head_dim.
    shape: [usize; 4],
    kv_heads: usize,
    window: Option<usize>,
    document_len: Option<u64>,
    passes: Vec<Pass>,
    /// `null` where the number is not finite.
    probe: BTreeMap<String, Option<f64>>,
}

#[derive(Deserialize)]
struct Pass {
    pass: String,
    milliseconds: Spread,
}

#[derive(Deserialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

/// The pass that is drawn by default.
const DEFAULT: &str = "forward_backward";

/// Draws the pass or metric `y`, and returns the file's name.
pub fn draw(files: &[PathBuf], y: Option<&str>, out: Option<PathBuf>) -> Result<PathBuf> {
    let reports = files.iter().map(|file| read(file)).collect::<Result<Vec<_>>>()?;
    let y = y.unwrap_or(DEFAULT);
    let cases: Vec<(&Report, &Case)> = reports
        .iter()
        .flat_map(|report| report.results.iter().map(move |case| (report, case)))
        .collect();
    let is_pass = cases.iter().any(|(_, case)| case.passes.iter().any(|pass| pass.pass == y));
    if !is_pass && !cases.iter().any(|(_, case)| case.probe.contains_key(y)) {
        let passes = cases.iter().flat_map(|(_, c)| c.passes.iter().map(|pass| pass.pass.as_str()));
        let metrics = cases.iter().flat_map(|(_, c)| c.probe.keys().map(String::as_str));
        let known: BTreeSet<&str> = passes.chain(metrics).collect();
        let known: Vec<&str> = known.into_iter().collect();
        bail!(
            "no result has {y}; they have: {}\n  hint: name one of these with --y",
            known.join(", ")
        );
    }
    let out = out.unwrap_or_else(|| {
        let stem = files[0].file_stem().unwrap_or_default().to_string_lossy();
        files[0].with_file_name(format!("{stem}-{y}.svg"))
    });
    // As in the tables of benchmarks.
    let name = y.replace('_', if is_pass { " + " } else { " " });
    let series = lines(&cases, y);
    let chart = LineChart {
        title: format!("Attention: {name}"),
        x_label: "seq_len (tokens)".to_owned(),
        y_label: if is_pass { "milliseconds per row".to_owned() } else { name },
        x_scale: Scale::Log2,
        y_scale: if is_pass || is_wide(&series) { Scale::Log2 } else { Scale::Linear },
        y_range: None,
        note: is_pass.then(|| "times over the batch; bars: fastest to slowest sample".to_owned()),
        series,
        boundary: None,
    };
    chart.save(&out)?;
    Ok(out)
}

fn read(path: &Path) -> Result<Report> {
    let hint = "write a report with `longwall bench kernels --json > FILE`";
    let text = std::fs::read_to_string(path)
        .map_err(|error| anyhow!("cannot read {}: {error}\n  hint: {hint}", path.display()))?;
    serde_json::from_str(&text).map_err(|error| {
        let path = path.display();
        anyhow!("{path} is not a report of attention kinds: {error}\n  hint: {hint}")
    })
}

/// What lines differ in: kind and settings, heads, heads of k and v, window, documents, device and precision.
type Titles = [String; 6];

fn titles((report, case): &(&Report, &Case)) -> Titles {
    let [_, heads, _, head_dim] = case.shape;
    let kind = [std::slice::from_ref(&case.kind), &case.settings[..]].concat().join(" ");
    [
        kind,
        format!("{heads} heads of {head_dim}"),
        format!("{} key heads", case.kv_heads),
        case.window.map_or("no window".to_owned(), |tokens| format!("window {tokens}")),
        case.document_len
            .map_or("whole rows".to_owned(), |tokens| format!("documents of {tokens}")),
        format!("{}, {}", report.device, report.precision),
    ]
}

/// A line for all results that differ in batch and length only, in the order of the results. Its name has the kind, and
/// what else is not the same in all.
fn lines(cases: &[(&Report, &Case)], y: &str) -> Vec<Series> {
    let mut groups: Vec<(Titles, Vec<Point>)> = vec![];
    for case in cases {
        let Some(point) = point(case.1, y) else { continue };
        let titles = titles(case);
        match groups.iter_mut().find(|(other, _)| *other == titles) {
            Some((_, points)) => points.push(point),
            None => groups.push((titles, vec![point])),
        }
    }
    let differs: Vec<bool> = (0..6)
        .map(|at| at == 0 || groups.iter().any(|(titles, _)| titles[at] != groups[0].0[at]))
        .collect();
    let series = |(colour, (titles, mut points)): (usize, (Titles, Vec<Point>))| {
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        let shown = titles.into_iter().zip(&differs).filter(|(_, differs)| **differs);
        let name = shown.map(|(title, _)| title).collect::<Vec<_>>().join(", ");
        Series { name, points, colour, faint: false, dots: true, band: false }
    };
    groups.into_iter().enumerate().map(series).collect()
}

/// Whether values, all above 0, span more than a power of ten.
fn is_wide(series: &[Series]) -> bool {
    let values = || series.iter().flat_map(|line| &line.points).map(|point| point.y);
    let (low, high) = (values().fold(f64::MAX, f64::min), values().fold(0.0, f64::max));
    low > 0.0 && high > 10.0 * low
}

/// A result's place: its length, and the time of a row or the metric.
fn point(case: &Case, y: &str) -> Option<Point> {
    let [batch, _, seq_len, _] = case.shape;
    let x = seq_len as f64;
    if let Some(pass) = case.passes.iter().find(|pass| pass.pass == y) {
        let [median, min, max] =
            [pass.milliseconds.median, pass.milliseconds.min, pass.milliseconds.max]
                .map(|milliseconds| milliseconds / batch as f64);
        return Some(Point { x, y: median, bar: Some((min, max)) });
    }
    Some(Point { x, y: (*case.probe.get(y)?)?, bar: None })
}
