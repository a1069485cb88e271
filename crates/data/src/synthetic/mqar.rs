//! Multi-query associative recall: key–value pairs, then queries for the values in another order.
//!
//! After Arora et al., "Zoology: measuring and improving recall in efficient language models", 2023, and the
//! generators of its repository, in three forms:
//!
//! - [`Form::Standard`]: pairs k₁ v₁ k₂ v₂ …, then each key once more; the label there is its value.
//! - [`Form::Forgetting`]: after the pairs, some keys come again with a new value. The label is the last one.
//! - [`Form::Compositional`]: keys of two symbols from a grid: each first symbol comes with each second one,
//!   so that neither alone determines the value. The label stands at the second symbol of a query.
//!
//! Queries lie in slots of two symbols (three in the compositional form) after the pairs. Slot g (from 0) is
//! drawn with probability ∝ (g + 1)^(power − 1), without replacement: with a small power most queries come
//! soon. All other positions hold random symbols, as does the one after a query: the answer itself is never
//! in the sequence.

use std::str::FromStr;

use longwall_config::Problems;
use rand::Rng;
use rand::seq::{SliceRandom, index};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::symbols::{Labelled, SymbolTokens};
use crate::{DataError, Tokenizer};

/// The vocabulary of the paper.
pub const VOCAB: usize = 8192;

/// What the keys are, and whether their values change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// One value for each key
    #[default]
    Standard,
    /// Some keys get a second value, which replaces the first
    Forgetting,
    /// A key is a pair of symbols
    Compositional,
}

impl Form {
    /// All forms.
    pub const ALL: [Form; 3] = [Form::Standard, Form::Forgetting, Form::Compositional];

    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Form::Standard => "standard",
            Form::Forgetting => "forgetting",
            Form::Compositional => "compositional",
        }
    }
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Form {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Form::ALL.into_iter().find(|form| form.name() == text);
        found.ok_or_else(|| "allowed: standard, forgetting, compositional".to_string())
    }
}

/// How a sequence is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mqar {
    /// The form.
    pub form: Form,
    /// Symbols in a sequence, even.
    pub length: usize,
    /// Keys in a sequence; a square number in the compositional form.
    pub pairs: usize,
    /// Keys that get a second value; only for [`Form::Forgetting`].
    pub updates: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// The exponent of the power law, above 0; 1 makes all slots equally likely.
    pub power: f64,
}

impl Mqar {
    /// The paper's vocabulary, or all tokens besides the end of text if the tokenizer has fewer.
    pub fn default_vocab(tokenizer: &Tokenizer) -> usize {
        SymbolTokens::available(tokenizer).min(VOCAB)
    }

    /// The paper's share of keys with a second value: half of them.
    pub fn default_updates(form: Form, pairs: usize) -> usize {
        if form == Form::Forgetting { pairs / 2 } else { 0 }
    }

    /// Symbols of a key.
    fn key_len(&self) -> usize {
        if self.form == Form::Compositional { 2 } else { 1 }
    }

    /// Symbols of the pairs before the queries.
    fn context(&self) -> usize {
        self.pairs.saturating_add(self.updates).saturating_mul(self.key_len() + 1)
    }

    /// The fewest symbols of a sequence.
    pub fn least_length(&self) -> usize {
        self.context().saturating_add(self.pairs.saturating_mul(self.key_len() + 1))
    }

    /// The fewest symbols of a vocabulary.
    pub fn least_vocab(&self) -> usize {
        // Symbol 0 is no key; the keys of the standard form are the lower half, those of the compositional
        // form two thirds. The last part, the values, is at least as large as the others.
        match self.form {
            Form::Compositional => self.pairs.max(self.side() + 1).saturating_mul(3),
            _ => self.pairs.saturating_add(1).saturating_mul(2),
        }
    }

    /// Different symbols at each place of a compositional key.
    fn side(&self) -> usize {
        self.pairs.isqrt()
    }

    /// Records what is out of range, but for the vocabulary; `table` is where the keys are.
    pub fn check(&self, table: &str, problems: &mut Problems) {
        let least = self.least_length();
        problems.check(
            self.length >= least && self.length.is_multiple_of(2),
            format!("{table}.length"),
            self.length,
            format!("even lengths of {least} or more, for {} pairs", self.pairs),
            "raise the length, or lower the pairs",
        );
        problems.check(
            self.pairs >= 1
                && (self.form != Form::Compositional || self.side().pow(2) == self.pairs),
            format!("{table}.pairs"),
            self.pairs,
            match self.form {
                Form::Compositional => "square numbers, such as 4, 9, 16, 64",
                _ => "1 or more",
            },
            "the paper's are 4, 8, 16, 32 and 64",
        );
        problems.check(
            self.updates <= self.pairs && (self.form == Form::Forgetting || self.updates == 0),
            format!("{table}.updates"),
            self.updates,
            match self.form {
                Form::Forgetting => format!("up to pairs, {}", self.pairs),
                _ => "only with form = \"forgetting\"".to_string(),
            },
            "leave it out for half of the pairs",
        );
        problems.check(
            self.power > 0.0 && self.power <= 1.0,
            format!("{table}.power"),
            self.power,
            "above 0, up to 1",
            "the paper's is 0.01; 1 makes all places of queries equally likely",
        );
    }

    /// The tokens of the symbols.
    ///
    /// # Errors
    /// [`DataError::TooFewTokens`] when the tokenizer has too few for the vocabulary, or the vocabulary
    /// too few symbols for the pairs.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<SymbolTokens, DataError> {
        SymbolTokens::new(tokenizer, self.vocab.max(self.least_vocab()), "mqar")
    }

    /// Draws a sequence.
    ///
    /// # Panics
    /// When the settings do not pass [`check`](Self::check), or the vocabulary is too small.
    pub fn draw(&self, rng: &mut ChaCha8Rng) -> Labelled {
        let (keys, values) = self.pairs_of(rng);
        let mut last = values.clone();
        let mut symbols = Vec::with_capacity(self.length);
        for (key, &value) in keys.iter().zip(&values) {
            symbols.extend(key);
            symbols.push(value);
        }
        for at in index::sample(rng, self.pairs, self.updates) {
            let least = self.vocab / 2;
            let other = rng.random_range(least..self.vocab - 1) as u32;
            last[at] = if other < values[at] { other } else { other + 1 };
            symbols.extend(&keys[at]);
            symbols.push(last[at]);
        }
        let context = symbols.len();
        symbols.extend((context..self.length).map(|_| rng.random_range(0..self.vocab) as u32));
        let slot = self.key_len() + 1;
        let slots = self.slots(rng, (self.length - context) / slot);
        let mut labels = Vec::with_capacity(self.pairs);
        for ((key, value), place) in keys.iter().zip(last).zip(slots) {
            let start = context + place * slot;
            symbols[start..start + key.len()].copy_from_slice(key);
            labels.push((start + key.len() - 1, value));
        }
        labels.sort_unstable();
        Labelled { symbols, labels }
    }

    /// Different keys and different values.
    fn pairs_of(&self, rng: &mut ChaCha8Rng) -> (Vec<Vec<u32>>, Vec<u32>) {
        let mut distinct = |from: usize, to: usize, count: usize| -> Vec<u32> {
            index::sample(rng, to - from, count).iter().map(|at| (from + at) as u32).collect()
        };
        if self.form != Form::Compositional {
            let half = self.vocab / 2;
            let keys = distinct(1, half, self.pairs).into_iter().map(|key| vec![key]).collect();
            return (keys, distinct(half, self.vocab, self.pairs));
        }
        let (third, side) = (self.vocab / 3, self.side());
        let firsts = distinct(1, third, side);
        let seconds = distinct(third, 2 * third, side);
        let values = distinct(2 * third, self.vocab, self.pairs);
        let grid = |first: &u32| seconds.iter().map(|&second| vec![*first, second]).collect();
        let mut keys: Vec<Vec<u32>> = firsts.iter().flat_map::<Vec<_>, _>(grid).collect();
        keys.shuffle(rng);
        (keys, values)
    }

    /// Different slots below `space`, one for each pair, in the order of successive weighted draws: those
    /// with the greatest ln u / weight (Efraimidis and Spirakis, 2006).
    fn slots(&self, rng: &mut ChaCha8Rng, space: usize) -> Vec<usize> {
        let mut keyed: Vec<(f64, usize)> = (0..space)
            .map(|slot| {
                let weight = ((slot + 1) as f64).powf(self.power - 1.0);
                let uniform: f64 = 1.0 - rng.random::<f64>();
                (uniform.ln() / weight, slot)
            })
            .collect();
        keyed.sort_by(|a, b| b.0.total_cmp(&a.0));
        keyed.truncate(self.pairs);
        keyed.into_iter().map(|(_, slot)| slot).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use proptest::prelude::*;
    use rand::SeedableRng;

    use super::*;

    fn task(form: Form, pairs: usize, spare: usize) -> Mqar {
        let updates = Mqar::default_updates(form, pairs);
        let mut task = Mqar { form, length: 0, pairs, updates, vocab: 300, power: 0.01 };
        task.length = (task.least_length() + spare).next_multiple_of(2);
        task
    }

    fn draw(task: Mqar, seed: u64) -> Labelled {
        task.draw(&mut ChaCha8Rng::seed_from_u64(seed))
    }

    /// The answers that the pairs at the start give to the keys at the labels.
    fn answers(task: Mqar, sequence: &Labelled) -> Vec<(usize, u32)> {
        let width = task.key_len() + 1;
        let (context, rest) = sequence.symbols.split_at(task.context());
        let mut last = HashMap::new();
        for pair in context.chunks(width) {
            last.insert(pair[..width - 1].to_vec(), pair[width - 1]);
        }
        let key = |place: usize| {
            let end = place - context.len() + 1;
            rest[end - task.key_len()..end].to_vec()
        };
        sequence.labels.iter().map(|&(place, _)| (place, last[&key(place)])).collect()
    }

    proptest! {
        #[test]
        fn every_query_has_the_last_value_of_its_key(
            form in prop::sample::select(&Form::ALL[..]), root in 1usize..8, spare in 0usize..90, seed in any::<u64>(),
        ) {
            let task = task(form, root * root, spare);
            let mut problems = Problems::new();
            task.check("t", &mut problems);
            prop_assert!(problems.as_slice().is_empty());
            let sequence = draw(task, seed);
            prop_assert_eq!(sequence.symbols.len(), task.length);
            prop_assert!(sequence.symbols.iter().all(|&symbol| symbol < 300));
            prop_assert_eq!(sequence.labels.len(), task.pairs);
            prop_assert_eq!(&answers(task, &sequence), &sequence.labels);
            let places: HashSet<usize> = sequence.labels.iter().map(|label| label.0).collect();
            prop_assert_eq!(places.len(), task.pairs);
        }
    }

    #[test]
    fn keys_are_in_the_lower_half_and_values_in_the_upper() {
        let task = task(Form::Standard, 16, 0);
        let sequence = draw(task, 1);
        let (keys, values): (Vec<u32>, Vec<u32>) =
            sequence.symbols[..32].chunks(2).map(|pair| (pair[0], pair[1])).unzip();
        assert!(keys.iter().all(|key| (1..150).contains(key)));
        assert!(values.iter().all(|value| (150..300).contains(value)));
        assert_eq!(values.iter().collect::<HashSet<_>>().len(), 16);
    }

    #[test]
    fn half_of_the_keys_get_another_value() {
        let task = task(Form::Forgetting, 16, 10);
        let sequence = draw(task, 2);
        assert_eq!((task.updates, task.least_length()), (8, 2 * 24 + 32));
        let value = |pair: &[u32]| (pair[0], pair[1]);
        let first: HashMap<u32, u32> = sequence.symbols[..32].chunks(2).map(value).collect();
        let second: HashMap<u32, u32> = sequence.symbols[32..48].chunks(2).map(value).collect();
        assert_eq!((first.len(), second.len()), (16, 8));
        assert!(second.iter().all(|(key, value)| first[key] != *value && *value >= 150));
    }

    #[test]
    fn one_symbol_of_a_compositional_key_does_not_determine_the_value() {
        let sequence = draw(task(Form::Compositional, 9, 0), 3);
        let mut counts = HashMap::<u32, usize>::new();
        for triple in sequence.symbols[..27].chunks(3) {
            assert!((1..100).contains(&triple[0]) && (100..200).contains(&triple[1]));
            assert!((200..300).contains(&triple[2]));
            *counts.entry(triple[0]).or_default() += 1;
            *counts.entry(triple[1]).or_default() += 1;
        }
        assert!(counts.len() == 6 && counts.values().all(|&count| count == 3));
    }

    #[test]
    fn queries_come_by_the_power_law() {
        // One pair: slot g has probability ∝ 1 / (g + 1)^0.99 among 31.
        let task = Mqar { length: 64, ..task(Form::Standard, 1, 0) };
        let mut counts = [0.0; 31];
        for seed in 0..20_000 {
            counts[(draw(task, seed).labels[0].0 - 2) / 2] += 1.0 / 20_000.0;
        }
        let weight = |slot: usize| (slot as f64 + 1.0).powf(-0.99);
        let total: f64 = (0..31).map(weight).sum();
        for slot in [0, 1, 2, 7, 30] {
            let wanted = weight(slot) / total;
            assert!((counts[slot] - wanted).abs() < 0.01, "{slot}: {}, {wanted}", counts[slot]);
        }
    }

    #[test]
    fn settings_out_of_range_are_all_reported() {
        let mut problems = Problems::new();
        Mqar { length: 15, updates: 9, power: 0.0, ..task(Form::Compositional, 5, 0) }
            .check("source", &mut problems);
        insta::assert_snapshot!(problems.into_result().unwrap_err(), @r#"
        the configuration has 4 problems:
        source.length is 15; allowed: even lengths of 57 or more, for 5 pairs
          hint: raise the length, or lower the pairs
        source.pairs is 5; allowed: square numbers, such as 4, 9, 16, 64
          hint: the paper's are 4, 8, 16, 32 and 64
        source.updates is 9; allowed: only with form = "forgetting"
          hint: leave it out for half of the pairs
        source.power is 0; allowed: above 0, up to 1
          hint: the paper's is 0.01; 1 makes all places of queries equally likely
        "#);
    }
}
