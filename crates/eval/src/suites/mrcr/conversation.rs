//! Conversations, and the similarity of an output.

use longwall_data::Tokenizer;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::super::niah::Haystack;
use super::Similarity;
use super::similarity::ratio;

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
pub(super) const ORDINALS: [&str; 8] =
    ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];
const INSTRUCTION: &str = "A user asks an assistant for texts. In the end, the user asks for one of them \
    again: the assistant writes the given code and then that text, word for word, and nothing else.";
/// Tokens of a passage.
pub(super) const PASSAGE: std::ops::RangeInclusive<usize> = 48..=96;
/// Characters of the random string.
pub(super) const CODE: usize = 12;
/// Passages of other requests that the noise floor of all texts is estimated from.
const FLOOR_SAMPLES: usize = 8;

/// A request: format, topic, style.
type Triple = [usize; 3];

/// A conversation and the question at its end.
pub(super) struct Conversation {
    /// The random string.
    pub code: String,
    /// The request that comes several times.
    asked: Triple,
    /// Which of its texts is asked for.
    ordinal: usize,
    /// The texts of that request.
    needles: Vec<String>,
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
    /// Draws a conversation with enough other rounds for `budget` tokens.
    pub(super) fn draw(
        rng: &mut ChaCha8Rng,
        needles: usize,
        budget: usize,
        haystack: &Haystack,
        tokenizer: &Tokenizer,
    ) -> Self {
        let code = (0..CODE).map(|_| char::from(rng.random_range(b'a'..=b'z'))).collect();
        let (asked, ordinal) = (triple(rng), rng.random_range(0..needles));
        let mut places: Vec<f64> = (0..needles).map(|_| rng.random()).collect();
        places.sort_by(f64::total_cmp);
        let texts = (0..needles).map(|_| passage(rng, haystack, tokenizer)).collect();
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
    pub(super) fn longest(needles: usize, tokenizer: &Tokenizer) -> usize {
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
    pub(super) fn answer(&self) -> &str {
        &self.needles[self.ordinal]
    }

    /// The prompt with this many other rounds.
    pub(super) fn prompt(&self, others: usize) -> String {
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

    /// The similarity of an output, and the noise floors.
    pub(super) fn judge(&self, output: &str) -> Similarity {
        let similar = |text: &str| ratio(self.answer(), text);
        let mean = |texts: Vec<&str>| {
            texts.iter().map(|text| similar(text)).sum::<f64>() / texts.len() as f64
        };
        let all = self.others.iter().take(FLOOR_SAMPLES).map(|(_, text)| text.as_str());
        Similarity {
            score: similar_after(&self.code, output, self.answer()),
            floor_relevant: mean(self.needles.iter().map(String::as_str).collect()),
            floor_any: mean(all.collect()),
        }
    }
}

/// The similarity to `answer` of what follows the last occurrence of `code`; 0 without it. A model that goes on
/// writes the next round, which is no part of its answer.
fn similar_after(code: &str, output: &str, answer: &str) -> f64 {
    let output = output.split("\nUser:").next().unwrap_or_default();
    match output.rsplit_once(code) {
        Some((_, text)) => ratio(answer, text.trim()),
        None => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_similarity_is_that_of_the_text_after_the_code() {
        let similar = |output| similar_after("abcdefghijkl", output, "the old mill");
        assert_eq!(similar(" abcdefghijkl the old mill"), 1.0);
        assert_eq!(similar("abcdefghijkl no abcdefghijkl the old mill \n"), 1.0);
        assert_eq!(similar("abcdefghijkl the old mill\n\nUser: Write abcdefghijkl and"), 1.0);
        assert_eq!(similar("the old mill"), 0.0);
        assert_eq!(similar(""), 0.0);
        let cut = similar("abcdefghijkl the old");
        assert!((cut - 14.0 / 19.0).abs() < 1e-12, "{cut}");
    }

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
