//! The loss of a group of positions.

use longwall_data::Binning;
use serde::{Deserialize, Serialize};

use crate::stats::Estimate;

/// The mean loss of a group of positions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bin {
    /// Context length of the windows.
    pub length: usize,
    /// How the positions are grouped.
    pub binning: Binning,
    /// The first position, from 0.
    pub from: usize,
    /// One past the last position.
    pub to: usize,
    /// Mean loss, nats per token.
    #[serde(flatten)]
    pub loss: Estimate,
}

impl Bin {
    /// Where to plot the bin, in tokens read: its middle, on its own scale.
    pub(super) fn middle(&self) -> f64 {
        match self.binning {
            Binning::Linear => (self.from + 1 + self.to) as f64 / 2.0,
            Binning::Logarithmic => ((self.from + 1) as f64 * self.to as f64).sqrt(),
        }
    }
}
