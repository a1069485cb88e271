//! The parts of a level: copies of what the flash kernels read, and sums of what they give.
//!
//! A level's pairs of parts are sequences of their own, `batch` · pairs + pair: queries are the second part, keys
//! the first. Rows past the last token are zero, and their queries see no key.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

use crate::attention::flash::{Heads, as_u32};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::{THREADS, blocks, dim, elements};
use crate::tile::{CHUNK, Chunk, RowStrides};

/// The parts of `part` tokens each into which sequences are cut.
#[derive(Clone, Copy, Debug)]
pub struct Level {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Tokens of a part, 64 or twice as many as at the level below.
    pub part: usize,
}

/// Which part of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// Keys and values.
    First,
    /// Queries.
    Second,
}

impl Level {
    /// All levels from parts of `part` tokens on, for sequences of `tokens`.
    pub fn all(batch: usize, tokens: usize, part: usize) -> Vec<Level> {
        let parts = std::iter::successors(Some(part), |part| Some(2 * part));
        parts.take_while(|part| *part < tokens).map(|part| Level { batch, tokens, part }).collect()
    }

    /// Parts of a sequence; the last may be short.
    pub fn parts(&self) -> usize {
        self.tokens.div_ceil(self.part)
    }

    /// Pairs of a sequence; the second part of the last may be short.
    pub fn pairs(&self) -> usize {
        self.parts() / 2
    }

    /// Pairs of all sequences.
    pub fn sequences(&self) -> usize {
        self.batch * self.pairs()
    }

    /// The first token of a pair's part, within the pair.
    fn first(&self, half: Half) -> usize {
        match half {
            Half::First => 0,
            Half::Second => self.part,
        }
    }

    /// `half` of every pair of `x`, `[batch, heads, tokens, channels]` in bf16, as
    /// `[batch · pairs, heads, part, channels]`: a view if possible, else a copy.
    pub fn take(&self, x: &CudaTensor, half: Half) -> CudaTensor {
        self.view(x, half).unwrap_or_else(|| self.copy(x, half))
    }

    fn view(&self, x: &CudaTensor, half: Half) -> Option<CudaTensor> {
        let [batch, heads, tokens, channels]: [usize; 4] = x.meta.shape().dims();
        let strides = x.meta.strides().to_vec();
        let one = batch == 1 || strides[0] == tokens * strides[2];
        if !one || tokens != self.pairs() * 2 * self.part {
            return None;
        }
        let mut view = x.clone();
        let bytes = self.first(half) * strides[2] * x.dtype.size();
        view.handle = view.handle.offset_start(bytes as u64);
        let shape = [self.sequences(), heads, self.part, channels];
        let strides = [2 * self.part * strides[2], strides[1], strides[2], strides[3]];
        *view.meta = Metadata::new(shape, strides);
        Some(view)
    }

    /// A contiguous copy `[batch · pairs, part, heads, channels]` in memory.
    fn copy(&self, x: &CudaTensor, half: Half) -> CudaTensor {
        let x = Heads::new(x);
        let [_, heads, tokens, channels] = x.dims;
        let mut copy =
            empty(&x.tensor, &[self.sequences(), self.part, heads, channels], DType::BF16);
        let count = self.sequences() * self.part * heads * channels / CHUNK;
        // SAFETY: a thread writes one chunk of the copy, and reads within the tensor.
        unsafe {
            copy_part::launch_unchecked::<CudaRuntime>(
                &x.tensor.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(&x.tensor, CHUNK),
                buffer(&copy, CHUNK),
                x.row_strides(),
                self.sizes(half, heads),
                as_u32(count),
                as_u32(tokens),
                as_u32(channels / CHUNK),
            );
        }
        copy.meta.swap(1, 2);
        copy
    }

    /// A stretch of each pair of `x`, `[batch, heads, numbers]` in f32, as `[batch · pairs, heads, stretch]`; `past`
    /// where it reaches past the end.
    pub fn rows(&self, x: &CudaTensor, stretch: Stretch, past: f32) -> CudaTensor {
        let [_, heads, length]: [usize; 3] = x.meta.shape().dims();
        let taken = stretch.length;
        let rows = empty(x, &[self.sequences(), heads, taken], DType::F32);
        let count = self.sequences() * heads * taken;
        // SAFETY: a thread writes one number, and reads within the tensor.
        unsafe {
            copy_rows::launch_unchecked::<CudaRuntime>(
                &x.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(x, 1),
                buffer(&rows, 1),
                self.stretches(stretch, heads, length),
                past,
            );
        }
        rows
    }

    /// Adds `added`, `[batch · pairs, heads, stretch]`, to the stretches of `x`, `[batch, heads, tokens]`; both f32.
    /// `from` is the first of the added numbers of a row.
    pub fn add_rows(&self, x: &CudaTensor, added: &CudaTensor, stretch: Stretch, from: usize) {
        let [_, heads, length]: [usize; 3] = x.meta.shape().dims();
        let of_row = added.meta.shape()[2];
        let count = self.sequences() * heads * stretch.length;
        // SAFETY: a thread changes one number.
        unsafe {
            add_rows::launch_unchecked::<CudaRuntime>(
                &x.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(x, 1),
                buffer(added, 1),
                self.stretches(stretch, heads, length),
                as_u32(of_row),
                as_u32(from),
            );
        }
    }

    /// The stretches of `heads` heads with `length` numbers each, as an argument.
    fn stretches(
        &self,
        Stretch { first, length: taken, between }: Stretch,
        heads: usize,
        length: usize,
    ) -> RowsLaunch<CudaRuntime> {
        let count = self.sequences() * heads * taken;
        let [pairs, heads] = [self.pairs(), heads].map(as_u32);
        let [length, first, taken, between, count] =
            [length, first, taken, between, count].map(as_u32);
        RowsLaunch::new(pairs, heads, length, first, taken, between, count)
    }

    /// One number per token of a pair's half.
    pub fn half(&self, half: Half) -> Stretch {
        Stretch { first: self.first(half), length: self.part, between: 2 * self.part }
    }

    /// The numbers of whole pairs, one in `tokens` tokens, of `units` each.
    pub fn whole(&self, tokens: usize, units: usize) -> Stretch {
        let length = 2 * self.part / tokens * units;
        Stretch { first: 0, length, between: length }
    }

    /// The documents' starts within pairs, `[batch · pairs, 2 · part]`, from those in sequences, `[batch, tokens]`.
    pub fn documents(&self, documents: &CudaTensor) -> CudaTensor {
        let [_, tokens]: [usize; 2] = documents.meta.shape().dims();
        let starts = empty(documents, &[self.sequences(), 2 * self.part], documents.dtype);
        let count = self.sequences() * 2 * self.part;
        // SAFETY: a thread writes one number, and reads within the tensor.
        unsafe {
            starts_in_pairs::launch_unchecked::<CudaRuntime>(
                &documents.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(documents, 1),
                buffer(&starts, 1),
                self.pairs() as u32,
                as_u32(tokens),
                as_u32(2 * self.part),
                as_u32(count),
            );
        }
        starts
    }

    /// `added`, `[batch · pairs, heads, part, channels]` in bf16, at its tokens in `half` of the pairs, and 0
    /// elsewhere, as the sum of two, `[2, batch, tokens, heads, channels]`.
    pub fn spread(&self, added: &CudaTensor, half: Half) -> CudaTensor {
        let added = Heads::new(added);
        let [_, heads, _, channels] = added.dims;
        let shape = [2, self.batch, self.tokens, heads, channels];
        let all = empty(&added.tensor, &shape, DType::BF16);
        let count = elements(&all) / 2 / CHUNK;
        // SAFETY: a thread writes two chunks.
        unsafe {
            spread_part::launch_unchecked::<CudaRuntime>(
                &added.tensor.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(&added.tensor, CHUNK),
                buffer(&all, CHUNK),
                added.row_strides(),
                self.sizes(half, heads),
                as_u32(count),
                as_u32(self.tokens),
                as_u32(channels / CHUNK),
            );
        }
        all
    }

    fn sizes(&self, half: Half, heads: usize) -> PartSizesLaunch<CudaRuntime> {
        PartSizesLaunch::new(
            self.pairs() as u32,
            as_u32(self.part),
            as_u32(self.first(half)),
            heads as u32,
        )
    }
}

/// A stretch of the numbers of each pair.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// Its first number, within the pair's.
    first: usize,
    /// Its length.
    length: usize,
    /// Numbers from one pair to the next.
    between: usize,
}

/// The pairs of a level, and one part of each.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct PartSizes {
    /// Pairs of a sequence.
    pairs: u32,
    /// Tokens of a part.
    part: u32,
    /// The part's first token, within its pair.
    first: u32,
    /// Heads.
    heads: u32,
}

/// Where a unit of a part is in its sequence.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// The unit of the row.
    unit: usize,
    head: usize,
    batch: usize,
    token: usize,
}

#[cube]
impl PartSizes {
    /// That of the unit at `at` in `[batch · pairs, part, heads, units]`. Divides in 32 bits, which is faster.
    fn place(&self, at: u32, units: u32) -> Place {
        let row = at / units;
        let (in_part, sequence) = (row / self.heads % self.part, row / self.heads / self.part);
        let pair = sequence % self.pairs;
        Place {
            unit: (at % units) as usize,
            head: (row % self.heads) as usize,
            batch: (sequence / self.pairs) as usize,
            token: (pair * 2 * self.part + self.first + in_part) as usize,
        }
    }
}

/// One part of every pair, in chunks `[batch · pairs, part, heads, chunks]`; zero from token `tokens` on.
#[cube(launch_unchecked, address_type = "u64")]
fn copy_part(
    x: &Array<Chunk>,
    copy: &mut Array<Chunk>,
    strides: RowStrides,
    sizes: PartSizes,
    count: u32,
    tokens: u32,
    chunks: u32,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let place = sizes.place(at as u32, chunks);
        let mut value = Chunk::cast_from(0f32);
        if place.token < tokens as usize {
            let row = strides.base(place.batch, place.head) + place.token * strides.row as usize;
            value = x[row + place.unit];
        }
        copy[at] = value;
    }
}

/// Chunks of one part of every pair as `[2, batch, tokens, heads, chunks]`, 0 elsewhere.
#[cube(launch_unchecked, address_type = "u64")]
fn spread_part(
    added: &Array<Chunk>,
    all: &mut Array<Chunk>,
    strides: RowStrides,
    sizes: PartSizes,
    count: u32,
    tokens: u32,
    chunks: u32,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let at = at as u32;
        let (chunk, row) = (at % chunks, at / chunks);
        let (head, token) = (row % sizes.heads, row / sizes.heads % tokens);
        let batch = row / sizes.heads / tokens;
        let (pair, in_pair) = (token / sizes.part / 2, token % (2 * sizes.part));
        let exists =
            (pair < sizes.pairs) & (in_pair >= sizes.first) & (in_pair < sizes.first + sizes.part);
        let mut value = Chunk::cast_from(0f32);
        if exists {
            let sequence = (batch * sizes.pairs + pair) as usize;
            let in_part = (in_pair - sizes.first) as usize;
            let row = strides.base(sequence, head as usize) + in_part * strides.row as usize;
            value = added[row + chunk as usize];
        }
        all[at as usize] = value;
        all[at as usize + count as usize] = Chunk::cast_from(0f32);
    }
}

/// Stretches of the numbers of each pair.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Rows {
    /// Pairs of a sequence.
    pairs: u32,
    /// Heads.
    heads: u32,
    /// Numbers of a sequence and head.
    length: u32,
    /// The first number of a pair's stretch.
    first: u32,
    /// Numbers of a stretch.
    taken: u32,
    /// Numbers from one pair to the next.
    between: u32,
    /// Numbers of all stretches.
    count: u32,
}

#[cube]
impl Rows {
    /// The row in `[batch, heads]`, and the place in it, of number `at` in `[batch · pairs, heads, taken]`.
    fn place(&self, at: usize) -> (usize, usize) {
        let (heads, taken, pairs) = (self.heads as usize, self.taken as usize, self.pairs as usize);
        let (head, sequence) = (at / taken % heads, at / taken / heads);
        let within = sequence % pairs * self.between as usize + self.first as usize + at % taken;
        (sequence / pairs * heads + head, within)
    }
}

#[cube(launch_unchecked, address_type = "u64")]
fn copy_rows(x: &Array<f32>, rows: &mut Array<f32>, sizes: Rows, past: f32) {
    let at = ABSOLUTE_POS;
    if at < sizes.count as usize {
        let (row, place) = sizes.place(at);
        let mut value = past;
        if place < sizes.length as usize {
            value = x[row * sizes.length as usize + place];
        }
        rows[at] = value;
    }
}

#[cube(launch_unchecked, address_type = "u64")]
fn add_rows(x: &mut Array<f32>, added: &Array<f32>, sizes: Rows, of_row: u32, from: u32) {
    let at = ABSOLUTE_POS;
    if at < sizes.count as usize {
        let (row, place) = sizes.place(at);
        let taken = sizes.taken as usize;
        if place < sizes.length as usize {
            let other = at / taken * of_row as usize + from as usize + at % taken;
            x[row * sizes.length as usize + place] += added[other];
        }
    }
}

/// Starts within pairs of `taken` tokens: positions past the end are their own documents.
#[cube(launch_unchecked, address_type = "u64")]
fn starts_in_pairs(
    documents: &Array<i32>,
    starts: &mut Array<i32>,
    pairs: u32,
    tokens: u32,
    taken: u32,
    count: u32,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let (tokens, taken, pairs) = (tokens as usize, taken as usize, pairs as usize);
        let (place, sequence) = (at % taken, at / taken);
        let first = sequence % pairs * taken;
        let mut start = place;
        if first + place < tokens {
            let found = documents[sequence / pairs * tokens + first + place] as usize;
            start = max(found, first) - first;
        }
        starts[at] = i32::cast_from(start as u32);
    }
}
