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
#[derive(Clone, Debug, PartialEq)]
pub struct Observation {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// What was measured.
    pub metric: Metric,
    /// The mean over the layer's heads and tokens.
    pub value: f64,
    /// The value of each query head in each view, `[views][heads]`; empty where only the layer is measured.
    pub heads: Vec<Vec<f64>>,
    /// The value of each channel of each head, `[heads][channels]`; empty where heads are not measured by channel.
    pub channels: Vec<Vec<f64>>,
}

/// Collects what layers report.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    layer: usize,
    thorough: bool,
    observations: Vec<Observation>,
}

impl Probe {
    /// A probe for all that layers can measure, also what takes many times as long as their outputs: the
    /// [weights](super::weights) of keys and the [retention](super::retention) of gates.
    pub fn thorough() -> Self {
        Probe { thorough: true, ..Probe::default() }
    }

    /// Whether it is one.
    pub fn is_thorough(&self) -> bool {
        self.thorough
    }

    /// The reports that follow are of this layer, of layer 0 before the first call.
    pub fn enter_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    /// Records a measurement of the current layer.
    pub fn report(&mut self, metric: Metric, value: f64) {
        self.push(metric, value, vec![], vec![]);
    }

    /// Records a measurement of each head of the current layer, `[views][heads]`; their mean is the layer's.
    ///
    /// # Panics
    /// Without a head.
    pub fn report_heads(&mut self, metric: Metric, heads: Vec<Vec<f64>>) {
        let value = mean(&heads.concat());
        self.push(metric, value, heads, vec![]);
    }

    /// Records a measurement of each channel of each head of the current layer, `[heads][channels]`; their means are
    /// the heads'.
    ///
    /// # Panics
    /// Without a channel.
    pub fn report_channels(&mut self, metric: Metric, channels: Vec<Vec<f64>>) {
        let heads: Vec<f64> = channels.iter().map(|channels| mean(channels)).collect();
        self.push(metric, mean(&heads), vec![heads], channels);
    }

    fn push(&mut self, metric: Metric, value: f64, heads: Vec<Vec<f64>>, channels: Vec<Vec<f64>>) {
        let layer = self.layer;
        self.observations.push(Observation { layer, metric, value, heads, channels });
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
        values.into_iter().map(|(name, values)| (name, mean(&values))).collect()
    }

    /// A metric's mean over the layers that report it; `None` where none does.
    pub fn mean(&self, metric: Metric) -> Option<f64> {
        self.means().remove(metric.0)
    }
}

fn mean(values: &[f64]) -> f64 {
    assert!(!values.is_empty(), "a mean of nothing");
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use longwall_config::Problems;
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::Cpu;
    use crate::attention::kv_cache_variant::{KvCacheVariant, Prepared};
    use crate::attention::rotation::Rotation;
    use crate::attention::{AttentionShape, Inputs, VariantSpec, dispatch};
    use crate::backend::OpBackend;

    /// The root mean square of the keys, as scores take them.
    const KEY_SIZE: Metric = Metric("key_size");

    /// A kind on a cache of keys and values that measures something.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    struct Measuring {
        on: bool,
    }

    impl VariantSpec for Measuring {
        const SOURCE: &'static str = "a test";

        fn validate(&self, _key: &str, _shape: &AttentionShape, _problems: &mut Problems) {}

        fn metrics(&self) -> Vec<Metric> {
            if self.on { vec![KEY_SIZE] } else { vec![] }
        }
    }

    impl KvCacheVariant for Measuring {
        fn rotation(&self) -> Option<Rotation> {
            Some(Rotation::new(10_000.0))
        }

        fn output<B: OpBackend>(
            &self,
            _shape: &AttentionShape,
            call: Prepared<'_, B>,
        ) -> Tensor<B, 4> {
            call.q
        }

        fn observe_output<B: OpBackend>(
            &self,
            _shape: &AttentionShape,
            call: Prepared<'_, B>,
            probe: &mut Probe,
        ) {
            let size = call.k.powi_scalar(2).mean().sqrt();
            probe.report(KEY_SIZE, size.into_data().iter::<f64>().next().expect("one element"));
        }
    }

    #[test]
    fn a_kind_with_a_cache_of_keys_and_values_can_report() {
        let shape = AttentionShape::new(8, 1, 1, 8);
        let x = || Tensor::<Cpu, 4>::full([1, 1, 5, 8], 3.0, &Default::default());
        let inputs = || Inputs { q: x(), k: x(), v: x(), projections: vec![], parameters: vec![] };
        let observe = |on| {
            let mut probe = Probe::default();
            dispatch::observe(&Measuring { on }, &shape, inputs(), None, &mut probe);
            probe.mean(KEY_SIZE)
        };
        // A rotation keeps the length.
        assert!(observe(true).is_some_and(|size| (size - 3.0).abs() < 1e-5));
        assert_eq!(observe(false), None);
    }

    #[test]
    fn a_mean_is_over_the_layers_that_report_the_metric() {
        const ENTROPY: Metric = Metric("entropy");
        let mut probe = Probe::default();
        for (layer, fraction) in [(0, 0.25), (2, 0.75)] {
            probe.enter_layer(layer);
            probe.report(PRUNED_FRACTION, fraction);
        }
        probe.enter_layer(1);
        probe.report_heads(ENTROPY, vec![vec![2.0, 1.0], vec![4.0, 5.0]]);
        assert_eq!(probe.mean(PRUNED_FRACTION), Some(0.5));
        assert_eq!(probe.mean(ENTROPY), Some(3.0));
        assert_eq!(probe.mean(Metric("retention")), None);
        let layers: Vec<_> = probe.observations().iter().map(|o| o.layer).collect();
        assert_eq!(layers, [0, 2, 1]);
    }
}
