//! What a training step keeps between the forward and the backward pass, estimated from the configuration.

use longwall_kernels::attention::{Kernel, ProjectionSpec};

use crate::config::{ModelConfig, NormPosition, ValueResidual};
use crate::cost::{channels, shifted};

/// Bytes per token that one block keeps for its backward pass, where kernels save what they need and no more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockActivations {
    /// The block's input, which recomputation keeps too.
    pub input: f64,
    /// Norms, projections and the MLP.
    pub layers: f64,
    /// The attention operation, as its kind counts it.
    pub attention: f64,
    /// The largest gradients that the backward pass holds at once beside these, with what the attention operation needs
    /// temporarily.
    pub gradients: f64,
}

impl BlockActivations {
    /// Those of block `layer`, for `batch` rows of `seq_len` tokens on the device and in the type of `kernel`,
    /// whether or not the kind has that kernel.
    pub fn of(
        config: &ModelConfig,
        layer: usize,
        kernel: Kernel,
        batch: usize,
        seq_len: usize,
    ) -> Self {
        let (shape, attention) = (config.attention_shape(layer), config.attention_of(layer));
        let size = kernel.dtype.size() as f64;
        let [q, k, v] = channels(attention, &shape).map(|n| n as f64);
        let inner = (shape.heads * attention.value_dim(&shape)) as f64;
        let (width, hidden) = (config.width as f64, config.mlp_hidden() as f64);
        let extra = attention.projections(&shape);
        // What both norms give, and what attention adds to.
        let mut elements = 3.0 * width;
        if config.norm_position == NormPosition::Sandwich {
            elements += 2.0 * width;
        }
        if config.token_shift {
            elements += (shifted(config, extra.len()) + 1) as f64 * width;
        }
        if config.qk_norm {
            elements += q + k;
        }
        if config.short_conv || attention.short_conv() {
            elements += q + k + v;
        }
        if config.value_residual != ValueResidual::None && layer > 0 {
            elements += 4.0 * v;
        }
        if config.output_gate {
            elements += 2.0 * inner;
        }
        elements += extra.iter().map(projection).sum::<f64>();
        // The hidden layer before and after the activation.
        let ups = config.mlp.up_projections() as f64;
        elements += (ups + 1.0) * hidden;
        // Those of q and k as attention takes them, and before a rotation or a norm; of v, and of each view's outputs; of
        // the kind's own projections; of values before they were mixed with the first block's, and of these.
        let mut attention_gradients = 2.0 * (q + k) + v + attention.views() as f64 * inner;
        attention_gradients += extra.iter().map(|spec| spec.features as f64).sum::<f64>();
        if config.value_residual != ValueResidual::None && layer > 0 {
            attention_gradients += 2.0 * v;
        }
        let temporary = attention.temporary_bytes_per_token(kernel, &shape, batch, seq_len);
        // Those of the hidden layer after the activation and before it.
        let mlp_gradients = (1.0 + ups) * hidden;
        BlockActivations {
            input: size * width,
            layers: size * elements,
            attention: attention.saved_bytes_per_token(kernel, &shape, batch, seq_len),
            gradients: size * width
                + (size * mlp_gradients).max(size * attention_gradients + temporary),
        }
    }
}

/// Elements per token that a kind's own projection keeps.
fn projection(spec: &ProjectionSpec) -> f64 {
    let rank = spec.low_rank.map_or(0, |inner| 2 * inner.rank);
    let convolved = usize::from(spec.conv.is_some());
    (rank + (1 + convolved) * spec.features) as f64
}
