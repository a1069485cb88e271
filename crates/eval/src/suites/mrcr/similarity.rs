//! How similar two texts are: the ratio of Ratcliff and Obershelp (1988), which Python's difflib computes.

use std::collections::HashMap;

/// 2 · M / (characters of both), where M are the characters of matching blocks: the longest common run of
/// characters, and recursively those to its left and to its right. 1 for equal texts, 0 for texts without a
/// character in common; 1 for two empty ones.
///
/// Unlike difflib by default, it does not ignore characters that are frequent in long texts.
pub(super) fn ratio(a: &str, b: &str) -> f64 {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.is_empty() && b.is_empty() {
        return 1.0;
    }
    let mut places = HashMap::<char, Vec<usize>>::new();
    b.iter().enumerate().for_each(|(at, &c)| places.entry(c).or_default().push(at));
    let mut matched = 0;
    let mut open = vec![(0, a.len(), 0, b.len())];
    while let Some((a_from, a_to, b_from, b_to)) = open.pop() {
        let (i, j, length) = longest(&a, &places, (a_from, a_to, b_from, b_to));
        if length > 0 {
            matched += length;
            open.push((a_from, i, b_from, j));
            open.push((i + length, a_to, j + length, b_to));
        }
    }
    2.0 * matched as f64 / (a.len() + b.len()) as f64
}

/// Start in a, start in b and length of the longest common run of the ranges: the first in a of equally long ones,
/// and of those the first in b.
fn longest(
    a: &[char],
    places: &HashMap<char, Vec<usize>>,
    (a_from, a_to, b_from, b_to): (usize, usize, usize, usize),
) -> (usize, usize, usize) {
    let mut best = (a_from, b_from, 0);
    // Lengths of the common runs that end at the character before in a, by their end in b.
    let mut runs = HashMap::<usize, usize>::new();
    for i in a_from..a_to {
        let mut next = HashMap::new();
        for &j in places.get(&a[i]).into_iter().flatten() {
            if !(b_from..b_to).contains(&j) {
                continue;
            }
            let run = j.checked_sub(1).and_then(|before| runs.get(&before)).unwrap_or(&0) + 1;
            next.insert(j, run);
            if run > best.2 {
                best = (i + 1 - run, j + 1 - run, run);
            }
        }
        runs = next;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_those_of_difflib() {
        // difflib.SequenceMatcher(None, a, b).ratio(), from its documentation and by hand.
        for (a, b, wanted) in [
            ("", "", 1.0),
            ("", "abc", 0.0),
            ("abcd", "bcde", 0.75),
            ("abc", "xyz", 0.0),
            ("tide", "diet", 0.25),
            ("diet", "tide", 0.5),
            (
                "private Thread currentThread;",
                "private volatile Thread currentThread;",
                58.0 / 67.0,
            ),
        ] {
            assert!((ratio(a, b) - wanted).abs() < 1e-12, "{a:?} {b:?}: {}", ratio(a, b));
        }
        assert_eq!(ratio("same text", "same text"), 1.0);
    }
}
