//! Examples that training never sees.
//!
//! Every example belongs to training or to tests by a hash of its content, so that a generated source
//! and the evaluation of the same task never share one, whatever their seeds.

use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

/// Which examples are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Four fifths: those of the training split.
    Train,
    /// One fifth: those of validation and evaluation.
    Test,
}

impl Part {
    /// The part of an example, from its content.
    pub fn of(content: &[u8]) -> Part {
        // The first eight bytes of the hash as a number: a fifth of all numbers are tests.
        let hash = Sha256::digest(content);
        let mut first = [0; 8];
        first.copy_from_slice(&hash[..8]);
        if u64::from_le_bytes(first) < u64::MAX / 5 { Part::Test } else { Part::Train }
    }

    /// Draws until an example belongs to this part. After 1000 draws it gives up; with many examples that happens
    /// with probability 10⁻⁹⁶.
    ///
    /// # Panics
    /// When it gives up: the task has too few examples.
    pub fn draw<T>(
        self,
        rng: &mut ChaCha8Rng,
        mut draw: impl FnMut(&mut ChaCha8Rng) -> (T, Vec<u8>),
    ) -> T {
        for _ in 0..1000 {
            let (example, content) = draw(rng);
            if Part::of(&content) == self {
                return example;
            }
        }
        panic!("1000 draws gave no example of {self:?}")
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn a_fifth_is_held_out_and_draws_stay_in_their_part() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut draw = |part: Part| {
            part.draw(&mut rng, |rng| {
                let number: u32 = rng.random();
                (number, number.to_le_bytes().to_vec())
            })
        };
        for part in [Part::Train, Part::Test] {
            assert!((0..200).all(|_| Part::of(&draw(part).to_le_bytes()) == part));
        }
        let tests = (0..10_000u32).filter(|n| Part::of(&n.to_le_bytes()) == Part::Test).count();
        assert!((1_850..2_150).contains(&tests), "{tests}");
    }
}
