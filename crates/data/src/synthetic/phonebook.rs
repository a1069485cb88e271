//! Phone book lookup: many lines of a name and a number, and a question for one of the numbers.
//!
//! After Jelassi et al., "Repeat after me: transformers are better than state space models at copying",
//! 2024. A prompt is the book, one line `Name: 0123456789` for each entry, a blank line, the lines of two
//! entries as examples, a blank line, and the name that is asked for with its colon. Every line could be
//! asked for, so that nothing can be left out.
//!
//! The entry that is asked for decides whether an example is for training or for tests: training never
//! asks for a name with the number that a test asks for.

use rand::Rng;
use rand::seq::index;
use rand_chacha::ChaCha8Rng;

use super::held_out::Part;
use crate::{DataError, Tokenizer};

const FIRST_NAMES: [&str; 48] = [
    "Ada", "Alan", "Anna", "Anton", "Bella", "Boris", "Carla", "Cyril", "Dana", "David", "Edith",
    "Emil", "Erik", "Fiona", "Frank", "Grace", "Greta", "Hanna", "Henry", "Ida", "Igor", "Irene",
    "Ivan", "Jacob", "Jane", "Karl", "Kira", "Laura", "Leo", "Lena", "Marie", "Martin", "Max",
    "Mona", "Nina", "Noah", "Olga", "Oscar", "Paul", "Petra", "Rita", "Robin", "Sara", "Simon",
    "Tara", "Thomas", "Vera", "Victor",
];
/// Surnames are made up: a start, a middle and an end.
const STARTS: [&str; 24] = [
    "Bal", "Ber", "Cor", "Dal", "Del", "Far", "Fen", "Gar", "Gil", "Hal", "Har", "Kel", "Kor",
    "Lan", "Mar", "Mel", "Nor", "Par", "Pel", "Ros", "Sel", "Tan", "Val", "Win",
];
const MIDDLES: [&str; 24] = [
    "a", "an", "ar", "be", "den", "der", "e", "en", "er", "i", "in", "ke", "le", "ling", "man",
    "ne", "o", "on", "or", "re", "sen", "ter", "ti", "vi",
];
const ENDS: [&str; 24] = [
    "berg", "by", "dale", "don", "feld", "ford", "gard", "ham", "holm", "kov", "land", "ley",
    "low", "mann", "mont", "ner", "nik", "rup", "ski", "son", "stone", "ton", "ville", "wick",
];
const NAMES: usize = FIRST_NAMES.len() * STARTS.len() * MIDDLES.len() * ENDS.len();
/// The fewest entries: two examples and the one that is asked for.
const FEWEST: usize = 3;

/// The n-th name, below [`NAMES`].
fn name(n: usize) -> String {
    let (n, first) = (n / FIRST_NAMES.len(), FIRST_NAMES[n % FIRST_NAMES.len()]);
    let (n, start) = (n / STARTS.len(), STARTS[n % STARTS.len()]);
    let (n, middle) = (n / MIDDLES.len(), MIDDLES[n % MIDDLES.len()]);
    format!("{first} {start}{middle}{}", ENDS[n])
}

/// A line of the book.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    /// Ten digits.
    number: String,
}

impl Entry {
    fn new(name_index: usize, rng: &mut ChaCha8Rng) -> Self {
        let number = format!("{:010}", rng.random_range(0..10_000_000_000u64));
        Entry { name: name(name_index), number }
    }

    fn line(&self) -> String {
        format!("{}: {}\n", self.name, self.number)
    }
}

/// One prompt and its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct PhonebookPrompt {
    /// The text up to the colon after the name.
    pub prompt: String,
    /// The ten digits.
    pub answer: String,
    /// The share of the other entries that stand before the one that is asked for, 0 to 1.
    pub depth: f64,
    /// Lines in the book.
    pub entries: usize,
}

impl PhonebookPrompt {
    /// What follows the prompt: the number, and the end of the line.
    pub fn completion(&self) -> String {
        format!(" {}\n", self.answer)
    }
}

/// The random draws of a prompt, for any number of entries.
struct Draw {
    asked: Entry,
    /// The other entries; a book holds the first of them.
    others: Vec<Entry>,
    /// Uniform in [0, 1): the place of the entry that is asked for, and those of the two examples.
    places: [f64; 3],
}

impl Draw {
    /// Enough entries for a prompt of `budget` tokens: a line takes at least four.
    fn new(rng: &mut ChaCha8Rng, budget: usize, part: Part) -> Self {
        let count = (budget / 4 + FEWEST).min(NAMES);
        let mut names = index::sample(rng, NAMES, count).into_iter();
        let asked_name = names.next().expect("there are three names or more");
        let asked = part.draw(rng, |rng| {
            let entry = Entry::new(asked_name, rng);
            let line = entry.line().into_bytes();
            (entry, line)
        });
        let others = names.map(|name| Entry::new(name, rng)).collect();
        Draw { asked, others, places: std::array::from_fn(|_| rng.random()) }
    }

    /// The prompt with `entries` lines, from 3 to all.
    fn prompt(&self, entries: usize, depth: Option<f64>) -> PhonebookPrompt {
        let [place, first, second] = self.places;
        let below = |share: f64, count: usize| ((share * count as f64) as usize).min(count - 1);
        let others = &self.others[..entries - 1];
        let at = match depth {
            Some(depth) => (depth.clamp(0.0, 1.0) * others.len() as f64).round() as usize,
            None => below(place, entries),
        };
        let first = below(first, others.len());
        let second = (first + 1 + below(second, others.len() - 1)) % others.len();
        let (before, after) = others.split_at(at);
        let lines = |entries: &[Entry]| entries.iter().map(Entry::line).collect::<String>();
        let prompt = format!(
            "{}{}{}\n{}{}\n{}:",
            lines(before),
            self.asked.line(),
            lines(after),
            others[first].line(),
            others[second].line(),
            self.asked.name
        );
        let depth = at as f64 / others.len() as f64;
        PhonebookPrompt { prompt, answer: self.asked.number.clone(), depth, entries }
    }
}

/// Makes prompts of a given length in tokens.
#[derive(Clone, Debug)]
pub struct PhonebookFitter {
    tokenizer: Tokenizer,
    shortest_prompt: usize,
}

impl PhonebookFitter {
    /// Measures the names with `tokenizer`.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let tokens = |text: &str| tokenizer.encode(text).len();
        let most = |texts: &[&str]| texts.iter().map(|text| tokens(text)).max().unwrap_or(0);
        // A space, and a token for each digit and sign at most.
        let name = most(&FIRST_NAMES) + 1 + most(&STARTS) + most(&MIDDLES) + most(&ENDS);
        let shortest_prompt = (FEWEST + 2) * (name + 13) + 2 + name + 1;
        PhonebookFitter { tokenizer: tokenizer.clone(), shortest_prompt }
    }

    /// Tokens that are enough for any prompt of three entries.
    pub fn shortest_prompt(&self) -> usize {
        self.shortest_prompt
    }

    /// Tokens that are enough for any training example of three entries: prompt, completion and end of text.
    pub fn shortest_example(&self) -> usize {
        self.shortest_prompt + self.longest_completion() + 1
    }

    /// Tokens that are enough for any completion: a space, ten digits and the end of the line.
    pub fn longest_completion(&self) -> usize {
        12
    }

    /// A prompt with as many entries as fit into `budget` tokens, which must not include the generated ones.
    /// `depth` is the share of the entries before the one that is asked for; `None` draws its place.
    ///
    /// # Errors
    /// When three entries do not fit; `key` is the setting the error names.
    pub fn fit(
        &self,
        rng: &mut ChaCha8Rng,
        budget: usize,
        depth: Option<f64>,
        part: Part,
        key: &'static str,
    ) -> Result<PhonebookPrompt, DataError> {
        let draw = Draw::new(rng, budget, part);
        let fits = |entries: usize| {
            self.tokenizer.encode(&draw.prompt(entries, depth).prompt).len() <= budget
        };
        if !fits(FEWEST) {
            let (task, needed) = ("phonebook", self.shortest_prompt);
            let tokenizer = self.tokenizer.name().into();
            return Err(DataError::PromptTooLong { task, budget, key, needed, tokenizer });
        }
        let (mut low, mut high) = (FEWEST, draw.others.len() + 2);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if fits(middle) { low = middle } else { high = middle }
        }
        Ok(draw.prompt(low, depth))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::SeedableRng;

    use super::*;
    use crate::TokenizerConfig;

    fn fitter(kind: TokenizerConfig) -> PhonebookFitter {
        PhonebookFitter::new(&Tokenizer::load(&kind).unwrap())
    }

    fn fit(budget: usize, depth: Option<f64>, seed: u64) -> PhonebookPrompt {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        fitter(TokenizerConfig::Bytes)
            .fit(&mut rng, budget, depth, Part::Test, "--lengths")
            .unwrap()
    }

    #[test]
    fn a_prompt_is_a_book_two_examples_and_a_name() {
        let prompt = fit(2000, None, 1);
        let parts: Vec<&str> = prompt.prompt.split("\n\n").collect();
        let [book, examples, question] = parts[..] else { panic!("{}", prompt.prompt) };
        let lines: Vec<&str> = book.split('\n').collect();
        assert_eq!(lines.len(), prompt.entries);
        for line in &lines {
            let (name, number) = line.split_once(": ").unwrap();
            assert!(number.len() == 10 && number.bytes().all(|c| c.is_ascii_digit()), "{line}");
            assert_eq!(name.split(' ').count(), 2);
        }
        let names: HashSet<&str> =
            lines.iter().map(|line| line.split(':').next().unwrap()).collect();
        assert_eq!(names.len(), lines.len(), "names are different");
        let examples: Vec<&str> = examples.split('\n').collect();
        assert!(examples.len() == 2 && examples[0] != examples[1]);
        assert!(examples.iter().all(|line| lines.contains(line)));
        let answer = format!("{question} {}", prompt.answer);
        let at = lines.iter().position(|line| **line == answer).unwrap();
        assert!(question.ends_with(':') && !examples.contains(&answer.as_str()));
        assert_eq!(prompt.depth, at as f64 / (lines.len() - 1) as f64);
    }

    #[test]
    fn the_most_entries_that_fit_are_taken() {
        for kind in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
            let fitter = fitter(kind.clone());
            for seed in 0..20 {
                let budget = fitter.shortest_prompt() + 37 * seed as usize;
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                let prompt = fitter.fit(&mut rng, budget, None, Part::Train, "x").unwrap();
                let tokens = fitter.tokenizer.encode(&prompt.prompt).len();
                assert!(tokens <= budget && tokens + 36 > budget, "{tokens} of {budget}, {kind:?}");
                let completion = fitter.tokenizer.encode(&prompt.completion()).len();
                assert!(completion <= fitter.longest_completion());
            }
        }
    }

    #[test]
    fn depths_are_those_asked_for_or_random() {
        assert_eq!(
            [0.0, 0.5, 1.0].map(|depth| (fit(3000, Some(depth), 3).depth * 10.0).round()),
            [0.0, 5.0, 10.0]
        );
        let depths: Vec<f64> = (0..300).map(|seed| fit(1000, None, seed).depth).collect();
        let mean = depths.iter().sum::<f64>() / 300.0;
        assert!((mean - 0.5).abs() < 0.06, "{mean}");
        assert!(depths.contains(&0.0) && depths.contains(&1.0));
    }

    #[test]
    fn a_budget_below_three_entries_is_refused() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let error = fitter(TokenizerConfig::Bytes).fit(&mut rng, 90, None, Part::Test, "--lengths");
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("a phonebook example takes at least "), "{error}");
        assert!(error.contains("--lengths is 90"), "{error}");
    }
}
