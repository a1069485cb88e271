//! A trained language model under evaluation.

use std::collections::HashMap;

use burn::tensor::{Int, Tensor, TensorData};
use longwall_data::Tokenizer;
use longwall_kernels::attention::probe::{Metric, Observation};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::DeviceKind;
use longwall_model::LanguageModel;
use longwall_model::generate::{Sampling, generate, generate_after_prefixes};
use longwall_model::layers::LayerWeights;
use longwall_model::prefixes::{self, distinct_tokens};

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

    /// Whether to read each prefix that rows share once, row by row, and then to generate `generated` tokens for each
    /// row alone: where this leaves at most 1/`part` of the tokens. Only on the CPU: a GPU reads the rows of a batch at
    /// the same time, and rounds differently in decoding.
    fn reads_prefixes_once(&self, rows: &[&[u32]], generated: usize, part: usize) -> bool {
        let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let steps = STEP * generated * rows.len();
        B::device_kind() == DeviceKind::Cpu
            && part * (distinct_tokens(rows) + steps) <= rows.len() * longest
    }
}

/// Tokens of a prompt that take as long as one that is generated for a row alone rather than in a batch.
const STEP: usize = 4;

/// Requests for log-likelihoods as rows: each a context and its continuation without the last token. Requests that read
/// the same tokens, as continuations of one token do, share a row.
#[derive(Debug, PartialEq)]
struct Rows {
    rows: Vec<Vec<u32>>,
    /// Row and position of the place before each token of the continuations.
    places: Vec<(usize, usize)>,
    /// The tokens of the continuations.
    targets: Vec<u32>,
}

impl Rows {
    fn new(requests: &[(Vec<u32>, Vec<u32>)]) -> Self {
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
        let places = |(row, (context, continuation)): (usize, &(Vec<u32>, Vec<u32>))| {
            let first = context.len() - 1;
            (first..first + continuation.len()).map(move |at| (row, at))
        };
        Rows {
            places: of_request.into_iter().zip(requests).flat_map(places).collect(),
            targets: requests.iter().flat_map(|(_, continuation)| continuation.clone()).collect(),
            rows,
        }
    }

    /// The rows, filled up to one length with `filling`, any token, behind their ends, where a causal model does not
    /// look; and the places, `row · length + position`.
    fn padded(&self, filling: u32) -> (Vec<Vec<u32>>, Vec<u32>) {
        let length = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let fill = |row: &Vec<u32>| [row, &vec![filling; length - row.len()][..]].concat();
        let place = |(row, at): &(usize, usize)| (row * length + at) as u32;
        (self.rows.iter().map(fill).collect(), self.places.iter().map(place).collect())
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
        let batch = Rows::new(requests);
        let ids = |ids: &[u32]| {
            let data: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
            Tensor::from_data(TensorData::new(data, [ids.len()]), &self.device)
        };
        let rows: Vec<&[u32]> = batch.rows.iter().map(Vec::as_slice).collect();
        // Kernels for whole rows are faster than those that extend a state.
        let (log_p, likeliest) = if self.reads_prefixes_once(&rows, 0, 3) {
            let (places, targets) = (&batch.places, &batch.targets);
            prefixes::log_probs(&self.model, &rows, places, targets, &self.device)
        } else {
            let (rows, places) = batch.padded(self.tokenizer.end_of_text());
            let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
            self.model.log_probs(self.tokens(&rows), ids(&places), ids(&batch.targets))
        };
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
        let (stop, device) = (Some(self.tokenizer.end_of_text()), &self.device);
        let rows: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let generated = if self.reads_prefixes_once(&rows, max_tokens, 2) {
            generate_after_prefixes(&self.model, prompts, max_tokens, stop, device)
        } else {
            let greedy = &Sampling::GREEDY;
            generate(&self.model, prompts, max_tokens, greedy, stop, device, |_, _| {})
        };
        generated.map_err(|error| EvalError::model("greedy generation", error))
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
    use longwall_data::TokenizerConfig;
    use longwall_kernels::Cpu;
    use longwall_model::{ModelConfig, Precision};

    use super::*;

    #[test]
    fn requests_share_rows_that_read_the_same_and_are_padded() {
        let requests = [
            (vec![1, 2], vec![3]),
            (vec![1, 2], vec![4]),
            (vec![1, 2], vec![3, 5]),
            (vec![6], vec![7, 8, 9, 10]),
        ];
        let batch = Rows::new(&requests);
        assert_eq!(batch.rows, [vec![1, 2], vec![1, 2, 3], vec![6, 7, 8, 9]]);
        let places = [(0, 1), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)];
        assert_eq!(batch.places, places);
        assert_eq!(batch.targets, [3, 4, 3, 5, 7, 8, 9, 10]);
        let (rows, places) = batch.padded(0);
        assert_eq!(rows, [vec![1, 2, 0, 0], vec![1, 2, 3, 0], vec![6, 7, 8, 9]]);
        assert_eq!(places, [1, 1, 5, 6, 8, 9, 10, 11]);
    }

    fn model(kind: &str) -> TrainedModel<Cpu> {
        let table =
            format!("layers = 2\nwidth = 32\nheads = 2\nattention = {{ kind = \"{kind}\" }}");
        let config: ModelConfig = toml::from_str(&table).unwrap();
        let device = Default::default();
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let model = LanguageModel::new(&config, tokenizer.vocab_size(), 200, 1, &device);
        TrainedModel::new(model, tokenizer, 200, CallMemory::new(&config, Precision::F32), device)
    }

    /// Of a kind with a cache and one with a state: in a batch, answers to one question and prompts with one beginning are
    /// read as a tree; alone, they share nothing.
    #[test]
    fn answers_do_not_depend_on_shared_prefixes() {
        for kind in ["rope", "gated_delta_net"] {
            let mut model = model(kind);
            let question: Vec<u32> = (0..120).map(|t| t * t % 250).collect();
            let pairs = [vec![3], vec![3, 4, 5], vec![3, 4, 9], vec![8, 8], vec![9; 3]]
                .map(|answer| (question.clone(), answer));
            let rows = Rows::new(&pairs).rows;
            let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
            assert!(model.reads_prefixes_once(&rows, 0, 3));
            for (together, pair) in model.log_likelihood(&pairs).unwrap().iter().zip(pairs) {
                let alone = model.log_likelihood(&[pair]).unwrap()[0];
                assert!((together.sum - alone.sum).abs() < 1e-4, "{kind}: {together:?}, {alone:?}");
                assert_eq!(together.greedy, alone.greedy, "{kind}");
            }

            let prompt = |end: u32| [&question[..], &[end; 3]].concat();
            let prompts: Vec<Vec<u32>> = [7, 9, 7, 200].map(prompt).to_vec();
            let rows: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
            assert!(model.reads_prefixes_once(&rows, 6, 2));
            let together = model.generate(&prompts, 6).unwrap();
            for (together, prompt) in together.iter().zip(prompts) {
                assert_eq!(*together, model.generate(&[prompt], 6).unwrap()[0], "{kind}");
            }
        }
    }

    #[test]
    fn prefixes_are_read_once_where_this_saves_enough() {
        let model = model("rope");
        let row = |shared: usize, end: u32| [vec![1; shared], vec![end; 100 - shared]].concat();
        let rows = |shared| [2, 3, 4, 5].map(|end| row(shared, end));
        let worth = |shared, generated, part| {
            let rows = rows(shared);
            let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
            model.reads_prefixes_once(&rows, generated, part)
        };
        // 4 rows of 100 tokens, of which 100 + 3 · 11 or 100 + 3 · 12 differ.
        assert!(worth(89, 0, 3) && !worth(88, 0, 3));
        // Steps: 16 for each generated token.
        assert!(worth(90, 4, 2) && !worth(90, 5, 2));
    }
}
