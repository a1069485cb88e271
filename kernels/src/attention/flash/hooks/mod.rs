//! The hooks by which a kind extends the flash kernels. A kind implements the traits whose default does not
//! fit, in its own folder, with its own launch arguments.
//!
//! | hook | purpose | default |
//! | --- | --- | --- |
//! | [`Operands`] | where q and k of a pair of tiles are; transform them before their product | [`PlainOperands`]: unchanged |
//! | [`Biases`] | add biases to scores by row and column | [`NoBiases`] |
//! | [`Score`] | turn a product q·k into a score | [`ScaledScore`]: scale · q·k |
//! | [`Weight`] | turn scores into weights and normalise rows | [`SoftmaxWeight`](super::weight::SoftmaxWeight) |
//!
//! Each hook has its own state per pass: `forward` and `dq`, where a warp holds 16 queries and loops over
//! key tiles; `dkv`, where it holds 16 keys and loops over query tiles; `dq_parts`, beside `dkv` in the kernel of
//! all gradients, for the part of dq that a block of keys adds; and `decode`, where it holds up to 16 heads of one
//! query. States read from memory one tile ahead.

mod defaults;

use burn::tensor::Element;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

pub use self::defaults::{NoBiases, PlainOperands, ScaledScore};
use super::mask::{QueryBlock, QueryGroup};
use super::problem::{KernelConfig, ProblemShape};
use crate::tile::votes::any_nonzero;
use crate::tile::warpgroup::RowsAt;
use crate::tile::{AFragments, Accumulator, Chunk, Pair};

/// A kind's hooks, with the tensors of their launch arguments.
pub trait Hooks: Send + Sync + 'static {
    /// The transform of q and k.
    type Operands: Operands;
    /// The biases of scores.
    type Biases: Biases;
    /// The score of a product q·k.
    type Score: Score;
    /// The weights and their normalisation.
    type Weight: Weight;

    /// The arguments of [`Hooks::Operands`].
    fn operands(&self) -> LaunchOf<<Self::Operands as Operands>::Args>;

    /// The arguments of [`Hooks::Biases`].
    fn biases(&self) -> LaunchOf<<Self::Biases as Biases>::Args>;

    /// The arguments of [`Hooks::Score`].
    fn score(&self) -> LaunchOf<<Self::Score as Score>::Args>;

    /// The arguments of [`Hooks::Weight`].
    fn weight(&self) -> LaunchOf<<Self::Weight as Weight>::Args>;

    /// Whether [`Score::score`] changes products beyond their scale, and whether [`Score::slope`] is called
    /// because it is not 1 everywhere; with [`Score::WEIGHS_PRODUCTS`] it never is.
    fn changes_scores(&self) -> [bool; 2] {
        [false, false]
    }

    /// Warpgroups per block and rows per tile; `shape` is the choice of plain attention for this head_dim. The kernel
    /// of all gradients has two warpgroups in any case.
    fn block_shape(&self, shape: (usize, usize), head_dim: usize) -> (usize, usize) {
        let _ = head_dim;
        shape
    }
}

/// The launch argument for a kernel argument of type `T`.
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
/// The row statistics that a kind's forward pass writes.
pub type StatisticsOf<A> = <<A as Hooks>::Weight as Weight>::Statistics;
/// The row statistics that a kind's backward pass reads.
pub type SavedRows<A> = <<A as Hooks>::Weight as Weight>::SavedRows;

/// Whether the backward pass sums dS over each query.
pub const fn sums_of_rows<A: Hooks>() -> bool {
    <A::Biases as Biases>::NEEDS_DS_SUMS || <A::Weight as Weight>::NEEDS_DS_ROW_SUMS
}

/// Whether rows have four statistics, see [`Weight::HAS_FOUR_STATISTICS`].
pub const fn four_statistics<A: Hooks>() -> bool {
    <A::Weight as Weight>::HAS_FOUR_STATISTICS
}

/// Whether weights are sparse, see [`Weight::SPARSE`].
pub const fn sparse<A: Hooks>() -> bool {
    <A::Weight as Weight>::SPARSE
}

/// Whether the product with a warpgroup's weights must be computed: if one of them is not 0. With
/// [`Weight::SPARSE`] its warps wait for one another.
#[cube]
pub fn adds_something<A: Hooks>(weights: &Accumulator, group: usize) -> bool {
    if comptime!(sparse::<A>()) { any_nonzero(weights, group) } else { true.runtime() }
}

/// Whether the backward pass sums dS over each key.
pub const fn sums_of_columns<A: Hooks>() -> bool {
    <A::Biases as Biases>::NEEDS_DS_SUMS
}
/// The type of a kind's dq and dk.
pub type GradientOf<A> = <<A as Hooks>::Operands as Operands>::Gradient;

/// The transform of q and k before their product, and of dq and dk after theirs.
#[cube]
pub trait Operands: Send + Sync + 'static {
    /// The launch arguments.
    type Args: LaunchArg + CubeType;
    /// The type of dq and dk as the kernels write them.
    type Gradient: Numeric + Element;
    /// State of the forward pass.
    type Forward: CubeType;
    /// State of the pass for dq.
    type Dq: CubeType;
    /// State of the pass for dk and dv.
    type Dkv: CubeType;
    /// State for the parts of dq that a block of keys adds, beside dk and dv.
    type DqParts: CubeType;
    /// State of decoding.
    type Decode: CubeType;

    /// Whether the forward pass holds queries in registers.
    const Q_IN_REGISTERS: bool;
    /// Whether queries may differ between tiles of keys in the forward pass. [`Operands::start_scores`] then takes them
    /// from their tile to registers: those of a later tile may replace them before its product ends.
    const CHANGES_QUERIES: bool;
    /// Whether dk is summed from the last query tile to the first, with the heads of a group interleaved at
    /// each tile. The kernel of all gradients always goes in reverse; there it decides only the interleaving.
    const DK_IN_REVERSE: bool;
    /// Whether dq and dk need the same dS to the bit, because a gradient is the difference of sums of both. The kernel
    /// of dq then adds biases to finished products, as that of dk does.
    const NEEDS_EQUAL_DS: bool;
    /// Whether the kernels multiply dq and dk by the scale.
    const SCALES_GRADIENTS: bool;

    /// The state of a warp whose first key tile begins at `column`. With [`Operands::Q_IN_REGISTERS`],
    /// `q_tile` is already loaded.
    fn forward(
        args: &Self::Args,
        problem: &ProblemShape,
        block: &QueryBlock,
        group: &QueryGroup,
        q_tile: &SharedMemory<Chunk>,
        column: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) -> Self::Forward;

    /// Starts the product of the queries and the key tile at chunk `at`; overwrites `s` if `fresh`, else adds
    /// to it.
    fn start_scores(
        state: &mut Self::Forward,
        s: &mut Accumulator,
        q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: KernelConfig,
    );

    /// Where the rows of the block's queries are that meet the keys from `column` on.
    fn queries_at(
        args: &Self::Args,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> RowsAt;

    /// Where the rows of the keys from `column` on are.
    fn keys_at(
        args: &Self::Args,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> RowsAt;

    /// Whether the key tile from `column` on meets other queries than the tile after it. Only called with
    /// [`Operands::CHANGES_QUERIES`].
    fn changes_queries(block: &QueryBlock, column: usize, #[comptime] config: KernelConfig)
    -> bool;

    /// Reads the data for the key tile from `column` on.
    fn read_ahead(
        state: &mut Self::Forward,
        args: &Self::Args,
        column: usize,
        #[comptime] config: KernelConfig,
    );

    /// As [`Operands::forward`].
    fn dq(
        args: &Self::Args,
        problem: &ProblemShape,
        block: &QueryBlock,
        group: &QueryGroup,
        column: usize,
        #[comptime] config: KernelConfig,
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
        #[comptime] config: KernelConfig,
    );

    /// Begins the key tile whose product has been started. If `ahead`, the next tile begins at `next`.
    fn begin_tile_of_dq(
        state: &mut Self::Dq,
        args: &Self::Args,
        warp: usize,
        next: usize,
        ahead: bool,
        #[comptime] config: KernelConfig,
    );

    /// Rescales dq so far to the units of the current tile's product.
    fn rescale_dq(
        state: &Self::Dq,
        dq: &mut Accumulator,
        warp: usize,
        #[comptime] config: KernelConfig,
    );

    /// The state of a warpgroup whose keys begin at `column`; `batch_kv_head` is batch · kv_heads + kv_head.
    fn dkv(
        args: &Self::Args,
        problem: &ProblemShape,
        batch_kv_head: usize,
        column: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) -> Self::Dkv;

    /// Reads the data for the query tile from `first_query` on; `first` for the first tile.
    fn read_queries(
        state: &mut Self::Dkv,
        args: &Self::Args,
        first_query: usize,
        warp: usize,
        #[comptime] first: bool,
        #[comptime] config: KernelConfig,
    );

    /// Begins the query tile that was read.
    fn begin_tile_of_dkv(state: &mut Self::Dkv, warp: usize, #[comptime] config: KernelConfig);

    /// Starts the product of the block's keys and the query tile at chunk `at`.
    fn start_scores_of_dkv(
        state: &mut Self::Dkv,
        s: &mut Accumulator,
        k_tile: &SharedMemory<Chunk>,
        q_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    );

    /// As [`Operands::rescale_dq`].
    fn rescale_dk(
        state: &Self::Dkv,
        dk: &mut Accumulator,
        warp: usize,
        #[comptime] config: KernelConfig,
    );

    /// The state for the block of keys from `first_column` on; `batch_kv_head` is batch · kv_heads + kv_head.
    fn dq_parts(
        args: &Self::Args,
        batch_kv_head: usize,
        first_column: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) -> Self::DqParts;

    /// Reads the data for the query tile from `first_query` on.
    fn read_queries_of_dq(
        state: &mut Self::DqParts,
        args: &Self::Args,
        first_query: usize,
        #[comptime] config: KernelConfig,
    );

    /// Begins the query tile that was read, from `first_query` on.
    fn begin_dq_part(
        state: &mut Self::DqParts,
        first_query: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    );

    /// Starts the query tile's part of dq: the warpgroup's part of the product of the block's dSᵀ, whose panel is at
    /// chunk `ds_at`, and the block's keys, whose columns are at chunk `k_at`.
    fn start_dq_part(
        state: &Self::DqParts,
        dq: &mut Accumulator,
        ds_tiles: &SharedMemory<Chunk>,
        ds_at: usize,
        k_tile: &SharedMemory<Chunk>,
        k_at: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    );

    /// Waits for the product of [`Operands::start_dq_part`], while the one started after it, dk's, may still run.
    /// Rescales it to units that all blocks of keys share.
    fn finish_dq_part(
        state: &Self::DqParts,
        dq: &mut Accumulator,
        warp: usize,
        #[comptime] config: KernelConfig,
    );

    /// The state for one query per head and key tiles from the one at `column` backwards; `batch_heads` are a
    /// lane's two heads, as batch · heads + head.
    fn decode(
        args: &Self::Args,
        problem: &ProblemShape,
        batch_kv_head: usize,
        batch_heads: &Array<usize>,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> Self::Decode;

    /// Rescales the queries to the key tile that was read; if `ahead`, reads the data for the tile at `next`.
    fn rescale_q(
        state: &mut Self::Decode,
        args: &Self::Args,
        q: &mut AFragments,
        warp: usize,
        next: usize,
        ahead: bool,
        #[comptime] config: KernelConfig,
    );
}

/// The queries of [`PlainOperands`] in the forward pass and in decoding, where they may differ between tiles of keys; and
/// where the rows of both are.
#[cube]
pub trait TileQueries: Send + Sync + 'static {
    /// The launch arguments.
    type Args: LaunchArg + CubeType;
    /// The state of a warp in decoding.
    type State: CubeType;

    /// As [`Operands::CHANGES_QUERIES`].
    const CHANGES_QUERIES: bool;

    /// As [`Operands::queries_at`].
    fn queries_at(
        args: &Self::Args,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> RowsAt;

    /// As [`Operands::keys_at`].
    fn keys_at(
        args: &Self::Args,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> RowsAt;

    /// As [`Operands::changes_queries`].
    fn changes_queries(block: &QueryBlock, column: usize, #[comptime] config: KernelConfig)
    -> bool;

    /// The state before the key tile at `column`, the last one; `batch_heads` are a lane's two heads, as
    /// batch · heads + head.
    fn begin(
        args: &Self::Args,
        problem: &ProblemShape,
        batch_heads: &Array<usize>,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> Self::State;

    /// Turns `q` from the queries of the tile before to those of the current one; the tile after it is at `next`.
    fn turn_to_tile(
        state: &mut Self::State,
        args: &Self::Args,
        q: &mut AFragments,
        next: usize,
        #[comptime] config: KernelConfig,
    );
}

/// Biases that are added to scores by row and column, natural logarithms. If [`Score::score`] does not change
/// products beyond their scale, accumulators of scores start from the biases; else they are added to its
/// results.
///
/// A row's biases may leave out a constant, its shift, which cancels in the softmax.
#[cube]
pub trait Biases: Send + Sync + 'static {
    /// The launch arguments.
    type Args: LaunchArg + CubeType;
    /// State of the passes that loop over key tiles.
    type KeyLoop: CubeType;
    /// State of the pass that loops over query tiles.
    type QueryLoop: CubeType;
    /// State of decoding.
    type Decode: CubeType;

    /// Whether there are biases.
    const ENABLED: bool;
    /// Whether the backward pass sums dS over each query and over each key.
    const NEEDS_DS_SUMS: bool;

    /// The state for the queries of a warpgroup.
    fn init_key_loop(
        args: &Self::Args,
        problem: &ProblemShape,
        block: &QueryBlock,
        group: &QueryGroup,
        #[comptime] config: KernelConfig,
    ) -> Self::KeyLoop;

    /// Reads the data for the key tile from `column` on.
    fn read_keys(
        state: &mut Self::KeyLoop,
        args: &Self::Args,
        problem: &ProblemShape,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    );

    /// Computes the biases of the tile that was read, times `factor`, for [`Biases::of_keys`].
    fn begin_keys(
        state: &mut Self::KeyLoop,
        factor: f32,
        warp: usize,
        #[comptime] config: KernelConfig,
    );

    /// The results of [`Biases::begin_keys`] for a lane's two keys from 8·`n` on.
    fn of_keys(
        state: &Self::KeyLoop,
        warp: usize,
        #[comptime] n: usize,
        #[comptime] config: KernelConfig,
    ) -> Pair;

    /// The shift of the query at `position`, in a warpgroup that begins at `first`: added to its scores, it
    /// completes the biases. `batch_head` is batch · heads + head.
    fn shift(
        args: &Self::Args,
        problem: &ProblemShape,
        batch_head: usize,
        first: usize,
        position: usize,
    ) -> f32;

    /// The state for a warp's keys.
    fn init_query_loop(#[comptime] config: KernelConfig) -> Self::QueryLoop;

    /// Reads the data for the query tile from `first_query` on, of head `batch_head`, and the warp's keys from
    /// `column` on.
    fn read_queries(
        state: &mut Self::QueryLoop,
        args: &Self::Args,
        problem: &ProblemShape,
        batch_head: usize,
        first_query: usize,
        column: usize,
        #[comptime] config: KernelConfig,
    );

    /// Begins the tile that was read.
    fn begin_tile(state: &mut Self::QueryLoop, #[comptime] config: KernelConfig);

    /// The bias, a natural logarithm, of a lane's key `r` and the tile's queries from 8·`n` on.
    fn bias_of_key(
        state: &Self::QueryLoop,
        #[comptime] n: usize,
        #[comptime] r: usize,
        #[comptime] config: KernelConfig,
    ) -> f32;

    /// The state for a lane's two heads of one query, as batch · heads + head.
    fn decode(
        args: &Self::Args,
        problem: &ProblemShape,
        batch_heads: &Array<usize>,
    ) -> Self::Decode;

    /// Reads the biases, base 2, of a warp's 16 keys from `column` on, in the tile that begins at `tile`.
    fn read_biases(
        state: &mut Self::Decode,
        args: &Self::Args,
        problem: &ProblemShape,
        tile: usize,
        column: usize,
    );

    /// The bias of a lane's head `r` and key 8·`n` + `e`.
    fn bias(
        state: &Self::Decode,
        #[comptime] r: usize,
        #[comptime] n: usize,
        #[comptime] e: usize,
    ) -> f32;
}

/// The score of a product q·k, without biases.
#[cube]
pub trait Score: Send + Sync + 'static {
    /// The launch arguments.
    type Args: LaunchArg + CubeType;
    /// The parameters of one query head.
    type Head: CubeType;

    /// Whether the backward pass computes weights from products, by [`Score::weigh`], and not from scores: for
    /// scores that do not determine their product. A masked key's product is then 0.
    const WEIGHS_PRODUCTS: bool;

    /// The parameters of the query head `head`.
    fn head(args: &Self::Args, head: usize) -> Self::Head;

    /// The factor that remains to be applied to the result of [`Score::score`].
    fn scale(args: &Self::Args, problem: &ProblemShape) -> f32;

    /// The score, up to [`Score::scale`], of the query at `row` and the key at `column`; only called with
    /// [`Hooks::changes_scores`].
    fn score(
        args: &Self::Args,
        problem: &ProblemShape,
        head: &Self::Head,
        product: f32,
        row: u32,
        column: u32,
    ) -> f32;

    /// The derivative of that score with respect to scale · q·k. It must not be negative for masked keys,
    /// whose weight must stay 0.
    fn slope(
        args: &Self::Args,
        problem: &ProblemShape,
        head: &Self::Head,
        score: f32,
        row: u32,
        column: u32,
    ) -> f32;

    /// The weight of a product, and its derivative with respect to scale · q·k; both are 0 for a product of 0.
    /// `shift`, base 2, is the bias and the shift of [`Weight::weigh`]; for a masked key it may be of any size.
    /// Only called with [`Score::WEIGHS_PRODUCTS`].
    fn weigh(args: &Self::Args, product: f32, shift: f32) -> (f32, f32);
}

/// The weight of a score, and the normalisation of a row of weights.
#[cube]
pub trait Weight: Send + Sync + 'static {
    /// The launch arguments.
    type Args: LaunchArg + CubeType;
    /// A lane's state for its two rows in the forward pass.
    type RowState: CubeType;
    /// The statistics that the forward pass writes for each row, `[batch, heads, queries]`.
    type Statistics: LaunchArg + CubeType;
    /// The statistics that the backward pass reads for each row, `[batch, heads, queries]`.
    type SavedRows: LaunchArg + CubeType;

    /// A constant factor on scores: log₂ e where weights are exponentials, because the hardware computes 2ˣ.
    const SCORE_FACTOR: f32;
    /// Whether there are statistics of rows.
    const HAS_STATISTICS: bool;
    /// Whether the backward pass sums dS over each query, for the gradient of a row's parameter.
    const NEEDS_DS_ROW_SUMS: bool;
    /// Whether weights depend on more than a shift of scores, and dS is not a slope times dP less a number: the
    /// backward pass then reads four statistics of a row, and calls [`Weight::weight_of`] and [`Weight::ds_of`]
    /// in place of [`Weight::weigh`].
    const HAS_FOUR_STATISTICS: bool;
    /// Whether weights are exactly 0 for most keys: the forward pass then leaves out a tile's product with the values
    /// where a warpgroup has no other weight, so that an infinite value does not show there.
    const SPARSE: bool;
    /// Whether a query attends to its own key.
    const SEES_ITSELF: bool;
    /// Whether weights depend on the keys after them, through one factor per row, the carry: 1 at the row's last
    /// key, multiplied by every key, and never rising. Then [`in_order`](super::in_order) does the passes, without
    /// [`Weight::saved`] and [`Weight::weigh`], and the statistic of a split is the factor that its keys put on
    /// the weights of all keys before them.
    const IN_ORDER: bool;

    /// The state before the first key of a lane's two rows, which have these indices in
    /// `[batch, heads, queries]`, and whose scores are times `scale`.
    fn init_rows(args: &Self::Args, rows: &Array<usize>, scale: f32) -> Self::RowState;

    /// Turns a tile's scores, times `scale`, into weights in place, updates the row state, and rescales `o`,
    /// the accumulator so far, if the row state's reference changes.
    fn add_tile(
        rows: &mut Self::RowState,
        s: &mut Accumulator,
        o: &mut Accumulator,
        scale: f32,
        #[comptime] n_keys: usize,
        #[comptime] n_dim: usize,
    );

    /// The final factor on `o` for a lane's row `r`, whose scores lack `shift`, a natural logarithm. If
    /// `write` is set, writes the row's statistics to index `at`.
    fn finish(
        rows: &Self::RowState,
        args: &Self::Args,
        statistics: &mut Self::Statistics,
        head: usize,
        at: usize,
        write: bool,
        scale: f32,
        shift: f32,
        #[comptime] r: usize,
    ) -> f32;

    /// The final factor and the statistic of one split of a row's keys; without [`Weight::IN_ORDER`], the
    /// statistic of a split without a visible key is [`MASKED`].
    ///
    /// [`MASKED`]: crate::tile::MASKED
    fn finish_split(rows: &Self::RowState, scale: f32, #[comptime] r: usize) -> (f32, f32);

    /// The weight of a split in the sum of all splits, from its statistic and the largest of any split.
    fn split_factor(statistic: f32, max_statistic: f32) -> f32;

    /// The final factor on `o` and the statistic of a whole row of `head`, where `total` is the sum of the
    /// splits' weights. With [`Weight::IN_ORDER`], `max_statistic` is the product of the splits' statistics.
    fn combine(
        args: &Self::Args,
        head: usize,
        max_statistic: f32,
        total: f32,
        shift: f32,
    ) -> (f32, f32);

    /// The saved statistics of a row: the shift of its scores (for softmax lse), and the number to subtract
    /// from the gradients of its weights (for softmax δ).
    fn saved(saved: &Self::SavedRows, at: usize) -> (f32, f32);

    /// The weight of a score times `scale` plus `shift`, and its derivative with respect to the score without
    /// [`Weight::SCORE_FACTOR`]. `saved` is here for its compile-time settings.
    fn weigh(saved: &Self::SavedRows, score: f32, scale: f32, shift: f32) -> (f32, f32);

    /// The last two of a row's four statistics; [`Weight::saved`] gives the first two.
    fn saved_more(saved: &Self::SavedRows, at: usize) -> (f32, f32);

    /// The weight of a score times `scale`, for a row with these four statistics, and a number that takes the
    /// score's place until [`Weight::ds_of`].
    fn weight_of(
        saved: &Self::SavedRows,
        score: f32,
        scale: f32,
        statistics: Vector<f32, Const<4>>,
    ) -> (f32, f32);

    /// dS, without [`Weight::SCORE_FACTOR`], from the second number of [`Weight::weight_of`] and the gradient of
    /// the weight; 0 for a masked key.
    fn ds_of(saved: &Self::SavedRows, kept: f32, statistics: Vector<f32, Const<4>>, dp: f32)
    -> f32;

    /// The carry of a lane's row `r` after the tiles so far. Only called with [`Weight::IN_ORDER`].
    fn carry(rows: &Self::RowState, #[comptime] r: usize) -> f32;

    /// Turns a tile's scores `s`, times `scale`, into dS in place, and sets `p` to the weights if `with_p`. `dp` is
    /// the gradient of the weights, and is overwritten. For a lane's two rows, `carries` are the carries at the
    /// tile's end, and `sums` the sums of weight · dP over all keys before the tile, to which it adds the tile's.
    /// Only called with [`Weight::IN_ORDER`].
    fn gradients_in_order(
        s: &mut Accumulator,
        dp: &mut Accumulator,
        p: &mut AFragments,
        carries: &Array<f32>,
        sums: &mut Array<f32>,
        scale: f32,
        #[comptime] with_p: bool,
        #[comptime] n_keys: usize,
    );
}
