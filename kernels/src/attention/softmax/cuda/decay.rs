//! A learned decay as a bias of keys. With c_t = Σ_{s ≤ t} ℓ_s, the decay from key j to query i is
//! c_i − c_j, of which softmax only needs what differs from key to key.
//!
//! c may reach millions where decays still matter by thousandths. So it is kept in two parts: sums
//! within spans of 64 tokens in f32, and before each span in f64. The queries of a warpgroup take their
//! scores relative to the span in which they begin.
//!
//! The accumulators of scores start from biases over the scale of scores. Tensor cores then lose digits
//! of a bias: by emulation some 3e-7 of it, so that scores are off by 3e-3 where a key that still counts
//! lies 10,000 (natural logarithm) from the span's beginning. Only decays below −100 a token, token after
//! token, bring that about.

use cubecl::prelude::*;

use crate::ops::cuda::kernels::prefix_sum::scan;
use crate::tile::LOG2_E;

/// Tokens of a span.
pub const SPAN: usize = 64;

/// Threads of a block of [`prefix_sums`].
pub const THREADS: usize = 1024;

/// Where the elements of `[batch, heads, tokens]` lie.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Steps {
    /// From one sequence to the next.
    pub batch: u32,
    /// From one head to the next.
    pub head: u32,
    /// From one token to the next.
    pub token: u32,
}

/// Σ ℓ within spans, up to and with each token, and before each span.
///
/// - `log_decay`: `[batch, heads, tokens]`, placed by `steps`
/// - `within`: `[batch, heads, tokens]`
/// - `before`: `[batch, heads, spans]`
///
/// Grid: batch · heads.
#[cube(launch_unchecked)]
pub fn prefix_sums(
    log_decay: &Array<f32>,
    within: &mut Array<f32>,
    before: &mut Array<f64>,
    heads: u32,
    tokens: u32,
    steps: Steps,
) {
    let row = CUBE_POS_X as usize;
    let (heads, tokens) = (heads as usize, tokens as usize);
    let base = row / heads * steps.batch as usize + row % heads * steps.head as usize;
    let spans = (tokens + SPAN - 1) / SPAN;
    let lane = UNIT_POS_PLANE as usize;

    // 1. Within spans, a warp for each; what a span adds up to.
    let mut span = UNIT_POS as usize / 32;
    while span < spans {
        let first = span * SPAN + lane * 2;
        let mut one = 0f32;
        let mut two = 0f32;
        if first < tokens {
            one = log_decay[base + first * steps.token as usize];
        }
        if first + 1 < tokens {
            two = log_decay[base + (first + 1) * steps.token as usize];
        }
        let through = scan::<f32>(one + two);
        let up_to = select(lane == 0, 0f32, plane_shuffle_up(through, 1u32));
        if first < tokens {
            within[row * tokens + first] = up_to + one;
        }
        if first + 1 < tokens {
            within[row * tokens + first + 1] = through;
        }
        if lane == 31 {
            before[row * spans + span] = f64::cast_from(through);
        }
        span += comptime!(THREADS / 32);
    }
    sync_cube();

    // 2. Sums before spans, by one warp.
    if UNIT_POS < 32 {
        let mut sum = f64::cast_from(0f32);
        for group in 0..(spans + 31) / 32 {
            let span = group * 32 + lane;
            let at = row * spans + min(span, spans - 1);
            let through = scan::<f64>(before[at]);
            let up_to = plane_shuffle_up(through, 1u32);
            if span < spans {
                before[at] = sum + select(lane == 0, f64::cast_from(0f32), up_to);
            }
            sum += plane_shuffle(through, 31u32);
        }
    }
}

/// Σ ℓ before the span of `position`, in the row `row` of `before`.
#[cube]
pub fn sum_before(before: &Array<f64>, row: usize, keys: usize, position: usize) -> f64 {
    before[row * ((keys + SPAN - 1) / SPAN) + position / SPAN]
}

/// Σ ℓ from before the span of `column` up to where the sum is `own`; that of the last key's span for
/// columns past it.
#[cube]
pub fn sum_between(own: f64, before: &Array<f64>, row: usize, keys: usize, column: usize) -> f32 {
    f32::cast_from(own - sum_before(before, row, keys, min(column, keys - 1)))
}

/// The bias of the key at `column`, to base 2, for queries whose scores are relative to a span, where
/// `between` is [`sum_between`] that and the key's; of the last key for those past it.
#[cube]
pub fn bias(between: f32, within: &Array<f32>, row: usize, keys: usize, column: usize) -> f32 {
    (between - within[row * keys + min(column, keys - 1)]) * LOG2_E
}

/// What the biases of a tile's keys are made of. Read a while before it is needed.
#[derive(CubeType)]
pub struct TileSums {
    /// Σ ℓ before each span of the tile.
    before: Array<f64>,
    /// Σ ℓ within them, up to two neighbouring keys.
    within: Array<f32>,
}

#[cube]
impl TileSums {
    /// For tiles of `span` keys.
    pub fn new(#[comptime] span: usize) -> TileSums {
        let pairs = comptime!((span / 2).div_ceil(32));
        TileSums {
            before: Array::<f64>::new(pairs),
            within: Array::<f32>::new(comptime!(2 * pairs)),
        }
    }

    /// Reads those of the tile from `column` on, in the row `row`.
    pub fn read(
        &mut self,
        before: &Array<f64>,
        within: &Array<f32>,
        row: usize,
        keys: usize,
        column: usize,
        #[comptime] span: usize,
    ) {
        #[unroll]
        for i in 0..comptime!((span / 2).div_ceil(32)) {
            let column = column + (i * 32 + UNIT_POS_PLANE as usize) * 2;
            self.before[i] = sum_before(before, row, keys, min(column, keys - 1));
            self.within[i * 2] = within[row * keys + min(column, keys - 1)];
            self.within[i * 2 + 1] = within[row * keys + min(column + 1, keys - 1)];
        }
    }

    /// The keys' biases times `factor`, relative to where the sum is `own`.
    pub fn biases<N2: Size>(
        &self,
        own: f64,
        factor: f32,
        #[comptime] span: usize,
    ) -> Array<Vector<f32, N2>> {
        let pairs = comptime!((span / 2).div_ceil(32));
        let mut biases = Array::<Vector<f32, N2>>::new(pairs);
        #[unroll]
        for i in 0..pairs {
            let between = f32::cast_from(own - self.before[i]);
            let mut pair = Vector::<f32, N2>::empty();
            pair[0] = (between - self.within[i * 2]) * factor;
            pair[1] = (between - self.within[i * 2 + 1]) * factor;
            biases[i] = pair;
        }
        biases
    }
}

/// Lets products of queries and keys start from their keys' biases, which are in `biases`, two by two,
/// from `at` on.
#[cube]
pub fn start_from_biases<NC: Size, N2: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    biases: &SharedMemory<Vector<f32, N2>>,
    at: usize,
    #[comptime] n_keys: usize,
) {
    #[unroll]
    for n in 0..n_keys {
        let bias = biases[at + comptime!(n * 4) + UNIT_POS_PLANE as usize % 4];
        #[unroll]
        for r in 0..2usize {
            let mut pair = Vector::<f32, NC>::empty();
            pair[0] = bias[0];
            pair[1] = bias[1];
            s.index_mut(n)[r] = pair;
        }
    }
}
