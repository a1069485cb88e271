//! How requests share a forward pass, and what the model answers.

use longwall_data::Tokenizer;

use crate::options::SamplingOptions;
use crate::suite::{Answer, ModelCall, Request, Trial, show_tokens};
use crate::{EvalError, EvalModel};

/// How many sequences of a length run at a time.
pub(super) fn rows_of(sampling: &SamplingOptions, length: usize) -> usize {
    sampling.batch.min(sampling.batch_tokens / length.max(1)).max(1)
}

/// Requests that share a call.
pub(super) type Batch<'t> = Vec<(&'t Trial, Request)>;

/// Groups requests that may share a call into batches, as large as the options allow.
pub(super) fn batches<'t>(mut requests: Batch<'t>, sampling: &SamplingOptions) -> Vec<Batch<'t>> {
    requests.sort_by_key(|(trial, request)| (request.call.batch_key(), trial.id));
    let (mut sizes, mut left) = (Vec::new(), &requests[..]);
    while let [(_, first), ..] = left {
        let may_share = |(_, request): &&(_, Request)| first.call.may_share_batch(&request.call);
        let (group, others) = left.split_at(left.iter().take_while(may_share).count());
        left = others;
        let calls = || group.iter().map(|(_, request)| &request.call);
        let rows = rows_of(sampling, calls().map(ModelCall::context_len).max().unwrap_or(0));
        let sequences = calls().map(ModelCall::sequences).max().unwrap_or(1);
        sizes.extend(group.chunks((rows / sequences).max(1)).map(<[_]>::len));
    }
    let mut requests = requests.into_iter();
    sizes.into_iter().map(|size| requests.by_ref().take(size).collect()).collect()
}

/// Runs the model for a batch of calls that may share one.
pub(super) fn run_batch(
    model: &mut dyn EvalModel,
    tokenizer: &Tokenizer,
    sampling: &SamplingOptions,
    batch: &[(&Trial, Request)],
) -> Result<Vec<Answer>, EvalError> {
    let answers: Vec<Answer> = match batch[0].1.call {
        ModelCall::Generate { max_tokens, .. } => {
            let prompts: Vec<Vec<u32>> = inputs(batch, |call| match call {
                ModelCall::Generate { prompt, .. } => Some(prompt.clone()),
                _ => None,
            });
            let outputs = model.generate(&prompts, max_tokens)?;
            outputs.iter().map(|tokens| Answer::Text(tokenizer.decode(tokens))).collect()
        }
        ModelCall::LogLikelihoods { .. } => log_likelihoods(model, sampling, batch)?,
        ModelCall::RollingLogLikelihood { .. } => {
            let sequences: Vec<Vec<u32>> = inputs(batch, |call| match call {
                ModelCall::RollingLogLikelihood { tokens } => Some(tokens.clone()),
                _ => None,
            });
            let values = model.token_log_likelihoods(&sequences)?;
            for (values, sequence) in values.iter().zip(&sequences) {
                check_count("log-likelihoods of a sequence", values.len(), sequence.len() - 1)?;
            }
            values.into_iter().map(Answer::TokenLogProbs).collect()
        }
        ModelCall::Predict { .. } => {
            let calls: Vec<(Vec<u32>, Vec<usize>)> = inputs(batch, |call| match call {
                ModelCall::Predict { tokens, places } => Some((tokens.clone(), places.clone())),
                _ => None,
            });
            let (sequences, places): (Vec<_>, Vec<_>) = calls.into_iter().unzip();
            let found = model.predict(&sequences, &places)?;
            for (found, places) in found.iter().zip(&places) {
                check_count("predictions of a sequence", found.len(), places.len())?;
            }
            found.into_iter().map(Answer::Tokens).collect()
        }
        ModelCall::Observe { .. } => {
            let sequences: Vec<Vec<u32>> = inputs(batch, |call| match call {
                ModelCall::Observe { tokens } => Some(tokens.clone()),
                _ => None,
            });
            model.observe(&sequences)?.into_iter().map(Answer::Observations).collect()
        }
    };
    check_count("answers to a batch", answers.len(), batch.len())?;
    Ok(answers)
}

/// The log-likelihoods that each call of a batch asks for. A call with more sequences than the options allow at a
/// time takes several forward passes.
fn log_likelihoods(
    model: &mut dyn EvalModel,
    sampling: &SamplingOptions,
    batch: &[(&Trial, Request)],
) -> Result<Vec<Answer>, EvalError> {
    let calls: Vec<&[(Vec<u32>, Vec<u32>)]> = inputs(batch, |call| match call {
        ModelCall::LogLikelihoods { pairs } => Some(&pairs[..]),
        _ => None,
    });
    let longest = batch.iter().map(|(_, request)| request.call.input_len()).max().unwrap_or(0);
    let pairs = calls.concat();
    let mut values = Vec::with_capacity(pairs.len());
    for pairs in pairs.chunks(rows_of(sampling, longest)) {
        let found = model.log_likelihood(pairs)?;
        check_count("log-likelihoods of a batch", found.len(), pairs.len())?;
        values.extend(found);
    }
    let mut values = values.into_iter();
    let of_call = |pairs: &[_]| Answer::LogLikelihoods(values.by_ref().take(pairs.len()).collect());
    Ok(calls.into_iter().map(of_call).collect())
}

/// The inputs of a batch, whose calls are all of one kind.
fn inputs<'a, T>(
    batch: &'a [(&Trial, Request)],
    input: impl Fn(&'a ModelCall) -> Option<T>,
) -> Vec<T> {
    batch
        .iter()
        .map(|(_, request)| input(&request.call).expect("a batch holds calls of one kind"))
        .collect()
}

fn check_count(what: &str, found: usize, expected: usize) -> Result<(), EvalError> {
    if found == expected {
        return Ok(());
    }
    Err(EvalError::ModelContract {
        what: what.to_string(),
        found: format!("{found} values"),
        expected: expected.to_string(),
    })
}

/// What the model answered, as `samples.jsonl` keeps it: the text, or the predicted tokens' ids.
pub(super) fn output(answer: &Answer) -> Option<String> {
    match answer {
        Answer::Text(text) => Some(text.clone()),
        Answer::Tokens(tokens) => Some(show_tokens(tokens)),
        _ => None,
    }
}
