//! A matrix as a batch of the blocks of its heads.

use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_model::HeadBlocks;

/// `[blocks, rows, columns]` of the blocks of a matrix of shape `[outputs, inputs]`; one block without `heads`.
pub(in super::super) fn layout(
    [rows, columns]: [usize; 2],
    heads: Option<HeadBlocks>,
) -> [usize; 3] {
    match heads {
        None => [1, rows, columns],
        Some(HeadBlocks { dim: 0, count }) => [count, rows / count, columns],
        Some(HeadBlocks { count, .. }) => [count, rows, columns / count],
    }
}

/// The blocks `[blocks, rows, columns]` of `x`.
pub(in super::super) fn split<B: OpBackend>(
    x: Tensor<B, 2>,
    heads: Option<HeadBlocks>,
) -> Tensor<B, 3> {
    let [blocks, rows, columns] = layout(x.dims(), heads);
    match heads {
        Some(HeadBlocks { dim: 1, .. }) => x.reshape([rows, blocks, columns]).swap_dims(0, 1),
        _ => x.reshape([blocks, rows, columns]),
    }
}

/// The inverse of [`split`]: the matrix of shape `shape`.
pub(in super::super) fn join<B: OpBackend>(
    x: Tensor<B, 3>,
    shape: [usize; 2],
    heads: Option<HeadBlocks>,
) -> Tensor<B, 2> {
    match heads {
        Some(HeadBlocks { dim: 1, .. }) => x.swap_dims(0, 1).reshape(shape),
        _ => x.reshape(shape),
    }
}
