//! The layers a model is built of.

mod attention;
mod block;
mod linear;
mod mlp;
mod norm;

pub use attention::{Attention, LayerState};
pub use block::Block;
pub use linear::Linear;
pub use mlp::Mlp;
pub use norm::Norm;
