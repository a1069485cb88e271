//! Text to hide needles in: given tokens, sentences of made-up words, or one short text repeated.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::choices::choices;
use crate::Tokenizer;

/// The repeated text.
const SENTENCE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n";

/// Text is read or made for this many prompts of the longest length, so that samples differ.
pub const TEXTS_PER_LENGTH: usize = 16;
/// The needle moves back by fewer than this many tokens, to follow a complete sentence.
const LOOK_BACK: usize = 200;

/// A word of two to four syllables: 24 million of them.
pub(crate) fn made_up(rng: &mut ChaCha8Rng) -> String {
    const ONSETS: &[u8] = b"bdfgklmnprstvz";
    const VOWELS: &[u8] = b"aeiou";
    let mut word = String::new();
    for _ in 0..rng.random_range(2..=4) {
        word.push(char::from(ONSETS[rng.random_range(0..ONSETS.len())]));
        word.push(char::from(VOWELS[rng.random_range(0..VOWELS.len())]));
    }
    word
}

choices! {
    /// Haystacks that are made, not read.
    #[derive(Default)]
    pub enum Filler {
        /// Sentences of made-up words
        #[default]
        Noise = "noise",
        /// One short text repeated
        Repeat = "repeat",
    }
}

impl Filler {
    /// A haystack for prompts of up to `longest` tokens.
    pub fn haystack(self, seed: u64, longest: usize, tokenizer: &Tokenizer) -> Haystack {
        match self {
            Filler::Noise => Haystack::noise(seed, longest, tokenizer),
            Filler::Repeat => Haystack::repeated(tokenizer),
        }
    }
}

/// Tokens to hide needles in; reading wraps around at the end.
#[derive(Clone, Debug)]
pub struct Haystack {
    tokens: Vec<u32>,
    /// Every prompt begins with the first token; else anywhere.
    from_start: bool,
}

impl Haystack {
    /// A text, of which every prompt takes a part that begins anywhere.
    ///
    /// # Panics
    /// When it is empty.
    pub fn of(tokens: Vec<u32>) -> Self {
        assert!(!tokens.is_empty(), "a haystack has 0 tokens; allowed: 1 or more");
        Haystack { tokens, from_start: false }
    }

    /// One short text, repeated.
    pub fn repeated(tokenizer: &Tokenizer) -> Self {
        Haystack { tokens: tokenizer.encode(SENTENCE), from_start: true }
    }

    /// Sentences of 6 to 14 made-up words of 2 to 4 syllables, enough for prompts of `longest` tokens.
    pub fn noise(seed: u64, longest: usize, tokenizer: &Tokenizer) -> Self {
        let wanted = longest * TEXTS_PER_LENGTH;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut tokens = Vec::new();
        while tokens.len() < wanted.max(1) {
            let count = rng.random_range(6..=14);
            let words: Vec<String> = (0..count).map(|_| made_up(&mut rng)).collect();
            tokens.extend(tokenizer.encode(&format!("{}.\n", words.join(" "))));
        }
        Haystack::of(tokens)
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// `count` tokens, starting at a random place; the repeated text always starts at its beginning.
    pub fn take(&self, rng: &mut ChaCha8Rng, count: usize) -> Vec<u32> {
        let start = if self.from_start { 0 } else { rng.random_range(0..self.tokens.len()) };
        self.tokens.iter().cycle().skip(start).take(count).copied().collect()
    }

    /// The index in `hay` for a needle at this depth: after the last sentence that ends within
    /// `LOOK_BACK` tokens before the depth, else at the depth itself.
    pub fn place(&self, hay: &[u32], depth: f64, tokenizer: &Tokenizer) -> usize {
        let at = ((depth.clamp(0.0, 1.0) * hay.len() as f64).round() as usize).min(hay.len());
        if at == hay.len() {
            return at;
        }
        let ends = |token: u32| {
            matches!(tokenizer.decode_bytes(&[token]).last(), Some(b'.' | b'!' | b'?' | b'\n'))
        };
        (at.saturating_sub(LOOK_BACK) + 1..=at)
            .rev()
            .find(|&place| ends(hay[place - 1]))
            .unwrap_or(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerConfig;

    #[test]
    fn needles_stand_behind_whole_sentences() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        for haystack in [Haystack::noise(0, 500, &tokenizer), Haystack::repeated(&tokenizer)] {
            let hay = haystack.take(&mut ChaCha8Rng::seed_from_u64(1), 2000);
            assert_eq!(hay.len(), 2000);
            assert_eq!(haystack.place(&hay, 0.0, &tokenizer), 0);
            assert_eq!(haystack.place(&hay, 1.0, &tokenizer), 2000);
            for depth in [0.25, 0.5, 0.75] {
                let at = haystack.place(&hay, depth, &tokenizer);
                let asked = (depth * 2000.0) as usize;
                assert!(at <= asked && asked - at < LOOK_BACK, "{at} for {asked}");
                assert!([u32::from(b'.'), u32::from(b'\n')].contains(&hay[at - 1]));
            }
        }
    }

    #[test]
    fn text_without_sentences_takes_the_needle_where_it_is_asked() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let hay = vec![u32::from(b'x'); 1000];
        assert_eq!(Haystack::repeated(&tokenizer).place(&hay, 0.5, &tokenizer), 500);
    }
}
