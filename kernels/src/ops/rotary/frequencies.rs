//! The angular frequencies of rotary positions, and their scaling for longer contexts.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

/// The scaling of rotary angles for contexts longer than the trained one. `factor` is the ratio of the wanted context
/// length to the trained one, at least 1; `original_len` is the trained one, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Scaling {
    /// No scaling.
    None {},
    /// Position interpolation (Chen et al., "Extending context window of large language models via positional
    /// interpolation", 2023): ω ← ω / `factor`, as if positions were divided.
    Linear {
        /// Ratio of the wanted context to the trained one, at least 1.
        factor: f64,
    },
    /// NTK-aware: θ ← θ · factor^(d/(d−2)), which stretches slow channels by `factor` and leaves
    /// the fastest alone (bloc97, 2023).
    Ntk {
        /// Ratio of the wanted context to the trained one, at least 1.
        factor: f64,
    },
    /// YaRN (Peng et al., "YaRN: efficient context window extension of large language models", 2024): pairs that turn
    /// at least `beta_fast` times in `original_len` tokens keep ω, those that turn at most `beta_slow` times get ω /
    /// `factor`. Between the two, the share of ω that stays falls linearly with the pair's index; the two bounds are
    /// rounded to whole indices, away from each other, as in the released code. The channels that rotate are multiplied
    /// by `attention_factor`; kinds that divide rotated q and k by their lengths undo that, if all channels rotate.
    Yarn {
        /// Ratio of the wanted context to the trained one, at least 1.
        factor: f64,
        /// The trained context length, in tokens.
        original_len: usize,
        /// Turns in the trained context from which on a pair keeps its frequency; default 32.
        #[serde(default = "beta_fast")]
        beta_fast: f64,
        /// Turns in the trained context up to which the frequency is divided by `factor`; default 1.
        #[serde(default = "beta_slow")]
        beta_slow: f64,
        /// What the rotated channels of q and of k are multiplied by; by default 0.1 · ln `factor` + 1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
    },
    /// Llama 3.1's (Grattafiori et al., "The Llama 3 herd of models", 2024): as YaRN with `high_freq_factor` and
    /// `low_freq_factor` turns, but the share that stays grows linearly with the number of turns, and nothing is
    /// multiplied.
    Llama3 {
        /// Ratio of the wanted context to the trained one, at least 1.
        factor: f64,
        /// Turns in the trained context up to which the frequency is divided by `factor`.
        low_freq_factor: f64,
        /// Turns in the trained context from which on a pair keeps its frequency.
        high_freq_factor: f64,
        /// The trained context length, in tokens.
        original_len: usize,
    },
}

fn beta_fast() -> f64 {
    32.0
}

fn beta_slow() -> f64 {
    1.0
}

/// How fast each pair of channels turns, and what the rotated channels are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frequencies {
    /// θ: without scaling, pair i of n/2 has ω_i = θ^(−2i/n).
    pub theta: f64,
    /// Change of the frequencies for long contexts.
    pub scaling: Scaling,
}

impl Frequencies {
    /// Those of base `theta`, without scaling.
    pub fn new(theta: f64) -> Self {
        Frequencies { theta, scaling: Scaling::None {} }
    }

    /// ω_i in radians per position, for the `rotary_dims / 2` pairs of channels.
    pub fn of_pairs(&self, rotary_dims: usize) -> Vec<f64> {
        let d = rotary_dims as f64;
        let theta = match self.scaling {
            Scaling::Ntk { factor } => self.theta * factor.powf(d / (d - 2.0).max(1.0)),
            _ => self.theta,
        };
        let half = rotary_dims / 2;
        let omega = |i: usize| theta.powf(-(i as f64) / half as f64);
        (0..half).map(|i| omega(i) * self.ratio(i, omega(i), d)).collect()
    }

    /// The scaled frequency of pair `i` over its own, `omega`, where `d` channels rotate.
    fn ratio(&self, i: usize, omega: f64, d: f64) -> f64 {
        // The share of the frequency that stays; the rest is divided by the factor.
        let (factor, share) = match self.scaling {
            Scaling::None {} | Scaling::Ntk { .. } => return 1.0,
            Scaling::Linear { factor } => (factor, 0.0),
            Scaling::Yarn { factor, original_len, beta_fast, beta_slow, .. } => {
                // The index, not rounded, of the pair that turns so often in the trained context.
                let index = |turns: f64| {
                    d * (original_len as f64 / (turns * TAU)).ln() / (2.0 * self.theta.ln())
                };
                let high = index(beta_slow).ceil().min(d - 1.0);
                let low = index(beta_fast).floor().max(0.0).min(high);
                // Where both are the same pair, it keeps its frequency.
                (factor, 1.0 - (i as f64 - low) / (high - low).max(1e-3))
            }
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                let turns = original_len as f64 * omega / TAU;
                (factor, (turns - low_freq_factor) / (high_freq_factor - low_freq_factor))
            }
        };
        let share = share.clamp(0.0, 1.0);
        share + (1.0 - share) / factor
    }

    /// What the channels that rotate are multiplied by; 1 but for YaRN.
    pub fn amplitude(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn { factor, attention_factor, .. } => {
                attention_factor.unwrap_or(0.1 * factor.ln() + 1.0)
            }
            _ => 1.0,
        }
    }
}
