//! The needle, the question, and their vocabulary.

use longwall_data::Tokenizer;
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use super::NiahMode;

/// The text before the haystack.
pub(super) const INSTRUCTION: &str = "A special magic number is hidden within the following text. Remember it: you will be asked for it afterwards.\n";

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
pub(in crate::suites) fn all_keys() -> Vec<String> {
    let keys = ADJECTIVES.iter().flat_map(|adjective| NOUNS.iter().map(move |n| (adjective, n)));
    keys.map(|(adjective, noun)| format!("{adjective}-{noun}")).collect()
}

/// Different random keys, at most all.
pub(in crate::suites) fn distinct_keys(rng: &mut ChaCha8Rng, count: usize) -> Vec<String> {
    all_keys().choose_multiple(rng, count).cloned().collect()
}

/// The text of one trial without its haystack.
pub(super) struct Needle {
    /// The sentence in the haystack, on its own line.
    pub statement: String,
    /// The text after the haystack.
    pub question: String,
    /// The answer.
    pub number: String,
}

impl Needle {
    /// A random key and number.
    pub fn draw(rng: &mut ChaCha8Rng, mode: NiahMode) -> Self {
        let adjective = ADJECTIVES[rng.random_range(0..ADJECTIVES.len())];
        let noun = NOUNS[rng.random_range(0..NOUNS.len())];
        let number = rng.random_range(1_000_000..=9_999_999u32).to_string();
        Needle::new(&format!("{adjective}-{noun}"), number, mode)
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

/// The most tokens that needle and question take together, over all keys and numbers.
pub(super) fn longest_needle(tokenizer: &Tokenizer, mode: NiahMode) -> usize {
    let mut longest = 0;
    for adjective in ADJECTIVES {
        for noun in NOUNS {
            for number in ["1234567", "9876543"] {
                let needle = Needle::new(&format!("{adjective}-{noun}"), number.to_string(), mode);
                let tokens = |text: &str| tokenizer.encode(text).len();
                longest = longest.max(tokens(&needle.statement) + tokens(&needle.question));
            }
        }
    }
    // A number of seven digits takes at most seven tokens and at least one.
    longest + 6
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
