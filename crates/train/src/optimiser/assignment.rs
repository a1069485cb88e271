//! The assignment of optimisers to parameters, summarised for `longwall info` and for the first lines of a run.

use serde::Serialize;

use super::{Method, Rule};

/// Parameters that are updated in the same way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Assigned {
    /// Their place in `[[train.groups]]`, from 0; `null` if they are in no group.
    pub group: Option<usize>,
    /// The update: a kind of optimiser.
    pub method: &'static str,
    /// Learning rate, as a multiple of the schedule's.
    pub lr: f64,
    /// Weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
    /// How many tensors they are.
    pub tensors: usize,
    /// How many elements these have.
    pub parameters: usize,
    /// Elements of their state.
    pub state: u64,
    /// Their names, with `*` for the number of a block.
    pub names: Vec<String>,
}

/// `rules`, those of equal updates together, in the order of the model.
pub fn assignment<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Vec<Assigned> {
    let mut assigned: Vec<Assigned> = vec![];
    for rule in rules {
        let new = of_one(rule);
        let same = |other: &&mut Assigned| {
            (other.group, other.method) == (new.group, new.method)
                && (other.lr, other.weight_decay) == (new.lr, new.weight_decay)
        };
        match assigned.iter_mut().find(same) {
            None => assigned.push(new),
            Some(all) => {
                all.tensors += 1;
                all.parameters += new.parameters;
                all.state = all.state.saturating_add(new.state);
                if !all.names.contains(&new.names[0]) {
                    all.names.extend(new.names);
                }
            }
        }
    }
    assigned
}

fn of_one(rule: &Rule) -> Assigned {
    let Method { name, lr, weight_decay } = rule.optimiser.method(&rule.parameter);
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let path = rule.parameter.path.split('.');
    let path: Vec<&str> = path.map(|part| if is_number(part) { "*" } else { part }).collect();
    Assigned {
        group: rule.group,
        method: name,
        lr: lr * rule.lr,
        weight_decay,
        tensors: 1,
        parameters: rule.parameter.shape.iter().product(),
        state: u64::try_from(rule.state_elements()).unwrap_or(u64::MAX),
        names: vec![path.join(".")],
    }
}
