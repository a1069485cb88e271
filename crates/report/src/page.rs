//! The page: data as JSON, and the code and styles that show them, in one file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::ReportError;
use crate::evaluations::{EvaluationView, SampleView, Samples, finals, side_by_side, views};
use crate::find::run_folders;
use crate::groups::{DifferentKey, Group, different_keys, groups};
use crate::runs::{Run, RunView};
use crate::table::{AllSamples, Row, rows};

const TEMPLATE: &str = include_str!("../assets/page.html");
const STYLE: &str = include_str!("../assets/style.css");
const SCRIPTS: [&str; 4] = [
    include_str!("../assets/dom.js"),
    include_str!("../assets/charts.js"),
    include_str!("../assets/sections.js"),
    include_str!("../assets/main.js"),
];
const CHARTS: &str = include_str!("../vendor/uplot/uPlot.iife.min.js");
const CHARTS_STYLE: &str = include_str!("../vendor/uplot/uPlot.min.css");
const CHARTS_LICENCE: &str = include_str!("../vendor/uplot/LICENSE");

/// What a report shows of some runs.
#[derive(Serialize)]
pub struct Page {
    title: String,
    runs: Vec<RunView>,
    groups: Vec<Group>,
    differences: Vec<DifferentKey>,
    table: Vec<Row>,
    evaluations: Vec<EvaluationView>,
    /// By evaluation.
    samples: BTreeMap<String, Vec<SampleView>>,
    longwall_version: &'static str,
    /// Identifies the state of the files, on a page that follows them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<String>,
}

impl Page {
    /// Reads the runs in `paths`: folders of runs, of sweeps, or of both.
    ///
    /// # Errors
    /// A folder without runs, and files of a run that cannot be read.
    pub fn collect(paths: &[PathBuf]) -> Result<Self, ReportError> {
        let folders = run_folders(paths)?;
        let runs: Vec<Run> =
            folders.iter().map(|folder| Run::load(folder)).collect::<Result<_, _>>()?;
        let groups = groups(&runs);
        let samples = samples(&runs)?;
        let group_of = |run: usize| groups.iter().position(|group| group.runs.contains(&run));
        let view = |(at, run): (usize, &Run)| {
            run.view(distinct_name(&runs, at), group_of(at).unwrap_or_default())
        };
        Ok(Page {
            title: title(paths, &runs),
            runs: runs.iter().enumerate().map(view).collect::<Result<_, _>>()?,
            differences: different_keys(&groups, &runs),
            table: rows(&runs, &groups, &samples),
            evaluations: (0..)
                .zip(&runs)
                .flat_map(|(at, run)| views(at, &run.evaluations))
                .collect(),
            samples: by_evaluation(&samples),
            groups,
            longwall_version: env!("CARGO_PKG_VERSION"),
            version: None,
        })
    }

    /// The page as one HTML file that loads nothing.
    pub fn html(&self) -> String {
        let licence = format!("/* uPlot\n{CHARTS_LICENCE}*/\n{CHARTS}");
        let scripts = SCRIPTS.join("\n");
        let parts = [
            ("title", escaped(&self.title)),
            ("style", format!("{CHARTS_STYLE}\n{STYLE}")),
            ("data", self.json()),
            ("charts", licence),
            ("script", scripts),
        ];
        fill(TEMPLATE, &parts)
    }

    /// The data as JSON without characters that could end a script element.
    pub(crate) fn json(&self) -> String {
        script_safe(&serde_json::to_string(self).expect("a page is plain data"))
    }
}

/// Replaces each `{{name}}` of the template once: what is filled in is never searched.
fn fill(template: &str, parts: &[(&str, String)]) -> String {
    let mut page = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").expect("the template closes its places");
        let (_, text) = parts.iter().find(|part| part.0 == name).expect("a part for each place");
        page += before;
        page += text;
        rest = after;
    }
    page + rest
}

/// JSON whose `<`, `>` and `&` are escapes, as are the line separators that JavaScript once refused: all of them
/// stand in strings alone.
fn script_safe(json: &str) -> String {
    json.replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// Text as HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn title(paths: &[PathBuf], runs: &[Run]) -> String {
    match (paths, runs) {
        (_, [run]) => run.config.run.name.clone(),
        ([path], _) => {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            name.unwrap_or_else(|| format!("{} runs", runs.len()))
        }
        _ => format!("{} runs", runs.len()),
    }
}

/// The name of a run, or its folder if another run has the same name.
fn distinct_name(runs: &[Run], at: usize) -> String {
    let name = |run: &Run| run.config.run.name.clone();
    match runs.iter().filter(|run| name(run) == name(&runs[at])).count() {
        1 => name(&runs[at]),
        _ => runs[at].dir.display().to_string(),
    }
}

fn samples(runs: &[Run]) -> Result<AllSamples, ReportError> {
    let mut all = AllSamples::new();
    for (at, run) in runs.iter().enumerate() {
        for (name, evaluation) in finals(&run.evaluations) {
            all.insert((at, name.to_owned()), Samples::load(evaluation)?);
        }
    }
    Ok(all)
}

fn by_evaluation(samples: &AllSamples) -> BTreeMap<String, Vec<SampleView>> {
    let mut of_runs: BTreeMap<&String, Vec<(usize, &Samples)>> = BTreeMap::new();
    for ((run, name), samples) in samples {
        of_runs.entry(name).or_default().push((*run, samples));
    }
    let shown = of_runs.into_iter().map(|(name, runs)| (name.clone(), side_by_side(&runs)));
    shown.filter(|(_, samples)| !samples.is_empty()).collect()
}

/// Writes the report of the runs in `paths` to `output`, at once or not at all.
///
/// # Errors
/// As [`Page::collect`], and a file that cannot be written.
pub fn write(paths: &[PathBuf], output: &Path) -> Result<(), ReportError> {
    let html = Page::collect(paths)?.html();
    longwall_data::files::write_atomically(output, html.as_bytes())
        .map_err(|source| ReportError::Write { path: output.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_in_a_script_cannot_end_it() {
        let nasty = "</script><script>alert(1)</script><!-- & \u{2028}";
        let json = script_safe(&serde_json::to_string(nasty).unwrap());
        assert!(!json.contains(['<', '>', '&', '\u{2028}']), "{json}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), nasty);
        assert_eq!(escaped("<b>\"&"), "&lt;b&gt;&quot;&amp;");
    }

    #[test]
    fn what_fills_a_place_is_not_a_template() {
        let parts = [("a", "{{b}}".to_owned()), ("b", "x".to_owned())];
        assert_eq!(fill("1 {{a}} 2 {{b}}", &parts), "1 {{b}} 2 x");
    }
}
