//! The optimiser: updates of a model's parameters by their gradients.
//!
//! A kind is one folder, its `pub mod` line and one line in `registry!` below. Its `Config` is the
//! `[train.optimiser]` table of a run's configuration and implements [`OptimiserKind`]: it declares
//! the state that it keeps for a parameter, and updates parameters. `[[train.groups]]` gives parameters
//! learning rates, weight decays and kinds of their own.
//!
//! A parameter that the model holds in bf16 has an f32 master here: the optimiser updates the master,
//! and the model gets a rounded copy. Files hold masters.

pub mod adamw;
mod assignment;
mod average;
mod contract;
mod elementwise;
mod files;
mod groups;
pub mod lion;
pub mod muon;
mod norms;
pub mod normuon;
mod registry;
mod sharing;

use burn::backend::Autodiff;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorMetadata};
use longwall_config::Problems;
use longwall_kernels::backend::{OpBackend, primitive};
use longwall_model::Precision;
use serde::{Deserialize, Serialize};

pub use self::assignment::{Assigned, assignment};
pub use self::contract::{
    Method, OptimiserKind, Parameter, StateTensor, Step, StepInputs, StepOutputs, Update,
};
pub use self::groups::{GroupConfig, Rule, Rules};
pub(crate) use self::groups::{validate_groups, validate_patterns};
pub(crate) use self::norms::LayerSquares;
pub use self::norms::{LayerNorm, UpdateNorms};
pub(crate) use self::sharing::Saved;
use self::sharing::{Put, Take};
use crate::distributed::{World, owners};
use crate::gradients::Gradients;

registry::registry! {
    /// Adam with decoupled weight decay.
    Adamw = "adamw" in adamw;
    /// The sign of the momentum.
    Lion = "lion" in lion;
    /// Orthogonal updates of matrices.
    Muon = "muon" in muon;
    /// Muon with rows of equal size.
    Normuon = "normuon" in normuon;
}

/// The first kind of the registry.
impl Default for OptimiserConfig {
    fn default() -> Self {
        Self::defaults().swap_remove(0)
    }
}

/// The optimiser of one model: the state of each parameter, and its master if the model holds a
/// rounded copy, in the order in which the module visits them.
///
/// If several ranks share the work, each keeps state, master and average of the parameters that it owns, and updates
/// those alone.
#[derive(Debug)]
pub struct Optimiser<B: OpBackend> {
    slots: Vec<Slot<B>>,
    world: World,
    /// Whether it keeps averages.
    averages: bool,
}

/// What the optimiser keeps for one parameter.
#[derive(Debug)]
struct Slot<B: OpBackend> {
    rule: Rule,
    layout: Vec<StateTensor>,
    /// As declared in `layout`; empty only while the parameter is being updated.
    state: Vec<FloatTensor<B>>,
    /// The parameter in f32, if the model's is rounded.
    master: Option<FloatTensor<B>>,
    /// The average of the parameter's values, in f32, if the run keeps one.
    average: Option<FloatTensor<B>>,
    /// The rank that keeps all this; on the others it is empty.
    owner: usize,
    /// Whether this is that rank.
    own: bool,
}

impl<B: OpBackend> Optimiser<B> {
    /// The optimiser of an f32 model before the first update: all state is zero.
    pub fn new<M: Module<Autodiff<B>>>(rules: &Rules, model: &M) -> Self {
        Self::of_rank(World::ALONE, rules, model)
    }

    /// As [`Optimiser::new`], of one of several ranks.
    pub fn of_rank<M: Module<Autodiff<B>>>(world: World, rules: &Rules, model: &M) -> Self {
        let mut find = FindRules { rules, path: Vec::new(), found: Vec::new() };
        model.visit(&mut find);
        let owners = owners::owners(find.found.iter().map(|(rule, _)| rule), world.size);
        let slot = |((rule, device), owner): ((Rule, B::Device), usize)| {
            let (layout, own) = (rule.optimiser.state(&rule.parameter), owner == world.rank);
            let zeros = |tensor: &StateTensor| {
                let flat = Tensor::<B, 1>::zeros([tensor.shape.iter().product::<usize>()], &device);
                B::float_reshape(primitive(flat), tensor.shape.clone().into())
            };
            let state = layout.iter().filter(|_| own).map(zeros).collect();
            Slot { rule, layout, state, master: None, average: None, owner, own }
        };
        Optimiser {
            slots: find.found.into_iter().zip(owners).map(slot).collect(),
            world,
            averages: false,
        }
    }

    /// Which parameters are updated in which way.
    pub fn assignment(&self) -> Vec<Assigned> {
        assignment(self.slots.iter().map(|slot| &slot.rule))
    }

    /// Converts the f32 `model` to `precision`, and keeps the masters of the parameters that this rounds.
    ///
    /// # Panics
    /// When the optimiser was made for another model.
    pub fn round<M: Module<Autodiff<B>>>(&mut self, model: M, precision: Precision) -> M {
        let mut slots = self.slots.iter_mut();
        let mut keep = KeepMasters { slots: &mut slots, precision };
        model.visit(&mut keep);
        assert!(slots.next().is_none(), "as many parameters as slots");
        precision.convert(model)
    }

    /// One update of every parameter that has a gradient: among ranks, of those that this one owns. Buffers with no
    /// other owner are updated in place.
    ///
    /// # Panics
    /// When model or gradients do not match the optimiser.
    pub fn step<M: Module<Autodiff<B>>>(
        &mut self,
        model: M,
        gradients: Gradients<B>,
        update: Update,
    ) -> M {
        self.step_measured(model, gradients, update, None)
    }

    /// As [`Optimiser::step`]; also adds every parameter to `norms`, if they are given.
    ///
    /// # Panics
    /// As [`Optimiser::step`].
    pub fn step_measured<M: Module<Autodiff<B>>>(
        &mut self,
        model: M,
        gradients: Gradients<B>,
        update: Update,
        norms: Option<&mut UpdateNorms<B>>,
    ) -> M {
        let slots = self.slots.len();
        assert_eq!(gradients.tensors.len(), slots, "as many gradients as parameters");
        // The model's buffers are taken out of it, so that nothing shares them and kinds can update them in place.
        let mut take = Take { values: vec![] };
        let model = model.map(&mut take);
        let mut norms = norms;
        let mut values: Vec<_> = take.values.into_iter().map(Some).collect();
        let mut gradients = gradients.tensors;
        let due: Vec<_> = (0..slots).filter(|&at| gradients[at].is_some()).collect();
        for batch in batches(due, |at| &self.slots[at].rule) {
            let take = |at: usize| (at, gradients[at].take().expect("in one batch"));
            let batch = batch.into_iter().map(take).collect();
            self.step_batch(batch, &mut values, update, norms.as_deref_mut());
        }
        let values = values.into_iter().map(|value| value.expect("a value for each parameter"));
        model.map(&mut Put { values })
    }

    /// Updates the parameters of a batch, with their gradients, in `values`, those of the model.
    fn step_batch(
        &mut self,
        batch: Vec<(usize, FloatTensor<B>)>,
        values: &mut [Option<FloatTensor<B>>],
        update: Update,
        mut norms: Option<&mut UpdateNorms<B>>,
    ) {
        let numbers: Vec<_> = batch.iter().map(|(at, _)| *at).collect();
        let mut before = vec![];
        let inputs = batch.into_iter().map(|(at, gradient)| {
            let slot = &mut self.slots[at];
            let Parameter { path, shape, .. } = &slot.rule.parameter;
            assert!(slot.own, "the gradient of another rank's {path}");
            let value = values[at].take().expect("a value");
            assert_eq!(TensorMetadata::shape(&value)[..], shape[..], "the shape of {path}");
            let (parameter, copy) = match slot.master.take() {
                Some(master) => (master, Some(TensorMetadata::dtype(&value))),
                None => (value, None),
            };
            if norms.is_some() {
                before.push((parameter.clone(), gradient.clone()));
            }
            StepInputs { parameter, gradient, state: std::mem::take(&mut slot.state), copy }
        });
        let inputs: Vec<_> = inputs.collect();
        let copies: Vec<_> = inputs.iter().map(|inputs| inputs.copy).collect();
        let steps = numbers.iter().zip(inputs).map(|(&at, inputs)| {
            let Rule { parameter, lr, .. } = &self.slots[at].rule;
            Step { parameter, update: Update { lr: update.lr * lr, ..update }, inputs }
        });
        let optimiser = &self.slots[numbers[0]].rule.optimiser;
        let outputs: Vec<StepOutputs<B>> = optimiser.step_all(steps.collect());
        assert_eq!(outputs.len(), numbers.len(), "parameters after an update");
        let mut before = before.into_iter();
        for ((at, copy), new) in numbers.into_iter().zip(copies).zip(outputs) {
            let slot = &mut self.slots[at];
            assert_eq!(new.state.len(), slot.layout.len(), "state tensors after an update");
            slot.state = new.state;
            if let (Some(norms), Some((old, gradient))) = (&mut norms, before.next()) {
                norms.add(&slot.rule.parameter.path, gradient, [old, new.parameter.clone()]);
            }
            values[at] = Some(match copy {
                Some(dtype) => {
                    let rounded = || B::float_cast(new.parameter.clone(), dtype.into());
                    let rounded = new.copy.unwrap_or_else(rounded);
                    slot.master = Some(new.parameter);
                    rounded
                }
                None => new.parameter,
            });
        }
    }
}

/// The most elements of the parameters that are updated together, but at least one: it bounds the memory of the update.
const BATCH_ELEMENTS: usize = 16 << 20;

/// The parameters `due`, by their number, in batches that one kind updates together: of one shape, and for each shape as
/// equal as can be, so that later batches find the buffers of earlier ones.
fn batches<'a>(due: Vec<usize>, rule: impl Fn(usize) -> &'a Rule) -> Vec<Vec<usize>> {
    let mut alike: Vec<Vec<usize>> = vec![];
    for at in due {
        let same = |other: &Rule| {
            let (one, other) = (rule(at), other);
            one.optimiser == other.optimiser && one.parameter.shape == other.parameter.shape
        };
        match alike.iter_mut().find(|group| same(rule(group[0]))) {
            Some(group) => group.push(at),
            None => alike.push(vec![at]),
        }
    }
    let split = |group: Vec<usize>| {
        let elements = rule(group[0]).parameter.shape.iter().product::<usize>().max(1);
        let most = (BATCH_ELEMENTS / elements).max(1);
        let size = group.len().div_ceil(group.len().div_ceil(most));
        group.chunks(size).map(<[usize]>::to_vec).collect::<Vec<_>>()
    };
    alike.into_iter().flat_map(split).collect()
}

/// Finds the rule of each parameter, and its device.
struct FindRules<'a, B: OpBackend> {
    rules: &'a Rules<'a>,
    path: Vec<String>,
    found: Vec<(Rule, B::Device)>,
}

impl<B: OpBackend> ModuleVisitor<Autodiff<B>> for FindRules<'_, B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
        let rule = self.rules.rule(&self.path.join("."), param.dims().to_vec());
        self.found.push((rule, param.device()));
    }
}

struct KeepMasters<I> {
    slots: I,
    precision: Precision,
}

impl<'a, B: OpBackend, I> ModuleVisitor<Autodiff<B>> for KeepMasters<I>
where
    I: Iterator<Item = &'a mut Slot<B>>,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
        let slot = self.slots.next().expect("as many slots as parameters");
        let rounds = self.precision.parameter(D) != param.val().dtype();
        slot.master = (rounds && slot.own).then(|| primitive(param.val().inner()));
    }
}

#[cfg(test)]
mod tests;
