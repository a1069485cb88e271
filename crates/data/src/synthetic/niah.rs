//! A needle in a haystack: a sentence with a key and a magic number, and the question for the number.
//!
//! The keys and the numbers are those of all needle tasks here. A number belongs to training or to tests: training
//! never asks for one that a test asks for.

use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use super::choices::choices;
use super::haystack::Haystack;
use super::held_out::Part;
use crate::Tokenizer;

choices! {
    /// How the needle is phrased.
    #[derive(Default)]
    pub enum NiahMode {
        /// The needle states the number; the question asks for it
        #[default]
        Standard = "standard",
        /// The needle is the question with its answer
        Easy = "easy",
    }
}

/// The text before the haystack.
const INSTRUCTION: &str = "A special magic number is hidden within the following text. Remember it: you will be asked for it afterwards.\n";

const ADJECTIVES: [&str; 24] = [
    "quiet", "bright", "hollow", "gentle", "rapid", "ancient", "silver", "crooked", "frozen",
    "humble", "golden", "restless", "narrow", "velvet", "distant", "eager", "mellow", "rugged",
    "solemn", "tidy", "vivid", "woven", "amber", "brave",
];
const NOUNS: [&str; 24] = [
    "harbour", "lantern", "meadow", "compass", "orchard", "thimble", "canyon", "ferry", "walnut",
    "bridge", "kettle", "glacier", "violin", "anchor", "pepper", "window", "falcon", "ladder",
    "marble", "garden", "saddle", "tunnel", "button", "island",
];

/// All 576 keys.
pub(crate) fn all_keys() -> Vec<String> {
    let keys = ADJECTIVES.iter().flat_map(|adjective| NOUNS.iter().map(move |n| (adjective, n)));
    keys.map(|(adjective, noun)| format!("{adjective}-{noun}")).collect()
}

/// Different random keys, at most all.
pub(crate) fn distinct_keys(rng: &mut ChaCha8Rng, count: usize) -> Vec<String> {
    all_keys().choose_multiple(rng, count).cloned().collect()
}

/// A magic number of seven digits.
pub(crate) fn magic_number(rng: &mut ChaCha8Rng, part: Part) -> String {
    part.draw(rng, |rng| {
        let number = rng.random_range(1_000_000..=9_999_999u32).to_string();
        (number.clone(), number.into_bytes())
    })
}

/// The text of one prompt without its haystack.
pub struct Needle {
    /// The sentence in the haystack, on its own line.
    pub statement: String,
    /// The text after the haystack.
    pub question: String,
    /// The answer.
    pub number: String,
}

impl Needle {
    /// A random key, and a number of `part`.
    pub fn draw(rng: &mut ChaCha8Rng, mode: NiahMode, part: Part) -> Self {
        let adjective = ADJECTIVES[rng.random_range(0..ADJECTIVES.len())];
        let noun = NOUNS[rng.random_range(0..NOUNS.len())];
        Needle::new(&format!("{adjective}-{noun}"), magic_number(rng, part), mode)
    }

    /// The tokens of a prompt with exactly `budget` tokens: instruction, text with the needle at `depth`, question;
    /// `depth` is from 0, the start of the text, to 1.
    ///
    /// # Errors
    /// The tokens without any text, if they are more.
    pub fn prompt(
        &self,
        haystack: &Haystack,
        depth: f64,
        budget: usize,
        rng: &mut ChaCha8Rng,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, usize> {
        let [before, statement, question] =
            [INSTRUCTION, &self.statement, &self.question].map(|text| tokenizer.encode(text));
        let around = before.len() + statement.len() + question.len();
        let hay = haystack.take(rng, budget.checked_sub(around).ok_or(around)?);
        let at = haystack.place(&hay, depth, tokenizer);
        Ok([&before, &hay[..at], &statement, &hay[at..], &question].concat())
    }

    fn new(key: &str, number: String, mode: NiahMode) -> Self {
        let question = format!(
            "What is the special magic number for {key}? The special magic number for {key} is"
        );
        let statement = match mode {
            NiahMode::Standard => {
                format!("\nOne of the special magic numbers for {key} is: {number}.\n")
            }
            NiahMode::Easy => format!("\n{question} {number}.\n"),
        };
        Needle { statement, question: format!("\n{question}"), number }
    }
}

/// The most tokens of a prompt without text, over all keys and numbers.
pub fn longest_prompt(tokenizer: &Tokenizer, mode: NiahMode) -> usize {
    let tokens = |text: &str| tokenizer.encode(text).len();
    let mut longest = 0;
    for key in all_keys() {
        for number in ["1234567", "9876543"] {
            let needle = Needle::new(&key, number.to_string(), mode);
            longest = longest.max(tokens(&needle.statement) + tokens(&needle.question));
        }
    }
    // A number of seven digits takes at most seven tokens and at least one.
    tokens(INSTRUCTION) + longest + 6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn easy_needles_hold_question_and_answer() {
        let needle = Needle::new("quiet-harbour", "1234567".to_string(), NiahMode::Easy);
        assert!(needle.statement.contains(needle.question.trim()));
        assert!(needle.statement.trim_end().ends_with(" 1234567."));
        let needle = Needle::new("quiet-harbour", "1234567".to_string(), NiahMode::Standard);
        assert_eq!(
            needle.statement,
            "\nOne of the special magic numbers for quiet-harbour is: 1234567.\n"
        );
    }
}
