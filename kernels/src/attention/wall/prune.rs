//! What pruning leaves out.

use burn::tensor::Tensor;

use super::cuda::TILE;
use crate::attention::DocumentStarts;
use crate::attention::blocks::starts_of_documents;
use crate::backend::OpBackend;

/// The fraction, 0 to 1, of visible (query, key) pairs whose key tiles every channel has forgotten.
///
/// - `log_decay`: g, `[batch, gate heads, seq_len, head_dim]`
/// - `documents`: `[batch, seq_len]`
pub fn pruned_fraction<B: OpBackend>(log_decay: Tensor<B, 4>, documents: DocumentStarts<B>) -> f64 {
    let [batch, heads, tokens, channels] = log_decay.dims();
    let documents = starts_of_documents(documents, batch, tokens);
    // The last tile's end is nobody's start.
    let ends = (tokens - 1) / TILE;
    let mut sums = vec![];
    if ends > 0 {
        let complete = log_decay.narrow(2, 0, ends * TILE);
        let complete = complete.reshape([batch * heads, ends, TILE, channels]).sum_dim(2);
        sums = complete.into_data().iter::<f32>().collect();
    }
    let (mut left_out, mut pairs) = (0, 0);
    for row in 0..batch * heads {
        // E where tiles begin.
        let mut sum = vec![0.0; channels];
        let mut starts = vec![vec![0; channels]];
        for of_tile in sums[row * ends * channels..(row + 1) * ends * channels].chunks(channels) {
            for (sum, g) in sum.iter_mut().zip(of_tile) {
                *sum += f64::from(*g) * std::f64::consts::LOG2_E;
            }
            starts.push(sum.iter().map(|p| p.floor() as i64).collect());
        }
        let mut first = 0;
        for (tile, own) in starts.iter().enumerate() {
            let forgotten = |end: &[i64]| own.iter().zip(end).all(|(from, to)| from - to <= -127);
            while first < tile && forgotten(&starts[first + 1]) {
                first += 1;
            }
            for t in tile * TILE..tokens.min((tile + 1) * TILE) {
                let seen_from = documents[row / heads * tokens + t];
                left_out += (first * TILE).saturating_sub(seen_from);
                pairs += t + 1 - seen_from;
            }
        }
    }
    left_out as f64 / pairs as f64
}
