//! Shared by all parts of the configuration: problems that name key, value, allowed values and remedy,
//! intervals in steps or tokens, and tables that two structs share.

mod table;

use std::fmt::{self, Display};
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use table::{culprit, keys_of, side_by_side};

/// One problem of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted key in the TOML file, for example `model.heads`.
    pub key: String,
    /// The value found there.
    pub value: String,
    /// What is allowed.
    pub allowed: String,
    /// What the user can do about it.
    pub remedy: String,
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} is {}; allowed: {}", self.key, self.value, self.allowed)?;
        write!(f, "  hint: {}", self.remedy)
    }
}

/// All the problems of a configuration, reported at once.
#[derive(Clone, Debug, Default, PartialEq, Eq, thiserror::Error)]
pub struct Problems(Vec<Problem>);

impl Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0.len() == 1 { "problem" } else { "problems" };
        write!(f, "the configuration has {} {plural}:", self.0.len())?;
        for problem in &self.0 {
            write!(f, "\n{problem}")?;
        }
        Ok(())
    }
}

impl Problems {
    /// No problem yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records a problem unless `ok`.
    pub fn check(
        &mut self,
        ok: bool,
        key: impl Into<String>,
        value: impl Display,
        allowed: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        if !ok {
            self.0.push(Problem {
                key: key.into(),
                value: value.to_string(),
                allowed: allowed.into(),
                remedy: remedy.into(),
            });
        }
    }

    /// The problems found so far.
    pub fn as_slice(&self) -> &[Problem] {
        &self.0
    }

    /// `Ok` if there are no problems, else all of them as the error.
    ///
    /// # Errors
    /// Returns `self` when at least one problem was recorded.
    pub fn into_result(self) -> Result<(), Problems> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }
}

/// A count of tokens or steps written with an optional suffix: `500`, `20k`, `1.5M`, `2B`.
///
/// # Errors
/// When `text` is no such number; says what was read and what is allowed.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let bad = || {
        format!(
            "`{text}` is not a count; allowed: a whole number with an optional k, M or B, for example 20k or 1.5M"
        )
    };
    let text_ = text.trim().replace('_', "");
    let (digits, factor) = match text_.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text_[..at], 1e3),
        Some((at, 'm' | 'M')) => (&text_[..at], 1e6),
        Some((at, 'b' | 'B' | 'g' | 'G')) => (&text_[..at], 1e9),
        _ => (text_.as_str(), 1.0),
    };
    let value = digits.trim().parse::<f64>().map_err(|_| bad())? * factor;
    if value < 0.0 || value.fract() != 0.0 || value > 9e15 {
        return Err(bad());
    }
    Ok(value as u64)
}

/// `path` as a shell's argument: in single quotes if it holds a character that shells may treat specially.
pub fn shell_quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%,".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// How often something happens: every n steps, or every n tokens.
///
/// In TOML: a whole number (`every = 100`, steps), or a string (`every = "100 steps"`,
/// `every = "10M tokens"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval {
    /// Every n optimiser steps.
    Steps(u64),
    /// Every n training tokens; rounded to whole steps by [`Interval::steps`].
    Tokens(u64),
}

impl Interval {
    /// The interval in steps of `batch_tokens` tokens each, at least 1.
    pub fn steps(self, batch_tokens: u64) -> u64 {
        match self {
            Interval::Steps(n) => n.max(1),
            Interval::Tokens(n) => (n / batch_tokens.max(1)).max(1),
        }
    }
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (make, count): (fn(u64) -> Interval, &str) =
            if let Some(n) = text.strip_suffix("tokens") {
                (Interval::Tokens, n)
            } else {
                (Interval::Steps, text.strip_suffix("steps").unwrap_or(text))
            };
        match parse_count(count) {
            Ok(0) | Err(_) => Err(format!(
                "`{text}` is not an interval; allowed: a count above 0 of steps or tokens, for example 100, \"100 steps\" or \"10M tokens\""
            )),
            Ok(n) => Ok(make(n)),
        }
    }
}

impl Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interval::Steps(n) => write!(f, "{n} steps"),
            Interval::Tokens(n) => write!(f, "{n} tokens"),
        }
    }
}

impl Serialize for Interval {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Interval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_number_or_text(deserializer, |text| text.parse())
    }
}

/// A count in TOML: a whole number (`1000000`, `1e6`), or a string with a suffix (`tokens = "10M"`). For
/// `#[serde(deserialize_with = "longwall_config::count")]`.
///
/// # Errors
/// As [`parse_count`].
pub fn count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    parse_number_or_text(deserializer, parse_count)
}

fn parse_number_or_text<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a whole number, or text such as \"10M\"")]
    enum NumberOrText {
        Number(u64),
        /// `1e6`.
        Real(f64),
        Text(String),
    }
    let text = match NumberOrText::deserialize(deserializer)? {
        NumberOrText::Number(n) => n.to_string(),
        NumberOrText::Real(x) => x.to_string(),
        NumberOrText::Text(text) => text,
    };
    parse(&text).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_only_where_a_shell_needs_it() {
        assert_eq!(shell_quoted(Path::new("runs/fox-124m_2")), "runs/fox-124m_2");
        for path in ["my runs/a", "it's", "a$HOME`b`\"c\"\\", "", "zwölf", "a\nb", "x*", "~a"] {
            let command = format!("printf %s {}", shell_quoted(Path::new(path)));
            let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), path);
        }
    }

    #[test]
    fn counts_take_suffixes() {
        assert_eq!(parse_count("20k"), Ok(20_000));
        assert_eq!(parse_count("1.5M"), Ok(1_500_000));
        assert_eq!(parse_count("2_000"), Ok(2_000));
        assert!(parse_count("-1").is_err());
        assert!(parse_count("1.5").is_err());
        assert!(parse_count("many").is_err());
    }

    #[test]
    fn intervals_survive_a_round_trip() {
        for interval in [Interval::Steps(7), Interval::Tokens(10_000_000)] {
            assert_eq!(interval.to_string().parse(), Ok(interval));
        }
        assert_eq!("10M tokens".parse(), Ok(Interval::Tokens(10_000_000)));
        assert!("0".parse::<Interval>().is_err());
    }

    #[test]
    fn intervals_in_tokens_become_whole_steps() {
        assert_eq!(Interval::Tokens(10_000).steps(4096), 2);
        assert_eq!(Interval::Tokens(10).steps(4096), 1);
    }

    #[test]
    fn toml_takes_numbers_and_text() {
        #[derive(serde::Deserialize)]
        struct Config {
            #[serde(deserialize_with = "count")]
            tokens: u64,
            every: Interval,
        }
        let config: Config = toml::from_str("tokens = \"2M\"\nevery = 50").unwrap();
        assert_eq!((config.tokens, config.every), (2_000_000, Interval::Steps(50)));
        let config: Config = toml::from_str("tokens = 1e6\nevery = \"1M tokens\"").unwrap();
        assert_eq!((config.tokens, config.every), (1_000_000, Interval::Tokens(1_000_000)));
        for text in ["1.5", "-1", "1e300"] {
            assert!(toml::from_str::<Config>(&format!("tokens = {text}\nevery = 1")).is_err());
        }
    }
}
