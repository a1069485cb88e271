//! A random order of the numbers below n that is computed, not stored.

/// A bijection of 0..n onto itself, chosen by a key, with random access and no memory.
///
/// A Feistel network over pairs (l, r), l in 0..a and r in 0..b with a·b ≥ n: every round adds a
/// hash of one half to the other, modulo a or b. This is invertible, so the network is a bijection of
/// 0..a·b. Values at or above n go through again until one is below n (cycle walking), which gives a
/// bijection of 0..n. As a·b < n + 2·√n + 1, this is rare.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    a: u64,
    b: u64,
    key: u64,
}

const ROUNDS: u64 = 8;

impl Permutation {
    /// The permutation of 0..`n` for `key`.
    ///
    /// # Panics
    /// When `n` is 0.
    pub fn new(n: u64, key: u64) -> Self {
        assert!(n > 0, "a permutation of nothing");
        let root = n.isqrt();
        let a = if root * root == n { root } else { root + 1 };
        Permutation { n, a, b: n.div_ceil(a), key }
    }

    /// The image of `index`.
    ///
    /// # Panics
    /// When `index` is not below n.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.n, "index {index} of {}", self.n);
        let mut value = self.once(index);
        while value >= self.n {
            value = self.once(value);
        }
        value
    }

    fn once(&self, value: u64) -> u64 {
        let (mut l, mut r) = (value / self.b, value % self.b);
        for round in 0..ROUNDS {
            let key = mix(self.key.wrapping_add(round));
            if round % 2 == 0 {
                l = (l + mix(key ^ r) % self.a) % self.a;
            } else {
                r = (r + mix(key ^ l) % self.b) % self.b;
            }
        }
        l * self.b + r
    }
}

/// SplitMix64's output function (Steele, Lea and Flood, 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_bijection(n in 1u64..3000, key in any::<u64>()) {
            let order = Permutation::new(n, key);
            let mut seen: Vec<u64> = (0..n).map(|index| order.at(index)).collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..n));
        }

        #[test]
        fn it_stays_below_a_great_n(n in (1u64 << 40)..(1 << 50), key in any::<u64>(), at in any::<u64>()) {
            prop_assert!(Permutation::new(n, key).at(at % n) < n);
        }
    }

    #[test]
    fn keys_give_different_orders_and_neighbours_part() {
        let n = 10_000;
        let (first, second) = (Permutation::new(n, 1), Permutation::new(n, 2));
        let fixed = (0..n).filter(|&i| first.at(i) == i).count();
        let equal = (0..n).filter(|&i| first.at(i) == second.at(i)).count();
        let adjacent = (1..n).filter(|&i| first.at(i) == first.at(i - 1) + 1).count();
        // Each has mean 1 in a uniform order; 10 has a chance of one in ten million.
        assert!(fixed < 10 && equal < 10 && adjacent < 10, "{fixed} {equal} {adjacent}");
    }

    #[test]
    fn every_place_is_equally_likely() {
        // 5 items, 6000 keys: each item is in each place 1200 times on average; sigma is 31.
        let mut counts = [[0u32; 5]; 5];
        for key in 0..6000 {
            let order = Permutation::new(5, key);
            (0..5).for_each(|index| counts[index][order.at(index as u64) as usize] += 1);
        }
        let within = |&count: &u32| (1030..1370).contains(&count);
        assert!(counts.iter().flatten().all(within), "{counts:?}");
    }
}
