//! The search among candidates as the kernel runs it, on the CPU in f32, against bisection in f64.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::threshold::{LAST_STEP, MOST_PASSES, QUADRATIC_PASSES, raised, step_to_root};

/// The maximum, and, of the excess of keys over `tau`, the sum, the sum of squares and the count.
fn sums(z: &[f32], tau: f32) -> [f32; 4] {
    let mut sums = [f32::MIN, 0.0, 0.0, 0.0];
    for &z in z {
        let above = (z - tau).max(0.0);
        sums[0] = sums[0].max(z);
        sums[1] += above;
        sums[2] = above.mul_add(above, sums[2]);
        sums[3] += f32::from(above > 0.0);
    }
    sums
}

/// The passes of a search that begins at `tau`, of a row with `keys` keys.
fn threshold(candidates: &[f32], keys: usize, tau: f32) -> f32 {
    let [most, ..] = sums(candidates, tau);
    let highest = most - 1.0 / (keys as f32).sqrt();
    let mut tau = tau.max(most - 1.0).min(highest);
    for pass in 1..=MOST_PASSES {
        let [_, excess, squares, count] = sums(candidates, tau);
        let step = step_to_root(excess, squares, count, pass <= QUADRATIC_PASSES);
        tau = (tau + step).max(most - 1.0).min(highest);
        if step.abs() * count <= LAST_STEP * excess {
            break;
        }
    }
    tau
}

/// The threshold of a row, the bound when the row ends, and the most candidates at a time. Lists are full with `room`
/// keys.
fn search(z: &[f32], room: usize) -> (f32, f32, usize) {
    let raise = |tau: f32, z: &[f32]| {
        let [most, excess, squares, _] = sums(z, tau);
        raised(tau, most, excess, squares)
    };
    let mut bound = z[..z.len().min(128)].iter().fold(f32::MIN, |a, &b| a.max(b)) - 1.0;
    let mut candidates: Vec<f32> = vec![];
    let mut most = 0;
    for &z in z {
        if z > bound {
            candidates.push(z);
        }
        if candidates.len() >= room {
            bound = raise(bound, &candidates);
            candidates.retain(|&z| z > bound);
        }
        most = most.max(candidates.len());
    }
    let tau = threshold(&candidates, z.len(), bound);
    candidates.retain(|&z| z > tau);
    (threshold(&candidates, z.len(), f32::MIN), bound, most)
}

/// The threshold in f64, and the mean excess over it.
fn exact(z: &[f32]) -> (f64, f64) {
    let most = f64::from(z.iter().copied().fold(f32::MIN, f32::max));
    let excess = |tau: f64| z.iter().map(move |&z| (f64::from(z) - tau).max(0.0));
    let (mut low, mut high) = (most - 1.0, most);
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if excess(middle).map(|x| x * x).sum::<f64>() > 1.0 { low = middle } else { high = middle }
    }
    let count = excess(low).filter(|&x| x > 0.0).count();
    (low, excess(low).sum::<f64>() / count as f64)
}

fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let (radius, angle) = (rng.random_range(1e-9..1f32), rng.random_range(0.0..1f32));
    (-2.0 * radius.ln()).sqrt() * (std::f32::consts::TAU * angle).cos()
}

fn rows() -> Vec<(String, Vec<f32>)> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut rows = vec![];
    for keys in [1, 2, 130, 4096, 65_536] {
        for deviation in [0.05, 0.5, 5.0, 100.0] {
            let z = (0..keys).map(|_| deviation * normal(&mut rng)).collect();
            rows.push((format!("normal, {keys} keys, deviation {deviation}"), z));
        }
        let place = |j: usize| j as f32 / keys as f32;
        let by_place = |f: &dyn Fn(f32) -> f32| (0..keys).map(|j| f(place(j))).collect();
        rows.push((format!("equal, {keys} keys"), by_place(&|_| 3.0)));
        rows.push((format!("rising, {keys} keys"), by_place(&|x| 200.0 * x)));
        rows.push((format!("falling, {keys} keys"), by_place(&|x| -200.0 * x)));
        rows.push((format!("two values, {keys} keys"), by_place(&|x| (20.0 * x).fract().round())));
        let last = |x: f32| if x + 1.5 / keys as f32 > 1.0 { 1e4 } else { -1e4 * x };
        rows.push((format!("one far above, {keys} keys"), by_place(&last)));
    }
    rows
}

#[test]
fn the_search_among_candidates_finds_the_threshold() {
    for (what, z) in rows() {
        let (want, mean) = exact(&z);
        // f32's resolution of the scores, and a fraction of bf16's of the weights.
        let largest = z.iter().fold(0.0f64, |a, &z| a.max(f64::from(z).abs()));
        let tolerance = 4e-7 * largest + 1e-4 * mean;
        for room in [40, 200] {
            let (tau, bound, _) = search(&z, room);
            let error = (f64::from(tau) - want).abs();
            assert!(error <= tolerance, "{what}, {room}: {tau} where {want} is right");
            let over = f64::from(bound) - want;
            assert!(over <= tolerance, "{what}, {room}: bound {bound} over {want}");
        }
    }
}

#[test]
fn random_rows_have_few_candidates() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for keys in [1000, 4096, 65_536] {
        let z: Vec<f32> = (0..keys).map(|_| 0.5 * normal(&mut rng)).collect();
        let (_, _, most) = search(&z, 96);
        assert!(most < 96, "{keys} keys: {most} candidates");
    }
}
