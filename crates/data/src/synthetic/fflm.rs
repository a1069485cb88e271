//! Flip-flop language modelling: a one-bit register with instructions to write, read and ignore.
//!
//! After Liu et al., "Exposing attention glitches with flip-flop language modeling", 2023, section
//! 3: a sequence of instructions w (write), r (read) and i (ignore), each followed by a bit. It
//! starts with w and ends with r; the instructions between are drawn independently. The bits after
//! w and i are random, those after r repeat the last one written. The text is the bare characters,
//! for example `w1i0r1`. Training and evaluation use the same functions, and never have a sequence in common.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::held_out::Part;
use crate::{DataError, Tokenizer};

/// The vocabulary: three instructions and two bits.
const SYMBOLS: [char; 5] = ['w', 'r', 'i', '0', '1'];

/// How a sequence is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlipFlop {
    /// Instructions in a sequence, at least 2; with its bit, each is two characters.
    pub instructions: usize,
    /// Probability that an instruction other than the first and the last is w.
    pub p_write: f64,
    /// Probability that it is r; else it is i.
    pub p_read: f64,
}

impl FlipFlop {
    /// The family FFL(p_ignore) of the paper: the other instructions are half writes, half reads.
    pub fn ignoring(instructions: usize, p_ignore: f64) -> Self {
        let half = (1.0 - p_ignore) / 2.0;
        FlipFlop { instructions, p_write: half, p_read: half }
    }

    /// Characters of a sequence.
    pub fn chars(&self) -> usize {
        2 * self.instructions
    }

    /// The least number of bits of randomness with which sequences are many enough to hold some out.
    pub const LEAST_BITS: f64 = 12.0;

    /// The entropy of a sequence, in bits: that of its instructions, and one for each bit that is not read.
    pub fn entropy(&self) -> f64 {
        let FlipFlop { p_write, p_read, .. } = *self;
        let p_ignore = 1.0 - p_write - p_read;
        let bits = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
        let instruction = [p_write, p_read, p_ignore].map(bits).iter().sum::<f64>() + 1.0 - p_read;
        1.0 + (self.instructions.saturating_sub(2)) as f64 * instruction
    }

    /// Draws a sequence of `part`.
    ///
    /// # Panics
    /// When there are too few sequences: with an [`entropy`](Self::entropy) far below [`LEAST_BITS`](Self::LEAST_BITS).
    pub fn draw(&self, rng: &mut ChaCha8Rng, part: Part) -> String {
        part.draw(rng, |rng| {
            let text = self.sequence(rng);
            let content = text.clone().into_bytes();
            (text, content)
        })
    }

    fn sequence(&self, rng: &mut ChaCha8Rng) -> String {
        let mut text = String::with_capacity(self.chars());
        let mut written = '0';
        for at in 0..self.instructions {
            // Every instruction takes two draws, so that sequences of one seed but different
            // probabilities stay aligned.
            let (place, random) = (rng.random::<f64>(), if rng.random() { '1' } else { '0' });
            let instruction = match at {
                0 => 'w',
                _ if at + 1 == self.instructions => 'r',
                _ if place < self.p_write => 'w',
                _ if place < self.p_write + self.p_read => 'r',
                _ => 'i',
            };
            let bit = if instruction == 'r' { written } else { random };
            if instruction == 'w' {
                written = bit;
            }
            text.extend([instruction, bit]);
        }
        text
    }
}

/// Indices, in characters, of the bits that follow read instructions.
pub fn read_bits(text: &str) -> impl Iterator<Item = usize> + '_ {
    text.bytes().enumerate().filter(|&(_, symbol)| symbol == b'r').map(|(at, _)| at + 1)
}

/// The token of each symbol, so that a sequence has as many tokens as characters with any
/// tokenizer.
#[derive(Clone, Debug)]
pub struct FlipFlopTokens {
    tokens: [u32; SYMBOLS.len()],
}

impl FlipFlopTokens {
    /// Looks up the symbols' tokens.
    ///
    /// # Errors
    /// [`DataError::NoSymbol`] when one of them is not a token of its own.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let mut tokens = [0; SYMBOLS.len()];
        for (token, symbol) in tokens.iter_mut().zip(SYMBOLS) {
            let text = symbol.to_string();
            match tokenizer.encode(&text)[..] {
                // Not the token for unknown text.
                [single] if tokenizer.decode(&[single]) == text => *token = single,
                _ => {
                    return Err(DataError::NoSymbol { symbol, tokenizer: tokenizer.name().into() });
                }
            }
        }
        Ok(FlipFlopTokens { tokens })
    }

    /// The tokens of a sequence, one for each character.
    ///
    /// # Panics
    /// When the text holds any other character.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let token = |symbol: char| match SYMBOLS.iter().position(|&known| known == symbol) {
            Some(at) => self.tokens[at],
            None => panic!("{symbol:?} in a flip-flop sequence; its symbols are {SYMBOLS:?}"),
        };
        text.chars().map(token).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;

    use super::*;
    use crate::TokenizerConfig;

    fn draw(task: FlipFlop, seed: u64) -> String {
        task.draw(&mut ChaCha8Rng::seed_from_u64(seed), Part::Test)
    }

    proptest! {
        #[test]
        fn reads_repeat_what_was_written(
            instructions in 2usize..300, p_ignore in 0.0f64..=1.0, seed in any::<u64>(),
        ) {
            let task = FlipFlop::ignoring(instructions, p_ignore);
            prop_assume!(task.entropy() >= FlipFlop::LEAST_BITS);
            let text = draw(task, seed);
            prop_assert_eq!(text.len(), 2 * instructions);
            prop_assert!(text.starts_with('w') && text[text.len() - 2..].starts_with('r'));
            let mut written = None;
            for (instruction, bit) in text.chars().step_by(2).zip(text.chars().skip(1).step_by(2)) {
                prop_assert!("wri".contains(instruction) && "01".contains(bit), "{}", text);
                match instruction {
                    'w' => written = Some(bit),
                    'r' => prop_assert_eq!(Some(bit), written, "{}", text),
                    _ => {}
                }
            }
            let reads: Vec<usize> = read_bits(&text).collect();
            prop_assert!(reads.iter().all(|&at| text.as_bytes()[at - 1] == b'r'));
            prop_assert_eq!(reads.len(), text.matches('r').count());
        }
    }

    #[test]
    fn instructions_and_bits_come_as_often_as_they_should() {
        let text = draw(FlipFlop { instructions: 100_000, p_write: 0.1, p_read: 0.3 }, 5);
        let share = |symbol| text.matches(symbol).count() as f64 / 100_000.0;
        for (symbol, wanted) in [("w", 0.1), ("r", 0.3), ("i", 0.6), ("i1", 0.3), ("w0", 0.05)] {
            assert!((share(symbol) - wanted).abs() < 0.01, "{symbol}: {}", share(symbol));
        }
    }

    #[test]
    fn sequences_are_the_seeds() {
        let task = FlipFlop::ignoring(256, 0.8);
        assert_eq!(draw(task, 1), draw(task, 1));
        assert_ne!(draw(task, 1), draw(task, 2));
    }

    #[test]
    fn every_symbol_is_one_token() {
        let text = draw(FlipFlop::ignoring(64, 0.5), 3);
        for kind in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
            let tokenizer = Tokenizer::load(&kind).unwrap();
            let tokens = FlipFlopTokens::new(&tokenizer).unwrap().encode(&text);
            assert_eq!((tokens.len(), tokenizer.decode(&tokens)), (text.len(), text.clone()));
        }
    }
}
