//! Texts to tokens, as lm-evaluation-harness does it.

use longwall_data::Tokenizer;

use super::document::Pair;

/// The white space at the end of a context, which is scored with the continuation: a token may begin with it.
pub(super) fn moved_space(context: &str) -> &str {
    &context[context.trim_end().len()..]
}

/// The tokens of the context and those of the continuation.
///
/// Both are encoded together, and the context alone: its tokens come first, the rest are the continuation's. White
/// space at the end of the context counts to the continuation. An empty context becomes the end-of-text token.
/// None if nothing is left for the continuation, because a token spans all of it and the context's end.
pub(super) fn encode(pair: &Pair, tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let trimmed = pair.context.trim_end();
    let mut context = tokenizer.encode(trimmed);
    let whole = tokenizer.encode(&format!("{}{}", pair.context, pair.continuation));
    let continuation = whole.get(context.len()..).filter(|rest| !rest.is_empty())?.to_vec();
    if context.is_empty() {
        context.push(tokenizer.end_of_text());
    }
    Some((context, continuation))
}

/// Leaves out the beginning of a context so that the model reads at most `most` tokens: context and continuation
/// without the last token. Returns whether tokens were left out, or the continuation's tokens if they are too many.
pub(super) fn truncate(
    context: &mut Vec<u32>,
    continuation: &[u32],
    most: usize,
) -> Result<bool, usize> {
    // At least one token of context is read.
    let room = most.checked_sub(continuation.len() - 1).filter(|room| *room > 0);
    let room = room.ok_or(continuation.len())?;
    let excess = context.len().saturating_sub(room);
    context.drain(..excess);
    Ok(excess > 0)
}

#[cfg(test)]
mod tests {
    use longwall_data::TokenizerConfig;

    use super::*;

    fn pair(context: &str, continuation: &str) -> Pair {
        Pair { context: context.into(), continuation: continuation.to_string() }
    }

    #[test]
    fn white_space_before_the_continuation_belongs_to_it() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Gpt2).unwrap();
        let (context, continuation) = encode(&pair("The grass is ", "green"), &tokenizer).unwrap();
        assert_eq!(tokenizer.decode(&context), "The grass is");
        assert_eq!(tokenizer.decode(&continuation), " green");
        assert_eq!(continuation.len(), 1);
        assert_eq!(
            encode(&pair("The grass is", " green"), &tokenizer),
            Some((context, continuation))
        );
    }

    #[test]
    fn an_empty_context_is_the_end_of_text() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let (context, continuation) = encode(&pair("", "ab"), &tokenizer).unwrap();
        assert_eq!((context, continuation.len()), (vec![tokenizer.end_of_text()], 2));
        assert_eq!(encode(&pair("a", ""), &tokenizer), None);
    }

    #[test]
    fn contexts_lose_their_beginning() {
        let cut = |most| {
            let mut context = vec![1, 2, 3, 4];
            truncate(&mut context, &[5, 6], most).map(|cut| (context, cut))
        };
        assert_eq!(cut(5), Ok((vec![1, 2, 3, 4], false)));
        assert_eq!(cut(4), Ok((vec![2, 3, 4], true)));
        assert_eq!(cut(2), Ok((vec![4], true)));
        assert_eq!(cut(1), Err(2));
    }
}
