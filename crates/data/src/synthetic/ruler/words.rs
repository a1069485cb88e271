//! Common words of a numbered list, and the most frequent words of a coded text.

use std::collections::HashSet;

use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use super::super::haystack::made_up;
use super::super::held_out::Part;
use super::{Built, fill};
use crate::Tokenizer;

/// The common words of a list.
const COMMON: usize = 10;
/// From this length on, words come as often as in the paper; shorter lists have fewer.
const FULL_LENGTH: usize = 4096;
/// Most different words that are drawn for one list.
const MOST_WORDS: usize = 200_000;

/// Where words come from.
#[derive(Clone, Debug)]
pub enum WordList {
    /// Two to four syllables.
    MadeUp,
    /// These, a hundred or more, all different.
    Given(Vec<String>),
}

impl WordList {
    /// Whether a list of a file's words fills a prompt of `budget` tokens at `length`.
    ///
    /// # Errors
    /// The number of words, and the tokens of a prompt with all of them, if they do not.
    pub fn check(
        &self,
        length: usize,
        budget: usize,
        tokenizer: &Tokenizer,
    ) -> Result<(), (usize, usize)> {
        let WordList::Given(words) = self else { return Ok(()) };
        if words.len() >= MOST_WORDS {
            return Ok(());
        }
        let mut rng = ChaCha8Rng::from_seed([0; 32]);
        let prompt = format!(
            "{}{}",
            self.example(length, &mut rng),
            question(&list(words, Repeats::at(length).prompt, &mut rng))
        );
        let tokens = tokenizer.encode(&prompt).len();
        if tokens < budget { Err((words.len(), tokens)) } else { Ok(()) }
    }

    /// A solved example.
    fn example(&self, length: usize, rng: &mut ChaCha8Rng) -> String {
        let Repeats { example_words, example, .. } = Repeats::at(length);
        let words = self.draw(rng, example_words);
        format!("{} {}\n", question(&list(&words, example, rng)), numbered(&words[..COMMON]))
    }

    /// The SHA-256 of given words.
    pub fn sha256(&self) -> Option<String> {
        match self {
            WordList::MadeUp => None,
            WordList::Given(words) => Some(format!("{:x}", Sha256::digest(words.join("\n")))),
        }
    }

    /// Up to `count` different words.
    fn draw(&self, rng: &mut ChaCha8Rng, count: usize) -> Vec<String> {
        if let WordList::Given(words) = self {
            return words.choose_multiple(rng, count).cloned().collect();
        }
        let (mut seen, mut words) = (HashSet::new(), Vec::new());
        while words.len() < count {
            let word = made_up(rng);
            if seen.insert(word.clone()) {
                words.push(word);
            }
        }
        words
    }
}

/// How often common and other words come.
struct Repeats {
    /// Different words of the example.
    example_words: usize,
    example: [usize; 2],
    prompt: [usize; 2],
}

impl Repeats {
    fn at(length: usize) -> Self {
        match length >= FULL_LENGTH {
            true => Repeats { example_words: 40, example: [10, 3], prompt: [30, 3] },
            false => Repeats { example_words: 20, example: [3, 1], prompt: [6, 1] },
        }
    }
}

/// A numbered list in which the first ten of `words` come `common` times and the others `uncommon` times.
fn list(words: &[String], [common, uncommon]: [usize; 2], rng: &mut ChaCha8Rng) -> String {
    let (first, others) = words.split_at(COMMON.min(words.len()));
    let repeat = |words: &[String], times: usize| -> Vec<String> {
        words.iter().flat_map(|word| std::iter::repeat_n(word.clone(), times)).collect()
    };
    let mut all = [repeat(first, common), repeat(others, uncommon)].concat();
    all.shuffle(rng);
    numbered(&all)
}

fn numbered(words: &[String]) -> String {
    let words = words.iter().enumerate().map(|(at, word)| format!("{}. {word}", at + 1));
    words.collect::<Vec<_>>().join(" ")
}

fn question(list: &str) -> String {
    format!(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the \
         ones that appear most often.\n{list}\nQuestion: What are the 10 most common words in the above list? \
         Answer: The top 10 words that appear most often in the list are:"
    )
}

/// Common words extraction: an example with its answer, and a question.
pub(super) fn common(
    words: &WordList,
    length: usize,
    budget: usize,
    rng: &mut ChaCha8Rng,
    (tokenizer, part): (&Tokenizer, Part),
) -> Result<Built, usize> {
    let times = Repeats::at(length).prompt;
    let example = words.example(length, rng);
    let drawn = part.draw(rng, |rng| {
        let drawn = words.draw(rng, (budget / 4 + COMMON).min(MOST_WORDS));
        let content = drawn[..COMMON].join(" ").into_bytes();
        (drawn, content)
    });
    let order: ChaCha8Rng = rng.clone();
    let prompt = fill((COMMON, drawn.len()), budget, tokenizer, |count| {
        // The same order of the same words, whenever it is asked for.
        let list = list(&drawn[..count], times, &mut order.clone());
        format!("{example}{}", question(&list))
    })?;
    Ok(Built { prompt, answers: drawn[..COMMON].to_vec() })
}

/// Frequent words extraction: coded words whose counts follow n · rank⁻² / ζ(2); the most frequent is noise.
pub(super) fn frequent(
    length: usize,
    budget: usize,
    rng: &mut ChaCha8Rng,
    (tokenizer, part): (&Tokenizer, Part),
) -> Result<Built, usize> {
    let vocabulary = part.draw(rng, |rng| {
        let vocabulary = coded_words(rng, (length / 50).max(8));
        let content = vocabulary[1..4].join(" ").into_bytes();
        (vocabulary, content)
    });
    let order: ChaCha8Rng = rng.clone();
    // From 60 words on, the fourth rank comes more often than the fifth.
    let prompt = fill((60, 60 + budget), budget, tokenizer, |count| {
        let mut words = coded(&vocabulary, count);
        words.shuffle(&mut order.clone());
        format!(
            "Read the following coded text and track the frequency of each coded word. Find the three most \
             frequently appeared coded words. {}\nQuestion: Do not provide any explanation. Please ignore the \
             dots '....'. What are the three most frequently appeared words in the above coded text? Answer: \
             According to the coded text above, the three most frequently appeared words are:",
            words.join(" ")
        )
    })?;
    Ok(Built { prompt, answers: vocabulary[1..4].to_vec() })
}

/// Different words of six letters, the first of them the noise.
fn coded_words(rng: &mut ChaCha8Rng, count: usize) -> Vec<String> {
    let mut vocabulary = vec!["...".to_string()];
    let mut seen = HashSet::new();
    while vocabulary.len() < count {
        let word: String = (0..6).map(|_| char::from(rng.random_range(b'a'..=b'z'))).collect();
        if seen.insert(word.clone()) {
            vocabulary.push(word);
        }
    }
    vocabulary
}

/// The words of a coded text, as many of each as its rank gets of `count`.
fn coded(vocabulary: &[String], count: usize) -> Vec<&str> {
    let zeta = std::f64::consts::PI.powi(2) / 6.0;
    let times = |rank: usize| (count as f64 / (rank * rank) as f64 / zeta) as usize;
    let words = vocabulary.iter().enumerate();
    words.flat_map(|(at, word)| std::iter::repeat_n(word.as_str(), times(at + 1))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::TokenizerConfig;

    fn built(
        length: usize,
        task: fn(usize, &mut ChaCha8Rng, &Tokenizer) -> Built,
    ) -> (String, Vec<String>) {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let Built { prompt, answers } = task(length, &mut ChaCha8Rng::seed_from_u64(1), &tokenizer);
        (tokenizer.decode(&prompt), answers)
    }

    /// How often each word comes in the list or text.
    fn counts(text: &str) -> HashMap<&str, usize> {
        let mut counts = HashMap::new();
        for word in text.split(' ').filter(|word| !word.ends_with('.') || *word == "...") {
            *counts.entry(word).or_default() += 1;
        }
        counts
    }

    #[test]
    fn ten_words_of_the_list_are_common() {
        for (length, often, seldom) in [(3000, 6, 1), (20_000, 30, 3)] {
            let (prompt, answers) = built(length, |length, rng, tokenizer| {
                common(&WordList::MadeUp, length, length, rng, (tokenizer, Part::Test)).unwrap()
            });
            assert_eq!((answers.len(), prompt.matches("Below is a numbered").count()), (10, 2));
            let list = prompt.rsplit("most often.\n").next().unwrap();
            let list = list.split_once("\nQuestion").unwrap().0;
            assert!(list.starts_with("1. "));
            let counts = counts(list);
            for (word, count) in &counts {
                let common = answers.iter().any(|answer| answer == word);
                assert_eq!(*count, if common { often } else { seldom }, "{word}");
            }
            assert!(counts.len() > 10 && prompt.len() <= length);
            assert!(prompt.len() + 20 * seldom > length, "{} of {length}", prompt.len());
        }
    }

    #[test]
    fn counts_of_coded_words_fall_with_the_square_of_the_rank() {
        let (prompt, answers) = built(8000, |length, rng, tokenizer| {
            frequent(length, length, rng, (tokenizer, Part::Test)).unwrap()
        });
        let text = prompt.split_once("coded words. ").unwrap().1.split_once("\nQ").unwrap().0;
        let counts = counts(text);
        let mut ranked: Vec<usize> = counts.values().copied().collect();
        ranked.sort_unstable_by(|a, b| b.cmp(a));
        assert_eq!(counts["..."], ranked[0]);
        let found: Vec<usize> = answers.iter().map(|answer| counts[answer.as_str()]).collect();
        assert_eq!(found, ranked[1..4]);
        assert!(found[0] > found[1] && found[1] > found[2] && found[2] > ranked[4]);
        let ratio = counts["..."] as f64 / found[0] as f64;
        assert!((ratio - 4.0).abs() < 0.1, "{ratio}");
        assert!(prompt.len() <= 8000 && prompt.len() + 60 > 8000);
    }

    #[test]
    fn given_words_are_drawn_once() {
        let list = WordList::Given((0..150).map(|n| format!("word{n}")).collect());
        let drawn = list.draw(&mut ChaCha8Rng::seed_from_u64(1), 1000);
        assert_eq!(drawn.iter().collect::<HashSet<_>>().len(), 150);
        assert!(list.sha256().is_some());
    }
}
