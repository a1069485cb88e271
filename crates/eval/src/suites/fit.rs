//! Lengths that prompts need.

use longwall_data::Tokenizer;

use crate::EvalError;
use crate::suite::Trial;

/// Rejects lengths below that of the longest prompt without filling, and the answer.
///
/// # Errors
/// [`EvalError::TooShort`].
pub(super) fn check_floor(
    suite: &'static str,
    lengths: &[usize],
    prompt: usize,
    generation: usize,
    tokenizer: &Tokenizer,
) -> Result<(), EvalError> {
    let minimum = prompt + generation;
    match lengths.iter().find(|&&length| length < minimum) {
        None => Ok(()),
        Some(&length) => {
            let tokenizer = tokenizer.name().to_string();
            Err(EvalError::TooShort { suite, length, minimum, prompt, generation, tokenizer })
        }
    }
}

/// The error of a trial whose prompt needs more than the `budget` tokens that its length leaves it.
pub(super) fn too_short(
    suite: &'static str,
    trial: &Trial,
    prompt: usize,
    budget: usize,
    tokenizer: &Tokenizer,
) -> EvalError {
    let generation = trial.length - budget;
    let (length, minimum) = (trial.length, prompt + generation);
    let tokenizer = tokenizer.name().to_string();
    EvalError::TooShort { suite, length, minimum, prompt, generation, tokenizer }
}
