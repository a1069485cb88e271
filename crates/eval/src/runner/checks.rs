//! What is checked before the first sample: whether the model can read the lengths, and the memory holds them.

use super::calls::rows_of;
use crate::options::SamplingOptions;
use crate::suite::{Suite, Trial};
use crate::{EvalError, EvalModel};

/// Rejects lengths that the model cannot read, before the first sample.
pub(super) fn check_lengths<S: Suite>(
    trials: &[Trial],
    max_len: Option<usize>,
) -> Result<(), EvalError> {
    let longest = trials.iter().map(|trial| trial.length).max().unwrap_or(0);
    match max_len {
        Some(max_len) if longest > max_len => {
            Err(EvalError::TooLong { suite: S::NAME, length: longest, max_len })
        }
        _ => Ok(()),
    }
}

/// Rejects lengths whose calls cannot fit into memory, before the first sample.
pub(super) fn check_memory<S: Suite>(
    trials: &[Trial],
    sampling: &SamplingOptions,
    model: &dyn EvalModel,
) -> Result<(), EvalError> {
    let Some(available) = model.available_memory() else { return Ok(()) };
    let fits = |rows: usize, length: usize| {
        model.least_memory(rows, length, S::GENERATES).is_none_or(|needed| needed <= available)
    };
    for trials in trials.chunk_by(|a, b| a.length == b.length) {
        let length = trials[0].length;
        let rows = rows_of(sampling, length).min(trials.len());
        let Some(needed) = model.least_memory(rows, length, S::GENERATES) else { continue };
        if needed <= available {
            continue;
        }
        let remedy = if rows > 1 && fits(1, length) {
            "give --batch 1: one sequence at a time may fit".to_string()
        } else {
            let (mut fitting, mut beyond) = (0, length);
            while fitting + 1 < beyond {
                let middle = fitting + (beyond - fitting) / 2;
                if fits(1, middle) { fitting = middle } else { beyond = middle }
            }
            format!("ask for shorter --lengths, certainly below {beyond}, or use a larger machine")
        };
        let suite = S::NAME;
        return Err(EvalError::OutOfMemory { suite, length, rows, needed, available, remedy });
    }
    Ok(())
}

/// Says once which lengths are beyond the training length.
pub(super) fn extrapolation_note(trials: &[Trial], train_seq_len: usize) -> Option<String> {
    let mut beyond: Vec<String> = trials
        .chunk_by(|a, b| a.length == b.length)
        .filter(|trials| trials[0].length > train_seq_len)
        .map(|trials| trials[0].length.to_string())
        .collect();
    let last = beyond.pop()?;
    let lengths = match beyond.len() {
        0 => format!("length {last} is"),
        1..=15 => format!("lengths {} and {last} are", beyond.join(", ")),
        more => format!("{} lengths from {} to {last} are", more + 1, beyond[0]),
    };
    Some(format!(
        "{lengths} beyond the training length, {train_seq_len}: such scores show how the model extrapolates"
    ))
}
