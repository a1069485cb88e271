//! Shared by suites whose sequences are symbols with labels at some places: the request, and the verdict.

use longwall_data::DataError;
use longwall_data::synthetic::symbols::{Labelled, SymbolTokens};

use super::counted::Counted;
use crate::EvalError;
use crate::suite::{Answer, ModelCall, Request, show_tokens};

/// The call that predicts every label. The prompt in `samples.jsonl` and the expected answer are ids of tokens.
pub(super) fn request(sequence: &Labelled, tokens: &SymbolTokens) -> Request {
    let encoded = tokens.encode(&sequence.symbols);
    Request {
        prompt: show_tokens(&encoded),
        expected: Some(show_tokens(&labels(sequence, tokens))),
        call: ModelCall::Predict {
            tokens: encoded,
            places: sequence.labels.iter().map(|&(place, _)| place).collect(),
        },
        depth: None,
    }
}

/// The tokens of the labels.
pub(super) fn labels(sequence: &Labelled, tokens: &SymbolTokens) -> Vec<u32> {
    sequence.labels.iter().map(|&(_, label)| tokens.token(label)).collect()
}

/// How many labels the model predicts.
pub(super) fn predicted(answer: &Answer, sequence: &Labelled, tokens: &SymbolTokens) -> Counted {
    Counted::equal(predictions(answer), &labels(sequence, tokens))
}

/// The tokens that the model predicts.
pub(super) fn predictions(answer: &Answer) -> &[u32] {
    match answer {
        Answer::Tokens(tokens) => tokens,
        other => unreachable!("a request for predictions was answered by {other:?}"),
    }
}

/// The error of a task that has more symbols than the model's tokenizer has tokens.
///
/// # Panics
/// For any other error: nothing else goes wrong when symbols get their tokens.
pub(super) fn task_error(error: DataError) -> EvalError {
    match error {
        DataError::TooFewTokens { task, needed, available, tokenizer } => EvalError::Text {
            what: format!(
                "{task} needs {needed} tokens besides the end of text; the tokenizer {tokenizer} has {available}"
            ),
            remedy: "evaluate a model with another tokenizer".to_string(),
        },
        other => unreachable!("the tokens of symbols gave {other:?}"),
    }
}
