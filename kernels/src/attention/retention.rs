//! How much of the past gates retain, measured for a thorough probe.

#[cfg(test)]
mod tests;

use burn::tensor::{FloatDType, Tensor};

use super::probe::{Metric, Probe};
use crate::backend::OpBackend;

/// The mean over tokens of the factor, 0 to 1, by which a gate multiplies what came before its token: of each channel,
/// or of a head whose gate is one for all channels.
pub const RETENTION: Metric = Metric("retention");

/// Its standard deviation over tokens.
pub const RETENTION_DEVIATION: Metric = Metric("retention_deviation");

/// The fraction, 0 to 1, of a head's gates that retain at least [`ALWAYS_ON`] at every token.
pub const ALWAYS_ON_FRACTION: Metric = Metric("always_on_fraction");

/// What [`report`] reports.
pub const METRICS: [Metric; 3] = [RETENTION, RETENTION_DEVIATION, ALWAYS_ON_FRACTION];

/// The retention from which on a gate counts as open.
pub const ALWAYS_ON: f64 = 0.999;

/// Reports [`METRICS`] of gates with the logarithms of their factors, `[batch, heads, tokens, channels]`.
pub fn report<B: OpBackend>(log_retention: Tensor<B, 4>, probe: &mut Probe) {
    let retention = log_retention.cast(FloatDType::F32).exp();
    let mean = retention.clone().mean_dim(2).mean_dim(0);
    let off = retention.clone() - mean.clone();
    let variance = (off.clone() * off).mean_dim(2).mean_dim(0);
    let least = retention.min_dim(2).min_dim(0);
    let [mean, deviation, least] = [mean, variance.sqrt(), least].map(|x| {
        let channels = x.dims()[3];
        let all: Vec<f64> = x.into_data().iter::<f64>().collect();
        all.chunks(channels).map(<[f64]>::to_vec).collect::<Vec<_>>()
    });
    probe.report_channels(RETENTION, mean);
    probe.report_channels(RETENTION_DEVIATION, deviation);
    let open = |channels: &Vec<f64>| {
        channels.iter().filter(|least| **least >= ALWAYS_ON).count() as f64 / channels.len() as f64
    };
    probe.report_heads(ALWAYS_ON_FRACTION, vec![least.iter().map(open).collect()]);
}
