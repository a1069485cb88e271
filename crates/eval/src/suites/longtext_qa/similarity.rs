//! Longest common subsequences.

/// Lengths of the longest common subsequences of the beginnings of both: `[a.len() + 1][b.len() + 1]`.
fn table<T: PartialEq>(a: &[T], b: &[T]) -> Vec<Vec<u32>> {
    let mut table = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, x) in a.iter().enumerate() {
        for (j, y) in b.iter().enumerate() {
            table[i + 1][j + 1] =
                if x == y { table[i][j] + 1 } else { table[i][j + 1].max(table[i + 1][j]) };
        }
    }
    table
}

/// Length of the longest common subsequence; keeps one row of the table.
pub(super) fn lcs_length<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    let mut row = vec![0; b.len() + 1];
    for x in a {
        let mut diagonal = 0;
        for (j, y) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = if x == y { diagonal + 1 } else { above.max(row[j]) };
            diagonal = above;
        }
    }
    row[b.len()]
}

/// The words of a longest common subsequence. Of several, the one that the package `rouge` takes: from the end, it
/// goes back in `b` unless only going back in `a` keeps the length.
pub(super) fn lcs_words(a: &[String], b: &[String]) -> Vec<String> {
    let table = table(a, b);
    let (mut i, mut j, mut found) = (a.len(), b.len(), Vec::new());
    while i > 0 && j > 0 {
        if a[i - 1] == b[j - 1] {
            found.push(a[i - 1].clone());
            (i, j) = (i - 1, j - 1);
        } else if table[i - 1][j] > table[i][j - 1] {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    found.reverse();
    found
}

/// Edit similarity: 2 · LCS / (characters of both), the share of characters that insertions and deletions keep; 1 for
/// two empty texts.
pub(super) fn indel_ratio(a: &str, b: &str) -> f64 {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    match a.len() + b.len() {
        0 => 1.0,
        both => 2.0 * lcs_length(&a, &b) as f64 / both as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `rapidfuzz.fuzz.ratio`, in percent.
    #[test]
    fn edit_similarity_is_that_of_rapidfuzz() {
        for (a, b, percent) in [
            ("return x + 1", "return x + 2", 91.66666666666666),
            ("def f(x):", "def g(x, y):", 76.19047619047619),
            ("abcd", "bcde", 75.0),
            ("", "abc", 0.0),
            ("x = foo(bar)", "y = foo(baz, qux)", 68.96551724137932),
            ("abc", "abc", 100.0),
        ] {
            assert!((100.0 * indel_ratio(a, b) - percent).abs() < 1e-9, "{a:?} {b:?}");
        }
        assert_eq!(indel_ratio("", ""), 1.0);
    }

    #[test]
    fn a_subsequence_keeps_the_order() {
        let words = |text: &str| text.split(' ').map(str::to_string).collect::<Vec<_>>();
        assert_eq!(lcs_words(&words("a b c d"), &words("a c x d")), words("a c d"));
        assert!(lcs_words(&words("a"), &words("b")).is_empty());
        assert_eq!(lcs_length(&words("a b c d"), &words("d c b a")), 1);
    }
}
