//! A head's outputs and a share of its values, times SiLU of a gate.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Tensor};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::kernel::{Place, TokenSizes, Wide, all, load, sigmoids, steps, zeros};
use super::{MOST_PARTS, Tokens, by_head as view_by_head, by_token, in_chunks, serves_on};
use crate::attention::recurrent::by_head;
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::activation::swiglu;
use crate::ops::cuda::block::{HeadStrides, RowSplit, sum_row, sum_vector};
use crate::ops::cuda::sums::columns;
use crate::ops::cuda::{THREADS, dim, dims, head_strides, vector};
use crate::tile::{CHUNK, Chunk};

/// (y + D v) ⊙ SiLU(g): y and v `[batch, heads, seq_len, channels]`, D `[heads]` in f32, and the gate's logits g
/// `[batch, seq_len, heads · channels]`; the result has y's shape, in f32.
pub fn gated_skip<B: OpBackend>(
    y: Tensor<B, 4>,
    v: Tensor<B, 4>,
    skip: Tensor<B, 1>,
    gate: Tensor<B, 3>,
) -> Tensor<B, 4> {
    if !serves_on::<B>(y.dtype(), y.dims()[3]) {
        return GatedSkip::by_operations(y, v, skip, gate);
    }
    let inputs = [primitive(y), primitive(v), primitive(skip), primitive(gate)];
    tensor(B::run(&GatedSkip, inputs, vec![]))
}

/// [`gated_skip`] as an operation.
#[derive(Clone, Debug)]
struct GatedSkip;

impl GatedSkip {
    fn by_operations<B: OpBackend>(
        y: Tensor<B, 4>,
        v: Tensor<B, 4>,
        skip: Tensor<B, 1>,
        gate: Tensor<B, 3>,
    ) -> Tensor<B, 4> {
        let heads = y.dims()[1];
        let [y, v] = [y, v].map(|x| x.cast(FloatDType::F32));
        let gate = by_head(gate.cast(FloatDType::F32), heads);
        swiglu(gate, y + v * skip.reshape([1, heads, 1, 1]))
    }
}

impl Op<4> for GatedSkip {
    fn reference<B: OpBackend>(
        &self,
        [y, v, skip, gate]: [FloatTensor<B>; 4],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(Self::by_operations::<B>(tensor(y), tensor(v), tensor(skip), tensor(gate)))
    }

    fn cuda_forward(
        &self,
        [y, v, skip, gate]: &[CudaTensor; 4],
        _ints: &[CudaTensor],
        needs: [bool; 4],
    ) -> Option<Forward<CudaTensor>> {
        let tokens = Tokens::of(y);
        if !tokens.served(y) || [v, gate].iter().any(|x| x.dtype != y.dtype) {
            return None;
        }
        assert_eq!(dims(v), tokens.shape(), "the shape of v");
        let by_token = [tokens.batch, tokens.seq_len, tokens.heads * tokens.channels];
        assert_eq!(dims(gate), by_token, "the shape of the gate");
        let [y, v, gate] = [y, v, gate].map(in_chunks);
        let skip = vector(skip, tokens.heads, "the skip");
        let out = empty(&y, &by_token, DType::F32);
        let out = view_by_head(&out, tokens.heads);
        // SAFETY: threads stay within the tokens of the tensors, whose strides they get.
        unsafe {
            gated_skip_forward::launch_unchecked::<CudaRuntime>(
                &y.client,
                tokens.grid(usize::MAX),
                dim(THREADS),
                inputs(&y, &v, &skip, &view_by_head(&gate, tokens.heads)),
                buffer(&out, CHUNK),
                head_strides(&out, CHUNK),
                tokens.launch(),
                tokens.split(),
            );
        }
        let saved = if needs.contains(&true) { vec![y, v, skip, gate] } else { vec![] };
        Some(Forward { output: out, saved })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 4],
    ) -> [Option<CudaTensor>; 4] {
        let [y, v, skip, gate] = &saved[..] else { unreachable!("four tensors are saved") };
        let tokens = Tokens::of(y);
        assert_eq!(dims(&grad), tokens.shape(), "the shape of the gradient");
        assert_eq!(grad.dtype, DType::F32, "the type of the gradient");
        let grad = in_chunks(&grad);
        let [d_y, d_v, d_gate] = [(); 3].map(|()| tokens.empty_by_token(y));
        let parts = empty(y, &[tokens.blocks(MOST_PARTS), tokens.heads], DType::F32);
        // SAFETY: as above; a block writes its part.
        unsafe {
            gated_skip_backward::launch_unchecked::<CudaRuntime>(
                &y.client,
                tokens.grid(MOST_PARTS),
                dim(THREADS),
                inputs(y, v, skip, &view_by_head(gate, tokens.heads)),
                buffer(&grad, CHUNK),
                head_strides(&grad, CHUNK),
                SkipGradsLaunch::new(
                    buffer(&d_y, CHUNK),
                    buffer(&d_v, CHUNK),
                    head_strides(&d_y, CHUNK),
                    buffer(&d_gate, CHUNK),
                    head_strides(&d_gate, CHUNK),
                    buffer(&parts, 1),
                ),
                tokens.launch(),
                tokens.split(),
            );
        }
        let d_skip = columns(&parts, 0, &[tokens.heads], 1);
        [d_y, d_v, d_skip, by_token(d_gate)].map(Some)
    }
}

fn inputs(
    y: &CudaTensor,
    v: &CudaTensor,
    skip: &CudaTensor,
    gate: &CudaTensor,
) -> SkipInputsLaunch<CudaRuntime> {
    SkipInputsLaunch::new(
        buffer(y, CHUNK),
        head_strides(y, CHUNK),
        buffer(v, CHUNK),
        head_strides(v, CHUNK),
        buffer(skip, 1),
        buffer(gate, CHUNK),
        head_strides(gate, CHUNK),
    )
}

#[derive(CubeType, CubeLaunch)]
struct SkipInputs {
    y: Array<Chunk>,
    y_strides: HeadStrides,
    v: Array<Chunk>,
    v_strides: HeadStrides,
    /// `[heads]`
    skip: Array<f32>,
    gate: Array<Chunk>,
    gate_strides: HeadStrides,
}

#[derive(CubeType, CubeLaunch)]
struct SkipGrads {
    y: Array<Chunk>,
    v: Array<Chunk>,
    /// Of both.
    strides: HeadStrides,
    gate: Array<Chunk>,
    gate_strides: HeadStrides,
    /// A block's sums of the skip's gradient, `[blocks, heads]`.
    parts: Array<f32>,
}

/// See [`gated_skip`].
///
/// Grid: all tokens by the groups of a block, heads.
#[cube(launch_unchecked)]
fn gated_skip_forward(
    inputs: &SkipInputs,
    out: &mut Array<Wide>,
    out_strides: HeadStrides,
    sizes: TokenSizes,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let place = Place::new(0, &sizes, split);
    if place.exists {
        let y = load(&inputs.y, place.of(&inputs.y_strides, head), true);
        let v = load(&inputs.v, place.of(&inputs.v_strides, head), true);
        let g = load(&inputs.gate, place.of(&inputs.gate_strides, head), true);
        out[place.of(&out_strides, head)] = (y + all(inputs.skip[head]) * v) * g * sigmoids(g);
    }
}

/// The gradients. With s = σ(g), dy = do ⊙ g s, dv = D dy, dD = Σ dy · v and
/// dg = do ⊙ (y + D v) ⊙ s (1 + g (1 − s)).
///
/// Grid: parts of all tokens, heads.
#[cube(launch_unchecked)]
fn gated_skip_backward(
    inputs: &SkipInputs,
    d_out: &Array<Wide>,
    d_out_strides: HeadStrides,
    grads: &mut SkipGrads,
    sizes: TokenSizes,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let skip = all(inputs.skip[head]);
    let mut d_skip = zeros();
    for step in 0..steps(&sizes, split) {
        let place = Place::new(step, &sizes, split);
        if place.exists {
            let y = load(&inputs.y, place.of(&inputs.y_strides, head), true);
            let v = load(&inputs.v, place.of(&inputs.v_strides, head), true);
            let g = load(&inputs.gate, place.of(&inputs.gate_strides, head), true);
            let d_out = d_out[place.of(&d_out_strides, head)];
            let s = sigmoids(g);
            let d_y = d_out * g * s;
            let at = place.of(&grads.strides, head);
            grads.y[at] = Chunk::cast_from(d_y);
            grads.v[at] = Chunk::cast_from(d_y * skip);
            let d_gate = d_out * (y + skip * v) * s * (all(1.0) + g * (all(1.0) - s));
            grads.gate[place.of(&grads.gate_strides, head)] = Chunk::cast_from(d_gate);
            d_skip += d_y * v;
        }
    }
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = sum_vector(d_skip);
    let mut scratch = SharedMemory::<f32>::new(comptime!(THREADS / 32));
    sum_row(&mut sum, &mut scratch, 1usize, THREADS);
    if UNIT_POS == 0 {
        grads.parts[CUBE_POS_X as usize * CUBE_COUNT_Y as usize + head] = sum[0];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cuda;
    use crate::testing::{Case, Tensor64, check, check_on};

    fn oracle(inputs: &[Tensor64]) -> Tensor64 {
        let [y, v, skip, gate] = inputs else { panic!("y, v, skip and gate") };
        let channels = y.shape[3];
        Tensor64::from_fn(&y.shape, |at| {
            let g = gate.at(&[at[0], at[2], at[1] * channels + at[3]]);
            (y.at(at) + skip.data[at[1]] * v.at(at)) * g / (1.0 + (-g).exp())
        })
    }

    fn case(shape: [usize; 4]) -> Case<GatedSkip, 4> {
        let [batch, heads, seq_len, channels] = shape;
        let gate = [batch, seq_len, heads * channels];
        Case::new(GatedSkip, &[&shape, &shape, &[heads], &gate])
    }

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        check(case([2, 3, 5, 8]), oracle);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_on_cuda() {
        for shape in [[1, 1, 1, 16], [2, 3, 37, 48], [1, 2, 70, 256], [1, 1, 2_500, 64]] {
            let case = case(shape).bf16(&[0, 1, 3]).parameters(&[2]);
            check_on::<Cuda, _, 4>(case, oracle);
        }
    }
}
