//! Runs of models with layers of several kinds, and of checkpoints with earlier names of weights.

use longwall_model::weights::write_tensors;

use super::*;

/// Layers of different kinds: caches with different windows, and recurrent states.
const HYBRID: &str = "model={ layers = 4, width = 16, heads = 2, short_conv = true, token_shift = true, \
     window = 12, pattern = [\"local\", \"fox\", \"rwkv7\"], \
     kinds = { local = { kind = \"rope\", window = 5 }, rwkv7 = { kind = \"rwkv7\", window = \"none\" } } }";

#[test]
fn a_hybrid_learns_and_resumes_to_the_bit() {
    let sandbox = Sandbox::new();
    let unbroken = sandbox.config(&[HYBRID, "run.name=unbroken", "train.sample.every=6"]);
    let unbroken = run(&unbroken, RunStart::New).unwrap().run_dir;
    let steps: Vec<f32> = losses(&unbroken)
        .iter()
        .filter_map(|record| if let Record::Step(step) = record { step.loss } else { None })
        .collect();
    assert!(steps[11] < steps[0] - 0.5, "{steps:?}");
    let broken = sandbox.config(&[HYBRID, "run.name=broken", "train.sample.every=6"]);
    let stopped = run_until(&broken, RunStart::New, 7).unwrap();
    let broken = run(&broken, RunStart::Resume(stopped.run_dir)).unwrap().run_dir;
    assert_eq!(losses(&broken), losses(&unbroken));
    assert_eq!(weights(&broken), weights(&unbroken));
    let recomputed = sandbox.config(&[HYBRID, "run.name=recomputed", "train.recompute=true"]);
    let recomputed = run(&recomputed, RunStart::New).unwrap().run_dir;
    assert_eq!(losses(&recomputed), losses(&unbroken));
}

/// A checkpoint from before attention's weights had their current names.
#[test]
fn a_checkpoint_with_earlier_names_resumes_to_the_bit() {
    let sandbox = Sandbox::new();
    let model = "model={ layers = 2, width = 16, heads = 2, short_conv = true, token_shift = true, \
                 attention = { kind = \"fox\" } }";
    let unbroken =
        run(&sandbox.config(&[model, "run.name=unbroken"]), RunStart::New).unwrap().run_dir;
    let broken = sandbox.config(&[model, "run.name=broken"]);
    let dir = run_until(&broken, RunStart::New, 7).unwrap().run_dir;
    let checkpoint = Checkpoint::open(&dir, CheckpointSelector::Latest).unwrap();
    for file in [checkpoint.weights().unwrap(), checkpoint.optimizer().unwrap()] {
        let mut renamed = 0;
        let earlier = |name: &str| {
            let pairs = [
                ("attention.q.conv", "attention.convs.0"),
                ("attention.k.conv", "attention.convs.1"),
                ("attention.v.conv", "attention.convs.2"),
                ("attention.forget_gate.weight", "attention.projections.0.outer.weight"),
                ("attention.forget_gate.bias", "attention.projections.0.outer.bias"),
                ("attention.q.shift", "attention.shifts.0"),
                ("attention.k.shift", "attention.shifts.1"),
                ("attention.v.shift", "attention.shifts.2"),
                ("attention.forget_gate.shift", "attention.shifts.3"),
            ];
            let pair = pairs.iter().find(|(now, _)| name.ends_with(now));
            pair.map_or_else(|| name.to_owned(), |(now, was)| name.replace(now, was))
        };
        let tensors = read_tensors(&file).unwrap().into_iter().map(|(name, (shape, data))| {
            let was = earlier(&name);
            renamed += usize::from(was != name);
            (was, shape, data)
        });
        write_tensors(&file, &tensors.collect()).unwrap();
        // Nine names in each layer, in one file of weights or one of two moments.
        assert!(renamed == 18 || renamed == 36, "{renamed} names of {}", file.display());
    }
    // Those checkpoints had no checksums.
    std::fs::remove_file(checkpoint.path.join("checksums.json")).unwrap();
    run(&broken, RunStart::Resume(dir.clone())).unwrap();
    assert_eq!(losses(&dir), losses(&unbroken));
    assert_eq!(weights(&dir), weights(&unbroken));
}
