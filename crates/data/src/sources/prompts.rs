//! Rows of a task whose examples are a prompt and its answer: each example is prompt, answer and end of text, its
//! length uniform between the two that the configuration asks for.

use std::fmt::{Debug, Display};

use longwall_config::Problems;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{OpenContext, RowGenerator, SourceData};
use crate::synthetic::held_out::Part;
use crate::synthetic::packing::{Example, Goal, pack};
use crate::{DataConfig, DataError, Tokenizer};

/// Draws that the shortest length of a task is taken from.
const SHORTEST_OF: usize = 256;
/// Draws for one example: one that does not fit is drawn again.
const MOST_DRAWS: usize = 1000;

/// A task whose examples are a prompt and its answer.
pub(super) trait PromptTask: Debug + Send + Sync + 'static {
    /// Its name in errors.
    const NAME: &'static str;

    /// A prompt that fills `length` tokens together with its answer and an end of text; what is held out is of `part`.
    ///
    /// # Errors
    /// The tokens that this draw needs, if they are more.
    fn draw(
        &self,
        rng: &mut ChaCha8Rng,
        length: usize,
        part: Part,
        tokenizer: &Tokenizer,
    ) -> Result<Prompted, usize>;

    /// The length that is enough for every example, or for nearly every one if the draws have no bound.
    fn shortest(&self, tokenizer: &Tokenizer) -> usize {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let needed = (0..SHORTEST_OF).map(|_| self.draw(&mut rng, 0, Part::Train, tokenizer));
        needed.filter_map(Result::err).max().unwrap_or(1)
    }
}

/// A prompt and what follows it.
pub(super) struct Prompted {
    prompt: Vec<u32>,
    completion: Vec<u32>,
}

impl Prompted {
    /// The prompt that `fit` makes of the tokens that the completion and the end of text leave of `length`.
    ///
    /// # Errors
    /// The tokens of the shortest prompt, which `fit` gives, and those of the rest.
    pub(super) fn new(
        completion: &str,
        length: usize,
        tokenizer: &Tokenizer,
        fit: impl FnOnce(usize) -> Result<Vec<u32>, usize>,
    ) -> Result<Self, usize> {
        let completion = tokenizer.encode(completion);
        let rest = completion.len() + 1;
        // Without room for the rest, the prompt still says what it needs.
        let prompt = fit(length.saturating_sub(rest)).map_err(|needed| needed + rest)?;
        match length >= rest {
            true => Ok(Prompted { prompt, completion }),
            false => Err(prompt.len() + rest),
        }
    }
}

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

/// Records an empty list, and values that are not allowed; `name` is the list's key.
pub(super) fn validate_list<T: Display + Copy>(
    (key, name): (&str, &str),
    list: &[T],
    is_allowed: impl Fn(T) -> bool,
    allowed: &str,
    problems: &mut Problems,
) {
    let key = format!("{key}.{name}");
    problems.check(!list.is_empty(), &key, "empty", "one or more", "leave it out for the default");
    for &value in list {
        problems.check(is_allowed(value), &key, value, allowed, "leave it out");
    }
}

/// The rows of the split that `context` opens. `what` has the settings that the rows depend on, besides the lengths
/// and `answer_only`, which makes the loss count the answers alone.
///
/// # Errors
/// When one of the lengths is too short for an example.
pub(super) fn prompt_rows<T: PromptTask>(
    context: &OpenContext<'_>,
    task: T,
    what: &str,
    (asked_min, asked_max): (Option<usize>, Option<usize>),
    answer_only: bool,
) -> Result<SourceData, DataError> {
    let needed = task.shortest(context.tokenizer);
    let max_len = asked_max.unwrap_or(context.data.seq_len);
    let min_len = asked_min.unwrap_or(needed);
    for (budget, key) in [(max_len, "max_len (by default data.seq_len)"), (min_len, "min_len")] {
        if budget < needed {
            let (task, tokenizer) = (T::NAME, context.tokenizer.name().into());
            return Err(DataError::PromptTooLong { task, budget, key, needed, tokenizer });
        }
    }
    let rows = PromptRows {
        task,
        tokenizer: context.tokenizer.clone(),
        lengths: (min_len, max_len),
        answer_only,
        part: context.part(),
        seed: context.generator_seed(),
    };
    let fingerprint = format!("{what} {asked_min:?} {max_len} {answer_only}");
    Ok(SourceData::Generated { rows: Box::new(rows), fingerprint })
}

#[derive(Debug)]
struct PromptRows<T> {
    task: T,
    tokenizer: Tokenizer,
    /// Shortest and longest example.
    lengths: (usize, usize),
    answer_only: bool,
    part: Part,
    seed: u64,
}

impl<T: PromptTask> PromptRows<T> {
    fn example(&self, rng: &mut ChaCha8Rng) -> Example {
        let length = rng.random_range(self.lengths.0..=self.lengths.1);
        for _ in 0..MOST_DRAWS {
            let Ok(Prompted { prompt, completion }) =
                self.task.draw(rng, length, self.part, &self.tokenizer)
            else {
                continue;
            };
            let (start, mut tokens) = (prompt.len(), prompt);
            tokens.extend(completion);
            let goal = match self.answer_only {
                true => Goal::Tokens((start..tokens.len()).collect()),
                false => Goal::AllTokens,
            };
            tokens.push(self.tokenizer.end_of_text());
            return Example { tokens, goal };
        }
        panic!("{MOST_DRAWS} examples of {} need more than {length} tokens", T::NAME)
    }
}

impl<T: PromptTask> RowGenerator for PromptRows<T> {
    fn fill(&self, index: u64, tokens: &mut [i32], targets: &mut [i32], weights: &mut [f32]) {
        let (seed, end) = ((self.seed, index), self.tokenizer.end_of_text());
        pack(seed, end, |rng| self.example(rng), (tokens, targets), weights);
    }
}
