//! A scalar decay of scores, learned per token and head: its gate, its prefix sums, and the flash hook that adds it
//! to scores as biases. With c_t = Σ_{s ≤ t} ℓ_s, the decay from key j to query i is
//! c_i − c_j; softmax only needs the part that differs between keys.
//!
//! c may reach millions while differences of a thousandth still matter. So it is stored in two parts: sums
//! within spans of 64 tokens in f32, and sums before each span as the sum of two f32 numbers ([`split`]). The
//! scores of a warpgroup's queries are relative to the span in which the queries begin.

// Device code has no `div_ceil` or `is_multiple_of`.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]

mod biases;
mod cache;
mod gate;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

pub use self::biases::{DecayBiases, OptionalDecay};
pub use self::cache::DecaySumsCache;
pub use self::gate::{forget_gate, log_decay};
use crate::attention::flash::{Strides, as_u32, strides};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::prefix_sum::cuda::prefix_sum;
use crate::ops::prefix_sum::kernel::scan;
use crate::tile::Pair;

/// Tokens per span.
pub const SPAN: usize = 64;

/// Threads per block of [`prefix_sums`].
pub const THREADS: usize = 1024;

/// A learned decay's prefix sums, see [`prefix_sums`]: `[batch, heads, tokens]` and
/// `[batch, heads, spans + 1, 2]`; the buffers may be larger.
#[derive(Clone, Debug)]
pub struct DecaySums {
    /// Σ ℓ within spans.
    pub within: CudaTensor,
    /// Σ ℓ before spans, each as two numbers.
    pub before: CudaTensor,
}

impl DecaySums {
    /// The prefix sums of ℓ, `[batch, heads, keys]` in f32.
    pub fn new(log_decay: &CudaTensor) -> Self {
        let [batch, heads, keys]: [usize; 3] = log_decay.meta.shape().dims();
        let within = empty(log_decay, &[batch, heads, keys], DType::F32);
        let spans = keys.div_ceil(SPAN);
        let before = empty(log_decay, &[batch, heads, spans + 1, 2], DType::F32);
        let decay = DecaySums { within, before };
        decay.add(log_decay, 0);
        decay
    }

    /// Appends the sums of tokens with ℓ `[batch, heads, tokens]` after the `held` earlier tokens.
    pub fn add(&self, log_decay: &CudaTensor, held: usize) {
        let [batch, heads, tokens]: [usize; 3] = log_decay.meta.shape().dims();
        // SAFETY: a block handles one of the rows, and stays within its tokens.
        unsafe {
            prefix_sums::launch_unchecked::<CudaRuntime>(
                &log_decay.client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(THREADS as u32),
                buffer(log_decay, 1),
                self.launch(),
                heads as u32,
                tokens as u32,
                held as u32,
                strides(log_decay),
            );
        }
    }

    /// The launch argument.
    pub fn launch(&self) -> SumsLaunch<CudaRuntime> {
        let stride = |x: &CudaTensor| as_u32(x.meta.strides()[1]);
        let (within, before) = (&self.within, &self.before);
        SumsLaunch::new(buffer(within, 1), buffer(before, 2), stride(within), stride(before) / 2)
    }
}

/// The gradient of ℓ, `[batch, heads, tokens]`, from Σ_j dS_ij of each query and Σ_i dS_ij of each key, likewise:
/// ℓ_t enters the scores of all queries at t or later with keys before t.
pub fn gradient(rows: CudaTensor, columns: CudaTensor) -> CudaTensor {
    prefix_sum(&burn_cubecl::ops::numeric::sub(rows, columns), true).expect("f32 has prefix sums")
}

/// A learned decay's prefix sums as a kernel argument.
#[derive(CubeType, CubeLaunch)]
pub struct Sums {
    /// Σ ℓ within spans.
    pub within: Array<f32>,
    /// Σ ℓ before spans, each [`split`].
    pub before: Array<Pair>,
    /// The stride between rows of `within`.
    pub within_stride: u32,
    /// The stride between rows of `before`.
    pub before_stride: u32,
}

#[cube]
impl Sums {
    /// Σ ℓ before the span of `position`, [`split`].
    pub fn before_span(&self, row: usize, position: usize) -> Pair {
        self.before[row * self.before_stride as usize + position / SPAN]
    }

    /// Σ ℓ from the start of its span up to and including the token at `position`.
    pub fn within_span(&self, row: usize, position: usize) -> f32 {
        self.within[row * self.within_stride as usize + position]
    }

    /// Σ ℓ up to and including the token at `position`.
    pub fn at(&self, row: usize, position: usize) -> f64 {
        whole(self.before_span(row, position)) + f64::cast_from(self.within_span(row, position))
    }

    /// Σ ℓ up to and including the token at `position`, whose own ℓ is `log_decay`, from the sums up to the token
    /// before it. If `write`, writes the token's sums.
    pub fn append(&mut self, row: usize, position: usize, log_decay: f32, write: bool) -> f64 {
        let within_at = row * self.within_stride as usize + position;
        let before_at = row * self.before_stride as usize + position / SPAN;
        let mut own = log_decay;
        let mut start = f64::cast_from(0f32);
        if position % SPAN != 0 {
            own += self.within[within_at - 1];
        }
        if position > 0 {
            start = whole(self.before[before_at]);
        }
        let sum = start + f64::cast_from(own);
        if write {
            self.within[within_at] = own;
            self.before[before_at + 1] = split(sum);
            if position == 0 {
                self.before[before_at] = split(start);
            }
        }
        sum
    }
}

/// Σ ℓ within spans, up to and including each token, and Σ ℓ before each span, for tokens that follow the
/// `held` ones.
///
/// - `log_decay`: `[batch, heads, tokens]` with `strides`
/// - `sums`: within spans `[batch, heads, held + tokens]`, before them `[batch, heads, spans + 1]`,
///   [`split`]; the last element is the sum over all tokens
///
/// Grid: batch · heads.
#[cube(launch_unchecked)]
pub fn prefix_sums(
    log_decay: &Array<f32>,
    sums: &mut Sums,
    heads: u32,
    tokens: u32,
    held: u32,
    strides: Strides,
) {
    let row = CUBE_POS_X as usize;
    let (heads, held) = (heads as usize, held as usize);
    let end = held + tokens as usize;
    let base = row / heads * strides.batch as usize + row % heads * strides.head as usize;
    let within_at = row * sums.within_stride as usize;
    let before_at = row * sums.before_stride as usize;
    let (first_span, spans) = (held / SPAN, (end + SPAN - 1) / SPAN);
    let lane = UNIT_POS_PLANE as usize;

    // 1. Within spans, one warp per span; and the sum of each span.
    if (held == 0) & (UNIT_POS == 0) {
        sums.before[before_at] = Pair::cast_from(0f32);
    }
    let mut span = first_span + UNIT_POS as usize / 32;
    while span < spans {
        let first = span * SPAN + lane * 2;
        let mut own = 0f32;
        if span * SPAN < held {
            own = sums.within[within_at + held - 1];
        }
        let mut one = 0f32;
        let mut two = 0f32;
        if (first >= held) & (first < end) {
            one = log_decay[base + (first - held) * strides.token as usize];
        }
        if (first + 1 >= held) & (first + 1 < end) {
            two = log_decay[base + (first + 1 - held) * strides.token as usize];
        }
        let through = scan::<f32>(one + two);
        let up_to = own + select(lane == 0, 0f32, plane_shuffle_up(through, 1u32));
        if (first >= held) & (first < end) {
            sums.within[within_at + first] = up_to + one;
        }
        if (first + 1 >= held) & (first + 1 < end) {
            sums.within[within_at + first + 1] = own + through;
        }
        if lane == 31 {
            sums.before[before_at + span + 1] = split(f64::cast_from(own + through));
        }
        span += comptime!(THREADS / 32);
    }
    sync_cube();

    // 2. Before spans: one warp scans the sums of spans.
    if UNIT_POS < 32 {
        let mut sum = whole(sums.before[before_at + first_span]);
        for group in 0..(spans - first_span + 31) / 32 {
            let span = first_span + group * 32 + lane;
            let at = before_at + min(span, spans - 1) + 1;
            let through = scan::<f64>(whole(sums.before[at]));
            if span < spans {
                sums.before[at] = split(sum + through);
            }
            sum += plane_shuffle(through, 31u32);
        }
    }
}

/// `x` as the sum of two f32 numbers: the nearest to it, and the rest. At least 48 bits of `x` remain.
///
/// The attention kernels subtract such sums with [`difference`]: an f64 subtraction waits until the tensor
/// cores are done with the products before it.
#[cube]
pub fn split(x: f64) -> Pair {
    let nearest = f32::cast_from(x);
    let mut pair = Pair::empty();
    pair[0] = nearest;
    pair[1] = f32::cast_from(x - f64::cast_from(nearest));
    pair
}

/// The sum that [`split`] took apart.
#[cube]
pub fn whole(x: Pair) -> f64 {
    f64::cast_from(x[0]) + f64::cast_from(x[1])
}

/// x − y of sums that are [`split`].
#[cube]
pub fn difference(x: Pair, y: Pair) -> f32 {
    (x[0] - y[0]) + (x[1] - y[1])
}

/// A key's bias, (between − within) · factor: `between` is Σ ℓ from the start of the key's span to the start
/// of the span that biases are relative to.
#[cube]
pub fn bias(between: f32, within: f32, factor: f32) -> f32 {
    (between - within) * factor
}
