//! Assigns rows to sources by weight.

use sha2::{Digest, Sha256};

use crate::permutation::Permutation;

/// Rows in a block of the schedule. Every block has each source's exact share, rounded to whole rows.
pub const BLOCK_ROWS: u64 = 1000;

/// Draws rows from sources by weight, exactly and without state.
///
/// The rows are divided into blocks of [`BLOCK_ROWS`]. In every block each source has the same number
/// of rows, its share of the block rounded by largest remainder; a permutation seeded by the block
/// shuffles them. So a row's index in its source follows directly: whole blocks times the source's
/// count, plus its rank in the block.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// First rank of each source in a block, followed by the block's size.
    starts: Vec<u64>,
    seed: u64,
}

impl Mixture {
    /// The mixture of sources with `weights` above 0.
    pub fn new(weights: &[f64], seed: u64) -> Self {
        let mut starts = vec![0];
        for count in largest_remainder(weights, BLOCK_ROWS) {
            starts.push(starts[starts.len() - 1] + count);
        }
        Mixture { starts, seed }
    }

    /// The source of `row`, and the row's index among the source's rows.
    pub fn locate(&self, row: u64) -> (usize, u64) {
        let sources = self.starts.len() - 1;
        if sources == 1 {
            return (0, row);
        }
        let (block, slot) = (row / BLOCK_ROWS, row % BLOCK_ROWS);
        let order = Permutation::new(BLOCK_ROWS, derive_key("mixture", &[self.seed, block]));
        let rank = order.at(slot);
        let source = self.starts.partition_point(|&start| start <= rank) - 1;
        (source, block * self.rows_in_block(source) + rank - self.starts[source])
    }

    /// The rows of `source` in every block of [`BLOCK_ROWS`].
    pub fn rows_in_block(&self, source: usize) -> u64 {
        self.starts[source + 1] - self.starts[source]
    }
}

/// Whole numbers that sum to `total`, each within 1 of its weight's share: every share is rounded
/// down, and the rest goes to the largest remainders, the first of equal ones first.
pub fn largest_remainder(weights: &[f64], total: u64) -> Vec<u64> {
    let sum: f64 = weights.iter().sum();
    let shares: Vec<f64> = weights.iter().map(|weight| weight / sum * total as f64).collect();
    let mut counts: Vec<u64> = shares.iter().map(|share| share.floor() as u64).collect();
    let mut by_remainder: Vec<usize> = (0..weights.len()).collect();
    by_remainder.sort_by(|&a, &b| {
        let remainder = |at: usize| shares[at] - shares[at].floor();
        remainder(b).total_cmp(&remainder(a)).then(a.cmp(&b))
    });
    let left = total - counts.iter().sum::<u64>();
    for &at in by_remainder.iter().cycle().take(left as usize) {
        counts[at] += 1;
    }
    counts
}

/// A key for one purpose: the first bytes of a SHA-256, so that keys of different purposes and
/// numbers are unrelated.
pub fn derive_key(purpose: &str, numbers: &[u64]) -> u64 {
    let mut sha = Sha256::new_with_prefix(b"longwall ");
    sha.update(purpose.as_bytes());
    for number in numbers {
        sha.update(number.to_le_bytes());
    }
    let digest = sha.finalize();
    digest.iter().take(8).fold(0, |key, &byte| key << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn weights() -> impl Strategy<Value = Vec<f64>> {
        proptest::collection::vec(0.01f64..1.0, 1..6)
    }

    proptest! {
        #[test]
        fn shares_are_exact_in_every_block(weights in weights(), seed in any::<u64>(), block in 0u64..1000) {
            let mixture = Mixture::new(&weights, seed);
            let mut counts = vec![0u64; weights.len()];
            for row in block * BLOCK_ROWS..(block + 1) * BLOCK_ROWS {
                counts[mixture.locate(row).0] += 1;
            }
            let sum: f64 = weights.iter().sum();
            for (count, weight) in counts.iter().zip(&weights) {
                let share = weight / sum * BLOCK_ROWS as f64;
                prop_assert!((*count as f64 - share).abs() < 1.0, "{} for {}", count, share);
            }
        }

        #[test]
        fn every_row_of_a_source_comes_once(weights in weights(), seed in any::<u64>()) {
            let mixture = Mixture::new(&weights, seed);
            let mut rows = vec![Vec::new(); weights.len()];
            for row in 0..3 * BLOCK_ROWS {
                let (source, index) = mixture.locate(row);
                rows[source].push(index);
            }
            for indices in &mut rows {
                indices.sort_unstable();
                prop_assert!(indices.iter().copied().eq(0..indices.len() as u64));
            }
        }

        #[test]
        fn largest_remainder_loses_nothing(weights in weights(), total in 0u64..5000) {
            let counts = largest_remainder(&weights, total);
            prop_assert_eq!(counts.iter().sum::<u64>(), total);
        }
    }

    #[test]
    fn blocks_and_seeds_differ() {
        let order = |seed: u64, block: u64| -> Vec<usize> {
            let mixture = Mixture::new(&[1.0, 1.0], seed);
            (block * 1000..block * 1000 + 1000).map(|row| mixture.locate(row).0).collect()
        };
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(1, 5), order(1, 5));
    }
}
