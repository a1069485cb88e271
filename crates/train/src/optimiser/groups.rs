//! Which optimiser each parameter has: the groups of `[[train.groups]]`.

use std::fmt;

use glob::Pattern;
use longwall_config::Problems;
use longwall_model::ModelConfig;
use longwall_model::weights::parameter_shapes;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::{OptimiserConfig, Parameter};

/// A table of `[[train.groups]]`: parameters that differ in learning rate, weight decay or optimiser.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupConfig {
    /// Patterns of the names of its parameters, in which `*` stands for any text and `?` for one character. A
    /// parameter belongs to the first group with a pattern that matches.
    #[serde(rename = "match", deserialize_with = "one_or_more")]
    pub patterns: Vec<String>,
    /// Learning rate, as a multiple of the schedule's. Default 1.
    #[serde(default = "one")]
    pub lr: f64,
    /// Weight decay, as a multiple of the optimiser's, for every parameter of the group. Default: 1 for those
    /// that decay by default, 0 for the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// The optimiser. Default: `train.optimiser`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimiser: Option<OptimiserConfig>,
}

fn one() -> f64 {
    1.0
}

/// A text, or a list of texts.
fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    struct OneOrMore;

    impl<'de> Visitor<'de> for OneOrMore {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a pattern in quotes, or a list of them")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Vec<String>, E> {
            Ok(vec![text.to_owned()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
            let mut patterns = vec![];
            while let Some(pattern) = list.next_element()? {
                patterns.push(pattern);
            }
            Ok(patterns)
        }
    }

    deserializer.deserialize_any(OneOrMore)
}

impl GroupConfig {
    /// Whether the parameter `path` matches a pattern. A pattern that is none matches nothing.
    fn matches(&self, path: &str) -> bool {
        let matches = |text: &String| Pattern::new(text).is_ok_and(|p| p.matches(path));
        self.patterns.iter().any(matches)
    }

    /// Records every problem of the table `table`, except for the patterns that match nothing.
    fn validate(&self, table: &str, problems: &mut Problems) {
        problems.check(
            !self.patterns.is_empty(),
            format!("{table}.match"),
            "[]",
            "one or more patterns",
            "write for example match = \"*.mlp.*\"",
        );
        let mut factor = |key: &str, value: f64, remedy: &str| {
            problems.check(
                value.is_finite() && value >= 0.0,
                format!("{table}.{key}"),
                value,
                "0 or more",
                remedy,
            );
        };
        factor(
            "lr",
            self.lr,
            "give a multiple of the schedule's, for example 0.5; 1 changes nothing",
        );
        let remedy =
            "give a multiple of the optimiser's, for example 0.5; leave it out for the default";
        factor("weight_decay", self.weight_decay.unwrap_or(1.0), remedy);
        if let Some(optimiser) = &self.optimiser {
            optimiser.validate(&format!("{table}.optimiser"), problems);
        }
    }
}

/// Records every problem of the groups' own values.
pub(crate) fn validate_groups(groups: &[GroupConfig], problems: &mut Problems) {
    for (at, group) in groups.iter().enumerate() {
        group.validate(&format!("train.groups.{at}"), problems);
    }
}

/// Records every pattern that cannot be read, or that matches no parameter of `model`, which must be valid.
pub(crate) fn validate_patterns(
    groups: &[GroupConfig],
    model: &ModelConfig,
    problems: &mut Problems,
) {
    if groups.is_empty() {
        return;
    }
    let names: Vec<String> =
        parameter_shapes(model, 1, 1).into_iter().map(|(name, _)| name).collect();
    for (at, group) in groups.iter().enumerate() {
        let key = format!("train.groups.{at}.match");
        for text in &group.patterns {
            let pattern = Pattern::new(text);
            let reason = pattern.as_ref().err().map(|error| format!("; {}", error.msg));
            problems.check(
                pattern.is_ok_and(|pattern| names.iter().any(|name| pattern.matches(name))),
                &key,
                format!("\"{text}\"{}", reason.unwrap_or_default()),
                "a pattern that matches the name of a parameter",
                format!(
                    "names look like {} and {}; `longwall info` lists those of a valid configuration",
                    names[0],
                    names[names.len() / 2]
                ),
            );
        }
    }
}

/// How one parameter is updated.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The parameter.
    pub parameter: Parameter,
    /// Its optimiser.
    pub optimiser: OptimiserConfig,
    /// Its learning rate, as a multiple of the schedule's.
    pub lr: f64,
    /// Its place in `[[train.groups]]`, from 0; `None` if it is in no group.
    pub group: Option<usize>,
}

/// How the parameters of a model are updated.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// The optimiser of parameters without one in their group.
    pub optimiser: &'a OptimiserConfig,
    /// The groups.
    pub groups: &'a [GroupConfig],
    /// The model.
    pub model: &'a ModelConfig,
}

impl Rules<'_> {
    /// The rule of the parameter `path` of shape `shape`.
    pub fn rule(&self, path: &str, shape: Vec<usize>) -> Rule {
        let mut parameter = Parameter::new(path.to_owned(), shape);
        parameter.heads = self.model.head_blocks(path);
        if self.model.is_flat_matrix(path) {
            parameter.decay = 1.0;
        }
        let group = self.groups.iter().position(|group| group.matches(path));
        let found = group.map(|at| &self.groups[at]);
        if let Some(decay) = found.and_then(|group| group.weight_decay) {
            parameter.decay = decay;
        }
        let optimiser = found.and_then(|group| group.optimiser.as_ref()).unwrap_or(self.optimiser);
        let lr = found.map_or(1.0, |group| group.lr);
        Rule { parameter, optimiser: optimiser.clone(), lr, group }
    }

    /// The rules of all parameters of the model, with a vocabulary of `vocab_size` tokens and a length of
    /// `seq_len`.
    pub fn all(&self, vocab_size: usize, seq_len: usize) -> Vec<Rule> {
        let shapes = parameter_shapes(self.model, vocab_size, seq_len);
        shapes.into_iter().map(|(path, shape)| self.rule(&path, shape)).collect()
    }
}

impl Rule {
    /// Elements of the optimiser's state for the parameter.
    pub fn state_elements(&self) -> u128 {
        let elements = |shape: &[usize]| shape.iter().map(|&n| n as u128).product::<u128>();
        self.optimiser.state(&self.parameter).iter().map(|state| elements(&state.shape)).sum()
    }
}

#[cfg(test)]
mod tests;
