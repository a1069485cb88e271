//! The levels above blocks: the moves from each to the next, and the gradients of its attention, of second parts to
//! first ones, on the flash core.

use std::marker::PhantomData;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::blocks::{BLOCK, MovedBlocks};
use super::moves::{
    AllLevelsLaunch, LevelSizesLaunch, MoveConfig, Moving, merge_transforms, move_vectors,
};
use super::moves_back::{PIECE, merge_gradients, move_gradients};
use super::parts::{Half, Level};
use crate::attention::decay::{DecayBiases, DecaySums, OptionalDecay, SPAN};
use crate::attention::flash::FlashAttention;
use crate::attention::flash::hooks::{Hooks, LaunchOf, NoBiases, PlainOperands, ScaledScore};
use crate::attention::flash::weight::{SoftmaxArgs, SoftmaxSavedRowsLaunch, SoftmaxWeight, sinks};
use crate::cuda::{CudaTensor, buffer, empty, narrow, reshaped, zeros};
use crate::ops::cuda::{as_u32, dims, elements};
use crate::tile::warpgroup::GROUP_THREADS;
use crate::tile::{CHUNK, MASKED};

/// The queries and keys of all levels and the transforms of their parts, in bf16: of each, one level after the other.
#[derive(Clone, Debug)]
pub struct Moved {
    /// Queries at the starts of their parts, of each level's second parts, `[batch · pairs · part, heads, head_dim]`.
    pub q: CudaTensor,
    /// Keys at the ends of their parts, of each level's first parts, likewise.
    pub k: CudaTensor,
    /// R of the blocks, as the sum of two, `[batch · parts, kv_heads, 2, head_dim, head_dim]`.
    pub blocks: CudaTensor,
    /// R of each further level but the last, whose vectors do not move, likewise.
    pub above: CudaTensor,
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

/// The hooks of a level's gradients, with biases `B`.
struct LevelHooks<B> {
    /// Tokens of a part.
    part: usize,
    decay: Option<DecaySums>,
    biases: PhantomData<B>,
}

impl<B: OptionalDecay> Hooks for LevelHooks<B> {
    type Operands = PlainOperands;
    type Biases = B;
    type Score = ScaledScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) {}

    fn biases(&self) -> LaunchOf<B::Args> {
        B::launch(self.decay.as_ref())
    }

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<SoftmaxArgs> {
        sinks(None)
    }

    fn block_shape(&self, (groups, tile): (usize, usize), _head_dim: usize) -> (usize, usize) {
        // A tile has the tokens of one part.
        (groups, tile.min(self.part))
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
    /// Of the queries of [`LevelRows`].
    pub dq: CudaTensor,
    /// Of its keys.
    pub dk: CudaTensor,
    /// Of its values.
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
    /// The gradients of the attention of a level's second parts to its first ones.
    pub fn backward(&self, level: &Level, rows: &LevelRows, saved: &Saved) -> LevelGradients {
        let documents = self.documents.as_ref().map(|x| level.documents(x));
        let decay = self.decay.as_ref().map(|DecaySums { within, before }| {
            let [batch, heads, spans, _]: [usize; 4] = before.meta.shape().dims();
            let before = reshaped(before, &[batch, heads, 2 * spans]);
            let within = level.rows(within, level.whole(1, 1), 0.0);
            let before = level.rows(&before, level.whole(SPAN, 2), 0.0);
            let [sequences, heads, numbers]: [usize; 3] = before.meta.shape().dims();
            let before = reshaped(&before, &[sequences, heads, numbers / 2, 2]);
            DecaySums { within, before }
        });
        let documents = documents.as_ref();
        match decay {
            Some(_) => self.gradients::<DecayBiases>(level, rows, decay, documents, saved),
            None => self.gradients::<NoBiases>(level, rows, decay, documents, saved),
        }
    }

    fn gradients<B: OptionalDecay>(
        &self,
        level: &Level,
        LevelRows { q, k, v }: &LevelRows,
        decay: Option<DecaySums>,
        documents: Option<&CudaTensor>,
        saved: &Saved,
    ) -> LevelGradients {
        let grad = level.take(saved.grad, Half::Second);
        let half = level.half(Half::Second);
        // Rows past the last token have no weight.
        let lse = level.rows(saved.lse, half, -MASKED);
        let delta = level.rows(saved.delta, half, 0.0);
        let saved = || SoftmaxSavedRowsLaunch::new(buffer(&lse, 1), buffer(&delta, 1));
        let hooks = LevelHooks::<B> { part: level.part, decay, biases: PhantomData };
        // Queries include the scale.
        let all = FlashAttention::new([q, k, v], 1.0, hooks)
            .after_keys()
            .window(self.window)
            .documents(documents)
            .backward(&grad, saved);
        LevelGradients {
            dq: all.dq,
            dk: all.dk,
            dv: all.dv,
            sums: all.ds_rows.zip(all.ds_columns).map(|(rows, columns)| [rows, columns]),
        }
    }
}

impl Moved {
    /// From the blocks' results.
    pub fn new(levels: &[Level], MovedBlocks { q, k, r, .. }: &MovedBlocks) -> Self {
        let [batch, parts, kv_heads, _, head_dim, _] = dims(r)[..] else {
            unreachable!("transforms have six dimensions")
        };
        let blocks = reshaped(r, &[batch * parts, kv_heads, 2, head_dim, head_dim]);
        let above = merge_all(levels, &blocks);
        let all = |x, moving| move_through(levels, x, &blocks, &above, moving);
        Moved { q: all(q, Moving::Queries), k: all(k, Moving::Keys), blocks, above }
    }

    /// The rows of a level's attention; `values` is `[batch, kv_heads, tokens, head_dim]`.
    pub fn rows(&self, levels: &[Level], number: usize, values: &CudaTensor) -> LevelRows {
        let level = &levels[number];
        let rows = |level: &Level| level.sequences() * level.part;
        let first = levels[..number].iter().map(rows).sum();
        let of = |all: &CudaTensor| {
            let mut x = leading(all, first, [level.sequences(), level.part]);
            x.meta.swap(1, 2);
            x
        };
        LevelRows { q: of(&self.q), k: of(&self.k), v: level.take(values, Half::First) }
    }

    /// R of a level's parts, `[batch, parts, kv_heads, 2, head_dim, head_dim]`, but for the last level.
    pub fn transforms(&self, levels: &[Level], number: usize) -> CudaTensor {
        let shape = |level: &Level| [level.batch, level.parts()];
        match number {
            0 => leading(&self.blocks, 0, shape(&levels[0])),
            _ => {
                let parts = |level: &Level| level.batch * level.parts();
                let first = levels[1..number].iter().map(parts).sum();
                leading(&self.above, first, shape(&levels[number]))
            }
        }
    }
}

/// All levels but the first and the last.
pub fn middle(levels: &[Level]) -> &[Level] {
    levels.get(1..levels.len().saturating_sub(1)).unwrap_or_default()
}

/// R of all levels but the first and the last.
fn merge_all(levels: &[Level], blocks: &CudaTensor) -> CudaTensor {
    let [_, kv_heads, _, _, head_dim] = dims(blocks)[..] else {
        unreachable!("transforms have five dimensions")
    };
    let config = MoveConfig { head_dim };
    let further = middle(levels);
    let count: usize = further.iter().map(|level| level.batch * level.parts()).sum();
    let above = empty(blocks, &[count.max(1), kv_heads, 2, head_dim, head_dim], DType::BF16);
    let (mut from, mut parts, mut first) =
        (blocks.clone(), levels.first().map_or(0, Level::parts), 0);
    for level in further {
        let merged = leading(&above, first, [level.batch, level.parts()]);
        let panels = level.parts() * config.groups();
        // SAFETY: a block writes rows of one transform, and reads two.
        unsafe {
            merge_transforms::launch_unchecked::<CudaRuntime>(
                &merged.client,
                CubeCount::Static(as_u32(panels), as_u32(kv_heads), as_u32(level.batch)),
                CubeDim::new_1d(GROUP_THREADS as u32),
                buffer(&from, CHUNK),
                buffer(&merged, CHUNK),
                as_u32(parts),
                config,
            );
        }
        first += level.batch * level.parts();
        (from, parts) = (merged, level.parts());
    }
    above
}

/// The rows of all levels, from vectors `[batch, tokens, heads, head_dim]` in f32.
fn move_through(
    levels: &[Level],
    x: &CudaTensor,
    blocks: &CudaTensor,
    above: &CudaTensor,
    moving: Moving,
) -> CudaTensor {
    let [batch, tokens, heads, head_dim] = dims(x)[..] else {
        unreachable!("vectors have four dimensions")
    };
    let kv_heads = dims(blocks)[1];
    let count: usize = levels.iter().map(|level| level.sequences() * level.part).sum();
    // No vector is written past the last token.
    let short = levels.iter().any(|level| level.pairs() * 2 * level.part > tokens);
    let make = if short { zeros } else { empty };
    let rows = make(x, &[count.max(1), heads, head_dim], DType::BF16);
    if levels.is_empty() {
        return rows;
    }
    // SAFETY: a block writes the rows of its tokens.
    unsafe {
        move_vectors::launch_unchecked::<CudaRuntime>(
            &x.client,
            CubeCount::Static(as_u32(tokens / BLOCK), as_u32(heads), as_u32(batch)),
            CubeDim::new_1d(GROUP_THREADS as u32),
            buffer(x, 2),
            buffer(&rows, 4),
            buffer(blocks, CHUNK),
            buffer(above, CHUNK),
            AllLevelsLaunch::new(
                levels.len() as u32,
                as_u32(tokens),
                as_u32(heads),
                as_u32(heads / kv_heads),
            ),
            moving,
            MoveConfig { head_dim },
        );
    }
    rows
}

/// A view of the contiguous `x` from `first` on, with `shape` in place of its first dimension.
fn leading(x: &CudaTensor, first: usize, shape: [usize; 2]) -> CudaTensor {
    let count = shape.iter().product::<usize>();
    let further = &dims(x)[1..];
    reshaped(&narrow(x, 0, first..first + count), &[&shape, further].concat())
}

/// The gradients of a level's vectors and transforms, each as the sum of two in bf16.
pub struct MovedGradients {
    /// Of the queries, `[2, batch, tokens, heads, head_dim]`.
    pub q: CudaTensor,
    /// Of the keys.
    pub k: CudaTensor,
    /// Of R, `[batch, parts, kv_heads, 2, head_dim, head_dim]`.
    pub transforms: CudaTensor,
}

impl MovedGradients {
    /// Those of the last level, whose vectors do not move; without a level, zero. The moved queries and keys, as the
    /// blocks leave them, have the dimensions `q` and `k`.
    pub fn last(
        like: &CudaTensor,
        [q, k]: [[usize; 4]; 2],
        last: Option<(&Level, &LevelGradients)>,
    ) -> Self {
        let [batch, tokens, kv_heads, head_dim] = k;
        let zero = |shape: &[usize]| zeros(like, shape, DType::BF16);
        let all = |[batch, tokens, heads, head_dim]: [usize; 4]| {
            zero(&[2, batch, tokens, heads, head_dim])
        };
        match last {
            Some((level, of_scores)) => MovedGradients {
                q: level.spread(&of_scores.dq, Half::Second),
                k: level.spread(&of_scores.dk, Half::First),
                transforms: zero(&[batch, level.parts(), kv_heads, 2, head_dim, head_dim]),
            },
            None => MovedGradients {
                q: all(q),
                k: all(k),
                transforms: zero(&[batch, tokens / BLOCK, kv_heads, 2, head_dim, head_dim]),
            },
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
        let gradients = empty(transforms, &dims(transforms), DType::BF16);
        let vectors = [
            (Moving::Queries, &self.q, &rows.q, &of_scores.dq),
            (Moving::Keys, &self.k, &rows.k, &of_scores.dk),
        ];
        for (moving, g, x, added) in vectors {
            let pieces = move_back(level, g, x, added, transforms, moving);
            merge(&self.transforms, transforms, &pieces, &gradients, moving);
        }
        MovedGradients { transforms: gradients, ..self }
    }
}

/// [`move_gradients`] of `g`, in place; returns the pieces of the transforms' gradients.
fn move_back(
    level: &Level,
    g: &CudaTensor,
    x: &CudaTensor,
    added: &CudaTensor,
    transforms: &CudaTensor,
    moving: Moving,
) -> CudaTensor {
    let [_, _, kv_heads, _, head_dim, _] = dims(transforms)[..] else {
        unreachable!("transforms have six dimensions")
    };
    let heads = dims(g)[3];
    let config = MoveConfig { head_dim };
    let [x, added] = [x, added].map(tokens_first);
    let shape = [level.part.div_ceil(PIECE), level.sequences(), kv_heads, head_dim, head_dim];
    let pieces = empty(transforms, &shape, DType::F32);
    // SAFETY: a block changes the gradients of its tokens, and writes one piece.
    unsafe {
        move_gradients::launch_unchecked::<CudaRuntime>(
            &g.client,
            CubeCount::Static(as_u32(shape[0]), as_u32(kv_heads), as_u32(shape[1])),
            CubeDim::new_1d(config.threads() as u32),
            buffer(g, CHUNK),
            buffer(&x, CHUNK),
            buffer(&added, CHUNK),
            buffer(transforms, CHUNK),
            buffer(&pieces, 2),
            (elements(g) / 2 / CHUNK) as u64,
            LevelSizesLaunch::new(
                as_u32(level.tokens),
                as_u32(level.part),
                as_u32(level.parts()),
                as_u32(heads),
                as_u32(heads / kv_heads),
            ),
            moving,
            config,
        );
    }
    pieces
}

/// [`merge_gradients`]: writes the gradients of one transform of each pair.
fn merge(
    of_pairs: &CudaTensor,
    transforms: &CudaTensor,
    pieces: &CudaTensor,
    gradients: &CudaTensor,
    moving: Moving,
) {
    let [batch, parts, kv_heads, _, head_dim, _] = dims(transforms)[..] else {
        unreachable!("transforms have six dimensions")
    };
    let config = MoveConfig { head_dim };
    let panels = parts.div_ceil(2) * config.groups();
    // SAFETY: a block writes rows of one transform's gradient.
    unsafe {
        merge_gradients::launch_unchecked::<CudaRuntime>(
            &gradients.client,
            CubeCount::Static(as_u32(panels), as_u32(kv_heads), as_u32(batch)),
            CubeDim::new_1d(GROUP_THREADS as u32),
            buffer(of_pairs, CHUNK),
            buffer(transforms, CHUNK),
            buffer(pieces, 2),
            buffer(gradients, CHUNK),
            as_u32(parts),
            as_u32(dims(pieces)[0]),
            moving,
            config,
        );
    }
}

/// `[batch, heads, tokens, channels]` as a contiguous `[batch, tokens, heads, channels]`.
fn tokens_first(x: &CudaTensor) -> CudaTensor {
    let mut x = x.clone();
    x.meta.swap(1, 2);
    crate::cuda::contiguous(&x)
}
