//! The backward pass of the core.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::super::{CHUNK_TOKENS, CallSizes, States, THREADS};
use super::matrices_back::{self, MatrixArraysLaunch};
use super::output::{self, OutputArraysLaunch};
use super::vectors_back::{self, VectorArraysLaunch};
use super::{Corrections, Diagonal, Grads, Saved, head_chunks};
use crate::attention::flash::Heads;
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::{as_u32, dim, dims, nothing};
use crate::tile::CHUNK;

impl Diagonal {
    /// The gradients, where `grad` is that of y.
    ///
    /// # Panics
    /// When its shape or type is another than y's.
    pub fn backward(&self, saved: &Saved, grad: &CudaTensor) -> Grads {
        let call = self.checked();
        let (sizes, like) = (call.sizes(), &call.q);
        let CallSizes { batch, heads, seq_len, head_dim: d, value_dim, .. } = sizes;
        assert_eq!(dims(grad), [batch, heads, seq_len, value_dim], "the shape of the gradient");
        assert_eq!(grad.dtype, DType::BF16, "the type of the gradient");
        let (rows, chunks, d_o) = (sizes.rows(), sizes.chunks(), Heads::new(grad).tensor);
        let d_states = empty(like, &[rows, chunks, d, value_dim], DType::BF16);
        call.scan(saved, &d_o, &d_states, &States::default(), true);
        let of = |x: &CudaTensor| Heads::in_place(x).like().tensor;
        let grads = Diagonal {
            q: of(&call.q),
            k: of(&call.k),
            v: of(&call.v),
            log_decay: of(&call.log_decay),
            corrections: match &call.corrections {
                Corrections::None => Corrections::None,
                Corrections::Weights(_) => {
                    Corrections::Weights(empty(like, &sizes.of_keys(1), DType::F32))
                }
                Corrections::Vectors { removal, correction } => {
                    Corrections::Vectors { removal: of(removal), correction: of(correction) }
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
                    head_chunks(&saved.keys),
                    buffer(&saved.scores, CHUNK),
                    head_chunks(&d_o),
                    buffer(&d_states, CHUNK),
                    Heads::in_place(&grads.v).pairs(),
                ),
                sizes.launch(),
                config,
            );
        }
        call.vectors_back(saved, &d_o, &d_states, &grads);
        grads
    }

    /// Writes all gradients but that of the values.
    fn vectors_back(&self, saved: &Saved, d_o: &CudaTensor, d_states: &CudaTensor, grads: &Grads) {
        let (sizes, config, like) = (self.sizes(), self.config(64), &self.q);
        let (rows, chunks, d) = (sizes.rows(), sizes.chunks(), sizes.head_dim);
        // Where a key is also what corrects and what removes, the gradient of the one is no place for the other's.
        let of_removal;
        let (d_removal, d_corrections, d_beta) = match &grads.corrections {
            Corrections::None => (&grads.k, &grads.k, None),
            Corrections::Weights(beta) => {
                of_removal = empty(like, &sizes.of_keys(d), DType::BF16);
                (&of_removal, &grads.k, Some(beta))
            }
            Corrections::Vectors { removal, correction } => (removal, correction, None),
        };
        let readers = sizes.group() + usize::from(config.corrects());
        let scores = [rows, chunks, readers, config.writers(), CHUNK_TOKENS, CHUNK_TOKENS];
        let d_scores = empty(like, &scores, DType::BF16);
        let of_states = empty(like, &[rows, chunks, 2, d], DType::F32);
        let is_mild = empty(like, &[rows, chunks], DType::U32);
        let corrected = saved.corrected.as_ref();
        let or_nothing = |x: Option<&CudaTensor>| buffer(x.unwrap_or(&saved.keys), CHUNK);
        let pairs = |x: &CudaTensor| Heads::in_place(x).pairs();
        let blocks = CubeCount::Static(as_u32(rows * chunks), 1, 1);
        // SAFETY: the kernels stay within the rows' tokens and chunks.
        unsafe {
            matrices_back::diagonal_matrices_back::launch_unchecked::<CudaRuntime>(
                &like.client,
                blocks.clone(),
                dim(THREADS),
                self.inputs(),
                MatrixArraysLaunch::new(
                    head_chunks(d_o),
                    head_chunks(&self.v),
                    buffer(&saved.states, CHUNK),
                    buffer(d_states, CHUNK),
                    or_nothing(corrected.map(|x| &x.transfer)),
                    or_nothing(corrected.map(|x| &x.reads)),
                    or_nothing(corrected.map(|x| &x.inverse)),
                    or_nothing(corrected.map(|x| &x.of_corrections)),
                    head_chunks(&grads.q),
                    head_chunks(d_removal),
                    head_chunks(d_corrections),
                    head_chunks(&grads.k),
                    buffer(&d_scores, CHUNK),
                    buffer(&of_states, 1),
                ),
                sizes.launch(),
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
                        pairs(&grads.q),
                        pairs(d_removal),
                        pairs(d_corrections),
                        pairs(&grads.k),
                        Heads::in_place(&grads.log_decay).numbers(),
                        d_beta.map_or_else(|| nothing(&grads.log_decay), |beta| buffer(beta, 1)),
                    ),
                    sizes.launch(),
                    mild,
                    config,
                );
            }
        }
    }
}
