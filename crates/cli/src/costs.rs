//! Costs as `longwall info` and `longwall variants` print them.

use longwall_model::{ModelConfig, cost};

/// Bytes that decoding keeps per sequence of `seq_len` tokens, over all layers, in f32; at most
/// `u64::MAX`.
pub fn state_bytes(model: &ModelConfig, seq_len: usize) -> u64 {
    cost::state_elements(model, seq_len).saturating_mul(4)
}

/// A number above 0 with three significant digits, or all digits of its whole part if more.
pub fn short(x: f64) -> String {
    match x {
        x if x >= 99.95 => format!("{x:.0}"),
        x if x >= 9.995 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

/// The weight-to-state FLOP ratio as `3.20:1` or `1:3.20`.
pub fn ratio(x: f64) -> String {
    if x >= 1.0 { format!("{}:1", short(x)) } else { format!("1:{}", short(1.0 / x)) }
}
