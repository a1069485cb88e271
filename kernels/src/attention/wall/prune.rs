//! What pruning leaves out.

use burn::tensor::Tensor;

use crate::attention::softmax::cuda::GATE_TILE as TILE;
use crate::backend::OpBackend;

/// The share of all pairs of a query and a key at or before it whose tiles every channel has forgotten, 0
/// to 1, from g, `[batch, gate heads, seq_len, head_dim]`.
pub fn share_forgotten<B: OpBackend>(log_decay: Tensor<B, 4>) -> f64 {
    let [batch, heads, tokens, channels] = log_decay.dims();
    let log_decay: Vec<f32> = log_decay.into_data().iter::<f32>().collect();
    let mut left_out = 0;
    for row in log_decay.chunks_exact(tokens * channels) {
        let mut sums = vec![0.0; channels];
        let mut ends = vec![vec![0; channels]];
        for tile in row.chunks(TILE * channels) {
            for (at, g) in tile.iter().enumerate() {
                sums[at % channels] += f64::from(*g) * std::f64::consts::LOG2_E;
            }
            ends.push(sums.iter().map(|p| p.floor() as i64).collect());
        }
        let mut first = 0;
        for (tile, start) in ends[..ends.len() - 1].iter().enumerate() {
            let forgotten = |end: &[i64]| start.iter().zip(end).all(|(from, to)| from - to <= -127);
            while first < tile && forgotten(&ends[first + 1]) {
                first += 1;
            }
            left_out += first * TILE * TILE.min(tokens - tile * TILE);
        }
    }
    left_out as f64 / (batch * heads * tokens * (tokens + 1) / 2) as f64
}
