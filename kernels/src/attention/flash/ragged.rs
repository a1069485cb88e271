//! Cached keys and values of heads that hold different numbers of tokens.

use burn::tensor::{DType, Int, Tensor, TensorData};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::cache_buffer::{CacheBuffer, GRANULE};
use crate::Cuda;
use crate::backend::tensor;
use crate::cuda::{CudaTensor, buffer, contiguous, empty, reshaped, unshare, zeros};
use crate::tile::{CHUNK, Chunk};

/// Keys and values in bf16 of which each head of v in each sequence, with the heads of k that share it, holds the
/// tokens from its own first one up to the newest, which is the same for all.
///
/// Heads lie one after the other in the buffers. Positions count from the first token that any head holds.
#[derive(Clone, Debug)]
pub struct RaggedKv {
    /// `[1, 1, rows, head_dim]`
    keys: CudaTensor,
    /// `[1, 1, rows, value_dim]`
    values: CudaTensor,
    /// Where the heads' rows are.
    layout: Layout,
    /// For each head of k the row of position 0 in `keys` and in `values`, 32-bit integers `[batch · k heads, 2]`; it
    /// may be below 0, as only later positions are held.
    bases: CudaTensor,
    /// The first position that each query head sees, 32-bit integers `[batch, query heads]`.
    first_keys: CudaTensor,
}

/// The tokens that heads hold, and those there is room for.
#[derive(Clone, Debug)]
struct Layout {
    batch: usize,
    /// Heads of q, k and v.
    heads: [usize; 3],
    /// The first position of each head of v, `[batch · v heads]`.
    firsts: Vec<usize>,
    /// The position of the next token.
    end: usize,
    /// Every head has room for positions below this one.
    capacity: usize,
}

impl Layout {
    /// With positions counted from the first one held, and room for half as many tokens as heads hold on average.
    fn new(batch: usize, heads: [usize; 3], firsts: &[usize], end: usize) -> Self {
        let least = firsts.iter().min().expect("a head");
        let firsts: Vec<_> = firsts.iter().map(|first| first - least).collect();
        let end = end - least;
        let held: usize = firsts.iter().map(|first| end - first).sum();
        let room = (held / firsts.len() / 2).max(1).next_multiple_of(GRANULE);
        Layout { batch, heads, firsts, end, capacity: end + room }
    }

    /// Heads of k per head of v.
    fn share(&self) -> usize {
        self.heads[1] / self.heads[2]
    }

    /// The row of position 0 of each head, where each of v's heads has `share`; then all rows.
    fn bases(&self, share: usize) -> (Vec<i64>, usize) {
        let mut rows = 0;
        let firsts = self.firsts.iter().flat_map(|first| std::iter::repeat_n(*first, share));
        let bases = firsts.map(|first| {
            let base = rows as i64 - first as i64;
            rows += self.capacity - first;
            base
        });
        (bases.collect(), rows)
    }
}

impl RaggedKv {
    /// The tokens of `k`, `[batch, k heads, tokens, head_dim]`, and `v`, `[batch, v heads, tokens, value_dim]`, from
    /// position `firsts`, `[batch · v heads]`, on, for `heads` of q.
    pub fn new(heads: usize, [k, v]: [&CacheBuffer; 2], firsts: &[usize]) -> Self {
        let [batch, k_heads, ..]: [usize; 4] = k.buffer().meta.shape().dims();
        let heads = [heads, k_heads, v.buffer().meta.shape()[1]];
        let layout = Layout::new(batch, heads, firsts, k.rows());
        let rows_of = |x: &CacheBuffer, heads| {
            (0..batch * heads).map(|head| head as i64 * i64::from(x.capacity())).collect()
        };
        let from = [rows_of(k, heads[1]), rows_of(v, heads[2])];
        Self::moved([k.buffer(), v.buffer()], from, k.rows() - layout.end, layout)
    }

    /// The tokens of `layout` from other buffers, in which the heads' position 0 is at the rows `from`, and where
    /// `dropped` positions came before those of `layout`.
    fn moved(
        [keys, values]: [&CudaTensor; 2],
        from: [Vec<i64>; 2],
        dropped: usize,
        layout: Layout,
    ) -> Self {
        let share = layout.share();
        let ((k_bases, k_rows), (v_bases, v_rows)) = (layout.bases(share), layout.bases(1));
        let moved = |x: &CudaTensor, from: Vec<i64>, to: &[i64], rows, share| {
            let new = zeros(x, &[1, 1, rows, channels(x)], x.dtype);
            let spans = from.iter().zip(to).enumerate().map(|(head, (&from, &to))| Span {
                first: layout.firsts[head / share] as i64,
                from: from + dropped as i64,
                to,
            });
            copy_rows([x, &new], spans, layout.end, None);
            new
        };
        let bases = k_bases.iter().enumerate().flat_map(|(k, base)| [*base, v_bases[k / share]]);
        let Layout { batch, heads: [heads, ..], ref firsts, .. } = layout;
        let group = batch * heads / firsts.len();
        let first_keys = firsts.iter().flat_map(|first| std::iter::repeat_n(*first as i64, group));
        RaggedKv {
            keys: moved(keys, from[0].clone(), &k_bases, k_rows, share),
            values: moved(values, from[1].clone(), &v_bases, v_rows, 1),
            bases: numbers(keys, bases, [k_bases.len(), 2]),
            first_keys: numbers(keys, first_keys, [batch, heads]),
            layout,
        }
    }

    /// Keeps the tokens from `firsts`, `[batch · v heads]`, on.
    pub fn keep(&mut self, firsts: &[usize]) {
        let Layout { batch, heads, end, .. } = self.layout;
        let layout = Layout::new(batch, heads, firsts, end);
        let from = [self.layout.share(), 1].map(|share| self.layout.bases(share).0);
        *self = Self::moved([&self.keys, &self.values], from, end - layout.end, layout);
    }

    /// The tokens in buffers in which all heads hold the same ones, with room for `new` more. Where a head did not hold
    /// a token, its key is 0 and its value that of the head in `means`, `[batch · v heads, value_dim]`.
    pub fn to_even(&self, means: &CudaTensor, new: usize) -> [CacheBuffer; 2] {
        let Layout { batch, heads: [_, k_heads, v_heads], end, .. } = self.layout;
        let even = |x: &CudaTensor, heads, share, fill: Option<&CudaTensor>| {
            let mut even = CacheBuffer::new(x, [batch, heads, channels(x)], x.dtype, end + new);
            even.add(end);
            let from = self.layout.bases(share).0;
            let spans = from.into_iter().enumerate().map(|(head, from)| Span {
                first: self.layout.firsts[head / share] as i64,
                from,
                to: head as i64 * i64::from(even.capacity()),
            });
            copy_rows([x, even.buffer()], spans, end, fill);
            even
        };
        let share = self.layout.share();
        [even(&self.keys, k_heads, share, None), even(&self.values, v_heads, 1, Some(means))]
    }

    /// Adds an uninitialised token, which the caller writes; afterwards the buffers are not shared.
    pub fn add(&mut self) {
        if self.layout.end == self.layout.capacity {
            self.keep(&self.layout.firsts.clone());
        }
        unshare(&mut self.keys);
        unshare(&mut self.values);
        self.layout.end += 1;
    }

    /// The position of the next token.
    pub fn end(&self) -> usize {
        self.layout.end
    }

    /// The first position of each head of v, `[batch · v heads]`.
    pub fn firsts(&self) -> &[usize] {
        &self.layout.firsts
    }

    /// Elements of the buffers.
    pub fn elements(&self) -> usize {
        [&self.keys, &self.values].map(|x| x.meta.shape().num_elements()).iter().sum()
    }

    /// k and v, `[1, 1, rows, channels]`.
    pub fn buffers(&self) -> [&CudaTensor; 2] {
        [&self.keys, &self.values]
    }

    /// For each head of k the rows of position 0 in the [`buffers`](Self::buffers), `[batch · k heads, 2]`.
    pub fn bases(&self) -> &CudaTensor {
        &self.bases
    }

    /// The first position that each query head sees, `[batch, heads]`.
    pub fn first_keys(&self) -> &CudaTensor {
        &self.first_keys
    }

    /// Heads of k and of v, and positions.
    pub(super) fn dims(&self) -> [usize; 3] {
        let [_, k_heads, v_heads] = self.layout.heads;
        [k_heads, v_heads, self.layout.end]
    }

    /// The sums of each head's values before position `until`, `[batch · v heads, value_dim]` in f32.
    pub fn sums(&self, until: &[usize]) -> Tensor<Cuda, 2> {
        sums(&self.values, &self.layout.bases(1).0, &self.layout.firsts, until)
    }
}

/// The sums of each head's values before position `until`, `[batch · heads, value_dim]` in f32.
pub fn sums_of_even(values: &CacheBuffer, until: &[usize]) -> Tensor<Cuda, 2> {
    let bases = (0..until.len()).map(|head| head as i64 * i64::from(values.capacity()));
    sums(values.buffer(), &bases.collect::<Vec<_>>(), &vec![0; until.len()], until)
}

/// Channels of rows `[…, channels]`.
fn channels(x: &CudaTensor) -> usize {
    x.meta.shape()[3]
}

/// 32-bit integers of `shape` on the device of `like`.
///
/// # Panics
/// From 2³¹ on.
fn numbers(like: &CudaTensor, numbers: impl Iterator<Item = i64>, shape: [usize; 2]) -> CudaTensor {
    let small = |x| i32::try_from(x).expect("caches of fewer than 2^31 rows");
    // Made as one row, because burn may pad rows.
    let data = TensorData::new(numbers.map(small).collect::<Vec<_>>(), [shape[0] * shape[1]]);
    let row = Tensor::<Cuda, 1, Int>::from_data(data, (&like.device, DType::I32));
    reshaped(&row.into_primitive(), &shape)
}

/// Positions of a head to copy: from `first` on.
struct Span {
    first: i64,
    /// The row of position 0 in the old buffer.
    from: i64,
    /// The row of position 0 in the new one.
    to: i64,
}

/// Copies the positions of each head before `end`; with `fill`, `[heads, channels]`, those before a head's first one
/// become its row of it.
///
/// # Panics
/// From 2³¹ rows on.
fn copy_rows(
    [from, to]: [&CudaTensor; 2],
    spans: impl ExactSizeIterator<Item = Span>,
    end: usize,
    fill: Option<&CudaTensor>,
) {
    let (heads, chunks) = (spans.len(), channels(from) / CHUNK);
    for x in [from, to] {
        let rows = x.meta.shape().num_elements() / channels(x);
        assert!(i32::try_from(rows).is_ok(), "a cache of {rows} rows, 2^31 or more");
    }
    let spans = spans.flat_map(|Span { first, from, to }| [first, from, to]).collect::<Vec<_>>();
    let spans = numbers(from, spans.into_iter(), [heads, 3]);
    let fill = fill.map(contiguous);
    let filled = fill.is_some();
    // SAFETY: a unit writes one chunk of a row that the buffers hold.
    unsafe {
        copy::launch_unchecked::<CudaRuntime>(
            &from.client,
            CubeCount::Static((end * chunks).div_ceil(UNITS).min(BLOCKS) as u32, heads as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            buffer(from, CHUNK),
            buffer(to, CHUNK),
            buffer(&spans, 1),
            fill.as_ref().map(|x| buffer(x, CHUNK)).into(),
            end as u32,
            chunks,
            filled,
        );
    }
}

/// Units of a block.
const UNITS: usize = 256;

/// Most blocks that copy the rows of a head.
const BLOCKS: usize = 64;

/// Blocks that sum the rows of a head.
const SPLITS: usize = 4;

/// The sums of the rows of each head from `firsts` to before `until`, where `bases` are the rows of position 0.
fn sums(values: &CudaTensor, bases: &[i64], firsts: &[usize], until: &[usize]) -> Tensor<Cuda, 2> {
    let (heads, channels) = (bases.len(), channels(values));
    let rows = bases.iter().zip(firsts).zip(until);
    let rows = rows.flat_map(|((base, &first), &until)| [base + first as i64, base + until as i64]);
    let rows = numbers(values, rows, [heads, 2]);
    let lanes = UNITS / (channels / CHUNK);
    let parts = empty(values, &[SPLITS * lanes, heads, channels], DType::F32);
    // SAFETY: a unit reads rows that the buffer holds, and writes one chunk of the partial sums.
    unsafe {
        sum_rows::launch_unchecked::<CudaRuntime>(
            &values.client,
            CubeCount::Static(SPLITS as u32, heads as u32, 1),
            CubeDim::new_1d(UNITS as u32),
            buffer(values, CHUNK),
            buffer(&rows, 1),
            buffer(&parts, 1),
            channels / CHUNK,
        );
    }
    tensor::<Cuda, 3>(parts).sum_dim(0).reshape([heads, channels])
}

/// See [`copy_rows`].
///
/// Grid: blocks that share a head's rows, heads.
#[cube(launch_unchecked, address_type = "u64")]
fn copy(
    from: &Array<Chunk>,
    to: &mut Array<Chunk>,
    spans: &Array<i32>,
    fill: &ComptimeOption<Array<Chunk>>,
    end: u32,
    #[comptime] chunks: usize,
    #[comptime] filled: bool,
) {
    let head = CUBE_POS_Y as usize;
    let first = spans[head * 3];
    let mut at = CUBE_POS_X as usize * CUBE_DIM as usize + UNIT_POS as usize;
    if !filled {
        at += usize::cast_from(first) * chunks;
    }
    while at < end as usize * chunks {
        let (position, chunk) = ((at / chunks) as i32, at % chunks);
        let written = usize::cast_from(spans[head * 3 + 2] + position) * chunks + chunk;
        if position >= first {
            let read = usize::cast_from(spans[head * 3 + 1] + position) * chunks + chunk;
            to[written] = from[read];
        } else if filled {
            to[written] = fill.as_ref().unwrap()[head * chunks + chunk];
        }
        at += CUBE_COUNT_X as usize * CUBE_DIM as usize;
    }
}

/// Sums of rows: those of each lane of each block, `[blocks · lanes, heads, channels]`.
///
/// - `rows`: the first row of each head, and the one after its last, `[heads, 2]`
///
/// Grid: blocks that share a head's rows, heads.
#[cube(launch_unchecked, address_type = "u64")]
fn sum_rows(
    values: &Array<Chunk>,
    rows: &Array<i32>,
    parts: &mut Array<f32>,
    #[comptime] chunks: usize,
) {
    let lanes = comptime!(UNITS / chunks);
    let unit = UNIT_POS as usize;
    let (lane, chunk) = (unit / chunks, unit % chunks);
    if lane < lanes {
        let (head, heads) = (CUBE_POS_Y as usize, CUBE_COUNT_Y as usize);
        let part = CUBE_POS_X as usize * lanes + lane;
        let end = usize::cast_from(rows[head * 2 + 1]);
        let mut row = usize::cast_from(rows[head * 2]) + part;
        let mut sum = Array::<f32>::new(CHUNK);
        #[unroll]
        for e in 0..CHUNK {
            sum[e] = 0f32;
        }
        while row < end {
            let chunk_of_row = values[row * chunks + chunk];
            #[unroll]
            for e in 0..CHUNK {
                sum[e] += f32::cast_from(chunk_of_row[e]);
            }
            row += comptime!(SPLITS * lanes);
        }
        let to = ((part * heads + head) * chunks + chunk) * CHUNK;
        #[unroll]
        for e in 0..CHUNK {
            parts[to + e] = sum[e];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_lie_one_after_the_other_from_their_first_positions_on() {
        // Heads of v hold the positions from 192, 64 and 128 on, and have two heads of k each.
        let layout = Layout::new(3, [4, 2, 1], &[192, 64, 128], 200);
        assert_eq!(
            (&layout.firsts[..], layout.end, layout.capacity),
            (&[128, 0, 64][..], 136, 200)
        );
        assert_eq!(layout.bases(1), (vec![-128, 72, 208], 408));
        assert_eq!(layout.bases(layout.share()), (vec![-128, -56, 144, 344, 480, 616], 816));
    }
}
