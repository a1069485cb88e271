//! Values of the configuration that take more than one form.

use std::fmt::{self, Display};
use std::str::FromStr;

use longwall_config::Interval;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The length of a phase of a run, such as the warm-up: a share of its tokens, or a count of steps or
/// tokens. Lengths in tokens are rounded up to whole steps, shares to the nearest.
///
/// In TOML: a number below 1 (`warmup = 0.01`, a share), a whole number (`warmup = 100`, steps) or
/// a string (`"100 steps"`, `"10M tokens"`, `"1 %"`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PhaseLength {
    /// A share of the run, `0..=1`.
    Fraction(f64),
    /// A number of steps, 0 allowed.
    Steps(u64),
    /// A number of tokens.
    Tokens(u64),
}

impl Display for PhaseLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PhaseLength::Fraction(share) => write!(f, "{share}"),
            PhaseLength::Steps(steps) => write!(f, "{steps} steps"),
            PhaseLength::Tokens(tokens) => write!(f, "{tokens} tokens"),
        }
    }
}

impl FromStr for PhaseLength {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(percent) = text.trim().strip_suffix('%') {
            let share = percent.trim().parse::<f64>().ok().map(|p| p / 100.0);
            return share
                .filter(|share| (0.0..=1.0).contains(share))
                .map(PhaseLength::Fraction)
                .ok_or_else(|| not_a_length(text));
        }
        if text.trim().trim_end_matches("steps").trim() == "0" {
            return Ok(PhaseLength::Steps(0));
        }
        match text.parse() {
            Ok(Interval::Steps(steps)) => Ok(PhaseLength::Steps(steps)),
            Ok(Interval::Tokens(tokens)) => Ok(PhaseLength::Tokens(tokens)),
            Err(_) => Err(not_a_length(text)),
        }
    }
}

fn not_a_length(text: impl Display) -> String {
    format!(
        "`{text}` is not a length; allowed: a share of the run from 0 to 1 (0.01 or \"1 %\"), steps (100 or \"100 steps\") or tokens (\"10M tokens\")"
    )
}

impl Serialize for PhaseLength {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            PhaseLength::Fraction(share) => serializer.serialize_f64(*share),
            _ => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for PhaseLength {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Scalar::deserialize(deserializer, "a share, steps or tokens")? {
            Scalar::Whole(steps) => Ok(PhaseLength::Steps(steps)),
            Scalar::Real(share) if (0.0..=1.0).contains(&share) => Ok(PhaseLength::Fraction(share)),
            Scalar::Real(share) => Err(D::Error::custom(not_a_length(share))),
            Scalar::Text(text) => text.parse().map_err(D::Error::custom),
        }
    }
}

/// How often something happens: at an interval, or `"never"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every(pub Option<Interval>);

impl Every {
    /// Every `steps` steps.
    pub const fn steps(steps: u64) -> Self {
        Every(Some(Interval::Steps(steps)))
    }

    /// Whether it happens at all.
    pub fn is_on(self) -> bool {
        self.0.is_some()
    }
}

impl Serialize for Every {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Some(interval) => interval.serialize(serializer),
            None => serializer.serialize_str("never"),
        }
    }
}

impl<'de> Deserialize<'de> for Every {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = match Scalar::deserialize(deserializer, "steps, tokens or \"never\"")? {
            Scalar::Whole(steps) => steps.to_string(),
            Scalar::Real(value) => value.to_string(),
            Scalar::Text(text) if text.trim() == "never" => return Ok(Every(None)),
            Scalar::Text(text) => text,
        };
        let interval = text.parse::<Interval>();
        interval
            .map(|interval| Every(Some(interval)))
            .map_err(|message| D::Error::custom(format!("{message}, or \"never\"")))
    }
}

/// A positive number, or `"off"`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OrOff(pub Option<f64>);

impl Display for OrOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("off"),
        }
    }
}

impl Serialize for OrOff {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(value) => serializer.serialize_f64(value),
            None => serializer.serialize_str("off"),
        }
    }
}

impl<'de> Deserialize<'de> for OrOff {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Scalar::deserialize(deserializer, "a number above 0, or \"off\"")? {
            Scalar::Whole(value) => Ok(OrOff(Some(value as f64))),
            Scalar::Real(value) => Ok(OrOff(Some(value))),
            Scalar::Text(text) if text.trim() == "off" => Ok(OrOff(None)),
            Scalar::Text(text) => Err(D::Error::custom(format!(
                "`{text}` is not allowed; allowed: a number above 0, or \"off\""
            ))),
        }
    }
}

/// A TOML number or string.
enum Scalar {
    Whole(u64),
    Real(f64),
    Text(String),
}

impl Scalar {
    /// Reads one; for a value of the wrong type, the error says what was `expected`.
    fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
        expected: &'static str,
    ) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor(expected))
    }
}

struct ScalarVisitor(&'static str);

impl Visitor<'_> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Whole(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Scalar, E> {
        u64::try_from(value)
            .map(Scalar::Whole)
            .map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(value), &self))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Real(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Table<T> {
        key: T,
    }

    fn parse<T: for<'de> Deserialize<'de>>(value: &str) -> Result<T, String> {
        let parsed: Result<Table<T>, _> = toml::from_str(&format!("key = {value}"));
        parsed.map(|table| table.key).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn phase_lengths_take_shares_steps_and_tokens() {
        assert_eq!(parse("0.25"), Ok(PhaseLength::Fraction(0.25)));
        assert_eq!(parse("1.0"), Ok(PhaseLength::Fraction(1.0)));
        assert_eq!(parse("\"2 %\""), Ok(PhaseLength::Fraction(0.02)));
        assert_eq!(parse("100"), Ok(PhaseLength::Steps(100)));
        assert_eq!(parse("0"), Ok(PhaseLength::Steps(0)));
        assert_eq!(parse("\"0 steps\""), Ok(PhaseLength::Steps(0)));
        assert_eq!(parse("\"2k steps\""), Ok(PhaseLength::Steps(2000)));
        assert_eq!(parse("\"10M tokens\""), Ok(PhaseLength::Tokens(10_000_000)));
        assert!(parse::<PhaseLength>("1.5").unwrap_err().contains("share of the run"));
        assert!(parse::<PhaseLength>("\"many\"").is_err());
        assert!(parse::<PhaseLength>("\"200 %\"").is_err());
        assert!(parse::<PhaseLength>("true").unwrap_err().contains("a share, steps or tokens"));
    }

    #[test]
    fn intervals_take_steps_tokens_and_never() {
        assert_eq!(parse("\"100 tokens\""), Ok(Every(Some(Interval::Tokens(100)))));
        assert_eq!(parse("20"), Ok(Every::steps(20)));
        assert_eq!(parse("\"never\""), Ok(Every(None)));
        assert!(parse::<Every>("0").is_err());
        assert!(parse::<Every>("1.5").is_err());
    }

    #[test]
    fn clipping_can_be_switched_off() {
        assert_eq!(parse("\"off\""), Ok(OrOff(None)));
        assert_eq!(parse("2"), Ok(OrOff(Some(2.0))));
        assert!(parse::<OrOff>("\"no\"").is_err());
    }

    #[test]
    fn what_is_written_is_read_back() {
        for length in [
            PhaseLength::Fraction(0.01),
            PhaseLength::Fraction(1.0),
            PhaseLength::Steps(0),
            PhaseLength::Tokens(500),
        ] {
            let table = Table { key: length };
            assert_eq!(toml::from_str(&toml::to_string(&table).unwrap()), Ok(table));
        }
        for every in [Every(None), Every::steps(20), Every(Some(Interval::Tokens(9)))] {
            let table = Table { key: every };
            assert_eq!(toml::from_str(&toml::to_string(&table).unwrap()), Ok(table));
        }
        for number in [OrOff(None), OrOff(Some(1.0))] {
            let table = Table { key: number };
            assert_eq!(toml::from_str(&toml::to_string(&table).unwrap()), Ok(table));
        }
    }
}
