use burn::tensor::{DType, Tensor};

use super::*;
use crate::backend::{primitive, tensor};
use crate::cuda::blas::Rounding;
use crate::ops::linear::cuda::{self, LinearEpilogue};
use crate::ops::support::gpu;

/// The e4m3 number nearest to x, ties to even, from the format's definition: 3 bits of mantissa, exponents from
/// −6 up, at most 448.
fn nearest(x: f64) -> f64 {
    if x == 0.0 || x.is_nan() {
        return x;
    }
    let step = (x.abs().log2().floor().max(-6.0) - 3.0).exp2();
    ((x / step).round_ties_even() * step).clamp(-448.0, 448.0)
}

/// The number that a byte stands for.
fn decoded(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * (-9f64).exp2(),
        _ => (8.0 + mantissa) * f64::from(exponent - 10).exp2(),
    };
    if byte >> 7 == 1 { -magnitude } else { magnitude }
}

/// A matrix of rows in f64.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    columns: usize,
    data: Vec<f64>,
}

impl Matrix {
    fn at(&self, row: usize, column: usize) -> f64 {
        self.data[row * self.columns + column]
    }

    fn transposed(&self) -> Matrix {
        let (rows, columns) = (self.columns, self.rows);
        let data = (0..rows * columns).map(|i| self.at(i % columns, i / columns)).collect();
        Matrix { rows, columns, data }
    }

    /// Its rounded values and the scale, by their definition.
    fn rounded(&self) -> (Matrix, f64) {
        let largest = self.data.iter().fold(0f64, |largest, x| largest.max(x.abs()));
        let exponent = (largest / 448.0).log2().ceil();
        let scale = exponent.max(-100.0).exp2();
        assert!(largest <= 448.0 * scale && (largest > 224.0 * scale || exponent < -100.0));
        let data = self.data.iter().map(|x| nearest(x / scale)).collect();
        (Matrix { data, ..*self }, scale)
    }

    /// What a product's factor holds after rounding.
    fn as_factor(&self) -> Matrix {
        let (values, scale) = self.rounded();
        Matrix { data: values.data.iter().map(|x| x * scale).collect(), ..values }
    }
}

/// a bᵀ, and the sum of the terms' magnitudes of each element.
fn product_of(a: &Matrix, b: &Matrix) -> [Matrix; 2] {
    assert_eq!(a.columns, b.columns);
    let sums = |f: fn(f64) -> f64| {
        let element = |i: usize| {
            let (row, column) = (i / b.rows, i % b.rows);
            (0..a.columns).map(|k| f(a.at(row, k) * b.at(column, k))).sum()
        };
        let data = (0..a.rows * b.rows).map(element).collect();
        Matrix { rows: a.rows, columns: b.rows, data }
    };
    [sums(|x| x), sums(f64::abs)]
}

/// A matrix on the GPU in bf16, and its values.
fn matrix(rows: usize, columns: usize, phase: f32, factor: f32) -> (CudaTensor, Matrix) {
    let x = gpu::wave([rows, columns], phase).inner() * factor;
    on_gpu(x)
}

fn on_gpu(x: Tensor<crate::Cuda, 2>) -> (CudaTensor, Matrix) {
    let x = x.cast(DType::BF16);
    let [rows, columns] = x.dims();
    let data = x.clone().cast(DType::F32).into_data().iter::<f64>().collect();
    // burn may pad rows.
    (crate::cuda::contiguous(&primitive(x)), Matrix { rows, columns, data })
}

fn floats(x: &CudaTensor) -> Vec<f64> {
    let flat = crate::cuda::reshaped(x, &[elements(x)]);
    let x = tensor::<crate::Cuda, 1>(flat).cast(DType::F32);
    x.into_data().iter::<f64>().collect()
}

fn bytes(x: &CudaTensor) -> Vec<u8> {
    let bytes = x.client.read_one(x.handle.clone()).expect("the buffer is read");
    bytes[..elements(x)].to_vec()
}

fn values(x: &E4m3Matrix) -> Vec<f64> {
    bytes(&x.values).into_iter().map(decoded).collect()
}

/// Asserts that each element is within 2⁻⁸ of the sum of its terms' magnitudes, because tensor cores align 32
/// terms and their sum so far to the largest and cut all of them to 13 bits, which loses 2⁻⁸ of the largest at
/// most, and within `ulp` of itself: the rounding of the result. Every 128 terms, the sum is added to one in f32.
fn assert_near(got: &CudaTensor, [want, magnitudes]: &[Matrix; 2], ulp: f64) {
    for ((got, want), sum) in floats(got).iter().zip(&want.data).zip(&magnitudes.data) {
        let allowed = sum / 256.0 + ulp * (want.abs() + sum / 256.0);
        assert!((got - want).abs() <= allowed, "{got} for {want}, {sum} in magnitude");
    }
}

/// The product's bounds if its sums stay in the tensor cores, as they do forward: each 32 terms add up to 2⁻⁸
/// of the sum so far to the error, half of it in the mean; that sum is half of the last one in the mean.
fn summed_there([product, sums]: [Matrix; 2], terms: usize) -> [Matrix; 2] {
    let steps = 1.0 + terms as f64 / 32.0 / 4.0;
    let data = sums.data.iter().map(|sum| sum * steps).collect();
    [product, Matrix { data, ..sums }]
}

/// At most this share of a number is lost when it is rounded to bf16.
const BF16: f64 = 1.0 / 256.0;

#[test]
fn emulated_numbers_are_those_of_the_format() {
    let all: Vec<f64> = (0..=u8::MAX).map(decoded).filter(|x| !x.is_nan()).collect();
    assert_eq!(all.len(), 254);
    assert_eq!(all.iter().fold(0f64, |most, x| most.max(*x)), 448.0);
    assert!(all.iter().all(|x| nearest(*x) == *x));
    let nearest_of_all = |x: f64| {
        let distance = |y: &&f64| (*y - x).abs();
        *all.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("numbers")
    };
    for i in 1..5000 {
        let x = 460.0 * (f64::from(i) * 0.7312).sin().powi(7);
        assert_eq!(nearest(x), nearest_of_all(x), "{x}");
    }
    assert_eq!([nearest(17.0), nearest(19.0), nearest(1e9)], [16.0, 20.0, 448.0]);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_rounds_a_matrix_by_rows_and_by_columns() {
    for (rows, columns, factor) in
        [(16, 16, 1.0), (128, 64, 300.0), (144, 80, 1e-6), (1040, 336, 7e4), (80, 4112, 3e-30)]
    {
        let (x, exact) = matrix(rows, columns, 0.3, factor);
        let (want, scale) = exact.rounded();
        let [by_rows, by_columns] = rounded(&x, Of::Values, [true, true]);
        let (by_rows, by_columns) = (by_rows.unwrap(), by_columns.unwrap());
        assert_eq!(floats(&by_rows.scale), [scale]);
        assert_eq!(values(&by_rows), want.data, "{rows} x {columns}");
        assert_eq!(values(&by_columns), want.transposed().data, "{rows} x {columns}");
        for wanted in [[true, false], [false, true]] {
            let alone = rounded(&x, Of::Values, wanted);
            assert_eq!(alone.each_ref().map(Option::is_some), wanted);
            for (alone, both) in alone.iter().zip([&by_rows, &by_columns]) {
                if let Some(alone) = alone {
                    assert_eq!(bytes(&alone.values), bytes(&both.values));
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_rounds_the_gelu_of_a_matrix() {
    let (x, exact) = matrix(144, 80, 0.3, 3.0);
    let gelu = |x: &f64| {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        x / (1.0 + (-2.0 * u).exp())
    };
    let exact = Matrix { data: exact.data.iter().map(gelu).collect(), ..exact };
    let (_, scale) = exact.rounded();
    let [by_rows, by_columns] = rounded(&x, Of::Gelu, [true, true]);
    let (by_rows, by_columns) = (by_rows.unwrap(), by_columns.unwrap());
    assert_eq!(floats(&by_rows.scale), [scale]);
    for (got, want) in values(&by_rows).iter().zip(&exact.data) {
        // Half a step of the format, and GELU's own error.
        let want = want / scale;
        let allowed = want.abs().max(1.0 / 64.0) / 16.0 + 1e-5 * want.abs();
        assert!((got - want).abs() <= allowed, "{got} for {want}");
    }
    let transposed = Matrix { data: values(&by_rows), ..exact }.transposed();
    assert_eq!(values(&by_columns), transposed.data);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_rounds_zeros_to_zeros() {
    let (x, _) = matrix(144, 80, 0.0, 0.0);
    let [by_rows, by_columns] = rounded(&x, Of::Values, [true, true]);
    for matrix in [by_rows, by_columns] {
        let matrix = matrix.unwrap();
        assert!(values(&matrix).iter().all(|x| *x == 0.0));
        assert!(floats(&matrix.scale)[0] > 0.0);
        let y = outputs(&matrix, &matrix, Epilogue::None);
        assert!(floats(&y).iter().all(|y| *y == 0.0));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_propagates_nan_and_infinity() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut data = vec![0.5; 144 * 80];
        data[80 * 99 + 17] = bad;
        let (x, _) = on_gpu(gpu::floats(data, [144, 80]).inner());
        let (weight, _) = matrix(32, 80, 1.0, 1.0);
        let [x, weight] = [&x, &weight].map(|x| factor(x, Of::Values, false).0);
        assert!(values(&x).iter().all(|x| x.is_nan()), "{bad}");
        let y = outputs(&x, &weight, Epilogue::None);
        assert!(floats(&y).iter().all(|y| y.is_nan()), "{bad}");
    }
}

/// A linear layer's output, and the gradients of its inputs.
struct Layer {
    y: CudaTensor,
    gradients: [Option<CudaTensor>; 3],
}

/// Runs a layer in e4m3; gradients of x and W are added to `sums`.
fn layer(
    [x, weight, dy]: [&CudaTensor; 3],
    then: LinearEpilogue,
    mut sums: [Option<CudaTensor>; 2],
) -> Layer {
    let forward = cuda::forward(x, weight, then, Rounding::E4m3, true);
    assert_eq!(forward.saved[0].dtype, DType::U8, "the layer computes in another type");
    let [dx, dw] = &mut sums;
    let gradients = cuda::backward(&forward.saved, dy, [true; 3], [dx, dw]);
    assert!(sums.iter().all(Option::is_none), "a sum was not taken");
    Layer { y: forward.output, gradients }
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_layers_agree_with_the_oracle() {
    for (rows, width, outputs) in [(80, 16, 16), (96, 64, 48), (528, 192, 80), (112, 1040, 32)] {
        let (x, exact_x) = matrix(rows, width, 0.0, 2.0);
        let (weight, exact_weight) = matrix(outputs, width, 1.0, 0.05);
        let (dy, exact_dy) = matrix(rows, outputs, 2.0, 1e-4);
        let [x8, w8, dy8] = [&exact_x, &exact_weight, &exact_dy].map(Matrix::as_factor);
        let inputs = [&x, &weight, &dy];
        let plain = layer(inputs, LinearEpilogue::Nothing, [None, None]);
        let y = summed_there(product_of(&x8, &w8), width);
        assert_near(&plain.y, &y, BF16);
        let [dx, dw, db] = plain.gradients.map(|x| x.expect("a gradient"));
        assert_eq!([dx.dtype, dw.dtype, db.dtype], [DType::BF16, DType::F32, DType::F32]);
        let dx_want = product_of(&dy8, &w8.transposed());
        let dw_want = product_of(&dy8.transposed(), &x8.transposed());
        assert_near(&dx, &dx_want, BF16);
        assert_near(&dw, &dw_want, 0.0);
        // The bias has no factor that is rounded.
        let ones = Matrix { rows: 1, columns: rows, data: vec![1.0; rows] };
        assert_near(&db, &product_of(&ones, &exact_dy.transposed()), 0.0);

        let (term, exact_term) = matrix(rows, outputs, 3.0, 1.0);
        let plus = |[product, sum]: &[Matrix; 2], term: &dyn Fn(usize) -> f64| {
            let added = product.data.iter().enumerate().map(|(i, x)| x + term(i)).collect();
            // Its rounding to bf16 is allowed for, and that of the product before the sum.
            let sum = sum.data.iter().enumerate().map(|(i, x)| x + x.abs() + term(i).abs());
            [Matrix { data: added, ..*product }, Matrix { data: sum.collect(), ..*product }]
        };
        let added = layer(inputs, LinearEpilogue::Add(&term), [None, None]);
        assert_near(&added.y, &plus(&y, &|i| exact_term.data[i]), BF16);
        let bias = gpu::wave([outputs], 4.0).inner();
        let exact_bias: Vec<f64> = bias.clone().into_data().iter::<f64>().collect();
        let biased = layer(inputs, LinearEpilogue::Bias(&primitive(bias)), [None, None]);
        assert_near(&biased.y, &plus(&y, &|i| exact_bias[i % outputs]), BF16);

        // Sums of earlier gradients.
        let sums = [dx.clone(), dw.clone()].map(Some);
        let twice = layer(inputs, LinearEpilogue::Nothing, sums);
        let [dx_sum, dw_sum, _] = twice.gradients.map(|x| x.expect("a gradient"));
        let (dx, dw) = (floats(&dx), floats(&dw));
        assert_near(&dx_sum, &plus(&dx_want, &|i| dx[i]), BF16);
        assert_near(&dw_sum, &plus(&dw_want, &|i| dw[i]), 0.0);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_layers_of_other_sizes_stay_in_bf16() {
    for (rows, inputs, outputs) in [(64, 64, 48), (90, 64, 48), (96, 72, 48), (96, 64, 40)] {
        let (x, _) = matrix(rows, inputs, 0.0, 1.0);
        let (weight, _) = matrix(outputs, inputs, 1.0, 1.0);
        let run = |rounding| cuda::forward(&x, &weight, LinearEpilogue::Nothing, rounding, true);
        let (got, want) = (run(Rounding::E4m3), run(Rounding::None));
        assert_eq!(got.saved.iter().map(|x| x.dtype).collect::<Vec<_>>(), [DType::BF16; 2]);
        assert_eq!(floats(&got.output), floats(&want.output));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_layers_are_deterministic_and_save_nothing_without_a_gradient() {
    let (x, _) = matrix(528, 192, 0.0, 1.0);
    let (weight, _) = matrix(80, 192, 1.0, 1.0);
    let (dy, _) = matrix(528, 80, 2.0, 1.0);
    let run = || {
        let Layer { y, gradients } =
            layer([&x, &weight, &dy], LinearEpilogue::Nothing, [None, None]);
        let [dx, dw, db] = gradients.map(|x| floats(&x.expect("a gradient")));
        [floats(&y), dx, dw, db]
    };
    let first = run();
    assert_eq!(first, run());
    let forward = cuda::forward(&x, &weight, LinearEpilogue::Nothing, Rounding::E4m3, false);
    assert!(forward.saved.is_empty());
    assert_eq!(floats(&forward.output), first[0]);
}
