//! A trained language model under evaluation.

use burn::tensor::{Int, Tensor, TensorData};
use longwall_data::Tokenizer;
use longwall_kernels::attention::probe::{Metric, Observation};
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;
use longwall_model::generate::{Sampling, generate};

use crate::memory::CallMemory;
use crate::{EvalError, EvalModel, LogLikelihood};

/// A [`LanguageModel`] on its device, with the tokenizer it was trained with.
pub struct TrainedModel<B: OpBackend> {
    model: LanguageModel<B>,
    tokenizer: Tokenizer,
    train_seq_len: usize,
    memory: CallMemory,
    device: B::Device,
}

impl<B: OpBackend> TrainedModel<B> {
    /// `train_seq_len` is the length of the training rows, in tokens; `memory` bounds what the model's
    /// calls need.
    pub fn new(
        model: LanguageModel<B>,
        tokenizer: Tokenizer,
        train_seq_len: usize,
        memory: CallMemory,
        device: B::Device,
    ) -> Self {
        TrainedModel { model, tokenizer, train_seq_len, memory, device }
    }

    fn tokens(&self, rows: &[&[u32]]) -> Tensor<B, 2, Int> {
        let data: Vec<i32> = rows.iter().flat_map(|row| row.iter().map(|&t| t as i32)).collect();
        Tensor::from_data(TensorData::new(data, [rows.len(), rows[0].len()]), &self.device)
    }
}

impl<B: OpBackend> EvalModel for TrainedModel<B> {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn train_seq_len(&self) -> usize {
        self.train_seq_len
    }

    fn max_len(&self) -> Option<usize> {
        self.model.max_len()
    }

    fn device(&self) -> String {
        B::device_kind().to_string()
    }

    fn least_memory(&self, rows: usize, tokens: usize, generates: bool) -> Option<u64> {
        Some(self.memory.least(rows, tokens, generates))
    }

    fn available_memory(&self) -> Option<u64> {
        B::available_memory(&self.device)
    }

    fn log_likelihood(
        &mut self,
        requests: &[(Vec<u32>, Vec<u32>)],
    ) -> Result<Vec<LogLikelihood>, EvalError> {
        let score = |(context, continuation): &(Vec<u32>, Vec<u32>)| {
            let mut state = self.model.init_state();
            let mut total = LogLikelihood { sum: 0.0, greedy: true };
            let mut input = &context[..];
            for (at, &token) in continuation.iter().enumerate() {
                let logits = self.model.extend(self.tokens(&[input]), &mut state).into_data();
                let logits: Vec<f64> = logits.iter::<f64>().collect();
                let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let lse = max + logits.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
                let target = logits[token as usize];
                total.sum += target - lse;
                total.greedy &= target == max;
                input = &continuation[at..=at];
            }
            total
        };
        Ok(requests.iter().map(score).collect())
    }

    fn token_log_likelihoods(
        &mut self,
        sequences: &[Vec<u32>],
    ) -> Result<Vec<Vec<f32>>, EvalError> {
        let Some(n) = sequences.first().map(|s| s.len() - 1) else { return Ok(vec![]) };
        let inputs: Vec<&[u32]> = sequences.iter().map(|s| &s[..n]).collect();
        let targets: Vec<&[u32]> = sequences.iter().map(|s| &s[1..]).collect();
        let losses = self.model.token_losses(self.tokens(&inputs), self.tokens(&targets), None);
        let losses: Vec<f32> = losses.into_data().iter::<f32>().map(|loss| -loss).collect();
        Ok(losses.chunks_exact(n).map(<[f32]>::to_vec).collect())
    }

    fn predict(
        &mut self,
        sequences: &[Vec<u32>],
        places: &[Vec<usize>],
    ) -> Result<Vec<Vec<u32>>, EvalError> {
        let Some(n) = sequences.first().map(Vec::len) else { return Ok(vec![]) };
        let rows: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
        let flat = places
            .iter()
            .enumerate()
            .flat_map(|(row, places)| places.iter().map(move |place| (row * n + place) as i32));
        let flat: Vec<i32> = flat.collect();
        let count = flat.len();
        let flat = Tensor::from_data(TensorData::new(flat, [count]), &self.device);
        let found = self.model.likeliest(self.tokens(&rows), flat).into_data();
        let mut found = found.iter::<i64>().map(|token| token as u32);
        Ok(places.iter().map(|places| found.by_ref().take(places.len()).collect()).collect())
    }

    fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_tokens: usize,
    ) -> Result<Vec<Vec<u32>>, EvalError> {
        let stop = Some(self.tokenizer.end_of_text());
        let greedy = &Sampling::GREEDY;
        generate(&self.model, prompts, max_tokens, greedy, stop, &self.device, |_, _| {})
            .map_err(|error| EvalError::model("greedy generation", error))
    }

    fn metrics(&self) -> Vec<Metric> {
        self.model.metrics()
    }

    fn observe(&mut self, sequences: &[Vec<u32>]) -> Result<Vec<Vec<Observation>>, EvalError> {
        // One at a time: a probe's values are over all sequences that it sees.
        let observe = |sequence: &Vec<u32>| self.model.observe(self.tokens(&[sequence]), None);
        Ok(sequences.iter().map(|sequence| observe(sequence).observations().to_vec()).collect())
    }
}
