//! Words of a file.

use std::collections::HashSet;
use std::path::Path;

use longwall_data::synthetic::ruler::WordList;

use crate::EvalError;
use crate::text::read_text;

/// Reads a file of words, one a line; without one, words are made up.
///
/// # Errors
/// A file that cannot be read, or holds fewer than a hundred different words.
pub(super) fn read(path: Option<&Path>) -> Result<WordList, EvalError> {
    let Some(path) = path else { return Ok(WordList::MadeUp) };
    let text = read_text(path)?;
    let words: HashSet<&str> =
        text.lines().map(str::trim).filter(|word| !word.is_empty()).collect();
    if words.len() < 100 {
        return Err(EvalError::Text {
            what: format!(
                "ruler: {} holds {} different words; allowed: 100 or more",
                path.display(),
                words.len()
            ),
            remedy: "give --words a file with one word a line, or leave it out".to_string(),
        });
    }
    let mut words: Vec<String> = words.into_iter().map(str::to_string).collect();
    words.sort_unstable();
    Ok(WordList::Given(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_may_come_from_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("words.txt");
        std::fs::write(&path, "one\ntwo\n\none\n").unwrap();
        let error = read(Some(&path)).err().unwrap().to_string();
        assert!(error.contains("holds 2 different words; allowed: 100 or more"), "{error}");
        let words: String = (0..150).map(|n| format!("word{n}\n")).collect();
        std::fs::write(&path, words).unwrap();
        let WordList::Given(words) = read(Some(&path)).unwrap() else { panic!("no words") };
        assert_eq!(words.len(), 150);
    }
}
