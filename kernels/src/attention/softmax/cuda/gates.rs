//! Gates by channel: q and k come relative to powers of two, so that what is left to do for a pair of
//! tiles loses no digit.
//!
//! With p_t = Σ_{s ≤ t} g_s · log₂ e, a channel's part of a score is 2^(p_i − p_j) q_i k_j. Tiles have
//! [`TILE`] tokens; E_J = ⌊p⌋ at the last token of tile J, and E_{−1} = 0. Queries of tile I come as
//! q_i 2^(p_i − E_{I−1}), keys of tile J as k_j 2^(E_J − p_j): factors of at most 2. What a pair of
//! tiles lacks is f_IJ = 2^(E_{I−1} − E_J), a power of two: bf16 numbers are multiplied by it without
//! rounding. Where J < I it is at most 1; in the tile of I itself it brings the queries up to E_I,
//! by at most 2^82 with gates above −0.87, which bf16 holds.
//!
//! Decoding keeps keys as k_j 2^(E_{J−1} − p_j) instead, factors of at most 2^82: what comes after in the tile
//! changes no key that is there already. A pair of tiles then lacks 2^(E_{I−1} − E_{J−1}), at most 1; as q bears
//! all of it, what has decayed below some 2⁻⁴⁶ may become 0.
//!
//! Gradients are summed up in units that follow the tiles, so that all that is ever done to a sum is
//! to multiply it by powers of two that are at most 1: dq over tiles of keys in their order, dk over
//! tiles of queries in the reverse order.

use cubecl::prelude::*;

use crate::tile::write_notes;

/// Tokens of a tile of gates.
pub const TILE: usize = 64;

/// Pairs of `gated`·16 channels; one where there are none, as shared memory is never empty.
pub const fn gate_pairs(gated: usize) -> usize {
    if gated == 0 { 1 } else { gated * 8 }
}

/// 2ˣ; 0 below 2⁻¹²⁶.
#[cube]
pub fn power(x: i32) -> f32 {
    let bits = min(max(x, -127), 127) + 127;
    f32::reinterpret(u32::cast_from(bits) << 23u32)
}

/// Reads E of `count` pairs of channels, lane by lane, where `ends` holds E_{−1}, E_0, … of `dim` channels
/// each, from element `base` on, and `end` counts from E_{−1}. Needed a while later.
#[cube]
pub fn read_ends<N2: Size>(
    ends: &Array<i32>,
    base: usize,
    end: usize,
    pairs: &mut Array<Vector<i32, N2>>,
    #[comptime] count: usize,
    #[comptime] dim: usize,
) {
    #[unroll]
    for i in 0..comptime!(count.div_ceil(32)) {
        let mut channel = (i * 32 + UNIT_POS_PLANE as usize) * 2;
        if channel >= comptime!(2 * count) {
            channel = 0usize;
        }
        let at = base + end * dim + channel;
        let mut pair = Vector::<i32, N2>::empty();
        pair[0] = ends[at];
        pair[1] = ends[at + 1];
        pairs[i] = pair;
    }
}

/// 2^(E_from − E_to).
#[cube]
pub fn powers<E: Numeric, N: Size, N2: Size>(
    from: &Array<Vector<i32, N2>>,
    to: &Array<Vector<i32, N2>>,
    #[comptime] count: usize,
) -> Array<Vector<E, N>> {
    let lanes = comptime!(count.div_ceil(32));
    let mut powers = Array::<Vector<E, N>>::new(lanes);
    #[unroll]
    for i in 0..lanes {
        let (from, to) = (from[i], to[i]);
        let mut pair = Vector::<E, N>::empty();
        pair[0] = E::cast_from(power(from[0] - to[0]));
        pair[1] = E::cast_from(power(from[1] - to[1]));
        powers[i] = pair;
    }
    powers
}

/// Multiplies the channels of a left factor's fragments, of which the first `gated`·16 have a gate, by
/// the pairs in `factors` from `at` on.
#[cube]
pub fn scale_lefts<E: Numeric, NA: Size>(
    lefts: &mut Sequence<Array<Vector<E, NA>>>,
    factors: &SharedMemory<Vector<E, NA>>,
    at: usize,
    #[comptime] gated: usize,
) {
    #[unroll]
    for step in 0..gated {
        let place = at + comptime!(step * 8) + UNIT_POS_PLANE as usize % 4;
        let near = factors[place];
        let far = factors[place + 4];
        let left = lefts.index_mut(step);
        left[0] = left[0] * near;
        left[1] = left[1] * near;
        left[2] = left[2] * far;
        left[3] = left[3] * far;
    }
}

/// Multiplies the columns of an accumulator, of which the first `gated`·16 have a gate, by the pairs in
/// `factors` from `at` on.
#[cube]
pub fn scale_columns<N2: Size, NC: Size>(
    acc: &mut Sequence<Array<Vector<f32, NC>>>,
    factors: &SharedMemory<Vector<f32, N2>>,
    at: usize,
    #[comptime] gated: usize,
) {
    #[unroll]
    for column in 0..comptime!(gated * 2) {
        let factor = factors[at + comptime!(column * 4) + UNIT_POS_PLANE as usize % 4];
        let fragment = acc.index_mut(column);
        #[unroll]
        for r in 0..2usize {
            let mut pair = fragment[r];
            pair[0] *= factor[0];
            pair[1] *= factor[1];
            fragment[r] = pair;
        }
    }
}

/// Brings a left factor, of whose fragments the first `gated`·16 channels have a gate, from gates at
/// E = `from` on to those at `to`. The powers pass through the warp's part of `notes`.
#[cube]
pub fn bring_lefts<E: Numeric, NA: Size, N2: Size>(
    lefts: &mut Sequence<Array<Vector<E, NA>>>,
    from: &Array<Vector<i32, N2>>,
    to: &Array<Vector<i32, N2>>,
    notes: &mut SharedMemory<Vector<E, NA>>,
    warp: usize,
    #[comptime] gated: usize,
) {
    let pairs = comptime!(gate_pairs(gated));
    write_notes::<E, NA>(notes, &powers::<E, NA, N2>(from, to, pairs), warp, pairs);
    scale_lefts::<E, NA>(lefts, notes, warp * pairs, gated);
}

/// `to` = `from`, of `count` pairs of channels.
#[cube]
pub fn copy_ends<N2: Size>(
    from: &Array<Vector<i32, N2>>,
    to: &mut Array<Vector<i32, N2>>,
    #[comptime] count: usize,
) {
    #[unroll]
    for i in 0..comptime!(count.div_ceil(32)) {
        to[i] = from[i];
    }
}
