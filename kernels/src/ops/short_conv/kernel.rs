//! The short causal depthwise convolution over time.
//!
//! A thread handles a vector of channels over a run of rows, and keeps a window of the last rows. Tap
//! `back` multiplies the row `back` before the current one. A thread reads several rows before it needs the
//! first: a read takes longer than a row's arithmetic.

use cubecl::prelude::*;

use crate::ops::activation::kernel::{silu, silu_slope};

/// Rows per run.
pub const RUN_ROWS: usize = 64;

/// Rows that a thread reads at once, forward and backward.
const ROWS_AHEAD: usize = 8;
const ROWS_AHEAD_BACK: usize = 4;

/// The compile-time configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvConfig {
    /// Taps per channel.
    pub taps: usize,
    /// Whether SiLU follows.
    pub silu: bool,
    /// Whether rows of other documents are excluded.
    pub documents: bool,
}

/// y_t = f(Σ_back w_back · x_{t − back}) within the document.
///
/// - `x`, `y`: `[batch, seq_len, vectors]`
/// - `weight`: `[channels, taps]`, the last tap at distance 0
/// - `documents`: `[batch, seq_len]`, see [`ConvConfig::documents`]
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn forward<E: Float, W: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    weight: &Array<W>,
    documents: &Array<i32>,
    y: &mut Array<Vector<E, N>>,
    batch: u32,
    seq_len: u32,
    vectors: u32,
    #[comptime] config: ConvConfig,
    #[define(E, W)] _dtypes: [StorageType; 2],
) {
    let seq_len = seq_len as usize;
    let vectors = vectors as usize;
    let column = ABSOLUTE_POS % vectors;
    let run = ABSOLUTE_POS / vectors;
    let runs = (seq_len + RUN_ROWS - 1) / RUN_ROWS;
    if run / runs < batch as usize {
        let row0 = run / runs * seq_len; // Of the sequence.
        let first = run % runs * RUN_ROWS;
        let taps = taps::<W, N>(weight, column, config.taps);
        let mut window = before::<E, N>(x, row0, first, column, vectors, config.taps);
        let end = min(first + RUN_ROWS, seq_len);
        let mut t = first;
        while t < end {
            let rows = read::<E, N>(x, row0, t, end, column, vectors, ROWS_AHEAD);
            let reaches = reaches(documents, row0, t, end, ROWS_AHEAD, config);
            #[unroll]
            for i in 0..ROWS_AHEAD {
                push::<N>(&mut window, Vector::cast_from(rows[i]), config.taps);
                let z = convolve::<N>(&taps, &window, reaches[i], config.taps);
                if t + i < end {
                    let at = (row0 + t + i) * vectors + column;
                    y[at] = Vector::cast_from(apply::<N>(z, false, config.silu));
                }
            }
            t += ROWS_AHEAD;
        }
    }
}

/// With z the convolution and dz = dy · f'(z): dx_t = Σ_back w_back · dz_{t + back} within the
/// document, and each run's Σ_t dz_t · x_{t − back}.
///
/// - `parts`: `[batch · runs, taps, vectors]`, in the weight's order of taps
///
/// The rest as in [`forward`].
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn backward<E: Float, W: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    weight: &Array<W>,
    documents: &Array<i32>,
    dy: &Array<Vector<E, N>>,
    dx: &mut Array<Vector<E, N>>,
    parts: &mut Array<Vector<f32, N>>,
    batch: u32,
    seq_len: u32,
    vectors: u32,
    #[comptime] config: ConvConfig,
    #[define(E, W)] _dtypes: [StorageType; 2],
) {
    let seq_len = seq_len as usize;
    let vectors = vectors as usize;
    let column = ABSOLUTE_POS % vectors;
    let run = ABSOLUTE_POS / vectors;
    let runs = (seq_len + RUN_ROWS - 1) / RUN_ROWS;
    if run / runs < batch as usize {
        let row0 = run / runs * seq_len;
        let first = run % runs * RUN_ROWS;
        let last = comptime!(config.taps - 1);
        let taps = taps::<W, N>(weight, column, config.taps);
        let mut window = before::<E, N>(x, row0, first, column, vectors, config.taps);
        // dz of the last rows, and the number of rows that each of them reads.
        let mut slopes = Array::<Vector<f32, N>>::new(config.taps);
        let mut reaches = Array::<u32>::new(config.taps);
        let mut dw = Array::<Vector<f32, N>>::new(config.taps);
        #[unroll]
        for i in 0..config.taps {
            slopes[i] = Vector::cast_from(0f32);
            reaches[i] = 0u32;
            dw[i] = Vector::cast_from(0f32);
        }
        let end = min(first + RUN_ROWS, seq_len);
        let mut group = first;
        while group < end + last {
            let rows = read::<E, N>(x, row0, group, seq_len, column, vectors, ROWS_AHEAD_BACK);
            let upstream = read::<E, N>(dy, row0, group, seq_len, column, vectors, ROWS_AHEAD_BACK);
            let reaches_ahead =
                self::reaches(documents, row0, group, seq_len, ROWS_AHEAD_BACK, config);
            #[unroll]
            for i in 0..ROWS_AHEAD_BACK {
                // 1. dz of row t. Rows past the sequence reach none, so that nothing reads what is there.
                let t = group + i;
                push::<N>(&mut window, Vector::cast_from(rows[i]), config.taps);
                let reach = select(t < seq_len, reaches_ahead[i], 0u32);
                let mut dz = Vector::<f32, N>::cast_from(upstream[i]);
                if config.silu {
                    let z = convolve::<N>(&taps, &window, reach, config.taps);
                    dz *= apply::<N>(z, true, true);
                }
                #[unroll]
                for i in 0..last {
                    slopes[last - i] = slopes[last - 1 - i];
                    reaches[last - i] = reaches[last - 1 - i];
                }
                slopes[0] = dz;
                reaches[0] = reach;

                // 2. The contribution to the taps' gradient, of the run's own rows.
                if t < end {
                    #[unroll]
                    for back in 0..config.taps {
                        if (back as u32) < reach {
                            dw[back] = dw[back] + window[back] * dz;
                        }
                    }
                }

                // 3. dx of the row whose dz are all known now.
                if t >= first + last && t < end + last {
                    let mut sum = Vector::<f32, N>::cast_from(0f32);
                    #[unroll]
                    for back in 0..config.taps {
                        let later = comptime!(last - back);
                        if (back as u32) < reaches[later] {
                            sum += taps[back] * slopes[later];
                        }
                    }
                    dx[(row0 + t - last) * vectors + column] = Vector::cast_from(sum);
                }
            }
            group += ROWS_AHEAD_BACK;
        }
        #[unroll]
        for back in 0..config.taps {
            parts[(run * config.taps + (last - back)) * vectors + column] = dw[back];
        }
    }
}

/// The taps of a vector of channels, by distance.
#[cube]
fn taps<W: Float, N: Size>(
    weight: &Array<W>,
    column: usize,
    #[comptime] taps: usize,
) -> Array<Vector<f32, N>> {
    let mut values = Array::<Vector<f32, N>>::new(taps);
    #[unroll]
    for back in 0..taps {
        let mut tap = Vector::<f32, N>::cast_from(0f32);
        #[unroll]
        for i in 0..N::value() {
            let channel = column * N::value() + i;
            tap[i] = f32::cast_from(weight[channel * taps + (taps - 1 - back)]);
        }
        values[back] = tap;
    }
    values
}

/// The rows before `first`, the nearest first; zeros before the sequence.
#[cube]
fn before<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    row0: usize,
    first: usize,
    column: usize,
    vectors: usize,
    #[comptime] taps: usize,
) -> Array<Vector<f32, N>> {
    let mut window = Array::<Vector<f32, N>>::new(taps);
    #[unroll]
    for back in 0..taps {
        window[back] = Vector::cast_from(0f32);
        if first > back {
            window[back] = Vector::cast_from(x[(row0 + first - 1 - back) * vectors + column]);
        }
    }
    window
}

/// The rows from `t` on; from `end` on, the last one before it.
#[cube]
fn read<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    row0: usize,
    t: usize,
    end: usize,
    column: usize,
    vectors: usize,
    #[comptime] ahead: usize,
) -> Array<Vector<E, N>> {
    let mut rows = Array::<Vector<E, N>>::new(ahead);
    #[unroll]
    for i in 0..ahead {
        rows[i] = x[(row0 + min(t + i, end - 1)) * vectors + column];
    }
    rows
}

/// Shifts the window by one row.
#[cube]
fn push<N: Size>(window: &mut Array<Vector<f32, N>>, row: Vector<f32, N>, #[comptime] taps: usize) {
    let last = comptime!(taps - 1);
    #[unroll]
    for i in 0..last {
        window[last - i] = window[last - 1 - i];
    }
    window[0] = row;
}

/// The numbers of rows from each row backwards in its document, for those that [`read`] reads.
#[cube]
fn reaches(
    documents: &Array<i32>,
    row0: usize,
    t: usize,
    end: usize,
    #[comptime] ahead: usize,
    #[comptime] config: ConvConfig,
) -> Array<u32> {
    let mut reaches = Array::<u32>::new(ahead);
    #[unroll]
    for i in 0..ahead {
        let row = min(t + i, end - 1);
        let mut reach = row as u32 + 1;
        if config.documents {
            let start = max(documents[row0 + row], 0) as u32;
            reach -= min(start, reach);
        }
        reaches[i] = reach;
    }
    reaches
}

#[cube]
fn convolve<N: Size>(
    weight: &Array<Vector<f32, N>>,
    window: &Array<Vector<f32, N>>,
    reach: u32,
    #[comptime] taps: usize,
) -> Vector<f32, N> {
    let mut z = Vector::<f32, N>::cast_from(0f32);
    #[unroll]
    for back in 0..taps {
        if (back as u32) < reach {
            z += weight[back] * window[back];
        }
    }
    z
}

/// f(z), or with `slope` f'(z); without `silu`, f is the identity.
#[cube]
fn apply<N: Size>(
    z: Vector<f32, N>,
    #[comptime] slope: bool,
    #[comptime] with_silu: bool,
) -> Vector<f32, N> {
    let mut out = z;
    if with_silu {
        #[unroll]
        for i in 0..N::value() {
            if slope {
                out[i] = silu_slope(z[i]);
            } else {
                out[i] = silu(z[i]);
            }
        }
    }
    out
}
