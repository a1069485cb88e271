//! Numerics at 65,536 tokens, with gates that decay as strongly as they can, not at all, alternating and
//! at random, against the recurrence and its gradients in f64.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::attention::linear::GatedLinear;
use crate::attention::linear::reference::LinearInputs;
use crate::backend::{OpBackend, primitive, tensor, with_reference};

type Ad = Autodiff<Flex>;

const SEQ_LEN: usize = 65_536;
const D: usize = 4;
/// Rows, one for each kind of gate.
const ROWS: usize = 4;

type Matrix = [[f64; D]; D];

/// q, k, v, the upstream gradient and log decays, `[ROWS, SEQ_LEN, D]` each.
fn problem() -> [Vec<f32>; 5] {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let n = ROWS * SEQ_LEN * D;
    let mut random = || (0..n).map(|_| rng.random_range(-1.0..1.0)).collect::<Vec<f32>>();
    let [q, k, v, upstream] = [random(), random(), random(), random()];
    let log_decay = (0..n).map(|at| match (at / D / SEQ_LEN, at / D % SEQ_LEN) {
        (0, _) => -30.0,
        (1, _) => 0.0,
        (2, t) => [-30.0, -1e-4][(t + at % D) % 2],
        _ => [-30.0, -0.7, -1e-4, 0.0]
            [if rng.random_bool(0.99) { 3 } else { rng.random_range(0..4) }],
    });
    let log_decay = log_decay.collect();
    [q, k, v, upstream, log_decay]
}

fn run([q, k, v, upstream, log_decay]: &[Vec<f32>; 5]) -> [Vec<f64>; 5] {
    let tensor3 = |x: &Vec<f32>| {
        let data = TensorData::new(x.clone(), [ROWS, SEQ_LEN, D]);
        Tensor::<Ad, 3>::from_data(data, &Default::default()).require_grad()
    };
    let inputs = [q, k, v, log_decay].map(tensor3);
    let [q, k, v, log_decay] = inputs.clone();
    let inputs4 = [q, k, v, log_decay].map(|x| primitive(x.unsqueeze_dim::<4>(1)));
    let y: Tensor<Ad, 4> = tensor(Ad::run(&GatedLinear { chunk: 64 }, inputs4, vec![]));
    let y = y.squeeze_dim::<3>(1);
    let grads = (y.clone() * tensor3(upstream)).sum().backward();
    let of = |x: Tensor<Flex, 3>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let [d_q, d_k, d_v, d_decay] = inputs.map(|x| of(x.grad(&grads).unwrap()));
    [of(y.inner()), d_q, d_k, d_v, d_decay]
}

/// S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ and its gradients backwards through time.
fn definition(inputs: &[Vec<f32>; 5]) -> [Vec<f64>; 5] {
    let mut all: [Vec<f64>; 5] = std::array::from_fn(|_| vec![0.0; ROWS * SEQ_LEN * D]);
    for row in 0..ROWS {
        let at = |t: usize, n: usize| (row * SEQ_LEN + t) * D + n;
        let [q, k, v, upstream, decay] =
            [0, 1, 2, 3, 4].map(|x| move |t, n| f64::from(inputs[x][at(t, n)]));
        let mut states: Vec<Matrix> = vec![[[0.0; D]; D]];
        for t in 0..SEQ_LEN {
            let mut state = states[t];
            for n in 0..D {
                for m in 0..D {
                    state[n][m] = decay(t, n).exp() * state[n][m] + k(t, n) * v(t, m);
                    all[0][at(t, m)] += q(t, n) * state[n][m];
                }
            }
            states.push(state);
        }
        let mut d_state: Matrix = [[0.0; D]; D];
        for t in (0..SEQ_LEN).rev() {
            for n in 0..D {
                for m in 0..D {
                    d_state[n][m] += q(t, n) * upstream(t, m);
                    all[1][at(t, n)] += states[t + 1][n][m] * upstream(t, m);
                    all[2][at(t, n)] += d_state[n][m] * v(t, m);
                    all[3][at(t, m)] += d_state[n][m] * k(t, n);
                    d_state[n][m] *= decay(t, n).exp();
                    all[4][at(t, n)] += d_state[n][m] * states[t][n][m];
                }
            }
        }
    }
    all
}

#[test]
fn outputs_and_gradients_are_exact_to_rounding_under_any_gate() {
    let problem = problem();
    let want = definition(&problem);
    check(&run(&problem), &want);
    check(&with_reference(|| run(&problem)), &want);
}

fn check(got: &[Vec<f64>; 5], want: &[Vec<f64>; 5]) {
    for (what, (got, want)) in got.iter().zip(want).enumerate() {
        for row in 0..ROWS {
            let range = row * SEQ_LEN * D..(row + 1) * SEQ_LEN * D;
            let (got, want) = (&got[range.clone()], &want[range]);
            let largest = want.iter().fold(1e-6f64, |a, x| a.max(x.abs()));
            for (at, (got, want)) in got.iter().zip(want).enumerate() {
                assert!(
                    (got - want).abs() <= 2e-5 * largest,
                    "{what}, gates {row}, element {at}: {got} where {want} is right, largest \
                     value {largest}"
                );
            }
        }
    }
}

/// A prefill with single steps ends in the same state as one pass.
#[test]
fn the_state_does_not_depend_on_how_tokens_arrive() {
    let random = |shape: [usize; 4], seed: f32| {
        let n = shape.iter().product::<usize>();
        let data: Vec<f32> = (0..n).map(|at| (at as f32 * 1.37 + seed).sin()).collect();
        Tensor::<Flex, 4>::from_data(TensorData::new(data, shape), &Default::default())
    };
    let rows = |first: usize, n: usize| {
        let part = |x: Tensor<Flex, 4>| x.narrow(2, first, n);
        let one = |seed| part(random([2, 1, 300, 8], seed));
        LinearInputs {
            q: part(random([2, 3, 300, 8], 0.0)),
            k: one(1.0),
            v: one(2.0),
            log_decay: (one(3.0) - 1.0) * 5.0,
        }
    };
    let linear = GatedLinear { chunk: 16 };
    let (_, want) = linear.forward(rows(0, 300), None);
    let mut state = None;
    let mut first = 0;
    for n in [100, 1, 1, 16, 33, 149] {
        state = Some(linear.forward(rows(first, n), state).1);
        first += n;
    }
    let error = (state.unwrap() - want.clone()).abs().max().into_scalar();
    assert!(error <= 1e-6 * want.abs().max().into_scalar(), "off by {error}");
}
