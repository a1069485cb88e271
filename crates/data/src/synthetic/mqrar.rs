//! Multi-query repeated associative recall with N-back: which value a variable had N assignments ago.
//!
//! After the PaTH paper, section 4.1, which extends the task of Tan et al., "Stick-breaking attention", 2024.
//! A sequence assigns values to a few variables, again and again: `A 1 B 2 A 5 A 7 …`. Whenever a variable
//! comes that was assigned at least N times before, the label there is the value of its N-th last
//! assignment; the value that follows is a new one. Variables and values are uniform and independent.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::symbols::Labelled;

/// How a sequence is drawn. Symbols below `keys` are variables, the `values` next ones are values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mqrar {
    /// Symbols in a sequence, even: two for each assignment.
    pub length: usize,
    /// How many variables there are.
    pub keys: usize,
    /// How many values there are.
    pub values: usize,
}

impl Mqrar {
    /// The fewest different sequences of a task, so that training and tests both have some.
    pub const LEAST_SEQUENCES: u32 = 1000;

    /// Whether there are at least [`LEAST_SEQUENCES`](Self::LEAST_SEQUENCES), of (keys · values)^(length / 2).
    pub fn has_enough_sequences(&self) -> bool {
        let assignments = (self.keys as f64) * (self.values as f64);
        assignments.powf((self.length / 2) as f64) >= f64::from(Self::LEAST_SEQUENCES)
    }

    /// Draws the symbols of a sequence.
    pub fn draw(&self, rng: &mut ChaCha8Rng) -> Vec<u32> {
        let assignment = |_| {
            let key = rng.random_range(0..self.keys);
            [key as u32, (self.keys + rng.random_range(0..self.values)) as u32]
        };
        (0..self.length / 2).flat_map(assignment).collect()
    }

    /// The labels of a sequence for `back` = N, at least 1.
    pub fn labels(&self, symbols: &[u32], back: usize) -> Vec<(usize, u32)> {
        let mut history: Vec<Vec<u32>> = vec![Vec::new(); self.keys];
        let mut labels = Vec::new();
        for (at, assignment) in symbols.chunks_exact(2).enumerate() {
            let values = &mut history[assignment[0] as usize];
            if let Some(nth_last) = values.len().checked_sub(back) {
                labels.push((2 * at, values[nth_last]));
            }
            values.push(assignment[1]);
        }
        labels
    }

    /// A sequence with its labels for one N.
    pub fn draw_labelled(&self, rng: &mut ChaCha8Rng, back: usize) -> Labelled {
        let symbols = self.draw(rng);
        let labels = self.labels(&symbols, back);
        Labelled { symbols, labels }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn labels_are_those_of_the_papers_example() {
        // A 1 B 2 C 3 D 4 A 5 B 6 A 7 C 8 A 9 B 0, with A to D as 0 to 3 and value n as 4 + n.
        let task = Mqrar { length: 20, keys: 4, values: 10 };
        let text = "A1B2C3D4A5B6A7C8A9B0".bytes();
        let symbol = |c: u8| if c >= b'A' { c - b'A' } else { 4 + c - b'0' };
        let symbols: Vec<u32> = text.map(|c| u32::from(symbol(c))).collect();
        assert_eq!(task.labels(&symbols, 2), [(12, 5), (16, 9), (18, 6)]);
        let last = [(8, 5), (10, 6), (12, 9), (14, 7), (16, 11), (18, 10)];
        assert_eq!(task.labels(&symbols, 1), last);
        assert_eq!(task.labels(&symbols, 3), [(16, 5)]);
    }

    #[test]
    fn sequences_are_counted() {
        let enough = |length, keys, values| Mqrar { length, keys, values }.has_enough_sequences();
        assert!(!enough(768, 1, 1) && !enough(18, 1, 2) && enough(20, 1, 2));
        assert!(enough(1 << 20, 1 << 20, 1 << 20));
    }

    #[test]
    fn variables_and_values_are_uniform() {
        let task = Mqrar { length: 100_000, keys: 32, values: 64 };
        let symbols = task.draw(&mut ChaCha8Rng::seed_from_u64(1));
        let mut counts = [0; 96];
        for pair in symbols.chunks(2) {
            assert!(pair[0] < 32 && (32..96).contains(&pair[1]));
            counts[pair[0] as usize] += 1;
            counts[pair[1] as usize] += 1;
        }
        assert!(counts[..32].iter().all(|count| (1_350..1_800).contains(count)), "{counts:?}");
        assert!(counts[32..].iter().all(|count| (640..940).contains(count)), "{counts:?}");
        assert_eq!(symbols, task.draw(&mut ChaCha8Rng::seed_from_u64(1)));
    }
}
