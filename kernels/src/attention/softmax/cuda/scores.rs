//! What forward and backward kernels share: the sizes of a problem, which keys a query sees, and
//! how a product q·k becomes a score.

use cubecl::prelude::*;

use crate::tile::{HIDDEN, LOG2_E};

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Channels of a head, padded to a multiple of 64.
    pub dim: usize,
    /// Channels of a head in memory, a multiple of 8.
    pub real: usize,
    /// Warps of a block, 16 rows each but in decoding, where they share the rows.
    pub warps: usize,
    /// Rows of the tiles that a block passes over, a multiple of 16.
    pub span: usize,
    /// Whether scores are capped.
    pub softcap: bool,
    /// Whether distance is penalised.
    pub alibi: bool,
    /// Whether keys decay by learned steps; without softcap and ALiBi.
    pub decay: bool,
    /// Channels with a gate, in 16s, the first ones; without softcap, ALiBi and decay.
    pub gated: usize,
    /// Whether keys are relative to the starts of their tiles of gates; else to their ends.
    pub from_starts: bool,
    /// Whether keys far back are hidden.
    pub window: bool,
    /// Whether keys of other documents are hidden.
    pub documents: bool,
    /// Whether keys that have decayed too far are left out; only with a decay or with gates.
    pub prune: bool,
}

impl Options {
    /// Threads of a block.
    pub fn threads(&self) -> usize {
        32 * self.warps
    }

    /// Rows of a block.
    pub fn rows(&self) -> usize {
        16 * self.warps
    }

    /// Whether queries do not see all keys before them.
    pub fn hides(&self) -> bool {
        self.window || self.documents || self.prune
    }
}

/// The sizes and numbers of a problem.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Problem {
    /// Query heads.
    pub heads: u32,
    /// Query heads of a kv head.
    pub group: u32,
    /// Rows of q.
    pub queries: u32,
    /// Rows of k and v.
    pub keys: u32,
    /// A query sees no key this many or more places before its own.
    pub window: u32,
    /// Factor on q·k.
    pub scale: f32,
    /// c of c·tanh(score/c).
    pub cap: f32,
}

/// The first key that the query at position `row` sees.
#[cube]
pub fn first_key(
    problem: &Problem,
    documents: &Array<i32>,
    batch: usize,
    row: usize,
    #[comptime] options: Options,
) -> usize {
    let mut first = 0usize;
    if options.window {
        let window = problem.window as usize;
        if row >= window {
            first = row - window + 1;
        }
    }
    if options.documents {
        let keys = problem.keys as usize;
        let start = documents[batch * keys + min(row, keys - 1)] as usize;
        first = max(first, start);
    }
    first
}

/// The first place from `low` on whose value is above `bound`; `high` where there is none before it. Values
/// lie in `values` from `base` on, and never fall.
#[cube]
pub fn first_above(
    values: &Array<i32>,
    base: usize,
    bound: usize,
    low: usize,
    high: usize,
) -> usize {
    let mut low = low;
    let mut high = high;
    while low < high {
        let middle = (low + high) / 2;
        if values[base + middle] as usize > bound {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// The factor that scores still need before they are exponents of 2.
#[cube]
pub fn rest_of_scale(problem: &Problem, #[comptime] options: Options) -> f32 {
    let mut scale = problem.scale;
    if comptime!(options.softcap || options.alibi) {
        scale = f32::cast_from(1f32);
    }
    scale * LOG2_E
}

/// The score of a product q·k before the penalty on distance, up to [`rest_of_scale`].
#[cube]
fn capped(product: f32, problem: &Problem, #[comptime] options: Options) -> f32 {
    let mut score = product;
    if options.softcap {
        // c·tanh(x/c) = c − 2c/(1 + e^(2x/c)).
        let e = Exp::exp(score * (problem.scale * 2.0 / problem.cap));
        score = problem.cap - 2.0 * problem.cap / (1.0 + e);
    } else if options.alibi {
        score *= problem.scale;
    }
    score
}

/// ALiBi's penalty, for the query at `row` and the key at `column`.
#[cube]
fn penalty(slope: f32, row: u32, column: u32, #[comptime] options: Options) -> f32 {
    let mut penalty = 0f32;
    if options.alibi {
        penalty = slope * (f32::cast_from(column) - f32::cast_from(row));
    }
    penalty
}

/// The score of a product, up to [`rest_of_scale`].
#[cube]
pub fn full_score(
    product: f32,
    problem: &Problem,
    slope: f32,
    row: u32,
    column: u32,
    #[comptime] options: Options,
) -> f32 {
    let mut score = capped(product, problem, options);
    if options.alibi {
        score += penalty(slope, row, column, options);
    }
    score
}

/// Whether the query at `row`, which sees keys from `first` on, does not see the key at `column`.
#[cube]
pub fn hidden(row: u32, column: u32, first: u32) -> bool {
    (column > row) | (column < first)
}

/// Sixteen rows of products become scores, up to [`rest_of_scale`]: capped, with the penalty
/// and, where `edge` says that some key is hidden, [`HIDDEN`]. A lane's first row and column are
/// `row` and `column`, and the first key it sees in each of its rows is in `first`.
#[cube]
pub fn make_scores<NC: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    problem: &Problem,
    slope: f32,
    row: u32,
    column: u32,
    first: &Array<u32>,
    edge: bool,
    #[comptime] n_keys: usize,
    #[comptime] options: Options,
) {
    if comptime!(options.softcap || options.alibi) {
        #[unroll]
        for r in 0..2usize {
            let row = row + comptime!((r * 8) as u32);
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                #[unroll]
                for e in 0..2usize {
                    let column = column + comptime!((n * 8 + e) as u32);
                    pair[e] = full_score(pair[e], problem, slope, row, column, options);
                }
                fragment[r] = pair;
            }
        }
    }
    if edge {
        #[unroll]
        for r in 0..2usize {
            let row = row + comptime!((r * 8) as u32);
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(n);
                let mut pair = fragment[r];
                #[unroll]
                for e in 0..2usize {
                    let hide = hidden(row, column + comptime!((n * 8 + e) as u32), first[r]);
                    pair[e] = select(hide, HIDDEN, pair[e]);
                }
                fragment[r] = pair;
            }
        }
    }
}

/// The derivative of a score from [`make_scores`] with respect to scale · q·k.
#[cube]
pub fn cap_slope(
    score: f32,
    problem: &Problem,
    slope: f32,
    row: u32,
    column: u32,
    #[comptime] options: Options,
) -> f32 {
    let mut result = 1f32;
    if options.softcap {
        let t = (score - penalty(slope, row, column, options)) / problem.cap;
        // Not below 0 for a hidden key, whose weight of 0 must stay one.
        result = max(1f32 - t * t, 0f32);
    }
    result
}
