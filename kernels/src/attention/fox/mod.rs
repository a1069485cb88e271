//! FoX, forgetting attention (Lin et al., "Forgetting Transformer: softmax attention with a forget
//! gate", 2025, equation 6).
//!
//! ℓ_t = ln σ(w_fᵀx_t + b_f) per query head; S_ij = scale · q_iᵀk_j + Σ_{s=j+1..i} ℓ_s. The gate's
//! bias starts at 0. No positions by default; `rope = true` rotates q and k as well.
//!
//! With `prune = true` keys are left out that have decayed so far that all of a row together weigh at most
//! 2⁻²⁴ of it (after Lin et al., "Adaptive Computation Pruning for the Forgetting Transformer", 2025); which
//! they are follows from the norms of queries and keys, for each query from no later token.
//!
//! Decoding caches keys, values and, per query head, the gate's log decay of each token:
//! 2 · kv_heads · head_dim + heads elements per token.

#[cfg(test)]
mod tests;

use burn::tensor::{DType, FloatDType, Tensor, s};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::cache::KvCache;
use super::rotation::Rotation;
use super::softmax::cuda::{Decaying, room};
use super::softmax::{Softmax, cuda_inputs, share_left_out, softmax};
use super::{AttentionShape, DecodeState, DocumentStarts, Init, Inputs, Projection, Variant};
use crate::backend::{OpBackend, primitive, tensor};
use crate::ops::activation::log_sigmoid;

/// `[model.attention]` with `kind = "fox"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Rotate q and k too; default false.
    pub rope: bool,
    /// Base of the rotary angles, above 1; default 10,000.
    pub theta: f64,
    /// Leave out keys that have decayed so far that all of a row together weigh at most 2^-24 of it;
    /// default false.
    pub prune: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config { rope: false, theta: 10_000.0, prune: false }
    }
}

/// Keys, values and decays of the tokens so far.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    held: Held<B>,
    /// Position of the next token.
    position: usize,
    /// Tokens to make room for.
    reserved: usize,
}

#[derive(Clone, Debug)]
enum Held<B: OpBackend> {
    /// Keys and values, and ℓ, `[batch, heads, tokens]`.
    Plain(KvCache<B>, Option<Tensor<B, 3>>),
    /// What the kernels for CUDA keep.
    OnCuda(Box<Decaying>),
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        match &self.held {
            Held::Plain(cache, log_decay) => {
                cache.elements() + log_decay.as_ref().map_or(0, |x| x.shape().num_elements())
            }
            Held::OnCuda(held) => held.elements(),
        }
    }

    fn reserve(&mut self, tokens: usize) {
        self.reserved = tokens;
        if let Held::Plain(cache, _) = &mut self.held {
            cache.reserve(tokens);
        }
    }

    /// Known where the kernels for CUDA serve.
    fn share_left_out(&self) -> Option<f64> {
        match &self.held {
            Held::Plain(..) => None,
            Held::OnCuda(held) => held.share_left_out(),
        }
    }
}

impl Config {
    /// q or k, rotated as positions `first`, `first` + 1, … if so configured.
    fn rotate<B: OpBackend>(&self, x: Tensor<B, 4>, first: usize) -> Tensor<B, 4> {
        if self.rope { Rotation::new(self.theta).apply(x, first) } else { x }
    }

    fn core(&self, shape: &AttentionShape) -> Softmax {
        Softmax { prune: self.prune, ..Softmax::of(shape) }
    }
}

/// ℓ `[batch, heads, seq_len]` in f32 from the gate's logits `[batch, seq_len, heads]`.
fn log_decay<B: OpBackend>(logits: &[Tensor<B, 3>]) -> Tensor<B, 3> {
    log_sigmoid(logits[0].clone().cast(FloatDType::F32)).swap_dims(1, 2)
}

impl Variant for Config {
    type State<B: OpBackend> = State<B>;

    const SOURCE: &'static str = "forgetting attention (Lin et al., 2025)";

    const KERNELS: &'static [&'static str] = &["cpu", "cuda"];

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        if self.rope {
            Rotation::new(self.theta).validate(key, "rope = false", shape.head_dim, problems);
        }
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<Projection> {
        vec![Projection::new("forget_gate", shape.heads).bias(Init::Constant(0.0))]
    }

    fn attend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        let log_decay = log_decay(&projections);
        softmax(
            &self.core(shape),
            self.rotate(q, 0),
            self.rotate(k, 0),
            v,
            Some(log_decay),
            documents,
        )
    }

    fn prunes(&self) -> bool {
        self.prune
    }

    fn share_left_out<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
    ) -> Option<f64> {
        // CUDA's kernels prune and the CPU's; the reference, which runs on CUDA in f32, does not.
        let on_cpu = B::into_cuda(primitive(q.clone())).is_none() && q.dtype() == DType::F32;
        let pruned = on_cpu || cuda_inputs([&q, &k, &v]).is_some();
        (self.prune && pruned)
            .then(|| share_left_out(&self.core(shape), q, k, log_decay(&projections), documents))
    }

    fn init_state<B: OpBackend>(&self, shape: &AttentionShape) -> State<B> {
        let held = Held::Plain(KvCache::new(shape.window), None);
        State { held, position: 0, reserved: 0 }
    }

    /// # Panics
    /// When the kernels for CUDA have begun the sequence, and do not serve these inputs.
    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, .. }: Inputs<B>,
        state: &mut State<B>,
    ) -> Tensor<B, 4> {
        let (first, tokens) = (state.position, q.dims()[2]);
        let [q, k] = [q, k].map(|x| self.rotate(x, first));
        let new = log_decay(&projections);
        let core = self.core(shape);
        let served = cuda_inputs([&q, &k, &v]);
        if first == 0
            && let Some([_, k, _]) = &served
        {
            let room = room(shape.window, state.reserved, tokens);
            state.held = Held::OnCuda(Box::new(Decaying::new(k, shape.heads, room)));
        }
        state.position += tokens;
        match &mut state.held {
            Held::OnCuda(held) => {
                let Some([q, k, v]) = &served else {
                    panic!("inputs of {:?} after a state of bf16 on CUDA's kernels", q.dtype())
                };
                let new = B::into_cuda(primitive(new)).expect("served on CUDA");
                tensor(B::from_cuda(held.extend(&core, [q, k, v], &new)))
            }
            Held::Plain(cache, log_decay) => {
                let [k, v] = cache.append(k, v);
                let all = match log_decay.take() {
                    Some(old) => Tensor::cat(vec![old, new], 2),
                    None => new,
                };
                // The cache may have dropped tokens that left the window.
                let dropped = all.dims()[2] - cache.len();
                let all = if dropped > 0 { all.slice(s![.., .., dropped..]) } else { all };
                *log_decay = Some(all.clone());
                softmax(&core, q, k, v, Some(all), None)
            }
        }
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        // qᵀk and p·v, two multiply-adds per channel and key, and the bias's addition.
        (4 * shape.head_dim + 1) as f64 * shape.heads as f64 * shape.mean_keys(seq_len)
    }

    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
        let per_token = 2 * shape.kv_heads * shape.head_dim + shape.heads;
        (per_token * shape.cached_tokens(seq_len)) as u64
    }
}
