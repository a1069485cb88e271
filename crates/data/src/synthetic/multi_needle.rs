//! Several needles far apart in repeated text, and one question for all of them.
//!
//! After the TRA/TDA paper, section 6.4, which gives lengths and numbers of needles but no texts: the needles
//! and the question are RULER's (Hsieh et al., 2024), the garbage that of the passkey task. The text is
//! divided into as many equal parts as there are needles; each needle stands in the middle half of its part,
//! so that two are never closer than half a part.

use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::fit::greatest;
use super::held_out::Part;
use super::niah::{all_keys, distinct_keys, magic_number};
use crate::Tokenizer;

const INSTRUCTION: &str = "Some special magic numbers are hidden within the following text. \
    Make sure to memorize it. I will quiz you about the numbers afterwards.";
const SENTENCES: [&str; 5] = [
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
];

/// The most needles of a prompt.
pub const MOST_NEEDLES: usize = 16;

/// The needles and the question of a prompt.
pub struct Needles {
    /// Keys and numbers, in the order of the text.
    pairs: Vec<(String, String)>,
    /// Indices of the pairs in the order of the question.
    asked: Vec<usize>,
    /// Each needle's place in its part, 0.25 to 0.75.
    places: Vec<f64>,
}

impl Needles {
    /// `count` needles, at most 576, with numbers of `part`.
    pub fn draw(rng: &mut ChaCha8Rng, count: usize, part: Part) -> Self {
        let keys = distinct_keys(rng, count);
        let number = |key| (key, magic_number(rng, part));
        let pairs = keys.into_iter().map(number).collect();
        let places = (0..count).map(|_| rng.random_range(0.25..0.75)).collect();
        let mut asked: Vec<usize> = (0..count).collect();
        asked.shuffle(rng);
        Needles { pairs, asked, places }
    }

    /// The most tokens of a prompt without garbage.
    pub fn longest(tokenizer: &Tokenizer, count: usize) -> usize {
        let tokens = |text: &str| tokenizer.encode(text).len();
        let mut keys = all_keys();
        keys.sort_by_key(|key| std::cmp::Reverse(tokens(key)));
        let number = "9876543".to_string();
        let spare = 7usize.saturating_sub(tokens(&number));
        let pairs = keys.into_iter().take(count).map(|key| (key, number.clone())).collect();
        let needles = Needles { pairs, asked: (0..count).collect(), places: vec![0.5; count] };
        // A number takes at most seven tokens.
        tokens(&needles.prompt(0)) + spare * count
    }

    /// The numbers, in the order of the question.
    pub fn answers(&self) -> Vec<String> {
        self.asked.iter().map(|&at| self.pairs[at].1.clone()).collect()
    }

    /// The prompt with this many sentences of garbage.
    fn prompt(&self, sentences: usize) -> String {
        let garbage = |from: usize, to: usize| {
            let texts: Vec<&str> = (from..to).map(|at| SENTENCES[at % SENTENCES.len()]).collect();
            texts.join(" ")
        };
        let (mut blocks, mut done) = (vec![INSTRUCTION.to_string()], 0);
        for (part, ((key, number), place)) in self.pairs.iter().zip(&self.places).enumerate() {
            let share = (part as f64 + place) / self.pairs.len() as f64;
            let at = (share * sentences as f64).round() as usize;
            blocks.push(garbage(done, at));
            blocks.push(format!("One of the special magic numbers for {key} is: {number}."));
            done = at;
        }
        blocks.push(garbage(done, sentences));
        blocks.push(self.question());
        blocks.retain(|block| !block.is_empty());
        blocks.join("\n")
    }

    /// The prompt with as much garbage as fits into `budget` tokens.
    ///
    /// # Errors
    /// The tokens without garbage, if they are more.
    pub fn fit(&self, budget: usize, tokenizer: &Tokenizer) -> Result<String, usize> {
        let tokens = |sentences| tokenizer.encode(&self.prompt(sentences)).len();
        let bare = tokens(0);
        let room = budget.checked_sub(bare).ok_or(bare)?;
        let sentence = tokens(100).saturating_sub(bare) as f64 / 100.0;
        let guess = (room as f64 / sentence.max(0.1)) as usize;
        Ok(self.prompt(greatest(0, budget, guess, |sentences| tokens(sentences) <= budget)))
    }

    fn question(&self) -> String {
        let keys: Vec<&str> = self.asked.iter().map(|&at| self.pairs[at].0.as_str()).collect();
        let keys = match keys.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{}, and {last}", rest.join(", ")),
            _ => keys.concat(),
        };
        format!(
            "What are all the special magic numbers for {keys} mentioned in the provided text? \
             The special magic numbers for {keys} mentioned in the provided text are"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_of_a_prompt() {
        let pair = |key: &str, number: &str| (key.to_string(), number.to_string());
        let needles = Needles {
            pairs: vec![pair("quiet-harbour", "1234567"), pair("brave-island", "7654321")],
            asked: vec![1, 0],
            places: vec![0.5, 0.5],
        };
        assert_eq!(
            needles.prompt(8),
            "Some special magic numbers are hidden within the following text. Make sure to memorize it. \
             I will quiz you about the numbers afterwards.\n\
             The grass is green. The sky is blue.\n\
             One of the special magic numbers for quiet-harbour is: 1234567.\n\
             The sun is yellow. Here we go. There and back again. The grass is green.\n\
             One of the special magic numbers for brave-island is: 7654321.\n\
             The sky is blue. The sun is yellow.\n\
             What are all the special magic numbers for brave-island, and quiet-harbour mentioned in the \
             provided text? The special magic numbers for brave-island, and quiet-harbour mentioned in the \
             provided text are"
        );
        assert_eq!(needles.answers(), ["7654321", "1234567"]);
    }
}
