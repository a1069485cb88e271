//! Passkey retrieval: a number hidden in repeated text, asked for at the end.
//!
//! The texts and the protocol are those of appendix D of the TRA/TDA paper, after Mohtashami and
//! Jaggi (2023): five blocks joined by newlines, the answer uniform in 1 to 50,000. Training and
//! evaluation use the same functions, so that a model trained on the task is tested on it.
//!
//! The answer decides whether a prompt is for training or for tests: training never hides a number that a test hides.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::held_out::Part;
use crate::{DataError, Tokenizer};

const INSTRUCTION: &str = "There is an important info hidden inside a lot of irrelevant text. \
    Find it and memorize them. I will quiz you about the important information there.";
const GARBAGE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ";
const QUESTION: &str = "What is the pass key? The pass key is";
const GREATEST_ANSWER: u32 = 50_000;

/// One prompt and its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct PasskeyPrompt {
    /// The text up to the space before the answer, which it does not include.
    pub prompt: String,
    /// The number to find, 1 to 50,000.
    pub answer: u32,
    /// The share of the garbage before the needle, 0 to 1; 0 without garbage.
    pub depth: f64,
}

impl PasskeyPrompt {
    /// What follows the prompt in a training example: the answer, and a full stop that ends the
    /// number.
    pub fn completion(&self) -> String {
        format!(" {}.", self.answer)
    }
}

/// The random draws of a prompt.
#[derive(Clone, Copy)]
struct Draw {
    answer: u32,
    /// Uniform in [0, 1): the needle's place in the garbage, unless a depth is given.
    position: f64,
}

impl Draw {
    fn new(rng: &mut ChaCha8Rng, part: Part) -> Self {
        let answer = part.draw(rng, |rng| {
            let answer: u32 = rng.random_range(1..=GREATEST_ANSWER);
            (answer, answer.to_string().into_bytes())
        });
        Draw { answer, position: rng.random() }
    }

    /// Characters of garbage before the needle: uniform in 0..=garbage_chars.
    fn prefix_chars(&self, garbage_chars: usize, depth: Option<f64>) -> usize {
        let prefix = match depth {
            Some(depth) => (depth.clamp(0.0, 1.0) * garbage_chars as f64).round(),
            None => (self.position * (garbage_chars as f64 + 1.0)).floor(),
        };
        (prefix as usize).min(garbage_chars)
    }

    fn prompt(&self, garbage_chars: usize, depth: Option<f64>) -> PasskeyPrompt {
        let prefix = self.prefix_chars(garbage_chars, depth);
        let answer = self.answer;
        let blocks = [
            INSTRUCTION,
            &garbage(prefix),
            &format!("The pass key is {answer}. Remember it. {answer} is the pass key."),
            &garbage(garbage_chars - prefix),
            QUESTION,
        ];
        let depth = if garbage_chars == 0 { 0.0 } else { prefix as f64 / garbage_chars as f64 };
        PasskeyPrompt { prompt: blocks.join("\n"), answer, depth }
    }
}

/// The first `chars` characters of the garbage sentence, repeated; it is ASCII, so these are bytes
/// too.
fn garbage(chars: usize) -> String {
    let mut text = GARBAGE.repeat(chars.div_ceil(GARBAGE.len()));
    text.truncate(chars);
    text
}

/// A prompt with `garbage_chars` characters of garbage in total, whose answer is of `part`.
///
/// `depth` is the share of it before the needle, 0 (start) to 1 (end); `None` draws it uniformly.
/// Takes the same draws from `rng` in either case.
pub fn passkey_prompt(
    rng: &mut ChaCha8Rng,
    garbage_chars: usize,
    depth: Option<f64>,
    part: Part,
) -> PasskeyPrompt {
    Draw::new(rng, part).prompt(garbage_chars, depth)
}

/// Makes prompts of a given length in tokens.
///
/// The garbage is periodic, so one period predicts the number of tokens, and only the chosen prompt
/// is encoded, as a check.
#[derive(Clone, Debug)]
pub struct PasskeyFitter {
    tokenizer: Tokenizer,
    /// Tokens of the first n characters of garbage, for n up to one period.
    garbage_tokens: Vec<usize>,
    /// Tokens that each further period adds.
    period_tokens: usize,
    /// The answer with the most tokens.
    longest_answer: u32,
}

impl PasskeyFitter {
    /// Measures the garbage and the answers with `tokenizer`.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let tokens = |text: &str| tokenizer.encode(text).len();
        let period = GARBAGE.len();
        let longest =
            (1..=GREATEST_ANSWER).rev().max_by_key(|answer| tokens(&format!(" {answer}")));
        PasskeyFitter {
            garbage_tokens: (0..=period).map(|chars| tokens(&garbage(chars))).collect(),
            period_tokens: tokens(&garbage(3 * period)) - tokens(&garbage(2 * period)),
            longest_answer: longest.unwrap_or(GREATEST_ANSWER),
            tokenizer: tokenizer.clone(),
        }
    }

    /// The tokens of the longest prompt without garbage: any budget of at least this many can be met.
    pub fn shortest_prompt(&self) -> usize {
        self.prompt_tokens(&Draw { answer: self.longest_answer, position: 0.0 }.prompt(0, None))
    }

    /// The tokens of the longest training example without garbage: prompt, completion and end of
    /// text.
    pub fn shortest_example(&self) -> usize {
        let shortest = Draw { answer: self.longest_answer, position: 0.0 }.prompt(0, None);
        self.prompt_tokens(&shortest) + self.tokenizer.encode(&shortest.completion()).len() + 1
    }

    /// A prompt with as much garbage as fits into `budget` tokens, which must not include the generated
    /// ones. `depth` and `part` are as in [`passkey_prompt`].
    ///
    /// # Errors
    /// When not even a prompt without garbage fits; `key` is the setting the error names.
    pub fn fit(
        &self,
        rng: &mut ChaCha8Rng,
        budget: usize,
        depth: Option<f64>,
        part: Part,
        key: &'static str,
    ) -> Result<PasskeyPrompt, DataError> {
        let draw = Draw::new(rng, part);
        let bare = self.prompt_tokens(&draw.prompt(0, depth));
        if bare > budget {
            let tokenizer = self.tokenizer.name().into();
            return Err(DataError::PromptTooLong {
                task: "passkey",
                budget,
                key,
                needed: bare,
                tokenizer,
            });
        }
        let mut garbage_chars = self.predicted_fit(&draw, bare, budget, depth);
        loop {
            let prompt = draw.prompt(garbage_chars, depth);
            if garbage_chars == 0 || self.prompt_tokens(&prompt) <= budget {
                return Ok(prompt);
            }
            garbage_chars -= 1;
        }
    }

    /// The most characters of garbage predicted to fit: a binary search, then a look past the end,
    /// because one more character can complete a word and so save a token.
    fn predicted_fit(&self, draw: &Draw, bare: usize, budget: usize, depth: Option<f64>) -> usize {
        let fits = |garbage_chars: usize| {
            let prefix = draw.prefix_chars(garbage_chars, depth);
            bare + self.predicted(prefix) + self.predicted(garbage_chars - prefix) <= budget
        };
        let (mut low, mut high) = (0, GARBAGE.len());
        while fits(high) {
            (low, high) = (high, high * 2);
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        (low..low + 2 * GARBAGE.len()).rev().find(|&chars| fits(chars)).unwrap_or(low)
    }

    fn predicted(&self, chars: usize) -> usize {
        let period = GARBAGE.len();
        chars / period * self.period_tokens + self.garbage_tokens[chars % period]
    }

    fn prompt_tokens(&self, prompt: &PasskeyPrompt) -> usize {
        self.tokenizer.encode(&prompt.prompt).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerConfig;
    use rand::SeedableRng;

    fn rng(seed: u64) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(seed)
    }

    #[test]
    fn a_prompt_is_five_blocks_joined_by_newlines() {
        let prompt = passkey_prompt(&mut rng(1), 120, Some(0.25), Part::Test);
        let x = prompt.answer;
        let expected = format!(
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. \
             I will quiz you about the important information there.\n\
             The grass is green. The sky is\n\
             The pass key is {x}. Remember it. {x} is the pass key.\n\
             The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. \n\
             What is the pass key? The pass key is"
        );
        let blocks: Vec<&str> = prompt.prompt.split('\n').collect();
        assert_eq!((blocks[1].len(), blocks[3].len()), (30, 90));
        assert_eq!(prompt.prompt, expected);
        assert_eq!(prompt.depth, 0.25);
        assert_eq!(prompt.completion(), format!(" {x}."));
    }

    #[test]
    fn answers_and_positions_cover_their_range() {
        let mut rng = rng(2);
        let prompts: Vec<PasskeyPrompt> =
            (0..4000).map(|_| passkey_prompt(&mut rng, 400, None, Part::Test)).collect();
        assert!(prompts.iter().all(|p| (1..=GREATEST_ANSWER).contains(&p.answer)));
        let mean_answer = prompts.iter().map(|p| f64::from(p.answer)).sum::<f64>() / 4000.0;
        let mean_depth = prompts.iter().map(|p| p.depth).sum::<f64>() / 4000.0;
        assert!((mean_answer - 25_000.0).abs() < 1000.0, "{mean_answer}");
        assert!((mean_depth - 0.5).abs() < 0.02, "{mean_depth}");
        assert!(prompts.iter().any(|p| p.depth == 0.0) && prompts.iter().any(|p| p.depth == 1.0));
    }

    #[test]
    fn the_same_seed_gives_the_same_prompt_and_depth_leaves_the_answer() {
        assert_eq!(
            passkey_prompt(&mut rng(3), 300, None, Part::Test),
            passkey_prompt(&mut rng(3), 300, None, Part::Test)
        );
        let (mut a, mut b) = (rng(3), rng(3));
        for _ in 0..3 {
            let random = passkey_prompt(&mut a, 300, None, Part::Test);
            assert_eq!(random.answer, passkey_prompt(&mut b, 300, Some(0.5), Part::Test).answer);
        }
    }

    #[test]
    fn fitted_prompts_hold_the_most_garbage_that_fits() {
        for config in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
            let tokenizer = Tokenizer::load(&config).unwrap();
            let fitter = PasskeyFitter::new(&tokenizer);
            for seed in 0..40 {
                let budget = fitter.shortest_prompt() + 13 * seed as usize;
                let fitted =
                    fitter.fit(&mut rng(seed), budget, None, Part::Test, "length").unwrap();
                assert!(tokenizer.encode(&fitted.prompt).len() <= budget);
                let bare = passkey_prompt(&mut rng(seed), 0, None, Part::Test).prompt.len();
                let garbage_chars = fitted.prompt.len() - bare;
                for more in 1..30 {
                    let larger =
                        passkey_prompt(&mut rng(seed), garbage_chars + more, None, Part::Test);
                    let tokens = tokenizer.encode(&larger.prompt).len();
                    assert!(
                        tokens > budget,
                        "{config:?}, budget {budget}: {more} more characters fit too"
                    );
                }
            }
        }
    }

    #[test]
    fn a_budget_below_the_bare_prompt_is_refused() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let fitter = PasskeyFitter::new(&tokenizer);
        let error = fitter.fit(&mut rng(5), 100, None, Part::Test, "--lengths").unwrap_err();
        let needed =
            tokenizer.encode(&passkey_prompt(&mut rng(5), 0, None, Part::Test).prompt).len();
        assert_eq!(
            error.to_string(),
            format!(
                "a passkey example takes at least {needed} tokens with the tokenizer bytes; --lengths is 100\n  \
                 hint: raise --lengths to {needed} or more, or use a tokenizer with longer tokens"
            )
        );
    }
}
