//! The norm of a head's output times an activation of a gate.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::kernel::{Place, TokenSizes, Wide, all, load, sigmoids, steps, sum, sums_of_tokens};
use super::{MOST_PARTS, Tokens, by_head as view_by_head, by_token, in_chunks, serves_on};
use crate::attention::recurrent::by_head;
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::activation::{GateActivation, glu, swiglu};
use crate::ops::cuda::block::{HeadStrides, RowSplit, write_sum};
use crate::ops::cuda::sums::columns;
use crate::ops::cuda::{THREADS, dim, dims, head_strides, vector};
use crate::ops::rms_norm::rms_norm;
use crate::tile::{CHUNK, Chunk};

/// RMSNorm(y) ⊙ f(g): y `[batch, heads, seq_len, channels]`, the norm's weight `[channels]` in f32, shared by all
/// heads, and the gate's logits g `[batch, seq_len, heads · channels]`; the result has y's shape.
pub fn gated_norm<B: OpBackend>(
    y: Tensor<B, 4>,
    weight: Tensor<B, 1>,
    gate: Tensor<B, 3>,
    activation: GateActivation,
    eps: f32,
) -> Tensor<B, 4> {
    let op = GatedNorm { activation, eps };
    if !serves_on::<B>(y.dtype(), y.dims()[3]) {
        return op.by_operations(y, weight, gate);
    }
    tensor(B::run(&op, [primitive(y), primitive(weight), primitive(gate)], vec![]))
}

/// [`gated_norm`] as an operation.
#[derive(Clone, Debug)]
struct GatedNorm {
    activation: GateActivation,
    eps: f32,
}

impl GatedNorm {
    fn by_operations<B: OpBackend>(
        &self,
        y: Tensor<B, 4>,
        weight: Tensor<B, 1>,
        gate: Tensor<B, 3>,
    ) -> Tensor<B, 4> {
        let gate = by_head(gate, y.dims()[1]);
        let y = rms_norm(y, weight, self.eps);
        match self.activation {
            GateActivation::Sigmoid => glu(gate, y),
            GateActivation::Silu => swiglu(gate, y),
        }
    }
}

impl Op<3> for GatedNorm {
    fn reference<B: OpBackend>(
        &self,
        [y, weight, gate]: [FloatTensor<B>; 3],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(self.by_operations(tensor::<B, 4>(y), tensor(weight), tensor(gate)))
    }

    fn cuda_forward(
        &self,
        [y, weight, gate]: &[CudaTensor; 3],
        _ints: &[CudaTensor],
        needs: [bool; 3],
    ) -> Option<Forward<CudaTensor>> {
        let tokens = Tokens::of(y);
        if !tokens.served(y) || gate.dtype != y.dtype {
            return None;
        }
        let (y, gate) = (in_chunks(y), in_chunks(gate));
        let weight = vector(weight, tokens.channels, "the norm's weight");
        let (of_gate, out) = (view_by_head(&gate, tokens.heads), tokens.empty_by_token(&y));
        // SAFETY: threads stay within the tokens of the tensors, whose strides they get.
        unsafe {
            gated_norm_forward::launch_unchecked::<CudaRuntime>(
                &y.client,
                tokens.grid(usize::MAX),
                dim(THREADS),
                GatedNormInputsLaunch::new(
                    buffer(&y, CHUNK),
                    head_strides(&y, CHUNK),
                    buffer(&weight, CHUNK),
                    buffer(&of_gate, CHUNK),
                    head_strides(&of_gate, CHUNK),
                    self.eps,
                ),
                buffer(&out, CHUNK),
                head_strides(&out, CHUNK),
                tokens.launch(),
                self.activation,
                tokens.split(),
            );
        }
        let saved = if needs.contains(&true) { vec![y, weight, gate] } else { vec![] };
        Some(Forward { output: out, saved })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 3],
    ) -> [Option<CudaTensor>; 3] {
        let [y, weight, gate] = &saved[..] else { unreachable!("three tensors are saved") };
        let tokens = Tokens::of(y);
        assert_eq!(dims(&grad), tokens.shape(), "the shape of the gradient");
        assert_eq!(grad.dtype, y.dtype, "types of y and of the gradient");
        let (grad, of_gate) = (in_chunks(&grad), view_by_head(gate, tokens.heads));
        let [d_y, d_gate] = [(); 2].map(|()| tokens.empty_by_token(y));
        let rows = tokens.blocks(MOST_PARTS) * tokens.heads;
        let parts = empty(y, &[rows, tokens.channels], DType::F32);
        // SAFETY: as above; a block writes its part.
        unsafe {
            gated_norm_backward::launch_unchecked::<CudaRuntime>(
                &y.client,
                tokens.grid(MOST_PARTS),
                dim(THREADS),
                GatedNormInputsLaunch::new(
                    buffer(y, CHUNK),
                    head_strides(y, CHUNK),
                    buffer(weight, CHUNK),
                    buffer(&of_gate, CHUNK),
                    head_strides(&of_gate, CHUNK),
                    self.eps,
                ),
                buffer(&grad, CHUNK),
                head_strides(&grad, CHUNK),
                GatedNormGradsLaunch::new(
                    buffer(&d_y, CHUNK),
                    head_strides(&d_y, CHUNK),
                    buffer(&d_gate, CHUNK),
                    head_strides(&d_gate, CHUNK),
                    buffer(&parts, CHUNK),
                ),
                tokens.launch(),
                self.activation,
                tokens.split(),
            );
        }
        let d_weight = columns(&parts, 0, &[tokens.channels], 1);
        [d_y, d_weight, by_token(d_gate)].map(Some)
    }
}

#[derive(CubeType, CubeLaunch)]
struct GatedNormInputs {
    y: Array<Chunk>,
    y_strides: HeadStrides,
    /// `[channels]`
    weight: Array<Wide>,
    gate: Array<Chunk>,
    gate_strides: HeadStrides,
    eps: f32,
}

#[derive(CubeType, CubeLaunch)]
struct GatedNormGrads {
    y: Array<Chunk>,
    y_strides: HeadStrides,
    gate: Array<Chunk>,
    gate_strides: HeadStrides,
    /// A block's sums of the weight's gradient, `[blocks · heads, channels]`.
    parts: Array<Wide>,
}

/// y divided by the root of its mean square; the inverse of that root.
#[cube]
fn normed(y: Wide, eps: f32, sizes: &TokenSizes, #[comptime] split: RowSplit) -> (Wide, f32) {
    let channels = f32::cast_from(sizes.chunks) * f32::cast_from(CHUNK as u32);
    let inverse = 1.0 / f32::sqrt(sum(y * y, split) / channels + eps);
    (y * all(inverse), inverse)
}

/// f(g)
#[cube]
fn activated(g: Wide, #[comptime] activation: GateActivation) -> Wide {
    let s = sigmoids(g);
    match comptime!(activation) {
        GateActivation::Sigmoid => s,
        GateActivation::Silu => g * s,
    }
}

/// f'(g)
#[cube]
fn slope(g: Wide, #[comptime] activation: GateActivation) -> Wide {
    let s = sigmoids(g);
    match comptime!(activation) {
        GateActivation::Sigmoid => s * (all(1.0) - s),
        GateActivation::Silu => s * (all(1.0) + g * (all(1.0) - s)),
    }
}

/// See [`gated_norm`].
///
/// Grid: all tokens by the groups of a block, heads.
#[cube(launch_unchecked)]
fn gated_norm_forward(
    inputs: &GatedNormInputs,
    out: &mut Array<Chunk>,
    out_strides: HeadStrides,
    sizes: TokenSizes,
    #[comptime] activation: GateActivation,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let place = Place::new(0, &sizes, split);
    let y = load(&inputs.y, place.of(&inputs.y_strides, head), place.exists);
    let g = load(&inputs.gate, place.of(&inputs.gate_strides, head), place.exists);
    let (hat, _) = normed(y, inputs.eps, &sizes, split);
    if place.exists {
        let value = hat * inputs.weight[place.chunk] * activated(g, activation);
        out[place.of(&out_strides, head)] = Chunk::cast_from(value);
    }
}

/// The gradients. With ŷ = y / σ, a = f(g) and h = do ⊙ a ⊙ weight:
/// dy = (h − ŷ mean(h ⊙ ŷ)) / σ, dg = do ⊙ ŷ ⊙ weight ⊙ f'(g), dweight = Σ do ⊙ a ⊙ ŷ.
///
/// Grid: parts of all tokens, heads.
#[cube(launch_unchecked)]
fn gated_norm_backward(
    inputs: &GatedNormInputs,
    d_out: &Array<Chunk>,
    d_out_strides: HeadStrides,
    grads: &mut GatedNormGrads,
    sizes: TokenSizes,
    #[comptime] activation: GateActivation,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let channels = f32::cast_from(sizes.chunks) * f32::cast_from(CHUNK as u32);
    let mut d_weight = sums_of_tokens();
    for step in 0..steps(&sizes, split) {
        let place = Place::new(step, &sizes, split);
        let exists = place.exists;
        let y = load(&inputs.y, place.of(&inputs.y_strides, head), exists);
        let g = load(&inputs.gate, place.of(&inputs.gate_strides, head), exists);
        let d_out = load(d_out, place.of(&d_out_strides, head), exists);
        let weight = inputs.weight[place.chunk];
        let (hat, inverse) = normed(y, inputs.eps, &sizes, split);
        let of_norm = d_out * activated(g, activation);
        let h = of_norm * weight;
        let along = sum(h * hat, split) / channels;
        if exists {
            let d_y = (h - hat * all(along)) * all(inverse);
            grads.y[place.of(&grads.y_strides, head)] = Chunk::cast_from(d_y);
            let d_gate = d_out * hat * weight * slope(g, activation);
            grads.gate[place.of(&grads.gate_strides, head)] = Chunk::cast_from(d_gate);
        }
        d_weight[0] = d_weight[0] + of_norm * hat;
    }
    let chunks = sizes.chunks as usize;
    let out = (CUBE_POS_X as usize * CUBE_COUNT_Y as usize + head) * chunks;
    write_sum(&d_weight, &mut grads.parts, out, chunks, split);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cuda;
    use crate::testing::{Case, Tensor64, check, check_on};

    const EPS: f32 = 1e-5;

    fn oracle(activation: GateActivation) -> impl Fn(&[Tensor64]) -> Tensor64 {
        move |inputs| {
            let [y, weight, gate] = inputs else { panic!("y, weight and gate") };
            let channels = y.shape[3];
            let token = [y.shape[0], y.shape[1], y.shape[2]];
            let roots = Tensor64::from_fn(&token, |at| {
                let square = |n| y.at(&[at[0], at[1], at[2], n]).powi(2);
                ((0..channels).map(square).sum::<f64>() / channels as f64 + f64::from(EPS)).sqrt()
            });
            Tensor64::from_fn(&y.shape, |at| {
                let g = gate.at(&[at[0], at[2], at[1] * channels + at[3]]);
                let s = 1.0 / (1.0 + (-g).exp());
                let f = if activation == GateActivation::Silu { g * s } else { s };
                y.at(at) / roots.at(&at[..3]) * weight.data[at[3]] * f
            })
        }
    }

    fn case(activation: GateActivation, shape: [usize; 4]) -> Case<GatedNorm, 3> {
        let [batch, heads, seq_len, channels] = shape;
        let gate = [batch, seq_len, heads * channels];
        Case::new(GatedNorm { activation, eps: EPS }, &[&shape, &[channels], &gate])
    }

    const ACTIVATIONS: [GateActivation; 2] = [GateActivation::Sigmoid, GateActivation::Silu];

    #[test]
    fn agrees_with_the_oracle_and_its_gradients() {
        for activation in ACTIVATIONS {
            check(case(activation, [2, 3, 5, 8]), oracle(activation));
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_on_cuda() {
        for activation in ACTIVATIONS {
            // One token, odd numbers of chunks, whole warps, and blocks that take turns.
            for shape in [[1, 1, 1, 16], [2, 3, 37, 48], [1, 2, 70, 256], [1, 1, 2_500, 64]] {
                let case = || case(activation, shape).parameters(&[1]);
                check_on::<Cuda, _, 3>(case().bf16(&[0, 2]), oracle(activation));
            }
        }
    }
}
