//! Rows of a table by token, and the sums of rows by token.
//!
//! For the sums, the positions are sorted by token, keeping their order within one. Tokens with
//! more than [`CHUNK`] positions are summed in chunks first.

use cubecl::prelude::*;

/// Positions of a block of [`rank`], and its threads.
pub const TILE: usize = 1024;
/// Sorted positions of a block of [`chunks`].
pub const CHUNK: usize = 256;
/// Threads of the one block of [`starts`].
pub const SCAN: usize = 1024;
/// Loads that a thread asks for before it waits.
const AHEAD: usize = 8;

/// y_i = row tokens_i of the table, NaN where there is no such row.
///
/// - `table`: `[vocab, vectors]`
/// - `y`: `[positions, vectors]`, of `len` vectors
#[cube(launch_unchecked)]
pub fn gather<E: Float, N: Size>(
    table: &Array<Vector<E, N>>,
    tokens: &Array<i32>,
    y: &mut Array<Vector<E, N>>,
    vectors: u32,
    vocab: u32,
    len: u32,
    missing: f32,
    #[define(E)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS;
    if at < len as usize {
        let vectors = vectors as usize;
        let token = u32::cast_from(tokens[at / vectors]);
        let mut value = Vector::<E, N>::cast_from(missing);
        if token < vocab {
            value = table[token as usize * vectors + at % vectors];
        }
        y[at] = value;
    }
}

/// Zeros.
#[cube(launch_unchecked)]
pub fn clear(x: &mut Array<u32>, len: u32) {
    if ABSOLUTE_POS < len as usize {
        x[ABSOLUTE_POS] = 0u32;
    }
}

/// How many positions of the same tile and token come before each position, and how often each
/// tile has each token.
///
/// - `ranks`: `[positions]`
/// - `counts`: `[tiles, vocab]`, zeros before
#[cube(launch_unchecked)]
pub fn rank(
    tokens: &Array<i32>,
    ranks: &mut Array<u32>,
    counts: &mut Array<u32>,
    positions: u32,
    vocab: u32,
) {
    let mut tile = SharedMemory::<u32>::new(TILE);
    let own = UNIT_POS as usize;
    let position = CUBE_POS_X as usize * TILE + own;
    let mut token = vocab; // No token.
    if position < positions as usize {
        token = u32::cast_from(tokens[position]);
    }
    tile[own] = token;
    sync_cube();
    let mut before = 0u32;
    let mut all = 0u32;
    for i in 0..comptime!(TILE / AHEAD) {
        #[unroll]
        for j in 0..AHEAD {
            let place = i * AHEAD + j;
            let same = u32::cast_from(tile[place] == token);
            all += same;
            before += select(place < own, same, 0u32);
        }
    }
    if token < vocab {
        ranks[position] = before;
        if before + 1 == all {
            counts[CUBE_POS_X as usize * vocab as usize + token as usize] = all;
        }
    }
}

/// Replaces each tile's count of a token by the counts of the tiles before, and gives the counts
/// of all tiles.
///
/// - `counts`: `[tiles, vocab]`
/// - `totals`: `[vocab]`
#[cube(launch_unchecked)]
pub fn offsets(counts: &mut Array<u32>, totals: &mut Array<u32>, tiles: u32, vocab: u32) {
    let token = ABSOLUTE_POS;
    if token < vocab as usize {
        let vocab = vocab as usize;
        let tiles = tiles as usize;
        let mut sum = 0u32;
        let mut first = 0usize;
        let mut ahead = Array::<u32>::new(AHEAD);
        while first < tiles {
            #[unroll]
            for i in 0..AHEAD {
                ahead[i] = counts[min(first + i, tiles - 1) * vocab + token];
            }
            #[unroll]
            for i in 0..AHEAD {
                if first + i < tiles {
                    counts[(first + i) * vocab + token] = sum;
                    sum += ahead[i];
                }
            }
            first += AHEAD;
        }
        totals[token] = sum;
    }
}

/// Where each token's positions start among the sorted ones, and last how many there are in all;
/// by one block.
///
/// - `totals`: `[vocab]`
/// - `starts`: `[vocab + 1]`
#[cube(launch_unchecked)]
pub fn starts(totals: &Array<u32>, starts: &mut Array<u32>, vocab: u32) {
    let mut sums = SharedMemory::<u32>::new(SCAN);
    let own = UNIT_POS as usize;
    let vocab = vocab as usize;
    let share = (vocab + SCAN - 1) / SCAN;
    let first = own * share;
    let end = min(first + share, vocab);
    let mut sum = 0u32;
    let mut at = first;
    while at < end {
        sum += totals[at];
        at += 1;
    }
    sums[own] = sum;
    sync_cube();
    // Each round adds what lies twice as far before.
    #[unroll]
    for step in 0..comptime!(SCAN.ilog2()) {
        let reach = comptime!(1usize << step);
        let mut add = 0u32;
        if own >= reach {
            add = sums[own - reach];
        }
        sync_cube();
        sums[own] = sums[own] + add;
        sync_cube();
    }
    let mut next = sums[own] - sum;
    let mut at = first;
    while at < end {
        starts[at] = next;
        next += totals[at];
        at += 1;
    }
    if own == comptime!(SCAN - 1) {
        starts[vocab] = sums[own];
    }
}

/// The positions sorted by token.
///
/// - `counts`: `[tiles, vocab]`, as [`offsets`] left them
/// - `places`: `[positions]`
#[cube(launch_unchecked)]
pub fn place(
    tokens: &Array<i32>,
    ranks: &Array<u32>,
    counts: &Array<u32>,
    starts: &Array<u32>,
    places: &mut Array<u32>,
    positions: u32,
    vocab: u32,
) {
    let position = ABSOLUTE_POS;
    if position < positions as usize {
        let token = u32::cast_from(tokens[position]);
        if token < vocab {
            let token = token as usize;
            let before = counts[position / TILE * vocab as usize + token];
            let at = starts[token] + before + ranks[position];
            places[at as usize] = position as u32;
        }
    }
}

/// For each chunk of sorted positions, the sum of `dy` over its part of the first token's and of
/// the last token's, where those have more than [`CHUNK`] positions in all.
///
/// - `dy`: `[positions, vectors]`
/// - `parts`: `[chunks, 2, vectors]`: the first token, then the last if it is another
#[cube(launch_unchecked)]
pub fn chunks<E: Float, N: Size>(
    dy: &Array<Vector<E, N>>,
    tokens: &Array<i32>,
    starts: &Array<u32>,
    places: &Array<u32>,
    parts: &mut Array<Vector<f32, N>>,
    vectors: u32,
    vocab: u32,
    #[define(E)] _dtype: StorageType,
) {
    let from = CUBE_POS_X * CHUNK as u32;
    let to = min(from + CHUNK as u32, starts[vocab as usize]);
    if from < to {
        let vectors = vectors as usize;
        let out = CUBE_POS_X as usize * 2 * vectors;
        let first = tokens[places[from as usize] as usize] as usize;
        let last = tokens[places[to as usize - 1] as usize] as usize;
        let end = starts[first + 1];
        if end - starts[first] > CHUNK as u32 {
            sum_rows::<E, N>(dy, places, parts, from, min(to, end), out, vectors);
        }
        if last != first {
            let start = starts[last];
            if starts[last + 1] - start > CHUNK as u32 {
                sum_rows::<E, N>(dy, places, parts, start, to, out + vectors, vectors);
            }
        }
    }
}

/// For each token, the sum of `dy` over its positions: one block for a token.
///
/// - `dy`: `[positions, vectors]`
/// - `parts`: as [`chunks`] gives it
/// - `dw`: `[vocab, vectors]`
#[cube(launch_unchecked)]
pub fn table<E: Float, N: Size>(
    dy: &Array<Vector<E, N>>,
    starts: &Array<u32>,
    places: &Array<u32>,
    parts: &Array<Vector<f32, N>>,
    dw: &mut Array<Vector<f32, N>>,
    vectors: u32,
    #[define(E)] _dtype: StorageType,
) {
    let token = CUBE_POS_X as usize;
    let vectors = vectors as usize;
    let start = starts[token];
    let end = starts[token + 1];
    let out = token * vectors;
    if end - start <= CHUNK as u32 {
        sum_rows::<E, N>(dy, places, dw, start, end, out, vectors);
    } else {
        let first = start as usize / CHUNK;
        let last = (end as usize - 1) / CHUNK;
        let inside = select(start as usize % CHUNK == 0, 0usize, 1usize);
        let mut at = UNIT_POS as usize;
        while at < vectors {
            let mut sum = parts[(first * 2 + inside) * vectors + at];
            for chunk in first + 1..last + 1 {
                sum += parts[chunk * 2 * vectors + at];
            }
            dw[out + at] = sum;
            at += CUBE_DIM as usize;
        }
    }
}

/// The sum of the rows `places[from..to]` of `dy`, in order, by the whole block.
#[cube]
fn sum_rows<E: Float, N: Size>(
    dy: &Array<Vector<E, N>>,
    places: &Array<u32>,
    sums: &mut Array<Vector<f32, N>>,
    from: u32,
    to: u32,
    out: usize,
    vectors: usize,
) {
    let mut column = UNIT_POS as usize;
    let from = from as usize;
    let to = to as usize;
    while column < vectors {
        let mut sum = Vector::<f32, N>::cast_from(0f32);
        let mut ahead = Array::<Vector<E, N>>::new(AHEAD);
        let mut at = from;
        while at + AHEAD <= to {
            #[unroll]
            for i in 0..AHEAD {
                ahead[i] = dy[places[at + i] as usize * vectors + column];
            }
            #[unroll]
            for i in 0..AHEAD {
                sum += Vector::cast_from(ahead[i]);
            }
            at += AHEAD;
        }
        while at < to {
            sum += Vector::cast_from(dy[places[at] as usize * vectors + column]);
            at += 1;
        }
        sums[out + column] = sum;
        column += CUBE_DIM as usize;
    }
}
