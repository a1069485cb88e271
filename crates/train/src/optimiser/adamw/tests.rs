use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorMetadata};
use longwall_kernels::backend::primitive;
use longwall_model::weights::named_tensors;

use super::*;
use crate::optimiser::tests::{gradients, update, values};
use crate::optimiser::{Optimiser, OptimiserConfig};
use crate::testing::{TestBackend, tiny_model};

#[test]
fn the_files_name_the_moments_m_and_v() {
    let parameter = Parameter { path: "head".to_owned(), shape: vec![3, 2] };
    let names = Config::default().state(&parameter).into_iter().map(|tensor| tensor.name);
    assert_eq!(names.collect::<Vec<_>>(), ["m", "v"]);
}

#[test]
fn without_gradients_the_decay_alone_shrinks_matrices() {
    let model = tiny_model(0);
    let before = named_tensors(&model);
    let config = OptimiserConfig::Adamw(Config::default());
    let mut optimiser = Optimiser::<TestBackend>::new(&config, &model);
    let mut zero = gradients(&model);
    for gradient in zero.tensors.iter_mut().flatten() {
        let shape = gradient.shape();
        let zeros = Tensor::<TestBackend, 1>::zeros([shape.num_elements()], &Default::default());
        *gradient = TestBackend::float_reshape(primitive(zeros), shape);
    }
    let after = values(&optimiser.step(model, zero, update(1)));
    for ((path, shape, before), (_, after)) in before.into_iter().zip(after) {
        let parameter = Parameter { path, shape };
        let factor = if parameter.decays() { 1.0 - 1e-2 * 0.1 } else { 1.0 };
        for (before, after) in before.iter().zip(after) {
            let name = &parameter.path;
            assert!((before * factor - after).abs() < 1e-6, "{name}: {before} became {after}");
        }
    }
}
