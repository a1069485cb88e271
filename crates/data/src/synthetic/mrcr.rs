//! Multi-round coreference: conversations in which one request is answered several times, with different texts.
//!
//! After MRCR v2 (Vodrahalli et al., "Michelangelo", 2024, and the code published since): rounds of a request (a
//! format, a topic, a style) and a text, one request several times among others that differ from it; in the end a
//! random string and the n-th text of that request are asked for. The texts are passages of a haystack, so that only
//! counting tells which one is meant.
//!
//! String and text together belong to training or to tests.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::fit::greatest;
use super::haystack::Haystack;
use super::held_out::Part;
use crate::Tokenizer;

const FORMATS: [&str; 7] =
    ["email", "short story", "blog post", "tweet", "poem", "essay", "riddle"];
const TOPICS: [&str; 8] = [
    "the sea",
    "gardens",
    "old machines",
    "the moon",
    "bread",
    "bridges",
    "winter",
    "a long journey",
];
const STYLES: [&str; 5] = ["formal", "informal", "humorous", "technical", "archaic"];
/// Names of the places among the texts of a request.
pub const ORDINALS: [&str; 8] =
    ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];
const INSTRUCTION: &str = "A user asks an assistant for texts. In the end, the user asks for one of them \
    again: the assistant writes the given code and then that text, word for word, and nothing else.";
/// Tokens of a passage.
pub const PASSAGE: std::ops::RangeInclusive<usize> = 48..=96;
/// Characters of the random string.
pub const CODE: usize = 12;
/// A request: format, topic, style.
pub type Triple = [usize; 3];

/// A conversation and the question at its end.
pub struct Conversation {
    /// The random string.
    pub code: String,
    /// The request that comes several times.
    asked: Triple,
    /// Which of its texts is asked for.
    ordinal: usize,
    /// The texts of that request.
    pub needles: Vec<String>,
    /// Where each needle stands among the others, 0 to 1, ascending.
    places: Vec<f64>,
    /// Requests and texts in between; a prompt holds the first of them.
    pub others: Vec<(Triple, String)>,
}

fn describe([format, topic, style]: Triple) -> String {
    format!("{} {} about {}", STYLES[style], FORMATS[format], TOPICS[topic])
}

fn triple(rng: &mut ChaCha8Rng) -> Triple {
    let mut below = |count: usize| rng.random_range(0..count);
    [below(FORMATS.len()), below(TOPICS.len()), below(STYLES.len())]
}

/// A passage of whole words.
fn passage(rng: &mut ChaCha8Rng, haystack: &Haystack, tokenizer: &Tokenizer) -> String {
    let count = rng.random_range(PASSAGE);
    let text = tokenizer.decode(&haystack.take(rng, count));
    let words: Vec<&str> = text.split_whitespace().collect();
    // The first and the last may be parts of words.
    let inner = words.get(1..words.len().saturating_sub(1)).filter(|inner| !inner.is_empty());
    inner.unwrap_or(&words).join(" ")
}

impl Conversation {
    /// Draws a conversation with enough other rounds for `budget` tokens, whose random string and text are of `part`.
    pub fn draw(
        rng: &mut ChaCha8Rng,
        needles: usize,
        budget: usize,
        haystack: &Haystack,
        tokenizer: &Tokenizer,
        part: Part,
    ) -> Self {
        let (asked, ordinal) = (triple(rng), rng.random_range(0..needles));
        let mut places: Vec<f64> = (0..needles).map(|_| rng.random()).collect();
        places.sort_by(f64::total_cmp);
        let texts: Vec<String> = (0..needles).map(|_| passage(rng, haystack, tokenizer)).collect();
        let code = part.draw(rng, |rng| {
            let code: String =
                (0..CODE).map(|_| char::from(rng.random_range(b'a'..=b'z'))).collect();
            let content = format!("{code} {}", texts[ordinal]).into_bytes();
            (code, content)
        });
        let mut others = Vec::new();
        // A passage is cut by a word at each end.
        for _ in 0..budget / (PASSAGE.start() / 2) + 1 {
            let mut request = triple(rng);
            while request == asked {
                request = triple(rng);
            }
            others.push((request, passage(rng, haystack, tokenizer)));
        }
        Conversation { code, asked, ordinal, needles: texts, places, others }
    }

    /// The most tokens of a prompt without other rounds.
    pub fn longest(needles: usize, tokenizer: &Tokenizer) -> usize {
        let tokens = |text: &str| tokenizer.encode(text).len();
        let styles =
            (0..STYLES.len()).flat_map(|style| (0..FORMATS.len()).map(move |f| (f, style)));
        let triples = styles.flat_map(|(f, style)| (0..TOPICS.len()).map(move |t| [f, t, style]));
        let request =
            triples.map(describe).max_by_key(|request| tokens(request)).unwrap_or_default();
        // A passage may take a few tokens more without its first and last word.
        let passage = PASSAGE.end() + 8;
        let round = tokens(&format!("User: Write a {request}.\nAssistant: \n\n")) + passage;
        let question = format!("User: Write  and then repeat the seventh {request}.\nAssistant:");
        tokens(INSTRUCTION) + 2 + needles * round + tokens(&question) + CODE
    }

    /// The text that is asked for.
    pub fn answer(&self) -> &str {
        &self.needles[self.ordinal]
    }

    /// The prompt with this many other rounds.
    pub fn prompt(&self, others: usize) -> String {
        let round = |request: Triple, text: &str| {
            format!("User: Write a {}.\nAssistant: {text}\n\n", describe(request))
        };
        let mut prompt = format!("{INSTRUCTION}\n\n");
        let mut done = 0;
        for (place, needle) in self.places.iter().zip(&self.needles) {
            let at = (place * (others + 1) as f64) as usize;
            self.others[done..at]
                .iter()
                .for_each(|(request, text)| prompt += &round(*request, text));
            prompt += &round(self.asked, needle);
            done = at;
        }
        self.others[done..others]
            .iter()
            .for_each(|(request, text)| prompt += &round(*request, text));
        prompt
            + &format!(
                "User: Write {} and then repeat the {} {}.\nAssistant:",
                self.code,
                ORDINALS[self.ordinal],
                describe(self.asked)
            )
    }

    /// The prompt with as many other rounds as fit into `budget` tokens.
    ///
    /// # Errors
    /// The tokens without other rounds, if they are more.
    pub fn fit(&self, budget: usize, tokenizer: &Tokenizer) -> Result<String, usize> {
        let tokens = |others| tokenizer.encode(&self.prompt(others)).len();
        let bare = tokens(0);
        if bare > budget {
            return Err(bare);
        }
        let (most, guess) = (self.others.len(), budget / (PASSAGE.end() + 8));
        Ok(self.prompt(greatest(0, most, guess, |others| tokens(others) <= budget)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_holds_its_rounds_in_order() {
        let conversation = Conversation {
            code: "abcdefghijkl".to_string(),
            asked: [4, 0, 0],
            ordinal: 1,
            needles: vec!["one".to_string(), "two".to_string()],
            places: vec![0.1, 0.6],
            others: vec![([5, 0, 0], "three".to_string()), ([4, 1, 0], "four".to_string())],
        };
        assert_eq!(
            conversation.prompt(2),
            format!(
                "{INSTRUCTION}\n\n\
                 User: Write a formal poem about the sea.\nAssistant: one\n\n\
                 User: Write a formal essay about the sea.\nAssistant: three\n\n\
                 User: Write a formal poem about the sea.\nAssistant: two\n\n\
                 User: Write a formal poem about gardens.\nAssistant: four\n\n\
                 User: Write abcdefghijkl and then repeat the second formal poem about the sea.\nAssistant:"
            )
        );
        assert_eq!(conversation.answer(), "two");
    }
}
