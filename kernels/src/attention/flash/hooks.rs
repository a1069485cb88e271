//! What a kind adds to the flash core. A kind implements the traits whose default does not fit it, in its
//! own folder, and passes the core what these need as launch arguments of its own.
//!
//! | hook | question | default |
//! | --- | --- | --- |
//! | [`Operands`] | how do q and k of a pair of tiles enter their product? | [`PlainOperands`]: as they are |
//! | [`Biases`] | which biases by row and column do scores get? | [`NoBiases`] |
//! | [`Score`] | what does a product become? | [`ScaledScore`]: scale · q·k |
//! | [`Weight`] | how does a score become a weight, and how is a row normalised? | [`SoftmaxWeight`](super::weight::SoftmaxWeight) |
//!
//! Each hook has a state of its own for each of the passes: `forward` and `dq`, where a warp has 16 queries
//! and passes over tiles of keys; `dkv`, where it has 16 keys and passes over tiles of queries; and `decode`,
//! where it has up to 16 heads of one query. What a state reads from memory it reads a tile ahead.

use burn::tensor::{Element, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::mask::{QueryBlock, QueryGroup};
use super::problem::{Config, Problem};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, start_tile_abt};
use crate::tile::{AFragments, Accumulator, Chunk};

/// A kind's hooks, with the tensors that their launch arguments are made of.
pub trait Hooks: Send + Sync + 'static {
    /// How q and k enter their product.
    type Operands: Operands;
    /// Biases of scores.
    type Biases: Biases;
    /// What products become.
    type Score: Score;
    /// Weights, and the rows' normaliser.
    type Weight: Weight;

    /// The arguments of [`Hooks::Operands`].
    fn operands(&self) -> LaunchOf<<Self::Operands as Operands>::Args>;

    /// The arguments of [`Hooks::Biases`].
    fn biases(&self) -> LaunchOf<<Self::Biases as Biases>::Args>;

    /// The arguments of [`Hooks::Score`].
    fn score(&self) -> LaunchOf<<Self::Score as Score>::Args>;

    /// The arguments of [`Hooks::Weight`].
    fn weight(&self) -> LaunchOf<<Self::Weight as Weight>::Args>;

    /// Whether scores are more than scale · q·k and biases, and whether their slope is not 1.
    fn changes_scores(&self) -> [bool; 2] {
        [false, false]
    }

    /// Warpgroups of a block and rows of a tile, where plain attention has `shape` for this head_dim.
    fn block_shape(&self, shape: (usize, usize), head_dim: usize) -> (usize, usize) {
        let _ = head_dim;
        shape
    }
}

/// What a launch takes for a kernel's argument.
pub type LaunchOf<T> = <T as LaunchArg>::RuntimeArg<CudaRuntime>;

/// A kind's operands.
pub type OperandsOf<A> = <A as Hooks>::Operands;
/// A kind's biases.
pub type BiasesOf<A> = <A as Hooks>::Biases;
/// A kind's scores.
pub type ScoreOf<A> = <A as Hooks>::Score;
/// A kind's weights.
pub type WeightOf<A> = <A as Hooks>::Weight;

/// The arguments of a kind's operands.
pub type OperandArgs<A> = <<A as Hooks>::Operands as Operands>::Args;
/// The arguments of a kind's biases.
pub type BiasArgs<A> = <<A as Hooks>::Biases as Biases>::Args;
/// The arguments of a kind's scores.
pub type ScoreArgs<A> = <<A as Hooks>::Score as Score>::Args;
/// The arguments of a kind's weights.
pub type WeightArgs<A> = <<A as Hooks>::Weight as Weight>::Args;
/// What a kind's forward pass keeps of each row.
pub type StatisticsOf<A> = <<A as Hooks>::Weight as Weight>::Statistics;
/// What a kind's backward pass reads of each row.
pub type SavedRows<A> = <<A as Hooks>::Weight as Weight>::SavedRows;
/// The type of a kind's dq and dk.
pub type GradientOf<A> = <<A as Hooks>::Operands as Operands>::Gradient;

/// How q and k of a pair of tiles enter their product, and dq and dk leave theirs.
#[cube]
pub trait Operands: Send + Sync + 'static {
    /// What the kernels read.
    type Args: LaunchArg + CubeType;
    /// The type of dq and dk as the kernels write them.
    type Gradient: Numeric + Element;
    /// Of the forward pass.
    type Forward: CubeType;
    /// Of the pass that makes dq.
    type Dq: CubeType;
    /// Of the pass that makes dk and dv.
    type Dkv: CubeType;
    /// Of decoding.
    type Decode: CubeType;

    /// Whether queries come from registers in the forward pass.
    const QUERIES_IN_REGISTERS: bool;
    /// Whether dk is summed from the last tile of queries to the first, the heads of a group taking turns.
    const DK_FROM_THE_END: bool;
    /// Whether the kernels multiply dq and dk by the scale.
    const SCALES_GRADIENTS: bool;

    /// For a warp whose first tile of keys begins at `column`. Where queries come from registers, `q_tile` is
    /// loaded.
    fn forward(
        args: &Self::Args,
        problem: &Problem,
        block: &QueryBlock,
        group: &QueryGroup,
        q_tile: &SharedMemory<Chunk>,
        column: usize,
        warp: usize,
        #[comptime] config: Config,
    ) -> Self::Forward;

    /// Starts the product of the queries and the tile of keys at chunk `at`, onto `s` unless it is `fresh`.
    fn start_scores(
        state: &mut Self::Forward,
        s: &mut Accumulator,
        q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: Config,
    );

    /// Reads what the tile of keys from `column` on needs.
    fn read_ahead(
        state: &mut Self::Forward,
        args: &Self::Args,
        column: usize,
        #[comptime] config: Config,
    );

    /// As [`Operands::forward`].
    fn dq(
        args: &Self::Args,
        problem: &Problem,
        block: &QueryBlock,
        group: &QueryGroup,
        column: usize,
        #[comptime] config: Config,
    ) -> Self::Dq;

    /// As [`Operands::start_scores`].
    fn start_scores_of_dq(
        state: &mut Self::Dq,
        s: &mut Accumulator,
        q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: Config,
    );

    /// Begins a tile of keys, whose product has been started. The next one's begin at `next`, where `ahead` says
    /// that there is one.
    fn begin_tile_of_dq(
        state: &mut Self::Dq,
        args: &Self::Args,
        warp: usize,
        next: usize,
        ahead: bool,
        #[comptime] config: Config,
    );

    /// Brings the sum so far to where the tile's product can be added.
    fn rescale_dq(state: &Self::Dq, dq: &mut Accumulator, warp: usize, #[comptime] config: Config);

    /// For a warpgroup's keys from `column` on. `row` is the kv head among those of all sequences.
    fn dkv(
        args: &Self::Args,
        problem: &Problem,
        row: usize,
        column: usize,
        #[comptime] config: Config,
    ) -> Self::Dkv;

    /// Reads what the tile of queries from `first_query` on needs; `first` for the first one.
    fn read_queries(
        state: &mut Self::Dkv,
        args: &Self::Args,
        first_query: usize,
        #[comptime] first: bool,
        #[comptime] config: Config,
    );

    /// Begins the tile of queries that was read.
    fn begin_tile_of_dkv(state: &mut Self::Dkv, warp: usize, #[comptime] config: Config);

    /// Starts the product of the block's keys and the tile of queries at chunk `at`.
    fn start_scores_of_dkv(
        state: &mut Self::Dkv,
        s: &mut Accumulator,
        k_tile: &SharedMemory<Chunk>,
        q_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] config: Config,
    );

    /// As [`Operands::rescale_dq`].
    fn rescale_dk(state: &Self::Dkv, dk: &mut Accumulator, warp: usize, #[comptime] config: Config);

    /// For one query a head, and tiles of keys from the one at `column` on backwards.
    fn decode(
        args: &Self::Args,
        problem: &Problem,
        row: usize,
        column: usize,
        #[comptime] config: Config,
    ) -> Self::Decode;

    /// Brings the queries to the tile of keys that was read, and reads what the one at `next` needs, where
    /// `ahead` says that there is one.
    fn rescale_q(
        state: &mut Self::Decode,
        args: &Self::Args,
        q: &mut AFragments,
        warp: usize,
        next: usize,
        ahead: bool,
        #[comptime] config: Config,
    );
}

/// Biases that scores get, by row and column, in natural logarithms.
///
/// A row's biases are relative to a constant of its own, its shift: softmax does not see it.
#[cube]
pub trait Biases: Send + Sync + 'static {
    /// What the kernels read.
    type Args: LaunchArg + CubeType;
    /// Of the passes over tiles of keys.
    type OverKeys: CubeType;
    /// Of the pass over tiles of queries.
    type OverQueries: CubeType;
    /// Of decoding.
    type Decode: CubeType;

    /// Whether there are biases.
    const SOME: bool;
    /// Whether they want the sums of the gradients of scores, of each query and of each key.
    const SUMS: bool;

    /// For the queries of a warpgroup.
    fn over_keys(
        args: &Self::Args,
        problem: &Problem,
        block: &QueryBlock,
        group: &QueryGroup,
        #[comptime] config: Config,
    ) -> Self::OverKeys;

    /// Reads what the tile of keys from `column` on needs.
    fn read_keys(
        state: &mut Self::OverKeys,
        args: &Self::Args,
        problem: &Problem,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: Config,
    );

    /// Lets the products with the tile that was read start from its biases times `factor`.
    fn start_from_biases(
        state: &mut Self::OverKeys,
        s: &mut Accumulator,
        factor: f32,
        warp: usize,
        #[comptime] config: Config,
    );

    /// What is to be added to the scores of the query at `position` of a warpgroup that begins at `first` to
    /// have them without a shift. `row` is the query's head among those of all sequences.
    fn shift(
        args: &Self::Args,
        problem: &Problem,
        row: usize,
        first: usize,
        position: usize,
    ) -> f32;

    /// For a warp's keys from `column` on.
    fn over_queries(#[comptime] config: Config) -> Self::OverQueries;

    /// Reads what the tile of queries from `first_query` on needs, of the head `row`, for the warp's keys from
    /// `column` on.
    fn read_queries(
        state: &mut Self::OverQueries,
        args: &Self::Args,
        problem: &Problem,
        row: usize,
        first_query: usize,
        column: usize,
        #[comptime] config: Config,
    );

    /// Begins the tile that was read.
    fn begin_tile(state: &mut Self::OverQueries, #[comptime] config: Config);

    /// The bias, to base 2, of a lane's key `r` and the tile's queries from 8·`n` on.
    fn bias_of_key(
        state: &Self::OverQueries,
        #[comptime] n: usize,
        #[comptime] r: usize,
        #[comptime] config: Config,
    ) -> f32;

    /// For a lane's two heads of one query, given as places among those of all sequences.
    fn decode(args: &Self::Args, problem: &Problem, rows: &Array<usize>) -> Self::Decode;

    /// Reads the biases, to base 2, of a warp's 16 keys from `column` on, in the tile that begins at `tile`.
    fn read_biases(
        state: &mut Self::Decode,
        args: &Self::Args,
        problem: &Problem,
        tile: usize,
        column: usize,
    );

    /// The one of a lane's head `r` and key 8·`n` + `e`.
    fn bias(
        state: &Self::Decode,
        #[comptime] r: usize,
        #[comptime] n: usize,
        #[comptime] e: usize,
    ) -> f32;
}

/// What a product of a query and a key becomes, but for biases.
#[cube]
pub trait Score: Send + Sync + 'static {
    /// What the kernels read.
    type Args: LaunchArg + CubeType;
    /// What belongs to a query head.
    type Head: CubeType;

    /// What belongs to the query head `head`.
    fn head(args: &Self::Args, head: usize) -> Self::Head;

    /// The factor that [`Score::score`] leaves to be multiplied by.
    fn scale(args: &Self::Args, problem: &Problem) -> f32;

    /// The score, up to [`Score::scale`], of the query at `row` and the key at `column`; called where
    /// [`Hooks::changes_scores`] says so.
    fn score(
        args: &Self::Args,
        problem: &Problem,
        head: &Self::Head,
        product: f32,
        row: u32,
        column: u32,
    ) -> f32;

    /// The derivative of that score with respect to scale · q·k; not below 0 for masked keys, whose weight of 0
    /// is to stay one.
    fn slope(
        args: &Self::Args,
        problem: &Problem,
        head: &Self::Head,
        score: f32,
        row: u32,
        column: u32,
    ) -> f32;
}

/// How a score becomes a weight, and how a row of weights is normalised.
#[cube]
pub trait Weight: Send + Sync + 'static {
    /// What the kernels read.
    type Args: LaunchArg + CubeType;
    /// What a lane keeps of its two rows in the forward pass.
    type Rows: CubeType;
    /// What the forward pass writes of each row, `[batch, heads, queries]`.
    type Statistics: LaunchArg + CubeType;
    /// What the backward pass reads of each row, `[batch, heads, queries]`.
    type SavedRows: LaunchArg + CubeType;

    /// The factor of scores: log₂ e where weights are exponentials, as the hardware has those of base 2.
    const UNIT: f32;
    /// Whether there are statistics of rows.
    const STATISTICS: bool;

    /// No key yet.
    fn rows() -> Self::Rows;

    /// Scores times `scale` of a tile become weights in place, relative to what the rows have of their own; `o`,
    /// the sum so far, is brought along.
    fn add_tile(
        rows: &mut Self::Rows,
        s: &mut Accumulator,
        o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] n_dim: usize,
    );

    /// Ends a lane's row `r`, whose scores lack `shift`, a natural logarithm: the factor that `o` still needs.
    /// Where `write` says so, writes its statistics to `at`.
    fn finish(
        rows: &Self::Rows,
        args: &Self::Args,
        statistics: &mut Self::Statistics,
        head: usize,
        at: usize,
        write: bool,
        scale: f32,
        shift: f32,
        #[comptime] r: usize,
    ) -> f32;

    /// The factor and the statistic of a part of a row, whose keys other blocks have too; [`MASKED`] as the
    /// statistic of a part without a key.
    ///
    /// [`MASKED`]: crate::tile::MASKED
    fn finish_part(rows: &Self::Rows, scale: f32, #[comptime] r: usize) -> (f32, f32);

    /// The factor of a part in the sum of all, from its statistic and `top`, the largest of any.
    fn part(statistic: f32, top: f32) -> f32;

    /// Ends a row of `head` whose parts' factors add up to `total`: the factor that `o` still needs, and the
    /// statistic of the whole row.
    fn join(args: &Self::Args, head: usize, top: f32, total: f32, shift: f32) -> (f32, f32);

    /// What the backward pass needs of a row: the shift of its scores, and what is subtracted from the gradients
    /// of its weights.
    fn saved(saved: &Self::SavedRows, at: usize) -> (f32, f32);

    /// The weight of a score times `scale` plus `shift`.
    fn weigh(score: f32, scale: f32, shift: f32) -> f32;

    /// The derivative of `weight` with respect to the score in natural units.
    fn slope(score: f32, weight: f32) -> f32;
}

/// q and k as they are.
pub struct PlainOperands;

#[cube]
impl Operands for PlainOperands {
    type Args = ();
    type Gradient = bf16;
    type Forward = ();
    type Dq = ();
    type Dkv = ();
    type Decode = ();

    const QUERIES_IN_REGISTERS: bool = false;
    const DK_FROM_THE_END: bool = false;
    const SCALES_GRADIENTS: bool = true;

    fn forward(
        _args: &(),
        _problem: &Problem,
        _block: &QueryBlock,
        _group: &QueryGroup,
        _q_tile: &SharedMemory<Chunk>,
        _column: usize,
        _warp: usize,
        #[comptime] _config: Config,
    ) {
    }

    fn start_scores(
        _state: &mut (),
        s: &mut Accumulator,
        q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: Config,
    ) {
        start_plain_scores(s, q_tile, k_tile, at, warp, fresh, config);
    }

    fn read_ahead(_state: &mut (), _args: &(), _column: usize, #[comptime] _config: Config) {}

    fn dq(
        _args: &(),
        _problem: &Problem,
        _block: &QueryBlock,
        _group: &QueryGroup,
        _column: usize,
        #[comptime] _config: Config,
    ) {
    }

    fn start_scores_of_dq(
        _state: &mut (),
        s: &mut Accumulator,
        q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: Config,
    ) {
        start_plain_scores(s, q_tile, k_tile, at, warp, fresh, config);
    }

    fn begin_tile_of_dq(
        _state: &mut (),
        _args: &(),
        _warp: usize,
        _next: usize,
        _ahead: bool,
        #[comptime] _config: Config,
    ) {
    }

    fn rescale_dq(_state: &(), _dq: &mut Accumulator, _warp: usize, #[comptime] _config: Config) {}

    fn dkv(
        _args: &(),
        _problem: &Problem,
        _row: usize,
        _column: usize,
        #[comptime] _config: Config,
    ) {
    }

    fn read_queries(
        _state: &mut (),
        _args: &(),
        _first_query: usize,
        #[comptime] _first: bool,
        #[comptime] _config: Config,
    ) {
    }

    fn begin_tile_of_dkv(_state: &mut (), _warp: usize, #[comptime] _config: Config) {}

    fn start_scores_of_dkv(
        _state: &mut (),
        s: &mut Accumulator,
        k_tile: &SharedMemory<Chunk>,
        q_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] config: Config,
    ) {
        start_plain_scores(s, k_tile, q_tile, at, warp, true, config);
    }

    fn rescale_dk(_state: &(), _dk: &mut Accumulator, _warp: usize, #[comptime] _config: Config) {}

    fn decode(
        _args: &(),
        _problem: &Problem,
        _row: usize,
        _column: usize,
        #[comptime] _config: Config,
    ) {
    }

    fn rescale_q(
        _state: &mut (),
        _args: &(),
        _q: &mut AFragments,
        _warp: usize,
        _next: usize,
        _ahead: bool,
        #[comptime] _config: Config,
    ) {
    }
}

/// Starts the product of a warpgroup's 64 rows of the block's tile and the tile at chunk `at`.
#[cube]
pub fn start_plain_scores(
    s: &mut Accumulator,
    block_tile: &SharedMemory<Chunk>,
    tile: &SharedMemory<Chunk>,
    at: usize,
    warp: usize,
    #[comptime] fresh: bool,
    #[comptime] config: Config,
) {
    let row = warp / GROUP_WARPS * GROUP_ROWS;
    let (rows, n, steps) = comptime!((config.rows(), config.tile / 8, config.padded_head_dim / 16));
    start_tile_abt(block_tile, row, rows, tile, at, s, fresh, n, steps);
}

/// No biases.
pub struct NoBiases;

#[cube]
impl Biases for NoBiases {
    type Args = ();
    type OverKeys = ();
    type OverQueries = ();
    type Decode = ();

    const SOME: bool = false;
    const SUMS: bool = false;

    fn over_keys(
        _args: &(),
        _problem: &Problem,
        _block: &QueryBlock,
        _group: &QueryGroup,
        #[comptime] _config: Config,
    ) {
    }

    fn read_keys(
        _state: &mut (),
        _args: &(),
        _problem: &Problem,
        _block: &QueryBlock,
        _column: usize,
        #[comptime] _config: Config,
    ) {
    }

    fn start_from_biases(
        _state: &mut (),
        _s: &mut Accumulator,
        _factor: f32,
        _warp: usize,
        #[comptime] _config: Config,
    ) {
    }

    fn shift(_args: &(), _problem: &Problem, _row: usize, _first: usize, _position: usize) -> f32 {
        f32::cast_from(0u32)
    }

    fn over_queries(#[comptime] _config: Config) {}

    fn read_queries(
        _state: &mut (),
        _args: &(),
        _problem: &Problem,
        _row: usize,
        _first_query: usize,
        _column: usize,
        #[comptime] _config: Config,
    ) {
    }

    fn begin_tile(_state: &mut (), #[comptime] _config: Config) {}

    fn bias_of_key(
        _state: &(),
        #[comptime] _n: usize,
        #[comptime] _r: usize,
        #[comptime] _config: Config,
    ) -> f32 {
        f32::cast_from(0u32)
    }

    fn decode(_args: &(), _problem: &Problem, _rows: &Array<usize>) {}

    fn read_biases(_state: &mut (), _args: &(), _problem: &Problem, _tile: usize, _column: usize) {}

    fn bias(
        _state: &(),
        #[comptime] _r: usize,
        #[comptime] _n: usize,
        #[comptime] _e: usize,
    ) -> f32 {
        f32::cast_from(0u32)
    }
}

/// scale · q·k.
pub struct ScaledScore;

#[cube]
impl Score for ScaledScore {
    type Args = ();
    type Head = ();

    fn head(_args: &(), _head: usize) {}

    fn scale(_args: &(), problem: &Problem) -> f32 {
        problem.scale
    }

    fn score(
        _args: &(),
        _problem: &Problem,
        _head: &(),
        product: f32,
        _row: u32,
        _column: u32,
    ) -> f32 {
        product
    }

    fn slope(
        _args: &(),
        _problem: &Problem,
        _head: &(),
        _score: f32,
        _row: u32,
        _column: u32,
    ) -> f32 {
        f32::cast_from(1u32)
    }
}
