//! Kernels that run once per token: they rescale q and k relative to their tiles' ends, and turn the
//! gradients of the rescaled q and k into those of q, k and the gate.
//!
//! At the end of each tile, p_t = Σ_{s ≤ t} g_s · log₂ e is stored as an integer E_J and a fraction in
//! [0, 1), both from sums in f64: no sum over the whole sequence is formed in f32.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::operands::{TILE, power};
use crate::attention::flash::{HeadPairs, Strides};
use crate::tile::{LOG2_E, Pair, define_exp2, exp2};

/// The compile-time configuration of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GateConfig {
    /// Channels of a head, padded as in the attention kernels.
    pub padded_head_dim: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Number of channels with a gate, the first ones.
    pub gated: usize,
    /// Whether keys become relative to the starts of their tiles rather than to the ends.
    pub from_starts: bool,
}

/// The sizes of a call, and its scale.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct WallShape {
    /// Heads of k and of the gate.
    pub kv_heads: u32,
    /// Query heads per kv head.
    pub group: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// The offset of the first token in its tile.
    pub tile_offset: u32,
    /// Factor on q·k.
    pub scale: f32,
}

/// The gate's logits, `[batch, heads, tokens, gated]`, with the soft clamp that turns them into decays.
#[derive(CubeType, CubeLaunch)]
pub struct GateLogits<Z: Numeric> {
    /// Their elements.
    pub logits: Array<Z>,
    /// Their strides.
    pub strides: Strides,
    /// The soft clamp.
    pub clamp: SoftClamp,
}

/// The parameters of the soft clamp.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct SoftClamp {
    /// g_max, the largest decay of one step.
    pub most: f32,
    /// 1 / g_max.
    pub inverse: f32,
}

#[cube]
impl WallShape {
    /// Number of tiles.
    pub fn tiles(&self) -> usize {
        ((self.tile_offset + self.tokens) as usize + TILE - 1) / TILE
    }

    /// The first token of this block's tile.
    pub fn first(&self) -> usize {
        max(CUBE_POS_X as usize * TILE, self.tile_offset as usize) - self.tile_offset as usize
    }

    /// Number of tokens in this block's tile.
    pub fn count(&self) -> usize {
        let end = (CUBE_POS_X as usize + 1) * TILE - self.tile_offset as usize;
        min(end, self.tokens as usize) - self.first()
    }
}

/// e^y − 1 for y ≤ 0, accurate near 0.
#[cube]
fn exp_m1(y: f32) -> f32 {
    let near = y * (1.0 + y * (0.5 + y * (1.0 / 6.0 + y * (1.0 / 24.0))));
    select(y > -0.05, near, exp2(y * LOG2_E) - 1.0)
}

/// ln σ(z).
#[cube]
fn log_sigmoid(z: f32) -> f32 {
    let u = exp2(-Abs::abs(z) * LOG2_E);
    let near = u * (1.0 - u * (0.5 - u * (1.0 / 3.0 - u * 0.25)));
    min(z, 0f32) - select(u < 0.03, near, Log::ln(1.0 + u))
}

/// g of a logit, as in [`soft_clamp`](super::super::gate).
#[cube]
fn decay(z: f32, clamp: &SoftClamp) -> f32 {
    clamp.most * exp_m1(log_sigmoid(z) * clamp.inverse)
}

/// dg/dz of [`decay`]: e^(ln σ(z) / g_max) · σ(−z).
#[cube]
fn slope(z: f32, clamp: &SoftClamp) -> f32 {
    exp2(log_sigmoid(z) * clamp.inverse * LOG2_E) / (1.0 + exp2(z * LOG2_E))
}

#[cube]
impl<Z: Numeric> GateLogits<Z> {
    /// The index at which this block's sequence and head begin.
    pub fn base(&self, shape: &WallShape) -> usize {
        let (row, heads) = (CUBE_POS_Y as usize, shape.kv_heads as usize);
        row / heads * self.strides.batch as usize + row % heads * self.strides.head as usize
    }

    /// The logits of two neighbouring channels of a token, 0 where they have none.
    pub fn load(
        &self,
        base: usize,
        token: usize,
        channel: usize,
        #[comptime] config: GateConfig,
    ) -> Pair {
        let at = base + token * self.strides.token as usize;
        let mut pair = Pair::cast_from(0f32);
        #[unroll]
        for e in 0..2usize {
            if channel + e < config.gated {
                pair[e] = f32::cast_from(self.logits[at + channel + e]);
            }
        }
        pair
    }
}

/// g · log₂ e of two neighbouring channels, 0 where they have no gate.
#[cube]
pub fn decays(
    gates: Pair,
    channel: usize,
    clamp: &SoftClamp,
    #[comptime] config: GateConfig,
) -> Pair {
    let mut pair = Pair::cast_from(0f32);
    #[unroll]
    for e in 0..2usize {
        if channel + e < config.gated {
            pair[e] = decay(gates[e], clamp) * LOG2_E;
        }
    }
    pair
}

/// Σ g · log₂ e of each tile and channel, `[batch · kv_heads, tiles, dim]`.
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn tile_sums<Z: Numeric>(
    gate: &GateLogits<Z>,
    sums: &mut Array<Pair>,
    shape: WallShape,
    #[comptime] config: GateConfig,
) {
    define_exp2();
    let channel = UNIT_POS as usize * 2;
    let base = gate.base(&shape);
    let mut sum = Pair::cast_from(0f32);
    for t in 0..shape.count() {
        let gates = gate.load(base, shape.first() + t, channel, config);
        sum += decays(gates, channel, &gate.clamp, config);
    }
    let tile = CUBE_POS_Y as usize * shape.tiles() + CUBE_POS_X as usize;
    sums[tile * comptime!(config.padded_head_dim / 2) + UNIT_POS as usize] = sum;
}

/// Tokens whose loads are in flight together.
const UNROLL: usize = 4;

/// Tiles whose loads are in flight together.
const PREFETCH: usize = 8;

/// E and the fractions p − E at the tiles' ends, `[batch · kv_heads, tiles + 1, dim]`, from [`tile_sums`];
/// the first row is that before all tokens.
///
/// Grid: batch · kv_heads; a unit for each channel.
#[cube(launch_unchecked)]
pub fn tile_ends(sums: &Array<f32>, ends: &mut Array<i32>, fractions: &mut Array<f32>, tiles: u32) {
    let dim = CUBE_DIM as usize;
    let tiles = tiles as usize;
    let from = CUBE_POS_X as usize * tiles * dim + UNIT_POS as usize;
    let to = CUBE_POS_X as usize * (tiles + 1) * dim + UNIT_POS as usize;
    ends[to] = 0;
    fractions[to] = 0f32;
    let mut sum = f64::cast_from(0f32);
    let mut own = Array::<f32>::new(PREFETCH);
    for group in 0..(tiles + PREFETCH - 1) / PREFETCH {
        let first = group * PREFETCH;
        #[unroll]
        for i in 0..PREFETCH {
            own[i] = sums[from + min(first + i, tiles - 1) * dim];
        }
        #[unroll]
        for i in 0..PREFETCH {
            if first + i < tiles {
                sum += f64::cast_from(own[i]);
                let whole = Floor::floor(sum);
                ends[to + (first + i + 1) * dim] = i32::cast_from(whole);
                fractions[to + (first + i + 1) * dim] = f32::cast_from(sum - whole);
            }
        }
    }
}

/// q_t · 2^(p_t − E_{J−1}) and k_t · 2^(E_J − p_t), or with `from_starts` k_t · 2^(E_{J−1} − p_t), J the tile
/// of t.
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn rescale<Z: Numeric>(
    q: &HeadPairs<bf16>,
    k: &HeadPairs<bf16>,
    gate: &GateLogits<Z>,
    ends: &Array<i32>,
    fractions: &Array<f32>,
    queries: &mut HeadPairs<bf16>,
    keys: &mut HeadPairs<bf16>,
    shape: WallShape,
    #[comptime] config: GateConfig,
) {
    define_exp2();
    let channel = UNIT_POS as usize * 2;
    let row = CUBE_POS_Y as usize;
    let (batch, kv_head) = (row / shape.kv_heads as usize, row % shape.kv_heads as usize);
    let group = shape.group as usize;
    let base = gate.base(&shape);
    let end = (row * (shape.tiles() + 1) + CUBE_POS_X as usize) * config.padded_head_dim + channel;
    // p − E_{J−1}, and 2^(E_J − E_{J−1}).
    let mut since = Pair::empty();
    let mut span = Pair::empty();
    #[unroll]
    for e in 0..2usize {
        since[e] = fractions[end + e];
        span[e] = 1f32;
        if !config.from_starts {
            span[e] = power(ends[end + config.padded_head_dim + e] - ends[end + e]);
        }
    }
    let count = shape.count();
    if channel < config.head_dim {
        for some in 0..(count + UNROLL - 1) / UNROLL {
            let mut gates = Array::<Pair>::new(UNROLL);
            let mut own = Array::<Pair>::new(UNROLL);
            #[unroll]
            for i in 0..UNROLL {
                let t = shape.first() + min(some * UNROLL + i, count - 1);
                gates[i] = gate.load(base, t, channel, config);
                own[i] = Pair::cast_from(k.pairs[k.at(batch, kv_head, t, UNIT_POS as usize)]);
            }
            let mut shrunk = Array::<Pair>::new(UNROLL);
            #[unroll]
            for i in 0..UNROLL {
                since += decays(gates[i], channel, &gate.clamp, config);
                let mut down = Pair::empty();
                let mut up = Pair::empty();
                #[unroll]
                for e in 0..2usize {
                    down[e] = exp2(since[e]);
                    // Multiplied by the power of two separately: later tokens of the tile change no digit.
                    up[e] = exp2(-since[e]) * span[e];
                }
                shrunk[i] = down;
                if some * UNROLL + i < count {
                    let t = shape.first() + some * UNROLL + i;
                    let to = keys.at(batch, kv_head, t, UNIT_POS as usize);
                    keys.pairs[to] = Vector::cast_from(own[i] * up);
                }
            }
            for member in 0..group {
                let head = kv_head * group + member;
                #[unroll]
                for i in 0..UNROLL {
                    let t = shape.first() + min(some * UNROLL + i, count - 1);
                    own[i] = Pair::cast_from(q.pairs[q.at(batch, head, t, UNIT_POS as usize)]);
                }
                #[unroll]
                for i in 0..UNROLL {
                    if some * UNROLL + i < count {
                        let t = shape.first() + some * UNROLL + i;
                        let to = queries.at(batch, head, t, UNIT_POS as usize);
                        queries.pairs[to] = Vector::cast_from(own[i] * shrunk[i]);
                    }
                }
            }
        }
    }
}

/// p at tiles' ends, and the sums of tiles.
#[derive(CubeType, CubeLaunch)]
pub struct TileEnds {
    /// Σ g · log₂ e of each tile, `[batch · kv_heads, tiles, dim]`.
    pub sums: Array<f32>,
    /// E_{−1}, E_0, …, `[batch · kv_heads, tiles + 1, dim]`.
    pub ends: Array<i32>,
    /// p − E there.
    pub fractions: Array<f32>,
}

/// The rescaled q or k, its gradient with the same strides, and the gradient to write.
#[derive(CubeType, CubeLaunch)]
pub struct Rescaled {
    /// The output of [`rescale`].
    pub x: Array<Vector<bf16, Const<2>>>,
    /// Its gradient from the attention kernels.
    pub relative_grad: Array<Pair>,
    /// The gradient of q or k.
    pub grad: HeadPairs<bf16>,
}

/// dq and dk from the gradients of the rescaled q and k; and Σ_{u ≥ t} dP_u within tiles in f32, with
/// dP = q ⊙ dq − k ⊙ dk (Pai et al., section 3), and its sum over each tile.
///
/// q ⊙ dq uses the rescaled and rounded q of the products, so that the contributions of pairs of tokens after
/// t to q ⊙ dq and to k ⊙ dk cancel up to f32's rounding of sums.
///
/// - `within`: `[batch · kv_heads, tokens, dim]`; `totals`: `[batch · kv_heads, tiles, dim]`
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn gradients<Z: Numeric>(
    q: &mut Rescaled,
    k: &mut Rescaled,
    gate: &GateLogits<Z>,
    tiles: &TileEnds,
    within: &mut Array<Pair>,
    totals: &mut Array<Pair>,
    shape: WallShape,
    #[comptime] config: GateConfig,
) {
    define_exp2();
    let unit = UNIT_POS as usize;
    let channel = unit * 2;
    let row = CUBE_POS_Y as usize;
    let (batch, kv_head) = (row / shape.kv_heads as usize, row % shape.kv_heads as usize);
    let group = shape.group as usize;
    let base = gate.base(&shape);
    let tile = row * shape.tiles() + CUBE_POS_X as usize;
    let end = (row * (shape.tiles() + 1) + CUBE_POS_X as usize) * config.padded_head_dim + channel;
    // p − E_{J−1} at the tile's last token, and 2^(E_{J−1} − E_J) times the scale.
    let mut since = Pair::empty();
    let mut span = Pair::empty();
    #[unroll]
    for e in 0..2usize {
        since[e] =
            tiles.fractions[end + e] + tiles.sums[tile * config.padded_head_dim + channel + e];
        span[e] =
            power(tiles.ends[end + e] - tiles.ends[end + config.padded_head_dim + e]) * shape.scale;
    }
    let mut after = Pair::cast_from(0f32);
    let half = comptime!(config.padded_head_dim / 2);
    let count = shape.count();
    if channel < config.head_dim {
        // From the tile's last token to its first.
        for some in 0..(count + UNROLL - 1) / UNROLL {
            let mut gates = Array::<Pair>::new(UNROLL);
            let mut grads = Array::<Pair>::new(UNROLL);
            let mut own = Array::<Pair>::new(UNROLL);
            #[unroll]
            for i in 0..UNROLL {
                let t = shape.first() + count - 1 - min(some * UNROLL + i, count - 1);
                gates[i] = gate.load(base, t, channel, config);
                let at = k.grad.at(batch, kv_head, t, unit);
                grads[i] = k.relative_grad[at];
                own[i] = Pair::cast_from(k.x[at]);
            }
            let mut shrunk = Array::<Pair>::new(UNROLL);
            let mut dp = Array::<Pair>::new(UNROLL);
            #[unroll]
            for i in 0..UNROLL {
                let mut down = Pair::empty();
                let mut up = Pair::empty();
                #[unroll]
                for e in 0..2usize {
                    down[e] = exp2(since[e]) * span[e];
                    up[e] = exp2(-since[e]) * shape.scale;
                }
                since -= decays(gates[i], channel, &gate.clamp, config);
                shrunk[i] = down;
                dp[i] = Vector::cast_from(0f32) - grads[i] * own[i];
                if some * UNROLL + i < count {
                    let t = shape.first() + count - 1 - (some * UNROLL + i);
                    let to = k.grad.at(batch, kv_head, t, unit);
                    k.grad.pairs[to] = Vector::cast_from(grads[i] * up);
                }
            }
            for member in 0..group {
                let head = kv_head * group + member;
                #[unroll]
                for i in 0..UNROLL {
                    let t = shape.first() + count - 1 - min(some * UNROLL + i, count - 1);
                    let at = q.grad.at(batch, head, t, unit);
                    grads[i] = q.relative_grad[at];
                    own[i] = Pair::cast_from(q.x[at]);
                }
                #[unroll]
                for i in 0..UNROLL {
                    dp[i] += grads[i] * own[i];
                    if some * UNROLL + i < count {
                        let t = shape.first() + count - 1 - (some * UNROLL + i);
                        let at = q.grad.at(batch, head, t, unit);
                        q.grad.pairs[at] = Vector::cast_from(grads[i] * shrunk[i]);
                    }
                }
            }
            #[unroll]
            for i in 0..UNROLL {
                if some * UNROLL + i < count {
                    let t = shape.first() + count - 1 - (some * UNROLL + i);
                    after += dp[i] * span;
                    within[(row * shape.tokens as usize + t) * half + unit] = after;
                }
            }
        }
    }
    totals[tile * half + unit] = after;
}

/// The scope of sums over tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SumScope {
    /// All tiles.
    Row,
    /// One document: sums restart at tiles in which a document begins.
    Document,
    /// The same for tiles in reverse order.
    ReversedDocument,
}

/// Replaces each tile's total by the sum over the tiles after it (an exclusive suffix sum), in place.
///
/// - `totals`: `[batch · kv_heads, tiles, dim]`
/// - `documents`: `[batch, tokens]`, except with [`SumScope::Row`]
///
/// Grid: batch · kv_heads; a unit for each channel.
#[cube(launch_unchecked)]
pub fn after_tiles(
    totals: &mut Array<f32>,
    documents: &ComptimeOption<Array<i32>>,
    shape: WallShape,
    #[comptime] sum_scope: SumScope,
) {
    let dim = CUBE_DIM as usize;
    let (tiles, tokens) = (shape.tiles(), shape.tokens as usize);
    let row = CUBE_POS_X as usize;
    let base = row * tiles * dim + UNIT_POS as usize;
    let tokens_at = row / shape.kv_heads as usize * tokens;
    let mut sum = f64::cast_from(0f32);
    let mut own = Array::<f32>::new(PREFETCH);
    let mut begins = Array::<bool>::new(PREFETCH);
    for group in 0..(tiles + PREFETCH - 1) / PREFETCH {
        let first = group * PREFETCH;
        #[unroll]
        for i in 0..PREFETCH {
            let place = tiles - 1 - min(first + i, tiles - 1);
            own[i] = totals[base + place * dim];
            if comptime!(sum_scope != SumScope::Row) {
                let mut tile = place;
                if comptime!(sum_scope == SumScope::ReversedDocument) {
                    tile = tiles - 1 - place;
                }
                let last = min((tile + 1) * TILE, tokens) - 1;
                let document = documents.as_ref().unwrap()[tokens_at + last] as usize;
                begins[i] = document >= tile * TILE;
            }
        }
        #[unroll]
        for i in 0..PREFETCH {
            if first + i < tiles {
                totals[base + (tiles - 1 - first - i) * dim] = f32::cast_from(sum);
                if comptime!(sum_scope != SumScope::Row) {
                    sum = select(begins[i], f64::cast_from(0f32), sum);
                }
                sum += f64::cast_from(own[i]);
            }
        }
    }
}

/// The gradient of the gate's logits, with their strides: dg_t = Σ_{u ≥ t} dP_u times the soft clamp's slope.
///
/// Grid: tiles, batch · kv_heads; at least one unit per channel with a gate.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn gate_gradients<Z: Numeric>(
    within: &Array<f32>,
    after: &Array<f32>,
    gate: &GateLogits<Z>,
    d_gate: &mut Array<Z>,
    shape: WallShape,
    #[comptime] config: GateConfig,
) {
    define_exp2();
    let channel = UNIT_POS as usize;
    let row = CUBE_POS_Y as usize;
    let base = gate.base(&shape) + channel;
    let dim = config.padded_head_dim;
    let count = shape.count();
    if channel < config.gated {
        let later = after[(row * shape.tiles() + CUBE_POS_X as usize) * dim + channel];
        for some in 0..(count + UNROLL - 1) / UNROLL {
            let mut gates = Array::<f32>::new(UNROLL);
            let mut sums = Array::<f32>::new(UNROLL);
            #[unroll]
            for i in 0..UNROLL {
                let t = shape.first() + min(some * UNROLL + i, count - 1);
                gates[i] = f32::cast_from(gate.logits[base + t * gate.strides.token as usize]);
                sums[i] = within[(row * shape.tokens as usize + t) * dim + channel];
            }
            #[unroll]
            for i in 0..UNROLL {
                if some * UNROLL + i < count {
                    let t = shape.first() + some * UNROLL + i;
                    let dz = (sums[i] + later) * slope(gates[i], &gate.clamp);
                    d_gate[base + t * gate.strides.token as usize] = Z::cast_from(dz);
                }
            }
        }
    }
}
