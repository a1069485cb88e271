//! Softmax attention with rotary positions (Su et al., 2021), ALiBi (Press et al., 2022), or none.
//!
//! S_ij = scale · (R_i q_i)ᵀ (R_j k_j), o_i = Σ_{j≤i} softmax_j(S_ij) v_j, where R_t rotates the
//! channel pairs (n, n + rotary_dims/2) by t · θ^(−2n/rotary_dims): the half-split pairing of
//! GPT-NeoX and Llama. With ALiBi instead, S_ij = scale · q_iᵀk_j − slope_h · (i − j).
//!
//! With `ssmax` (Nakanishi, "Scalable-Softmax is superior for attention", 2025), q·k is multiplied by
//! s · ln(i+1), where i counts from 0 in the document (also under a window) and s is learned. The
//! factor applies before the cap, and not to ALiBi's penalty.
//!
//! | parameter | elements | initial value |
//! | --- | --- | --- |
//! | `sinks` (with `sinks`) | heads | 0: o_i = Σ_j exp(S_ij) v_j / (Σ_j exp(S_ij) + exp(sink)), as in gpt-oss (OpenAI, 2025) |
//! | `ssmax_scale` (with `ssmax`) | heads | 0.168, the inverse of ln n's mean over lengths up to 1,024 (Nakanishi) |
//!
//! Decoding caches rotated keys and values: 2 · kv_heads · head_dim elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::{DType, FloatDType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::blocks::positions_in_documents;
use super::flash;
use super::kv_cache_variant::{KvCacheVariant, Prepared};
use super::rotation::{Rotation, Scaling};
use super::saved::Channels;
use super::softmax::{Softmax, alibi_slopes, sinks, softmax};
use super::{AttentionShape, DocumentStarts, ExecPath, Init, Kernel, ParameterSpec, VariantSpec};
use crate::backend::OpBackend;
use crate::device::DeviceKind;

/// How positions enter the scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Position {
    /// Not at all: only the causal mask tells positions apart.
    None,
    /// Rotation of q and k.
    #[default]
    Rope,
    /// A linear penalty on distance, with a fixed slope per head.
    Alibi,
}

/// `[model.attention]` with `kind = "rope"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How positions enter the scores: `"rope"` (default), `"alibi"` or `"none"`.
    pub position: Position,
    /// Base of the rotary angles, above 1; default 10,000.
    pub theta: f64,
    /// Share of a head's channels that rotate, in (0, 1]; default 1.
    pub rotary_fraction: f64,
    /// Scaling of the angles for long contexts.
    pub scaling: Scaling,
    /// With c > 0, scores are c·tanh(score/c).
    pub softcap: Option<f32>,
    /// Multiply q·k by s · ln(i+1), s learned per head; default false.
    pub ssmax: bool,
    /// Attention sinks: a learned logit per head in the softmax's denominator; default false.
    pub sinks: bool,
}

/// The initial `ssmax_scale`.
const SSMAX_INIT: f32 = 0.168;

impl Default for Config {
    fn default() -> Self {
        Config {
            position: Position::Rope,
            theta: 10_000.0,
            rotary_fraction: 1.0,
            scaling: Scaling::None {},
            softcap: None,
            ssmax: false,
            sinks: false,
        }
    }
}

impl Config {
    /// q times s · ln(i+1) with `ssmax`.
    fn sharpen<B: OpBackend>(
        &self,
        q: Tensor<B, 4>,
        parameters: &[Tensor<B, 1>],
        first: usize,
        documents: &DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        let [scale] = parameters else { return q };
        let [_, heads, queries, _] = q.dims();
        let positions = positions_in_documents(queries, first, documents.as_ref(), &q.device());
        let batch = positions.dims()[0];
        let log = (positions + 1.0).log().reshape([batch, 1, queries, 1]);
        let dtype = q.dtype();
        (q.cast(FloatDType::F32) * (log * scale.clone().reshape([1, heads, 1, 1]))).cast(dtype)
    }

    fn core(&self, shape: &AttentionShape) -> Softmax {
        let alibi = self.position == Position::Alibi;
        Softmax {
            softcap: self.softcap,
            slopes: if alibi { alibi_slopes(shape.heads) } else { vec![] },
            ..Softmax::of(shape)
        }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "softmax with rotary positions (Su et al., 2021), ALiBi or none";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim),
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        if let Some(rotation) = self.rotation() {
            rotation.validate(key, "position = \"none\"", shape.head_dim, problems);
        }
        problems.check(
            self.softcap.is_none_or(|c| c > 0.0 && c.is_finite()),
            format!("{key}.softcap"),
            self.softcap.unwrap_or_default(),
            "a number above 0",
            "leave it out for no cap, or set softcap = 50.0",
        );
    }

    /// ALiBi's slopes depend on which head it is.
    fn part_of_heads(&self, _parts: usize) -> Option<Self> {
        (self.position != Position::Alibi).then(|| self.clone())
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let (name, init) = ("ssmax_scale", Init::Constant(SSMAX_INIT));
        let scale = self.ssmax.then_some(ParameterSpec { name, elements: shape.heads, init });
        scale.into_iter().chain(self.sinks.then(|| sinks(shape))).collect()
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        // q also in f32, before its scale.
        let sharpened = if self.ssmax { 4.0 * channels.q } else { 0.0 };
        match path {
            ExecPath::Kernel(_) => channels.by_kernel(dtype) + sharpened,
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)) + sharpened,
        }
    }
}

impl KvCacheVariant for Config {
    fn rotation(&self) -> Option<Rotation> {
        let Config { theta, rotary_fraction: fraction, scaling, .. } = *self;
        (self.position == Position::Rope).then_some(Rotation { theta, fraction, scaling })
    }

    fn output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Prepared { q, k, v, parameters, first, documents, path }: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        let (ssmax, sinks) = parameters.split_at(usize::from(self.ssmax));
        let q = self.sharpen(q, ssmax, first, &documents);
        softmax(&self.core(shape), [q, k, v], sinks.first().cloned(), documents, path)
    }
}
