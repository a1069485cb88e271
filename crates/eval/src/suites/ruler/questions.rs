//! Questions about one or several of many documents, from the files of SQuAD and HotpotQA.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use longwall_data::Tokenizer;
use longwall_data::synthetic::ruler::fill;
use rand::seq::{SliceRandom, index};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{Built, Task};
use crate::EvalError;
use crate::text::read_text;

const INSTRUCTION: &str = "Answer the question based on the given documents. Only give me the answer and do not output any other words.";

/// A question, its references, and the documents it is about.
struct Question {
    text: String,
    answers: Vec<String>,
    /// Those that hold the answer.
    documents: Vec<usize>,
    /// Those of the same article, which come before all others.
    related: Vec<usize>,
}

/// The questions of a file.
pub(super) struct Questions {
    task: Task,
    questions: Vec<Question>,
    documents: Vec<String>,
    sha256: String,
}

/// SQuAD's file.
#[derive(Deserialize)]
struct Squad {
    data: Vec<Article>,
}

#[derive(Deserialize)]
struct Article {
    paragraphs: Vec<Paragraph>,
}

#[derive(Deserialize)]
struct Paragraph {
    context: String,
    qas: Vec<SquadQuestion>,
}

#[derive(Deserialize)]
struct SquadQuestion {
    question: String,
    answers: Vec<SquadAnswer>,
    #[serde(default)]
    is_impossible: bool,
}

#[derive(Deserialize)]
struct SquadAnswer {
    text: String,
}

/// A question of HotpotQA's file: its documents are titles with sentences.
#[derive(Deserialize)]
struct HotpotQuestion {
    question: String,
    answer: String,
    context: Vec<(String, Vec<String>)>,
}

impl Questions {
    /// Reads the file of a task.
    ///
    /// # Errors
    /// A file that cannot be read, has another form, or no question.
    pub(super) fn read(task: Task, path: &Path) -> Result<Self, EvalError> {
        let text = read_text(path)?;
        let parsed = match task {
            Task::Qa1 => serde_json::from_str(&text).map(squad),
            _ => serde_json::from_str(&text).map(hotpot),
        };
        let (form, remedy) = match task {
            Task::Qa1 => ("SQuAD", "give --squad SQuAD's dev-v2.0.json"),
            _ => ("HotpotQA", "give --hotpot HotpotQA's hotpot_dev_distractor_v1.json"),
        };
        let error = |reason: String| EvalError::Text {
            what: format!(
                "ruler: {} has no questions in the form of {form}: {reason}",
                path.display()
            ),
            remedy: remedy.to_string(),
        };
        let (questions, documents) = parsed.map_err(|reason| error(reason.to_string()))?;
        if questions.is_empty() {
            return Err(error("it holds none with an answer".to_string()));
        }
        let sha256 = format!("{:x}", Sha256::digest(&text));
        Ok(Questions { task, questions, documents, sha256 })
    }

    pub(super) fn describe(&self) -> Value {
        json!({
            "task": self.task,
            "questions": self.questions.len(),
            "documents": self.documents.len(),
            "sha256": self.sha256,
        })
    }

    /// Index of the question, among those of the first `samples`, whose prompt without further documents takes most
    /// tokens.
    pub(super) fn longest(&self, samples: usize, tokenizer: &Tokenizer) -> usize {
        let tokens = |index: &usize| {
            let Question { documents, text, .. } = &self.questions[*index];
            tokenizer.encode(&self.prompt(documents, text)).len()
        };
        (0..samples.min(self.questions.len())).max_by_key(tokens).unwrap_or(0)
    }

    /// The prompt of a sample: the question of its index, and as many documents as fit.
    pub(super) fn build(
        &self,
        sample: usize,
        budget: usize,
        rng: &mut ChaCha8Rng,
        tokenizer: &Tokenizer,
    ) -> Result<Built, usize> {
        let question = &self.questions[sample % self.questions.len()];
        let mut related = question.related.clone();
        related.shuffle(rng);
        let mut order = question.documents.clone();
        order.extend(related);
        let known: BTreeSet<usize> = order.iter().copied().collect();
        let all = index::sample(rng, self.documents.len(), self.documents.len());
        order.extend(all.into_iter().filter(|at| !known.contains(at)));
        let shuffle: ChaCha8Rng = rng.clone();
        let least = question.documents.len();
        let prompt = fill((least, order.len()), budget, tokenizer, |count| {
            let mut documents = order[..count].to_vec();
            documents.shuffle(&mut shuffle.clone());
            self.prompt(&documents, &question.text)
        })?;
        Ok(Built { prompt, answers: question.answers.clone() })
    }

    fn prompt(&self, documents: &[usize], question: &str) -> String {
        let documents = documents.iter().enumerate();
        let documents =
            documents.map(|(n, &at)| format!("Document {}:\n{}", n + 1, self.documents[at]));
        format!(
            "{INSTRUCTION}\n\nThe following are given documents.\n\n{}\n\n{INSTRUCTION}\n\nQuestion: {question} \
             Answer:",
            documents.collect::<Vec<_>>().join("\n\n")
        )
    }
}

/// Gives equal texts one index.
#[derive(Default)]
struct Documents {
    texts: Vec<String>,
    index: HashMap<String, usize>,
}

impl Documents {
    fn add(&mut self, text: String) -> usize {
        *self.index.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            self.texts.len() - 1
        })
    }
}

fn squad(file: Squad) -> (Vec<Question>, Vec<String>) {
    let (mut documents, mut questions) = (Documents::default(), Vec::new());
    for article in file.data {
        let at: Vec<usize> =
            article.paragraphs.iter().map(|p| documents.add(p.context.clone())).collect();
        for (paragraph, &document) in article.paragraphs.into_iter().zip(&at) {
            let related: Vec<usize> =
                at.iter().copied().filter(|&other| other != document).collect();
            for SquadQuestion { question, answers, is_impossible } in paragraph.qas {
                if !is_impossible && !answers.is_empty() {
                    let answers = answers.into_iter().map(|answer| answer.text).collect();
                    let (documents, related) = (vec![document], related.clone());
                    questions.push(Question { text: question, answers, documents, related });
                }
            }
        }
    }
    (questions, documents.texts)
}

fn hotpot(file: Vec<HotpotQuestion>) -> (Vec<Question>, Vec<String>) {
    let mut documents = Documents::default();
    let question = |HotpotQuestion { question, answer, context }| Question {
        text: question,
        answers: vec![answer],
        documents: {
            let add = |(title, sentences): (String, Vec<String>)| {
                documents.add(format!("{title}\n{}", sentences.concat()))
            };
            context.into_iter().map(add).collect()
        },
        related: Vec::new(),
    };
    let questions = file.into_iter().map(question).collect();
    (questions, documents.texts)
}

#[cfg(test)]
mod tests {
    use longwall_data::TokenizerConfig;
    use rand::SeedableRng;

    use super::*;

    fn read(task: Task, text: &str) -> Result<Questions, EvalError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("questions.json");
        std::fs::write(&path, text).unwrap();
        Questions::read(task, &path)
    }

    fn prompt(questions: &Questions, budget: usize) -> Result<(String, Vec<String>), usize> {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let built = questions.build(0, budget, &mut rng, &tokenizer)?;
        Ok((tokenizer.decode(&built.prompt), built.answers))
    }

    #[test]
    fn squads_paragraphs_are_documents() {
        let text = r#"{ "data": [
            { "paragraphs": [
                { "context": "The mill is red.", "qas": [
                    { "question": "What colour is the mill?", "answers": [{ "text": "red" }, { "text": "Red" }] },
                    { "question": "Who owns it?", "answers": [], "is_impossible": true } ] },
                { "context": "The barn is old.", "qas": [] } ] },
            { "paragraphs": [{ "context": "Rivers flow.", "qas": [] }, { "context": "Ice melts.", "qas": [] }] } ] }"#;
        let questions = read(Task::Qa1, text).unwrap();
        assert_eq!((questions.questions.len(), questions.documents.len()), (1, 4));
        let (whole, answers) = prompt(&questions, 10_000).unwrap();
        assert_eq!(answers, ["red", "Red"]);
        assert!(whole.starts_with(INSTRUCTION) && whole.contains("documents.\n\nDocument 1:\n"));
        assert!(whole.ends_with("words.\n\nQuestion: What colour is the mill? Answer:"));
        assert_eq!(whole.matches("Document ").count(), 4);
        // With room for two, the article's other paragraph comes before those of other articles.
        let (two, _) = prompt(&questions, whole.len() - 50).unwrap();
        assert!(two.contains("The mill is red.") && two.contains("The barn is old."), "{two}");
        assert_eq!(two.matches("Document ").count(), 2);
        assert!(prompt(&questions, 100).is_err_and(|needed| needed > 300));
    }

    #[test]
    fn hotpots_documents_have_titles() {
        let text = r#"[{ "question": "Which is older?", "answer": "the mill", "context":
            [["Mill", ["It is old. ", "Very."]], ["Barn", ["It is new."]]], "type": "comparison" }]"#;
        let (text, answers) = prompt(&read(Task::Qa2, text).unwrap(), 10_000).unwrap();
        assert_eq!(answers, ["the mill"]);
        assert!(text.contains(":\nMill\nIt is old. Very.") && text.contains(":\nBarn\nIt is new."));
    }

    #[test]
    fn the_longest_question_is_known_before_a_run() {
        let question = |text: &str| {
            format!(r#"{{ "question": "{text}", "answer": "x", "context": [["T", ["{text}"]]] }}"#)
        };
        let text = format!("[{},{},{}]", question("ab"), question("abcd"), question("abc"));
        let questions = read(Task::Qa2, &text).unwrap();
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let longest = |samples| questions.longest(samples, &tokenizer);
        assert_eq!([longest(1), longest(2), longest(100)], [0, 1, 1]);
    }

    #[test]
    fn files_of_another_form_are_refused() {
        for (task, text, flag) in [
            (Task::Qa1, "[]", "--squad"),
            (Task::Qa2, "{}", "--hotpot"),
            (Task::Qa2, "[]", "--hotpot"),
        ] {
            let error = read(task, text).err().unwrap().to_string();
            assert!(error.contains("questions.json has no questions in the form of "), "{error}");
            assert!(error.contains(flag), "{error}");
        }
    }
}
