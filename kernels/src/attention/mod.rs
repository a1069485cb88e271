//! Attention kinds (variants): their contract and their registry.
//!
//! A kind is one folder, its `pub mod` line and one line in `registry!` below. Its `Config` is the
//! `[model.attention]` table of a run's configuration; the layer (projections of the input, norms,
//! output) is the model's. A kind receives q, k and v, the projections of the layer's input it
//! asked for and its own learned vectors, and returns o. [`dispatch`] chooses between its kernels
//! and its reference.

pub mod blocks;
pub mod cache;
mod chunked;
#[cfg(test)]
mod conformance;
mod contract;
mod decay;
mod delta_rule;
pub mod dex;
pub mod diff;
pub mod diff_rela;
pub mod dispatch;
pub mod entmax;
mod flash;
pub mod fox;
pub mod gated_delta_net;
mod head_parts;
pub mod kda;
pub mod kv_cache_variant;
pub mod linear;
pub mod lssar;
pub mod mamba2;
mod output_norm;
pub mod path;
mod per_token;
pub mod power;
pub mod probe;
pub mod rectified;
pub mod recurrent;
mod registry;
pub mod rela;
pub mod retention;
pub mod rope;
pub mod rotary;
pub mod rotation;
pub mod rowwise;
pub mod rwkv7;
mod saved;
pub mod softmax;
pub mod stick_breaking;
pub mod tda;
pub mod tra;
pub mod wall;
pub mod weights;

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

pub use self::contract::{
    AttentionShape, DecodeState, DocumentStarts, Init, Inputs, LowRank, LowRankActivation,
    ParameterSpec, ProjectionSpec, Variant, VariantSpec,
};
pub use self::dispatch::{ExecPath, Kernel};
pub use self::head_parts::{Division, HeadParts};
use self::probe::{Metric, Probe};
use crate::backend::OpBackend;
use crate::device::DeviceKind;

registry::registry! {
    /// Softmax attention with rotary positions, ALiBi, or none.
    Rope = "rope" in rope, kernels for cuda in bf16;
    /// Forgetting attention.
    Fox = "fox" in fox, kernels for cuda in bf16;
    /// Wall attention: diagonal gates.
    Wall = "wall" in wall, kernels for cuda in bf16;
    /// Positions by accumulated Householder transforms.
    Path = "path" in path, kernels for cuda in bf16;
    /// Power attention: the p-th power of scores, at linear cost.
    Power = "power" in power, kernels for cuda in bf16;
    /// Threshold rectified attention.
    Tra = "tra" in tra, kernels for cuda in bf16;
    /// Threshold differential attention.
    Tda = "tda" in tda, kernels for cuda in bf16;
    /// Rectified linear attention.
    Rela = "rela" in rela, kernels for cuda in bf16;
    /// Differential softmax attention.
    Diff = "diff" in diff, kernels for cuda in bf16;
    /// Softmax attention with the differential extension.
    Dex = "dex" in dex, kernels for cuda in bf16;
    /// Differential rectified linear attention.
    DiffRela = "diff_rela" in diff_rela, kernels for cuda in bf16;
    /// Length scaled softplus attention with re-weighting.
    Lssar = "lssar" in lssar, kernels for cuda in bf16;
    /// 1.5-entmax attention.
    Entmax = "entmax" in entmax, kernels for cuda in bf16;
    /// Stick-breaking attention.
    StickBreaking = "stick_breaking" in stick_breaking, kernels for cuda in bf16;
    /// Gated linear attention.
    Linear = "linear" in linear, kernels for cuda in bf16;
    /// RWKV-7's time mix.
    Rwkv7 = "rwkv7" in rwkv7, kernels for cuda in bf16;
    /// Gated DeltaNet.
    GatedDeltaNet = "gated_delta_net" in gated_delta_net, kernels for cuda in bf16;
    /// Kimi delta attention.
    Kda = "kda" in kda, kernels for cuda in bf16;
    /// Mamba-2's state-space duality.
    Mamba2 = "mamba2" in mamba2, kernels for cuda in bf16;
}

/// The longest window, in tokens.
const MOST_TOKENS: usize = 1 << 24;

/// A registered kind, as tables list it.
#[derive(Clone, Copy, Debug)]
pub struct KindInfo {
    /// The value of `kind`.
    pub kind: &'static str,
    /// Title and source.
    pub source: &'static str,
    /// As [`VariantSpec::KERNELS`].
    pub kernels: &'static [Kernel],
    /// The configuration keys of the kind's table, without `kind`.
    pub keys: fn() -> &'static [&'static str],
}

impl KindInfo {
    /// The devices with a kernel, each once.
    pub fn devices(&self) -> Vec<DeviceKind> {
        let mut devices: Vec<_> = self.kernels.iter().map(|kernel| kernel.device).collect();
        devices.dedup();
        devices
    }
}
