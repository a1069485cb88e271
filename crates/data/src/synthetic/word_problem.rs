//! The word problem of a group: the product of the elements so far, at every step.
//!
//! After Merrill, Petty and Sabharwal, "The illusion of state in state-space models", 2024, as in the PaTH
//! paper, section 4.1. A word is a sequence of uniform elements g₁ g₂ … of a group of permutations; the label
//! at step i is g₁ g₂ ⋯ gᵢ, the permutation that applies g₁ first. The groups are not solvable: their word
//! problem is complete for NC¹, beyond what transformers of fixed depth are thought to express.

use std::str::FromStr;

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::symbols::Labelled;

/// A permutation of five: where each goes.
type Permutation = [u8; 5];

/// A group of permutations of five.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// The even ones: 60 elements.
    #[default]
    A5,
    /// All of them: 120 elements.
    S5,
}

impl Group {
    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Group::A5 => "a5",
            Group::S5 => "s5",
        }
    }

    /// How many elements it has.
    pub fn order(self) -> usize {
        match self {
            Group::A5 => 60,
            Group::S5 => 120,
        }
    }

    /// Its elements, sorted: the identity first.
    fn elements(self) -> Vec<Permutation> {
        let mut all = Vec::with_capacity(120);
        for code in 0..5u32.pow(5) {
            let digits: Permutation =
                std::array::from_fn(|at| (code / 5u32.pow(4 - at as u32) % 5) as u8);
            let distinct = (0..5).all(|a| (0..a).all(|b| digits[a] != digits[b]));
            if distinct && (self == Group::S5 || is_even(digits)) {
                all.push(digits);
            }
        }
        all
    }
}

/// Whether a permutation has an even number of inversions.
fn is_even(permutation: Permutation) -> bool {
    let inversions = (0..5).map(|a| (a..5).filter(|&b| permutation[a] > permutation[b]).count());
    inversions.sum::<usize>().is_multiple_of(2)
}

impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Group {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = [Group::A5, Group::S5].into_iter().find(|group| group.name() == text);
        found.ok_or_else(|| "allowed: a5, s5".to_string())
    }
}

/// Draws words of a group. Symbol n is the group's n-th element; the identity is symbol 0.
#[derive(Clone, Debug)]
pub struct WordProblem {
    order: usize,
    /// The product of elements a and b, a first, at `a · order + b`.
    products: Vec<u32>,
}

impl WordProblem {
    /// Tabulates the group's products.
    pub fn new(group: Group) -> Self {
        let elements = group.elements();
        let product = |a: &Permutation, b: &Permutation| {
            let both: Permutation = std::array::from_fn(|at| b[usize::from(a[at])]);
            elements.binary_search(&both).expect("a group is closed") as u32
        };
        let products = elements.iter().flat_map(|a| elements.iter().map(move |b| (a, b)));
        WordProblem {
            order: elements.len(),
            products: products.map(|(a, b)| product(a, b)).collect(),
        }
    }

    /// The product of two elements, of which `first` applies first.
    pub fn product(&self, first: u32, then: u32) -> u32 {
        self.products[first as usize * self.order + then as usize]
    }

    /// Draws a word of `length` elements; every step has a label.
    pub fn draw(&self, rng: &mut ChaCha8Rng, length: usize) -> Labelled {
        let symbols: Vec<u32> =
            (0..length).map(|_| rng.random_range(0..self.order) as u32).collect();
        let mut product = 0;
        let label = |(at, &element): (usize, &u32)| {
            product = self.product(product, element);
            (at, product)
        };
        let labels = symbols.iter().enumerate().map(label).collect();
        Labelled { symbols, labels }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::SeedableRng;

    use super::*;

    #[test]
    fn the_tables_are_those_of_groups() {
        for group in [Group::A5, Group::S5] {
            let problem = WordProblem::new(group);
            let n = problem.order as u32;
            assert_eq!(problem.order, group.order());
            for a in 0..n {
                assert_eq!((problem.product(0, a), problem.product(a, 0)), (a, a));
                let row: HashSet<u32> = (0..n).map(|b| problem.product(a, b)).collect();
                assert_eq!(row.len(), problem.order, "every product of {a} is different");
            }
            let mut rng = ChaCha8Rng::seed_from_u64(0);
            for _ in 0..1000 {
                let [a, b, c] = std::array::from_fn(|_| rng.random_range(0..n));
                let left = problem.product(problem.product(a, b), c);
                assert_eq!(left, problem.product(a, problem.product(b, c)));
            }
        }
        // Neither commutes.
        let problem = WordProblem::new(Group::A5);
        assert!((0..60).any(|a| problem.product(a, 1) != problem.product(1, a)));
    }

    #[test]
    fn the_first_element_applies_first() {
        let elements = Group::S5.elements();
        let find = |p: Permutation| elements.binary_search(&p).unwrap() as u32;
        // First swap 0 and 1, then 1 and 2: 0 goes to 1 and on to 2.
        let product =
            WordProblem::new(Group::S5).product(find([1, 0, 2, 3, 4]), find([0, 2, 1, 3, 4]));
        assert_eq!(elements[product as usize], [2, 0, 1, 3, 4]);
        assert!(
            elements[0] == [0, 1, 2, 3, 4] && is_even(elements[0]) && !is_even([1, 0, 2, 3, 4])
        );
    }

    #[test]
    fn labels_are_the_products_of_the_prefixes() {
        let problem = WordProblem::new(Group::A5);
        let word = problem.draw(&mut ChaCha8Rng::seed_from_u64(4), 20);
        assert_eq!((word.symbols.len(), word.labels.len()), (20, 20));
        assert_eq!(word.labels[0], (0, word.symbols[0]));
        for at in 1..20 {
            let wanted = problem.product(word.labels[at - 1].1, word.symbols[at]);
            assert_eq!(word.labels[at], (at, wanted));
        }
    }
}
