//! Measurements of attention layers, beside their outputs.
//!
//! A kind names what it can measure in [`VariantSpec::metrics`](super::VariantSpec::metrics), and
//! reports it in [`Variant::observe`](super::Variant::observe) and, while decoding, in
//! [`DecodeState::observe`](super::DecodeState::observe). Nothing is measured without a probe.

use std::collections::BTreeMap;

/// The name of a quantity that layers measure, as metrics and reports print it. A metric has one
/// constant, beside the code that measures it or, where several kinds share it, here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric(pub &'static str);

/// The fraction, 0 to 1, of the visible (query, key) pairs that the layer does not compute because
/// `prune` rules them out.
pub const PRUNED_FRACTION: Metric = Metric("pruned_fraction");

/// One measurement of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// What was measured.
    pub metric: Metric,
    /// The mean over the layer's heads and tokens.
    pub value: f64,
}

/// Collects what layers report.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    layer: usize,
    observations: Vec<Observation>,
}

impl Probe {
    /// The reports that follow are of this layer, of layer 0 before the first call.
    pub fn enter_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    /// Records a measurement of the current layer.
    pub fn report(&mut self, metric: Metric, value: f64) {
        self.observations.push(Observation { layer: self.layer, metric, value });
    }

    /// Everything that was reported, in order.
    pub fn observations(&self) -> &[Observation] {
        &self.observations
    }

    /// The mean of each metric over the layers that report it, by name.
    pub fn means(&self) -> BTreeMap<&'static str, f64> {
        let mut values: BTreeMap<_, Vec<f64>> = BTreeMap::new();
        for Observation { metric, value, .. } in &self.observations {
            values.entry(metric.0).or_default().push(*value);
        }
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        values.into_iter().map(|(name, values)| (name, mean(values))).collect()
    }

    /// A metric's mean over the layers that report it; `None` where none does.
    pub fn mean(&self, metric: Metric) -> Option<f64> {
        self.means().remove(metric.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_is_over_the_layers_that_report_the_metric() {
        const ENTROPY: Metric = Metric("entropy");
        let mut probe = Probe::default();
        for (layer, fraction) in [(0, 0.25), (2, 0.75)] {
            probe.enter_layer(layer);
            probe.report(PRUNED_FRACTION, fraction);
        }
        probe.enter_layer(1);
        probe.report(ENTROPY, 3.0);
        assert_eq!(probe.mean(PRUNED_FRACTION), Some(0.5));
        assert_eq!(probe.mean(ENTROPY), Some(3.0));
        assert_eq!(probe.mean(Metric("retention")), None);
        let layers: Vec<_> = probe.observations().iter().map(|o| o.layer).collect();
        assert_eq!(layers, [0, 2, 1]);
    }
}
