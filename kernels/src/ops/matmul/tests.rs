use burn::tensor::TensorData;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::testing::{Case, Tensor64, assert_budget, check_on};
use crate::{Cpu, Cuda};

fn random<B: OpBackend>(shape: [usize; 4]) -> Tensor<B, 4> {
    let mut rng = ChaCha8Rng::seed_from_u64(shape.iter().product::<usize>() as u64);
    let data: Vec<f32> =
        (0..shape.iter().product()).map(|_| rng.random_range(-1.7f32..1.7)).collect();
    Tensor::from_data(TensorData::new(data, shape), &Default::default())
}

fn oracle<B: OpBackend>(x: Tensor<B, 4>) -> Tensor64 {
    let shape = x.dims();
    Tensor64::new(&shape, x.into_data().iter::<f64>().collect())
}

/// The definition, for `[…, m, k]` and `[…, k, n]`.
fn product(a: &Tensor64, b: &Tensor64) -> Tensor64 {
    let outer = a.shape.len() - 2;
    let shape = [&a.shape[..outer + 1], &b.shape[outer + 1..]].concat();
    Tensor64::from_fn(&shape, |at| {
        let (mut left, mut right) = (at.to_vec(), at.to_vec());
        (0..b.shape[outer])
            .map(|k| {
                (left[outer + 1], right[outer]) = (k, k);
                a.at(&left) * b.at(&right)
            })
            .sum()
    })
}

fn agrees_with_the_oracle<B: OpBackend>() {
    for [m, k, n] in [[1, 1, 1], [5, 7, 3], [1, 9, 1], [64, 64, 64], [33, 130, 65]] {
        let case = Case::new(Product::<2>, &[&[m, k], &[k, n]]);
        check_on::<B, _, _>(case, |x| product(&x[0], &x[1]));
        let case = Case::new(Product::<4>, &[&[2, 3, m, k], &[2, 3, k, n]]);
        check_on::<B, _, _>(case, |x| product(&x[0], &x[1]));
    }
}

/// Factors in every memory layout of burn's views.
fn agrees_on_views<B: OpBackend>() {
    fn views<B: OpBackend>() -> Vec<[Tensor<B, 4>; 2]> {
        let (a, b) = (random::<B>([2, 3, 17, 9]), random::<B>([2, 3, 9, 21]));
        let by_token = random::<B>([2, 17, 3, 9]);
        vec![
            [a.clone(), b.clone()],
            [random::<B>([2, 3, 9, 17]).transpose(), b.clone()],
            [a.clone(), random::<B>([2, 3, 21, 9]).transpose()],
            [by_token.clone().swap_dims(1, 2), b.clone()],
            [random::<B>([2, 3, 18, 9]).narrow(2, 1, 17), b.clone()],
            [random::<B>([2, 3, 17, 12]).narrow(3, 3, 9), b.clone()],
            [a.clone(), random::<B>([1, 1, 9, 21])],
            [random::<B>([1, 3, 17, 9]), random::<B>([2, 1, 9, 21])],
            [random::<B>([2, 3, 1, 9]).expand([2, 3, 17, 9]), b.clone()],
            [a.clone().narrow(1, 1, 1), b.narrow(1, 2, 1)],
            [a.clone(), a.transpose()],
            [by_token.clone().swap_dims(1, 2), by_token.permute([0, 2, 3, 1])],
            // Many small products, of which only the first is well aligned.
            [random::<B>([48, 128, 1, 64]), random::<B>([48, 128, 1, 64]).transpose()],
            [random::<B>([48, 128, 1, 1]), random::<B>([48, 128, 1, 64])],
            [random::<B>([70, 1000, 2, 3]), random::<B>([70, 1000, 3, 1])],
        ]
    }
    for (at, ([a, b], [c, d])) in views::<B>().into_iter().zip(views::<Cpu>()).enumerate() {
        let kernel = oracle(a.mm(b));
        let mut sizes = c.dims();
        (sizes[0], sizes[1]) = (sizes[0].max(d.dims()[0]), sizes[1].max(d.dims()[1]));
        let mut other = d.dims();
        (other[0], other[1]) = (sizes[0], sizes[1]);
        let want = product(&oracle(c.clone().expand(sizes)), &oracle(d.clone().expand(other)));
        let reference = oracle(c.mm(d));
        assert_eq!(kernel.shape, want.shape, "views {at}");
        assert_budget(&format!("views {at}"), &kernel.data, &reference.data, &want.data);
    }
}

#[test]
fn products_agree_with_the_oracle() {
    agrees_with_the_oracle::<Cpu>();
}

#[test]
fn products_of_views_agree_with_the_oracle() {
    agrees_on_views::<Cpu>();
}

mod cuda {
    use super::*;

    #[test]
    #[ignore = "needs a GPU"]
    fn products_agree_with_the_oracle() {
        agrees_with_the_oracle::<Cuda>();
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn products_of_views_agree_with_the_oracle() {
        agrees_on_views::<Cuda>();
    }

    /// Products run on a different stream: each must wait for all work before it, and all later work for
    /// it.
    #[test]
    #[ignore = "needs a GPU"]
    fn products_keep_their_place_among_other_work() {
        let chain = || {
            let w = random::<Cuda>([1, 1, 512, 512]) / 512f32.sqrt();
            let mut x = random::<Cuda>([1, 1, 512, 512]);
            for _ in 0..300 {
                x = (x.clone().mm(w.clone()) + x.mm(w.clone()).sin()).tanh();
            }
            oracle(x).data
        };
        let first = chain();
        assert!(first.iter().any(|&x| x.abs() > 1e-3), "the chain died out");
        for _ in 0..3 {
            assert_eq!(first, chain());
        }
    }
}
