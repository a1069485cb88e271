//! The figures of a sweep's runs, and what the finished seeds of one combination of the axes say together.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// The name of the figure of the last validation.
pub(super) const VALIDATION_LOSS: &str = "validation_loss";

/// A number of a run, and how uncertain it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Its name: `validation_loss`, or an evaluation's name and one of its headline scores.
    pub name: String,
    /// Its value.
    pub value: f64,
    /// Standard error of a mean over an evaluation's samples.
    pub standard_error: Option<f64>,
    /// The 95 % interval of an evaluation's score, from its samples.
    pub interval: Option<(f64, f64)>,
}

impl Figure {
    pub(super) fn exact(name: &str, value: f64) -> Self {
        Figure { name: name.to_owned(), value, standard_error: None, interval: None }
    }

    /// Whether it is a proportion, which has an interval but no standard error.
    pub(super) fn is_proportion(&self) -> bool {
        self.standard_error.is_none() && self.interval.is_some()
    }
}

/// A figure of several variants, to draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The figure's name.
    pub figure: String,
    /// Whether it is a proportion, 0 to 1.
    pub is_proportion: bool,
    /// One entry per combination of the axes.
    pub variants: Vec<VariantFigure>,
}

/// A figure of one combination of the axes.
#[derive(Clone, Debug, PartialEq)]
pub struct VariantFigure {
    /// The names of the combination's values.
    pub name: String,
    /// Mean over the finished seeds; none if no seed is finished.
    pub mean: Option<f64>,
    /// The ends of its error bar: of a proportion, its interval (the mean of the seeds' intervals); else one
    /// standard error over the seeds, or over the evaluation's samples where one seed is finished.
    pub bar: Option<(f64, f64)>,
    /// The value of each finished seed.
    pub seeds: Vec<f64>,
}

impl VariantFigure {
    pub(super) fn new(name: String, figures: &[&Figure]) -> Self {
        let Summary { mean, error, interval } = Summary::of(figures);
        let bar = interval.or_else(|| mean.zip(error).map(|(mean, e)| (mean - e, mean + e)));
        let seeds = figures.iter().map(|figure| figure.value).collect();
        VariantFigure { name, mean, bar, seeds }
    }
}

/// What the finished seeds of one combination say together.
struct Summary {
    /// Their mean, if there is one.
    mean: Option<f64>,
    /// The standard error over the seeds, or over the evaluation's samples for one seed.
    error: Option<f64>,
    /// Of a proportion, the mean of the seeds' intervals.
    interval: Option<(f64, f64)>,
}

impl Summary {
    fn of(figures: &[&Figure]) -> Self {
        let values: Vec<f64> = figures.iter().map(|figure| figure.value).collect();
        let (mean, error) = mean_and_error(&values);
        let error = error.or_else(|| figures.first().and_then(|figure| figure.standard_error));
        Summary { mean, error, interval: mean_interval(figures) }
    }
}

/// The mean of the ends of proportions' intervals: as wide as one seed's, because all seeds were evaluated on
/// the same samples. None unless all are proportions.
fn mean_interval(figures: &[&Figure]) -> Option<(f64, f64)> {
    let intervals: Vec<(f64, f64)> =
        figures.iter().filter(|f| f.is_proportion()).filter_map(|f| f.interval).collect();
    if intervals.is_empty() || intervals.len() < figures.len() {
        return None;
    }
    let count = intervals.len() as f64;
    let (low, high) = intervals.iter().fold((0.0, 0.0), |sum, i| (sum.0 + i.0, sum.1 + i.1));
    Some((low / count, high / count))
}

/// The part of a `results.json` that a sweep reads.
#[derive(Default, Deserialize)]
struct Headline {
    headline: BTreeMap<String, Option<f64>>,
    #[serde(default)]
    headline_estimates: BTreeMap<String, Uncertainty>,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct Uncertainty {
    standard_error: Option<f64>,
    low: Option<f64>,
    high: Option<f64>,
}

/// The headline scores of the evaluation `eval`; none if its results cannot be read.
pub(super) fn headline(eval: &str, path: &Path) -> Vec<Figure> {
    let parsed = fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let Headline { headline, headline_estimates } = parsed.unwrap_or_default();
    let figure = |(name, value): (String, Option<f64>)| {
        let found = headline_estimates.get(&name).copied().unwrap_or_default();
        Some(Figure {
            name: format!("{eval}.{name}"),
            value: value?,
            standard_error: found.standard_error,
            interval: found.low.zip(found.high),
        })
    };
    headline.into_iter().filter_map(figure).collect()
}

/// The figure of one combination's seeds: mean ± standard error over the seeds, or over the samples for
/// one seed, then a proportion's interval.
pub(super) fn cell(figures: &[&Figure]) -> String {
    let Summary { mean, error, interval } = Summary::of(figures);
    let Some(mean) = mean else { return "-".to_owned() };
    let digits = match (error, interval) {
        (Some(error), _) if error > 0.0 => decimals(error / 10.0),
        (_, Some(_)) => 3,
        (Some(_), None) if mean.fract() == 0.0 => 0,
        _ => decimals(mean.abs() / 1000.0),
    };
    let mut text = format!("{mean:.digits$}");
    if let Some(error) = error {
        text += &format!(" ± {error:.digits$}");
    }
    if let Some((low, high)) = interval {
        text += &format!(" [{low:.3}, {high:.3}]");
    }
    text
}

/// The mean, if there is a value, and its standard error, if there are two.
fn mean_and_error(values: &[f64]) -> (Option<f64>, Option<f64>) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let error = (variance / count).sqrt();
    ((!values.is_empty()).then_some(mean), (values.len() > 1).then_some(error))
}

/// Decimals that show a quantity of size `smallest`, at most 6.
fn decimals(smallest: f64) -> usize {
    if smallest > 0.0 { (-smallest.log10().floor()).clamp(0.0, 6.0) as usize } else { 4 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell_of(values: &[f64]) -> String {
        let figures: Vec<Figure> = values.iter().map(|v| Figure::exact("loss", *v)).collect();
        cell(&figures.iter().collect::<Vec<_>>())
    }

    #[test]
    fn standard_errors_are_those_of_the_mean() {
        // Deviation 1, so the error is 1 / sqrt(3).
        assert_eq!(cell_of(&[1.0, 2.0, 3.0]), "2.00 ± 0.58");
        assert_eq!(cell_of(&[2.5]), "2.500");
        assert_eq!(cell_of(&[2.0, 2.0]), "2 ± 0");
        assert_eq!(cell_of(&[]), "-");
        assert_eq!(cell_of(&[51_200.0, 51_900.0]), "51550 ± 350");
    }

    #[test]
    fn headline_scores_show_their_intervals() {
        let share = |value, low, high| Figure {
            interval: Some((low, high)),
            ..Figure::exact("passkey.accuracy", value)
        };
        let (all, most) = (share(1.0, 0.84, 1.0), share(0.9, 0.7, 0.97));
        assert_eq!(cell(&[&all]), "1.000 [0.840, 1.000]");
        assert_eq!(cell(&[&all, &all]), "1.000 ± 0.000 [0.840, 1.000]");
        assert_eq!(cell(&[&all, &most]), "0.950 ± 0.050 [0.770, 0.985]");
        let loss = Figure {
            standard_error: Some(0.02),
            interval: Some((2.26, 2.34)),
            ..Figure::exact("extrapolate.loss", 2.3)
        };
        assert_eq!(cell(&[&loss]), "2.300 ± 0.020");

        let variant = |figures: &[&Figure]| VariantFigure::new("rope".to_owned(), figures);
        assert_eq!(variant(&[&all, &most]).bar, Some((0.77, 0.985)));
        assert_eq!(variant(&[&all, &most]).seeds, [1.0, 0.9]);
        assert_eq!(variant(&[&loss]).bar, Some((2.3 - 0.02, 2.3 + 0.02)));
        assert_eq!(variant(&[]).mean, None);
    }
}
