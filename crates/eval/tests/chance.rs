//! For every suite: a model that answers from its prompt gets the best score, and a model that answers at random that
//! of chance; and no sample of a generated task could come in training.

use std::path::Path;

use longwall_data::SourceConfig;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::mqar::Form;
use longwall_data::synthetic::symbols::content;
use longwall_data::synthetic::word_problem::{Group, WordProblem};
use longwall_eval::suites::babilong::BabilongOptions;
use longwall_eval::suites::extrapolate::ExtrapolateOptions;
use longwall_eval::suites::fflm::FflmOptions;
use longwall_eval::suites::longtext_qa::LongtextQaOptions;
use longwall_eval::suites::mqrar::MqrarOptions;
use longwall_eval::suites::mrcr::MrcrOptions;
use longwall_eval::suites::multi_needle::MultiNeedleOptions;
use longwall_eval::suites::niah::{HaystackKind, NiahOptions};
use longwall_eval::suites::passkey::PasskeyOptions;
use longwall_eval::suites::perplexity::PerplexityOptions;
use longwall_eval::suites::phonebook::PhonebookOptions;
use longwall_eval::suites::ruler::RulerOptions;
use longwall_eval::suites::word_problem::WordProblemOptions;
use longwall_eval::{Report, SuiteConfig};
use serde_json::Value;

use crate::common::{FakeModel, TokenLogP, evaluate_with, magic_number, sorted_samples};
use crate::{babilong, flip_flop, longtext_qa, lookup, mrcr, retrieval, ruler, symbols, zero_shot};

/// Suites that measure the model itself and ask it nothing.
const WITHOUT_ANSWERS: [&str; 1] = ["attention-stats"];

/// A suite with a model that answers from its prompt and one that answers at random.
struct Case {
    config: SuiteConfig,
    /// A score of the headline.
    metric: &'static str,
    solver: FakeModel,
    best: f64,
    random: FakeModel,
    chance: f64,
}

/// A number that depends on a text in no simple way.
fn noise(text: &str) -> u64 {
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    symbols::noise(&tokens, 0)
}

/// Generates `reply` of a number that depends on the prompt in no simple way.
fn random_text(reply: impl Fn(u64, &str) -> String + 'static) -> FakeModel {
    FakeModel::bytes(move |prompt| reply(noise(prompt), prompt))
}

/// Predicts one of `count` symbols from `first` on, all with the same probability.
fn random_symbol(first: u32, count: u64) -> FakeModel {
    symbols::model(move |tokens, place| first + (symbols::noise(tokens, place) % count) as u32)
}

/// One of any labels that the question's answers have.
fn random_label(noise: u64, prompt: &str) -> String {
    let rooms = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"];
    let gifts = ["Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"];
    let labels: &[&str] = if prompt.contains("give things") { &gifts } else { &rooms };
    labels[(noise % labels.len() as u64) as usize].to_string()
}

fn retrieval_case(name: &str) -> Option<Case> {
    let digits = |count| random_text(move |noise, _| format!(" {:0count$}", noise % 9_999_991));
    let (config, solver, random): (SuiteConfig, FakeModel, FakeModel) = match name {
        "passkey" => {
            let own = PasskeyOptions { lengths: vec![400], trials: 40, ..Default::default() };
            let guess = random_text(|noise, _| format!(" {}", 1 + noise % 50_000));
            (own.into(), FakeModel::bytes(retrieval::right), guess)
        }
        "niah" => {
            let (lengths, haystack) = (Some(vec![600]), HaystackKind::Noise);
            let own = NiahOptions { lengths, haystack, depths: 3, ..Default::default() };
            (own.into(), FakeModel::bytes(|prompt| format!(" {}", magic_number(prompt))), digits(7))
        }
        "multi-needle" => {
            let own = MultiNeedleOptions { lengths: vec![900], trials: 20, ..Default::default() };
            let solver = FakeModel::bytes(|prompt| lookup::numbers(prompt).join(", "));
            (own.into(), solver, digits(7))
        }
        "ruler" => {
            let own = RulerOptions { lengths: vec![8000], trials: 2, ..Default::default() };
            (own.into(), FakeModel::bytes(ruler::solve), digits(7))
        }
        "phonebook" => {
            let own = PhonebookOptions { lengths: vec![600], trials: 40, ..Default::default() };
            (own.into(), FakeModel::bytes(lookup::phone_number), digits(10))
        }
        _ => return None,
    };
    // Numbers of five to ten digits are not guessed.
    Some(Case { config, metric: "accuracy", solver, best: 1.0, random, chance: 0.0 })
}

fn reading_case(name: &str, dir: &Path) -> Option<Case> {
    Some(match name {
        "babilong" => Case {
            config: BabilongOptions { lengths: vec![4000], trials: 60, ..Default::default() }
                .into(),
            metric: "accuracy",
            solver: FakeModel::bytes(|prompt| format!(" {}.", babilong::solve(prompt))),
            best: 1.0,
            random: random_text(random_label),
            chance: (4.0 / 6.0 + 1.0 / 7.0) / 5.0,
        },
        "mrcr" => Case {
            config: MrcrOptions { lengths: vec![4000], trials: 10, ..Default::default() }.into(),
            metric: "similarity_4@4000",
            solver: FakeModel::bytes(|prompt| {
                let (texts, at) = mrcr::relevant(prompt);
                format!(" {} {}", mrcr::code(prompt), texts[at])
            }),
            best: 1.0,
            // Without the random string, nothing counts.
            random: random_text(|noise, _| format!(" {noise:x} some text")),
            chance: 0.0,
        },
        "zero-shot" => {
            let with = |score: fn(&str, &str) -> f64| FakeModel {
                continuation: Box::new(score),
                ..FakeModel::bytes(|_| String::new())
            };
            Case {
                config: zero_shot::options(dir, &["colours/rc_0shot"]).into(),
                metric: "colours/rc_0shot:acc",
                solver: with(|context, colour| match (context.contains("Coal"), colour) {
                    (true, " black") | (false, " white") => -0.5,
                    _ => -3.0,
                }),
                best: 1.0,
                random: with(|context, colour| {
                    -1.0 - (noise(&format!("{context}{colour}")) % 1000) as f64
                }),
                chance: 0.5,
            }
        }
        "longtext-qa" => Case {
            config: LongtextQaOptions {
                tasks: vec!["longbench/qasper".to_string()],
                ..longtext_qa::options(dir)
            }
            .into(),
            metric: "longbench/qasper:f1@700",
            solver: FakeModel::bytes(|prompt| {
                let grey = prompt.contains("colour is the sky?");
                if grey { " grey" } else { " The grass" }.to_string()
            }),
            best: 1.0,
            random: random_text(|noise, _| format!(" {noise:x}")),
            chance: 0.0,
        },
        _ => return None,
    })
}

fn prediction_case(name: &str) -> Option<Case> {
    Some(match name {
        "fflm" => {
            let sequences = Some(40);
            let (sparse_sequences, dense_sequences) = (Some(1), Some(1));
            Case {
                config: FflmOptions {
                    lengths: vec![128],
                    sequences,
                    sparse_sequences,
                    dense_sequences,
                }
                .into(),
                metric: "error_in_distribution@128",
                solver: flip_flop::model(|read| flip_flop::register(read).0),
                best: 0.0,
                random: flip_flop::model(|read| b'0' + (symbols::noise(read, 0) % 2) as u8),
                chance: 0.5,
            }
        }
        "mqar" => Case {
            config: symbols::mqar(Form::Standard, &[128, 256], 40),
            metric: "accuracy",
            solver: symbols::model(|tokens, place| {
                // The pairs fill the first half; behind it, random symbols may look like one.
                let mut known = tokens[..tokens.len() / 2].to_vec();
                known.push(tokens[place]);
                symbols::after_last(&known, known.len() - 1, 1)
            }),
            best: 1.0,
            random: random_symbol(128, 128),
            chance: 1.0 / 128.0,
        },
        "mqrar" => Case {
            config: MqrarOptions { trials: 10, ..Default::default() }.into(),
            metric: "accuracy_1_back@768",
            solver: symbols::model(|tokens, place| symbols::recalled(tokens, place, 1)),
            best: 1.0,
            random: random_symbol(32, 64),
            chance: 1.0 / 64.0,
        },
        "word-problem" => {
            let problem = WordProblem::new(Group::A5);
            Case {
                config: WordProblemOptions { lengths: vec![10], trials: 200, ..Default::default() }
                    .into(),
                metric: "final_accuracy",
                solver: symbols::model(move |tokens, place| {
                    tokens[..=place].iter().fold(0, |product, &g| problem.product(product, g))
                }),
                best: 1.0,
                random: random_symbol(0, 60),
                chance: 1.0 / 60.0,
            }
        }
        _ => return None,
    })
}

/// Losses of a model that knows the text, and of one to which all tokens are alike.
fn loss_case(name: &str, dir: &Path) -> Option<Case> {
    let (config, metric, chance): (SuiteConfig, _, _) = match name {
        "extrapolate" => {
            let own = ExtrapolateOptions { lengths: Some(vec![64, 128]), ..Default::default() };
            (own.into(), "loss@128", 257f64.ln())
        }
        "perplexity" => {
            let text = dir.join("text.txt");
            std::fs::write(&text, "A short text, of which every byte is a token.").unwrap();
            let lengths = Some(vec![16]);
            let own = PerplexityOptions { lengths, text: vec![text], ..Default::default() };
            (own.into(), "bits_per_byte@16", 257f64.log2())
        }
        _ => return None,
    };
    let knows: TokenLogP = Box::new(|_, _, _| 0.0);
    let solver = FakeModel { token_log_p: knows, ..FakeModel::bytes(|_| String::new()) };
    let random = FakeModel::bytes(|_| String::new());
    Some(Case { config, metric, solver, best: 0.0, random, chance })
}

fn case(name: &str, dir: &Path) -> Case {
    retrieval_case(name)
        .or_else(|| reading_case(name, dir))
        .or_else(|| prediction_case(name))
        .or_else(|| loss_case(name, dir))
        .unwrap_or_else(|| panic!("{name} has no case here: add one"))
}

/// The cases of all suites that ask something.
fn each(check: impl Fn(&str, Case, &Path)) {
    for name in SuiteConfig::NAMES.iter().filter(|name| !WITHOUT_ANSWERS.contains(name)) {
        let dir = tempfile::tempdir().unwrap();
        let case = case(name, dir.path());
        assert_eq!(case.config.name(), *name);
        check(name, case, &dir.path().join("out"));
    }
}

fn run(config: &SuiteConfig, model: &mut FakeModel, out: &Path) -> Report {
    evaluate_with(config, model, out, true, Some(&babilong::held_out())).unwrap()
}

#[test]
fn a_model_that_answers_from_its_prompt_gets_the_best_score() {
    each(|name, mut case, out| {
        let report = run(&case.config, &mut case.solver, out);
        assert_eq!(report.headline[case.metric], Some(case.best), "{name}: {report}");
        assert!(report.samples > 0);
    });
}

#[test]
fn a_model_that_answers_at_random_scores_chance() {
    each(|name, mut case, out| {
        let report = run(&case.config, &mut case.random, out);
        let found = report.headline_estimates[case.metric];
        let value = found.value.unwrap();
        // Within the 95 % interval; a score without variance has none.
        let inside = found
            .low
            .zip(found.high)
            .is_some_and(|(low, high)| (low..=high).contains(&case.chance));
        let near = (value - case.chance).abs() < 1e-5;
        assert!(inside || near, "{name}: {found:?}, chance is {}", case.chance);
    });
}

/// What a sample asks for, as its source holds it out.
fn asked(name: &str, sample: &Value) -> Vec<Vec<u8>> {
    let text = |key: &str| sample[key].as_str().unwrap_or_default();
    let bytes = |text: &str| text.as_bytes().to_vec();
    match name {
        "passkey" | "niah" | "mrcr" => vec![bytes(text("expected"))],
        "multi-needle" => text("expected").split(", ").map(bytes).collect(),
        "phonebook" => {
            let (_, question) = text("prompt").rsplit_once("\n\n").unwrap();
            vec![bytes(&format!("{question} {}\n", text("expected")))]
        }
        "ruler" => {
            let answers: Vec<String> = serde_json::from_str(text("expected")).unwrap();
            match text("prompt").contains("special magic") {
                true => answers.into_iter().map(String::into_bytes).collect(),
                false => vec![answers.join(" ").into_bytes()],
            }
        }
        "babilong" => {
            let (_, rest) = text("prompt").rsplit_once("Text:").unwrap();
            let (text, question) = rest.split_once("\n\nQuestion: ").unwrap();
            let facts = babilong::facts(text);
            let facts = facts.iter().map(|words| words.join(" ") + ".");
            let (question, _) = question.split_once("\nAnswer:").unwrap();
            vec![bytes(&format!("{} {question}", facts.collect::<Vec<_>>().join(" ")))]
        }
        "fflm" => vec![bytes(text("prompt"))],
        // Symbols are byte tokens.
        "mqar" | "mqrar" | "word-problem" => vec![content(&symbols::tokens(sample))],
        _ => panic!("{name} is a training source: say here what it holds out"),
    }
}

#[test]
fn no_sample_of_a_training_source_could_be_trained_on() {
    each(|name, mut case, out| {
        if !SourceConfig::KINDS.contains(&name) {
            return;
        }
        run(&case.config, &mut case.random, out);
        for sample in sorted_samples(out) {
            for content in asked(name, &sample) {
                let shown = String::from_utf8_lossy(&content).into_owned();
                assert_eq!(Part::of(&content), Part::Test, "{name}: {shown:?}");
            }
        }
    });
}

/// All suites whose samples are generated, and need no text or files, are training sources of the same name.
#[test]
fn every_generated_suite_is_a_training_source() {
    const OF_TEXT: [&str; 5] =
        ["extrapolate", "perplexity", "zero-shot", "longtext-qa", "attention-stats"];
    for name in SuiteConfig::NAMES {
        assert_eq!(SourceConfig::KINDS.contains(name), !OF_TEXT.contains(name), "{name}");
    }
}
