//! Small worlds in which people move and handle things, told in sentences, and a question about the end.
//!
//! The first five tasks of bAbI (Weston et al., 2015), from a simulator of our own: the sentences' and questions'
//! forms are those of the tasks.

use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha8Rng;

use super::super::choices::choices;
use super::super::held_out::Part;

const LOCATIONS: [&str; 6] = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"];
const PEOPLE: [&str; 4] = ["Daniel", "John", "Mary", "Sandra"];
const GIVERS: [&str; 4] = ["Bill", "Fred", "Jeff", "Mary"];
const THINGS: [&str; 3] = ["apple", "football", "milk"];
const GIVING_LABELS: [&str; 7] = ["Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"];
const MOVES: [&str; 5] = ["went to", "moved to", "journeyed to", "travelled to", "went back to"];
const TAKES: [&str; 4] = ["took", "got", "grabbed", "picked up"];
const DROPS: [&str; 4] = ["dropped", "left", "discarded", "put down"];
const GIVES: [&str; 3] = ["gave", "handed", "passed"];

choices! {
    /// A task.
    pub enum Task {
        /// Where a person is
        Qa1 = "qa1",
        /// Where a thing is
        Qa2 = "qa2",
        /// Where a thing was before
        Qa3 = "qa3",
        /// Which room lies in a direction of another
        Qa4 = "qa4",
        /// Who gave what to whom
        Qa5 = "qa5",
    }
}

impl Task {
    /// All answers.
    pub fn labels(self) -> &'static [&'static str] {
        match self {
            Task::Qa5 => &GIVING_LABELS,
            _ => &LOCATIONS,
        }
    }
}

/// Facts in their order, a question about them, and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Story {
    /// Sentences.
    pub facts: Vec<String>,
    /// The question.
    pub question: String,
    /// One of the task's labels.
    pub answer: &'static str,
}

impl Story {
    /// Draws a story of a task that belongs to `part`.
    pub fn draw(task: Task, rng: &mut ChaCha8Rng, part: Part) -> Story {
        part.draw(rng, |rng| {
            let story = match task {
                Task::Qa1 => moves(rng),
                Task::Qa2 => things(rng, false),
                Task::Qa3 => things(rng, true),
                Task::Qa4 => directions(rng),
                Task::Qa5 => gifts(rng),
            };
            let content = format!("{} {}", story.facts.join(" "), story.question).into_bytes();
            (story, content)
        })
    }
}

fn pick<'a>(rng: &mut ChaCha8Rng, of: &[&'a str]) -> &'a str {
    of[rng.random_range(0..of.len())]
}

/// A sentence in which a person moves to another place than `from`.
fn go(rng: &mut ChaCha8Rng, person: &str, from: Option<&'static str>) -> (&'static str, String) {
    let others: Vec<&'static str> =
        LOCATIONS.iter().copied().filter(|&place| Some(place) != from).collect();
    let place = pick(rng, &others);
    (place, format!("{person} {} the {place}.", pick(rng, &MOVES)))
}

/// Task 1: people move two to ten times; where is one of those who moved?
fn moves(rng: &mut ChaCha8Rng) -> Story {
    let mut places = [None; PEOPLE.len()];
    let mut facts = Vec::new();
    for _ in 0..rng.random_range(2..=10) {
        let person = rng.random_range(0..PEOPLE.len());
        let (place, fact) = go(rng, PEOPLE[person], places[person]);
        places[person] = Some(place);
        facts.push(fact);
    }
    let known: Vec<(&str, &'static str)> =
        PEOPLE.iter().zip(places).filter_map(|(person, place)| Some((*person, place?))).collect();
    let (person, answer) = *known.choose(rng).expect("someone moved");
    Story { facts, question: format!("Where is {person}?"), answer }
}

/// The people and things of tasks 2 and 3.
#[derive(Default)]
struct Household {
    places: [Option<&'static str>; PEOPLE.len()],
    /// Who holds each thing.
    holders: [Option<usize>; THINGS.len()],
    /// Where each thing lies, if it was put down.
    dropped: [Option<&'static str>; THINGS.len()],
    /// The places of each thing since it was first taken, without repetitions.
    trails: [Vec<&'static str>; THINGS.len()],
    facts: Vec<String>,
}

impl Household {
    /// Someone moves, takes or puts down something.
    fn step(&mut self, rng: &mut ChaCha8Rng) {
        let person = rng.random_range(0..PEOPLE.len());
        let name = PEOPLE[person];
        let held: Vec<usize> =
            (0..THINGS.len()).filter(|&thing| self.holders[thing] == Some(person)).collect();
        let here = self.places[person];
        // A thing that nobody has touched may be anywhere, so also here.
        let free = |&thing: &usize| {
            self.holders[thing].is_none()
                && (self.dropped[thing].is_none() || self.dropped[thing] == here)
        };
        let free: Vec<usize> = (0..THINGS.len()).filter(free).collect();
        match (here, rng.random_range(0..4)) {
            (Some(place), 0) if !free.is_empty() => {
                let thing = *free.choose(rng).expect("one is free");
                self.holders[thing] = Some(person);
                self.visit(thing, place);
                self.facts.push(format!(
                    "{name} {} the {} there.",
                    pick(rng, &TAKES),
                    THINGS[thing]
                ));
            }
            (Some(place), 1) if !held.is_empty() => {
                let thing = *held.choose(rng).expect("one is held");
                self.holders[thing] = None;
                self.dropped[thing] = Some(place);
                self.facts.push(format!("{name} {} the {}.", pick(rng, &DROPS), THINGS[thing]));
            }
            _ => {
                let (place, fact) = go(rng, name, here);
                self.places[person] = Some(place);
                held.into_iter().for_each(|thing| self.visit(thing, place));
                self.facts.push(fact);
            }
        }
    }

    fn visit(&mut self, thing: usize, place: &'static str) {
        if self.trails[thing].last() != Some(&place) {
            self.trails[thing].push(place);
        }
    }
}

/// Tasks 2 and 3: people move with things; where is a thing, or where was it before its last place?
fn things(rng: &mut ChaCha8Rng, before: bool) -> Story {
    let places = if before { 2 } else { 1 };
    let mut house = Household::default();
    let steps = rng.random_range(6..=20);
    let fits = |house: &Household, thing: usize| house.trails[thing].len() >= places;
    while house.facts.len() < steps || !(0..THINGS.len()).any(|thing| fits(&house, thing)) {
        house.step(rng);
    }
    let known: Vec<usize> = (0..THINGS.len()).filter(|&thing| fits(&house, thing)).collect();
    let thing = *known.choose(rng).expect("the loop ends with one");
    let (name, trail) = (THINGS[thing], &house.trails[thing]);
    if !before {
        let answer = trail[trail.len() - 1];
        return Story { question: format!("Where is the {name}?"), answer, facts: house.facts };
    }
    let [.., answer, last] = trail[..] else { unreachable!("it had two places") };
    let question = format!("Where was the {name} before the {last}?");
    Story { question, answer, facts: house.facts }
}

/// Task 4: two facts about three rooms; which lies in a direction, or of which does one lie in it?
fn directions(rng: &mut ChaCha8Rng) -> Story {
    let mut rooms = LOCATIONS;
    rooms.shuffle(rng);
    let [first, middle, last] = [rooms[0], rooms[1], rooms[2]];
    let axis = *[["north", "south"], ["east", "west"]].choose(rng).expect("there are two");
    let [side, _] = if rng.random() { axis } else { [axis[1], axis[0]] };
    // first is on one side of middle, and middle on the same side of last.
    let mut facts = vec![
        format!("The {first} is {side} of the {middle}."),
        format!("The {middle} is {side} of the {last}."),
    ];
    facts.shuffle(rng);
    let (question, answer) = match rng.random_range(0..4) {
        0 => (format!("What is {side} of the {middle}?"), first),
        1 => (format!("What is {side} of the {last}?"), middle),
        2 => (format!("What is the {first} {side} of?"), middle),
        _ => (format!("What is the {middle} {side} of?"), last),
    };
    Story { facts, question, answer }
}

/// Task 5: people move, take things and give them to each other; a question about the last gift.
fn gifts(rng: &mut ChaCha8Rng) -> Story {
    let mut holders = [None; THINGS.len()];
    let mut facts = Vec::new();
    let mut last = None;
    let steps = rng.random_range(4..=14);
    while facts.len() < steps || last.is_none() {
        let (thing, person) =
            (rng.random_range(0..THINGS.len()), rng.random_range(0..GIVERS.len()));
        let name = THINGS[thing];
        match (holders[thing], rng.random_range(0..3)) {
            (_, 0) => facts.push(go(rng, GIVERS[person], None).1),
            (None, _) => {
                holders[thing] = Some(person);
                facts.push(format!("{} {} the {name} there.", GIVERS[person], pick(rng, &TAKES)));
            }
            (Some(giver), _) if giver != person => {
                let (from, to) = (GIVERS[giver], GIVERS[person]);
                holders[thing] = Some(person);
                facts.push(format!("{from} {} the {name} to {to}.", pick(rng, &GIVES)));
                last = Some((from, name, to));
            }
            _ => {}
        }
    }
    let (from, thing, to) = last.expect("the loop ends with one");
    // Earlier gifts may fit the question, too: it is about the last that does, as bAbI's are.
    let (question, answer) = match rng.random_range(0..3) {
        0 => (format!("Who gave the {thing} to {to}?"), from),
        1 => (format!("Who did {from} give the {thing} to?"), to),
        _ => (format!("What did {from} give to {to}?"), thing),
    };
    Story { facts, question, answer }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use rand::SeedableRng;

    use super::*;

    fn stories(task: Task) -> impl Iterator<Item = Story> {
        (0..500)
            .map(move |seed| Story::draw(task, &mut ChaCha8Rng::seed_from_u64(seed), Part::Test))
    }

    fn last_word(text: &str) -> &str {
        text.trim_end_matches(['.', '?']).rsplit(' ').next().unwrap()
    }

    #[test]
    fn people_are_where_they_went_last() {
        for story in stories(Task::Qa1) {
            let person = last_word(&story.question);
            let last = story.facts.iter().rev().find(|fact| fact.starts_with(person)).unwrap();
            assert_eq!(last_word(last), story.answer, "{story:?}");
            assert!((2..=10).contains(&story.facts.len()));
        }
    }

    /// The places of a thing, from the sentences alone.
    fn trail(facts: &[String], thing: &str) -> Vec<String> {
        let (mut places, mut holder) = (HashMap::<String, String>::new(), None::<String>);
        let mut trail: Vec<String> = Vec::new();
        for fact in facts {
            let person = fact.split(' ').next().unwrap().to_string();
            if fact.contains(&format!("the {thing}")) {
                let took = fact.ends_with("there.");
                holder = took.then(|| person.clone());
            } else if !THINGS.iter().any(|other| fact.contains(other)) {
                places.insert(person.clone(), last_word(fact).to_string());
            }
            if holder.as_ref() == Some(&person) && trail.last() != places.get(&person) {
                trail.push(places[&person].clone());
            }
        }
        trail
    }

    #[test]
    fn things_are_where_they_were_carried() {
        for story in stories(Task::Qa2) {
            let trail = trail(&story.facts, last_word(&story.question));
            assert_eq!(trail.last().map(String::as_str), Some(story.answer), "{story:?}");
        }
        for story in stories(Task::Qa3) {
            let thing = story.question.split(' ').nth(3).unwrap();
            let trail = trail(&story.facts, thing);
            assert_eq!(trail[trail.len() - 1], last_word(&story.question), "{story:?}");
            assert_eq!(trail[trail.len() - 2], story.answer, "{story:?}");
        }
    }

    #[test]
    fn rooms_lie_where_the_facts_say() {
        for story in stories(Task::Qa4) {
            assert_eq!(story.facts.len(), 2);
            let fact = |fact: &String| {
                let words: Vec<&str> = fact.trim_end_matches('.').split(' ').collect();
                (words[1].to_string(), words[3].to_string(), words[6].to_string())
            };
            let words: Vec<&str> = story.question.trim_end_matches('?').split(' ').collect();
            let answers: Vec<String> = story
                .facts
                .iter()
                .map(fact)
                .filter_map(|(a, side, b)| match words[2] {
                    "the" => (words[3] == a && words[4] == side).then_some(b),
                    asked => (asked == side && words[5] == b).then_some(a),
                })
                .collect();
            assert_eq!(answers, [story.answer], "{story:?}");
        }
    }

    #[test]
    fn gifts_are_answered_by_the_last_that_fits() {
        for story in stories(Task::Qa5) {
            let words: Vec<&str> = story.question.trim_end_matches('?').split(' ').collect();
            let fits = |fact: &&String| {
                let w: Vec<&str> = fact.trim_end_matches('.').split(' ').collect();
                if w.len() != 6 || w[4] != "to" {
                    return false;
                }
                let [from, thing, to] = [w[0], w[3], w[5]];
                match words[..] {
                    ["Who", "gave", "the", t, "to", p] => thing == t && to == p,
                    ["Who", "did", p, "give", "the", t, "to"] => from == p && thing == t,
                    ["What", "did", p, "give", "to", q] => from == p && to == q,
                    _ => panic!("{story:?}"),
                }
            };
            let last = story.facts.iter().rev().find(fits).unwrap();
            assert!(last.contains(story.answer), "{story:?}");
            assert!(!story.question.contains(story.answer), "{story:?}");
        }
    }

    #[test]
    fn every_answer_and_question_comes() {
        for task in Task::ALL {
            let answers: HashSet<&str> = stories(task).map(|story| story.answer).collect();
            assert_eq!(answers.len(), task.labels().len(), "{task:?}");
            assert!(answers.iter().all(|answer| task.labels().contains(answer)));
        }
    }
}
