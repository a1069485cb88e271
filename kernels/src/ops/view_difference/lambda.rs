//! λ of differential attention, by one kernel in each direction on CUDA.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::block::sum_row;
use crate::ops::cuda::{THREADS, as_u32, blocks, dim, elements, vector};

/// λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init (Ye et al., 2025, equation 2), `[1]`, of the vectors λ_q1, λ_k1,
/// λ_q2 and λ_k2, `[head_dim]` each, in f32.
#[derive(Clone, Debug)]
pub struct Lambda {
    /// λ_init.
    pub init: f32,
}

impl Op<4> for Lambda {
    fn reference<B: OpBackend>(
        &self,
        vectors: [FloatTensor<B>; 4],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let [q1, k1, q2, k2] = vectors.map(tensor::<B, 1>);
        let exp_of_dot = |q: Tensor<B, 1>, k: Tensor<B, 1>| (q * k).sum().exp();
        primitive(exp_of_dot(q1, k1) - exp_of_dot(q2, k2) + self.init)
    }

    fn cuda_forward(
        &self,
        vectors: &[CudaTensor; 4],
        _ints: &[CudaTensor],
        _needs: [bool; 4],
    ) -> Option<Forward<CudaTensor>> {
        let len = elements(&vectors[0]);
        let [q1, k1, q2, k2] = vectors.each_ref().map(|x| vector(x, len, "a vector of λ"));
        let [lambda, exps] = [1, 2].map(|count| empty(&q1, &[count], DType::F32));
        // SAFETY: one block reads the vectors and writes λ and both exponentials.
        unsafe {
            sum_up::launch_unchecked::<CudaRuntime>(
                &q1.client,
                blocks(1, 1),
                dim(THREADS),
                buffer(&q1, 1),
                buffer(&k1, 1),
                buffer(&q2, 1),
                buffer(&k2, 1),
                buffer(&lambda, 1),
                buffer(&exps, 1),
                self.init,
                as_u32(len),
            );
        }
        Some(Forward { output: lambda, saved: vec![q1, k1, q2, k2, exps] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 4],
    ) -> [Option<CudaTensor>; 4] {
        let [q1, k1, q2, k2, exps] = &saved[..] else { unreachable!("five tensors are saved") };
        let len = elements(q1);
        let grad = vector(&grad, 1, "the gradient of λ");
        let gradients = [(); 4].map(|()| empty(q1, &[len], DType::F32));
        let [dq1, dk1, dq2, dk2] = &gradients;
        for ((q, k), (dq, dk), exp) in [((q1, k1), (dq1, dk1), 0), ((q2, k2), (dq2, dk2), 1)] {
            // SAFETY: a thread handles one element of each vector.
            unsafe {
                differentiate::launch_unchecked::<CudaRuntime>(
                    &q.client,
                    blocks(len, THREADS),
                    dim(THREADS),
                    buffer(q, 1),
                    buffer(k, 1),
                    buffer(exps, 1),
                    buffer(&grad, 1),
                    buffer(dq, 1),
                    buffer(dk, 1),
                    as_u32(len),
                    exp,
                );
            }
        }
        gradients.map(Some)
    }
}

/// λ, and both exponentials.
#[cube(launch_unchecked)]
fn sum_up(
    q1: &Array<f32>,
    k1: &Array<f32>,
    q2: &Array<f32>,
    k2: &Array<f32>,
    lambda: &mut Array<f32>,
    exps: &mut Array<f32>,
    init: f32,
    len: u32,
) {
    let mut scratch = SharedMemory::<f32>::new(comptime!(2 * THREADS / 32));
    let mut sums = Array::<f32>::new(2usize);
    sums[0] = f32::cast_from(0f32);
    sums[1] = f32::cast_from(0f32);
    let mut at = UNIT_POS;
    while at < len {
        sums[0] = sums[0] + q1[at as usize] * k1[at as usize];
        sums[1] = sums[1] + q2[at as usize] * k2[at as usize];
        at += THREADS as u32;
    }
    sum_row(&mut sums, &mut scratch, 2usize, THREADS);
    if UNIT_POS == 0 {
        let (first, second) = (Exp::exp(sums[0]), Exp::exp(sums[1]));
        exps[0] = first;
        exps[1] = second;
        lambda[0] = first - second + init;
    }
}

/// The gradients of q and k through the exponential `which`, which λ subtracts if it is the second.
#[cube(launch_unchecked)]
fn differentiate(
    q: &Array<f32>,
    k: &Array<f32>,
    exps: &Array<f32>,
    grad: &Array<f32>,
    dq: &mut Array<f32>,
    dk: &mut Array<f32>,
    len: u32,
    #[comptime] which: usize,
) {
    let at = ABSOLUTE_POS;
    if at < len as usize {
        let sign = comptime!(if which == 0 { 1f32 } else { -1f32 });
        let factor = grad[0] * exps[which] * sign;
        dq[at] = factor * k[at];
        dk[at] = factor * q[at];
    }
}
