//! Generation: a prefill, then decoding steps with a cache.

use burn::tensor::{Int, Tensor, TensorData};
use longwall_kernels::backend::OpBackend;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::LanguageModel;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Divides the logits before the softmax; 0 always takes the most likely token.
    pub temperature: f32,
    /// Draw only from the k most likely tokens.
    pub top_k: Option<usize>,
    /// Draw only from the smallest set of most likely tokens whose total probability is at least this,
    /// in (0, 1].
    pub top_p: Option<f32>,
    /// Seed of the draws.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 0 };
}

/// Why nothing can be generated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// A prompt is empty.
    #[error("the prompt has no token; give at least one")]
    EmptyPrompt,
    /// Prompts of one batch differ in length.
    #[error("prompts of one batch have {0} and {1} tokens; they must be equally long")]
    UnequalPrompts(usize, usize),
    /// Prompt and generation exceed the learned positions.
    #[error(
        "prompt and generation take {wanted} tokens; the model's learned positions end at {allowed}\n  \
         hint: shorten the prompt, or train with model.positions = \"none\""
    )]
    TooLong {
        /// Tokens of prompt and generation.
        wanted: usize,
        /// Tokens that have positions.
        allowed: usize,
    },
}

/// Continues each prompt by up to `max_tokens` tokens, or until the token `stop`, which is not
/// returned.
///
/// All prompts have the same length; each row has its own random stream. `emit(row, token)` is called
/// for each new token as soon as it is known.
///
/// # Errors
/// When a prompt is empty, prompts differ in length, or the sequence exceeds the learned positions.
pub fn generate<B: OpBackend>(
    model: &LanguageModel<B>,
    prompts: &[Vec<u32>],
    max_tokens: usize,
    sampling: &Sampling,
    stop: Option<u32>,
    device: &B::Device,
    mut emit: impl FnMut(usize, u32),
) -> Result<Vec<Vec<u32>>, GenerateError> {
    let Some(len) = prompts.first().map(Vec::len) else {
        return Ok(vec![]);
    };
    check(model, prompts, len, max_tokens)?;
    let mut outputs = vec![vec![]; prompts.len()];
    let mut done = vec![false; prompts.len()];
    let mut rngs: Vec<ChaCha8Rng> = (0..prompts.len())
        .map(|row| {
            let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
            rng.set_stream(row as u64);
            rng
        })
        .collect();
    let mut state = model.init_state();
    let mut next: Vec<u32> = prompts.concat();
    for _ in 0..max_tokens {
        let width = next.len() / prompts.len();
        let data = next.iter().map(|&t| t as i32).collect::<Vec<_>>();
        let data = TensorData::new(data, [prompts.len(), width]);
        let tokens = Tensor::<B, 2, Int>::from_data(data, device);
        let logits = model.extend(tokens, &mut state).into_data();
        let logits: Vec<f32> = logits.iter::<f32>().collect();
        next = logits
            .chunks_exact(model.vocab_size())
            .zip(&mut rngs)
            .map(|(logits, rng)| choose(logits, sampling, rng))
            .collect();
        for (row, &token) in next.iter().enumerate() {
            done[row] |= Some(token) == stop;
            if !done[row] {
                outputs[row].push(token);
                emit(row, token);
            }
        }
        if done.iter().all(|&done| done) {
            break;
        }
    }
    Ok(outputs)
}

fn check<B: OpBackend>(
    model: &LanguageModel<B>,
    prompts: &[Vec<u32>],
    len: usize,
    max_tokens: usize,
) -> Result<(), GenerateError> {
    if len == 0 {
        return Err(GenerateError::EmptyPrompt);
    }
    if let Some(other) = prompts.iter().find(|p| p.len() != len) {
        return Err(GenerateError::UnequalPrompts(len, other.len()));
    }
    // The last token generated is never fed back.
    let wanted = len + max_tokens.saturating_sub(1);
    match model.max_len() {
        Some(allowed) if wanted > allowed => Err(GenerateError::TooLong { wanted, allowed }),
        _ => Ok(()),
    }
}

/// Draws one token from the softmax of `logits` as `sampling` says.
pub fn choose(logits: &[f32], sampling: &Sampling, rng: &mut impl Rng) -> u32 {
    let best = (0..logits.len())
        .max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)))
        .expect("a vocabulary has entries");
    if sampling.temperature <= 0.0 {
        return best as u32;
    }
    // Most likely first; ties in vocabulary order.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    order.truncate(sampling.top_k.unwrap_or(order.len()).max(1));
    let weight = |i: usize| f64::from((logits[i] - logits[best]) / sampling.temperature).exp();
    let mut weights: Vec<f64> = order.iter().map(|&i| weight(i)).collect();
    if let Some(top_p) = sampling.top_p {
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let kept = weights.iter().position(|w| {
            sum += w;
            sum >= f64::from(top_p) * total
        });
        weights.truncate(kept.map_or(weights.len(), |last| last + 1));
    }
    let mut at = rng.random::<f64>() * weights.iter().sum::<f64>();
    for (&token, weight) in order.iter().zip(&weights) {
        at -= weight;
        if at < 0.0 {
            return token as u32;
        }
    }
    order[weights.len() - 1] as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut counts = vec![0; logits.len()];
        for _ in 0..20_000 {
            counts[choose(logits, &sampling, &mut rng) as usize] += 1;
        }
        counts
    }

    const LOGITS: [f32; 4] = [0.0, 2.0, 1.0, -1.0];

    #[test]
    fn frequencies_follow_the_softmax() {
        let counts = draws(Sampling { temperature: 1.0, ..Sampling::GREEDY }, &LOGITS);
        let total: f32 = LOGITS.iter().map(|x| x.exp()).sum();
        for (count, logit) in counts.iter().zip(LOGITS) {
            let want = logit.exp() / total;
            assert!((*count as f32 / 20_000.0 - want).abs() < 0.012, "{count} for {want}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let hot = Sampling { temperature: 2.0, ..Sampling::GREEDY };
        let counts = draws(Sampling { top_k: Some(2), ..hot }, &LOGITS);
        assert!(counts[1] > 0 && counts[2] > 0 && counts[0] == 0 && counts[3] == 0);
        let counts = draws(Sampling { top_p: Some(0.01), ..hot }, &LOGITS);
        assert_eq!(counts, [0, 20_000, 0, 0]);
        let counts = draws(Sampling { top_p: Some(1.0), ..hot }, &LOGITS);
        assert!(counts.iter().all(|&c| c > 0));
    }

    #[test]
    fn greedy_takes_the_first_of_equal_logits() {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        assert_eq!(choose(&[1.0, 3.0, 3.0], &Sampling::GREEDY, &mut rng), 1);
    }
}
