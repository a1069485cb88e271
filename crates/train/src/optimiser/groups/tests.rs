use longwall_config::Problems;

use super::*;
use crate::testing::config;

/// A configuration with these groups.
fn with(groups: &str) -> crate::config::RunConfig {
    config(&[&format!("train.groups={groups}")])
}

fn problems(groups: &str) -> String {
    let sets = [format!("train.groups={groups}")];
    let source = crate::testing::CONFIG;
    let path = std::path::Path::new("configs/small.toml");
    crate::config::RunConfig::parse(source, path, &sets).unwrap_err().to_string()
}

#[test]
fn a_parameter_belongs_to_the_first_group_that_matches() {
    let config = with(
        r#"[
            { match = "blocks.*.mlp.*", lr = 0.5, weight_decay = 3.0 },
            { match = ["*.weight", "embedding"], weight_decay = 1.0, optimiser = { kind = "lion" } },
        ]"#,
    );
    let rule = |path: &str, shape: &[usize]| config.rules().rule(path, shape.to_vec());

    let mlp = rule("blocks.1.mlp.up.weight", &[8, 4]);
    assert_eq!((mlp.group, mlp.lr, mlp.parameter.decay), (Some(0), 0.5, 3.0));
    assert_eq!(mlp.optimiser.kind(), "adamw");

    let embedding = rule("embedding", &[8, 4]);
    assert_eq!((embedding.group, embedding.lr), (Some(1), 1.0));
    assert_eq!(embedding.parameter.decay, 1.0, "a group decides over embeddings too");
    assert_eq!(embedding.optimiser.kind(), "lion");

    let other = rule("norm.bias", &[4]);
    assert_eq!((other.group, other.lr, other.parameter.decay), (None, 1.0, 0.0));
    assert_eq!(rule("blocks.0.attention.q.weight", &[8, 4]).parameter.heads.unwrap().count, 4);
}

#[test]
fn the_rules_cover_every_parameter_and_their_state() {
    let config = with("[{ match = \"*.mlp.*\", optimiser = { kind = \"lion\" } }]");
    let rules = config.rules().all(257, 512);
    let elements = |rule: &Rule| rule.parameter.shape.iter().product::<usize>() as u128;
    let all: u128 = rules.iter().map(elements).sum();
    assert_eq!(all, longwall_model::cost::Parameters::of(&config.model, 257, 512).total() as u128);
    let mlp: u128 = rules.iter().filter(|rule| rule.group.is_some()).map(elements).sum();
    assert_eq!(mlp, 2 * 2 * 64 * 256);
    // Lion keeps one moment, AdamW two.
    let state: u128 = rules.iter().map(Rule::state_elements).sum();
    assert_eq!(state, 2 * all - mlp);
}

#[test]
fn learned_vectors_that_hold_a_matrix_decay() {
    let config = config(&["model.attention={ kind = \"wall\", gate_source = \"key\" }"]);
    let rules = config.rules().all(16, 8);
    let decay = |name: &str| {
        let path = format!("blocks.0.attention.{name}");
        rules.iter().find(|rule| rule.parameter.path == path).expect("a parameter").parameter.decay
    };
    assert_eq!((decay("key_gate_weight"), decay("key_gate_bias")), (1.0, 0.0));
}

#[test]
fn one_pattern_or_several_survive_a_round_trip() {
    for groups in ["[{ match = \"head*\" }]", "[{ match = [\"emb*\", \"norm.*\"], lr = 2.0 }]"] {
        let config = config(&["model.tie_embeddings=false", &format!("train.groups={groups}")]);
        let again: crate::config::RunConfig = toml::from_str(&config.to_toml()).unwrap();
        assert_eq!(again, config);
    }
}

#[test]
fn patterns_that_match_nothing_and_bad_factors_are_problems() {
    insta::assert_snapshot!(problems(
        "[{ match = \"blocks.*.atention.*\", lr = -1.0 }, { match = \"a**\", optimiser = { kind = \"muon\", steps = 0 } }]"
    ), @r#"
    configs/small.toml: the configuration has 4 problems:
    train.groups.0.match is "blocks.*.atention.*"; allowed: a pattern that matches the name of a parameter
      hint: names look like embedding and blocks.1.attention_norm.weight; `longwall info` lists those of a valid configuration
    train.groups.1.match is "a**"; recursive wildcards must form a single path component; allowed: a pattern that matches the name of a parameter
      hint: names look like embedding and blocks.1.attention_norm.weight; `longwall info` lists those of a valid configuration
    train.groups.0.lr is -1; allowed: 0 or more
      hint: give a multiple of the schedule's, for example 0.5; 1 changes nothing
    train.groups.1.optimiser.steps is 0; allowed: 1 to 20
      hint: use 5
    "#);
    insta::assert_snapshot!(problems("[{ match = [], weight_decay = nan }]"), @r#"
    configs/small.toml: the configuration has 2 problems:
    train.groups.0.match is []; allowed: one or more patterns
      hint: write for example match = "*.mlp.*"
    train.groups.0.weight_decay is NaN; allowed: 0 or more
      hint: give a multiple of the optimiser's, for example 0.5; leave it out for the default
    "#);
    insta::assert_snapshot!(problems("[{ match = 3 }]"), @r"
    --set train.groups=[{ match = 3 }]: train.groups.0.match is 3; expected a pattern in quotes, or a list of them
      hint: change the value of train.groups.0.match
    ");
    insta::assert_snapshot!(problems("[{ lr = 3.0 }]"), @r"
    --set train.groups=[{ lr = 3.0 }]: train.groups.0.match is missing
      hint: add `match = …` under [train.groups.0]
    ");
}

#[test]
fn without_groups_no_pattern_is_checked() {
    let mut problems = Problems::new();
    validate_patterns(&[], &config(&[]).model, &mut problems);
    assert!(problems.as_slice().is_empty());
}

#[test]
fn the_assignment_joins_what_is_updated_alike() {
    let config = with(
        "[{ match = \"*.mlp.*\", lr = 0.5, optimiser = { kind = \"lion\", weight_decay = 0.3 } }]",
    );
    let muon = OptimiserConfig::Muon(crate::optimiser::muon::Config::default());
    let rules = Rules { optimiser: &muon, ..config.rules() };
    let found = crate::optimiser::assignment(&rules.all(257, 512));
    let table: Vec<String> = found
        .iter()
        .map(|a| {
            format!(
                "{:?} {} {} {} {} {:?}",
                a.group, a.method, a.lr, a.weight_decay, a.tensors, a.names
            )
        })
        .collect();
    insta::assert_snapshot!(table.join("\n"), @r#"
    None adamw 1 0 6 ["embedding", "blocks.*.attention_norm.weight", "blocks.*.mlp_norm.weight", "norm.weight"]
    None muon 1 0.1 8 ["blocks.*.attention.q.weight", "blocks.*.attention.k.weight", "blocks.*.attention.v.weight", "blocks.*.attention.output.weight"]
    Some(0) lion 0.5 0.3 4 ["blocks.*.mlp.up.weight", "blocks.*.mlp.down.weight"]
    "#);
    let elements: usize = found.iter().map(|assigned| assigned.parameters).sum();
    assert_eq!(elements, longwall_model::cost::Parameters::of(&config.model, 257, 512).total());
}
