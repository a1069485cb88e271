//! The layers a model is built of.

mod attention;
mod block;
mod carried;
mod linear;
mod mlp;
mod named;
mod norm;
mod projection;
mod span;
mod time;
mod weight_map;

pub(crate) use attention::CONV_TAPS;
pub use attention::{Attention, AttentionLayerState};
pub use block::{Block, BlockState};
pub use linear::Linear;
pub use mlp::Mlp;
pub use named::Named;
pub(crate) use norm::NORM_EPS;
pub use norm::Norm;
pub use projection::Projection;
pub use span::{SharedRows, Span, own_part};
pub use weight_map::{LayerWeights, MapScale, WeightMap};
