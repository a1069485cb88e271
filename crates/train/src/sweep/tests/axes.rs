//! Axes of several keys, random draws, conditions, estimates and job arrays.

use longwall_kernels::device::DeviceKind;
use longwall_model::Precision;

use super::*;

fn names(sandbox: &Sandbox) -> Vec<String> {
    sandbox.plan().unwrap().runs.into_iter().map(|run| run.name).collect()
}

#[test]
fn zipped_keys_vary_together() {
    let sandbox = Sandbox::new(
        "[[axes]]
        name = \"size\"
        zip = { \"model.width\" = [32, 64], \"train.lr\" = [2e-3, 1e-3] }",
    );
    assert_eq!(names(&sandbox), ["32+0.002-seed0", "64+0.001-seed0"]);
    let plan = sandbox.plan().unwrap();
    let sizes: Vec<_> =
        plan.runs.iter().map(|run| (run.config.model.width, run.config.train.lr)).collect();
    assert_eq!(sizes, [(32, 2e-3), (64, 1e-3)]);
    assert!(FakeBinary::default().run(&plan).to_csv().starts_with("run,size,seed,"));
}

fn draws(count: usize, more: &str) -> Sandbox {
    Sandbox::new(&format!(
        "[[axes]]
        name = \"search\"
        count = {count}
        draw = {{ \"train.lr\" = {{ from = 1e-4, to = 1e-1, scale = \"log\" }}, \
        \"model.layers\" = {{ from = 1, to = 3 }}{more} }}"
    ))
}

#[test]
fn random_points_lie_in_their_ranges_and_depend_on_the_seed_alone() {
    let configs = |sandbox: &Sandbox| -> Vec<(f64, usize)> {
        let plan = sandbox.plan().unwrap();
        plan.runs.iter().map(|run| (run.config.train.lr, run.config.model.layers)).collect()
    };
    let all = configs(&draws(64, ""));
    assert!(all.iter().all(|(lr, layers)| (1e-4..=1e-1).contains(lr) && (1..=3).contains(layers)));
    let low = all.iter().filter(|(lr, _)| *lr < 1e-4 * 1e3f64.sqrt()).count();
    assert!((16..48).contains(&low), "{low} of 64 are below the middle of the logarithms");
    assert!((1..=3).all(|layers| all.iter().any(|(_, other)| *other == layers)));
    // More points, and further keys, change no point.
    assert_eq!(configs(&draws(10, "")), all[..10]);
    let more = configs(&draws(10, ", \"train.clip\" = { values = [0.5, 1.0] }"));
    assert_eq!(more, all[..10]);
    let seeded = draws(10, "");
    let seeded = Sandbox { sweep: seeded.sweep.replace("count", "seed = 1\ncount"), ..seeded };
    assert_ne!(configs(&seeded), all[..10]);
}

#[test]
fn an_axis_applies_only_where_its_condition_holds_and_combinations_can_be_excluded() {
    let sandbox = Sandbox::new(
        "[[axes]]
        key = \"model.attention\"
        values = [{ kind = \"rope\" }, { kind = \"fox\" }]
        [[axes]]
        key = \"model.attention.theta\"
        values = [1e4, 1e6]
        names = [\"10k\", \"1M\"]
        when = { \"model.attention\" = [\"rope\"] }
        [[axes]]
        key = \"train.lr\"
        values = [1e-3, 2e-3]
        [[exclude]]
        \"model.attention.theta\" = [\"1M\"]
        \"train.lr\" = [\"0.002\"]",
    );
    let expected = [
        "rope-10k-0.001-seed0",
        "rope-10k-0.002-seed0",
        "rope-1M-0.001-seed0",
        "fox-0.001-seed0",
        "fox-0.002-seed0",
    ];
    assert_eq!(names(&sandbox), expected);
    let results = FakeBinary::default().run(&sandbox.plan().unwrap());
    assert!(results.to_csv().contains("\nfox-0.001-seed0,fox,-,0.001,0,finished,"));
}

#[test]
fn mistakes_in_axes_are_named() {
    let axis = |text: &str| {
        let first = "[[axes]]\nkey = \"train.lr\"\nvalues = [1.0, 2.0]\n[[axes]]\n";
        Sandbox::new(&format!("{first}{text}")).error()
    };
    let two = axis("key = \"a\"\nvalues = [1]\nzip = { b = [1] }");
    assert!(two.contains("axes.1.values is given beside zip or draw"), "{two}");
    let lengths = axis("name = \"n\"\nzip = { a = [1, 2], b = [1] }");
    assert!(lengths.contains("axes.1.zip is lists of [2, 1] values"), "{lengths}");
    let count = axis("name = \"n\"\ndraw = { a = { from = 1, to = 2 } }");
    assert!(count.contains("axes.1.count is missing"), "{count}");
    let range =
        axis("name = \"n\"\ncount = 2\ndraw = { a = { from = 0, to = 2, scale = \"log\" } }");
    assert!(range.contains("axes.1.draw.\"a\" is from 0 to 2, with 0 values"), "{range}");
    let few = axis("name = \"n\"\ncount = 9\ndraw = { a = { from = 1, to = 3 } }");
    assert!(few.contains("as many different points as draw has; 3 were found"), "{few}");
    let unknown = axis("key = \"a\"\nvalues = [1]\nwhen = { \"train.l\" = [\"1.0\"] }");
    assert!(unknown.contains("the name of an earlier axis: train.lr"), "{unknown}");
    let point = axis("key = \"a\"\nvalues = [1]\nwhen = { \"train.lr\" = [\"1\"] }");
    assert!(point.contains("is \"1\"; allowed: names of its values: 1.0, 2.0"), "{point}");
    let twice = axis("key = \"train.lr\"\nvalues = [3.0]");
    assert!(twice.contains("axes.1.name is train.lr; allowed: a different name"), "{twice}");
}

#[test]
fn results_are_also_written_as_json_lines() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    FakeBinary { broken: Some("run.name=\"fox-seed1\""), ..Default::default() }.run(&plan);
    let text = fs::read_to_string(plan.sweep.dir().join("results.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[0]["axes"]["model.attention"], "rope");
    assert_eq!(lines[0]["settings"][1], "model.attention={ kind = \"rope\" }");
    assert_eq!(lines[0]["figures"]["passkey.accuracy"]["high"], 0.7);
    assert_eq!(lines[0]["figures"]["validation_loss"]["value"], 2.0);
    assert!(lines[3]["status"].as_str().unwrap().starts_with("failed: "), "{text}");
}

#[test]
fn a_dry_run_estimates_from_the_peak_and_then_from_finished_runs() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    let machine = Machine {
        device: DeviceKind::Cpu,
        precision: Precision::F32,
        available_memory: None,
        peak_flops: Some(1e11),
    };
    let (estimates, rate) = plan.estimates(&machine).unwrap();
    assert_eq!(rate, Rate::Expected(4e10));
    assert!(estimates.iter().all(|e| !e.finished && e.memory_bytes > 1_000_000));
    // Fox has its gate's parameters more.
    assert!(estimates[2].seconds > estimates[0].seconds && estimates[0].seconds > Some(0.1));
    FakeBinary { broken: Some("fox"), ..Default::default() }.run(&plan);
    let (estimates, rate) = plan.estimates(&machine).unwrap();
    assert!(matches!(rate, Rate::Measured(_)), "{rate:?}");
    assert!(estimates[0].finished && !estimates[2].finished);
    // The finished runs took one second each.
    assert!((estimates[0].seconds.unwrap() - 1.0).abs() < 1e-9);
    let gpu = Machine { device: DeviceKind::Cuda, precision: Precision::Bf16, ..machine };
    let (on_gpu, _) = plan.estimates(&Machine { peak_flops: None, ..gpu }).unwrap();
    assert!(on_gpu[0].memory_bytes > estimates[0].memory_bytes);
}

#[test]
fn a_job_array_has_a_task_for_each_run_that_is_left() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    let script = |plan: &Plan| {
        let [file, exe, folder] = ["my sweep.toml", "/opt/longwall", "/work"].map(Path::new);
        plan.slurm_script(file, exe, folder).unwrap()
    };
    let all = script(&plan).unwrap();
    assert!(all.starts_with("#!/bin/bash\n# 4 of the 4 runs"), "{all}");
    assert!(all.contains("\n#SBATCH --array=0-3\n"), "{all}");
    let call = "srun /opt/longwall sweep 'my sweep.toml' --only \"$SLURM_ARRAY_TASK_ID\"\n";
    assert!(all.ends_with(call), "{all}");

    // One task does its run, evaluation included, and writes nothing beside it.
    let binary = Mutex::new(FakeBinary::default());
    let launch = |job: &Job, tick: &mut dyn FnMut()| binary.lock().unwrap().launch(job, tick);
    let status = execute_one(&plan, 1, &launch, &StopFlag::new(), &mut Quiet);
    assert_eq!(status, Status::Finished);
    let binary = binary.into_inner().unwrap();
    assert_eq!((binary.count("train"), binary.count("eval")), (1, 1));
    assert!(!plan.sweep.dir().join("results.csv").exists());
    assert!(script(&plan).unwrap().contains("\n#SBATCH --array=0,2-3\n"));
    FakeBinary::default().run(&plan);
    assert_eq!(script(&plan), None);
}
