//! The eight needle tasks.

use rand::Rng;
use rand::seq::{SliceRandom, index};
use rand_chacha::ChaCha8Rng;

use super::super::haystack::Haystack;
use super::super::held_out::Part;
use super::super::niah::{distinct_keys, magic_number};
use super::{Built, Task, fill};
use crate::Tokenizer;

const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
/// Needles in text stand at different ones of this many evenly spaced depths.
const DEPTHS: usize = 40;

/// What the keys and the values are, and how many there are.
struct Kind {
    uuid_keys: bool,
    uuid_values: bool,
    keys: usize,
    values: usize,
    asked: usize,
}

fn kind(task: Task) -> Kind {
    let single = Kind { uuid_keys: false, uuid_values: false, keys: 1, values: 1, asked: 1 };
    match task {
        Task::NiahSingle3 => Kind { uuid_values: true, ..single },
        Task::NiahMultikey1 => Kind { keys: 4, ..single },
        Task::NiahMultikey3 => Kind { uuid_keys: true, uuid_values: true, ..single },
        Task::NiahMultivalue => Kind { values: 4, ..single },
        Task::NiahMultiquery => Kind { keys: 4, asked: 4, ..single },
        _ => single,
    }
}

/// A random UUID of version 4.
fn uuid(rng: &mut ChaCha8Rng) -> String {
    let random = rng.random::<u128>() & !(0xf << 76) & !(0x3 << 62);
    let bits = random | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// The needles of a prompt, and what it asks for.
struct Needles {
    kind: Kind,
    /// Each key with its values.
    pairs: Vec<(String, Vec<String>)>,
    /// Indices of the keys that are asked for.
    asked: Vec<usize>,
}

impl Needles {
    fn draw(task: Task, rng: &mut ChaCha8Rng, part: Part) -> Self {
        let kind = kind(task);
        let keys = match kind.uuid_keys {
            true => (0..kind.keys).map(|_| uuid(rng)).collect(),
            false => distinct_keys(rng, kind.keys),
        };
        let values = |_: &String| (0..kind.values).map(|_| kind.value(rng, part)).collect();
        let values: Vec<Vec<String>> = keys.iter().map(values).collect();
        let asked = index::sample(rng, kind.keys, kind.asked).into_vec();
        Needles { pairs: keys.into_iter().zip(values).collect(), asked, kind }
    }

    /// The sentences, in a random order.
    fn sentences(&self, rng: &mut ChaCha8Rng) -> Vec<String> {
        let of = |(key, values): &(String, Vec<String>)| -> Vec<String> {
            values.iter().map(|value| self.kind.sentence(key, value)).collect()
        };
        let mut sentences: Vec<String> = self.pairs.iter().flat_map(of).collect();
        sentences.shuffle(rng);
        sentences
    }

    fn answers(&self) -> Vec<String> {
        self.asked.iter().flat_map(|&at| self.pairs[at].1.clone()).collect()
    }

    /// The text before the haystack, and the text after it.
    fn frame(&self) -> (String, String) {
        let keys: Vec<&str> = self.asked.iter().map(|&at| self.pairs[at].0.as_str()).collect();
        let keys = match keys.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{}, and {last}", rest.join(", ")),
            _ => keys.concat(),
        };
        let what = self.kind.what();
        let instruction = |some: &str, are: &str, what: &str| {
            format!(
                "{some} special magic {what} {are} hidden within the following text. Make sure to memorize \
                 it. I will quiz you about the {what} afterwards.\n"
            )
        };
        let question = |are_all: &str, are: &str, what: &str| {
            format!(
                "\nWhat {are_all} the special magic {what} for {keys} mentioned in the provided text? The \
                 special magic {what} for {keys} mentioned in the provided text {are}"
            )
        };
        if self.answers().len() == 1 {
            let what = what.trim_end_matches('s');
            return (instruction("A", "is", what), question("is", "is", what));
        }
        (instruction("Some", "are", what), question("are all", "are", what))
    }
}

impl Kind {
    fn what(&self) -> &'static str {
        if self.uuid_values { "uuids" } else { "numbers" }
    }

    /// A value of `part`.
    fn value(&self, rng: &mut ChaCha8Rng, part: Part) -> String {
        match self.uuid_values {
            true => part.draw(rng, |rng| {
                let id = uuid(rng);
                (id.clone(), id.into_bytes())
            }),
            false => magic_number(rng, part),
        }
    }

    fn sentence(&self, key: &str, value: &str) -> String {
        format!("One of the special magic {} for {key} is: {value}.", self.what())
    }
}

/// A prompt with at most `budget` tokens; else the tokens it needs.
pub(super) fn build(
    task: Task,
    haystack: Option<&Haystack>,
    budget: usize,
    rng: &mut ChaCha8Rng,
    (tokenizer, part): (&Tokenizer, Part),
) -> Result<Built, usize> {
    let needles = Needles::draw(task, rng, part);
    let answers = needles.answers();
    let prompt = match (task.needs_text(), haystack) {
        (true, Some(haystack)) => in_text(&needles, haystack, budget, rng, tokenizer)?,
        (true, None) => panic!("{task} was built without text"),
        (false, _) => in_lines(task, &needles, budget, rng, (tokenizer, part))?,
    };
    Ok(Built { prompt, answers })
}

/// Needles at different depths of a stretch of text, behind whole sentences.
fn in_text(
    needles: &Needles,
    haystack: &Haystack,
    budget: usize,
    rng: &mut ChaCha8Rng,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, usize> {
    let (before, after) = needles.frame();
    let (before, after) = (tokenizer.encode(&before), tokenizer.encode(&after));
    let sentences = needles.sentences(rng);
    let sentences: Vec<Vec<u32>> =
        sentences.iter().map(|text| tokenizer.encode(&format!("\n{text}\n"))).collect();
    let around = before.len() + after.len() + sentences.iter().map(Vec::len).sum::<usize>();
    let count = budget.checked_sub(around).ok_or(around)?;
    let hay = haystack.take(rng, count);
    let mut depths = index::sample(rng, DEPTHS, sentences.len()).into_vec();
    depths.sort_unstable();
    let (mut prompt, mut done) = (before, 0);
    for (depth, sentence) in depths.into_iter().zip(&sentences) {
        let at = haystack.place(&hay, depth as f64 / (DEPTHS - 1) as f64, tokenizer).max(done);
        prompt.extend(&hay[done..at]);
        prompt.extend(sentence);
        done = at;
    }
    prompt.extend(&hay[done..]);
    prompt.extend(after);
    Ok(prompt)
}

/// Needles between as many lines as fit: a repeated sentence, or needles of other keys.
fn in_lines(
    task: Task,
    needles: &Needles,
    budget: usize,
    rng: &mut ChaCha8Rng,
    (tokenizer, part): (&Tokenizer, Part),
) -> Result<Vec<u32>, usize> {
    let (before, after) = needles.frame();
    let sentences = needles.sentences(rng);
    let [sentence] = &sentences[..] else { unreachable!("tasks in lines have one needle") };
    // A line takes at least four tokens.
    let most = budget / 4 + 1;
    let distractors: Vec<String> = match task {
        Task::NiahSingle1 => vec![NOISE.to_string(); most],
        _ => (0..most).map(|_| distractor(needles, rng, part)).collect(),
    };
    let place: f64 = rng.random();
    fill((1, most), budget, tokenizer, |lines| {
        // RULER draws one of as many places as there are lines.
        let at = (place * lines as f64) as usize;
        let mut lines: Vec<&str> = distractors[..lines].iter().map(String::as_str).collect();
        lines.insert(at, sentence);
        format!("{before}{}{after}", lines.join("\n"))
    })
}

/// A needle of another key.
fn distractor(needles: &Needles, rng: &mut ChaCha8Rng, part: Part) -> String {
    let key = match needles.kind.uuid_keys {
        true => uuid(rng),
        false => {
            let mut keys = distinct_keys(rng, 2);
            keys.retain(|key| *key != needles.pairs[0].0);
            keys.swap_remove(0)
        }
    };
    needles.kind.sentence(&key, &needles.kind.value(rng, part))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::super::super::niah::all_keys;
    use super::*;
    use crate::TokenizerConfig;

    fn text(task: Task, budget: usize, seed: u64) -> (String, Vec<String>) {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let built = build(task, None, budget, &mut rng, (&tokenizer, Part::Test)).unwrap();
        (tokenizer.decode(&built.prompt), built.answers)
    }

    #[test]
    fn one_needle_stands_among_repeated_lines() {
        let (prompt, answers) = text(Task::NiahSingle1, 1500, 1);
        let lines: Vec<&str> = prompt.split('\n').collect();
        assert_eq!(
            lines[0],
            "A special magic number is hidden within the following text. Make sure to memorize it. I will \
             quiz you about the number afterwards."
        );
        let (key, _) = lines.last().unwrap().split_once(" mentioned").unwrap();
        let key = key.trim_start_matches("What is the special magic number for ");
        assert_eq!(
            *lines.last().unwrap(),
            format!(
                "What is the special magic number for {key} mentioned in the provided text? The special magic \
                 number for {key} mentioned in the provided text is"
            )
        );
        let needle = format!("One of the special magic numbers for {key} is: {}.", answers[0]);
        let hay = &lines[1..lines.len() - 1];
        assert_eq!(hay.iter().filter(|line| **line == needle).count(), 1);
        assert_eq!(hay.iter().filter(|line| **line == NOISE).count(), hay.len() - 1);
        assert!(prompt.len() <= 1500 && prompt.len() + NOISE.len() + 1 > 1500);
    }

    #[test]
    fn other_keys_never_equal_the_one_asked_for() {
        for task in [Task::NiahMultikey2, Task::NiahMultikey3] {
            for seed in 0..20 {
                let (prompt, answers) = text(task, 6000, seed);
                let (_, question) = prompt.rsplit_once("? The special").unwrap();
                let key =
                    question.split_once(" for ").unwrap().1.split_once(" mentioned").unwrap().0;
                assert_eq!(prompt.matches(&format!(" for {key} is: ")).count(), 1);
                assert!(prompt.contains(&format!(" for {key} is: {}.", answers[0])));
                assert!(prompt.matches("One of the special magic").count() > 30);
            }
        }
    }

    #[test]
    fn uuids_are_of_version_four() {
        let id = uuid(&mut ChaCha8Rng::seed_from_u64(1));
        let parts: Vec<usize> = id.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12]);
        assert!(id.as_bytes()[14] == b'4' && b"89ab".contains(&id.as_bytes()[19]), "{id}");
    }

    #[test]
    fn several_answers_are_asked_for_in_the_plural() {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let needles = Needles::draw(Task::NiahMultiquery, &mut rng, Part::Test);
        let (before, after) = needles.frame();
        assert!(before.starts_with("Some special magic numbers are hidden"));
        assert!(after.starts_with("\nWhat are all the special magic numbers for "));
        assert!(after.ends_with("mentioned in the provided text are") && after.contains(", and "));
        assert_eq!((needles.answers().len(), needles.sentences(&mut rng).len()), (4, 4));
        let needles = Needles::draw(Task::NiahMultivalue, &mut rng, Part::Test);
        assert_eq!((needles.pairs.len(), needles.answers().len()), (1, 4));
        let needles = Needles::draw(Task::NiahMultikey1, &mut rng, Part::Test);
        assert_eq!((needles.pairs.len(), needles.answers().len()), (4, 1));
        assert!(needles.frame().0.starts_with("A special magic number is"));
        assert!(all_keys().contains(&needles.pairs[0].0));
    }
}
