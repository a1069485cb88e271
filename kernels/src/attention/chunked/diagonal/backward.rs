//! The backward pass of the core.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::super::{CHUNK_TOKENS, States, THREADS};
use super::matrices_back::{self, MatrixArraysLaunch};
use super::output::{self, OutputArraysLaunch};
use super::vectors_back::{self, VectorArraysLaunch};
use super::{Corrections, Diagonal, Grads, Saved};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::{as_u32, dim, dims, nothing};
use crate::tile::CHUNK;

impl Diagonal {
    /// The gradients, where `grad` is that of y.
    ///
    /// # Panics
    /// When its shape or type is another than y's.
    pub fn backward(&self, saved: &Saved, grad: &CudaTensor) -> Grads {
        let call = self.checked();
        let [rows, group, seq_len, d, value_dim] = call.sizes();
        assert_eq!(dims(grad), [rows, group, seq_len, value_dim], "the shape of the gradient");
        assert_eq!(grad.dtype, DType::BF16, "the type of the gradient");
        let (d_o, like, chunks) = (contiguous(grad), &call.q, call.chunks());
        let d_states = empty(like, &[rows, chunks, d, value_dim], DType::BF16);
        call.scan(saved, &d_o, &d_states, &States::default(), true);
        let vectors = || empty(like, &[rows, seq_len, d], DType::BF16);
        let grads = Diagonal {
            q: empty(like, &[rows, group, seq_len, d], DType::BF16),
            k: vectors(),
            v: empty(like, &[rows, seq_len, value_dim], DType::BF16),
            log_decay: empty(like, &[rows, seq_len, d], DType::F32),
            corrections: match &call.corrections {
                Corrections::None => Corrections::None,
                Corrections::Weights(_) => {
                    Corrections::Weights(empty(like, &[rows, seq_len, 1], DType::F32))
                }
                Corrections::Vectors { .. } => {
                    Corrections::Vectors { removal: vectors(), correction: vectors() }
                }
            },
        };
        let config = call.config(64);
        // SAFETY: as in `forward`.
        unsafe {
            output::diagonal_values::launch_unchecked::<CudaRuntime>(
                &like.client,
                CubeCount::Static(as_u32(rows * chunks * config.parts()), 1, 1),
                dim(THREADS),
                OutputArraysLaunch::new(
                    buffer(&saved.keys, CHUNK),
                    buffer(&saved.scores, CHUNK),
                    buffer(&d_o, CHUNK),
                    buffer(&d_states, CHUNK),
                    buffer(&grads.v, 2),
                ),
                call.launch_sizes(),
                config,
            );
        }
        call.vectors_back(saved, &d_o, &d_states, &grads);
        grads
    }

    /// Writes all gradients but that of the values.
    fn vectors_back(&self, saved: &Saved, d_o: &CudaTensor, d_states: &CudaTensor, grads: &Grads) {
        let ([rows, group, seq_len, d, _], chunks) = (self.sizes(), self.chunks());
        let (config, like) = (self.config(64), &self.q);
        // Where a key is also what corrects and what removes, the gradient of the one is no place for the other's.
        let of_removal;
        let (d_removal, d_corrections, d_beta) = match &grads.corrections {
            Corrections::None => (&grads.k, &grads.k, None),
            Corrections::Weights(beta) => {
                of_removal = empty(like, &[rows, seq_len, d], DType::BF16);
                (&of_removal, &grads.k, Some(beta))
            }
            Corrections::Vectors { removal, correction } => (removal, correction, None),
        };
        let readers = group + usize::from(config.corrects());
        let scores = [rows, chunks, readers, config.writers(), CHUNK_TOKENS, CHUNK_TOKENS];
        let d_scores = empty(like, &scores, DType::BF16);
        let of_states = empty(like, &[rows, chunks, 2, d], DType::F32);
        let is_mild = empty(like, &[rows, chunks], DType::U32);
        let corrected = saved.corrected.as_ref();
        let or_nothing = |x: Option<&CudaTensor>| buffer(x.unwrap_or(&saved.keys), CHUNK);
        let blocks = CubeCount::Static(as_u32(rows * chunks), 1, 1);
        // SAFETY: the kernels stay within the rows' tokens and chunks.
        unsafe {
            matrices_back::diagonal_matrices_back::launch_unchecked::<CudaRuntime>(
                &like.client,
                blocks.clone(),
                dim(THREADS),
                self.inputs(),
                MatrixArraysLaunch::new(
                    buffer(d_o, CHUNK),
                    buffer(&self.v, CHUNK),
                    buffer(&saved.states, CHUNK),
                    buffer(d_states, CHUNK),
                    or_nothing(corrected.map(|x| &x.transfer)),
                    or_nothing(corrected.map(|x| &x.reads)),
                    or_nothing(corrected.map(|x| &x.inverse)),
                    or_nothing(corrected.map(|x| &x.of_corrections)),
                    buffer(&grads.q, CHUNK),
                    buffer(d_removal, CHUNK),
                    buffer(d_corrections, CHUNK),
                    buffer(&grads.k, CHUNK),
                    buffer(&d_scores, CHUNK),
                    buffer(&of_states, 1),
                ),
                self.launch_sizes(),
                config,
            );
            for mild in [true, false] {
                vectors_back::diagonal_vectors_back::launch_unchecked::<CudaRuntime>(
                    &like.client,
                    blocks.clone(),
                    dim(THREADS),
                    self.inputs(),
                    VectorArraysLaunch::new(
                        buffer(&d_scores, CHUNK),
                        buffer(&of_states, 1),
                        buffer(&is_mild, 1),
                        buffer(&grads.q, 2),
                        buffer(d_removal, 2),
                        buffer(d_corrections, 2),
                        buffer(&grads.k, 2),
                        buffer(&grads.log_decay, 1),
                        d_beta.map_or_else(|| nothing(&grads.log_decay), |beta| buffer(beta, 1)),
                    ),
                    self.launch_sizes(),
                    mild,
                    config,
                );
            }
        }
    }
}
