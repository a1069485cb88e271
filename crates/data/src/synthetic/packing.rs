//! Rows of whole generated examples.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// One generated example.
pub(crate) struct Example {
    /// Its tokens, the end of text last.
    pub(crate) tokens: Vec<u32>,
    /// What the model learns to predict.
    pub(crate) goal: Goal,
}

/// The predictions of an example that count for the loss.
pub(crate) enum Goal {
    /// Every token.
    AllTokens,
    /// The tokens at these indices, ascending.
    Tokens(Vec<usize>),
    /// After reading the token at each index, ascending, this token, whatever token follows.
    Labels(Vec<(usize, u32)>),
}

/// Packs whole examples into a row of `tokens`, and pads it with end-of-text tokens that do not count
/// for the loss. `targets` and `weights` have one element less: what to predict after each token but the
/// last, and its weight.
///
/// A row is a function of the seed and its index.
pub(crate) fn pack(
    (seed, index): (u64, u64),
    end_of_text: u32,
    mut example: impl FnMut(&mut ChaCha8Rng) -> Example,
    (tokens, targets): (&mut [i32], &mut [i32]),
    weights: &mut [f32],
) {
    tokens.fill(end_of_text as i32);
    weights.fill(0.0);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(index);
    let mut labels = Vec::new();
    let mut at = 0;
    loop {
        let Example { tokens: new, goal } = example(&mut rng);
        let end = at + new.len();
        if end > tokens.len() {
            break;
        }
        for (token, new) in tokens[at..end].iter_mut().zip(&new) {
            *token = *new as i32;
        }
        // The weight of target t is at the position before it.
        match goal {
            Goal::AllTokens => weights[at.max(1) - 1..end - 1].fill(1.0),
            Goal::Tokens(places) => places.iter().for_each(|place| weights[at + place - 1] = 1.0),
            Goal::Labels(of) => labels.extend(of.iter().map(|&(place, label)| (at + place, label))),
        }
        at = end;
    }
    targets.copy_from_slice(&tokens[1..]);
    for (place, label) in labels {
        targets[place] = label as i32;
        weights[place] = 1.0;
    }
}
