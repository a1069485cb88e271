use super::*;

fn config(more: &str) -> TrainConfig {
    toml::from_str(&format!("tokens = \"1M\"\nbatch_tokens = 4096\nlr = 1e-3\n{more}")).unwrap()
}

fn problems(config: &TrainConfig, seq_len: usize) -> String {
    let mut problems = Problems::new();
    config.validate(seq_len, &mut problems);
    problems.into_result().map_or_else(|problems| problems.to_string(), |()| String::new())
}

#[test]
fn the_shortest_table_is_valid_and_survives_a_round_trip() {
    let config = config("");
    assert_eq!(problems(&config, 512), "");
    assert_eq!(toml::from_str::<TrainConfig>(&toml::to_string(&config).unwrap()), Ok(config));
}

#[test]
fn steps_are_rounded_up() {
    let steps = |config: TrainConfig| config.timeline(512, None).total_steps();
    assert_eq!(steps(config("")), 245);
    assert_eq!(steps(TrainConfig { tokens: 4096, ..config("") }), 1);
}

#[test]
fn accumulation_is_derived_from_the_token_budget() {
    let config = config("");
    let rows = |budget| config.base_stage(512, None).micro_batch_rows(budget);
    assert_eq!([rows(4096), rows(2000), rows(100)], [8, 2, 1]);
    let set = TrainConfig { micro_batch: Some(4), ..config.clone() };
    assert_eq!(set.base_stage(512, None).micro_batch_rows(1), 4);
}

#[test]
fn a_batch_that_is_no_multiple_of_the_rows_names_its_neighbours() {
    insta::assert_snapshot!(problems(&config(""), 1000), @r"
    the configuration has 1 problem:
    train.batch_tokens is 4096; allowed: a multiple of data.seq_len (1000) above 0
      hint: use 4000 or 5000
    ");
}

#[test]
fn every_problem_is_reported_at_once() {
    let config = config(
        "micro_batch = 3
        clip = -1.0
        optimiser = { kind = \"adamw\", beta1 = 1.0 }
        schedule = { kind = \"linear\", warmup = 300 }
        skip = { window = 2 }
        checkpoint = { keep_last = 0 }
        sample = { every = 10, prompts = [] }",
    );
    insta::assert_snapshot!(problems(&config, 512), @r#"
    the configuration has 7 problems:
    train.micro_batch is 3; allowed: a divisor of the batch's 8 rows (batch_tokens / seq_len)
      hint: use 2, or leave it out
    train.clip is -1; allowed: a number above 0, or "off"
      hint: use 1.0, the usual norm, or "off" for no clipping
    train.optimiser.beta1 is 1; allowed: 0 up to but not including 1
      hint: use 0.9 for beta1 and 0.95 or 0.999 for beta2
    train.schedule.warmup is 300 steps; allowed: less than the run's 245 steps
      hint: shorten the warm-up, or raise train.tokens
    train.skip.window is 2; allowed: 8 or more steps
      hint: use 128: a deviation over fewer steps says little
    train.sample is 0 prompts of 64 tokens; allowed: at least one prompt and one token
      hint: set prompts = [""] and tokens = 64, or every = "never"
    train.checkpoint.keep_last is 0; allowed: 1 or more
      hint: keep at least one checkpoint, so that the run can be resumed
    "#);
}

#[test]
fn a_batch_beyond_memory_is_refused_and_costs_no_search() {
    let endless = TrainConfig { batch_tokens: 9_000_000_000_000_000, ..config("micro_batch = 7") };
    insta::assert_snapshot!(problems(&endless, 1000), @r"
    the configuration has 2 problems:
    train.batch_tokens is 9000000000000000; allowed: up to 4294967296: a step's tokens are in memory at once
      hint: set it lower; large runs use a few million
    train.micro_batch is 7; allowed: a divisor of the batch's 9000000000000 rows (batch_tokens / seq_len)
      hint: use 6, or leave it out
    ");
    let free = TrainConfig { micro_batch: None, ..endless };
    assert_eq!(free.base_stage(1000, None).micro_batch_rows(8192), 8);
}

#[test]
fn the_noise_scale_needs_two_micro_batches() {
    let on = config("noise_scale = { every = 10 }");
    assert_eq!(problems(&on, 512), "");
    assert_eq!(on.base_stage(512, None).micro_batch_rows(1 << 20), 4);
    assert_eq!(config("").base_stage(512, None).micro_batch_rows(1 << 20), 8);
    let one = config("micro_batch = 8\nnoise_scale = { every = 10, decay = 1.0 }");
    insta::assert_snapshot!(problems(&one, 512), @r#"
    the configuration has 2 problems:
    train.noise_scale.decay is 1; allowed: 0 to below 1
      hint: use 0.95, an average over about 20 measurements
    train.noise_scale.every is set, and all 8 rows of a step are one micro-batch; allowed: two micro-batches a step or more, whose gradients are compared with the step's
      hint: lower micro_batch or raise batch_tokens, or set every = "never"
    "#);
    assert!(problems(&on, 4096).contains("all 1 rows of a step"));
}

#[test]
fn stages_are_checked_one_by_one() {
    let good = config(
        "[[stages]]\nfrom = 0\nseq_len = 128\n[[stages]]\nfrom = \"1 %\"\nseq_len = 512\n\
         [[stages]]\nfrom = \"500k tokens\"\nbatch_tokens = \"8192\"\nmicro_batch = 4",
    );
    assert_eq!(problems(&good, 512), "");
    assert_eq!(toml::from_str::<TrainConfig>(&toml::to_string(&good).unwrap()), Ok(good));
    let bad = config(
        "micro_batch = 8
        stages = [{ from = 10, batch_tokens = 1000 }, { from = 5, seq_len = 100 }, { from = 20 },
            { from = 1.0, seq_len = 256, micro_batch = 3, batch_tokens = 9000000000000000 }]",
    );
    insta::assert_snapshot!(problems(&bad, 512), @r"
    the configuration has 8 problems:
    train.stages.0.batch_tokens is 1000; allowed: a multiple of data.seq_len (512) above 0
      hint: use 1024
    train.stages.0.micro_batch is 8; allowed: a divisor of the batch's 1 rows (batch_tokens / seq_len)
      hint: use 1, or remove the micro_batch that it keeps from before
    train.stages.1.from is 5 steps; allowed: after step 10, where the stage before it begins
      hint: list the stages in their order, each at least one step long
    train.stages.1.seq_len is 100; allowed: a divisor of data.seq_len (512), at least 2
      hint: use 128
    train.stages.1.micro_batch is 8; allowed: a divisor of the batch's 10 rows (batch_tokens / seq_len)
      hint: use 10, or remove the micro_batch that it keeps from before
    train.stages.2 is a table with from alone; allowed: batch_tokens, seq_len, micro_batch or window beside it
      hint: say what changes, or remove the table
    train.stages.2.micro_batch is 8; allowed: a divisor of the batch's 10 rows (batch_tokens / seq_len)
      hint: use 10, or remove the micro_batch that it keeps from before
    train.stages.3.batch_tokens is 9000000000000000; allowed: up to 4294967296: a step's tokens are in memory at once
      hint: set it lower; large runs use a few million
    ");
    for table in ["batch_tokens = 4096", "from = 1.5", "from = 3\nrows = 4"] {
        assert!(toml::from_str::<crate::config::StageConfig>(table).is_err(), "{table}");
    }
}

#[test]
fn a_z_loss_outside_its_range_is_refused() {
    insta::assert_snapshot!(problems(&config("z_loss = 2"), 512), @r"
    the configuration has 1 problem:
    train.z_loss is 2; allowed: a number from 0 to 1
      hint: use 1e-4, or leave it out for no z-loss
    ");
    for z_loss in [f64::NAN, f64::INFINITY, -1e-4] {
        assert!(!problems(&TrainConfig { z_loss, ..config("") }, 512).is_empty());
    }
    assert_eq!(config("").z_loss, 0.0);
    assert_eq!(problems(&config("z_loss = 1e-5"), 512), "");
}

#[test]
fn a_sample_without_end_is_refused() {
    let endless = config("sample = { tokens = 9223372036854775807 }");
    insta::assert_snapshot!(problems(&endless, 512), @r"
    the configuration has 1 problem:
    train.sample.tokens is 9223372036854775807; allowed: up to 16777216
      hint: use 64
    ");
}

#[test]
fn phases_together_longer_than_any_number_are_refused() {
    let most = u64::MAX;
    let schedule = crate::schedule::ScheduleConfig::Wsd {
        warmup: crate::config::PhaseLength::Steps(1),
        initial_lr_ratio: None,
        decay: crate::config::PhaseLength::Steps(most),
        shape: Default::default(),
        final_lr_ratio: 0.0,
    };
    let found = problems(&TrainConfig { schedule, ..config("") }, 512);
    assert!(found.contains("train.schedule.decay is 18446744073709551615 steps"), "{found}");
}

#[test]
fn a_learning_rate_whose_warm_up_would_overflow_is_refused() {
    let found = problems(&TrainConfig { lr: 1e308, ..config("") }, 512);
    assert!(found.contains("allowed: a number above 0, at most 1e38\n  hint: "), "{found}");
    for lr in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        assert!(!problems(&TrainConfig { lr, ..config("") }, 512).is_empty());
    }
}
