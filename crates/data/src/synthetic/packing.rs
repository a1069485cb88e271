//! Rows of whole generated examples.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// One generated example.
pub(crate) struct Example {
    /// Its tokens, the end of text last.
    pub(crate) tokens: Vec<u32>,
    /// Indices of the tokens that count for the loss, ascending; `None` for all of them.
    pub(crate) counted: Option<Vec<usize>>,
}

/// Packs whole examples into a row of `tokens`, and pads it with end-of-text tokens that do not count
/// for the loss. `weights` has one element less: the weight of each token but the first as a target.
///
/// A row is a function of the seed and its index.
pub(crate) fn pack(
    (seed, index): (u64, u64),
    end_of_text: u32,
    mut example: impl FnMut(&mut ChaCha8Rng) -> Example,
    tokens: &mut [i32],
    weights: &mut [f32],
) {
    tokens.fill(end_of_text as i32);
    weights.fill(0.0);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(index);
    let mut at = 0;
    loop {
        let Example { tokens: new, counted } = example(&mut rng);
        let end = at + new.len();
        if end > tokens.len() {
            return;
        }
        for (token, new) in tokens[at..end].iter_mut().zip(&new) {
            *token = *new as i32;
        }
        // The weight of target t is at the position before it.
        match counted {
            Some(places) => {
                for place in places {
                    weights[at + place - 1] = 1.0;
                }
            }
            None => weights[at.max(1) - 1..end - 1].fill(1.0),
        }
        at = end;
    }
}
