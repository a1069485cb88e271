//! The lookup of table rows by token, and the sum of rows by token.
//!
//! For the sums, a stable sort orders the positions by token. Tokens with more than [`CHUNK_POSITIONS`]
//! positions are summed in chunks first.

use cubecl::prelude::*;

/// Positions, and threads, per block of [`rank`].
pub const TILE_POSITIONS: usize = 1024;
/// Sorted positions per block of [`chunks`].
pub const CHUNK_POSITIONS: usize = 256;
/// Threads of the one block of [`starts`].
pub const SCAN_THREADS: usize = 1024;
/// Loads that a thread has in flight together.
const PREFETCH: usize = 8;

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

/// x ← 0.
#[cube(launch_unchecked)]
pub fn clear(x: &mut Array<u32>, len: u32) {
    if ABSOLUTE_POS < len as usize {
        x[ABSOLUTE_POS] = 0u32;
    }
}

/// The rank of each position among those of the same tile and token, and the number of occurrences of each
/// token in each tile.
///
/// - `ranks`: `[positions]`
/// - `counts`: `[tiles, vocab]`, zero-initialised
#[cube(launch_unchecked)]
pub fn rank(
    tokens: &Array<i32>,
    ranks: &mut Array<u32>,
    counts: &mut Array<u32>,
    positions: u32,
    vocab: u32,
) {
    let mut tile = SharedMemory::<u32>::new(TILE_POSITIONS);
    let own = UNIT_POS as usize;
    let position = CUBE_POS_X as usize * TILE_POSITIONS + own;
    let mut token = vocab; // No token.
    if position < positions as usize {
        token = u32::cast_from(tokens[position]);
    }
    tile[own] = token;
    sync_cube();
    let mut before = 0u32;
    let mut all = 0u32;
    for i in 0..comptime!(TILE_POSITIONS / PREFETCH) {
        #[unroll]
        for j in 0..PREFETCH {
            let place = i * PREFETCH + j;
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

/// Replaces each tile's count of a token by the sum over the tiles before it (an exclusive prefix sum),
/// and writes the sum over all tiles.
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
        let mut ahead = Array::<u32>::new(PREFETCH);
        while first < tiles {
            #[unroll]
            for i in 0..PREFETCH {
                ahead[i] = counts[min(first + i, tiles - 1) * vocab + token];
            }
            #[unroll]
            for i in 0..PREFETCH {
                if first + i < tiles {
                    counts[(first + i) * vocab + token] = sum;
                    sum += ahead[i];
                }
            }
            first += PREFETCH;
        }
        totals[token] = sum;
    }
}

/// The start of each token's positions among the sorted ones, and last the number of positions; by one
/// block.
///
/// - `totals`: `[vocab]`
/// - `starts`: `[vocab + 1]`
#[cube(launch_unchecked)]
pub fn starts(totals: &Array<u32>, starts: &mut Array<u32>, vocab: u32) {
    let mut sums = SharedMemory::<u32>::new(SCAN_THREADS);
    let own = UNIT_POS as usize;
    let vocab = vocab as usize;
    let share = (vocab + SCAN_THREADS - 1) / SCAN_THREADS;
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
    // Hillis-Steele scan: each step adds the sum at twice the distance.
    #[unroll]
    for step in 0..comptime!(SCAN_THREADS.ilog2()) {
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
    if own == comptime!(SCAN_THREADS - 1) {
        starts[vocab] = sums[own];
    }
}

/// The positions sorted by token.
///
/// - `counts`: `[tiles, vocab]`, after [`offsets`]
/// - `sorted_positions`: `[positions]`
#[cube(launch_unchecked)]
pub fn place(
    tokens: &Array<i32>,
    ranks: &Array<u32>,
    counts: &Array<u32>,
    starts: &Array<u32>,
    sorted_positions: &mut Array<u32>,
    positions: u32,
    vocab: u32,
) {
    let position = ABSOLUTE_POS;
    if position < positions as usize {
        let token = u32::cast_from(tokens[position]);
        if token < vocab {
            let token = token as usize;
            let before = counts[position / TILE_POSITIONS * vocab as usize + token];
            let at = starts[token] + before + ranks[position];
            sorted_positions[at as usize] = position as u32;
        }
    }
}

/// For each chunk of sorted positions, the sums of `dy` over the positions of its first and of its last
/// token, if these tokens have more than [`CHUNK_POSITIONS`] positions in total.
///
/// - `dy`: `[positions, vectors]`
/// - `parts`: `[chunks, 2, vectors]`: the first token, then the last if it differs
#[cube(launch_unchecked)]
pub fn chunks<E: Float, N: Size>(
    dy: &Array<Vector<E, N>>,
    tokens: &Array<i32>,
    starts: &Array<u32>,
    sorted_positions: &Array<u32>,
    parts: &mut Array<Vector<f32, N>>,
    vectors: u32,
    vocab: u32,
    #[define(E)] _dtype: StorageType,
) {
    let from = CUBE_POS_X * CHUNK_POSITIONS as u32;
    let to = min(from + CHUNK_POSITIONS as u32, starts[vocab as usize]);
    if from < to {
        let vectors = vectors as usize;
        let out = CUBE_POS_X as usize * 2 * vectors;
        let first = tokens[sorted_positions[from as usize] as usize] as usize;
        let last = tokens[sorted_positions[to as usize - 1] as usize] as usize;
        let end = starts[first + 1];
        if end - starts[first] > CHUNK_POSITIONS as u32 {
            sum_rows::<E, N>(dy, sorted_positions, parts, from, min(to, end), out, vectors);
        }
        if last != first {
            let start = starts[last];
            if starts[last + 1] - start > CHUNK_POSITIONS as u32 {
                sum_rows::<E, N>(dy, sorted_positions, parts, start, to, out + vectors, vectors);
            }
        }
    }
}

/// For each token, the sum of `dy` over its positions, by one block per token.
///
/// - `dy`: `[positions, vectors]`
/// - `parts`: the output of [`chunks`]
/// - `dw`: `[vocab, vectors]`
#[cube(launch_unchecked)]
pub fn table<E: Float, N: Size>(
    dy: &Array<Vector<E, N>>,
    starts: &Array<u32>,
    sorted_positions: &Array<u32>,
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
    if end - start <= CHUNK_POSITIONS as u32 {
        sum_rows::<E, N>(dy, sorted_positions, dw, start, end, out, vectors);
    } else {
        let first = start as usize / CHUNK_POSITIONS;
        let last = (end as usize - 1) / CHUNK_POSITIONS;
        let inside = select(start as usize % CHUNK_POSITIONS == 0, 0usize, 1usize);
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

/// The sum of the rows `sorted_positions[from..to]` of `dy`, in order, by the whole block.
#[cube]
fn sum_rows<E: Float, N: Size>(
    dy: &Array<Vector<E, N>>,
    sorted_positions: &Array<u32>,
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
        let mut ahead = Array::<Vector<E, N>>::new(PREFETCH);
        let mut at = from;
        while at + PREFETCH <= to {
            #[unroll]
            for i in 0..PREFETCH {
                ahead[i] = dy[sorted_positions[at + i] as usize * vectors + column];
            }
            #[unroll]
            for i in 0..PREFETCH {
                sum += Vector::cast_from(ahead[i]);
            }
            at += PREFETCH;
        }
        while at < to {
            sum += Vector::cast_from(dy[sorted_positions[at] as usize * vectors + column]);
            at += 1;
        }
        sums[out + column] = sum;
        column += CUBE_DIM as usize;
    }
}
