//! Models with known answers, and runs of a suite on them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use longwall_data::{Tokenizer, TokenizerConfig};
use longwall_eval::{
    Discard, EvalError, EvalModel, HeldOut, LogLikelihood, Ranks, Report, RunContext, Silent,
    SuiteConfig, run,
};
use longwall_kernels::attention::probe::{Metric, Observation};
use longwall_model::layers::LayerWeights;
use serde_json::Value;

/// ln p of a token, by position, length and the sequence's tokens.
pub type TokenLogP = Box<dyn Fn(usize, usize, &[u32]) -> f32>;

/// The most likely token after a position of a sequence.
pub type Predictor = dyn Fn(&[u32], usize) -> u32;

/// ln p of a continuation after a context.
pub type ContinuationLogP = dyn Fn(&str, &str) -> f64;

/// What a window of tokens gives.
pub type Observer = dyn Fn(&[u32]) -> Vec<Observation>;

/// How a [`FakeModel`] answers.
pub struct FakeModel {
    pub tokenizer: Tokenizer,
    pub train_seq_len: usize,
    pub max_len: Option<usize>,
    /// What it generates for a prompt.
    pub reply: Box<dyn Fn(&str) -> String>,
    /// ln p of the token predicted at a position, after reading `position + 1` tokens of `length`.
    pub token_log_p: TokenLogP,
    /// ln p of a continuation after a context; greedy decoding gives those with more than −1.
    pub continuation: Box<ContinuationLogP>,
    /// The token predicted at a place of a sequence.
    pub predict: Box<Predictor>,
    /// Every call: (sequences, tokens of each, tokens it may generate).
    pub calls: Vec<(usize, usize, usize)>,
    /// Stops the evaluation after this many calls.
    pub stop_after: Option<usize>,
    /// Memory it has; it needs 1 MiB for each token.
    pub free_memory: Option<u64>,
    /// Fails at this call.
    pub fail_at: Option<usize>,
    /// What its layers can measure, and what they report of a sequence.
    pub metrics: Vec<Metric>,
    pub observe: Box<Observer>,
    /// Leaves out the last answer of every batch.
    pub loses_answers: bool,
    pub stop: Arc<AtomicBool>,
}

impl FakeModel {
    /// Generates what `reply` returns; all tokens are equally likely.
    pub fn new(tokenizer: TokenizerConfig, reply: impl Fn(&str) -> String + 'static) -> Self {
        let tokenizer = Tokenizer::load(&tokenizer).unwrap();
        let uniform = -(tokenizer.vocab_size() as f32).ln();
        FakeModel {
            tokenizer,
            train_seq_len: 1024,
            max_len: None,
            reply: Box::new(reply),
            token_log_p: Box::new(move |_, _, _| uniform),
            continuation: Box::new(|_, _| 0.0),
            predict: Box::new(|_, _| 0),
            calls: Vec::new(),
            stop_after: None,
            free_memory: None,
            fail_at: None,
            metrics: Vec::new(),
            observe: Box::new(|_| Vec::new()),
            loses_answers: false,
            stop: Arc::new(AtomicBool::new(false)),
        }
    }

    pub fn bytes(reply: impl Fn(&str) -> String + 'static) -> Self {
        FakeModel::new(TokenizerConfig::Bytes, reply)
    }

    fn called(&mut self, sequences: &[Vec<u32>], generation: usize) -> Result<(), EvalError> {
        let lengths = || sequences.iter().map(Vec::len);
        let (length, shortest) = (lengths().max().unwrap(), lengths().min().unwrap());
        assert!(length - shortest <= generation, "{shortest} to {length} tokens in a batch");
        self.calls.push((sequences.len(), length, generation));
        if self.stop_after == Some(self.calls.len()) {
            self.stop.store(true, Ordering::Relaxed);
        }
        if self.fail_at == Some(self.calls.len()) {
            let what = format!("{} sequences of {length} tokens", sequences.len());
            return Err(EvalError::model(what, "out of memory"));
        }
        Ok(())
    }

    fn lose<T>(&self, mut answers: Vec<T>) -> Vec<T> {
        if self.loses_answers {
            answers.pop();
        }
        answers
    }
}

impl EvalModel for FakeModel {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn train_seq_len(&self) -> usize {
        self.train_seq_len
    }

    fn max_len(&self) -> Option<usize> {
        self.max_len
    }

    fn device(&self) -> String {
        "fake".to_string()
    }

    fn least_memory(&self, rows: usize, tokens: usize, _generates: bool) -> Option<u64> {
        Some((rows * tokens) as u64 * (1 << 20))
    }

    fn available_memory(&self) -> Option<u64> {
        self.free_memory
    }

    fn log_likelihood(
        &mut self,
        requests: &[(Vec<u32>, Vec<u32>)],
    ) -> Result<Vec<LogLikelihood>, EvalError> {
        let read = requests.iter().map(|(context, rest)| context.len() + rest.len() - 1);
        self.calls.push((requests.len(), read.max().unwrap_or(0), 0));
        if self.stop_after == Some(self.calls.len()) {
            self.stop.store(true, Ordering::Relaxed);
        }
        let text = |tokens: &[u32]| self.tokenizer.decode(tokens);
        let score = |(context, rest): &(Vec<u32>, Vec<u32>)| {
            let sum = (self.continuation)(&text(context), &text(rest));
            LogLikelihood { sum, greedy: sum > -1.0 }
        };
        Ok(self.lose(requests.iter().map(score).collect()))
    }

    fn token_log_likelihoods(
        &mut self,
        sequences: &[Vec<u32>],
    ) -> Result<Vec<Vec<f32>>, EvalError> {
        self.called(sequences, 0)?;
        let log_ps = |tokens: &Vec<u32>| {
            let length = tokens.len() - 1;
            (0..length).map(|at| (self.token_log_p)(at, length, tokens)).collect()
        };
        Ok(self.lose(sequences.iter().map(log_ps).collect()))
    }

    fn predict(
        &mut self,
        sequences: &[Vec<u32>],
        places: &[Vec<usize>],
    ) -> Result<Vec<Vec<u32>>, EvalError> {
        self.called(sequences, 0)?;
        let predictions = |(tokens, places): (&Vec<u32>, &Vec<usize>)| {
            places.iter().map(|&place| (self.predict)(tokens, place)).collect()
        };
        Ok(self.lose(sequences.iter().zip(places).map(predictions).collect()))
    }

    fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_tokens: usize,
    ) -> Result<Vec<Vec<u32>>, EvalError> {
        self.called(prompts, max_tokens)?;
        let reply = |prompt: &Vec<u32>| {
            let text = (self.reply)(&self.tokenizer.decode(prompt));
            let mut tokens = self.tokenizer.encode(&text);
            tokens.truncate(max_tokens);
            tokens
        };
        Ok(self.lose(prompts.iter().map(reply).collect()))
    }

    fn metrics(&self) -> Vec<Metric> {
        self.metrics.clone()
    }

    fn observe(&mut self, sequences: &[Vec<u32>]) -> Result<Vec<Vec<Observation>>, EvalError> {
        self.called(sequences, 0)?;
        Ok(self.lose(sequences.iter().map(|tokens| (self.observe)(tokens)).collect()))
    }

    fn attention_weights(&mut self, _tokens: &[u32]) -> Result<Vec<LayerWeights>, EvalError> {
        unreachable!("its layers have no weights");
    }
}

/// The passkey that a prompt hides.
pub fn passkey(prompt: &str) -> u32 {
    let (_, rest) = prompt.split_once("\nThe pass key is ").unwrap();
    rest.split_once('.').unwrap().0.parse().unwrap()
}

/// The number that a haystack hides: its only run of seven digits.
pub fn magic_number(prompt: &str) -> String {
    let numbers: Vec<&str> =
        prompt.split(|c: char| !c.is_ascii_digit()).filter(|digits| digits.len() == 7).collect();
    assert_eq!(numbers.len(), 1, "one needle");
    numbers[0].to_string()
}

/// Held-out text from memory.
pub struct Tokens(pub Vec<u32>);

impl HeldOut for Tokens {
    fn validation_tokens(&self, wanted: usize) -> Result<Vec<u32>, EvalError> {
        Ok(self.0.iter().take(wanted).copied().collect())
    }

    fn describe(&self) -> String {
        "validation split of a test".to_string()
    }
}

/// Runs a suite into `dir`.
pub fn evaluate(
    config: &SuiteConfig,
    model: &mut FakeModel,
    dir: &Path,
) -> Result<Report, EvalError> {
    evaluate_with(config, model, dir, false, None)
}

/// Runs a suite into `dir`, with `--force` and held-out text.
pub fn evaluate_with(
    config: &SuiteConfig,
    model: &mut FakeModel,
    dir: &Path,
    force: bool,
    held_out: Option<&dyn HeldOut>,
) -> Result<Report, EvalError> {
    let discard = if force { Discard::All } else { Discard::Nothing };
    evaluate_discarding(config, model, dir, discard, held_out)
}

/// As [`evaluate_with`], for any choice of what is discarded.
pub fn evaluate_discarding(
    config: &SuiteConfig,
    model: &mut FakeModel,
    dir: &Path,
    discard: Discard,
    held_out: Option<&dyn HeldOut>,
) -> Result<Report, EvalError> {
    let stop = Arc::clone(&model.stop);
    stop.store(false, Ordering::Relaxed);
    run(
        config,
        model,
        &RunContext {
            out_dir: dir.to_path_buf(),
            run: "wall".to_string(),
            checkpoint_step: Some(100),
            model_changes: vec![],
            git_hash: Some("0123abc".to_string()),
            discard,
            held_out,
            progress: &Silent,
            stop: Some(&*stop),
            ranks: Ranks::ALONE,
        },
    )
}

/// The samples that a suite wrote.
pub fn samples(dir: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join("samples.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The samples that a suite wrote, in the order of its trials: the file has them by the length of the prompt.
pub fn sorted_samples(dir: &Path) -> Vec<Value> {
    let mut samples = samples(dir);
    samples.sort_by_key(|sample| sample["id"].as_u64());
    samples
}

/// Files of a folder, by name.
pub fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
