//! Products of Householder-like transforms over blocks of tokens (sections 3.1 to 3.3).
//!
//! The product over a block is I − Yᵀ W, with the directions w_t as the rows of W and
//! y_t = β_t H_first ⋯ H_{t−1} w_t as those of Y. The paper finds Y = T⁻¹ W from a triangle of dot
//! products, T⁻¹ = (I + strictLower(D W Wᵀ))⁻¹ D. (D = diag β scales the rows; T⁻¹ is lower
//! triangular, and a product in rising order takes its transpose, as in the matrix form of section
//! 3.2: the paper's T⁻¹ in section 3.1 is that of the falling order.)
//!
//! Where directions nearly repeat and β is near 2, all entries of that inverse are near 4 with
//! alternating signs, and in a block of 64 they amplify the rounding of the dot products by thousands. So
//! the inverse is only used for tiles of 16 tokens. Neighbouring tiles are merged, to 32 and then 64, by
//! applying the transform of one tile to the vectors of the other. Transforms lengthen no vector, so this
//! does not amplify rounding. It also takes half the arithmetic.
//!
//! A score of i and j depends only on j, the transforms after it and i: anything else, such as another
//! document's tokens, enters with a factor of exactly 0.
use burn::tensor::{Bool, Tensor, TensorData};

use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// Tokens per tile whose triangular matrix is inverted.
const TILE_TOKENS: usize = 16;

/// Blocks of tokens after their own transforms. In shapes, rows is batch · kv_heads, group the query heads
/// per kv head, blocks and block the number and length of the blocks.
#[derive(Clone, Debug)]
pub struct TransformedBlocks<B: OpBackend> {
    /// (H_first ⋯ H_i) q_i, where first is the block's first token:
    /// `[rows, group, blocks, block, head_dim]`.
    pub q: Tensor<B, 5>,
    /// (H_{j+1} ⋯ H_last)ᵀ k_j, `[rows, 1, blocks, block, head_dim]`.
    pub k: Tensor<B, 5>,
    /// k_jᵀ (H_{j+1} ⋯ H_i) q_i for i, j of one block, `[rows, group, blocks, block, block]`;
    /// meaningless where j > i.
    pub scores: Tensor<B, 5>,
    /// I − P of each block, `[rows, 1, blocks, head_dim, head_dim]`, where P = H_first ⋯ H_last: as row
    /// vectors, queries that move to before the block are multiplied by Pᵀ, keys that move to after it by P.
    /// I − P is stored because P itself, with 1 on its diagonal, would lose the digits of small transforms.
    pub removed: Tensor<B, 5>,
}

impl<B: OpBackend> TransformedBlocks<B> {
    /// Transforms tokens in blocks of `block`: queries `[rows, group, tokens, head_dim]`, keys and
    /// directions of norm at most 1 `[rows, 1, tokens, head_dim]`, β in [0, 2]
    /// `[rows, 1, tokens, 1]`.
    ///
    /// # Panics
    /// When `block` is not a power of two, or does not divide the number of tokens.
    pub fn new([q, k, w, beta]: [Tensor<B, 4>; 4], block: usize) -> Self {
        let tokens = w.dims()[2];
        assert!(
            block.is_power_of_two() && tokens.is_multiple_of(block),
            "{tokens} tokens in blocks of {block}, which is no power of two or does not divide them"
        );
        let tile = block.min(TILE_TOKENS);
        let mut tiles = TransformedTiles::new([q, k, w, beta].map(|x| {
            let [rows, heads, _, channels] = x.dims();
            x.reshape([rows, heads, tokens / tile, tile, channels])
        }));
        while tiles.len() < block {
            tiles = tiles.merged();
        }
        let TransformedTiles { q, k, y, w, scores } = tiles;
        TransformedBlocks { q, k, scores, removed: y.transpose().mm(w) }
    }
}

/// As [`TransformedBlocks`], for tiles of any length while they are merged.
struct TransformedTiles<B: OpBackend> {
    q: Tensor<B, 5>,
    k: Tensor<B, 5>,
    /// β_t H_first ⋯ H_{t−1} w_t, `[rows, 1, tiles, len, head_dim]`.
    y: Tensor<B, 5>,
    w: Tensor<B, 5>,
    scores: Tensor<B, 5>,
}

impl<B: OpBackend> TransformedTiles<B> {
    /// Tiles `[rows, heads, tiles, len, channels]` through L = T⁻¹: for s ≤ e,
    /// H_s ⋯ H_e = I − Σ_{s≤a≤b≤e} w_a L_ba w_bᵀ, so that the product over a part of the tile is a mask on
    /// the factors beside L.
    fn new([q, k, w, beta]: [Tensor<B, 5>; 4]) -> Self {
        let overlaps = w.clone().mm(w.clone().transpose()).tril(-1) * beta.clone();
        let lower = unit_lower_inverse(overlaps) * beta.transpose();
        let y = lower.clone().mm(w.clone());
        let lwk = lower.mm(w.clone().mm(k.clone().transpose()).tril(-1));
        let qw = q.clone().mm(w.clone().transpose()).tril(0);
        TransformedTiles {
            scores: q.clone().mm(k.clone().transpose()) - qw.clone().mm(lwk.clone()),
            q: q - qw.mm(y.clone()),
            k: k - lwk.transpose().mm(w.clone()),
            y,
            w,
        }
    }

    /// Tokens per tile.
    fn len(&self) -> usize {
        self.w.dims()[3]
    }

    /// Tiles of twice the length.
    fn merged(self) -> Self {
        let [q1, q2] = halves(self.q);
        let [k1, k2] = halves(self.k);
        let [y1, y2] = halves(self.y);
        let [w1, w2] = halves(self.w);
        let [s1, s2] = halves(self.scores);
        let zeros = s1.zeros_like();
        let corner = q2.clone().mm(k1.clone().transpose());
        // As rows, x (I − W₁ᵀ Y₁): to before the first tile.
        let back = |x: Tensor<B, 5>| {
            let along = x.clone().mm(w1.clone().transpose());
            x - along.mm(y1.clone())
        };
        // x (I − Y₂ᵀ W₂): to after the second.
        let along = k1.clone().mm(y2.clone().transpose());
        let ahead = k1 - along.mm(w2.clone());
        let cat = |a, b, dim| Tensor::cat(vec![a, b], dim);
        TransformedTiles {
            q: cat(q1, back(q2), 3),
            k: cat(ahead, k2, 3),
            y: cat(y1.clone(), back(y2), 3),
            scores: cat(cat(s1, zeros, 4), cat(corner, s2, 4), 3),
            w: cat(w1, w2, 3),
        }
    }
}

/// The first and the second tiles of each pair.
fn halves<B: OpBackend>(x: Tensor<B, 5>) -> [Tensor<B, 5>; 2] {
    let [rows, heads, tiles, len, channels] = x.dims();
    let pairs = x.reshape([rows, heads, tiles / 2, 2 * len, channels]);
    [0, len].map(|from| pairs.clone().narrow(3, from, len))
}

/// (I + N)⁻¹ for strictly lower triangular N `[rows, 1, tiles, len, len]`; len is a power of two.
///
/// Inverts diagonal blocks that double in size at each step:
/// [A 0; C D]⁻¹ = [A⁻¹ 0; −D⁻¹ C A⁻¹ D⁻¹]. The product (I − N)(I + N²)(I + N⁴) ⋯ would take as many
/// steps, but powers of N grow far beyond the inverse.
fn unit_lower_inverse<B: OpBackend>(strict: Tensor<B, 5>) -> Tensor<B, 5> {
    let len = strict.dims()[4];
    let device = strict.device();
    let eye = Tensor::eye(len, &device).reshape([1, 1, 1, len, len]);
    let mut inverse = eye.expand(strict.shape());
    let mut half = 1;
    while half < len {
        // True outside the blocks C of this size.
        let others: Vec<bool> = (0..len * len)
            .map(|at| {
                let (row, column) = (at / len / half, at % len / half);
                row % 2 == 0 || column + 1 != row
            })
            .collect();
        let others = TensorData::new(others, [1, 1, 1, len, len]);
        let others = Tensor::<B, 5, Bool>::from_data(others, &device);
        let c = strict.clone().mask_fill(others.expand(strict.shape()), 0.0);
        let corner = match half {
            1 => c,
            _ => inverse.clone().mm(c).mm(inverse.clone()),
        };
        inverse = inverse - corner;
        half *= 2;
    }
    inverse
}
