//! Estimates of what a training step keeps of an attention operation between its forward and its backward pass.

use burn::tensor::DType;

use super::{AttentionShape, VariantSpec};

/// Score-sized f32 tensors that automatic differentiation keeps of a reference, if the kind says nothing else:
/// scores before and after the mask, weights, and one in between.
const SCORES_KEPT: f64 = 4.0;

/// Elements per token of an operation's inputs and output, of all heads and views.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Channels {
    /// Of q.
    pub q: f64,
    /// Of k.
    pub k: f64,
    /// Of v.
    pub v: f64,
    /// Of the output.
    pub o: f64,
    /// Outputs of this size: one, or with several views one of each and what joins them.
    outputs: f64,
    /// Rows of scores: a query's, in each head and view.
    pub rows: f64,
    /// Query heads that share a key head.
    group: f64,
}

impl Channels {
    /// Those of a kind in a layer of this shape.
    pub fn of<V: VariantSpec>(variant: &V, shape: &AttentionShape) -> Self {
        let [heads, kv_heads, head_dim] =
            [shape.heads, shape.kv_heads, shape.head_dim].map(|n| n as f64);
        let (views, value_dim) = (variant.views() as f64, variant.value_dim(shape) as f64);
        Channels {
            q: views * variant.query_heads(shape) as f64 * head_dim,
            k: views * variant.key_heads(shape) as f64 * head_dim,
            v: kv_heads * value_dim,
            o: heads * value_dim,
            outputs: if views > 1.0 { views + 1.0 } else { 1.0 },
            rows: views * heads,
            group: heads / kv_heads,
        }
    }

    /// Bytes per token that a kernel of flash attention and what joins its views save: q, k, v and the outputs in
    /// `dtype`, and a statistic of each row in f32.
    pub fn by_kernel(&self, dtype: DType) -> f64 {
        (self.q + self.k + self.v + self.outputs * self.o) * dtype.size() as f64 + 4.0 * self.rows
    }

    /// Bytes per token that automatic differentiation keeps of linear-cost operations, in f32: q, k and v as
    /// they come, as they are prepared and for all heads, and the output.
    pub fn in_f32(&self) -> f64 {
        4.0 * (2.0 * (self.q + self.k + self.v) + self.group * (self.k + self.v) + self.o)
    }

    /// Bytes per token that automatic differentiation keeps of a reference that forms the scores of `keys`
    /// keys per query.
    pub fn by_reference(&self, keys: f64) -> f64 {
        self.in_f32() + self.scores(SCORES_KEPT, keys)
    }

    /// Bytes per token of `tensors` tensors in f32 with a row's scores of `keys` keys.
    pub fn scores(&self, tensors: f64, keys: f64) -> f64 {
        4.0 * tensors * self.rows * keys
    }
}
