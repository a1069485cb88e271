//! Central differences of an oracle.

use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

use super::Tensor64;

/// Most elements of an input whose gradient is checked by central differences.
pub const CHECKED: usize = 48;

/// Central differences of Σ upstream · oracle(inputs) at up to [`CHECKED`] elements of one input:
/// their indices and derivatives. `step` is relative for elements above 1.
pub fn differences(
    inputs: &[Tensor64],
    input: usize,
    upstream: &Tensor64,
    step: f64,
    oracle: &impl Fn(&[Tensor64]) -> Tensor64,
) -> (Vec<usize>, Vec<f64>) {
    let len = inputs[input].data.len();
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut places = sample(&mut rng, len, len.min(CHECKED)).into_vec();
    places.sort_unstable();
    let mut shifted = inputs.to_vec();
    let mut loss = |place: usize, value: f64| {
        shifted[input].data[place] = value;
        let output = oracle(&shifted);
        output.data.iter().zip(&upstream.data).map(|(x, w)| x * w).sum::<f64>()
    };
    let derivatives = places
        .iter()
        .map(|&place| {
            let x = inputs[input].data[place];
            let step = step * x.abs().max(1.0);
            let derivative = (loss(place, x + step) - loss(place, x - step)) / (2.0 * step);
            loss(place, x);
            derivative
        })
        .collect();
    (places, derivatives)
}
