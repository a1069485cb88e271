//! Which checkpoint of a run, and which of its weights.

use std::fmt::{self, Display};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Selects a checkpoint of a run: `latest`, `best`, or a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointSelector {
    /// The newest.
    #[default]
    Latest,
    /// The one with the lowest validation loss.
    Best,
    /// The one after this many steps.
    Step(u64),
}

impl FromStr for CheckpointSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "latest" => Ok(Self::Latest),
            "best" => Ok(Self::Best),
            _ => text.strip_prefix("step-").unwrap_or(text).parse().map(Self::Step).map_err(|_| {
                format!("`{text}` is no checkpoint; allowed: latest, best, or a step such as 1000")
            }),
        }
    }
}

impl Display for CheckpointSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latest => f.write_str("latest"),
            Self::Best => f.write_str("best"),
            Self::Step(step) => write!(f, "step-{step}"),
        }
    }
}

/// Selects among the weights of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightsSelector {
    /// The model's weights after the step.
    #[default]
    Model,
    /// Their exponential moving average, which a run with `train.ema` keeps.
    Ema,
}

impl FromStr for WeightsSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "model" => Ok(Self::Model),
            "ema" => Ok(Self::Ema),
            _ => Err(format!("`{text}` names no weights; allowed: model, ema")),
        }
    }
}

impl Display for WeightsSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Ema => "ema",
        })
    }
}
