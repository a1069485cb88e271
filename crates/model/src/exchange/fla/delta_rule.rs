//! What the classes whose state changes by the delta rule have in common.

use longwall_kernels::attention::AttentionConfig;
use serde_json::{Map, Value, json};

use super::{Check, object, product, read_conv_size, read_flags, table_of};
use crate::ModelConfig;
use crate::exchange::values::Reader;
use crate::layers::CONV_TAPS;

/// Sizes of the heads, and what must be so in all these classes.
///
/// - `short_conv`: the kind's own key
pub(super) fn keys(
    model: &ModelConfig,
    short_conv: bool,
    check: &mut Check<'_>,
) -> Map<String, Value> {
    let (attention, shape): (&AttentionConfig, _) =
        (model.attention_of(0), model.attention_shape(0));
    // Without the convolution, the classes have SiLU alone.
    check.attention("short_conv", short_conv || model.short_conv, short_conv, "true");
    let equal = shape.heads == shape.kv_heads;
    check.model("kv_heads", equal, shape.kv_heads, "as many as heads");
    object(json!({
        "attn_mode": "chunk",
        "head_dim": shape.head_dim,
        "num_heads": attention.key_heads(&shape),
        "num_v_heads": shape.kv_heads,
        "expand_v": ratio(attention.value_dim(&shape), shape.head_dim),
        "use_short_conv": true,
        "conv_size": CONV_TAPS,
    }))
}

/// Sizes of the heads that a config.json gives.
pub(super) struct Heads {
    /// Heads of q and k.
    pub keys: usize,
    /// Heads of v.
    pub values: usize,
    /// Channels of a head of q and k.
    pub head_dim: usize,
    /// Channels of a head of v.
    pub value_dim: usize,
}

impl Heads {
    /// Records what does not exist here.
    ///
    /// - `defaults`: the class's `head_dim` and `expand_v`
    pub fn read(read: &mut Reader<'_>, defaults: (usize, f64)) -> Self {
        let keys = read.size("num_heads");
        let values = read.optional_size("num_v_heads").unwrap_or(keys);
        let grouped = values.is_multiple_of(keys);
        let allowed = format!("a multiple of num_heads, {keys}");
        read.refuse_unless(grouped, "num_v_heads", &values.to_string(), &allowed);
        let head_dim = read.optional_size("head_dim").unwrap_or(defaults.0);
        let value_dim = product(head_dim, read.number("expand_v", defaults.1), f64::floor);
        read_flags(read, &["use_short_conv"], true);
        read_conv_size(read);
        Heads { keys, values, head_dim, value_dim }
    }

    /// The `[model]` table with the table `attention`.
    pub fn with(&self, attention: toml::Table) -> toml::Table {
        let mut table = table_of(&[("heads", self.values), ("head_dim", self.head_dim)]);
        table.insert("attention".to_owned(), attention.into());
        table
    }
}

/// `part / whole` as a number whose product with `whole`, rounded down, is `part`.
fn ratio(part: usize, whole: usize) -> f64 {
    let ratio = part as f64 / whole as f64;
    let exact = (whole as f64 * ratio) as usize == part;
    if exact { ratio } else { ratio.next_up() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_gives_its_part_again() {
        for whole in 1..=300 {
            for part in 1..=600 {
                assert_eq!((whole as f64 * ratio(part, whole)) as usize, part, "{part}/{whole}");
            }
        }
    }
}
