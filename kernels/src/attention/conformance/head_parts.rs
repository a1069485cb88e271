//! Heads in parts, each computed apart.

use burn::backend::Autodiff;
use burn::tensor::{DType, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::run::{attend, gradients, gradients_of, require_grad, to_vec};
use super::{Conformance, Problem};
use crate::attention::{Division, HeadParts, Inputs, dispatch};
use crate::backend::OpBackend;
use crate::testing::Tensor64;

/// Part `at` of `parts` of dimension `dim`, in each of `views` equal pieces of it.
fn part<K: OpBackend, const D: usize>(
    x: &Tensor<K, D>,
    division: Division,
    dim: usize,
    views: usize,
    [at, parts]: [usize; 2],
) -> Tensor<K, D> {
    if division == Division::Shared {
        return x.clone();
    }
    let of_part = x.dims()[dim] / views / parts;
    let of_view = |view| x.clone().narrow(dim, (view * parts + at) * of_part, of_part);
    Tensor::cat((0..views).map(of_view).collect(), dim)
}

/// What a part takes of the inputs.
fn inputs_of_part<V: Conformance, K: OpBackend>(
    variant: &V,
    parts: &HeadParts<V>,
    all: &Inputs<K>,
    at: [usize; 2],
) -> Inputs<K> {
    let views = variant.views();
    let projections = all.projections.iter().zip(&parts.projections);
    let parameters = all.parameters.iter().zip(&parts.parameters);
    Inputs {
        q: part(&all.q, parts.q, 1, views, at),
        k: part(&all.k, parts.k, 1, views, at),
        v: part(&all.v, Division::Split, 1, 1, at),
        projections: projections.map(|(x, division)| part(x, *division, 2, 1, at)).collect(),
        parameters: parameters.map(|(x, division)| part(x, *division, 0, 1, at)).collect(),
    }
}

/// The outputs, then the gradients, of the heads in `parts`.
fn in_parts<V: Conformance, K: OpBackend>(
    variant: &V,
    part: &HeadParts<V>,
    parts: usize,
    problem: &Problem,
    upstream: &Tensor64,
) -> Vec<Vec<f64>> {
    let inputs = require_grad(problem.tensors::<Autodiff<K>>());
    let outputs = (0..parts).map(|at| {
        let inputs = inputs_of_part(variant, part, &inputs, [at, parts]);
        dispatch::attend(&part.variant, &part.shape, inputs, problem.documents())
    });
    let o = Tensor::cat(outputs.collect(), 1);
    let weights = upstream.data.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let weights = Tensor::from_data(TensorData::new(weights, o.dims()), &Default::default());
    let grads = (o.clone().cast(DType::F32) * weights).sum().backward();
    std::iter::once(to_vec(o.inner())).chain(gradients_of(&inputs, &grads)).collect()
}

/// Outputs and gradients of the heads in two and in four parts, where the heads of keys divide so, are those of all
/// heads together.
pub fn heads_in_parts_equal_all<V: Conformance, K: OpBackend>() {
    for variant in V::divided_cases() {
        for [heads, kv_heads] in [[4, 4], [8, 4]] {
            let problem = Problem::new(&variant, [heads, kv_heads, 8, 2, 20], None);
            let problem = problem.packed(&[0, 3, 11]);
            let value_dim = variant.value_dim(&problem.shape);
            let mut rng = ChaCha8Rng::seed_from_u64(7);
            let sizes = [2, heads, 20, value_dim];
            let draw = |_| f64::from(rng.random_range(-1.0f32..1.0));
            let upstream = Tensor64::new(&sizes, (0..sizes.iter().product()).map(draw).collect());
            let mut want = vec![attend::<V, K>(&variant, &problem)];
            want.extend(gradients::<V, K>(&variant, &problem, &upstream));
            let largest = |x: &[f64]| x.iter().fold(0f64, |a, x| a.max(x.abs()));
            let all = want[1..].iter().map(|grad| largest(grad)).fold(0.0, f64::max);
            for parts in [2, 4] {
                let Some(part) = HeadParts::of(&variant, &problem.shape, parts) else {
                    let keys = variant.key_heads(&problem.shape);
                    assert!(!keys.is_multiple_of(parts), "{variant:?} in {parts} parts");
                    continue;
                };
                let got = in_parts::<V, K>(&variant, &part, parts, &problem, &upstream);
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert_eq!(got.len(), want.len());
                    let most = 1e-4 * largest(want).max(if at == 0 { 0.0 } else { 1e-3 * all });
                    let error = got.iter().zip(want).fold(0f64, |a, (x, y)| a.max((x - y).abs()));
                    assert!(
                        error <= most,
                        "{variant:?}, {heads} heads in {parts} parts, result {at}: {error:.1e} > {most:.1e}"
                    );
                }
            }
        }
    }
}
