//! Generation: a prefill, then decoding steps with a cache.

use std::time::{Duration, Instant};

use burn::tensor::{Int, Tensor, TensorData};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::DeviceKind;
use longwall_kernels::ops::sample::{Sampler, sample};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::language_model::ModelState;
use crate::{LanguageModel, prefixes};

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
    /// Seed of the draws. Equal seeds give equal tokens with one version on one device.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 0 };

    fn sampler(&self) -> Sampler {
        let Sampling { temperature, top_k, top_p, .. } = *self;
        // The inverse of a denormal is infinite. 1 keeps every token.
        let temperature = if temperature < f32::MIN_POSITIVE { 0.0 } else { temperature };
        Sampler { temperature, top_k, top_p: top_p.filter(|p| *p < 1.0) }
    }
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
/// for each new token as soon as it is known; on CUDA, after blocks of steps that take some milliseconds.
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
    emit: impl FnMut(usize, u32),
) -> Result<Vec<Vec<u32>>, GenerateError> {
    let Some(len) = prompts.first().map(Vec::len) else {
        return Ok(vec![]);
    };
    check(model, prompts, len, max_tokens)?;
    // Every step depends on the token before, but only on the device.
    let most_ahead = match B::device_kind() {
        DeviceKind::Cpu => 1,
        DeviceKind::Cuda => MOST_AHEAD,
    };
    let steps = Steps::new(model, prompts, sampling, device);
    Ok(steps.run(max_tokens, stop, (most_ahead, BLOCK), emit))
}

/// As [`generate`], greedily, where prompts share much: each prefix that they share is read once, and they are
/// continued one by one.
///
/// # Errors
/// As [`generate`].
pub fn generate_after_prefixes<B: OpBackend>(
    model: &LanguageModel<B>,
    prompts: &[Vec<u32>],
    max_tokens: usize,
    stop: Option<u32>,
    device: &B::Device,
) -> Result<Vec<Vec<u32>>, GenerateError> {
    let Some(len) = prompts.first().map(Vec::len) else {
        return Ok(vec![]);
    };
    check(model, prompts, len, max_tokens)?;
    let mut outputs = vec![vec![]; prompts.len()];
    // The last token gives the first logits.
    let before: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..len - 1]).collect();
    prefixes::states(model, &before, device, |row, state| {
        let last = [prompts[row][len - 1..].to_vec()];
        let steps = Steps { state, ..Steps::new(model, &last, &Sampling::GREEDY, device) };
        outputs[row] = steps.run(max_tokens, stop, (1, BLOCK), |_, _| {}).remove(0);
    });
    Ok(outputs)
}

/// Most steps before their tokens are read back.
const MOST_AHEAD: usize = 16;

/// A block of steps that took less is followed by one of twice as many.
const BLOCK: Duration = Duration::from_millis(10);

/// The steps of a generation. What they read and write stays on the device.
struct Steps<'a, B: OpBackend> {
    model: &'a LanguageModel<B>,
    state: ModelState<B>,
    /// What the model has not seen yet, `[batch, n]`.
    tokens: Tensor<B, 2, Int>,
    sampler: Sampler,
    rngs: Vec<ChaCha8Rng>,
    /// See [`Steps::uniforms`].
    drawn: Option<Tensor<B, 1>>,
    /// Steps so far.
    done: usize,
}

impl<'a, B: OpBackend> Steps<'a, B> {
    fn new(
        model: &'a LanguageModel<B>,
        prompts: &[Vec<u32>],
        sampling: &Sampling,
        device: &B::Device,
    ) -> Self {
        let rng = |row| {
            let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
            rng.set_stream(row as u64);
            rng
        };
        let tokens = prompts.iter().flatten().map(|&token| token as i32).collect::<Vec<_>>();
        let data = TensorData::new(tokens, [prompts.len(), prompts[0].len()]);
        Steps {
            model,
            state: model.init_state(),
            tokens: Tensor::from_data(data, device),
            sampler: sampling.sampler(),
            rngs: (0..prompts.len()).map(rng).collect(),
            drawn: None,
            done: 0,
        }
    }

    /// Takes up to `max_tokens` steps and returns the tokens of each row up to `stop`.
    ///
    /// Tokens are read back after blocks of at most `most_ahead` steps; one that took less than `short` is
    /// followed by one of twice as many.
    fn run(
        mut self,
        max_tokens: usize,
        stop: Option<u32>,
        (most_ahead, short): (usize, Duration),
        mut emit: impl FnMut(usize, u32),
    ) -> Vec<Vec<u32>> {
        let rows = self.rngs.len();
        let mut outputs = vec![vec![]; rows];
        let mut stopped = vec![false; rows];
        let mut block = 1;
        while self.done < max_tokens && !stopped.iter().all(|&stopped| stopped) {
            let started = Instant::now();
            let steps = block.min(max_tokens - self.done);
            let tokens = (0..steps).map(|_| self.step()).collect();
            let tokens: Tensor<B, 1, Int> = Tensor::cat(tokens, 0);
            for (at, token) in tokens.into_data().iter::<u32>().enumerate() {
                let row = at % rows;
                stopped[row] |= Some(token) == stop;
                if !stopped[row] {
                    outputs[row].push(token);
                    emit(row, token);
                }
            }
            if started.elapsed() < short {
                block = (2 * block).min(most_ahead);
            }
        }
        outputs
    }

    /// The next token of each row, `[batch]`.
    fn step(&mut self) -> Tensor<B, 1, Int> {
        let logits = self.model.extend(self.tokens.clone(), &mut self.state);
        let uniforms = self.sampler.is_random().then(|| self.uniforms());
        let next = sample(logits, &self.sampler, uniforms);
        self.tokens = next.clone().reshape([self.rngs.len(), 1]);
        self.done += 1;
        next
    }

    /// The random numbers of the next step, one for each row. Those of [`STEPS_DRAWN`] steps are sent to the
    /// device together.
    fn uniforms(&mut self) -> Tensor<B, 1> {
        let (rows, step) = (self.rngs.len(), self.done % STEPS_DRAWN);
        if step == 0 {
            let of_step = |_| self.rngs.iter_mut().map(|rng| rng.random()).collect::<Vec<f32>>();
            let numbers: Vec<f32> = (0..STEPS_DRAWN).flat_map(of_step).collect();
            let data = TensorData::new(numbers, [STEPS_DRAWN * rows]);
            self.drawn = Some(Tensor::from_data(data, &self.tokens.device()));
        }
        self.drawn.clone().expect("drawn at the first step").narrow(0, step * rows, rows)
    }
}

/// Steps whose random numbers are drawn together.
const STEPS_DRAWN: usize = 64;

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
    let wanted = len.saturating_add(max_tokens.saturating_sub(1));
    match model.max_len() {
        Some(allowed) if wanted > allowed => Err(GenerateError::TooLong { wanted, allowed }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use longwall_kernels::Cpu;

    use super::*;
    use crate::ModelConfig;

    #[test]
    fn the_tokens_do_not_depend_on_when_they_are_read() {
        let config = "layers = 1\nwidth = 16\nheads = 2\nattention = { kind = \"rope\" }";
        let config: ModelConfig = toml::from_str(config).unwrap();
        let device = Default::default();
        let model = LanguageModel::<Cpu>::new(&config, 23, 16, 0, &device);
        let prompts = [vec![3, 1, 4], vec![1, 5, 9]];
        let sampling = Sampling { temperature: 1.5, seed: 7, ..Sampling::GREEDY };
        let run = |stop, most_ahead| {
            let mut emitted = vec![vec![]; 2];
            let steps = Steps::new(&model, &prompts, &sampling, &device);
            let tokens = steps
                .run(70, stop, (most_ahead, Duration::MAX), |row, token| emitted[row].push(token));
            assert_eq!(emitted, tokens);
            tokens
        };
        let plain = run(None, 1);
        assert!(plain.iter().all(|row| row.len() == 70));
        assert_ne!(plain[0], plain[1]);
        assert_eq!(run(None, 16), plain);
        let stop = Some(plain[0][20]);
        let stopped = run(stop, 1);
        assert!(stopped[0].len() <= 20 && stopped[0] == plain[0][..stopped[0].len()]);
        assert_eq!(run(stop, 16), stopped);
    }
}
