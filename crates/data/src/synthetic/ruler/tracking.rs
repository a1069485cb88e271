//! Variable tracking: a chain of assignments hidden in repeated lines.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::super::held_out::Part;
use super::{Built, fill};
use crate::Tokenizer;

const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n";
const HOPS: usize = 4;
/// Lines of the example before the question.
const EXAMPLE_LINES: usize = 5;

/// Variables that all have the same value: the first by its number, each other by the one before.
struct Chain {
    variables: Vec<String>,
    value: u32,
    /// The place of each assignment among the lines, each from 0 to 1, ascending.
    places: Vec<f64>,
}

impl Chain {
    /// Variables of `letters` capital letters.
    fn draw(rng: &mut ChaCha8Rng, letters: usize) -> Self {
        let mut variables: Vec<String> = Vec::new();
        while variables.len() <= HOPS {
            let name = (0..letters).map(|_| char::from(rng.random_range(b'A'..=b'Z'))).collect();
            if !variables.contains(&name) {
                variables.push(name);
            }
        }
        let mut places: Vec<f64> = variables.iter().map(|_| rng.random()).collect();
        places.sort_by(f64::total_cmp);
        Chain { variables, value: rng.random_range(10_000..=99_999), places }
    }

    fn assignments(&self) -> Vec<String> {
        let mut right = self.value.to_string();
        let assign = |name: &String| {
            let text = format!("VAR {name} = {right}");
            right = format!("VAR {name}");
            text
        };
        self.variables.iter().map(assign).collect()
    }

    /// The question about the chain in `lines` lines of noise, up to the answer.
    fn prompt(&self, lines: usize) -> String {
        let mut parts = Vec::new();
        let (mut done, count) = (0, self.variables.len());
        for (assignment, place) in self.assignments().into_iter().zip(&self.places) {
            let at = (place * (lines + 1) as f64) as usize;
            parts.extend(std::iter::repeat_n(NOISE.to_string(), at.min(lines) - done));
            parts.push(assignment);
            done = at.min(lines);
        }
        parts.extend(std::iter::repeat_n(NOISE.to_string(), lines - done));
        let (context, value) = (parts.join(" "), self.value);
        format!(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n\
             Question: Find all variables that are assigned the value {value} in the text above. Answer: \
             According to the chain(s) of variable assignment in the text above, {count} variables are assigned \
             the value {value}, they are:"
        )
    }
}

/// A prompt with at most `budget` tokens: an example with its answer, and a question; else the tokens it needs.
pub(super) fn build(
    budget: usize,
    rng: &mut ChaCha8Rng,
    (tokenizer, part): (&Tokenizer, Part),
) -> Result<Built, usize> {
    let example = Chain::draw(rng, 3);
    let example = format!("{} {}\n\n", example.prompt(EXAMPLE_LINES), example.variables.join(" "));
    let chain = part.draw(rng, |rng| {
        let chain = Chain::draw(rng, 5);
        let content = chain.variables.join(" ").into_bytes();
        (chain, content)
    });
    let text = |lines| format!("{example}{}", chain.prompt(lines));
    let prompt = fill((1, budget / 4 + 2), budget, tokenizer, text)?;
    Ok(Built { prompt, answers: chain.variables })
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;
    use crate::TokenizerConfig;

    #[test]
    fn a_chain_of_four_hops_is_hidden_in_order() {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        for seed in 0..20 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let Built { prompt, answers } =
                build(5000, &mut rng, (&tokenizer, Part::Test)).unwrap();
            assert!(prompt.len() <= 5000 && prompt.len() + NOISE.len() + 2 > 5000);
            let prompt = tokenizer.decode(&prompt);
            let (example, question) = prompt.split_once("\n\nMemorize").unwrap();
            assert_eq!(example.rsplit(": ").next().unwrap().split(' ').count(), 5);
            assert_eq!(answers.len(), 5);
            let (_, value) = question.split_once("assigned the value ").unwrap();
            let value = &value[..5];
            let mut right = value.to_string();
            let mut last = 0;
            for variable in &answers {
                let at = question.find(&format!("VAR {variable} = {right}")).unwrap();
                assert!(at >= last, "assignments are in order");
                (last, right) = (at, format!("VAR {variable}"));
            }
            assert!(
                question
                    .ends_with(&format!("5 variables are assigned the value {value}, they are:"))
            );
        }
    }

    #[test]
    fn places_are_all_over_the_text() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let first: Vec<f64> = (0..200).map(|_| Chain::draw(&mut rng, 5).places[0]).collect();
        assert!(first.iter().any(|place| *place > 0.4) && first.iter().any(|place| *place < 0.05));
    }
}
