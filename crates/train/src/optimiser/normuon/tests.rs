use longwall_model::HeadBlocks;

use super::*;
use crate::optimiser::muon::tests::Matrix;
use crate::optimiser::tests::{assert_close, numbers, updated};

/// Algorithm 1 with Nesterov momentum; each of `count` blocks of rows is a matrix of its own.
fn expected(
    initial: &[f32],
    gradients: &[Vec<f32>],
    columns: usize,
    count: usize,
) -> [Vec<f64>; 2] {
    let mut w = Matrix::of(initial, columns);
    let (mut m, rows) = (w.scaled(0.0), w.dims().0);
    let size = rows / count;
    let mut v = vec![0.0; rows];
    for gradient in gradients {
        let g = Matrix::of(gradient, columns).scaled(0.5);
        m = m.map2(&g, |m, g| 0.95 * m + 0.05 * g);
        let u = m.map2(&g, |m, g| 0.95 * m + 0.05 * g);
        for block in 0..count {
            let first = block * size;
            let o = Matrix::new(size, columns, |i, j| u.0[first + i][j]).newton_schulz();
            for i in 0..size {
                let square: f64 = o.0[i].iter().map(|o| o * o).sum::<f64>() / columns as f64;
                v[first + i] = 0.9 * v[first + i] + 0.1 * square;
            }
            let o = Matrix::new(size, columns, |i, j| o.0[i][j] / v[first + i].sqrt());
            let factor = 0.2 * ((size * columns) as f64).sqrt() / o.norm();
            for i in 0..size {
                for j in 0..columns {
                    let place = &mut w.0[first + i][j];
                    *place -= 0.02 * (factor * o.0[i][j] + 0.1 * *place);
                }
            }
        }
    }
    [w.elements(), v]
}

#[test]
fn updates_equal_those_of_an_f64_implementation() {
    let gradients: Vec<Vec<f32>> = (2..5).map(|seed| numbers(72, seed)).collect();
    let initial = numbers(72, 1);
    for (rows, columns, count) in [(12, 6, 1), (6, 12, 1), (12, 6, 3)] {
        let heads = Some(HeadBlocks { dim: 0, count });
        let path = "blocks.0.attention.q.weight".to_owned();
        let parameter = Parameter { heads, ..Parameter::new(path, vec![rows, columns]) };
        let kind = Config { beta2: 0.9, per_head: true, ..Config::default() };
        let found = updated(&kind, &parameter, &initial, &gradients, 0.02);
        let [w, v] = expected(&initial, &gradients, columns, count);
        assert_close(&found[0], &w, 1e-5, "w");
        assert_close(&found[2], &v, 1e-5, "v");
    }
}

#[test]
fn an_update_has_a_root_mean_square_of_a_fifth_of_the_rate() {
    let kind = Config { weight_decay: 0.0, ..Config::default() };
    let initial = numbers(72, 1);
    for (dim, count) in [(0, 1), (1, 4), (0, 6)] {
        let path = "blocks.0.attention.output.weight".to_owned();
        let heads = Some(HeadBlocks { dim, count });
        let parameter = Parameter { heads, ..Parameter::new(path, vec![6, 12]) };
        for per_head in [false, true] {
            let kind = Config { per_head, ..kind.clone() };
            let found = updated(&kind, &parameter, &initial, &[numbers(72, 2)], 0.02);
            let moved =
                found[0].iter().zip(&initial).map(|(new, old)| f64::from(new - old).powi(2));
            let rms = (moved.sum::<f64>() / 72.0).sqrt();
            assert!((rms / (0.2 * 0.02) - 1.0).abs() < 1e-4, "{rms}");
        }
    }
}
