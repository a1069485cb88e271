//! Diagonal gates: q and k are stored relative to powers of two, so that the remaining rescaling for a pair
//! of tiles is exact.
//!
//! With p_t = Σ_{s ≤ t} g_s · log₂ e, a channel's part of a score is 2^(p_i − p_j) q_i k_j. Tiles have
//! [`TILE`] tokens; E_J = ⌊p⌋ at the last token of tile J, and E_{−1} = 0. Queries of tile I are stored as
//! q_i 2^(p_i − E_{I−1}), keys of tile J as k_j 2^(E_J − p_j): factors of at most 2. The remaining factor of
//! a pair of tiles is f_IJ = 2^(E_{I−1} − E_J), a power of two: bf16 numbers are multiplied by it without
//! rounding. For J < I it is at most 1; for J = I it is at most 2^93 ([`LARGEST_G_MAX`](super::super::LARGEST_G_MAX)),
//! inside bf16's range.
//!
//! Decoding stores keys as k_j 2^(E_{J−1} − p_j) instead, with factors of at most 2^93: later tokens of the
//! tile do not change the keys already stored. The remaining factor is 2^(E_{I−1} − E_{J−1}), at most 1; it
//! is applied to q, so that contributions that have decayed below 2⁻¹²⁶ times the key's factor may become 0.
//!
//! Gradients are accumulated in units that follow the tiles, so that an accumulator is only ever multiplied
//! by powers of two of at most 1: dq over key tiles in order, dk over query tiles in reverse order. Where one kernel
//! computes all gradients, each block of two key tiles adds its part of dq in units of the queries' tile, relative to
//! E_I: k_j is relative to E_J, and the factor 2^(E_I − E_J) is at most 1, too.

use burn::tensor::bf16;
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use crate::attention::flash::decode::{KEYS_PER_WARP, WARPS};
use crate::attention::flash::hooks::Operands;
use crate::attention::flash::mask::{QueryBlock, QueryGroup};
use crate::attention::flash::problem::{KernelConfig, ProblemShape};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, RowsAt, start_abt, start_panels_atb, wait};
use crate::tile::{
    AFragments, Accumulator, Bf16Pair, Chunk, PANEL, PANEL_DIM, Pair, load_a_frags, stage_to_smem,
};

/// Tokens of a tile of gates.
pub const TILE: usize = 64;

// A warpgroup's rows are one tile of gates, and so are a key tile's rows in decoding.
const _: () = assert!(GROUP_ROWS == TILE && WARPS * KEYS_PER_WARP == TILE);

/// 2ˣ; 0 below 2⁻¹²⁶.
#[cube]
pub fn power(x: i32) -> f32 {
    let bits = min(max(x, -127), 127) + 127;
    f32::reinterpret(u32::cast_from(bits) << 23u32)
}

/// E of pairs of channels, distributed over lanes.
type Ends = Array<Vector<i32, Const<2>>>;

/// The gates as a kernel argument.
#[derive(CubeType, CubeLaunch)]
pub struct Gates {
    /// E_{−1}, E_0, …, `[batch, kv_heads, rows, padded_head_dim]`.
    pub ends: Array<i32>,
    /// Rows of a head in `ends`, at least tiles + 1.
    pub rows: u32,
    /// Number of channels with a gate, the first ones, in units of 16.
    #[cube(comptime)]
    pub gated: usize,
    /// Whether keys are relative to the starts of their tiles, as in decoding, rather than to the ends.
    #[cube(comptime)]
    pub from_starts: bool,
}

/// Registers per lane for pairs of `gated`·16 channels.
const fn lanes(gated: usize) -> usize {
    (gated * 8).div_ceil(32)
}

#[cube]
impl Gates {
    /// The index at which the gates of a kv head begin; `batch_kv_head` is batch · kv_heads + kv_head.
    fn base(&self, batch_kv_head: usize, #[comptime] dim: usize) -> usize {
        batch_kv_head * self.rows as usize * dim
    }

    /// Reads row `end` of E, counted from E_{−1}.
    fn read(&self, base: usize, end: usize, pairs: &mut Ends, #[comptime] dim: usize) {
        let count = comptime!(self.gated * 8);
        #[unroll]
        for i in 0..comptime!(count.div_ceil(32)) {
            let mut channel = (i * 32 + UNIT_POS_PLANE as usize) * 2;
            if channel >= comptime!(2 * count) {
                channel = 0usize;
            }
            let at = base + end * dim + channel;
            let mut pair = Vector::<i32, Const<2>>::empty();
            pair[0] = self.ends[at];
            pair[1] = self.ends[at + 1];
            pairs[i] = pair;
        }
    }
}

/// Uninitialised E.
#[cube]
fn no_ends(#[comptime] gated: usize) -> Ends {
    Ends::new(comptime!(lanes(gated)))
}

/// 2^(E_from − E_to).
#[cube]
fn powers<E: Numeric>(
    from: &Ends,
    to: &Ends,
    #[comptime] gated: usize,
) -> Array<Vector<E, Const<2>>> {
    let lanes = comptime!(lanes(gated));
    let mut powers = Array::<Vector<E, Const<2>>>::new(lanes);
    #[unroll]
    for i in 0..lanes {
        let (from, to) = (from[i], to[i]);
        let mut pair = Vector::<E, Const<2>>::empty();
        pair[0] = E::cast_from(power(from[0] - to[0]));
        pair[1] = E::cast_from(power(from[1] - to[1]));
        powers[i] = pair;
    }
    powers
}

/// Multiplies the channels of fragments, of which the first `gated`·16 have a gate, by the pairs in
/// `factors` from `at` on.
#[cube]
fn scale_a_frags(
    a_frags: &mut AFragments,
    factors: &SharedMemory<Bf16Pair>,
    at: usize,
    #[comptime] gated: usize,
) {
    #[unroll]
    for step in 0..gated {
        let place = at + comptime!(step * 8) + UNIT_POS_PLANE as usize % 4;
        let near = factors[place];
        let far = factors[place + 4];
        let a_frag = a_frags.index_mut(step);
        a_frag[0] = a_frag[0] * near;
        a_frag[1] = a_frag[1] * near;
        a_frag[2] = a_frag[2] * far;
        a_frag[3] = a_frag[3] * far;
    }
}

/// Multiplies the columns of an accumulator, of which the first `gated`·16 have a gate, by the pairs in
/// `factors` from `at` on.
#[cube]
fn scale_columns(
    acc: &mut Accumulator,
    factors: &SharedMemory<Pair>,
    at: usize,
    #[comptime] gated: usize,
) {
    #[unroll]
    for column in 0..comptime!(gated * 2) {
        let factor = factors[at + comptime!(column * 4) + UNIT_POS_PLANE as usize % 4];
        scale_fragment(acc.index_mut(column), factor);
    }
}

/// Multiplies two columns, in the rows that the unit holds, by a factor each.
#[cube]
fn scale_fragment(fragment: &mut Array<Pair>, factor: Pair) {
    #[unroll]
    for r in 0..2usize {
        let mut pair = fragment[r];
        pair[0] *= factor[0];
        pair[1] *= factor[1];
        fragment[r] = pair;
    }
}

/// Multiplies the warpgroup's half of dq's channels, for all queries of the tile, by `factors`; by 1 for queries of the
/// block's first tile of keys.
#[cube]
fn scale_part(
    state: &GatedDqParts,
    dq: &mut Accumulator,
    factors: &SharedMemory<Pair>,
    warp: usize,
) {
    let gated = state.gated;
    let first = warp / GROUP_WARPS * dq.len();
    let base = warp * comptime!(gated * 8) + UNIT_POS_PLANE as usize % 4;
    let zero = usize::cast_from(0u32);
    #[unroll]
    for n in 0..dq.len() {
        let column = first + n;
        // The last channels may have no gate. Without a branch, which would keep the compiler from running products at
        // the same time.
        let scales = state.after_first & (column < comptime!(gated * 2));
        let mut factor = factors[base + select(scales, column, zero) * 4];
        factor[0] = select(scales, factor[0], 1f32);
        factor[1] = select(scales, factor[1], 1f32);
        scale_fragment(dq.index_mut(n), factor);
    }
}

/// Multiplies fragments by 2^(E_from − E_to), staged in the warp's part of `factors`.
#[cube]
fn rescale(
    a_frags: &mut AFragments,
    from: &Ends,
    to: &Ends,
    factors: &mut SharedMemory<Bf16Pair>,
    warp: usize,
    #[comptime] gated: usize,
) {
    let pairs = comptime!(gated * 8);
    stage_to_smem::<bf16, Const<2>>(factors, &powers::<bf16>(from, to, gated), warp, pairs);
    scale_a_frags(a_frags, factors, warp * pairs, gated);
}

/// E of each warp in shared memory, which saves registers.
type KeptEnds = SharedMemory<Vector<i32, Const<2>>>;

/// Shared memory for E, for each warp.
#[cube]
fn kept_ends(#[comptime] gated: usize, #[comptime] warps: usize) -> KeptEnds {
    KeptEnds::new_aligned(comptime!(warps * gated * 8), 16usize)
}

/// Keeps E in the warp's part of `kept`.
#[cube]
fn keep(ends: &Ends, kept: &mut KeptEnds, warp: usize, #[comptime] gated: usize) {
    stage_to_smem::<i32, Const<2>>(kept, ends, warp, comptime!(gated * 8));
}

/// What [`keep`] kept.
#[cube]
fn take(kept: &KeptEnds, warp: usize, #[comptime] gated: usize) -> Ends {
    let pairs = comptime!(gated * 8);
    let mut ends = no_ends(gated);
    #[unroll]
    for i in 0..comptime!(lanes(gated)) {
        ends[i] = kept[warp * pairs + min(i * 32 + UNIT_POS_PLANE as usize, pairs - 1)];
    }
    ends
}

/// `to` = `from`.
#[cube]
fn copy(from: &Ends, to: &mut Ends, #[comptime] gated: usize) {
    #[unroll]
    for i in 0..comptime!(lanes(gated)) {
        to[i] = from[i];
    }
}

/// Shared memory for factors of operands, for each warp.
#[cube]
fn factors_of_operands(
    #[comptime] gated: usize,
    #[comptime] warps: usize,
) -> SharedMemory<Bf16Pair> {
    SharedMemory::<Bf16Pair>::new_aligned(comptime!(warps * gated * 8), 16usize)
}

/// Shared memory for factors of sums, for each warp.
#[cube]
fn factors_of_sums(#[comptime] gated: usize, #[comptime] warps: usize) -> SharedMemory<Pair> {
    SharedMemory::<Pair>::new_aligned(comptime!(warps * gated * 8), 16usize)
}

/// Queries and keys relative to powers of two: a warp rescales its own to the gates of each tile of the loop.
pub struct GatedOperands;

/// The queries of a warp, in registers, relative to the key tile of the last product.
#[derive(CubeType)]
pub struct GatedForward {
    q: AFragments,
    /// Where the keys' gates begin.
    base: usize,
    /// E to which q is relative, and E of the next tile.
    here: Ends,
    next: Ends,
    factors: SharedMemory<Bf16Pair>,
    #[cube(comptime)]
    gated: usize,
}

/// State for dq, whose accumulator is relative to the last key tile.
#[derive(CubeType)]
pub struct GatedDq {
    /// Where the keys' gates begin.
    base: usize,
    /// The E that q is relative to, that of dq so far, and that of the next tile.
    own: Ends,
    here: Ends,
    next: Ends,
    factors: SharedMemory<Bf16Pair>,
    /// Factors that rescale dq so far to the tile's units.
    sum_factors: SharedMemory<Pair>,
    #[cube(comptime)]
    gated: usize,
}

/// State for dk, whose accumulator is relative to the last query tile.
#[derive(CubeType)]
pub struct GatedDkv {
    /// Where the gates begin.
    base: usize,
    /// The first of the warpgroup's keys.
    column: usize,
    /// The E that k is relative to, that of dk so far, and that of the next tile.
    own: KeptEnds,
    here: KeptEnds,
    next: Ends,
    /// Factors of k for a tile.
    factors: SharedMemory<Bf16Pair>,
    /// Factors that rescale dk so far to the tile's units.
    sum_factors: SharedMemory<Pair>,
    #[cube(comptime)]
    gated: usize,
}

/// State for the part of dq that a block of two key tiles adds, relative to E at the end of the queries' tile.
#[derive(CubeType)]
pub struct GatedDqParts {
    /// Where the gates begin.
    base: usize,
    /// The first key of the block's second tile.
    second_tile: usize,
    /// Whether the queries come after the block's first tile. Those of the first tile attend to it alone, and their
    /// part of dq is in its units already: the factors, to the second tile's units and back, could exceed 1.
    after_first: bool,
    /// The E that the keys of the second tile are relative to, and that of the queries' tile.
    second: KeptEnds,
    own: Ends,
    /// Factors from the first tile's units to the second's, and from there to those of the queries.
    to_second: SharedMemory<Pair>,
    to_own: SharedMemory<Pair>,
    #[cube(comptime)]
    gated: usize,
}

/// State for one query per head.
#[derive(CubeType)]
pub struct GatedDecode {
    /// Where the keys' gates begin.
    base: usize,
    /// E to which q is relative, and E of the next tile.
    here: Ends,
    next: Ends,
    factors: SharedMemory<Bf16Pair>,
    #[cube(comptime)]
    gated: usize,
}

#[cube]
impl Operands for GatedOperands {
    type Args = Gates;
    /// In f32, because the rescaling to q and k is still to come.
    type Gradient = f32;
    type Forward = GatedForward;
    type Dq = GatedDq;
    type Dkv = GatedDkv;
    type DqParts = GatedDqParts;
    type Decode = GatedDecode;

    const Q_IN_REGISTERS: bool = true;
    const CHANGES_QUERIES: bool = false;
    const DK_IN_REVERSE: bool = true;
    /// The gate's gradient is a sum of q ⊙ dq − k ⊙ dk, where pairs of later tokens cancel.
    const NEEDS_EQUAL_DS: bool = true;
    const SCALES_GRADIENTS: bool = false;

    fn forward(
        args: &Gates,
        problem: &ProblemShape,
        block: &QueryBlock,
        group: &QueryGroup,
        q_tile: &SharedMemory<Chunk>,
        column: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) -> GatedForward {
        let dim = config.padded_head_dim;
        let gated = args.gated;
        let (rows, steps) = comptime!((config.rows(), dim / 16));
        let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
        let q = load_a_frags(&def, q_tile, warp * 16, steps, rows);
        let kv_heads = (problem.heads / problem.group) as usize;
        let base = args.base(block.batch * kv_heads + block.kv_head, dim);
        let mut here = no_ends(gated);
        let mut next = no_ends(gated);
        args.read(base, group.first / TILE, &mut here, dim);
        args.read(base, column / TILE + comptime!(anchor(args.from_starts)), &mut next, dim);
        let factors = factors_of_operands(gated, config.warps);
        GatedForward { q, base, here, next, factors, gated }
    }

    fn start_scores(
        state: &mut GatedForward,
        s: &mut Accumulator,
        _q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: KernelConfig,
    ) {
        let gated = state.gated;
        rescale(&mut state.q, &state.here, &state.next, &mut state.factors, warp, gated);
        copy(&state.next, &mut state.here, gated);
        start_abt(&state.q, k_tile, at, s, fresh, comptime!(config.tile / 8));
    }

    fn queries_at(
        _args: &Gates,
        block: &QueryBlock,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) -> RowsAt {
        block.queries_at()
    }

    fn keys_at(
        _args: &Gates,
        block: &QueryBlock,
        column: usize,
        #[comptime] _config: KernelConfig,
    ) -> RowsAt {
        block.keys_at(column)
    }

    fn changes_queries(
        _block: &QueryBlock,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) -> bool {
        false.runtime()
    }

    fn read_ahead(
        state: &mut GatedForward,
        args: &Gates,
        column: usize,
        #[comptime] config: KernelConfig,
    ) {
        let end = column / TILE + comptime!(anchor(args.from_starts));
        args.read(state.base, end, &mut state.next, config.padded_head_dim);
    }

    fn dq(
        args: &Gates,
        problem: &ProblemShape,
        block: &QueryBlock,
        group: &QueryGroup,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> GatedDq {
        let dim = config.padded_head_dim;
        let gated = args.gated;
        let kv_heads = (problem.heads / problem.group) as usize;
        let base = args.base(block.batch * kv_heads + block.kv_head, dim);
        let mut own = no_ends(gated);
        let mut here = no_ends(gated);
        let mut next = no_ends(gated);
        args.read(base, group.first / TILE, &mut own, dim);
        args.read(base, column / TILE + 1, &mut here, dim);
        args.read(base, column / TILE + 1, &mut next, dim);
        let factors = factors_of_operands(gated, config.warps);
        let sum_factors = factors_of_sums(gated, config.warps);
        GatedDq { base, own, here, next, factors, sum_factors, gated }
    }

    fn start_scores_of_dq(
        state: &mut GatedDq,
        s: &mut Accumulator,
        q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: KernelConfig,
    ) {
        let gated = state.gated;
        let (rows, steps) = comptime!((config.rows(), config.padded_head_dim / 16));
        let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
        let mut q = load_a_frags(&def, q_tile, warp * 16, steps, rows);
        rescale(&mut q, &state.own, &state.next, &mut state.factors, warp, gated);
        start_abt(&q, k_tile, at, s, fresh, comptime!(config.tile / 8));
    }

    fn begin_tile_of_dq(
        state: &mut GatedDq,
        args: &Gates,
        warp: usize,
        next: usize,
        ahead: bool,
        #[comptime] config: KernelConfig,
    ) {
        let gated = state.gated;
        let sum_factors = powers::<f32>(&state.next, &state.here, gated);
        stage_to_smem::<f32, Const<2>>(
            &mut state.sum_factors,
            &sum_factors,
            warp,
            comptime!(gated * 8),
        );
        copy(&state.next, &mut state.here, gated);
        if ahead {
            args.read(state.base, next / TILE + 1, &mut state.next, config.padded_head_dim);
        }
    }

    fn rescale_dq(
        state: &GatedDq,
        dq: &mut Accumulator,
        warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
        let gated = state.gated;
        scale_columns(dq, &state.sum_factors, warp * comptime!(gated * 8), gated);
    }

    fn dkv(
        args: &Gates,
        _problem: &ProblemShape,
        batch_kv_head: usize,
        column: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) -> GatedDkv {
        let dim = config.padded_head_dim;
        let gated = args.gated;
        let base = args.base(batch_kv_head, dim);
        let mut ends = no_ends(gated);
        // Past the last key there is no tile.
        args.read(base, min(column / TILE + 1, args.rows as usize - 1), &mut ends, dim);
        let mut own = kept_ends(gated, config.warps);
        keep(&ends, &mut own, warp, gated);
        let factors = factors_of_operands(gated, config.warps);
        let sum_factors = factors_of_sums(gated, config.warps);
        let (here, next) = (kept_ends(gated, config.warps), no_ends(gated));
        GatedDkv { base, column, own, here, next, factors, sum_factors, gated }
    }

    fn read_queries(
        state: &mut GatedDkv,
        args: &Gates,
        first_query: usize,
        warp: usize,
        #[comptime] first: bool,
        #[comptime] config: KernelConfig,
    ) {
        // Queries before all of the warpgroup's keys leave dk as it is.
        let tile = max(first_query, state.column) / TILE;
        args.read(state.base, tile, &mut state.next, config.padded_head_dim);
        if first {
            keep(&state.next, &mut state.here, warp, state.gated);
        }
    }

    fn begin_tile_of_dkv(state: &mut GatedDkv, warp: usize, #[comptime] _config: KernelConfig) {
        let gated = state.gated;
        let pairs = comptime!(gated * 8);
        let factors = powers::<bf16>(&state.next, &take(&state.own, warp, gated), gated);
        let sum_factors = powers::<f32>(&take(&state.here, warp, gated), &state.next, gated);
        stage_to_smem::<bf16, Const<2>>(&mut state.factors, &factors, warp, pairs);
        stage_to_smem::<f32, Const<2>>(&mut state.sum_factors, &sum_factors, warp, pairs);
        keep(&state.next, &mut state.here, warp, gated);
    }

    fn start_scores_of_dkv(
        state: &mut GatedDkv,
        s: &mut Accumulator,
        k_tile: &SharedMemory<Chunk>,
        q_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) {
        let gated = state.gated;
        let dim = config.padded_head_dim;
        let rows = comptime!(config.rows());
        // With 128 channels, one panel after the other: k takes fewer registers.
        let parts = comptime!(if dim == 2 * PANEL_DIM { 2usize } else { 1usize });
        let steps = comptime!(dim / 16 / parts);
        let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
        #[unroll]
        for part in 0..parts {
            let row = warp * 16 + comptime!(part * rows);
            let mut k = load_a_frags(&def, k_tile, row, steps, rows);
            let scaled = comptime!(gated.saturating_sub(part * steps).min(steps));
            let factors = warp * comptime!(gated * 8) + comptime!(part * steps * 8);
            scale_a_frags(&mut k, &state.factors, factors, scaled);
            let at = at + comptime!(part * config.tile * PANEL);
            start_abt(&k, q_tile, at, s, comptime!(part == 0), comptime!(config.tile / 8));
            if comptime!(parts > 1) {
                wait(s, 0usize);
            }
        }
    }

    fn rescale_dk(
        state: &GatedDkv,
        dk: &mut Accumulator,
        warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
        let gated = state.gated;
        scale_columns(dk, &state.sum_factors, warp * comptime!(gated * 8), gated);
    }

    fn dq_parts(
        args: &Gates,
        batch_kv_head: usize,
        first_column: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) -> GatedDqParts {
        let dim = config.padded_head_dim;
        let gated = args.gated;
        let base = args.base(batch_kv_head, dim);
        let tile = first_column / TILE;
        let mut first = no_ends(gated);
        let mut ends = no_ends(gated);
        args.read(base, tile + 1, &mut first, dim);
        // Past the last key there is no tile.
        args.read(base, min(tile + 2, args.rows as usize - 1), &mut ends, dim);
        let mut second = kept_ends(gated, config.warps);
        keep(&ends, &mut second, warp, gated);
        let mut to_second = factors_of_sums(gated, config.warps);
        let factors = powers::<f32>(&ends, &first, gated);
        stage_to_smem::<f32, Const<2>>(&mut to_second, &factors, warp, comptime!(gated * 8));
        let (to_own, own) = (factors_of_sums(gated, config.warps), no_ends(gated));
        let (second_tile, after_first) = (first_column + TILE, false.runtime());
        GatedDqParts { base, second_tile, after_first, second, own, to_second, to_own, gated }
    }

    fn read_queries_of_dq(
        state: &mut GatedDqParts,
        args: &Gates,
        first_query: usize,
        #[comptime] config: KernelConfig,
    ) {
        args.read(state.base, first_query / TILE + 1, &mut state.own, config.padded_head_dim);
    }

    fn begin_dq_part(
        state: &mut GatedDqParts,
        first_query: usize,
        warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
        let gated = state.gated;
        state.after_first = first_query >= state.second_tile;
        let to_own = powers::<f32>(&state.own, &take(&state.second, warp, gated), gated);
        stage_to_smem::<f32, Const<2>>(&mut state.to_own, &to_own, warp, comptime!(gated * 8));
    }

    fn start_dq_part(
        state: &GatedDqParts,
        dq: &mut Accumulator,
        ds_tiles: &SharedMemory<Chunk>,
        ds_at: usize,
        k_tile: &SharedMemory<Chunk>,
        k_at: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) {
        comptime!(assert!(config.rows() == 2 * TILE && config.tile == TILE, "{config:?}"));
        start_panels_atb(ds_tiles, ds_at, k_tile, k_at, dq, true, TILE);
        wait(dq, 0usize);
        scale_part(state, dq, &state.to_second, warp);
        let rows = comptime!(TILE * PANEL);
        start_panels_atb(ds_tiles, ds_at + rows, k_tile, k_at + rows, dq, false, TILE);
    }

    fn finish_dq_part(
        state: &GatedDqParts,
        dq: &mut Accumulator,
        warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
        wait(dq, 1usize);
        scale_part(state, dq, &state.to_own, warp);
    }

    fn decode(
        args: &Gates,
        problem: &ProblemShape,
        batch_kv_head: usize,
        _batch_heads: &Array<usize>,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> GatedDecode {
        let dim = config.padded_head_dim;
        let gated = args.gated;
        let base = args.base(batch_kv_head, dim);
        let mut here = no_ends(gated);
        let mut next = no_ends(gated);
        args.read(base, (problem.keys as usize - 1) / TILE, &mut here, dim);
        args.read(base, column / TILE, &mut next, dim);
        let factors = factors_of_operands(gated, config.warps);
        GatedDecode { base, here, next, factors, gated }
    }

    fn rescale_q(
        state: &mut GatedDecode,
        args: &Gates,
        q: &mut AFragments,
        warp: usize,
        next: usize,
        ahead: bool,
        #[comptime] config: KernelConfig,
    ) {
        let gated = state.gated;
        rescale(q, &state.here, &state.next, &mut state.factors, warp, gated);
        copy(&state.next, &mut state.here, gated);
        if ahead {
            args.read(state.base, next / TILE, &mut state.next, config.padded_head_dim);
        }
    }
}

/// The row of E that keys of a tile are relative to, counted from the row of the tile's start.
const fn anchor(from_starts: bool) -> usize {
    if from_starts { 0 } else { 1 }
}
