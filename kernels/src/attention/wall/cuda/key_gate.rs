//! The logits of a key's gate for one token, in one kernel instead of a cast, a product and a sum.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use crate::attention::flash::Heads;
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::tile::{CHUNK, RowStrides};

/// Units that share the sum of an output.
const PARTS: usize = 4;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct KeyGateConfig {
    head_dim: usize,
    /// Outputs per head: one for all gated channels, or one for each.
    outputs: usize,
    /// Channels with a gate.
    gated: usize,
}

/// k W + b in f32, `[batch, kv_heads, 1, gated]`.
///
/// - `k`: bf16 `[batch, kv_heads, 1, head_dim]`
/// - `weight`: W, `[kv_heads, head_dim, outputs]`, and `bias`: b, `[kv_heads, outputs]`, f32, flat
///
/// # Panics
/// When the parameters have other sizes or types.
pub fn logits_of_token(
    k: &CudaTensor,
    [weight, bias]: [&CudaTensor; 2],
    gated: usize,
) -> CudaTensor {
    let k = Heads::new(k);
    let [batch, kv_heads, _, head_dim] = k.dims;
    let [weight, bias] = [weight, bias].map(contiguous);
    let [weights, outputs] = [&weight, &bias].map(|x| {
        assert_eq!(x.dtype, DType::F32, "type of a key gate's parameters");
        x.meta.shape().num_elements()
    });
    let outputs = outputs / kv_heads;
    assert!(outputs == 1 || outputs == gated, "{outputs} outputs for {gated} channels");
    assert_eq!(weights, kv_heads * head_dim * outputs, "weights of a key's gate");
    let logits = empty(&k.tensor, &[batch, kv_heads, 1, gated], DType::F32);
    // SAFETY: a block handles one key, and stays within its head's parameters.
    unsafe {
        logits_of_key::launch_unchecked::<bf16, CudaRuntime>(
            &k.tensor.client,
            CubeCount::Static((batch * kv_heads) as u32, 1, 1),
            CubeDim::new_1d((outputs.next_multiple_of(32) * PARTS) as u32),
            buffer(&k.tensor, 1),
            buffer(&weight, 1),
            buffer(&bias, 1),
            buffer(&logits, 1),
            k.row_strides(),
            kv_heads as u32,
            KeyGateConfig { head_dim, outputs, gated },
        );
    }
    logits
}

/// See [`logits_of_token`].
///
/// Grid: batch · kv_heads; at least [`PARTS`] units per output.
#[cube(launch_unchecked)]
fn logits_of_key<E: Numeric>(
    k: &Array<E>,
    weight: &Array<f32>,
    bias: &Array<f32>,
    logits: &mut Array<f32>,
    k_strides: RowStrides,
    kv_heads: u32,
    #[comptime] config: KeyGateConfig,
) {
    let KeyGateConfig { head_dim, outputs, gated } = comptime!(config);
    let width = comptime!(outputs.next_multiple_of(32));
    let share = comptime!(head_dim / PARTS);
    let (row, unit) = (CUBE_POS_X as usize, UNIT_POS as usize);
    let (batch, head) = (row / kv_heads as usize, row % kv_heads as usize);
    let (part, output) = (unit / width, unit % width);
    let own = min(output, outputs - 1);
    let k_at = k_strides.base(batch, head) * CHUNK;
    let mut sum = 0f32;
    for i in 0..share {
        let channel = part * share + i;
        let weight = weight[(head * head_dim + channel) * outputs + own];
        sum = fma(f32::cast_from(k[k_at + channel]), weight, sum);
    }
    let mut sums = SharedMemory::<f32>::new(comptime!(width * PARTS));
    sums[unit] = sum;
    sync_cube();
    let mut channel = unit;
    while channel < gated {
        let output = min(channel, outputs - 1);
        let mut total = bias[head * outputs + output];
        #[unroll]
        for part in 0..PARTS {
            total += sums[part * width + output];
        }
        logits[row * gated + channel] = total;
        channel += CUBE_DIM as usize;
    }
}
