use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorMetadata};
use longwall_kernels::backend::primitive;
use longwall_model::weights::named_tensors;

use super::*;
use crate::optimiser::tests::{assert_close, gradients, numbers, rules, update, updated, values};
use crate::optimiser::{Optimiser, OptimiserConfig};
use crate::testing::{TestBackend, tiny_model};

#[test]
fn the_files_name_the_moments_m_and_v() {
    let parameter = Parameter::new("head".to_owned(), vec![3, 2]);
    let names = Config::default().state(&parameter).into_iter().map(|tensor| tensor.name);
    assert_eq!(names.collect::<Vec<_>>(), ["m", "v"]);
}

#[test]
fn without_gradients_the_decay_alone_shrinks_matrices() {
    let model = tiny_model(0);
    let before = named_tensors(&model);
    let config = OptimiserConfig::Adamw(Config::default());
    let mut optimiser = Optimiser::<TestBackend>::new(&rules(&config), &model);
    let mut zero = gradients(&model);
    for gradient in zero.tensors.iter_mut().flatten() {
        let shape = gradient.shape();
        let zeros = Tensor::<TestBackend, 1>::zeros([shape.num_elements()], &Default::default());
        *gradient = TestBackend::float_reshape(primitive(zeros), shape);
    }
    let after = values(&optimiser.step(model, zero, update(1)));
    for ((path, shape, before), (_, after)) in before.into_iter().zip(after) {
        let parameter = Parameter::new(path, shape);
        let factor = if parameter.decay == 1.0 { 1.0 - 1e-2 * 0.1 } else { 1.0 };
        for (before, after) in before.iter().zip(after) {
            let name = &parameter.path;
            assert!((before * factor - after).abs() < 1e-6, "{name}: {before} became {after}");
        }
    }
}

#[test]
fn cautious_updates_equal_those_of_an_f64_implementation() {
    let kind = Config { weight_decay: 2.0, cautious_decay: true, ..Config::default() };
    let initial = numbers(40, 1);
    let gradients: Vec<Vec<f32>> = (2..6).map(|seed| numbers(40, seed)).collect();
    let parameter = Parameter::new("head".to_owned(), vec![8, 5]);
    let found = updated(&kind, &parameter, &initial, &gradients, 0.02);
    let mut spared = 0;
    let expected: Vec<f64> = (0..40)
        .map(|at| {
            let (mut p, mut m, mut v) = (f64::from(initial[at]), 0.0, 0.0);
            for (t, gradient) in (1..).zip(&gradients) {
                let g = 0.5 * f64::from(gradient[at]);
                m = 0.9 * m + 0.1 * g;
                v = 0.95 * v + 0.05 * g * g;
                let u = m / (1.0 - 0.9f64.powi(t)) / ((v / (1.0 - 0.95f64.powi(t))).sqrt() + 1e-8);
                let decay = if u * p >= 0.0 { 2.0 } else { 0.0 };
                spared += usize::from(decay == 0.0);
                p -= 0.02 * (u + decay * p);
            }
            p
        })
        .collect();
    assert!((40..120).contains(&spared), "{spared} of 160 elements do not decay");
    assert_close(&found[0], &expected, 1e-6, "p");
}

#[test]
fn a_parameters_own_decay_multiplies_that_of_the_kind() {
    let initial = numbers(6, 1);
    let after = |weight_decay: f64, decay: f64, cautious_decay: bool| {
        let kind = Config { weight_decay, cautious_decay, ..Config::default() };
        let parameter = Parameter { decay, ..Parameter::new("embedding".to_owned(), vec![6]) };
        updated(&kind, &parameter, &initial, &[numbers(6, 2)], 0.1)
    };
    for cautious in [false, true] {
        assert_eq!(after(0.2, 0.5, cautious), after(0.1, 1.0, cautious));
        assert_eq!(after(0.2, 0.0, cautious), after(0.0, 1.0, cautious));
        assert_ne!(after(0.2, 0.5, cautious), after(0.2, 1.0, cautious));
    }
}
