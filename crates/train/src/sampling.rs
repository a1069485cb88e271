//! Text sampled from the model during training.

use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;
use longwall_model::generate::{GenerateError, Sampling, generate};

use crate::config::SampleConfig;

/// Continues the configured prompts.
pub struct Sampler {
    prompts: Vec<(String, Vec<u32>)>,
    tokenizer: Tokenizer,
    tokens: usize,
    temperature: f32,
    seed: u64,
}

impl Sampler {
    /// Encodes the prompts, and checks that prompt and sample fit into `max_len` tokens.
    ///
    /// # Errors
    /// [`GenerateError::TooLong`] when one does not fit.
    pub fn new(
        config: &SampleConfig,
        tokenizer: &Tokenizer,
        max_len: Option<usize>,
        seed: u64,
    ) -> Result<Self, GenerateError> {
        let encode = |prompt: &String| {
            let mut tokens = tokenizer.encode(prompt);
            if tokens.is_empty() {
                // A document starts after an end of text.
                tokens.push(tokenizer.end_of_text());
            }
            (prompt.clone(), tokens)
        };
        let prompts: Vec<_> = config.prompts.iter().map(encode).collect();
        for (_, tokens) in &prompts {
            let wanted = tokens.len() + config.tokens - 1;
            match max_len {
                Some(allowed) if wanted > allowed => {
                    return Err(GenerateError::TooLong { wanted, allowed });
                }
                _ => {}
            }
        }
        Ok(Sampler {
            prompts,
            tokenizer: tokenizer.clone(),
            tokens: config.tokens,
            temperature: config.temperature as f32,
            seed,
        })
    }

    /// The prompts, each with the text that `model` generates after it. The draws depend on the run's
    /// seed and on `step`.
    ///
    /// # Errors
    /// See [`generate`].
    pub fn run<B: OpBackend>(
        &self,
        model: &LanguageModel<B>,
        step: u64,
        device: &B::Device,
    ) -> Result<Vec<(String, String)>, GenerateError> {
        let stop = Some(self.tokenizer.end_of_text());
        let one = |(at, (prompt, tokens)): (usize, &(String, Vec<u32>))| {
            let seed = mix(mix(self.seed, step), at as u64);
            let sampling =
                Sampling { temperature: self.temperature, top_k: None, top_p: None, seed };
            let prompts = std::slice::from_ref(tokens);
            let text = generate(model, prompts, self.tokens, &sampling, stop, device, |_, _| {})?;
            Ok((prompt.clone(), self.tokenizer.decode(&text[0])))
        };
        self.prompts.iter().enumerate().map(one).collect()
    }
}

/// A seed for each pair of numbers (the finaliser of SplitMix64).
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_add(b.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use burn::module::AutodiffModule;
    use longwall_data::TokenizerConfig;

    use super::*;
    use crate::config::Every;

    fn config(prompts: &[&str]) -> SampleConfig {
        SampleConfig {
            every: Every::steps(10),
            prompts: prompts.iter().map(|prompt| (*prompt).to_owned()).collect(),
            tokens: 8,
            temperature: 1.0,
        }
    }

    #[test]
    fn samples_depend_on_seed_and_step_alone() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let model = crate::testing::model_of_vocabulary(tokenizer.vocab_size()).valid();
        let run = |seed, step| {
            let sampler = Sampler::new(&config(&["", "fn main"]), &tokenizer, None, seed).unwrap();
            sampler.run(&model, step, &Default::default()).unwrap()
        };
        let samples = run(0, 10);
        assert_eq!(samples.len(), 2);
        assert_eq!(samples[1].0, "fn main");
        assert_eq!(samples, run(0, 10));
        assert_ne!(samples, run(0, 20));
        assert_ne!(samples, run(1, 10));
    }

    #[test]
    fn prompts_past_learned_positions_are_refused_before_training() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        assert!(Sampler::new(&config(&["0123456789"]), &tokenizer, Some(17), 0).is_ok());
        let error = Sampler::new(&config(&["0123456789"]), &tokenizer, Some(16), 0).err();
        assert_eq!(error, Some(GenerateError::TooLong { wanted: 17, allowed: 16 }));
    }
}
