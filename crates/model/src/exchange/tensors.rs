//! How a layout's tensors are made of ours, and ours of them.

use super::Layout;
use crate::start::ModelSpec;
use crate::weights::{self, TensorMap};

/// How one tensor of a layout is made of ours.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRule {
    /// Its name.
    pub name: String,
    /// Our tensors, stacked along their first dimension. A vector that the model does not have is zero. A tensor
    /// may be there several times: an import then needs equal parts.
    pub ours: Vec<String>,
    /// How the stacked tensor is stored.
    pub form: Form,
}

/// How a layout stores a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// As it is here.
    Plain,
    /// A matrix as its transpose; a vector as it is.
    Transposed,
    /// In this shape, with the same elements in the same order.
    Shaped(Vec<usize>),
}

impl Form {
    /// The shape in which a tensor of our `shape` is stored.
    fn stored(&self, shape: Vec<usize>) -> Vec<usize> {
        match self {
            Form::Plain => shape,
            Form::Transposed => transposed_shape(&shape),
            Form::Shaped(shape) => shape.clone(),
        }
    }

    /// The stored tensor, of ours.
    fn apply(&self, tensor: Tensor) -> Tensor {
        match self {
            Form::Plain => tensor,
            Form::Transposed => transpose(tensor),
            Form::Shaped(shape) => (shape.clone(), tensor.1),
        }
    }

    /// Our elements, of the stored tensor.
    fn undo(&self, tensor: Tensor) -> Vec<f32> {
        match self {
            Form::Transposed => transpose(tensor).1,
            Form::Plain | Form::Shaped(_) => tensor.1,
        }
    }
}

impl TensorRule {
    pub(super) fn plain(name: impl Into<String>, ours: impl Into<String>) -> Self {
        TensorRule { name: name.into(), ours: vec![ours.into()], form: Form::Plain }
    }

    /// `ours` in another shape.
    pub(super) fn shaped(
        name: impl Into<String>,
        ours: impl Into<String>,
        shape: &[usize],
    ) -> Self {
        TensorRule { form: Form::Shaped(shape.to_vec()), ..TensorRule::plain(name, ours) }
    }

    /// `ours` `times` times, one after another.
    pub(super) fn repeated(name: impl Into<String>, ours: impl Into<String>, times: usize) -> Self {
        let ours = vec![ours.into(); times];
        TensorRule { name: name.into(), ours, form: Form::Plain }
    }

    /// The rule inside modules: `theirs` and `ours` come before the names.
    pub(super) fn inside(self, theirs: &str, ours: &str) -> Self {
        TensorRule {
            name: format!("{theirs}.{}", self.name),
            ours: self.ours.into_iter().map(|name| format!("{ours}.{name}")).collect(),
            form: self.form,
        }
    }
}

/// A tensor: shape and elements in row-major order.
pub type Tensor = (Vec<usize>, Vec<f32>);

/// The tensors of `layout` for the model of `spec` with the weights `ours`. Rows that pad the vocabulary are left
/// out.
///
/// # Panics
/// When a matrix is missing: `ours` must be the weights of the model.
pub fn to_layout(
    layout: &dyn Layout,
    spec: &ModelSpec<'_>,
    ours: &TensorMap,
) -> Vec<(String, Tensor)> {
    let shapes = weights::parameter_shapes(spec.config, spec.vocab_size, spec.seq_len);
    let width_of = |name: &str| {
        // The vector of a bias that the model does not have has an element for each row of its matrix.
        let weight = name.replace(".bias", ".weight");
        shapes.iter().find(|(other, _)| *other == weight).map(|(_, shape)| shape[0])
    };
    let part = |name: &String| match ours.get(name) {
        Some((shape, data)) if is_vocabulary(name) => {
            let (rows, width) = (spec.vocab_size.min(shape[0]), shape[1]);
            (vec![rows, width], data[..rows * width].to_vec())
        }
        Some(tensor) => tensor.clone(),
        None => {
            let len = width_of(name).unwrap_or_else(|| panic!("{name} is missing"));
            (vec![len], vec![0.0; len])
        }
    };
    let make = |rule: TensorRule| {
        let stacked = stack(rule.ours.iter().map(part).collect());
        (rule.name, rule.form.apply(stacked))
    };
    layout.tensors(spec.config).into_iter().map(make).collect()
}

/// Our tensors from those of a layout, for the model of `spec`, whose vocabulary has the file's rows.
///
/// # Errors
/// With the name of every tensor that is missing, left over or of another shape.
pub fn from_layout(
    layout: &dyn Layout,
    spec: &ModelSpec<'_>,
    theirs: TensorMap,
) -> Result<TensorMap, Vec<String>> {
    let shapes = weights::parameter_shapes(spec.config, spec.vocab_size, spec.seq_len);
    let shape_of = |name: &String| {
        let found = shapes.iter().find(|(other, _)| other == name);
        found.map(|(_, shape)| shape.clone()).unwrap_or_else(|| panic!("no weight {name}"))
    };
    let named = theirs.into_iter().map(|(name, tensor)| (layout.full_name(&name), tensor));
    let mut theirs: TensorMap = named.collect();
    let (mut ours, mut problems) = (TensorMap::new(), vec![]);
    for rule in layout.tensors(spec.config) {
        let Some(tensor) = theirs.remove(&rule.name) else {
            problems.push(format!("{} is missing", rule.name));
            continue;
        };
        let parts: Vec<Vec<usize>> = rule.ours.iter().map(shape_of).collect();
        let mut wanted = parts[0].clone();
        wanted[0] = parts.iter().map(|shape| shape[0]).sum();
        let as_stored = rule.form.stored(wanted);
        if tensor.0 != as_stored {
            let name = rule.name;
            problems.push(format!("{name} has shape {:?}, expected {as_stored:?}", tensor.0));
            continue;
        }
        let data = rule.form.undo(tensor);
        let mut rest = &data[..];
        let count = rule.ours.len();
        for (name, shape) in rule.ours.into_iter().zip(parts) {
            let (part, behind) = rest.split_at(shape.iter().product());
            let part = (shape, part.to_vec());
            if ours.get(&name).is_some_and(|other| *other != part) {
                let theirs = &rule.name;
                problems.push(format!("{theirs} must have {count} equal parts, one of each head"));
                break;
            }
            ours.insert(name, part);
            rest = behind;
        }
    }
    let mut left: Vec<_> = theirs.into_keys().filter(|name| !layout.is_ignored(name)).collect();
    left.sort();
    problems.extend(left.into_iter().map(|name| format!("{name} is left over")));
    if problems.is_empty() { Ok(ours) } else { Err(problems) }
}

/// Whether a weight has a row for each token.
fn is_vocabulary(name: &str) -> bool {
    ["embedding", "head"].contains(&name)
}

/// Tensors one after another along their first dimension.
fn stack(parts: Vec<Tensor>) -> Tensor {
    let mut shape = parts[0].0.clone();
    shape[0] = parts.iter().map(|(shape, _)| shape[0]).sum();
    (shape, parts.into_iter().flat_map(|(_, data)| data).collect())
}

fn transposed_shape(shape: &[usize]) -> Vec<usize> {
    shape.iter().rev().copied().collect()
}

/// The transpose of a matrix; a vector as it is.
fn transpose((shape, data): Tensor) -> Tensor {
    let [rows, columns] = shape[..] else { return (shape, data) };
    let of = |at: usize| data[at % rows * columns + at / rows];
    (vec![columns, rows], (0..rows * columns).map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transpose_of_a_transpose_is_the_matrix() {
        let matrix = (vec![2, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let turned = transpose(matrix.clone());
        assert_eq!(turned, (vec![3, 2], vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
        assert_eq!(transpose(turned), matrix);
        assert_eq!(transpose((vec![2], vec![1.0, 2.0])), (vec![2], vec![1.0, 2.0]));
    }
}
