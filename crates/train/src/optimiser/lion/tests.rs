use super::*;
use crate::optimiser::tests::{assert_close, numbers, updated};

#[test]
fn updates_equal_those_of_an_f64_implementation() {
    let initial = numbers(40, 1);
    let gradients: Vec<Vec<f32>> = (2..6).map(|seed| numbers(40, seed)).collect();
    let parameter = Parameter::new("head".to_owned(), vec![8, 5]);
    for cautious_decay in [false, true] {
        let kind = Config { weight_decay: 2.0, cautious_decay, ..Config::default() };
        let found = updated(&kind, &parameter, &initial, &gradients, 0.02);
        let after = |at: usize| -> [f64; 2] {
            let (mut p, mut m) = (f64::from(initial[at]), 0.0);
            for gradient in &gradients {
                let g = 0.5 * f64::from(gradient[at]);
                let u = (0.9 * m + 0.1 * g).signum();
                let decays = !cautious_decay || u * p >= 0.0;
                p -= 0.02 * (u + if decays { 2.0 * p } else { 0.0 });
                m = 0.99 * m + 0.01 * g;
            }
            [p, m]
        };
        for (tensor, name) in ["p", "m"].into_iter().enumerate() {
            let expected: Vec<f64> = (0..40).map(|at| after(at)[tensor]).collect();
            assert_close(&found[tensor], &expected, 1e-6, name);
        }
    }
}
