//! Attention kinds to measure, and random inputs of their operations.

use std::collections::{BTreeMap, BTreeSet};

use burn::backend::Autodiff;
use burn::tensor::{DType, Distribution, Tensor, TensorData};
use longwall_kernels::attention::{
    AttentionConfig, AttentionShape, ExecPath, Init, Inputs, Kernel, ProjectionSpec,
};
use longwall_kernels::backend::{OpBackend, primitive, tensor};
use longwall_train::config::{KindError, parse_kind};
use serde::Serialize;

use crate::inputs::{copy, distributed, random};
use crate::setup::Setup;

/// Which attention kinds to measure.
#[derive(Clone, Debug, Default)]
pub struct KindOptions {
    /// Their names. If empty: every kind with a kernel on the device.
    pub kinds: Vec<String>,
    /// Keys of the kinds' tables, as `key=value`.
    pub sets: Vec<String>,
    /// Projections besides q, k and v, such as gates' logits, are drawn uniformly from this range.
    /// Default: normal around their initial bias.
    pub projections: Option<[f64; 2]>,
}

/// Which implementation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    /// The device's kernel.
    Kernel,
    /// Plain tensor operations, in f32.
    Reference,
}

/// A kind to measure.
pub(crate) struct Kind {
    /// Its settings.
    pub config: AttentionConfig,
    /// The range of the projections.
    pub projections: Option<[f64; 2]>,
}

impl KindOptions {
    /// The kinds.
    pub(crate) fn choose(&self, setup: &Setup) -> Result<Vec<Kind>, KindError> {
        let device = setup.compute.device.kind();
        let known = AttentionConfig::KINDS.iter();
        let with_kernel: Vec<_> =
            known.filter(|kind| kind.devices().contains(&device)).map(|kind| kind.kind).collect();
        let default = || with_kernel.iter().map(|kind| (*kind).to_owned()).collect();
        let names: Vec<String> = if self.kinds.is_empty() { default() } else { self.kinds.clone() };
        let kind = |name: &String| {
            Ok(Kind { config: parse_kind(name, &self.sets)?, projections: self.projections })
        };
        names.iter().map(kind).collect()
    }
}

/// The kernel that the inputs of a run need.
pub(crate) fn kernel(setup: &Setup) -> Kernel {
    Kernel { device: setup.compute.device.kind(), dtype: setup.dtype() }
}

/// Warns about kinds that run their references; `cases` are the kinds, each with its batch, its layer and the
/// length of sequences, `None` for decoding.
pub(crate) fn warn_of_references<'a>(
    setup: &Setup,
    cases: impl Iterator<Item = (&'a Kind, usize, AttentionShape, Option<usize>)>,
) {
    let reasons = cases.filter_map(|(kind, batch, layer, seq_len)| {
        kind.without_kernel(setup, batch, &layer, seq_len)
    });
    for reason in reasons.collect::<BTreeSet<_>>() {
        tracing::warn!(
            "{reason}: its reference runs, in f32, and may need memory for seq_len × seq_len"
        );
    }
}

impl Kind {
    /// What runs for `batch` sequences of `seq_len` tokens, or to decode them.
    pub fn path(
        &self,
        setup: &Setup,
        batch: usize,
        layer: &AttentionShape,
        seq_len: Option<usize>,
    ) -> Path {
        match self.config.path(kernel(setup), layer, batch, seq_len) {
            ExecPath::Kernel(_) => Path::Kernel,
            ExecPath::Reference => Path::Reference,
        }
    }

    /// Why the reference runs, if it does.
    fn without_kernel(
        &self,
        setup: &Setup,
        batch: usize,
        layer: &AttentionShape,
        seq_len: Option<usize>,
    ) -> Option<String> {
        let (kind, device) = (self.config.kind(), setup.compute.device.kind());
        if self.path(setup, batch, layer, seq_len) == Path::Kernel {
            return None;
        }
        let text = format!("kind {kind} has no kernel on {device}");
        let known = AttentionConfig::KINDS.iter().find(|known| known.kind == kind);
        if known.is_none_or(|known| !known.devices().contains(&device)) {
            return Some(text);
        }
        if setup.dtype() != DType::BF16 {
            return Some(format!("{text} at {}", setup.compute.precision));
        }
        let AttentionShape { heads, head_dim, .. } = layer;
        let tokens = seq_len.map_or(String::new(), |n| format!(" and {n} tokens"));
        Some(format!("{text} for {batch} × {heads} heads of {head_dim} channels{tokens}"))
    }

    /// Its name and path, for a table.
    pub fn labels(&self, path: Path) -> [String; 2] {
        let path = match path {
            Path::Kernel => "kernel",
            Path::Reference => "reference",
        };
        [self.config.kind().to_owned(), path.to_owned()]
    }

    /// Elements of each of [`Kind::inputs`] whose size depends on the number of tokens.
    pub fn elements(&self, layer: &AttentionShape, sizes: [usize; 2]) -> Vec<u128> {
        let (config, views) = (&self.config, self.config.views());
        let rows = sizes.map(|n| n as u128).iter().product::<u128>();
        let heads = |heads: usize, channels: usize| heads as u128 * channels as u128;
        let channels = [
            heads(views * config.query_heads(layer), layer.head_dim),
            heads(views * config.key_heads(layer), layer.head_dim),
            heads(layer.kv_heads, config.value_dim(layer)),
        ];
        let projections = config.projections(layer).into_iter().map(|p| p.features as u128);
        channels.into_iter().chain(projections).map(|channels| rows * channels).collect()
    }

    /// Random q, k, v and projections of type `dtype`, in memory one token after the other as in a model, and
    /// parameters with their initial values.
    pub fn inputs<B: OpBackend>(
        &self,
        layer: &AttentionShape,
        [batch, tokens]: [usize; 2],
        dtype: DType,
        device: &B::Device,
    ) -> Inputs<B> {
        let (config, views) = (&self.config, self.config.views());
        let heads = |heads: usize, channels: usize| {
            random_heads::<B>([batch, heads, tokens, channels], dtype, device)
        };
        let projection = |p: &ProjectionSpec| {
            let shape = [batch, tokens, p.features];
            if let Some([low, high]) = self.projections {
                let range = Distribution::Uniform(low, high);
                return tensor(distributed::<B>(&shape, range, dtype, device));
            }
            let x: Tensor<B, 3> = tensor(random::<B>(&shape, 1.0, DType::F32, device));
            let bias = p.bias.as_ref().map(|init| parameter::<B>(init, p.features, device));
            let x = bias.into_iter().fold(x, |x, bias| x + bias.reshape([1, 1, p.features]));
            x.cast(dtype)
        };
        let parameters = config.parameters(layer).into_iter();
        Inputs {
            q: heads(views * config.query_heads(layer), layer.head_dim),
            k: heads(views * config.key_heads(layer), layer.head_dim),
            v: heads(layer.kv_heads, config.value_dim(layer)),
            projections: config.projections(layer).iter().map(projection).collect(),
            parameters: parameters.map(|p| parameter(&p.init, p.elements, device)).collect(),
        }
    }
}

/// Normal random numbers `[batch, heads, tokens, channels]`, in memory one token after the other.
pub fn random_heads<B: OpBackend>(
    [batch, heads, tokens, channels]: [usize; 4],
    dtype: DType,
    device: &B::Device,
) -> Tensor<B, 4> {
    let x = random::<B>(&[batch, tokens, heads, channels], 1.0, dtype, device);
    tensor::<B, 4>(x).swap_dims(1, 2)
}

/// A parameter with its initial values.
fn parameter<B: OpBackend>(init: &Init, elements: usize, device: &B::Device) -> Tensor<B, 1> {
    match init {
        Init::Constant(value) => Tensor::full([elements], *value, device),
        Init::Values(values) => {
            Tensor::from_data(TensorData::new(values.clone(), [elements]), device)
        }
        Init::Normal(deviation) => {
            tensor(random::<B>(&[elements], f64::from(*deviation), DType::F32, device))
        }
        // Evenly spread, so that every head has its share of the range.
        drawn => {
            let quantile = |at| drawn.quantile((at as f32 + 0.5) / elements as f32);
            let values: Vec<f32> = (0..elements).map(quantile).collect();
            Tensor::from_data(TensorData::new(values, [elements]), device)
        }
    }
}

/// Bytes of all inputs whose size depends on the number of tokens.
pub fn bytes<B: OpBackend>(inputs: &Inputs<B>) -> u64 {
    let of = |elements: usize, dtype: DType| (elements * dtype.size()) as u64;
    let heads = [&inputs.q, &inputs.k, &inputs.v];
    let heads = heads.map(|x| of(x.shape().num_elements(), x.dtype()));
    let projections = inputs.projections.iter().map(|x| of(x.shape().num_elements(), x.dtype()));
    heads.into_iter().chain(projections).sum()
}

/// A copy in other memory; parameters, which are small, are shared.
pub fn copied<B: OpBackend>(inputs: &Inputs<B>) -> Inputs<B> {
    fn other<B: OpBackend, const D: usize>(x: &Tensor<B, D>) -> Tensor<B, D> {
        tensor(copy::<B>(&primitive(x.clone())))
    }
    fn heads<B: OpBackend>(x: &Tensor<B, 4>) -> Tensor<B, 4> {
        other(&x.clone().swap_dims(1, 2)).swap_dims(1, 2)
    }
    Inputs {
        q: heads(&inputs.q),
        k: heads(&inputs.k),
        v: heads(&inputs.v),
        projections: inputs.projections.iter().map(other).collect(),
        parameters: inputs.parameters.clone(),
    }
}

/// The inputs as leaves of an autodiff graph, each with a gradient.
pub fn leaves<B: OpBackend>(inputs: &Inputs<B>) -> Inputs<Autodiff<B>> {
    fn leaf<B: OpBackend, const D: usize>(x: &Tensor<B, D>) -> Tensor<Autodiff<B>, D> {
        Tensor::from_inner(x.clone()).require_grad()
    }
    Inputs {
        q: leaf(&inputs.q),
        k: leaf(&inputs.k),
        v: leaf(&inputs.v),
        projections: inputs.projections.iter().map(leaf).collect(),
        parameters: inputs.parameters.iter().map(leaf).collect(),
    }
}

/// A probe's means, as text for tables.
pub fn remarks(probe: &BTreeMap<&'static str, f64>) -> impl Iterator<Item = String> {
    probe.iter().map(|(metric, mean)| format!("{metric} {mean:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwall_kernels::Cpu;

    #[test]
    fn projections_are_drawn_from_their_range() {
        let config = parse_kind("fox", &[]).unwrap();
        let layer = AttentionShape::new(16, 2, 1, 8);
        let logits = |projections| {
            let kind = Kind { config: config.clone(), projections };
            let device = Default::default();
            let inputs = kind.inputs::<Cpu>(&layer, [3, 50], DType::F32, &device);
            assert_eq!((inputs.q.dims(), inputs.k.dims()), ([3, 2, 50, 8], [3, 1, 50, 8]));
            assert_eq!(bytes(&inputs), 4 * 3 * 50 * (16 + 8 + 8 + 2));
            assert_eq!(kind.elements(&layer, [3, 50]), [16, 8, 8, 2].map(|n| 3 * 50 * n));
            inputs.projections[0].clone().into_data().to_vec::<f32>().unwrap()
        };
        let uniform = logits(Some([4.0, 6.0]));
        assert!(uniform.iter().all(|x| (4.0..=6.0).contains(x)), "{uniform:?}");
        let normal = logits(None); // Its bias starts at 0.
        assert!(normal.iter().sum::<f32>().abs() / 300.0 < 0.3, "{normal:?}");
    }
}
