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

/// The error of a task that the model's tokenizer does not suit.
pub(super) fn task_error(error: DataError) -> EvalError {
    // The error's own hint is for training.
    let error = error.to_string();
    EvalError::Text {
        what: error.split("\n  hint: ").next().unwrap_or(&error).to_string(),
        remedy: "evaluate a model with another tokenizer".to_string(),
    }
}
