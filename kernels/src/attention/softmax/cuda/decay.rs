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

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::{number, steps};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::prefix_sum::kernel::scan;
use crate::tile::write_notes;

/// Tokens of a span.
pub const SPAN: usize = 64;

/// Threads of a block of [`prefix_sums`].
pub const THREADS: usize = 1024;

/// A learned decay's prefix sums, see [`prefix_sums`]: `[batch, heads, tokens]` and
/// `[batch, heads, spans + 1]`, which may have more room than that.
pub struct Decay {
    /// Σ ℓ within spans.
    pub within: CudaTensor,
    /// Σ ℓ before spans.
    pub before: CudaTensor,
}

impl Decay {
    /// Of ℓ, `[batch, heads, keys]` in f32.
    pub fn new(log_decay: &CudaTensor) -> Self {
        let [batch, heads, keys]: [usize; 3] = log_decay.meta.shape().dims();
        let within = empty(log_decay, &[batch, heads, keys], DType::F32);
        let spans = keys.div_ceil(SPAN);
        let before = empty(log_decay, &[batch, heads, spans + 1], DType::F64);
        let decay = Decay { within, before };
        decay.add(log_decay, 0);
        decay
    }

    /// Adds the sums of tokens with ℓ `[batch, heads, tokens]` to those of the `held` before them.
    pub fn add(&self, log_decay: &CudaTensor, held: usize) {
        let [batch, heads, tokens]: [usize; 3] = log_decay.meta.shape().dims();
        // SAFETY: a block handles one of the rows, and stays within its tokens.
        unsafe {
            prefix_sums::launch_unchecked::<CudaRuntime>(
                &log_decay.client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(THREADS as u32),
                buffer(log_decay, 1),
                buffer(&self.within, 1),
                buffer(&self.before, 1),
                heads as u32,
                tokens as u32,
                steps(log_decay),
                self.sums(held),
            );
        }
    }

    /// Where the sums lie, of which `held` tokens' are there.
    pub fn sums(&self, held: usize) -> SumsLaunch<CudaRuntime> {
        let row = |x: &CudaTensor| number(x.meta.strides()[1]);
        SumsLaunch::new(row(&self.within), row(&self.before), number(held))
    }
}

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

/// Where sums lie, and how many tokens they go over already.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sums {
    /// From one row of `within` to the next.
    pub within: u32,
    /// From one row of `before` to the next.
    pub before: u32,
    /// Tokens whose sums are there.
    pub held: u32,
}

#[cube]
impl Sums {
    /// Σ ℓ up to and with the token at `position`.
    pub fn at(&self, row: usize, within: &Array<f32>, before: &Array<f64>, position: usize) -> f64 {
        before[row * self.before as usize + position / SPAN]
            + f64::cast_from(within[row * self.within as usize + position])
    }
}

/// Σ ℓ within spans, up to and with each token, and before each span, of tokens that follow those held.
///
/// - `log_decay`: `[batch, heads, tokens]`, placed by `steps`
/// - `within`: `[batch, heads, held + tokens]`
/// - `before`: `[batch, heads, spans + 1]`; the last is that of all tokens
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
    sums: Sums,
) {
    let row = CUBE_POS_X as usize;
    let (heads, held) = (heads as usize, sums.held as usize);
    let end = held + tokens as usize;
    let base = row / heads * steps.batch as usize + row % heads * steps.head as usize;
    let within_at = row * sums.within as usize;
    let before_at = row * sums.before as usize;
    let (first_span, spans) = (held / SPAN, (end + SPAN - 1) / SPAN);
    let lane = UNIT_POS_PLANE as usize;

    // 1. Within spans, a warp for each; what a span adds up to.
    if (held == 0) & (UNIT_POS == 0) {
        before[before_at] = f64::cast_from(0f32);
    }
    let mut span = first_span + UNIT_POS as usize / 32;
    while span < spans {
        let first = span * SPAN + lane * 2;
        let mut own = 0f32;
        if span * SPAN < held {
            own = within[within_at + held - 1];
        }
        let mut one = 0f32;
        let mut two = 0f32;
        if (first >= held) & (first < end) {
            one = log_decay[base + (first - held) * steps.token as usize];
        }
        if (first + 1 >= held) & (first + 1 < end) {
            two = log_decay[base + (first + 1 - held) * steps.token as usize];
        }
        let through = scan::<f32>(one + two);
        let up_to = own + select(lane == 0, 0f32, plane_shuffle_up(through, 1u32));
        if (first >= held) & (first < end) {
            within[within_at + first] = up_to + one;
        }
        if (first + 1 >= held) & (first + 1 < end) {
            within[within_at + first + 1] = own + through;
        }
        if lane == 31 {
            before[before_at + span + 1] = f64::cast_from(own + through);
        }
        span += comptime!(THREADS / 32);
    }
    sync_cube();

    // 2. Sums before spans, by one warp.
    if UNIT_POS < 32 {
        let mut sum = before[before_at + first_span];
        for group in 0..(spans - first_span + 31) / 32 {
            let span = first_span + group * 32 + lane;
            let at = before_at + min(span, spans - 1) + 1;
            let through = scan::<f64>(before[at]);
            if span < spans {
                before[at] = sum + through;
            }
            sum += plane_shuffle(through, 31u32);
        }
    }
}

/// Σ ℓ before the span of `position`, in the row `row` of `before`.
#[cube]
pub fn sum_before(before: &Array<f64>, row: usize, keys: usize, position: usize) -> f64 {
    before[row * ((keys + SPAN - 1) / SPAN + 1) + position / SPAN]
}

/// A key's bias, (between − within) · factor: `between` is what the sum grows by from before the key's span to
/// where biases are relative to.
#[cube]
pub fn bias(between: f64, within: f32, factor: f32) -> f32 {
    (f32::cast_from(between) - within) * factor
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

    /// Lets products of queries and keys start from their keys' biases times `factor`, relative to where the
    /// sum is `own`. The biases pass through the warp's part of `notes`.
    pub fn start_from_biases<NC: Size, N2: Size>(
        &self,
        s: &mut Sequence<Array<Vector<f32, NC>>>,
        notes: &mut SharedMemory<Vector<f32, N2>>,
        own: f64,
        factor: f32,
        warp: usize,
        #[comptime] span: usize,
    ) {
        let pairs = comptime!((span / 2).div_ceil(32));
        let mut biases = Array::<Vector<f32, N2>>::new(pairs);
        #[unroll]
        for i in 0..pairs {
            let between = own - self.before[i];
            let mut pair = Vector::<f32, N2>::empty();
            pair[0] = bias(between, self.within[i * 2], factor);
            pair[1] = bias(between, self.within[i * 2 + 1], factor);
            biases[i] = pair;
        }
        write_notes::<f32, N2>(notes, &biases, warp, span / 2);
        #[unroll]
        for n in 0..comptime!(span / 8) {
            let place = warp * comptime!(span / 2) + comptime!(n * 4) + UNIT_POS_PLANE as usize % 4;
            let biases = notes[place];
            #[unroll]
            for r in 0..2usize {
                let mut pair = Vector::<f32, NC>::empty();
                pair[0] = biases[0];
                pair[1] = biases[1];
                s.index_mut(n)[r] = pair;
            }
        }
    }
}
