use std::sync::LazyLock;

use burn::module::AutodiffModule;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, TensorMetadata};
use longwall_model::weights::{EarlierNames, named_tensors, write_tensors};
use longwall_model::{LanguageModel, ModelConfig};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::distributed::Alone;
use crate::testing::{TestBackend, TestModel, model_config, tiny_batch, tiny_model};

pub(super) fn gradients(model: &TestModel) -> Gradients<TestBackend> {
    let [tokens, targets] = tiny_batch(0..4);
    let weights = Tensor::ones(tokens.dims(), &tokens.device()) / 64.0;
    Gradients::of(model, model.loss(tokens, targets, weights, None, 0.0).total)
}

pub(super) fn update(number: u64) -> Update {
    Update { lr: 1e-2, number, grad_scale: 1.0 }
}

/// Parameters by name.
pub(super) fn values<B: OpBackend>(model: &LanguageModel<B>) -> Vec<(String, Vec<f32>)> {
    named_tensors(model).into_iter().map(|(name, _, elements)| (name, elements)).collect()
}

/// The rules of [`tiny_model`], all parameters with this optimiser.
pub(super) fn rules(optimiser: &OptimiserConfig) -> Rules<'_> {
    static MODEL: LazyLock<ModelConfig> = LazyLock::new(|| model_config("layers = 1"));
    Rules { optimiser, groups: &[], model: &MODEL }
}

/// The values of a parameter after updates with these gradients, each at this learning rate, and its state.
pub(super) fn updated<K: OptimiserKind>(
    kind: &K,
    parameter: &Parameter,
    initial: &[f32],
    gradients: &[Vec<f32>],
    lr: f64,
) -> Vec<Vec<f32>> {
    let tensor = |values: &[f32], shape: &[usize]| {
        let flat = Tensor::<TestBackend, 1>::from_floats(values, &Default::default());
        TestBackend::float_reshape(primitive(flat), shape.to_vec().into())
    };
    let zeros = |state: &StateTensor| {
        tensor(&vec![0.0; state.shape.iter().product::<usize>()], &state.shape)
    };
    let mut value = tensor(initial, &parameter.shape);
    let mut state: Vec<_> = kind.state(parameter).iter().map(zeros).collect();
    for (at, gradient) in gradients.iter().enumerate() {
        let update = Update { lr, number: at as u64 + 1, grad_scale: 0.5 };
        let gradient = tensor(gradient, &parameter.shape);
        let inputs = StepInputs { parameter: value, gradient, state, copy: None };
        let outputs = kind.step::<TestBackend>(parameter, &update, inputs);
        (value, state) = (outputs.parameter, outputs.state);
    }
    let elements = |x: FloatTensor<TestBackend>| {
        let count = TensorMetadata::shape(&x).num_elements();
        let flat = TestBackend::float_reshape(x, [count].into());
        longwall_kernels::backend::tensor::<TestBackend, 1>(flat).into_data().to_vec().unwrap()
    };
    [value].into_iter().chain(state).map(elements).collect()
}

/// `count` numbers between −1 and 1 that look random.
pub(super) fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// Compares elementwise, to a tolerance relative to the largest element.
pub(super) fn assert_close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        assert!(error <= tolerance * largest, "{what}[{at}] is {found}, not {expected}");
    }
}

#[test]
fn matrices_decay_and_nothing_else() {
    let decays =
        |path: &str, shape: &[usize]| Parameter::new(path.to_owned(), shape.to_vec()).decay == 1.0;
    assert!(decays("blocks.0.attention.q.weight", &[4, 4]));
    assert!(decays("blocks.0.attention.forget_gate.weight", &[4, 4]));
    assert!(decays("head", &[4, 4]));
    for (path, shape) in [
        ("embedding", &[4, 4][..]),
        ("positions", &[4, 4]),
        ("blocks.0.attention_norm.weight", &[4]),
        ("blocks.0.attention.forget_gate.bias", &[4]),
        ("norm.bias", &[4]),
    ] {
        assert_eq!(Parameter::new(path.to_owned(), shape.to_vec()).decay, 0.0, "{path}");
    }
}

#[test]
fn hidden_matrices_are_those_of_linear_layers() {
    let hidden = |path: &str, shape: &[usize]| {
        Parameter::new(path.to_owned(), shape.to_vec()).is_hidden_matrix()
    };
    assert!(hidden("blocks.0.attention.q.weight", &[4, 4]));
    assert!(hidden("blocks.0.attention.forget_gate.weight", &[4, 4]));
    assert!(hidden("blocks.0.mlp.down.weight", &[4, 8]));
    for path in ["embedding", "positions", "head", "blocks.0.attention.q.conv"] {
        assert!(!hidden(path, &[4, 4]), "{path}");
    }
    assert!(!hidden("norm.weight", &[4]));
}

#[test]
fn cautious_decay_spares_what_the_update_moves_away_from_zero() {
    let p = Tensor::<TestBackend, 1>::from_floats([1.0, 1.0, -1.0, -1.0, 1.0], &Default::default());
    let u = Tensor::from_floats([0.5, -0.5, 0.5, -0.5, 0.0], &Default::default());
    let decay = |cautious| -> Vec<f32> {
        elementwise::decayed(p.clone(), &u, 0.1, cautious).into_data().to_vec().unwrap()
    };
    assert_eq!(decay(false), [0.9, 0.9, -0.9, -0.9, 0.9]);
    assert_eq!(decay(true), [0.9, 1.0, -1.0, -0.9, 0.9]);
}

#[test]
fn the_tensors_of_a_parameters_state_have_names_of_their_own() {
    for config in OptimiserConfig::defaults() {
        for slot in Optimiser::<TestBackend>::new(&rules(&config), &tiny_model(0)).slots {
            let mut names: Vec<&str> = slot.layout.iter().map(|tensor| tensor.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), slot.layout.len(), "{config:?} for {:?}", slot.rule);
        }
    }
}

#[test]
fn updates_lower_the_loss_and_are_the_same_every_time() {
    let run = |config: &OptimiserConfig| {
        let mut model = tiny_model(0);
        let mut optimiser = Optimiser::<TestBackend>::new(&rules(config), &model);
        let [tokens, targets] = tiny_batch(0..4);
        let losses: Vec<f32> = (1..=20)
            .map(|number| {
                let weights = Tensor::ones(tokens.dims(), &tokens.device()) / 64.0;
                let loss = model.loss(tokens.clone(), targets.clone(), weights, None, 0.0).total;
                let value = loss.clone().inner().into_scalar();
                let gradients = Gradients::of(&model, loss);
                model = optimiser.step(model.clone(), gradients, update(number));
                value
            })
            .collect();
        losses
    };
    for config in OptimiserConfig::defaults() {
        let losses = run(&config);
        assert!(losses[19] < losses[0] - 0.5, "{config:?}: {losses:?}");
        assert_eq!(losses, run(&config));
    }
}

#[test]
fn a_saved_optimiser_goes_on_as_if_never_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    for config in OptimiserConfig::defaults() {
        let model = tiny_model(0);
        let mut optimiser = Optimiser::<TestBackend>::new(&rules(&config), &model);
        let first = gradients(&model);
        let model = optimiser.step(model, first, update(1));
        write_tensors(&path, &saved(&optimiser, &model).optimizer).unwrap();
        let mut restored = Optimiser::<TestBackend>::new(&rules(&config), &model);
        restored.load(&path, &EarlierNames::of(&model), &Default::default()).unwrap();
        let (one, other) = (gradients(&model), gradients(&model));
        let unbroken = optimiser.step(model.clone(), one, update(2));
        let resumed = restored.step(model, other, update(2));
        assert_eq!(values(&unbroken), values(&resumed), "{config:?}");
    }
}

#[test]
fn the_state_of_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let model = tiny_model(0);
    let optimiser = Optimiser::<TestBackend>::new(&rules(&OptimiserConfig::default()), &model);
    write_tensors(&path, &saved(&optimiser, &model).optimizer).unwrap();
    let bigger = crate::testing::model_with("layers = 2", 0);
    let error = Optimiser::<TestBackend>::new(&rules(&OptimiserConfig::default()), &bigger)
        .load(&path, &EarlierNames::of(&bigger), &Default::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("m.blocks.1."), "{error}");
}

/// What a checkpoint has of a model and its optimiser.
fn saved(optimiser: &Optimiser<TestBackend>, model: &TestModel) -> Saved {
    optimiser.saved(&model.valid(), &Alone).unwrap().expect("rank 0 has all of it")
}

/// A model's parameters, from the optimiser's masters if it has them.
fn masters(optimiser: &Optimiser<TestBackend>, model: &TestModel) -> Vec<(String, Vec<f32>)> {
    let weights = saved(optimiser, model).weights;
    weights.into_iter().map(|(name, _, elements)| (name, elements)).collect()
}

/// The Euclidean norm of a − b.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

/// Three updates of an f32 model, and of one rounded to bf16, with the same f32 gradients.
fn exact_and_rounded(config: &OptimiserConfig) -> [(Optimiser<TestBackend>, TestModel); 2] {
    let mut exact = (Optimiser::new(&rules(config), &tiny_model(0)), tiny_model(0));
    let mut rounded = (Optimiser::new(&rules(config), &tiny_model(0)), tiny_model(0));
    rounded.1 = rounded.0.round(rounded.1, Precision::Bf16);
    for number in 1..=3 {
        let gradients = || gradients(&tiny_model(number));
        exact.1 = exact.0.step(exact.1, gradients(), update(number));
        rounded.1 = rounded.0.step(rounded.1, gradients(), update(number));
    }
    [exact, rounded]
}

#[test]
fn masters_move_as_an_f32_model_and_the_model_is_their_rounding() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    for config in OptimiserConfig::defaults() {
        let [(_, exact), (optimiser, rounded)] = exact_and_rounded(&config);
        let (initial, exact) = (values(&tiny_model(0)), values(&exact));
        let found = masters(&optimiser, &rounded);
        for (at, slot) in optimiser.slots.iter().enumerate() {
            let Rule { parameter, optimiser, .. } = &slot.rule;
            let tolerance = match optimiser.method(parameter).name {
                // They compute directions in the model's type, with an error of about 5 %.
                "muon" | "normuon" => 0.1,
                _ => 0.0,
            };
            let error = distance(&found[at].1, &exact[at].1);
            let moved = distance(&initial[at].1, &exact[at].1);
            let name = &parameter.path;
            assert!(error <= tolerance * moved, "{config:?}: {name} is off by {error} of {moved}");
        }
        assert_eq!(rounded.embedding.val().dtype(), DType::BF16);
        assert!(rounded.embedding.val().is_require_grad());
        write_tensors(&path, &saved(&optimiser, &rounded).weights).unwrap();
        let restored = longwall_model::weights::load(tiny_model(7).valid(), &path).unwrap();
        let expected = values(&Precision::Bf16.convert(restored));
        assert_ne!(expected, found, "nothing was rounded");
        assert_eq!(values(&rounded), expected, "{config:?}");
    }
}

#[test]
fn a_rounded_model_goes_on_from_its_files_as_if_never_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let step = |optimiser: &mut Optimiser<TestBackend>, model: TestModel| {
        let model = optimiser.step(model, gradients(&tiny_model(4)), update(4));
        (masters(optimiser, &model), values(&model))
    };
    for config in OptimiserConfig::defaults() {
        let [_, (mut optimiser, model)] = exact_and_rounded(&config);
        let weights = file("weights.safetensors");
        let Saved { weights: tensors, optimizer, .. } = saved(&optimiser, &model);
        write_tensors(&weights, &tensors).unwrap();
        write_tensors(&file("optimizer.safetensors"), &optimizer).unwrap();

        let restored = longwall_model::weights::load(tiny_model(7), &weights).unwrap();
        let mut other = Optimiser::<TestBackend>::new(&rules(&config), &restored);
        let earlier = EarlierNames::of(&restored);
        other.load(&file("optimizer.safetensors"), &earlier, &Default::default()).unwrap();
        let restored = other.round(restored, Precision::Bf16);
        assert_eq!(values(&restored), values(&model), "{config:?}");
        assert_eq!(step(&mut optimiser, model), step(&mut other, restored), "{config:?}");
    }
}

#[test]
fn gradients_in_bf16_become_f32_when_they_are_collected() {
    let weight = Tensor::<Autodiff<TestBackend>, 2>::ones([2, 2], &Default::default());
    let linear = burn::nn::Linear::<Autodiff<TestBackend>> {
        weight: Param::from_tensor(weight.cast(DType::BF16)),
        bias: None,
    };
    let gradients = Gradients::<TestBackend>::of(&linear, (linear.weight.val() * 3.0).sum());
    assert_eq!(gradients.tensors[0].as_ref().map(|g| g.dtype()), Some(DType::F32));
}

#[test]
fn parameters_of_one_shape_and_kind_are_batches_of_equal_size() {
    let lion = OptimiserConfig::Lion(lion::Config::default());
    let rule = |optimiser: &OptimiserConfig, shape: &[usize]| Rule {
        parameter: Parameter::new("blocks.0.mlp.up.weight".to_owned(), shape.to_vec()),
        optimiser: optimiser.clone(),
        lr: 1.0,
        ..rules(optimiser).rule("blocks.0.mlp.up.weight", shape.to_vec())
    };
    let adamw = OptimiserConfig::default();
    // Five of a third of a batch's elements, two of another kind, and one that is larger than a batch.
    let third = [BATCH_ELEMENTS / 3, 1];
    let mut all: Vec<Rule> = (0..5).map(|_| rule(&adamw, &third)).collect();
    all.extend([rule(&lion, &third), rule(&adamw, &[2, BATCH_ELEMENTS]), rule(&lion, &third)]);
    let found = batches((0..8).collect(), |at| &all[at]);
    assert_eq!(found, [vec![0, 1, 2], vec![3, 4], vec![5, 7], vec![6]]);
    // Without a gradient of some.
    assert_eq!(batches(vec![1, 3, 6], |at| &all[at]), [vec![1, 3], vec![6]]);
}
