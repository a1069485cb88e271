//! Shared by sources whose examples are a prompt and its answer: the lengths that a configuration asks for, and
//! the tokens of an example.

use longwall_config::Problems;

use super::OpenContext;
use crate::synthetic::packing::{Example, Goal};
use crate::{DataConfig, DataError, Tokenizer};

/// Records the problems of the shortest and the longest example, in tokens, as far as the configuration shows them.
pub(super) fn validate_lengths(
    key: &str,
    (min_len, max_len): (Option<usize>, Option<usize>),
    data: &DataConfig,
    problems: &mut Problems,
) {
    let max_len = max_len.unwrap_or(data.seq_len);
    problems.check(
        max_len <= data.seq_len,
        format!("{key}.max_len"),
        max_len,
        format!("at most data.seq_len = {}", data.seq_len),
        "lower it, or raise data.seq_len",
    );
    if let Some(min_len) = min_len {
        problems.check(
            min_len <= max_len,
            format!("{key}.min_len"),
            min_len,
            format!("at most max_len = {max_len}"),
            "lower it, or raise max_len",
        );
    }
}

/// The shortest and the longest example of `task`, of which every one needs `needed` tokens.
///
/// # Errors
/// When one of them is shorter.
pub(super) fn lengths(
    task: &'static str,
    (min_len, max_len): (Option<usize>, Option<usize>),
    needed: usize,
    context: &OpenContext<'_>,
) -> Result<(usize, usize), DataError> {
    let max_len = max_len.unwrap_or(context.data.seq_len);
    let min_len = min_len.unwrap_or(needed);
    for (budget, key) in [(max_len, "max_len (by default data.seq_len)"), (min_len, "min_len")] {
        if budget < needed {
            let tokenizer = context.tokenizer.name().into();
            return Err(DataError::PromptTooLong { task, budget, key, needed, tokenizer });
        }
    }
    Ok((min_len, max_len))
}

/// Prompt, completion, end of text. With `answer_only`, the completion alone counts for the loss.
pub(super) fn example(
    tokenizer: &Tokenizer,
    prompt: &str,
    completion: &str,
    answer_only: bool,
) -> Example {
    let mut tokens = tokenizer.encode(prompt);
    let start = tokens.len();
    tokens.extend(tokenizer.encode(completion));
    let goal = match answer_only {
        true => Goal::Tokens((start..tokens.len()).collect()),
        false => Goal::AllTokens,
    };
    tokens.push(tokenizer.end_of_text());
    Example { tokens, goal }
}
