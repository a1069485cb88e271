//! The memory that a model's calls need at least.

use longwall_model::{ModelConfig, Precision, cost};

/// A lower bound of the memory that calls of a model need, besides its weights.
#[derive(Clone, Debug)]
pub struct CallMemory {
    config: ModelConfig,
    bytes_per_element: u64,
}

impl CallMemory {
    /// For a model of this configuration and number format.
    pub fn new(config: &ModelConfig, precision: Precision) -> Self {
        let bytes_per_element = precision.parameter(2).size() as u64;
        CallMemory { config: config.clone(), bytes_per_element }
    }

    /// The least bytes for `rows` sequences of `tokens` tokens, read in one forward pass.
    ///
    /// Per token it counts the residual stream, `width`, and the largest tensors that stand beside it in a
    /// block: the MLP's hidden layer, or q, k and v. A call that generates also keeps the decoding state
    /// of every layer: keys and values, or a recurrent state. Scores, norms and copies come on top.
    pub fn least(&self, rows: usize, tokens: usize, generates: bool) -> u64 {
        let config = &self.config;
        let hidden = config.mlp_hidden() * config.mlp.up_projections();
        let heads = |layer| {
            let shape = config.attention_shape(layer);
            cost::channels(config.attention_of(layer), &shape).iter().sum::<usize>()
        };
        let widest = (0..config.layers).map(heads).max().unwrap_or(0).max(hidden);
        let activations = (tokens as u64).saturating_mul((config.width + widest) as u64);
        let state = if generates { cost::state_elements(config, tokens) } else { 0 };
        let row = activations.saturating_add(state).saturating_mul(self.bytes_per_element);
        row.saturating_mul(rows as u64)
    }
}

/// Bytes as GiB, or MiB below one GiB.
pub(crate) fn show_bytes(bytes: u64) -> String {
    let mebibytes = bytes as f64 / f64::from(1 << 20);
    if mebibytes < 1024.0 {
        format!("{mebibytes:.1} MiB")
    } else {
        format!("{:.1} GiB", mebibytes / 1024.0)
    }
}

#[cfg(test)]
mod tests {
    use longwall_model::config::MlpKind;

    use super::*;

    #[test]
    fn the_bound_of_a_call_by_hand() {
        let mut config: ModelConfig =
            toml::from_str("layers = 2\nwidth = 64\nheads = 4\nattention = { kind = \"rope\" }")
                .unwrap();
        config.mlp = MlpKind::Swiglu;
        let hidden = 2 * config.mlp_hidden() as u64;
        let scored = CallMemory::new(&config, Precision::F32).least(3, 1000, false);
        assert_eq!(scored, 3 * 1000 * (64 + hidden) * 4);
        // Keys and values of two layers.
        let generated = CallMemory::new(&config, Precision::Bf16).least(3, 1000, true);
        assert_eq!(generated, 3 * 1000 * (64 + hidden + 2 * 2 * 64) * 2);
        let endless =
            CallMemory::new(&config, Precision::F32).least(usize::MAX, usize::MAX / 2, false);
        assert_eq!(endless, u64::MAX);
    }

    #[test]
    fn sizes_are_readable() {
        assert_eq!(show_bytes(3 << 19), "1.5 MiB");
        assert_eq!(show_bytes(5 << 30), "5.0 GiB");
    }
}
