//! RULER (Hsieh et al., 2024): eleven tasks of retrieval, tracing and counting whose prompts are generated.
//!
//! Texts and sizes are those of the original's code. Of each prompt the answers belong to training or to tests: every
//! number and UUID that is asked for, the variables of a chain, the words of a list or of a coded text.

mod needles;
mod task;
mod tracking;
mod words;

use rand_chacha::ChaCha8Rng;

pub use self::task::Task;
pub use self::words::WordList;
use super::fit::greatest;
use super::haystack::Haystack;
use super::held_out::Part;
use crate::Tokenizer;

/// A prompt and its references.
pub struct Built {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The texts that an answer contains.
    pub answers: Vec<String>,
}

/// What prompts are made of.
#[derive(Clone, Copy, Debug)]
pub struct Material<'a> {
    /// The text that some tasks hide needles in.
    pub haystack: Option<&'a Haystack>,
    /// The words of `cwe`.
    pub words: &'a WordList,
}

impl Task {
    /// A prompt with at most `budget` tokens, whose answers are of `part`. `length`, the tokens of the prompt and its
    /// answer, decides how often words come.
    ///
    /// # Errors
    /// The tokens of the shortest prompt, if they are more.
    ///
    /// # Panics
    /// For a task of questions, whose prompts are not generated, and for one that needs text without any.
    pub fn build(
        self,
        material: Material<'_>,
        (length, budget): (usize, usize),
        rng: &mut ChaCha8Rng,
        tokenizer: &Tokenizer,
        part: Part,
    ) -> Result<Built, usize> {
        match self {
            Task::Vt => tracking::build(budget, rng, (tokenizer, part)),
            Task::Cwe => words::common(material.words, length, budget, rng, (tokenizer, part)),
            Task::Fwe => words::frequent(length, budget, rng, (tokenizer, part)),
            Task::Qa1 | Task::Qa2 => panic!("the questions of {self} are read from a file"),
            _ => needles::build(self, material.haystack, budget, rng, (tokenizer, part)),
        }
    }
}

/// The greatest number of parts whose prompt fits into `budget`, and that prompt; else the tokens that the least
/// takes.
pub fn fill(
    (least, most): (usize, usize),
    budget: usize,
    tokenizer: &Tokenizer,
    text: impl Fn(usize) -> String,
) -> Result<Vec<u32>, usize> {
    let tokens = |count: usize| tokenizer.encode(&text(count));
    let shortest = tokens(least).len();
    if shortest > budget {
        return Err(shortest);
    }
    // The tokens that a part adds, from a few of them.
    let more = (least + 8).min(most);
    let part = tokens(more).len().saturating_sub(shortest) as f64 / (more - least).max(1) as f64;
    let guess = least + ((budget - shortest) as f64 / part.max(0.1)) as usize;
    let count = greatest(least, most, guess, |count| tokens(count).len() <= budget);
    Ok(tokens(count))
}
