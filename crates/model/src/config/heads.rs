//! Which matrices of a model are made of one block per head.

use super::ModelConfig;

/// A weight matrix that consists of one block per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadBlocks {
    /// The dimension along which the blocks lie: 0 for the rows of q, k and v, 1 for the columns of the output
    /// projection.
    pub dim: usize,
    /// How many blocks there are.
    pub count: usize,
}

impl ModelConfig {
    /// The blocks of the parameter at `path`, if it is the weight of a q, k, v or output projection of an
    /// attention layer. A kind with two views has one block per head and view in q and k.
    pub fn head_blocks(&self, path: &str) -> Option<HeadBlocks> {
        let parts: Vec<&str> = path.split('.').collect();
        let ["blocks", layer, "attention", name, "weight"] = parts[..] else { return None };
        let layer = layer.parse().ok().filter(|&layer| layer < self.layers)?;
        let (shape, attention) = (self.attention_shape(layer), self.attention_of(layer));
        let views = attention.views();
        let (dim, count) = match name {
            "q" => (0, views * attention.query_heads(&shape)),
            "k" => (0, views * attention.key_heads(&shape)),
            "v" => (0, shape.kv_heads),
            "output" => (1, shape.heads),
            _ => return None,
        };
        Some(HeadBlocks { dim, count })
    }

    /// Whether the parameter at `path` is a learned vector of an attention kind that holds a matrix.
    pub fn is_flat_matrix(&self, path: &str) -> bool {
        let parts: Vec<&str> = path.split('.').collect();
        let ["blocks", layer, "attention", name] = parts[..] else { return false };
        let layer = layer.parse().ok().filter(|&layer| layer < self.layers);
        layer.is_some_and(|layer| self.attention_of(layer).matrices().contains(&name))
    }
}
