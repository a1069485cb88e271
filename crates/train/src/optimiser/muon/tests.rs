use burn::tensor::TensorMetadata;
use burn::tensor::bf16;
use longwall_model::HeadBlocks;

use super::*;
use crate::optimiser::elementwise::flat;
use crate::optimiser::tests::{assert_close, numbers, updated};
use crate::testing::TestBackend;

/// A matrix in f64, by rows.
#[derive(Clone, Debug)]
pub(in super::super) struct Matrix(pub Vec<Vec<f64>>);

impl Matrix {
    pub fn new(rows: usize, columns: usize, element: impl Fn(usize, usize) -> f64) -> Self {
        Matrix((0..rows).map(|i| (0..columns).map(|j| element(i, j)).collect()).collect())
    }

    pub fn of(values: &[f32], columns: usize) -> Self {
        let rows = values.len() / columns;
        Matrix::new(rows, columns, |i, j| f64::from(values[i * columns + j]))
    }

    pub fn dims(&self) -> (usize, usize) {
        (self.0.len(), self.0[0].len())
    }

    pub fn map2(&self, other: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        let (rows, columns) = self.dims();
        Matrix::new(rows, columns, |i, j| f(self.0[i][j], other.0[i][j]))
    }

    pub fn scaled(&self, factor: f64) -> Self {
        self.map2(self, |x, _| factor * x)
    }

    pub fn times(&self, other: &Self) -> Self {
        let ((rows, inner), (_, columns)) = (self.dims(), other.dims());
        let element = |i: usize, j: usize| (0..inner).map(|k| self.0[i][k] * other.0[k][j]).sum();
        Matrix::new(rows, columns, element)
    }

    pub fn transposed(&self) -> Self {
        let (rows, columns) = self.dims();
        Matrix::new(columns, rows, |i, j| self.0[j][i])
    }

    pub fn norm(&self) -> f64 {
        self.0.iter().flatten().map(|x| x * x).sum::<f64>().sqrt()
    }

    pub fn elements(&self) -> Vec<f64> {
        self.0.concat()
    }

    /// Rows `from..to`, or columns if `dim` is 1.
    fn part(&self, dim: usize, from: usize, to: usize) -> Self {
        let (rows, columns) = self.dims();
        match dim {
            0 => Matrix::new(to - from, columns, |i, j| self.0[from + i][j]),
            _ => Matrix::new(rows, to - from, |i, j| self.0[i][from + j]),
        }
    }

    /// The orthogonal factor, by the textbook iteration X ← 1.5·X − 0.5·X·XᵀX, which converges to it.
    pub fn polar(&self) -> Self {
        let mut x = self.scaled(1.0 / self.norm());
        for _ in 0..200 {
            let cubed = x.times(&x.transposed().times(&x));
            x = x.map2(&cubed, |x, cubed| 1.5 * x - 0.5 * cubed);
        }
        x
    }

    /// Jordan's five steps, without transposing.
    pub fn newton_schulz(&self) -> Self {
        self.newton_schulz_rounding(|x| x)
    }

    /// As [`Matrix::newton_schulz`], with `round` of every number after each operation.
    pub fn newton_schulz_rounding(&self, round: impl Fn(f64) -> f64) -> Self {
        let rounded = |x: Self| x.map2(&x, |x, _| round(x));
        let plus = |a: Self, b: Self| rounded(a.map2(&b, |a, b| a + b));
        let [a, b, c] = [3.4445, -4.775, 2.0315].map(&round);
        let mut x = rounded(self.scaled(1.0 / self.norm()));
        for _ in 0..5 {
            let gram = rounded(x.transposed().times(&x));
            let (third, fifth) = (rounded(gram.scaled(b)), rounded(gram.times(&gram)));
            let polynomial = plus(third, rounded(fifth.scaled(c)));
            x = plus(rounded(x.scaled(a)), rounded(x.times(&polynomial)));
        }
        x
    }
}

/// Momentum, then what `direction` makes of it, then the step and the decay.
fn expected(
    initial: &[f32],
    gradients: &[Vec<f32>],
    columns: usize,
    direction: impl Fn(&Matrix) -> Matrix,
) -> Matrix {
    let mut w = Matrix::of(initial, columns);
    let mut m = w.scaled(0.0);
    for gradient in gradients {
        let g = Matrix::of(gradient, columns).scaled(0.5);
        m = m.map2(&g, |m, g| 0.95 * m + 0.05 * g);
        let o = direction(&m.map2(&g, |m, g| 0.95 * m + 0.05 * g));
        w = w.map2(&o, |w, o| w - 0.02 * (o + 0.1 * w));
    }
    w
}

fn gradients(count: usize) -> Vec<Vec<f32>> {
    (2..5).map(|seed| numbers(count, seed)).collect()
}

fn matrix(rows: usize, columns: usize) -> Parameter {
    Parameter::new("blocks.0.attention.q.weight".to_owned(), vec![rows, columns])
}

#[test]
fn updates_equal_those_of_an_f64_implementation() {
    for (rows, columns) in [(6, 10), (10, 6), (7, 7)] {
        let (initial, gradients) = (numbers(rows * columns, 1), gradients(rows * columns));
        for scale in [Scale::MatchRms, Scale::Spectral] {
            let factor = match scale {
                Scale::MatchRms => 0.2 * (rows.max(columns) as f64).sqrt(),
                Scale::Spectral if rows > columns => (rows as f64 / columns as f64).sqrt(),
                Scale::Spectral => 1.0,
            };
            let kind = Config { scale, ..Config::default() };
            let found = updated(&kind, &matrix(rows, columns), &initial, &gradients, 0.02);
            let direction = |u: &Matrix| u.newton_schulz().scaled(factor);
            let expected = expected(&initial, &gradients, columns, direction).elements();
            assert_close(&found[0], &expected, 1e-5, &format!("{rows} x {columns}, {scale:?}"));
        }
    }
}

#[test]
fn with_per_head_each_heads_block_is_a_matrix_of_its_own() {
    let (rows, columns) = (12, 8);
    let (initial, gradients) = (numbers(rows * columns, 1), gradients(rows * columns));
    for (dim, count) in [(0, 3), (1, 4), (1, 2)] {
        let parameter =
            Parameter { heads: Some(HeadBlocks { dim, count }), ..matrix(rows, columns) };
        let size = [rows, columns][dim] / count;
        let direction = |u: &Matrix| {
            let blocks: Vec<Matrix> = (0..count)
                .map(|n| u.part(dim, n * size, (n + 1) * size).newton_schulz())
                .map(|block| {
                    let (rows, columns) = block.dims();
                    block.scaled(0.2 * (rows.max(columns) as f64).sqrt())
                })
                .collect();
            Matrix::new(rows, columns, |i, j| match dim {
                0 => blocks[i / size].0[i % size][j],
                _ => blocks[j / size].0[i][j % size],
            })
        };
        let expected = expected(&initial, &gradients, columns, direction).elements();
        let kind = Config { per_head: true, ..Config::default() };
        let found = updated(&kind, &parameter, &initial, &gradients, 0.02);
        assert_close(&found[0], &expected, 1e-5, &format!("{count} blocks along {dim}"));
        let whole = updated(&Config::default(), &parameter, &initial, &gradients, 0.02);
        assert_ne!(found[0], whole[0]);
    }
}

#[test]
fn in_bf16_the_error_is_that_of_rounding_each_operation() {
    let to_bf16 = |x: f64| bf16::from_f64(x).to_f64();
    for (rows, columns) in [(24, 40), (40, 24), (32, 32)] {
        let values = numbers(rows * columns, 1);
        let u = Matrix::of(&values, columns);
        let exact = u.newton_schulz();
        let error = |found: &Matrix| found.map2(&exact, |found, exact| found - exact).norm();
        let tensor = Tensor::<TestBackend, 1>::from_floats(&values[..], &Default::default());
        let found = |precision| {
            let x = tensor.clone().reshape([1, rows, columns]);
            let o = orthogonal(x, Coefficients::NewtonSchulz, 5, precision);
            assert_eq!(o.dtype(), DType::F32);
            Matrix::of(&o.into_data().to_vec().unwrap(), columns)
        };
        // The same precision may err twice as much as another order of its operations does.
        let allowed = 2.0 * error(&u.newton_schulz_rounding(to_bf16));
        let [in_bf16, in_f32] = [DType::BF16, DType::F32].map(|dtype| error(&found(dtype)));
        let norm = exact.norm();
        assert!(in_bf16 <= allowed, "{rows} x {columns}: {in_bf16}, allowed {allowed}");
        assert!(allowed < 0.2 * norm, "{rows} x {columns}: {allowed} of {norm}");
        assert!(in_f32 < 0.01 * in_bf16, "{rows} x {columns}: {in_f32} in f32, {in_bf16} in bf16");
    }
}

#[test]
fn polar_express_in_bf16_is_orthogonal_up_to_rounding() {
    let (found, _) = orthogonalised(Coefficients::PolarExpress, 10, DType::BF16);
    let o = Matrix::of(&found, 20);
    let identity = Matrix::new(12, 12, |i, j| f64::from(u8::from(i == j)));
    let error = o.times(&o.transposed()).map2(&identity, |gram, identity| gram - identity);
    // The last step rounds about four times, by up to 2⁻⁹ each, which the product doubles.
    let allowed = 2.0 * 4.0 * 2f64.powi(-9) * identity.norm();
    assert!(error.norm() < allowed, "{}, allowed {allowed}", error.norm());
}

fn orthogonal(
    x: Tensor<TestBackend, 3>,
    coefficients: Coefficients,
    steps: usize,
    precision: DType,
) -> Tensor<TestBackend, 3> {
    orthogonal_all(vec![(x, precision)], coefficients, steps).swap_remove(0)
}

/// The new values and states of parameters, one after the other, after an update of all of them at once, or of each on
/// its own.
fn steps(kind: &Config, parameters: &[Parameter], copy: Option<DType>, at_once: bool) -> Vec<f32> {
    let tensor = |shape: &[usize], seed| {
        let values = numbers(shape.iter().product(), seed);
        unflat(Tensor::<TestBackend, 1>::from_floats(&values[..], &Default::default()), shape)
    };
    let update = Update { lr: 0.5, number: 1, grad_scale: 0.25 };
    let steps = parameters.iter().enumerate().map(|(at, parameter)| {
        let seed = 10 * at as u64;
        let inputs = StepInputs::<TestBackend> {
            parameter: tensor(&parameter.shape, seed + 1),
            gradient: tensor(&parameter.shape, seed + 2),
            state: vec![tensor(&parameter.shape, seed + 3)],
            copy,
        };
        Step { parameter, update, inputs }
    });
    let outputs = match at_once {
        true => kind.step_all(steps.collect()),
        false => steps.flat_map(|step| kind.step_all(vec![step])).collect(),
    };
    let all = outputs.into_iter().flat_map(|new| [new.parameter].into_iter().chain(new.state));
    let elements = |x| {
        let count = TensorMetadata::shape(&x).num_elements();
        flat::<TestBackend>(x, &[count]).into_data().to_vec::<f32>().unwrap()
    };
    all.flat_map(elements).collect()
}

#[test]
fn matrices_updated_at_once_move_as_each_on_its_own() {
    let heads = |dim| Some(HeadBlocks { dim, count: 4 });
    let parameters = [
        matrix(24, 40),
        matrix(40, 24),
        Parameter { heads: heads(0), ..matrix(24, 40) },
        Parameter { heads: heads(1), ..matrix(24, 24) },
        matrix(24, 40),
        matrix(6, 40),
    ];
    for per_head in [false, true] {
        let kind = Config { per_head, ..Config::default() };
        for copy in [None, Some(DType::BF16)] {
            let [once, each] = [true, false].map(|once| steps(&kind, &parameters, copy, once));
            let each: Vec<_> = each.into_iter().map(f64::from).collect();
            assert_close(&once, &each, 1e-6, &format!("per_head {per_head}, {copy:?}"));
        }
    }
}

#[test]
fn a_matrix_is_made_orthogonal_in_the_type_that_the_model_holds_it_in() {
    let kind = Config { momentum: 0.0, ..Config::default() };
    let found = [None, Some(DType::BF16)].map(|copy| steps(&kind, &[matrix(24, 40)], copy, true));
    let values =
        |seed| Tensor::<TestBackend, 1>::from_floats(&numbers(960, seed)[..], &Default::default());
    let moved = |precision| {
        let x = values(2).reshape([1, 24, 40]) * 0.25;
        let o = orthogonal(x, Coefficients::NewtonSchulz, 5, precision).reshape([960]);
        let new = values(1) * 0.95 - o * (0.5 * 0.2 * 40f64.sqrt());
        new.into_data().iter::<f64>().collect::<Vec<_>>()
    };
    let [in_f32, in_bf16] = [DType::F32, DType::BF16].map(moved);
    for (found, expected) in found.iter().zip([&in_f32, &in_bf16]) {
        assert_close(&found[..960], expected, 1e-6, "the new values");
    }
    assert!(in_f32.iter().zip(&in_bf16).any(|(a, b)| (a - b).abs() > 1e-4), "bf16 rounds");
}

/// The orthogonal factor of a 12 × 20 matrix whose singular values span three orders of magnitude.
fn orthogonalised(
    coefficients: Coefficients,
    steps: usize,
    precision: DType,
) -> (Vec<f32>, Matrix) {
    let random = |seed| Matrix::of(&numbers(12 * 20, seed), 20).polar();
    let (left, right) = (random(1), random(2));
    let spectrum =
        Matrix::new(12, 12, |i, j| if i == j { 10f64.powf(-(i as f64) / 4.0) } else { 0.0 });
    let left = left.times(&left.transposed()).times(&spectrum);
    let x = left.times(&right);
    let values: Vec<f32> = x.elements().iter().map(|&x| x as f32).collect();
    let tensor = Tensor::<TestBackend, 1>::from_floats(&values[..], &Default::default());
    let o = orthogonal(tensor.reshape([1, 12, 20]), coefficients, steps, precision);
    (o.into_data().to_vec().unwrap(), x.polar())
}

#[test]
fn polar_express_converges_to_the_orthogonal_factor() {
    let (found, exact) = orthogonalised(Coefficients::PolarExpress, 10, DType::F32);
    assert_close(&found, &exact.elements(), 1e-4, "after 10 steps");
    let distance = |coefficients, steps| {
        let (found, exact) = orthogonalised(coefficients, steps, DType::F32);
        Matrix::of(&found, 20).map2(&exact, |found, exact| found - exact).norm()
    };
    let (polar, jordan) =
        (distance(Coefficients::PolarExpress, 6), distance(Coefficients::NewtonSchulz, 6));
    assert!(polar < 0.5 * jordan, "{polar} and {jordan}");
}

#[test]
fn newton_schulz_brings_singular_values_near_one() {
    let (found, _) = orthogonalised(Coefficients::NewtonSchulz, 8, DType::F32);
    let o = Matrix::of(&found, 20);
    // The eigenvalues of O·Oᵀ are the squares of the singular values; the trace is their sum.
    let gram = o.times(&o.transposed());
    let trace: f64 = (0..12).map(|i| gram.0[i][i]).sum();
    assert!((0.6..1.3).contains(&(trace / 12.0)), "{trace}");
    let squares = gram.times(&gram);
    let spread = (0..12).map(|i| squares.0[i][i]).sum::<f64>() / 12.0 - (trace / 12.0).powi(2);
    assert!(spread < 0.1, "the eigenvalues' variance is {spread}");
}

#[test]
fn a_zero_gradient_moves_nothing_but_the_decay() {
    let initial = numbers(24, 1);
    let found = updated(&Config::default(), &matrix(4, 6), &initial, &[vec![0.0; 24]], 0.5);
    let expected: Vec<f64> = initial.iter().map(|&w| f64::from(w) * (1.0 - 0.5 * 0.1)).collect();
    assert_close(&found[0], &expected, 1e-6, "w");
}

#[test]
fn other_parameters_follow_adamw_at_its_own_rate() {
    let kind = Config { adamw_lr: 0.25, ..Config::default() };
    let (initial, gradients) = (numbers(24, 1), gradients(24));
    for (path, shape) in
        [("embedding", vec![4, 6]), ("head", vec![4, 6]), ("norm.weight", vec![24])]
    {
        let parameter = Parameter::new(path.to_owned(), shape);
        let found = updated(&kind, &parameter, &initial, &gradients, 0.04);
        let alone = updated(&adamw::Config::default(), &parameter, &initial, &gradients, 0.01);
        assert_eq!(found, alone, "{path}");
        let Method { name, lr, .. } = kind.method(&parameter);
        assert_eq!((name, lr), ("adamw", 0.25));
    }
    let expected = Method { name: "muon", lr: 1.0, weight_decay: 0.1 };
    assert_eq!(kind.method(&matrix(4, 6)), expected);
}

#[test]
fn a_matrix_whose_squares_underflow_stays_small() {
    let x = Tensor::<TestBackend, 3>::full([1, 64, 48], 2.5e-23, &Default::default());
    let (jordan, polar) = ((Coefficients::NewtonSchulz, 5), (Coefficients::PolarExpress, 8));
    for (coefficients, steps) in [jordan, polar] {
        for precision in [DType::F32, DType::BF16] {
            let found = orthogonal(x.clone(), coefficients, steps, precision).into_data();
            let largest = found.iter::<f64>().fold(0.0f64, |a, x| a.max(x.abs()));
            assert!(largest.is_finite() && largest < 1e-3, "{coefficients:?}: {largest}");
        }
    }
}
