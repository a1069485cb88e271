//! What the attention references share: blocks of queries, masks and decays between tokens.
//! Positions count keys from 0; the queries are those of the last keys.

use std::ops::Range;

use burn::tensor::{Bool, Int, Numeric, Tensor};

use super::DocumentStarts;
use crate::backend::OpBackend;

pub use crate::tile::MASKED;

/// Elements of one block of scores, at most (unless a single row has more).
pub const BLOCK_ELEMENTS: usize = 1 << 24;

/// A block of queries and the keys that any of them sees, as positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Positions of the queries.
    pub queries: Range<usize>,
    /// Positions of the keys; ends where the queries do.
    pub keys: Range<usize>,
}

impl Block {
    /// The block's rows of `[batch, heads, queries, channels]`, whose rows are the last of `keys`
    /// positions.
    pub fn queries_of<B: OpBackend>(&self, x: &Tensor<B, 4>, keys: usize) -> Tensor<B, 4> {
        let first = keys - x.dims()[2];
        x.clone().narrow(2, self.queries.start - first, self.queries.len())
    }

    /// The block's rows of `[batch, heads, keys, channels]`.
    pub fn keys_of<B: OpBackend>(&self, x: &Tensor<B, 4>) -> Tensor<B, 4> {
        x.clone().narrow(2, self.keys.start, self.keys.len())
    }
}

/// The start of each token's document, flattened from `[batch, tokens]`; zeros without documents.
pub fn starts_of_documents<B: OpBackend>(
    documents: DocumentStarts<B>,
    batch: usize,
    tokens: usize,
) -> Vec<usize> {
    match documents {
        Some(documents) => documents.into_data().iter::<i64>().map(|at| at as usize).collect(),
        None => vec![0; batch * tokens],
    }
}

/// Splits the last `queries` of `keys` positions into blocks of at most [`BLOCK_ELEMENTS`] scores;
/// `rows` is batch · heads (· views).
pub fn query_blocks(
    rows: usize,
    queries: usize,
    keys: usize,
    window: Option<usize>,
) -> impl Iterator<Item = Block> {
    let size = (BLOCK_ELEMENTS / (rows * keys).max(1)).clamp(1, queries.max(1));
    let first = keys - queries;
    (first..keys).step_by(size).map(move |start| {
        let end = (start + size).min(keys);
        Block {
            queries: start..end,
            keys: window.map_or(0, |w| (start + 1).saturating_sub(w))..end,
        }
    })
}

/// Runs `attend` on every block of queries and joins the outputs
/// `[batch, heads, queries of the block, value_dim]`.
pub fn by_query_blocks<B: OpBackend>(
    blocks: impl Iterator<Item = Block>,
    attend: impl FnMut(Block) -> Tensor<B, 4>,
) -> Tensor<B, 4> {
    let mut parts: Vec<_> = blocks.map(attend).collect();
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 2) }
}

/// The positions of a block's queries and keys, each expanded to `[1, 1, queries, keys]`.
pub fn positions<B: OpBackend>(block: &Block, device: &B::Device) -> [Tensor<B, 4, Int>; 2] {
    let (queries, keys) = (block.queries.len(), block.keys.len());
    let arange = |range: &Range<usize>| {
        Tensor::<B, 1, Int>::arange(range.start as i64..range.end as i64, device)
    };
    let shape = [1, 1, queries, keys];
    let i = arange(&block.queries).reshape([1, 1, queries, 1]).expand(shape);
    [i, arange(&block.keys).reshape([1, 1, 1, keys]).expand(shape)]
}

/// The mask of a block, true where a query must not see a key, `[batch or 1, 1, queries, keys]`:
/// causal, within the window and the document. `documents` is `[batch, all keys]`.
pub fn attention_mask<B: OpBackend>(
    block: &Block,
    window: Option<usize>,
    documents: Option<&Tensor<B, 2, Int>>,
    device: &B::Device,
) -> Tensor<B, 4, Bool> {
    let [i, j] = positions::<B>(block, device);
    let mut mask = j.clone().greater(i.clone());
    if let Some(window) = window {
        mask = mask.bool_or(j.clone().lower_equal(i - window as i64));
    }
    if let Some(documents) = documents {
        let queries = block.queries.len();
        let starts = copied(documents.clone().narrow(1, block.queries.start, queries));
        let shape = [starts.dims()[0], 1, queries, block.keys.len()];
        let starts = starts.reshape([shape[0], 1, queries, 1]).expand(shape);
        mask = mask.expand(shape).bool_or(j.expand(shape).lower(starts));
    }
    mask
}

/// The position in its document, from 0, of each of `queries` tokens from position `first` on, as
/// floats `[batch or 1, queries]`; `documents` is `[batch, queries]` and needs `first` = 0.
pub fn positions_in_documents<B: OpBackend>(
    queries: usize,
    first: usize,
    documents: Option<&Tensor<B, 2, Int>>,
    device: &B::Device,
) -> Tensor<B, 2> {
    let range = first as i64..(first + queries) as i64;
    let at = Tensor::<B, 1, Int>::arange(range, device).reshape([1, queries]);
    match documents {
        Some(starts) => (at.expand(starts.dims()).cast(starts.dtype()) - starts.clone()).float(),
        None => at.float(),
    }
}

/// A contiguous copy in its own memory: needed before reshaping a view whose last dimension may have
/// one element (see [`crate::cuda`]), and to keep a part without keeping the whole buffer alive.
pub fn copied<B: OpBackend, const D: usize, K: Numeric<B>>(x: Tensor<B, D, K>) -> Tensor<B, D, K> {
    x.zeros_like() + x
}

/// The exclusive suffix sum Σ_{s>t} x_s along `dim`, summed from the end, so that nothing cancels.
pub fn sums_after<B: OpBackend, const D: usize>(x: Tensor<B, D>, dim: usize) -> Tensor<B, D> {
    let n = x.dims()[dim];
    // Multiplied by 0 rather than zeros, so that every element gets a gradient.
    let none = x.clone().narrow(dim, n - 1, 1) * 0.0;
    if n == 1 {
        return none;
    }
    let later = Tensor::cat(vec![x.narrow(dim, 1, n - 1), none], dim);
    later.flip([dim as isize]).cumsum(dim).flip([dim as isize])
}

/// `[batch, kv_heads, rows, channels]` to `[batch, group · kv_heads, …]`: repeats each kv head for
/// the query heads of its group.
pub fn repeat_heads<B: OpBackend>(x: Tensor<B, 4>, group: usize) -> Tensor<B, 4> {
    if group == 1 {
        return x;
    }
    let [batch, kv_heads, rows, channels] = x.dims();
    x.reshape([batch, kv_heads, 1, rows * channels]).repeat_dim(2, group).reshape([
        batch,
        kv_heads * group,
        rows,
        channels,
    ])
}

/// As [`repeat_heads`], for queries in groups of `group` heads: `[batch, key_heads · group, rows, channels]` to `times`
/// as many heads, where a group comes `times` times, one after the other.
pub fn repeat_groups<B: OpBackend>(x: Tensor<B, 4>, group: usize, times: usize) -> Tensor<B, 4> {
    if times == 1 {
        return x;
    }
    let [batch, heads, rows, channels] = x.dims();
    let x = x.reshape([batch, heads / group, group * rows, channels]);
    repeat_heads(x, times).reshape([batch, heads * times, rows, channels])
}

/// The adjoint of [`repeat_heads`]: `[batch, group · kv_heads, rows, channels]` to
/// `[batch, kv_heads, …]`, summed over each group.
pub fn sum_groups<B: OpBackend>(x: Tensor<B, 4>, group: usize) -> Tensor<B, 4> {
    if group == 1 {
        return x;
    }
    let [batch, heads, rows, channels] = x.dims();
    let kv_heads = heads / group;
    let x = x.reshape([batch, kv_heads, group, rows * channels]).sum_dim(2);
    x.reshape([batch, kv_heads, rows, channels])
}

/// Repeats the values that views share: `[batch, heads, …]` to `[batch, views · heads, …]`, one view after the
/// other.
pub fn repeat_views<B: OpBackend>(x: Tensor<B, 4>, views: usize) -> Tensor<B, 4> {
    // Not `repeat_dim`: burn's gradient of it takes the copies for neighbours.
    Tensor::cat(vec![x; views], 1)
}

/// The adjoint of [`repeat_views`], the sum over the views.
pub fn sum_views<B: OpBackend>(x: Tensor<B, 4>, views: usize) -> Tensor<B, 4> {
    if views == 1 {
        return x;
    }
    let [batch, heads, rows, channels] = x.dims();
    let x = x.reshape([batch, views, heads / views, rows * channels]).sum_dim(1);
    x.reshape([batch, heads / views, rows, channels])
}

/// Σ_{s=j+1..i} ℓ_s for each of the block's queries i and keys j ≤ i,
/// `[batch, heads, queries, keys]`; entries with j > i are 0 and meaningless. `log_decay` is
/// `[batch, heads, all keys]`.
///
/// No large prefix sums are subtracted, which would cancel: the decays of keys before the block are
/// summed backwards from the block's start, those of keys inside it column by column.
pub fn decay_between<B: OpBackend>(log_decay: &Tensor<B, 3>, block: &Block) -> Tensor<B, 4> {
    let [batch, heads, _] = log_decay.dims();
    let (queries, start) = (block.queries.len(), block.queries.start);
    let own = copied(log_decay.clone().narrow(2, start, queries));
    // Row s, column j: ℓ_s where s > j. The mask is false in the strict lower triangle.
    let shape = [batch, heads, queries, queries];
    let steps = own.reshape([batch, heads, queries, 1]).expand(shape);
    let before = Tensor::<B, 2, Bool>::tril_mask([queries, queries], -1, &log_decay.device());
    let before = before.reshape([1, 1, queries, queries]).expand(shape);
    let inside = steps.mask_fill(before, 0.0).cumsum(2);
    let earlier = start - block.keys.start;
    if earlier == 0 {
        return inside;
    }
    // Σ of ℓ over j+1 … start, summed from the near end, and over start+1 … i.
    let far = log_decay.clone().narrow(2, block.keys.start + 1, earlier);
    let far = far.flip([2]).cumsum(2).flip([2]).reshape([batch, heads, 1, earlier]);
    let outside = inside.clone().narrow(3, 0, 1) + far;
    Tensor::cat(vec![outside, inside], 3)
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn block(queries: Range<usize>, keys: Range<usize>) -> Block {
        Block { queries, keys }
    }

    #[test]
    fn blocks_cover_every_query_and_all_keys_it_sees() {
        let blocks: Vec<_> = query_blocks(1 << 14, 700, 1000, Some(10)).collect();
        assert_eq!(blocks[0], block(300..301, 291..301));
        assert_eq!(blocks.len(), 700);
        let blocks: Vec<_> = query_blocks(1 << 9, 100, 1000, None).collect();
        let want = [block(900..932, 0..932), block(932..964, 0..964), block(964..996, 0..996)];
        assert_eq!(blocks[..3], want);
        assert_eq!(blocks[3..], [block(996..1000, 0..1000)]);
        assert_eq!(query_blocks(4, 3, 3, None).collect::<Vec<_>>(), [block(0..3, 0..3)]);
    }

    fn steps(n: usize) -> Tensor<Flex, 2> {
        let steps: Vec<f32> = (0..2 * n).map(|t| -(t as f32 * 1.7).sin().abs()).collect();
        Tensor::<Flex, 1>::from_floats(&steps[..], &Default::default()).reshape([2, n])
    }

    fn to_vec<const D: usize>(x: Tensor<Flex, D>) -> Vec<f32> {
        x.into_data().to_vec().unwrap()
    }

    #[test]
    fn sums_are_those_of_the_definition() {
        for n in [1, 2, 7] {
            let x = steps(n);
            let (values, after) = (to_vec(x.clone()), to_vec(sums_after(x, 1)));
            for (at, after) in after.iter().enumerate() {
                let want: f32 = values[at + 1..(at / n + 1) * n].iter().sum();
                assert!((after - want).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn decays_between_tokens_are_the_sums_of_the_steps() {
        let steps: Vec<f32> = (0..12).map(|t| -(t as f32 * 1.7).sin().abs()).collect();
        let log_decay = Tensor::<Flex, 1>::from_floats(&steps[..], &Default::default());
        let log_decay = log_decay.reshape([1, 1, 12]);
        for block in
            [block(0..12, 0..12), block(5..9, 0..9), block(7..8, 3..8), block(6..12, 5..12)]
        {
            let got = decay_between(&log_decay, &block).into_data().to_vec::<f32>().unwrap();
            for (row, i) in block.queries.clone().enumerate() {
                for (column, j) in block.keys.clone().enumerate().filter(|(_, j)| *j <= i) {
                    let want: f32 = steps[j + 1..=i].iter().sum();
                    let got = got[row * block.keys.len() + column];
                    assert!((got - want).abs() < 1e-5, "{block:?}, {i}, {j}: {got}, {want}");
                }
            }
        }
    }
}
