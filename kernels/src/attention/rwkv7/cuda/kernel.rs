//! What comes before and after the recurrence, and the gradients, in the notation of [`rwkv7`](super::super).
//!
//! Tensors are `[batch, heads, seq_len, head_dim]` at strides, in chunks of 8 channels
//! ([`per_token`](crate::attention::per_token)).

use cubecl::prelude::*;

use super::super::{KEY_EPS, MAX_DECAY};
use crate::attention::per_token::kernel::{
    Place, TokenSizes, Wide, all, is_first, load, of_head, sigmoids, steps, sum, sums_of_tokens,
    zeros,
};
use crate::attention::recurrent::FORGET;
use crate::ops::cuda::block::{HeadStrides, RowSplit, write_sum};
use crate::tile::{CHUNK, Chunk};

/// What the recurrence's vectors are made of.
#[derive(CubeType, CubeLaunch)]
pub struct KeyInputs {
    k: Array<Chunk>,
    k_strides: HeadStrides,
    /// The decay's logits d.
    decay: Array<Chunk>,
    decay_strides: HeadStrides,
    /// The learning rate's logits.
    rate: Array<Chunk>,
    rate_strides: HeadStrides,
    /// ξ, `[kv_heads, head_dim]`.
    xi: Array<Wide>,
    /// α, likewise.
    alpha: Array<Wide>,
}

/// The recurrence's vectors, `[batch, kv_heads, seq_len, head_dim]`, in one memory order; or their gradients.
#[derive(CubeType, CubeLaunch)]
pub struct Vectors {
    /// ln w.
    log_decay: Array<Wide>,
    /// κ̂
    removal: Array<Chunk>,
    /// a ⊙ κ̂
    correction: Array<Chunk>,
    /// k̃
    key: Array<Chunk>,
    strides: HeadStrides,
}

/// What makes the output of the recurrence's o, `[batch, heads, seq_len, head_dim]`.
#[derive(CubeType, CubeLaunch)]
pub struct HeadInputs {
    o: Array<Chunk>,
    o_strides: HeadStrides,
    r: Array<Chunk>,
    r_strides: HeadStrides,
    /// k̃
    key: Array<Chunk>,
    key_strides: HeadStrides,
    v: Array<Chunk>,
    v_strides: HeadStrides,
    gate: Array<Chunk>,
    gate_strides: HeadStrides,
    /// ρ, `[heads, head_dim]`.
    rho: Array<Wide>,
    /// The norm's scale, likewise.
    scale: Array<Wide>,
    /// The norm's bias, likewise.
    bias: Array<Wide>,
    /// Query heads per key head.
    group: u32,
}

/// What a query head gives to gradients, `[batch, heads, seq_len, head_dim]`, in one memory order.
#[derive(CubeType, CubeLaunch)]
pub struct HeadGrads {
    o: Array<Chunk>,
    /// Of r by the bonus.
    r: Array<Chunk>,
    /// Of its key head's k̃ by the bonus.
    key: Array<Chunk>,
    /// Of its key head's v by the bonus.
    v: Array<Chunk>,
    gate: Array<Chunk>,
    strides: HeadStrides,
    /// A block's sums of ρ, the norm's scale and its bias, `[blocks, 3, heads, head_dim]`.
    parts: Array<Wide>,
}

/// The gradients of the recurrence's inputs that the kernel adds to those of [`HeadGrads`].
#[derive(CubeType, CubeLaunch)]
pub struct RecurrenceGrads {
    vectors: Vectors,
    /// `[batch, kv_heads, seq_len, head_dim]`
    v: Array<Chunk>,
    v_strides: HeadStrides,
    /// `[batch, heads, seq_len, head_dim]`
    r: Array<Chunk>,
    r_strides: HeadStrides,
}

/// The gradients of the inputs.
#[derive(CubeType, CubeLaunch)]
pub struct InputGrads {
    r: Array<Chunk>,
    r_strides: HeadStrides,
    k: Array<Chunk>,
    v: Array<Chunk>,
    decay: Array<Chunk>,
    rate: Array<Chunk>,
    /// The strides of the above but r.
    strides: HeadStrides,
    /// A block's sums of ξ and α, `[blocks, 2, kv_heads, head_dim]`.
    parts: Array<Wide>,
}

/// The recurrence's vectors.
///
/// - `starts`: the start of each token's document, `[batch, seq_len]`, if `packed`
///
/// Grid: all tokens by the groups of a block, key heads.
#[cube(launch_unchecked)]
pub fn prepare(
    inputs: &KeyInputs,
    starts: &Array<i32>,
    vectors: &mut Vectors,
    sizes: TokenSizes,
    #[comptime] packed: bool,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let place = Place::new(0, &sizes, split);
    let exists = place.exists;
    let k = load(&inputs.k, place.of(&inputs.k_strides, head), exists);
    let d = load(&inputs.decay, place.of(&inputs.decay_strides, head), exists);
    let a = sigmoids(load(&inputs.rate, place.of(&inputs.rate_strides, head), exists));
    let kappa = k * of_head(&inputs.xi, head, &place, &sizes);
    let alpha = of_head(&inputs.alpha, head, &place, &sizes);
    let inverse = 1.0 / f32::sqrt(sum(kappa * kappa, split) + KEY_EPS);
    if exists {
        let at = place.of(&vectors.strides, head);
        let unit = kappa * all(inverse);
        let mut removal = unit;
        let mut log_decay = sigmoids(d) * all(comptime!(-MAX_DECAY as f32));
        if is_first(starts, &place, &sizes, packed) {
            removal = zeros();
            log_decay = all(FORGET);
        }
        vectors.log_decay[at] = log_decay;
        vectors.removal[at] = Chunk::cast_from(removal);
        vectors.correction[at] = Chunk::cast_from(a * unit);
        vectors.key[at] = Chunk::cast_from(k * ((a - all(1.0)) * alpha + all(1.0)));
    }
}

/// What follows of a token's o.
#[derive(CubeType, Clone, Copy)]
struct Normed {
    /// o normalised, without scale and bias.
    hat: Wide,
    /// 1/σ of the norm.
    inverse: f32,
    r: Wide,
    key: Wide,
    v: Wide,
    gate: Wide,
    /// Σ_n r_n ρ_n k̃_n.
    bonus: f32,
    /// norm(o) + u.
    p: Wide,
}

#[cube]
impl Normed {
    fn new(
        inputs: &HeadInputs,
        head: usize,
        place: &Place,
        eps: f32,
        sizes: &TokenSizes,
        #[comptime] split: RowSplit,
    ) -> Normed {
        let exists = place.exists;
        let key_head = head / inputs.group as usize;
        let o = load(&inputs.o, place.of(&inputs.o_strides, head), exists);
        let r = load(&inputs.r, place.of(&inputs.r_strides, head), exists);
        let key = load(&inputs.key, place.of(&inputs.key_strides, key_head), exists);
        let v = load(&inputs.v, place.of(&inputs.v_strides, key_head), exists);
        let gate = load(&inputs.gate, place.of(&inputs.gate_strides, head), exists);
        let bonus = sum(r * of_head(&inputs.rho, head, place, sizes) * key, split);
        let channels = f32::cast_from(sizes.chunks) * f32::cast_from(CHUNK as u32);
        let mean = sum(o, split) / channels;
        let mut deviation = zeros();
        if exists {
            deviation = o - all(mean);
        }
        let inverse = 1.0 / f32::sqrt(sum(deviation * deviation, split) / channels + eps);
        let hat = deviation * all(inverse);
        let scale = of_head(&inputs.scale, head, place, sizes);
        let p = hat * scale + of_head(&inputs.bias, head, place, sizes) + v * all(bonus);
        Normed { hat, inverse, r, key, v, gate, bonus, p }
    }
}

/// The output: y = g ⊙ (norm(o) + u).
///
/// Grid: all tokens by the groups of a block, query heads.
#[cube(launch_unchecked)]
pub fn finish(
    inputs: &HeadInputs,
    y: &mut Array<Chunk>,
    y_strides: HeadStrides,
    eps: f32,
    sizes: TokenSizes,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let place = Place::new(0, &sizes, split);
    let Normed { gate, p, .. } = Normed::new(inputs, head, &place, eps, &sizes, split);
    if place.exists {
        y[place.of(&y_strides, head)] = Chunk::cast_from(p * gate);
    }
}

/// The gradients through [`finish`]. With g' = dy ⊙ g, x̂ the normalised o and h = g' ⊙ scale:
///
/// - do = (h − mean(h) − x̂ mean(h ⊙ x̂)) / σ
/// - of the bonus' sum ds = Σ_m g'_m v_m; dr = ds ρ ⊙ k̃, dk̃ = ds r ⊙ ρ, dρ = ds r ⊙ k̃; dv = g' Σ_n r_n ρ_n k̃_n
///
/// Grid: parts of all tokens, query heads.
#[cube(launch_unchecked)]
pub fn finish_back(
    inputs: &HeadInputs,
    dy: &Array<Chunk>,
    dy_strides: HeadStrides,
    grads: &mut HeadGrads,
    eps: f32,
    sizes: TokenSizes,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let mut d_rho = sums_of_tokens();
    let mut d_scale = sums_of_tokens();
    let mut d_bias = sums_of_tokens();
    let channels = f32::cast_from(sizes.chunks) * f32::cast_from(CHUNK as u32);
    for step in 0..steps(&sizes, split) {
        let place = Place::new(step, &sizes, split);
        let token = Normed::new(inputs, head, &place, eps, &sizes, split);
        let dy = load(dy, place.of(&dy_strides, head), place.exists);
        let rho = of_head(&inputs.rho, head, &place, &sizes);
        let g = dy * token.gate;
        let h = g * of_head(&inputs.scale, head, &place, &sizes);
        let shift = sum(h, split) / channels;
        let slope = sum(h * token.hat, split) / channels;
        let d_bonus = all(sum(g * token.v, split));
        if place.exists {
            let d_o = (h - all(shift) - token.hat * all(slope)) * all(token.inverse);
            let at = place.of(&grads.strides, head);
            grads.o[at] = Chunk::cast_from(d_o);
            grads.r[at] = Chunk::cast_from(d_bonus * rho * token.key);
            grads.key[at] = Chunk::cast_from(d_bonus * token.r * rho);
            grads.v[at] = Chunk::cast_from(g * all(token.bonus));
            grads.gate[at] = Chunk::cast_from(dy * token.p);
        }
        // Zeros where there is no token.
        d_rho[0] = d_rho[0] + d_bonus * token.r * token.key;
        d_scale[0] = d_scale[0] + g * token.hat;
        d_bias[0] = d_bias[0] + g;
    }
    let chunks = sizes.chunks as usize;
    let row = CUBE_COUNT_Y as usize * chunks;
    let out = CUBE_POS_X as usize * 3 * row + head * chunks;
    write_sum(&d_rho, &mut grads.parts, out, chunks, split);
    write_sum(&d_scale, &mut grads.parts, out + row, chunks, split);
    write_sum(&d_bias, &mut grads.parts, out + 2 * row, chunks, split);
}

/// The gradients through [`prepare`]: those of the recurrence's inputs, with what [`finish_back`] left, and from them
///
/// - da = db ⊙ κ̂ + dk̃ ⊙ k ⊙ α, and of the key's direction e = dκ̂ + a ⊙ db
/// - dκ = (e − κ̂ (e · κ̂)) / ‖κ‖, dk = dκ ⊙ ξ + dk̃ ⊙ (1 + (a − 1) ⊙ α)
/// - dξ = dκ ⊙ k, dα = dk̃ ⊙ k ⊙ (a − 1)
///
/// Grid: parts of all tokens, key heads.
#[cube(launch_unchecked)]
pub fn prepare_back(
    inputs: &KeyInputs,
    starts: &Array<i32>,
    by_recurrence: &RecurrenceGrads,
    by_head: &HeadGrads,
    group: u32,
    grads: &mut InputGrads,
    sizes: TokenSizes,
    #[comptime] packed: bool,
    #[comptime] split: RowSplit,
) {
    let head = CUBE_POS_Y as usize;
    let mut d_xi = sums_of_tokens();
    let mut d_alpha = sums_of_tokens();
    for step in 0..steps(&sizes, split) {
        let place = Place::new(step, &sizes, split);
        let exists = place.exists;
        let vectors = &by_recurrence.vectors;
        let at = place.of(&vectors.strides, head);

        // 1. r, v and k̃ with the parts by the query heads' bonus.
        let mut d_key = load(&vectors.key, at, exists);
        let mut d_v = load(&by_recurrence.v, place.of(&by_recurrence.v_strides, head), exists);
        for member in 0..group as usize {
            let query_head = head * group as usize + member;
            let of_query = place.of(&by_head.strides, query_head);
            d_key += load(&by_head.key, of_query, exists);
            d_v += load(&by_head.v, of_query, exists);
            let of_reader = place.of(&by_recurrence.r_strides, query_head);
            let d_r =
                load(&by_recurrence.r, of_reader, exists) + load(&by_head.r, of_query, exists);
            if exists {
                grads.r[place.of(&grads.r_strides, query_head)] = Chunk::cast_from(d_r);
            }
        }

        // 2. Through what made them.
        let k = load(&inputs.k, place.of(&inputs.k_strides, head), exists);
        let d = load(&inputs.decay, place.of(&inputs.decay_strides, head), exists);
        let a = sigmoids(load(&inputs.rate, place.of(&inputs.rate_strides, head), exists));
        let xi = of_head(&inputs.xi, head, &place, &sizes);
        let alpha = of_head(&inputs.alpha, head, &place, &sizes);
        let kappa = k * xi;
        let inverse = 1.0 / f32::sqrt(sum(kappa * kappa, split) + KEY_EPS);
        let unit = kappa * all(inverse);
        let d_correction = load(&vectors.correction, at, exists);
        let mut d_removal = load(&vectors.removal, at, exists);
        let mut d_log_decay = zeros();
        if exists {
            d_log_decay = vectors.log_decay[at];
        }
        if is_first(starts, &place, &sizes, packed) {
            d_removal = zeros();
            d_log_decay = zeros();
        }
        let of_unit = d_removal + a * d_correction;
        let along = sum(of_unit * unit, split);
        let d_kappa = (of_unit - unit * all(along)) * all(inverse);
        let less = a - all(1.0);
        let d_a = d_correction * unit + d_key * k * alpha;
        let s = sigmoids(d);
        if exists {
            let to = place.of(&grads.strides, head);
            let slope = s * (all(1.0) - s) * all(comptime!(-MAX_DECAY as f32));
            grads.k[to] = Chunk::cast_from(d_kappa * xi + d_key * (less * alpha + all(1.0)));
            grads.v[to] = Chunk::cast_from(d_v);
            grads.decay[to] = Chunk::cast_from(d_log_decay * slope);
            grads.rate[to] = Chunk::cast_from(d_a * a * (all(1.0) - a));
        }
        d_xi[0] = d_xi[0] + d_kappa * k;
        d_alpha[0] = d_alpha[0] + d_key * k * less;
    }
    let chunks = sizes.chunks as usize;
    let row = CUBE_COUNT_Y as usize * chunks;
    let out = CUBE_POS_X as usize * 2 * row + head * chunks;
    write_sum(&d_xi, &mut grads.parts, out, chunks, split);
    write_sum(&d_alpha, &mut grads.parts, out + row, chunks, split);
}
