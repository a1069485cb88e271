//! The orthogonal factor of a matrix, by polynomials in products of matrices.

use burn::tensor::{DType, Tensor};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::matmul::MatMul;
use serde::{Deserialize, Serialize};

/// The polynomials a·x + b·x³ + c·x⁵ that are applied to the singular values one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Coefficients {
    /// The same at every step, which lifts small singular values fast: after five steps, those above about 1/700 of
    /// the norm lie near 0.7 to 1.2 (Jordan et al. 2024).
    #[default]
    NewtonSchulz,
    /// The best ones for each step, which converge to 1 (Amsel et al. 2025, "The Polar Express: optimal matrix
    /// sign methods and their application to the Muon algorithm", algorithm 1).
    PolarExpress,
}

const NEWTON_SCHULZ: [f64; 3] = [3.4445, -4.775, 2.0315];

/// The last repeats.
const POLAR_EXPRESS: [[f64; 3]; 8] = [
    [8.287_212_018_145_63, -23.595_886_519_098_837, 17.300_387_312_530_933],
    [4.107_059_111_542_203, -2.947_849_916_737_910_6, 0.544_843_108_292_660_1],
    [3.948_690_853_482_294_6, -2.908_902_115_962_949, 0.551_819_139_437_013_7],
    [3.318_419_657_370_601_5, -2.488_488_024_314_874, 0.510_048_940_123_72],
    [2.300_652_019_954_817, -1.668_903_984_574_749_3, 0.418_807_311_952_567_3],
    [1.891_301_407_787_398, -1.267_995_827_194_586_8, 0.376_804_089_485_248_35],
    [1.875_001_480_853_447_9, -1.250_001_645_399_948_7, 0.375_000_164_547_424_8],
    [1.875, -1.25, 0.375],
];

/// Keeps rounding from pushing a singular value out of the range in which the polynomials converge.
const SAFETY: f64 = 1.01;

impl Coefficients {
    /// a, b and c of step `step`, from 0.
    fn at(self, step: usize) -> [f64; 3] {
        match self {
            Coefficients::NewtonSchulz => NEWTON_SCHULZ,
            Coefficients::PolarExpress => {
                let last = POLAR_EXPRESS.len() - 1;
                let [a, b, c] = POLAR_EXPRESS[step.min(last)];
                let s: f64 = if step < last { SAFETY } else { 1.0 };
                [a / s, b / s.powi(3), c / s.powi(5)]
            }
        }
    }

    /// What the norm of the matrix is at the first step, at most.
    fn first_norm(self) -> f64 {
        match self {
            Coefficients::NewtonSchulz => 1.0,
            Coefficients::PolarExpress => 1.0 / SAFETY,
        }
    }
}

/// Approximates PQᵀ of each matrix X = PΣQᵀ of `x` `[batch, rows, columns]`, where XXᵀ is smaller with no more rows than
/// columns: X is scaled to a Frobenius norm of
/// 1, and then X ← aX + (bXXᵀ + c(XXᵀ)²)X, `steps` times. A zero matrix stays zero.
///
/// `x`, its norm and the result are f32; all that follows the norm is computed in `precision`. In bf16, as the
/// authors of both polynomials compute it, the coefficients are rounded too. That moves the singular values by less
/// than the products' rounding, and leaves the intervals in which the polynomials converge.
fn orthogonal<B: OpBackend>(
    x: Tensor<B, 3>,
    coefficients: Coefficients,
    steps: usize,
    precision: DType,
) -> Tensor<B, 3> {
    // Below the bound, where squares underflow, the matrix stays small: divided by too small a norm it would diverge.
    let norm = (x.clone() * x.clone()).sum_dim(2).sum_dim(1).sqrt().clamp_min(1e-12);
    let mut x = (x / norm * coefficients.first_norm()).cast(precision);
    for step in 0..steps {
        let [a, b, c] = coefficients.at(step);
        let gram = x.clone().mm(x.clone().swap_dims(1, 2));
        let polynomial = gram.clone() * b + gram.clone().mm(gram) * c;
        x = x.clone() * a + polynomial.mm(x);
    }
    x.cast(DType::F32)
}

/// Matrices of one shape, transposed or not, and precision.
struct Group {
    /// The smaller and the larger side.
    sizes: [usize; 2],
    precision: DType,
    /// By their number.
    matrices: Vec<usize>,
}

/// [`orthogonal`] of each of `matrices` `[blocks, rows, columns]` in its precision. Those of the same shape, transposed
/// or not, are one batch: most matrices are so small that launches would take longer than products.
pub(super) fn orthogonal_all<B: OpBackend>(
    matrices: Vec<(Tensor<B, 3>, DType)>,
    coefficients: Coefficients,
    steps: usize,
) -> Vec<Tensor<B, 3>> {
    let mut groups: Vec<Group> = vec![];
    for (at, (x, precision)) in matrices.iter().enumerate() {
        let [_, rows, columns] = x.dims();
        let sizes = [rows.min(columns), rows.max(columns)];
        let same = |group: &&mut Group| (group.sizes, group.precision) == (sizes, *precision);
        match groups.iter_mut().find(same) {
            Some(group) => group.matrices.push(at),
            None => groups.push(Group { sizes, precision: *precision, matrices: vec![at] }),
        }
    }
    let mut matrices: Vec<_> = matrices.into_iter().map(|(x, _)| Some(x)).collect();
    for Group { precision, matrices: group, .. } in groups {
        let take = |&at: &usize| matrices[at].take().expect("in one group");
        let taken: Vec<_> = group.iter().map(take).collect();
        let is_tall = |x: &Tensor<B, 3>| x.dims()[1] > x.dims()[2];
        let layouts: Vec<_> = taken.iter().map(|x| (x.dims()[0], is_tall(x))).collect();
        let wide = taken.into_iter().map(|x| if is_tall(&x) { x.swap_dims(1, 2) } else { x });
        let all = orthogonal(Tensor::cat(wide.collect(), 0), coefficients, steps, precision);
        let mut first = 0;
        for (at, (blocks, was_tall)) in group.into_iter().zip(layouts) {
            let own = all.clone().narrow(0, first, blocks);
            matrices[at] = Some(if was_tall { own.swap_dims(1, 2) } else { own });
            first += blocks;
        }
    }
    matrices.into_iter().map(|x| x.expect("an orthogonal one")).collect()
}
