//! Which text is held out for validation.

use sha2::{Digest, Sha256};

/// Whether documents whose split depends on `text` are held out: whether its hash, as a number in
/// [0, 1), is below `fraction`.
pub(super) fn is_validation(text: &str, fraction: f64) -> bool {
    let digest = Sha256::new_with_prefix(b"longwall split").chain_update(text).finalize();
    let hash = digest.iter().take(8).fold(0u64, |hash, &byte| hash << 8 | u64::from(byte));
    // 53 bits, which an f64 holds exactly.
    ((hash >> 11) as f64) < fraction * (1u64 << 53) as f64
}

/// Where the held-out end of a text starts, if the text is the whole corpus: about `fraction` of it,
/// from a paragraph or, without one nearby, a line or a word on. `None` when nothing would be left
/// of either part.
pub(super) fn tail_start(text: &str, fraction: f64) -> Option<usize> {
    if fraction <= 0.0 {
        return None;
    }
    let length = text.len();
    let tail = (length as f64 * fraction) as usize;
    let target = text.floor_char_boundary(length.saturating_sub(tail));
    // The part grows to at most twice its share.
    let low = text.floor_char_boundary(target.saturating_sub(tail));
    let before = &text[low..target];
    let boundary = |mark: &str| before.rfind(mark).map(|at| low + at + mark.len());
    let space = || {
        before
            .rfind(char::is_whitespace)
            .and_then(|at| before[at..].chars().next().map(|space| low + at + space.len_utf8()))
    };
    let at = boundary("\n\n").or_else(|| boundary("\n")).or_else(space)?;
    let (head, tail) = text.split_at(at);
    (!head.trim().is_empty() && !tail.trim().is_empty()).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_end_starts_with_a_paragraph_a_line_or_a_word() {
        let line = "some words in a line\n";
        let paragraphs = format!("{}\n", line.repeat(5)).repeat(100);
        let at = tail_start(&paragraphs, 0.1).unwrap();
        assert!(paragraphs[..at].ends_with("\n\n") && paragraphs[at..].starts_with("some"));
        let lines = line.repeat(500);
        let at = tail_start(&lines, 0.1).unwrap();
        assert!(lines[..at].ends_with("line\n"));
        let words = "word ".repeat(500);
        assert!(words[tail_start(&words, 0.1).unwrap()..].starts_with("word"));
        assert_eq!(tail_start(&"x".repeat(500), 0.1), None);
        assert_eq!(tail_start(&lines, 0.0), None);
        assert_eq!(tail_start("", 0.5), None);
        assert_eq!(tail_start("\n\n\n\n", 0.5), None);
    }

    proptest! {
        #[test]
        fn the_end_has_its_share(text in "([a-z]{1,9}[ \n]|é\u{3000}){50,200}", fraction in 0.1f64..0.5) {
            let at = tail_start(&text, fraction).unwrap();
            let share = (text.len() - at) as f64 / text.len() as f64;
            prop_assert!(share >= fraction * 0.9 && share <= 2.0 * fraction + 0.05, "{share}");
        }
    }
}
