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

    pub(crate) fn sampler(&self) -> Sampler {
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
/// Prompts may differ in length: all are read up to the end of the shortest, the rest of a longer one token by token
/// while the others are already continued. Each row has its own random stream. `emit(row, token)` is called
/// for each new token as soon as it is known; on CUDA, after blocks of steps that take some milliseconds.
///
/// # Errors
/// When a prompt is empty, or the sequence exceeds the learned positions.
pub fn generate<B: OpBackend>(
    model: &LanguageModel<B>,
    prompts: &[Vec<u32>],
    max_tokens: usize,
    sampling: &Sampling,
    stop: Option<u32>,
    device: &B::Device,
    emit: impl FnMut(usize, u32),
) -> Result<Vec<Vec<u32>>, GenerateError> {
    if prompts.is_empty() {
        return Ok(vec![]);
    }
    check(model, prompts, max_tokens)?;
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
    check(model, prompts, max_tokens)?;
    let mut outputs = vec![vec![]; prompts.len()];
    // The last token gives the first logits.
    let before: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..prompt.len() - 1]).collect();
    prefixes::states(model, &before, device, |row, state| {
        let last = [prompts[row][prompts[row].len() - 1..].to_vec()];
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
    /// The tokens of each prompt that the first steps take instead of those they choose.
    given: Vec<Vec<u32>>,
    /// Of each step and row, the token of `given` or 0, and whether the step chooses one, 1 or 0:
    /// `[steps · batch]`, in the order of steps.
    given_tokens: [Tensor<B, 1, Int>; 2],
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
        let shortest = prompts.iter().map(Vec::len).min().expect("at least one prompt");
        let tokens = prompts.iter().flat_map(|prompt| prompt[..shortest].iter());
        let tokens: Vec<i32> = tokens.map(|&token| token as i32).collect();
        let data = TensorData::new(tokens, [prompts.len(), shortest]);
        let given: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| prompt[shortest..].to_vec()).collect();
        Steps {
            model,
            state: model.init_state(),
            tokens: Tensor::from_data(data, device),
            sampler: sampling.sampler(),
            rngs: (0..prompts.len()).map(rng).collect(),
            given_tokens: given_tokens(&given, device),
            given,
            drawn: None,
            done: 0,
        }
    }

    /// Continues each prompt by up to `max_tokens` tokens and returns those of each row up to `stop`.
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
        let mut stopped = vec![max_tokens == 0; rows];
        let most = max_tokens + self.given.iter().map(Vec::len).max().unwrap_or(0);
        let mut block = 1;
        while !stopped.iter().all(|&stopped| stopped) {
            let started = Instant::now();
            let (first, steps) = (self.done, block.min(most - self.done));
            let tokens = (0..steps).map(|_| self.step()).collect();
            let tokens: Tensor<B, 1, Int> = Tensor::cat(tokens, 0);
            for (at, token) in tokens.into_data().iter::<u32>().enumerate() {
                let row = at % rows;
                if stopped[row] || first + at / rows < self.given[row].len() {
                    continue;
                }
                if Some(token) != stop {
                    outputs[row].push(token);
                    emit(row, token);
                }
                stopped[row] = Some(token) == stop || outputs[row].len() == max_tokens;
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
        let mut next = sample(logits, &self.sampler, uniforms);
        let (rows, [given, chosen]) = (self.rngs.len(), &self.given_tokens);
        if self.done * rows < given.dims()[0] {
            let [given, chosen] =
                [given, chosen].map(|x| x.clone().narrow(0, self.done * rows, rows));
            next = next * chosen + given;
        }
        self.tokens = next.clone().reshape([rows, 1]);
        self.done += 1;
        next
    }

    /// The random numbers of the next step, one for each row. Those of [`STEPS_DRAWN`] steps are sent to the
    /// device together.
    fn uniforms(&mut self) -> Tensor<B, 1> {
        let (rows, step) = (self.rngs.len(), self.done % STEPS_DRAWN);
        if step == 0 {
            // A row draws from its first own token on, so that its tokens do not depend on the other rows.
            let draw = |(rng, given): (&mut ChaCha8Rng, &Vec<u32>), step| {
                if step < given.len() { 0.0 } else { rng.random() }
            };
            let of_step = |step| -> Vec<f32> {
                self.rngs.iter_mut().zip(&self.given).map(|row| draw(row, step)).collect()
            };
            let numbers: Vec<f32> =
                (self.done..self.done + STEPS_DRAWN).flat_map(of_step).collect();
            let data = TensorData::new(numbers, [STEPS_DRAWN * rows]);
            self.drawn = Some(Tensor::from_data(data, &self.tokens.device()));
        }
        self.drawn.clone().expect("drawn at the first step").narrow(0, step * rows, rows)
    }
}

/// Steps whose random numbers are drawn together.
const STEPS_DRAWN: usize = 64;

/// [`Steps::given_tokens`].
fn given_tokens<B: OpBackend>(given: &[Vec<u32>], device: &B::Device) -> [Tensor<B, 1, Int>; 2] {
    let steps = given.iter().map(Vec::len).max().unwrap_or(0);
    let places = (0..steps).flat_map(|step| given.iter().map(move |row| row.get(step)));
    let (tokens, chosen): (Vec<i32>, Vec<i32>) = places
        .map(|token| (token.map_or(0, |&token| token as i32), i32::from(token.is_none())))
        .unzip();
    [tokens, chosen].map(|x| {
        let count = x.len();
        Tensor::from_data(TensorData::new(x, [count]), device)
    })
}

fn check<B: OpBackend>(
    model: &LanguageModel<B>,
    prompts: &[Vec<u32>],
    max_tokens: usize,
) -> Result<(), GenerateError> {
    if prompts.iter().any(Vec::is_empty) {
        return Err(GenerateError::EmptyPrompt);
    }
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    // The last token generated is never fed back.
    let wanted = longest.saturating_add(max_tokens.saturating_sub(1));
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
