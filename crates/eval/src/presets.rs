//! Fixed selections of suites, and the summary of one.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;

use serde::Serialize;

use crate::files::write_atomically;
use crate::report::{TextTable, show};
use crate::stats::Estimate;
use crate::suites::babilong::BabilongOptions;
use crate::suites::fflm::FflmOptions;
use crate::suites::mqar::MqarOptions;
use crate::suites::mqrar::MqrarOptions;
use crate::suites::mrcr::MrcrOptions;
use crate::suites::multi_needle::MultiNeedleOptions;
use crate::suites::niah::{HaystackKind, NiahOptions};
use crate::suites::passkey::PasskeyOptions;
use crate::suites::perplexity::PerplexityOptions;
use crate::suites::phonebook::PhonebookOptions;
use crate::suites::ruler::RulerOptions;
use crate::suites::word_problem::WordProblemOptions;
use crate::{EvalError, Report, SuiteConfig};

/// A fixed selection of suites and options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Preset {
    /// Few samples up to 1024 tokens: minutes for a small model on a CPU
    Small,
    /// Retrieval and perplexity from 1k to 32k tokens: for a GPU
    Long,
}

impl Preset {
    /// Its name on the command line, and the beginning of its folders' names.
    pub fn name(self) -> &'static str {
        match self {
            Preset::Small => "small",
            Preset::Long => "long",
        }
    }

    /// The suites, each with the name of its results' folder.
    pub fn suites(self) -> Vec<(SuiteConfig, String)> {
        let suites = match self {
            Preset::Small => small(),
            Preset::Long => long(),
        };
        let folder = |suite: &SuiteConfig| format!("{}-{}", self.name(), suite.name());
        suites
            .into_iter()
            .map(|suite| {
                let folder = folder(&suite);
                (suite, folder)
            })
            .collect()
    }
}

fn small() -> Vec<SuiteConfig> {
    let lengths = || vec![512, 1024];
    let one = || vec![1024];
    vec![
        PerplexityOptions { limit: Some(65_536), ..Default::default() }.into(),
        PasskeyOptions { lengths: lengths(), trials: 20, ..Default::default() }.into(),
        MultiNeedleOptions { lengths: one(), trials: 20, ..Default::default() }.into(),
        NiahOptions {
            lengths: Some(lengths()),
            depths: 5,
            trials: 2,
            haystack: HaystackKind::Noise,
            ..Default::default()
        }
        .into(),
        PhonebookOptions { lengths: lengths(), trials: 20, ..Default::default() }.into(),
        FflmOptions {
            sequences: Some(100),
            sparse_sequences: Some(100),
            dense_sequences: Some(100),
            ..Default::default()
        }
        .into(),
        MqarOptions { lengths: vec![64, 128, 256], trials: 100, ..Default::default() }.into(),
        MqrarOptions { trials: 20, ..Default::default() }.into(),
        WordProblemOptions { trials: 50, ..Default::default() }.into(),
    ]
}

fn long() -> Vec<SuiteConfig> {
    let lengths = || vec![1000, 2000, 4000, 8000, 16_000, 32_000];
    vec![
        PerplexityOptions::default().into(),
        PasskeyOptions { lengths: lengths(), trials: 50, ..Default::default() }.into(),
        MultiNeedleOptions { lengths: lengths(), trials: 50, ..Default::default() }.into(),
        NiahOptions {
            lengths: Some(lengths()),
            trials: 5,
            haystack: HaystackKind::Noise,
            ..Default::default()
        }
        .into(),
        PhonebookOptions { lengths: lengths(), trials: 50, ..Default::default() }.into(),
        // Shorter ones do not hold the examples of `cwe` in bytes.
        RulerOptions { lengths: vec![8192, 16_384, 32_768], trials: 20, ..Default::default() }
            .into(),
        BabilongOptions { trials: 20, ..Default::default() }.into(),
        MrcrOptions { trials: 20, ..Default::default() }.into(),
    ]
}

/// What one suite of a preset gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SummaryRow {
    /// The suite.
    pub suite: String,
    /// The folder of its results, beside the summary.
    pub folder: String,
    /// Samples taken.
    pub samples: u64,
    /// Its headline scores.
    pub headline: BTreeMap<String, Estimate>,
    /// Why it did not run.
    pub error: Option<String>,
}

/// The results of a preset's suites.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The preset.
    pub preset: String,
    /// Name of the run.
    pub run: String,
    /// Step of the checkpoint.
    pub checkpoint_step: u64,
    /// One for each suite, in the preset's order.
    pub suites: Vec<SummaryRow>,
}

impl Summary {
    /// Appends a suite's report, or the error that kept it from running.
    pub fn push(&mut self, suite: &str, folder: &str, result: Result<Report, EvalError>) {
        let (samples, headline, error) = match result {
            Ok(report) => (report.samples, report.headline_estimates, None),
            Err(error) => (0, BTreeMap::new(), Some(error.to_string())),
        };
        let (suite, folder) = (suite.to_string(), folder.to_string());
        self.suites.push(SummaryRow { suite, folder, samples, headline, error });
    }

    /// How many suites did not run.
    pub fn failures(&self) -> usize {
        self.suites.iter().filter(|row| row.error.is_some()).count()
    }

    /// Writes `summary-PRESET.json` into the folder of a run's evaluations.
    ///
    /// # Errors
    /// [`EvalError::Io`] when it cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), EvalError> {
        let json = serde_json::to_string_pretty(self).expect("a summary is plain data");
        let path = folder.join(format!("summary-{}.json", self.preset));
        write_atomically(&path, (json + "\n").as_bytes())
    }
}

/// A line for each headline score, and the suites that did not run.
impl Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![["suite", "score", "value"].map(str::to_string).to_vec()];
        for row in &self.suites {
            for (name, estimate) in &row.headline {
                rows.push(vec![row.suite.clone(), name.clone(), show(estimate)]);
            }
        }
        let title =
            format!("preset {}: run {}, step {}", self.preset, self.run, self.checkpoint_step);
        write!(f, "{}", TextTable { title, rows })?;
        write!(f, "brackets hold the 95 % interval, ± is the standard error")?;
        for row in &self.suites {
            if let Some(error) = &row.error {
                write!(f, "\n{} did not run: {error}", row.suite)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use longwall_config::Problems;

    use super::*;

    #[test]
    fn presets_hold_valid_options_and_each_suite_once() {
        for preset in [Preset::Small, Preset::Long] {
            let suites = preset.suites();
            let mut problems = Problems::new();
            suites.iter().for_each(|(suite, _)| suite.validate(&mut problems));
            assert_eq!(problems.as_slice(), []);
            let mut folders: Vec<&String> = suites.iter().map(|(_, folder)| folder).collect();
            folders.sort();
            folders.dedup();
            assert_eq!(folders.len(), suites.len());
            assert!(folders.iter().all(|folder| folder.starts_with(preset.name())));
        }
    }

    #[test]
    fn a_summary_shows_scores_and_what_did_not_run() {
        let mut summary = Summary {
            preset: "small".to_string(),
            run: "tiny".to_string(),
            checkpoint_step: 8,
            suites: Vec::new(),
        };
        let headline = BTreeMap::from([("accuracy".to_string(), Estimate::proportion(3, 4))]);
        let row = SummaryRow {
            suite: "passkey".to_string(),
            folder: "small-passkey".to_string(),
            samples: 4,
            headline,
            error: None,
        };
        summary.suites.push(row);
        let error = EvalError::StoppedEarly { suite: "niah" };
        summary.push("niah", "small-niah", Err(error));
        assert_eq!(summary.failures(), 1);
        insta::assert_snapshot!(summary, @r"
        preset small: run tiny, step 8
          suite     score                 value
        passkey  accuracy  0.750 [0.301, 0.954]
        brackets hold the 95 % interval, ± is the standard error
        niah did not run: the suite niah took no sample
          hint: run the same command again to go on
        ");
        let dir = tempfile::tempdir().unwrap();
        summary.save(dir.path()).unwrap();
        let text = std::fs::read_to_string(dir.path().join("summary-small.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["suites"][0]["headline"]["accuracy"]["value"], 0.75);
    }
}
