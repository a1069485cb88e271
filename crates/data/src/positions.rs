//! Groups of positions in a context, over which losses are averaged: linear buckets and logarithmic bins.

use serde::{Deserialize, Serialize};

/// The most positions of a linear bucket.
const BUCKET: usize = 2048;
/// The fewest linear buckets of a length.
const LEAST_BUCKETS: usize = 8;

/// How positions are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Binning {
    /// Buckets of equal width, but for one position where the length does not divide.
    Linear,
    /// Bins of equal width on a logarithmic scale, two per octave.
    Logarithmic,
}

impl Binning {
    /// The groups of a context of `length` tokens, as `from..to`; position 0 has read one token.
    pub fn edges(self, length: usize) -> Vec<(usize, usize)> {
        let mut edges = vec![0];
        match self {
            Binning::Linear => {
                let count = length.div_ceil(BUCKET).max(LEAST_BUCKETS).min(length);
                edges.extend((1..count).map(|n| n * length / count));
            }
            // Position p has read p + 1 tokens: bins end at 1, 2, 3, 4, 6, 8, 11, 16… tokens read,
            // so that a power of two ends one.
            Binning::Logarithmic => {
                edges.extend(
                    (0..)
                        .map(|n| 2f64.powf(f64::from(n) / 2.0).round() as usize)
                        .take_while(|&edge| edge < length),
                );
                edges.dedup();
                // A few positions left over at the end join the bin before: on their own they are noise.
                let last = edges[edges.len() - 1];
                if edges.len() > 2 && (length - last) * 5 < last {
                    edges.pop();
                }
            }
        }
        edges.push(length);
        edges.windows(2).map(|pair| (pair[0], pair[1])).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_are_at_most_2048_wide_and_equal() {
        assert_eq!(Binning::Linear.edges(32_768).len(), 16);
        assert_eq!(Binning::Linear.edges(32_768)[1], (2048, 4096));
        assert_eq!(Binning::Linear.edges(1024)[7], (896, 1024));
        assert_eq!(Binning::Linear.edges(2).len(), 2);
        for length in [1001, 5000, 20_000, 70_001] {
            let edges = Binning::Linear.edges(length);
            let widths = || edges.iter().map(|(from, to)| to - from);
            let (least, most) = (widths().min().unwrap(), widths().max().unwrap());
            assert!(most - least <= 1 && most <= 2048, "{length}: {least} to {most}");
        }
    }

    #[test]
    fn logarithmic_bins_double_every_second_edge() {
        let edges = Binning::Logarithmic.edges(32);
        let tokens_read: Vec<(usize, usize)> =
            edges.into_iter().map(|(from, to)| (from + 1, to)).collect();
        assert_eq!(
            tokens_read,
            [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 11), (12, 16), (17, 23), (24, 32)]
        );
    }

    #[test]
    fn a_short_last_bin_joins_the_one_before() {
        let last = |length| Binning::Logarithmic.edges(length).pop();
        assert_eq!(last(1100), Some((724, 1100)));
        assert_eq!(last(1300), Some((1024, 1300)));
    }

    proptest! {
        #[test]
        fn groups_cover_every_position_once(length in 1usize..70_000) {
            for binning in [Binning::Linear, Binning::Logarithmic] {
                let edges = binning.edges(length);
                prop_assert_eq!(edges[0].0, 0);
                prop_assert_eq!(edges[edges.len() - 1].1, length);
                for pair in edges.windows(2) {
                    prop_assert_eq!(pair[0].1, pair[1].0);
                }
                prop_assert!(edges.iter().all(|(from, to)| from < to));
            }
        }
    }
}
