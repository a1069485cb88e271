//! Which rank owns each parameter.

use crate::optimiser::Rule;

/// What an update of one parameter costs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    /// Of matrix products.
    flops: f64,
    /// Of the f32 master, the optimiser's state and the new value: memory and traffic.
    bytes: f64,
}

impl Cost {
    fn of(rule: &Rule) -> Self {
        let elements = rule.parameter.shape.iter().product::<usize>() as f64;
        let flops = rule.optimiser.update_flops(&rule.parameter);
        Cost { flops, bytes: 4.0 * (rule.state_elements() as f64 + elements) }
    }
}

/// The owner of each parameter, among `ranks` ranks: every rank finds the same.
///
/// Parameters whose update multiplies matrices go first, the largest to the rank that has the fewest FLOPs; then the
/// others, to the rank that has the fewest bytes.
///
/// # Panics
/// Without ranks.
pub fn owners<'a>(rules: impl IntoIterator<Item = &'a Rule>, ranks: usize) -> Vec<usize> {
    assert!(ranks > 0, "parameters without a rank");
    let costs: Vec<Cost> = rules.into_iter().map(Cost::of).collect();
    assign(&costs, ranks)
}

fn assign(costs: &[Cost], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    // Stable: equal parameters keep the model's order.
    order.sort_by(|&a, &b| {
        let key = |at: usize| [costs[at].flops, costs[at].bytes];
        key(b).partial_cmp(&key(a)).expect("costs are finite")
    });
    let mut loads = vec![Cost { flops: 0.0, bytes: 0.0 }; ranks];
    let mut owners = vec![0; costs.len()];
    for at in order {
        let Cost { flops, bytes } = costs[at];
        let key = |load: &Cost| match flops > 0.0 {
            true => [load.flops, load.bytes],
            false => [load.bytes, load.flops],
        };
        let least =
            (1..ranks).fold(
                0,
                |least, rank| {
                    if key(&loads[rank]) < key(&loads[least]) { rank } else { least }
                },
            );
        loads[least].flops += flops;
        loads[least].bytes += bytes;
        owners[at] = least;
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::config;

    fn costs(pairs: &[(f64, f64)]) -> Vec<Cost> {
        pairs.iter().map(|&(flops, bytes)| Cost { flops, bytes }).collect()
    }

    #[test]
    fn bytes_are_balanced_and_one_rank_owns_all() {
        let costs = costs(&[(0.0, 4.0), (0.0, 3.0), (0.0, 3.0), (0.0, 2.0), (0.0, 2.0)]);
        assert_eq!(assign(&costs, 1), [0; 5]);
        assert_eq!(assign(&costs, 2), [0, 1, 1, 0, 0]);
        assert_eq!(assign(&costs[..2], 4), [0, 1], "ranks without parameters");
    }

    #[test]
    fn matrices_are_balanced_by_their_flops_and_the_rest_fills_up() {
        let matrices = [(8.0, 1.0), (4.0, 1.0), (4.0, 1.0)];
        let costs = costs(&[&[(0.0, 1.5), (0.0, 0.4)][..], &matrices].concat());
        // The matrices: 0 | 1, 1. The larger of the rest goes to rank 0, which has fewer bytes.
        assert_eq!(assign(&costs, 2), [0, 1, 0, 1, 1]);
    }

    #[test]
    fn ranks_of_a_model_own_about_as_much() {
        for kind in ["adamw", "muon", "normuon", "lion"] {
            let sets = [format!("train.optimiser.kind={kind}"), "model.layers=12".into()];
            let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
            let config = config(&[&sets[..], &["model.width=128"]].concat());
            let rules = config.rules().all(257, 512);
            for ranks in [2, 3, 4] {
                let owners = owners(&rules, ranks);
                let load = |value: &dyn Fn(&Cost) -> f64| {
                    let mut loads = vec![0.0; ranks];
                    for (rule, &owner) in rules.iter().zip(&owners) {
                        loads[owner] += value(&Cost::of(rule));
                    }
                    let mean = loads.iter().sum::<f64>() / ranks as f64;
                    loads.into_iter().fold(0.0, f64::max) / mean.max(1.0)
                };
                assert!(load(&|cost| cost.bytes) < 1.2, "{kind} on {ranks} ranks: {owners:?}");
                let flops = load(&|cost| cost.flops);
                assert!(flops < 1.1, "{kind} on {ranks} ranks: {owners:?}");
                assert_eq!(flops > 0.0, kind.ends_with("muon"), "{kind}");
            }
        }
    }
}
