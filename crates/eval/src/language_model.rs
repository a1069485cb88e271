//! A trained language model under evaluation.

use std::collections::HashMap;

use burn::tensor::{Int, Tensor, TensorData};
use longwall_data::Tokenizer;
use longwall_kernels::attention::probe::{Metric, Observation};
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;
use longwall_model::generate::{Sampling, generate};
use longwall_model::layers::LayerWeights;

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

/// Requests for log-likelihoods as rows of one length. A row is a context and its continuation without the last
/// token, filled up behind its end, where a causal model does not look. Requests that read the same tokens, as
/// continuations of one token do, share a row.
#[derive(Debug, PartialEq)]
struct Padded {
    rows: Vec<Vec<u32>>,
    /// The place before each token of the continuations, `row · length + position`.
    places: Vec<u32>,
    /// The tokens of the continuations.
    targets: Vec<u32>,
}

impl Padded {
    /// `filling` is any token.
    fn new(requests: &[(Vec<u32>, Vec<u32>)], filling: u32) -> Self {
        let mut found = HashMap::<Vec<u32>, usize>::new();
        let mut rows = Vec::<Vec<u32>>::new();
        let of_request = requests.iter().map(|(context, continuation)| {
            let read = [context, &continuation[..continuation.len() - 1]].concat();
            *found.entry(read).or_insert_with_key(|read| {
                rows.push(read.clone());
                rows.len() - 1
            })
        });
        let of_request: Vec<usize> = of_request.collect();
        let length = rows.iter().map(Vec::len).max().unwrap_or(0);
        rows.iter_mut().for_each(|row| row.resize(length, filling));
        let place = |(row, (context, continuation)): (usize, &(Vec<u32>, Vec<u32>))| {
            let first = row * length + context.len() - 1;
            (first..first + continuation.len()).map(|place| place as u32)
        };
        Padded {
            places: of_request.into_iter().zip(requests).flat_map(place).collect(),
            targets: requests.iter().flat_map(|(_, continuation)| continuation.clone()).collect(),
            rows,
        }
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
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let batch = Padded::new(requests, self.tokenizer.end_of_text());
        let rows: Vec<&[u32]> = batch.rows.iter().map(Vec::as_slice).collect();
        let ids = |ids: &[u32]| {
            let data: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
            Tensor::from_data(TensorData::new(data, [ids.len()]), &self.device)
        };
        let (log_p, likeliest) =
            self.model.log_probs(self.tokens(&rows), ids(&batch.places), ids(&batch.targets));
        let log_p: Vec<f64> = log_p.into_data().iter::<f64>().collect();
        let likeliest: Vec<u32> = likeliest.into_data().iter::<i64>().map(|t| t as u32).collect();
        let mut start = 0;
        let answers = requests.iter().map(|(_, continuation)| {
            let range = start..start + continuation.len();
            start = range.end;
            let sum = log_p[range.clone()].iter().sum();
            LogLikelihood { sum, greedy: likeliest[range] == continuation[..] }
        });
        Ok(answers.collect())
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
        self.model.thorough_metrics()
    }

    fn observe(&mut self, sequences: &[Vec<u32>]) -> Result<Vec<Vec<Observation>>, EvalError> {
        // One at a time: a probe's values are over all sequences that it sees.
        let observe = |sequence: &Vec<u32>| self.model.observe_thoroughly(self.tokens(&[sequence]));
        Ok(sequences.iter().map(|sequence| observe(sequence).observations().to_vec()).collect())
    }

    fn attention_weights(&mut self, tokens: &[u32]) -> Result<Vec<LayerWeights>, EvalError> {
        Ok(self.model.attention_weights(self.tokens(&[tokens])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_padded_and_share_rows_that_read_the_same() {
        let requests = [
            (vec![1, 2], vec![3]),
            (vec![1, 2], vec![4]),
            (vec![1, 2], vec![3, 5]),
            (vec![6], vec![7, 8, 9, 10]),
        ];
        let batch = Padded::new(&requests, 0);
        assert_eq!(batch.rows, [vec![1, 2, 0, 0], vec![1, 2, 3, 0], vec![6, 7, 8, 9]]);
        assert_eq!(batch.places, [1, 1, 5, 6, 8, 9, 10, 11]);
        assert_eq!(batch.targets, [3, 4, 3, 5, 7, 8, 9, 10]);
    }
}
