//! Reported metrics against their definitions, from the weights that one value vector after the other gives.

use burn::tensor::Tensor;

use super::*;
use crate::Cpu;
use crate::attention::conformance::{Conformance, Problem};
use crate::attention::probe::Observation;
use crate::attention::rope::Config;
use crate::attention::{AttentionShape, ExecPath, Inputs, VariantSpec, dispatch};

/// The weights `[batch][view and head][query][key]` of a problem.
fn weights<V: Conformance, K: OpBackend>(
    variant: &V,
    problem: &Problem,
) -> Vec<Vec<Vec<Vec<f64>>>> {
    let inputs = problem.tensors::<K>();
    let path = ExecPath::of_inputs(variant, &problem.shape, &inputs, false);
    let (batch, tokens) = (problem.batch, problem.seq_len);
    let heads = variant.views() * problem.shape.heads;
    let mut all = vec![vec![vec![vec![0.0; tokens]; tokens]; heads]; batch];
    for key in 0..tokens {
        let one = Tensor::ones(
            [inputs.v.dims()[0], inputs.v.dims()[1], 1, inputs.v.dims()[3]],
            &Default::default(),
        );
        let v = inputs.v.zeros_like().slice_assign(
            [0..batch, 0..inputs.v.dims()[1], key..key + 1, 0..inputs.v.dims()[3]],
            one,
        );
        let o = variant.weigh_values(&problem.shape, Inputs { v, ..inputs.clone() }, None, path);
        let first: Vec<f64> = o.narrow(3, 0, 1).into_data().iter::<f64>().collect();
        for (at, weight) in first.into_iter().enumerate() {
            all[at / tokens / heads][at / tokens % heads][at % tokens][key] = weight;
        }
    }
    all
}

/// Outputs are sums of values times weights; every metric is reported, and as it is defined.
pub(in crate::attention) fn agree_with_their_definitions<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in [None, Some(6)].into_iter().filter(|w| w.is_none() || variant.allows_window())
        {
            let problem = Problem::new(&variant, [4, 2, 8, 2, 23], window);
            let inputs = problem.tensors::<K>();
            let mut probe = Probe::thorough();
            dispatch::observe(&variant, &problem.shape, inputs.clone(), None, &mut probe);
            let reported: Vec<_> = probe.observations().iter().map(|x| x.metric).collect();
            for metric in dispatch::thorough_metrics(&variant) {
                let by_kernel = metric == crate::attention::probe::PRUNED_FRACTION;
                assert!(by_kernel || reported.contains(&metric), "{variant:?}: {}", metric.0);
            }
            if !V::WEIGHS_VALUES {
                continue;
            }
            let all = weights::<V, K>(&variant, &problem);
            check_linear::<V, K>(&variant, &problem, &all);
            check_metrics(&variant, &problem, &all, probe.observations());
        }
    }
}

/// o_i = Σ_j a_ij v_j for any values.
fn check_linear<V: Conformance, K: OpBackend>(
    variant: &V,
    problem: &Problem,
    all: &[Vec<Vec<Vec<f64>>>],
) {
    let inputs = problem.tensors::<K>();
    let path = ExecPath::of_inputs(variant, &problem.shape, &inputs, false);
    let [_, kv_heads, tokens, channels] = inputs.v.dims();
    let v: Vec<f64> = inputs.v.clone().into_data().iter::<f64>().collect();
    let o = variant.weigh_values(&problem.shape, inputs, None, path);
    let [_, heads, ..] = o.dims();
    let found: Vec<f64> = o.into_data().iter::<f64>().collect();
    let group = problem.shape.heads / kv_heads;
    for (at, found) in found.into_iter().enumerate() {
        let (channel, query) = (at % channels, at / channels % tokens);
        let (head, row) = (at / channels / tokens % heads, at / channels / tokens / heads);
        let kv_head = head % problem.shape.heads / group;
        let value =
            |key: usize| v[((row * kv_heads + kv_head) * tokens + key) * channels + channel];
        let expected: f64 = (0..tokens).map(|key| all[row][head][query][key] * value(key)).sum();
        assert!((found - expected).abs() < 1e-4, "{variant:?}: {found}, not {expected}");
    }
}

/// The metrics from all weights.
fn check_metrics<V: Conformance>(
    variant: &V,
    problem: &Problem,
    all: &[Vec<Vec<Vec<f64>>>],
    observations: &[Observation],
) {
    let heads = problem.shape.heads;
    let visible = |query: usize| problem.shape.window.unwrap_or(usize::MAX).min(query + 1);
    let reported = |metric: Metric, head: usize| {
        let found = observations.iter().find(|x| x.metric == metric).expect("a report");
        found.heads[head / heads][head % heads]
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    for head in 0..variant.views() * heads {
        let (mut largest, mut entropies, mut relative) = (0.0f64, vec![], vec![]);
        let (mut shares, mut equal) = (vec![], vec![]);
        for row in all {
            for (query, weights) in row[head].iter().enumerate() {
                let total: f64 = weights.iter().map(|a| a.abs()).sum();
                largest = weights.iter().fold(largest, |most, a| most.max(a.abs()));
                if query < problem.shape.window.unwrap_or(usize::MAX) {
                    shares.push(if total > 0.0 { weights[0].abs() / total } else { 0.0 });
                    equal.push(1.0 / visible(query) as f64);
                }
                if total > 0.0 {
                    let shares = weights.iter().map(|a| a.abs() / total).filter(|p| *p > 0.0);
                    let entropy = -shares.map(|p| p * p.ln()).sum::<f64>();
                    entropies.push(entropy);
                    if visible(query) > 1 {
                        relative.push(entropy / (visible(query) as f64).ln());
                    }
                }
            }
        }
        let expected = [
            (LARGEST_WEIGHT, largest),
            (ENTROPY, mean(&entropies)),
            (RELATIVE_ENTROPY, mean(&relative)),
            (SINK_RATIO, mean(&shares) / mean(&equal)),
        ];
        for (metric, expected) in expected {
            let found = reported(metric, head);
            let close = (found - expected).abs() <= 1e-4 * expected.abs().max(1.0);
            let nothing = found.is_nan() && expected.is_nan();
            assert!(close || nothing, "{variant:?}, {}: {found}, not {expected}", metric.0);
        }
    }
    if variant.views() == 2 {
        for head in 0..heads {
            let pairs = |view: usize| {
                let head = view * heads + head;
                let rows = all.iter().flat_map(move |row| row[head].iter().enumerate());
                rows.flat_map(|(query, weights)| {
                    weights[query + 1 - visible(query)..=query].to_vec()
                })
                .collect::<Vec<_>>()
            };
            let [x, y] = [0, 1].map(pairs);
            let (mx, my) = (mean(&x), mean(&y));
            let covariance = |a: &[f64], ma: f64, b: &[f64], mb: f64| {
                a.iter().zip(b).map(|(a, b)| (a - ma) * (b - mb)).sum::<f64>()
            };
            let expected = covariance(&x, mx, &y, my)
                / (covariance(&x, mx, &x, mx) * covariance(&y, my, &y, my)).sqrt();
            let observation = observations.iter().find(|x| x.metric == VIEW_CORRELATION);
            let found = observation.expect("a report").heads[0][head];
            assert!((found - expected).abs() < 1e-3, "{variant:?}: {found}, not {expected}");
        }
    }
}

#[test]
fn equal_weights_have_the_largest_entropy_and_no_sink() {
    let shape = AttentionShape::new(16, 2, 1, 8);
    let x = |heads| Tensor::<Cpu, 4>::zeros([1, heads, 50, 8], &Default::default());
    let inputs = Inputs { q: x(2), k: x(1), v: x(1), projections: vec![], parameters: vec![] };
    let mut probe = Probe::thorough();
    dispatch::observe(&Config::default(), &shape, inputs, None, &mut probe);
    let mean = |metric| probe.mean(metric).expect("a report");
    for metric in [LARGEST_WEIGHT, RELATIVE_ENTROPY, SINK_RATIO] {
        assert!((mean(metric) - 1.0).abs() < 1e-5, "{}: {}", metric.0, mean(metric));
    }
    assert_eq!(Config::default().views(), 1);
}
