//! Scores of an output against reference answers, from 0 to 1. With several references the best one counts, for
//! each metric.

use std::collections::{HashMap, HashSet};

use super::similarity::{indel_ratio, lcs_length, lcs_words};

/// How a task's outputs are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scorer {
    /// F1 of the words in common, as for SQuAD.
    F1,
    /// Whether the words are the same, as for SQuAD.
    ExactMatch,
    /// ROUGE-1, ROUGE-2 and ROUGE-L, F-measures as Google's `rouge_score` computes them, without stemming.
    Rouge,
    /// ROUGE-L as the Python package `rouge` computes it, which LongBench uses.
    RougeLOfSets,
    /// 1 over the number of classes that the output names, if the right one is among them.
    Classification,
    /// Share of the output's numbers that are the right paragraph's.
    Retrieval,
    /// Share of the output's numbers that are the right one.
    Count,
    /// Edit similarity of the output's first line of code.
    Code,
}

impl Scorer {
    /// Names of the metrics that [`score`](Self::score) gives.
    pub(super) fn metrics(self) -> &'static [&'static str] {
        match self {
            Scorer::F1 => &["f1"],
            Scorer::ExactMatch => &["exact_match"],
            Scorer::Rouge => &["rouge1", "rouge2", "rougeL"],
            Scorer::RougeLOfSets => &["rougeL"],
            Scorer::Classification | Scorer::Retrieval | Scorer::Count => &["accuracy"],
            Scorer::Code => &["edit_similarity"],
        }
    }

    /// The metrics of an output; `classes` are all answers of a classification.
    pub(super) fn score(self, output: &str, references: &[String], classes: &[String]) -> Vec<f64> {
        let mut best = vec![0.0f64; self.metrics().len()];
        for reference in references {
            let found = self.against(output, reference, classes);
            best.iter_mut().zip(found).for_each(|(best, found)| *best = best.max(found));
        }
        best
    }

    fn against(self, output: &str, reference: &str, classes: &[String]) -> Vec<f64> {
        match self {
            Scorer::F1 => vec![f1(&words(output), &words(reference))],
            Scorer::ExactMatch => vec![f64::from(u8::from(words(output) == words(reference)))],
            Scorer::Rouge => {
                let (output, reference) = (alphanumeric(output), alphanumeric(reference));
                let longest = lcs_length(&output, &reference);
                vec![
                    ngram_f(&output, &reference, 1),
                    ngram_f(&output, &reference, 2),
                    f_measure(longest, output.len(), reference.len()),
                ]
            }
            Scorer::RougeLOfSets => vec![rouge_l_of_sets(output, reference)],
            Scorer::Classification => vec![classification(output, reference, classes)],
            Scorer::Retrieval => {
                let after = reference.split_once("Paragraph ").map_or("", |(_, after)| after);
                vec![numbers(after).first().map_or(0.0, |right| share(output, right))]
            }
            Scorer::Count => vec![share(output, reference.trim())],
            Scorer::Code => {
                // LongBench rounds to whole percents.
                vec![(100.0 * indel_ratio(code_line(output), reference)).round() / 100.0]
            }
        }
    }
}

/// Lower-case words without punctuation and articles: SQuAD's normalisation.
fn words(text: &str) -> Vec<String> {
    let text: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let is_article = |word: &str| matches!(word, "a" | "an" | "the");
    text.split_whitespace().filter(|word| !is_article(word)).map(str::to_string).collect()
}

/// Lower-case runs of a–z and 0–9.
fn alphanumeric(text: &str) -> Vec<String> {
    let text = text.to_lowercase();
    let parts = text.split(|c: char| !c.is_ascii_alphanumeric());
    parts.filter(|part| !part.is_empty()).map(str::to_string).collect()
}

/// 2 P R / (P + R) of `common` out of `found` and out of `wanted`.
fn f_measure(common: usize, found: usize, wanted: usize) -> f64 {
    match common {
        0 => 0.0,
        _ => 2.0 * common as f64 / (found + wanted) as f64,
    }
}

fn f1(output: &[String], reference: &[String]) -> f64 {
    f_measure(in_common(output, reference, 1), output.len(), reference.len())
}

/// ROUGE-n.
fn ngram_f(output: &[String], reference: &[String], n: usize) -> f64 {
    let count = |words: &[String]| (words.len() + 1).saturating_sub(n);
    f_measure(in_common(output, reference, n), count(output), count(reference))
}

/// How many runs of n words both have, each as often as in the one that has fewer.
fn in_common(a: &[String], b: &[String], n: usize) -> usize {
    let mut left = HashMap::<&[String], usize>::new();
    b.windows(n).for_each(|run| *left.entry(run).or_default() += 1);
    let mut take = |run: &[String]| match left.get_mut(run) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    };
    a.windows(n).filter(|run| take(run)).count()
}

/// ROUGE-L of the package `rouge` 1.0.1: texts are cut into sentences at full stops; the words of the longest common
/// subsequences of all pairs of sentences are a set, compared with the sets of all words of each text.
fn rouge_l_of_sets(output: &str, reference: &str) -> f64 {
    let sentences = |text: &str| -> Vec<Vec<String>> {
        let sentence = |part: &str| part.split_whitespace().map(str::to_string).collect();
        text.split('.').filter(|part| !part.is_empty()).map(sentence).collect()
    };
    let (output, reference) = (sentences(output), sentences(reference));
    let distinct = |text: &[Vec<String>]| text.iter().flatten().cloned().collect::<HashSet<_>>();
    let mut union = HashSet::new();
    for wanted in &reference {
        for found in &output {
            union.extend(lcs_words(wanted, found));
        }
    }
    f_measure(union.len(), distinct(&output).len(), distinct(&reference).len())
}

/// LongBench's score of a classification: classes that are only a part of the right one's name do not count.
fn classification(output: &str, reference: &str, classes: &[String]) -> f64 {
    let named = classes.iter().filter(|class| output.contains(class.as_str()));
    let named: Vec<&String> =
        named.filter(|class| *class == reference || !reference.contains(class.as_str())).collect();
    match named.iter().any(|class| *class == reference) {
        true => 1.0 / named.len() as f64,
        false => 0.0,
    }
}

/// The runs of digits.
fn numbers(text: &str) -> Vec<&str> {
    text.split(|c: char| !c.is_ascii_digit()).filter(|run| !run.is_empty()).collect()
}

/// Share of the output's numbers that are the right one; 0 without numbers.
fn share(output: &str, right: &str) -> f64 {
    let found = numbers(output);
    match found.len() {
        0 => 0.0,
        all => found.iter().filter(|number| **number == right).count() as f64 / all as f64,
    }
}

/// The first line that is neither a comment nor the mark of a code block.
fn code_line(output: &str) -> &str {
    let is_code = |line: &&str| !["`", "#", "//"].iter().any(|mark| line.contains(mark));
    output.trim_start_matches('\n').split('\n').find(is_code).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(scorer: Scorer, output: &str, references: &[&str]) -> f64 {
        let references: Vec<String> = references.iter().map(|text| text.to_string()).collect();
        scorer.score(output, &references, &[])[0]
    }

    /// Right, wrong, empty and truncated outputs.
    #[test]
    fn every_scorer_tells_right_from_wrong() {
        let long = "The committee met on Tuesday and approved the annual budget.";
        for (scorer, right, wrong, truncated) in [
            (Scorer::F1, "The Eiffel Tower", "a bridge", "Eiffel"),
            (Scorer::ExactMatch, "The Eiffel Tower.", "a bridge", "Eiffel"),
            (Scorer::Rouge, long, "Nothing else happens", "The committee met on"),
            (Scorer::RougeLOfSets, long, "Nothing else happens", "The committee met on"),
            (Scorer::Retrieval, "Paragraph 17", "Paragraph 3", "Paragraph"),
            (Scorer::Count, "17", "3", "There are"),
            (Scorer::Code, "    return x + 1", "zzz", "    return"),
        ] {
            let score = |output: &str| one(scorer, output, &[right]);
            assert!((score(right) - 1.0).abs() < 1e-7, "{scorer:?}: {}", score(right));
            assert_eq!(score(wrong), 0.0, "{scorer:?}");
            assert_eq!(score(""), 0.0, "{scorer:?}");
            assert!((0.0..1.0).contains(&score(truncated)), "{scorer:?}");
            assert_eq!(one(scorer, right, &[]), 0.0, "{scorer:?}");
            assert!((one(scorer, right, &[wrong, right]) - 1.0).abs() < 1e-7, "the best counts");
        }
    }

    #[test]
    fn f1_by_hand() {
        // "cat sat on mat" and "cat lay on mat": 3 of 4 and of 4.
        assert_eq!(one(Scorer::F1, "The cat sat on a mat!", &["the cat lay on the mat"]), 0.75);
        // Two of two words, two of four: 2 · 2 / 6.
        assert_eq!(
            one(Scorer::F1, "Marie Curie", &["Marie Skłodowska Curie, physicist"]),
            4.0 / 6.0
        );
        assert_eq!(one(Scorer::ExactMatch, "an U.S. citizen", &["us citizen"]), 1.0);
    }

    /// Values of `rouge_score` 0.1.2 (`RougeScorer`, no stemmer) and of `rouge` 1.0.1 (`rouge-l`, F).
    #[test]
    fn rouge_is_that_of_the_packages() {
        for (output, reference, wanted, of_sets) in [
            ("the cat sat on the mat", "the cat lay on the mat", [0.833333, 0.6, 0.833333], 0.8),
            ("A Cat, a cat!", "cat", [0.4, 0.0, 0.4], 0.0),
            (
                "The quick fox. It ran away from the big dog.",
                "The fox ran. A big dog was away.",
                [0.666667, 0.125, 0.555556],
                0.555556,
            ),
            ("alpha beta gamma delta", "delta gamma beta alpha", [1.0, 0.0, 0.25], 0.25),
            (
                "one two three. four five. two six",
                "two three four. one five",
                [0.833333, 0.4, 0.666667],
                0.909091,
            ),
            ("same text here.", "same text here.", [1.0, 1.0, 1.0], 1.0),
        ] {
            let found = Scorer::Rouge.score(output, &[reference.to_string()], &[]);
            for (found, wanted) in found.iter().zip(wanted) {
                assert!((found - wanted).abs() < 1e-6, "{output}: {found}, not {wanted}");
            }
            let found = one(Scorer::RougeLOfSets, output, &[reference]);
            assert!((found - of_sets).abs() < 1e-6, "{output}: {found}, not {of_sets}");
        }
    }

    #[test]
    fn classes_count_unless_they_are_parts_of_the_right_one() {
        let classes = ["Date", "Food", "Other number", "number"].map(str::to_string);
        let score = |output: &str, right: &str| {
            Scorer::Classification.score(output, &[right.to_string()], &classes)[0]
        };
        assert_eq!(score("Other number", "Other number"), 1.0);
        assert_eq!(score("Food or Date", "Food"), 0.5);
        assert_eq!(score("Food", "Date"), 0.0);
        assert_eq!(score("", "Date"), 0.0);
        assert_eq!(score("Foo", "Food"), 0.0);
    }

    #[test]
    fn numbers_are_shares_of_those_in_the_output() {
        let retrieval = |output| one(Scorer::Retrieval, output, &["Paragraph 7"]);
        assert_eq!((retrieval("Paragraph 7, not 8"), retrieval("Paragraph 17")), (0.5, 0.0));
        assert_eq!(one(Scorer::Count, "7 or 8 or 7", &["7"]), 2.0 / 3.0);
    }

    #[test]
    fn code_is_compared_by_its_first_line() {
        let output = "\n# add\n```python\nreturn x + 2\nreturn x + 1";
        assert_eq!(one(Scorer::Code, output, &["return x + 1"]), 0.92);
    }
}
