//! Runs that differ in their seed alone form a group.

use longwall_train::checkpoint::affects_results;
use longwall_train::config::{Difference, RunConfig};
use serde::Serialize;

use crate::runs::Run;

/// Runs of one configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Group {
    pub name: String,
    /// Indices of its runs.
    pub runs: Vec<usize>,
}

/// A key whose value differs between groups.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct DifferentKey {
    pub key: String,
    /// The value in each group, as TOML.
    pub values: Vec<String>,
}

/// The keys that affect results and differ, apart from the seed.
fn differences(a: &RunConfig, b: &RunConfig) -> Vec<Difference> {
    let counts =
        |difference: &Difference| difference.key != "run.seed" && affects_results(&difference.key);
    a.differences(b).into_iter().filter(counts).collect()
}

/// The groups, in the order of their first runs.
pub(crate) fn groups(runs: &[Run]) -> Vec<Group> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (at, run) in runs.iter().enumerate() {
        let same =
            |group: &&mut Vec<usize>| differences(&runs[group[0]].config, &run.config).is_empty();
        match groups.iter_mut().find(same) {
            Some(group) => group.push(at),
            None => groups.push(vec![at]),
        }
    }
    let names: Vec<String> = groups.iter().map(|group| name(group, runs)).collect();
    let distinct = |at: usize| match names.iter().filter(|name| **name == names[at]).count() {
        1 => names[at].clone(),
        _ => runs[groups[at][0]].dir.display().to_string(),
    };
    let named = |(at, runs): (usize, &Vec<usize>)| Group { name: distinct(at), runs: runs.clone() };
    groups.iter().enumerate().map(named).collect()
}

/// The name that the runs share, without what a sweep adds for the seed.
fn name(group: &[usize], runs: &[Run]) -> String {
    let of = |at: &usize| &runs[*at].config.run;
    let stem = |at| of(at).name.strip_suffix(&format!("-seed{}", of(at).seed));
    match stem(&group[0]) {
        Some(first) if group.iter().all(|at| stem(at) == Some(first)) => first.to_owned(),
        _ => of(&group[0]).name.clone(),
    }
}

/// The keys that differ between any two groups, with the values of all.
pub(crate) fn different_keys(groups: &[Group], runs: &[Run]) -> Vec<DifferentKey> {
    let config = |group: &Group| &runs[group.runs[0]].config;
    let Some(first) = groups.first() else { return Vec::new() };
    let found: Vec<Vec<Difference>> =
        groups.iter().map(|group| differences(config(first), config(group))).collect();
    let mut keys: Vec<&Difference> = found.iter().flatten().collect();
    keys.sort_by(|a, b| a.key.cmp(&b.key));
    keys.dedup_by(|a, b| a.key == b.key);
    let value = |of_group: &Vec<Difference>, key: &Difference| {
        let other = of_group.iter().find(|difference| difference.key == key.key);
        other.map_or_else(|| key.ours.clone(), |difference| difference.theirs.clone())
    };
    let row = |key: &&Difference| DifferentKey {
        key: key.key.clone(),
        values: found.iter().map(|of_group| value(of_group, key)).collect(),
    };
    keys.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;

    const FOX: [&str; 1] = ["model.attention.kind=fox"];

    #[test]
    fn runs_that_differ_in_their_seed_alone_are_a_group() {
        let runs = [
            run("rope-seed0", 0, 2.0, &["train.checkpoint.every=5"]),
            run("fox-seed0", 0, 2.0, &FOX),
            run("rope-seed1", 1, 2.0, &[]),
        ];
        let groups = groups(&runs);
        let found: Vec<(&str, &[usize])> =
            groups.iter().map(|group| (group.name.as_str(), group.runs.as_slice())).collect();
        assert_eq!(found, [("rope", &[0, 2][..]), ("fox", &[1][..])]);
        let keys = different_keys(&groups, &runs);
        let kind = keys.iter().find(|row| row.key == "model.attention.kind").unwrap();
        assert_eq!(kind.values, ["\"rope\"", "\"fox\""]);
        assert!(keys.iter().all(|row| row.key.starts_with("model.attention.")), "{keys:?}");
    }

    #[test]
    fn groups_of_one_name_are_told_apart_by_their_folders() {
        let mut runs = [run("a", 0, 2.0, &[]), run("a", 0, 2.0, &FOX)];
        runs[1].dir = "elsewhere/a".into();
        let groups = groups(&runs);
        assert_eq!((groups[0].name.as_str(), groups[1].name.as_str()), ("runs/a", "elsewhere/a"));
    }
}
