//! What ranks open must be equal.

use std::fs;

use super::*;
use crate::checkpoint::WeightsSelector;
use crate::run::Source;

/// Two ranks, each with its configuration and the run that it starts from.
fn two(configs: [&RunConfig; 2], from: [Option<&Path>; 2]) -> Vec<Result<Outcome, TrainError>> {
    on_ranks(2, |ranks| {
        let rank = Collective::<TestBackend>::world(&ranks).rank;
        let open = |path| Source::open(path, WeightsSelector::Model).unwrap();
        let mut options = options(Precision::F32, RunStart::New, StopFlag::new());
        options.from = from[rank].map(open);
        let (device, console, none) = (Default::default(), &mut SilentConsole, &mut NoEvaluations);
        train_as_rank::<TestBackend>(configs[rank], &device, &options, &ranks, console, none)
    })
}

/// The errors of two ranks, which end before there is a folder.
fn errors(configs: [&RunConfig; 2], from: [Option<&Path>; 2]) -> [String; 2] {
    let results = two(configs, from);
    assert!(!configs[0].run_dir().exists());
    let errors: Vec<String> = results.into_iter().map(|x| x.unwrap_err().to_string()).collect();
    errors.try_into().unwrap()
}

#[test]
fn ranks_with_copies_of_a_corpus_train() {
    let (here, there) = (Sandbox::new(), Sandbox::new());
    let [here, there] = [&here, &there].map(|sandbox| config(sandbox, "copies", &[]));
    for outcome in two([&here, &there], [None; 2]) {
        assert!(outcome.unwrap().is_finished());
    }
}

#[test]
fn a_rank_with_another_corpus_is_named() {
    let (sandbox, other) = (Sandbox::new(), tempfile::tempdir().unwrap());
    for file in 0..40 {
        let text = format!("Another file {file}: the lazy dog sleeps.\n").repeat(9);
        fs::write(other.path().join(format!("{file}.txt")), text).unwrap();
    }
    let source = format!("data.sources=[{{ kind = \"text\", paths = [{:?}] }}]", other.path());
    let (here, there) = (config(&sandbox, "here", &[]), config(&sandbox, "here", &[&source]));
    for error in errors([&here, &there], [None; 2]) {
        assert!(error.starts_with("data.sources[0] (text): "), "{error}");
        assert!(error.contains(") on rank 1 (") && error.contains("tokens ("), "{error}");
        assert!(error.contains("hint: all ranks need the same corpora"), "{error}");
    }
}

#[test]
fn a_rank_with_other_starting_weights_is_named() {
    let sandbox = Sandbox::new();
    let (here, there) = (config(&sandbox, "here", &[]), config(&sandbox, "here", &["run.seed=8"]));
    for error in errors([&here, &there], [None; 2]) {
        assert!(error.starts_with("the digest of the starting weights: "), "{error}");
    }
    let old =
        |name: &str, seed: &str| run(1, &config(&sandbox, name, &[seed]), RunStart::New).run_dir;
    let [one, other] = [old("one", "run.seed=1"), old("other", "run.seed=2")];
    for error in errors([&here, &here], [Some(&one), Some(&other)]) {
        let told = "the weights that the run starts from: model of step 12 (";
        assert!(error.starts_with(told), "{error}");
    }
}
