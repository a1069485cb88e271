use super::*;
use crate::ops::support::{Ad, assert_nan_shows, assert_views_agree, strides, values, wave};
use crate::testing::{Case, Tensor64, check};

const KINDS: [Activation; 6] = [
    Activation::Gelu,
    Activation::ReluSquared,
    Activation::Silu,
    Activation::Sigmoid,
    Activation::LogSigmoid,
    Activation::EluPlusOne,
];

const GATES: [GateActivation; 2] = [GateActivation::Sigmoid, GateActivation::Silu];

fn definition(kind: Activation, x: f64) -> f64 {
    match kind {
        Activation::Gelu => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            x / 2.0 * (1.0 + u.tanh())
        }
        Activation::ReluSquared => x.max(0.0).powi(2),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::LogSigmoid => x.min(0.0) - (-x.abs()).exp().ln_1p(),
        Activation::EluPlusOne => x.max(0.0) + x.min(0.0).exp(),
    }
}

#[test]
fn agree_with_the_oracle_and_its_gradients() {
    for kind in KINDS {
        for shape in [&[1][..], &[3, 7], &[2, 65, 33], &[1, 2, 3, 4097]] {
            for range in [1.7, 12.0] {
                let case = Case::new(kind, &[shape]).uniform(0, -range..range);
                check(case, |inputs| {
                    let x = &inputs[0];
                    Tensor64::new(&x.shape, x.data.iter().map(|&x| definition(kind, x)).collect())
                });
            }
        }
    }
}

/// f(gate) · x.
fn gated_by_definition(f: GateActivation, inputs: &[Tensor64]) -> Tensor64 {
    let [gate, x] = inputs else { panic!("{} inputs", inputs.len()) };
    let value = |(&gate, x): (&f64, &f64)| definition(f.activation(), gate) * x;
    Tensor64::new(&gate.shape, gate.data.iter().zip(&x.data).map(value).collect())
}

#[test]
fn gated_agrees_with_the_oracle_and_its_gradients() {
    for f in GATES {
        for shape in [&[1, 1, 1][..], &[2, 7, 33], &[3, 4099]] {
            for range in [1.7, 12.0] {
                let case = Case::new(Gated(f), &[shape, shape]).uniform(0, -range..range);
                check(case, |inputs| gated_by_definition(f, inputs));
            }
        }
    }
}

#[test]
fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
    let view = || wave([2, 5, 3, 7], 0.0).swap_dims(1, 2);
    for kind in KINDS {
        assert_views_agree(view(), |x| activation(kind, x));
        assert_eq!(strides(&activation(kind, view())), strides(&view()));
    }
    let up = wave([2, 3, 5, 7], 1.0);
    for f in GATES {
        assert_views_agree(view(), |gate| gated(f, gate, up.clone()));
        assert_views_agree(wave([3, 20], 0.0).narrow(1, 5, 10), |x| gated(f, x.clone(), x));
    }
}

#[test]
fn extreme_values_stay_finite_and_a_nan_shows() {
    let x = Tensor::<Ad, 1>::from_floats([-1e6, -90.0, 90.0, 1e6], &Default::default());
    assert_eq!(values(gelu(x.clone())), [0.0, 0.0, 90.0, 1e6]);
    assert_eq!(values(silu(x.clone())), [0.0, 0.0, 90.0, 1e6]);
    assert_eq!(values(sigmoid(x.clone())), [0.0, 0.0, 1.0, 1.0]);
    assert_eq!(values(elu_plus_one(x.clone()))[2..], [91.0, 1e6 + 1.0]);
    let tail = values(log_sigmoid(x));
    assert_eq!(tail[..2], [-1e6, -90.0]);
    assert!(tail[2..].iter().all(|&x| (-1e-30..=0.0).contains(&x)), "{tail:?}");
    for kind in KINDS {
        assert_nan_shows(wave([5, 9], 0.0), |x| activation(kind, x));
    }
    for f in GATES {
        assert_nan_shows(wave([5, 9], 0.0), |x| gated(f, x, wave([5, 9], 1.0)));
    }
}

mod cuda {
    use super::*;
    use crate::ops::support::gpu::{floats, wave};
    use crate::testing::check_on;

    #[test]
    #[ignore = "needs a GPU"]
    fn agree_with_the_oracle_and_its_gradients() {
        for kind in KINDS {
            for shape in [&[1][..], &[3, 7], &[2, 65, 33], &[1, 2, 3, 4097]] {
                for range in [1.7, 12.0] {
                    let oracle = |inputs: &[Tensor64]| {
                        let x = &inputs[0];
                        let y = x.data.iter().map(|&x| definition(kind, x)).collect();
                        Tensor64::new(&x.shape, y)
                    };
                    let case = || Case::new(kind, &[shape]).uniform(0, -range..range);
                    check_on::<crate::Cuda, _, 1>(case(), oracle);
                    check_on::<crate::Cuda, _, 1>(case().bf16(&[0]), oracle);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gated_agrees_with_the_oracle_and_its_gradients() {
        for f in GATES {
            for shape in [&[1, 1, 1][..], &[2, 7, 33], &[3, 4099]] {
                for range in [1.7, 12.0] {
                    let oracle = |inputs: &[Tensor64]| gated_by_definition(f, inputs);
                    let case = || Case::new(Gated(f), &[shape, shape]).uniform(0, -range..range);
                    check_on::<crate::Cuda, _, 2>(case(), oracle);
                    check_on::<crate::Cuda, _, 2>(case().bf16(&[0, 1]), oracle);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
        // 8 channels, because burn pads rows of 7.
        let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
        for kind in KINDS {
            assert_views_agree(view(), |x| activation(kind, x));
            assert_eq!(strides(&activation(kind, view())), strides(&view()));
        }
        let up = wave([2, 3, 5, 8], 1.0);
        for f in GATES {
            assert_views_agree(view(), |gate| gated(f, gate, up.clone()));
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn extreme_values_stay_finite_and_a_nan_shows() {
        let x = || floats(vec![-1e6, -90.0, 90.0, 1e6], [4]);
        for (smooth, large) in [
            (values(gelu(x())), [90.0, 1e6]),
            (values(silu(x())), [90.0, 1e6]),
            (values(sigmoid(x())), [1.0, 1.0]),
        ] {
            assert!(smooth[..2].iter().all(|x| x.abs() < 1e-30), "{smooth:?}");
            assert_eq!(smooth[2..], large);
        }
        let tail = values(log_sigmoid(x()));
        assert_eq!(tail[..2], [-1e6, -90.0]);
        assert!(tail[2..].iter().all(|&x| (-1e-30..=0.0).contains(&x)), "{tail:?}");
        for kind in KINDS {
            assert_nan_shows(wave([5, 9], 0.0), |x| activation(kind, x));
        }
        for f in GATES {
            assert_nan_shows(wave([5, 9], 0.0), |x| gated(f, x, wave([5, 9], 1.0)));
        }
    }
}
