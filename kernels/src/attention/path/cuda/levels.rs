//! The levels above blocks: at each, attention of second parts to first ones on the flash core, and the moves to the
//! next.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::moves::{
    LevelSizesLaunch, MoveConfig, Moving, TILES_PER_BLOCK, merge_transforms, move_vectors,
};
use super::moves_back::{PIECE, merge_gradients, move_gradients};
use super::parts::{Half, Level};
use crate::attention::decay::{DecayBiases, DecaySums, SPAN, Sums};
use crate::attention::flash::FlashAttention;
use crate::attention::flash::hooks::{
    Biases, Hooks, LaunchOf, NoBiases, PlainOperands, ScaledScore,
};
use crate::attention::flash::weight::{
    Sinks, SoftmaxOutput, SoftmaxSavedRowsLaunch, SoftmaxWeight, sinks,
};
use crate::cuda::{CudaTensor, buffer, empty, zeros};
use crate::ops::cuda::{as_u32, dims};
use crate::tile::MASKED;

/// Vectors in f32 and rounded to bf16, `[batch, tokens, heads, head_dim]`.
#[derive(Clone, Debug)]
pub struct Vectors {
    /// In f32.
    pub exact: CudaTensor,
    /// In bf16.
    pub rounded: CudaTensor,
}

impl Vectors {
    /// Uninitialised vectors.
    pub fn uninit(like: &CudaTensor, shape: [usize; 4]) -> Self {
        Vectors {
            exact: empty(like, &shape, DType::F32),
            rounded: empty(like, &shape, DType::BF16),
        }
    }

    /// The rounded vectors as `[batch, heads, tokens, head_dim]`.
    fn heads_first(&self) -> CudaTensor {
        let mut view = self.rounded.clone();
        view.meta.swap(1, 2);
        view
    }
}

/// The vectors of a level, and the transforms of its parts.
#[derive(Clone, Debug)]
pub struct Moved {
    /// Queries at the start of their part.
    pub q: Vectors,
    /// Keys at the end of their part.
    pub k: Vectors,
    /// R, `[batch, parts, kv_heads, head_dim, head_dim]` in f32.
    pub transforms: CudaTensor,
}

/// What a level's scores see beside its vectors.
#[derive(Clone, Debug)]
pub struct Masks {
    /// With a window w, a query sees its own key and the w − 1 before it.
    pub window: Option<usize>,
    /// The start of each position's document, `[batch, tokens]`.
    pub documents: Option<CudaTensor>,
    /// The decay's prefix sums.
    pub decay: Option<DecaySums>,
}

/// The hooks of a level.
struct LevelHooks {
    /// Tokens of a part.
    part: usize,
    decay: Option<DecaySums>,
}

/// [`LevelHooks`] with biases `B`.
struct WithBiases<B>(LevelHooks, std::marker::PhantomData<B>);

/// The arguments of biases, which a decay has.
trait LevelBiases: Biases + Sized {
    fn launch(hooks: &LevelHooks) -> LaunchOf<Self::Args>;
}

impl LevelBiases for NoBiases {
    fn launch(_hooks: &LevelHooks) {}
}

impl LevelBiases for DecayBiases {
    fn launch(hooks: &LevelHooks) -> LaunchOf<Sums> {
        hooks.decay.as_ref().expect("a decay's biases have sums").launch()
    }
}

impl<B: LevelBiases> Hooks for WithBiases<B> {
    type Operands = PlainOperands;
    type Biases = B;
    type Score = ScaledScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) {}

    fn biases(&self) -> LaunchOf<B::Args> {
        B::launch(&self.0)
    }

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<Sinks> {
        sinks(None)
    }

    fn block_shape(&self, (groups, tile): (usize, usize), _head_dim: usize) -> (usize, usize) {
        // A tile has the tokens of one part.
        (groups, tile.min(self.0.part))
    }
}

/// The rows that a level's attention is computed from.
#[derive(Clone, Debug)]
pub struct LevelRows {
    /// Queries of second parts, `[batch · pairs, heads, part, head_dim]`.
    pub q: CudaTensor,
    /// Keys of first parts.
    pub k: CudaTensor,
    /// Values of first parts.
    pub v: CudaTensor,
}

/// The gradients of a level's attention.
pub struct LevelGradients {
    /// Of [`LevelRows`].
    pub dq: CudaTensor,
    /// As dq.
    pub dk: CudaTensor,
    /// As dq.
    pub dv: CudaTensor,
    /// Σ_j dS_ij, `[batch · pairs, heads, 2 · part]`, and Σ_i dS_ij, `[batch · pairs, heads, part]`.
    pub sums: Option<[CudaTensor; 2]>,
}

/// The rows' statistics for the backward pass, `[batch, heads, tokens]`.
pub struct Saved<'a> {
    /// The gradient of the output, `[batch, heads, tokens, head_dim]` in bf16.
    pub grad: &'a CudaTensor,
    /// Log-sum-exp, base 2.
    pub lse: &'a CudaTensor,
    /// rowsum(dO ⊙ O).
    pub delta: &'a CudaTensor,
}

impl Masks {
    /// Calls `run` with the level's attention.
    fn attention<R>(&self, level: &Level, rows: &LevelRows, with: impl LevelWork<Output = R>) -> R {
        let documents = self.documents.as_ref().map(|x| level.documents(x));
        let decay = self.decay.as_ref().map(|DecaySums { within, before }| {
            let [batch, heads, spans, _]: [usize; 4] = before.meta.shape().dims();
            let before = crate::cuda::reshaped(before, &[batch, heads, 2 * spans]);
            let within = level.rows(within, level.whole(1, 1), 0.0);
            let before = level.rows(&before, level.whole(SPAN, 2), 0.0);
            let [sequences, heads, numbers]: [usize; 3] = before.meta.shape().dims();
            let before = crate::cuda::reshaped(&before, &[sequences, heads, numbers / 2, 2]);
            DecaySums { within, before }
        });
        let biased = decay.is_some();
        let hooks = LevelHooks { part: level.part, decay };
        if biased {
            with.run(self.flash::<DecayBiases>(rows, hooks, documents.as_ref()))
        } else {
            with.run(self.flash::<NoBiases>(rows, hooks, documents.as_ref()))
        }
    }

    fn flash<B: LevelBiases>(
        &self,
        LevelRows { q, k, v }: &LevelRows,
        hooks: LevelHooks,
        documents: Option<&CudaTensor>,
    ) -> FlashAttention<WithBiases<B>> {
        // Queries include the scale.
        FlashAttention::new([q, k, v], 1.0, WithBiases(hooks, std::marker::PhantomData))
            .after_keys()
            .window(self.window)
            .documents(documents)
    }

    /// The attention of a level's second parts to its first ones.
    pub fn attend(&self, level: &Level, rows: &LevelRows) -> SoftmaxOutput {
        self.attention(level, rows, Attend)
    }

    /// Its gradients.
    pub fn backward(&self, level: &Level, rows: &LevelRows, saved: &Saved) -> LevelGradients {
        let grad = level.take(saved.grad, Half::Second);
        let half = level.half(Half::Second);
        // Rows past the last token have no weight.
        let lse = level.rows(saved.lse, half, -MASKED);
        let delta = level.rows(saved.delta, half, 0.0);
        self.attention(level, rows, Backward { grad, lse, delta })
    }
}

/// What is done with a level's attention, with or without biases.
trait LevelWork {
    type Output;

    fn run<B: LevelBiases>(self, flash: FlashAttention<WithBiases<B>>) -> Self::Output;
}

struct Attend;

impl LevelWork for Attend {
    type Output = SoftmaxOutput;

    fn run<B: LevelBiases>(self, flash: FlashAttention<WithBiases<B>>) -> SoftmaxOutput {
        flash.softmax(false)
    }
}

struct Backward {
    grad: CudaTensor,
    lse: CudaTensor,
    delta: CudaTensor,
}

impl LevelWork for Backward {
    type Output = LevelGradients;

    fn run<B: LevelBiases>(self, flash: FlashAttention<WithBiases<B>>) -> LevelGradients {
        let saved = || SoftmaxSavedRowsLaunch::new(buffer(&self.lse, 1), buffer(&self.delta, 1));
        let all = flash.backward(&self.grad, saved);
        LevelGradients {
            dq: all.dq,
            dk: all.dk,
            dv: all.dv,
            sums: all.ds_rows.zip(all.ds_columns).map(|(rows, columns)| [rows, columns]),
        }
    }
}

impl Moved {
    fn config(&self) -> MoveConfig {
        MoveConfig { head_dim: dims(&self.transforms)[4] }
    }

    /// The rows of this level's attention; `values` is `[batch, kv_heads, tokens, head_dim]`. With `keep`, they stay
    /// as they are when the vectors move on.
    pub fn rows(&self, level: &Level, values: &CudaTensor, keep: bool) -> LevelRows {
        let take = |x: &Vectors, half| match keep {
            true => level.copy(&x.heads_first(), half),
            false => level.take(&x.heads_first(), half),
        };
        LevelRows {
            q: take(&self.q, Half::Second),
            k: take(&self.k, Half::First),
            v: level.take(values, Half::First),
        }
    }

    /// Moves the vectors to the next level, and merges the transforms.
    pub fn advance(&mut self, level: &Level) {
        self.advance_vectors(level, &self.q, Moving::Queries);
        self.advance_vectors(level, &self.k, Moving::Keys);
        let [batch, parts, kv_heads, head_dim, _] = dims(&self.transforms)[..] else {
            unreachable!("transforms have five dimensions")
        };
        let next = parts.div_ceil(2);
        let merged =
            empty(&self.transforms, &[batch, next, kv_heads, head_dim, head_dim], DType::F32);
        let config = self.config();
        // SAFETY: a block writes one transform, and reads two.
        unsafe {
            merge_transforms::launch_unchecked::<CudaRuntime>(
                &merged.client,
                CubeCount::Static(as_u32(next), as_u32(kv_heads), as_u32(batch)),
                CubeDim::new_1d(config.threads() as u32),
                buffer(&self.transforms, 2),
                buffer(&merged, 2),
                as_u32(parts),
                config,
            );
        }
        self.transforms = merged;
    }

    fn advance_vectors(&self, level: &Level, x: &Vectors, moving: Moving) {
        let heads = dims(&x.exact)[2];
        let config = self.config();
        let blocks = level.part.div_ceil(config.rows() * TILES_PER_BLOCK);
        // SAFETY: a block changes the vectors of its tiles.
        unsafe {
            move_vectors::launch_unchecked::<CudaRuntime>(
                &x.exact.client,
                CubeCount::Static(as_u32(blocks), as_u32(heads), as_u32(level.sequences())),
                CubeDim::new_1d(config.threads() as u32),
                buffer(&x.exact, 2),
                buffer(&x.rounded, 2),
                buffer(&self.transforms, 2),
                sizes(level, heads, dims(&self.transforms)[2]),
                moving,
                config,
            );
        }
    }
}

fn sizes(level: &Level, heads: usize, kv_heads: usize) -> LevelSizesLaunch<CudaRuntime> {
    LevelSizesLaunch::new(
        as_u32(level.tokens),
        as_u32(level.part),
        as_u32(level.parts()),
        as_u32(heads),
        as_u32(heads / kv_heads),
    )
}

/// The gradients of a level's vectors and transforms.
pub struct MovedGradients {
    /// Of the queries, `[batch, tokens, heads, head_dim]` in f32.
    pub q: CudaTensor,
    /// Of the keys.
    pub k: CudaTensor,
    /// Of R, `[batch, parts, kv_heads, head_dim, head_dim]` in f32.
    pub transforms: CudaTensor,
}

impl MovedGradients {
    /// Those before any level: zero.
    pub fn zeros(like: &Moved, parts: usize) -> Self {
        let [batch, _, kv_heads, head_dim, _] = dims(&like.transforms)[..] else {
            unreachable!("transforms have five dimensions")
        };
        let of = |x: &CudaTensor, shape: &[usize]| zeros(x, shape, DType::F32);
        MovedGradients {
            q: of(&like.q.exact, &dims(&like.q.exact)),
            k: of(&like.k.exact, &dims(&like.k.exact)),
            transforms: of(&like.transforms, &[batch, parts, kv_heads, head_dim, head_dim]),
        }
    }

    /// From the gradients at the next level to those at `level`: back through the moves, plus those of the level's
    /// scores. `transforms` are R of its parts.
    pub fn retreat(
        self,
        level: &Level,
        rows: &LevelRows,
        of_scores: &LevelGradients,
        transforms: &CudaTensor,
    ) -> Self {
        let [batch, parts, kv_heads, head_dim, _] = dims(transforms)[..] else {
            unreachable!("transforms have five dimensions")
        };
        let config = MoveConfig { head_dim };
        let by_queries =
            retreat(level, &self.q, &rows.q, &of_scores.dq, transforms, Moving::Queries);
        let by_keys = retreat(level, &self.k, &rows.k, &of_scores.dk, transforms, Moving::Keys);
        let gradients =
            empty(transforms, &[batch, parts, kv_heads, head_dim, head_dim], DType::F32);
        // SAFETY: a block writes the gradients of two transforms.
        unsafe {
            merge_gradients::launch_unchecked::<CudaRuntime>(
                &gradients.client,
                CubeCount::Static(as_u32(parts.div_ceil(2)), as_u32(kv_heads), as_u32(batch)),
                CubeDim::new_1d(config.threads() as u32),
                buffer(&self.transforms, 2),
                buffer(transforms, 2),
                buffer(&by_queries, 2),
                buffer(&by_keys, 2),
                buffer(&gradients, 2),
                as_u32(parts),
                as_u32(pieces(level)),
                config,
            );
        }
        MovedGradients { transforms: gradients, ..self }
    }
}

/// Pieces of a part.
fn pieces(level: &Level) -> usize {
    level.part.div_ceil(PIECE)
}

/// [`move_gradients`] of `g`, in place; returns the pieces of the transforms' gradients.
fn retreat(
    level: &Level,
    g: &CudaTensor,
    x: &CudaTensor,
    added: &CudaTensor,
    transforms: &CudaTensor,
    moving: Moving,
) -> CudaTensor {
    let [_, _, kv_heads, head_dim, _] = dims(transforms)[..] else {
        unreachable!("transforms have five dimensions")
    };
    let heads = dims(g)[2];
    let config = MoveConfig { head_dim };
    let [x, added] = [x, added].map(tokens_first);
    let shape = [pieces(level), level.sequences(), kv_heads, head_dim, head_dim];
    let pieces = empty(transforms, &shape, DType::F32);
    // SAFETY: a block changes the gradients of its tokens, and writes one piece.
    unsafe {
        move_gradients::launch_unchecked::<CudaRuntime>(
            &g.client,
            CubeCount::Static(as_u32(shape[0]), as_u32(kv_heads), as_u32(shape[1])),
            CubeDim::new_1d(config.threads() as u32),
            buffer(g, 2),
            buffer(&x, crate::tile::CHUNK),
            buffer(&added, 2),
            buffer(transforms, 2),
            buffer(&pieces, 2),
            sizes(level, heads, kv_heads),
            moving,
            config,
        );
    }
    pieces
}

/// `[batch, heads, tokens, channels]` as a contiguous `[batch, tokens, heads, channels]`.
fn tokens_first(x: &CudaTensor) -> CudaTensor {
    let mut x = x.clone();
    x.meta.swap(1, 2);
    crate::cuda::contiguous(&x)
}
