//! BABILong (Kuratov et al., 2024): facts of the bAbI tasks hidden in long text, and a question about them.
//!
//! The facts come from a simulator of our own. A story, its facts and question, belongs to training or to tests.

mod stories;

use rand::Rng;
use rand_chacha::ChaCha8Rng;

pub use self::stories::{Story, Task};
use super::haystack::Haystack;
use crate::Tokenizer;

/// No fact stands before the last end of a sentence in this many tokens at the start of the text.
const FIRST_SENTENCES: f64 = 200.0;

/// What the prompt says before the facts: the task, and two solved examples.
fn introduction(task: Task) -> &'static str {
    match task {
        Task::Qa1 => {
            "The text below hides facts about where people are. Answer the question from these facts alone: a \
             person is where they went last. The answer is one word.\n\n\
             Facts: Mary went to the office. John moved to the garden. Mary travelled to the kitchen.\n\
             Question: Where is Mary?\nAnswer: kitchen.\n\n\
             Facts: Sandra journeyed to the hallway. Daniel went to the bedroom.\n\
             Question: Where is Sandra?\nAnswer: hallway.\n\n"
        }
        Task::Qa2 => {
            "The text below hides facts about people who carry things. Answer the question from these facts alone: \
             a thing moves with the person who took it, and stays where it was put down. The answer is one \
             word.\n\n\
             Facts: Mary went to the office. Mary took the milk there. Mary moved to the garden.\n\
             Question: Where is the milk?\nAnswer: garden.\n\n\
             Facts: John moved to the bedroom. John got the apple there. John dropped the apple. John went to the \
             kitchen.\nQuestion: Where is the apple?\nAnswer: bedroom.\n\n"
        }
        Task::Qa3 => {
            "The text below hides facts about people who carry things. Answer the question from these facts alone: \
             it asks where a thing was before its last place. The answer is one word.\n\n\
             Facts: Mary went to the office. Mary took the milk there. Mary moved to the garden.\n\
             Question: Where was the milk before the garden?\nAnswer: office.\n\n\
             Facts: John moved to the bedroom. John got the apple there. John went to the hallway. John went to \
             the kitchen.\nQuestion: Where was the apple before the kitchen?\nAnswer: hallway.\n\n"
        }
        Task::Qa4 => {
            "The text below hides facts about how rooms lie. Answer the question from these facts alone. The answer \
             is one word.\n\n\
             Facts: The office is north of the kitchen. The garden is north of the office.\n\
             Question: What is north of the office?\nAnswer: garden.\n\n\
             Facts: The bathroom is west of the hallway. The bedroom is west of the bathroom.\n\
             Question: What is the bathroom west of?\nAnswer: hallway.\n\n"
        }
        Task::Qa5 => {
            "The text below hides facts about people who give things to each other. Answer the question from these \
             facts alone, about the last gift that it fits. The answer is one word.\n\n\
             Facts: Mary took the milk there. Mary gave the milk to Fred.\n\
             Question: Who gave the milk to Fred?\nAnswer: Mary.\n\n\
             Facts: Bill got the apple there. Jeff went to the office. Bill handed the apple to Jeff.\n\
             Question: What did Bill give to Jeff?\nAnswer: apple.\n\n"
        }
    }
}

/// The tokens of a prompt without its text.
pub struct Parts {
    before: Vec<u32>,
    facts: Vec<Vec<u32>>,
    after: Vec<u32>,
}

impl Parts {
    /// Those of a story.
    pub fn of(task: Task, story: &Story, tokenizer: &Tokenizer) -> Self {
        Parts {
            before: tokenizer.encode(&format!("{}Text:", introduction(task))),
            facts: story.facts.iter().map(|fact| tokenizer.encode(&format!(" {fact}"))).collect(),
            after: tokenizer.encode(&format!("\n\nQuestion: {}\nAnswer:", story.question)),
        }
    }

    /// How many they are.
    pub fn tokens(&self) -> usize {
        self.before.len() + self.after.len() + self.facts.iter().map(Vec::len).sum::<usize>()
    }

    /// The tokens of a prompt in which the facts stand alone.
    pub fn alone(&self) -> Vec<u32> {
        [&self.before[..], &self.facts.concat(), &self.after].concat()
    }

    /// The tokens of a prompt with exactly `budget` tokens, in which the facts are spread over text.
    ///
    /// # Errors
    /// The tokens without text, if they are more.
    pub fn hidden_in(
        &self,
        haystack: &Haystack,
        budget: usize,
        rng: &mut ChaCha8Rng,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, usize> {
        let count = budget.checked_sub(self.tokens()).ok_or(self.tokens())?;
        let hay = haystack.take(rng, count);
        let mut depths: Vec<f64> = self.facts.iter().map(|_| rng.random()).collect();
        depths.sort_by(f64::total_cmp);
        // The text begins anywhere in a sentence: the first fact stands behind a whole one.
        let start = (FIRST_SENTENCES / count as f64).min(0.5);
        let (start, mut done) = (haystack.place(&hay, start, tokenizer), 0);
        let mut prompt = self.before.clone();
        for (depth, fact) in depths.into_iter().zip(&self.facts) {
            let at = haystack.place(&hay, depth, tokenizer).max(start).max(done);
            prompt.extend(&hay[done..at]);
            prompt.extend(fact);
            done = at;
        }
        prompt.extend(&hay[done..]);
        prompt.extend(&self.after);
        Ok(prompt)
    }
}
