//! Several linear layers of one x in one launch, for a few rows in bf16 ([`few_rows`](super::few_rows)), with the norm
//! before them for fewer still. Their outputs share an allocation.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::few_rows::{OUTPUTS, STEP, Tiling, WARPS, multiply, serves, sum_of_warps};
use super::row_norm::{NormTensors, RowNorm};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::activation::kernel::{Function, value};
use crate::ops::cuda::{as_u32, dim, dims, nothing, over};
use crate::tile::{CHUNK, Chunk};

/// Most layers per launch.
pub const MOST_LAYERS: usize = 4;

/// Most rows whose norm a block computes again.
const MOST_NORMED_ROWS: usize = 16;

/// Elements that an output's start is a multiple of: 512 bytes, as for burn's own views.
const ALIGNED: usize = 256;

/// What the layers read.
pub struct LayersInput<'a> {
    /// `[rows, k]`
    pub x: &'a CudaTensor,
    /// The norm of x's rows.
    pub norm: Option<&'a NormTensors>,
}

/// A layer's tensors.
pub struct LayerTensors<'a> {
    /// `[outputs, k]`
    pub weight: &'a CudaTensor,
    /// `[outputs]`
    pub bias: Option<&'a CudaTensor>,
}

/// Whether [`layers`] serves these sizes and types.
pub fn serves_layers(LayersInput { x, norm }: &LayersInput, layers: &[LayerTensors]) -> bool {
    let few = norm.is_none() || dims(x)[0] <= MOST_NORMED_ROWS;
    let serves_bias = |layer: &LayerTensors| {
        layer.bias.is_none_or(|bias| {
            bias.dtype == DType::F32
                && bias.is_contiguous()
                && dims(bias) == dims(layer.weight)[..1]
        })
    };
    few && (1..=MOST_LAYERS).contains(&layers.len())
        && layers.iter().all(|layer| serves(x, layer.weight) && serves_bias(layer))
}

/// x̂ Wᵀ + b of each layer, `[rows, outputs]` in bf16, or its GELU; x̂ is x or its norm.
///
/// # Panics
/// Unless [`serves_layers`].
pub fn layers(input: &LayersInput, layers: &[LayerTensors], gelu: bool) -> Vec<CudaTensor> {
    let x = input.x;
    let [rows, k]: [usize; 2] = x.meta.shape().dims();
    assert!(
        serves_layers(input, layers),
        "{} layers of {rows} rows of {k} {:?}",
        layers.len(),
        x.dtype
    );
    let outputs = |layer: &LayerTensors| dims(layer.weight)[0];
    let mut total = 0;
    let starts: Vec<usize> = layers
        .iter()
        .map(|layer| {
            let start = total;
            total += (rows * outputs(layer)).next_multiple_of(ALIGNED);
            start
        })
        .collect();
    let y = empty(x, &[total], DType::BF16);
    // Layers past the last have no outputs.
    let launch = |at: usize| match layers.get(at) {
        Some(layer) => LayerLaunch::new(
            buffer(layer.weight, CHUNK),
            layer.bias.map_or_else(|| nothing(x), |bias| buffer(bias, 1)),
            as_u32(outputs(layer)),
            as_u32(starts[at]),
            layer.bias.is_some(),
        ),
        None => LayerLaunch::new(nothing(x), nothing(x), 0, 0, false),
    };
    let blocks: usize = layers.iter().map(|layer| outputs(layer).div_ceil(OUTPUTS)).sum();
    // SAFETY: rows and outputs past the last are clamped when read and not written; y has room for all outputs.
    unsafe {
        layers_of_few_rows::launch_unchecked::<CudaRuntime>(
            &x.client,
            CubeCount::Static(as_u32(blocks), 1, 1),
            dim(WARPS * 32),
            buffer(x, CHUNK),
            input.norm.map_or_else(|| RowNorm::none(x), |norm| norm.launch(k)),
            launch(0),
            launch(1),
            launch(2),
            launch(3),
            buffer(&y, 1),
            as_u32(rows),
            as_u32(k / STEP),
            Tiling::new(rows, k),
            gelu,
        );
    }
    let view = |(layer, start): (&LayerTensors, usize)| {
        over(&y, start, &[rows, outputs(layer)], &[outputs(layer), 1])
    };
    layers.iter().zip(starts).map(view).collect()
}

/// A linear layer.
#[derive(CubeType, CubeLaunch)]
struct Layer {
    /// `[outputs, k]`
    weight: Array<Chunk>,
    /// `[outputs]`; not read unless `biased`.
    bias: Array<f32>,
    outputs: u32,
    /// Where its outputs begin in y.
    start: u32,
    #[cube(comptime)]
    biased: bool,
}

#[cube]
impl Layer {
    /// Blocks of [`OUTPUTS`] outputs.
    fn blocks(&self) -> usize {
        (self.outputs as usize + comptime!(OUTPUTS - 1)) / OUTPUTS
    }
}

/// The outputs of up to four layers, one after the other; with `gelu`, their GELU.
///
/// Grid: blocks of [`OUTPUTS`] outputs of each layer.
///
/// - `x`: `[rows, k]`, where k has `steps` steps
/// - `y`: `[rows, outputs]` of each layer, from its start on
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
fn layers_of_few_rows(
    x: &Array<Chunk>,
    norm: &RowNorm,
    first: &Layer,
    second: &Layer,
    third: &Layer,
    fourth: &Layer,
    y: &mut Array<bf16>,
    rows: u32,
    steps: u32,
    #[comptime] tiling: Tiling,
    #[comptime] gelu: bool,
) {
    let (rows, steps) = (rows as usize, steps as usize);
    let mut parts = SharedMemory::<f32>::new(comptime!(tiling.parts()));
    let statistics = norm.statistics(x, rows, steps, tiling);
    let block = CUBE_POS_X as usize;
    let end_1 = first.blocks();
    let end_2 = end_1 + second.blocks();
    let end_3 = end_2 + third.blocks();
    if block < end_1 {
        write_outputs(x, norm, &statistics, &mut parts, first, y, block, rows, steps, tiling, gelu);
    } else if block < end_2 {
        let block = block - end_1;
        write_outputs(
            x,
            norm,
            &statistics,
            &mut parts,
            second,
            y,
            block,
            rows,
            steps,
            tiling,
            gelu,
        );
    } else if block < end_3 {
        let block = block - end_2;
        write_outputs(x, norm, &statistics, &mut parts, third, y, block, rows, steps, tiling, gelu);
    } else {
        let block = block - end_3;
        write_outputs(
            x,
            norm,
            &statistics,
            &mut parts,
            fourth,
            y,
            block,
            rows,
            steps,
            tiling,
            gelu,
        );
    }
}

/// Writes block `block` of a layer's outputs.
#[cube]
fn write_outputs(
    x: &Array<Chunk>,
    norm: &RowNorm,
    statistics: &SharedMemory<f32>,
    parts: &mut SharedMemory<f32>,
    layer: &Layer,
    y: &mut Array<bf16>,
    block: usize,
    rows: usize,
    steps: usize,
    #[comptime] tiling: Tiling,
    #[comptime] gelu: bool,
) {
    let (first, outputs) = (block * OUTPUTS, layer.outputs as usize);
    multiply(x, &layer.weight, norm, statistics, parts, first, rows, outputs, steps, tiling);
    let mut own = UNIT_POS as usize;
    while own < rows * OUTPUTS {
        let (row, output) = (own / OUTPUTS, first + own % OUTPUTS);
        if output < outputs {
            let mut sum = sum_of_warps(parts, own, tiling);
            if comptime!(layer.biased) {
                sum += layer.bias[output];
            }
            if comptime!(gelu) {
                sum = value(sum, Function::Gelu);
            }
            y[layer.start as usize + row * outputs + output] = bf16::cast_from(sum);
        }
        own += comptime!(WARPS * 32);
    }
}
