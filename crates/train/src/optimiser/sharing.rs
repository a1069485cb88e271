//! What the ranks of a run share: gradients before an update, parameters after it, and all of the state for a
//! checkpoint.

use std::ops::Range;

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, TensorMetadata};
use longwall_kernels::backend::{OpBackend, primitive, tensor};
use longwall_model::weights::NamedTensors;

use super::{Optimiser, Slot, StateTensor};
use crate::distributed::{Collective, CollectiveError, Sums};
use crate::gradients::Gradients;

/// The tensors of a checkpoint, in main memory.
#[derive(Debug)]
pub(crate) struct Saved {
    /// The model's weights: masters where it holds rounded copies.
    pub weights: NamedTensors,
    /// The optimiser's state.
    pub optimizer: NamedTensors,
    /// The average of the weights, if there is one.
    pub ema: Option<NamedTensors>,
}

/// Sums the gradients of a step to the ranks that own their parameters, block by block during the last backward pass.
pub(crate) struct Reduction<'a, B: OpBackend> {
    collective: &'a dyn Collective<B>,
    is_alone: bool,
    /// Of each parameter.
    owners: Vec<usize>,
    /// The parameters whose gradients are sent, in order.
    sent: Vec<usize>,
    /// The sums of these gradients.
    sums: Vec<Sums<B>>,
    failed: Option<CollectiveError>,
}

impl<B: OpBackend> Reduction<'_, B> {
    /// Takes the gradients of the parameters in the range and sums them over the ranks, all of which pass the same range.
    /// After a failure, which [`Reduction::finish`] returns, it does nothing.
    ///
    /// # Panics
    /// When the gradients are of another model.
    pub fn send(&mut self, gradients: &mut Gradients<B>, parameters: Range<usize>) {
        let count = gradients.tensors.len();
        assert_eq!(count, self.owners.len(), "as many gradients as parameters");
        if self.is_alone || self.failed.is_some() {
            return;
        }
        if let Err(error) = self.sum(gradients, parameters) {
            self.failed = Some(error);
        }
    }

    fn sum(
        &mut self,
        gradients: &mut Gradients<B>,
        parameters: Range<usize>,
    ) -> Result<(), CollectiveError> {
        // After a failed exchange, the other ranks may be elsewhere.
        self.collective.check_peers()?;
        // The loss of every rank depends on the same parameters.
        let taken = parameters.filter_map(|at| Some((at, gradients.tensors[at].take()?)));
        let (places, tensors): (Vec<usize>, Vec<_>) =
            taken.map(|(at, gradient)| (at, (gradient, self.owners[at]))).unzip();
        self.sums.push(self.collective.reduce(tensors)?);
        self.sent.extend(places);
        Ok(())
    }

    /// Sends the gradients that are left. Returns the sums over the ranks, of the parameters that this rank owns;
    /// `None` for the others.
    ///
    /// # Errors
    /// When a rank is lost.
    ///
    /// # Panics
    /// As [`Reduction::send`].
    pub fn finish(mut self, mut gradients: Gradients<B>) -> Result<Gradients<B>, CollectiveError> {
        self.send(&mut gradients, 0..self.owners.len());
        let sums = self.collective.finish_reduce(self.sums);
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.sent.into_iter().zip(sums).for_each(|(at, sum)| gradients.tensors[at] = sum);
        Ok(gradients)
    }
}

impl<B: OpBackend> Optimiser<B> {
    /// Begins the sums of a step's gradients.
    pub(crate) fn reduction<'a>(&self, collective: &'a dyn Collective<B>) -> Reduction<'a, B> {
        let owners: Vec<usize> = self.slots.iter().map(|slot| slot.owner).collect();
        let is_alone = self.world.is_alone();
        Reduction { collective, is_alone, owners, sent: vec![], sums: vec![], failed: None }
    }

    /// `model` with the values that the owners of its parameters have.
    ///
    /// # Errors
    /// When a rank is lost.
    pub(crate) fn share<M: Module<Autodiff<B>>>(
        &self,
        model: M,
        collective: &dyn Collective<B>,
    ) -> Result<M, CollectiveError> {
        if self.world.is_alone() {
            return Ok(model);
        }
        // The model's buffers are taken out of it, so that nothing shares them and new values are received in place.
        let mut take = Take { values: vec![] };
        let model = model.map(&mut take);
        let owners = self.slots.iter().map(|slot| slot.owner);
        let values = collective.broadcast(take.values.into_iter().zip(owners).collect())?;
        Ok(model.map(&mut Put { values: values.into_iter() }))
    }

    /// As [`Optimiser::with_average`], on every rank.
    ///
    /// # Errors
    /// When a rank is lost.
    ///
    /// # Panics
    /// As [`Optimiser::with_average`].
    pub(crate) fn shared_average<M: Module<B>>(
        &self,
        model: M,
        collective: &dyn Collective<B>,
    ) -> Result<M, CollectiveError> {
        let model = self.with_average(model);
        if self.world.is_alone() {
            return Ok(model);
        }
        let mut values = Values { found: vec![] };
        model.visit(&mut values);
        let owners = self.slots.iter().map(|slot| slot.owner);
        let values = values.found.into_iter().map(|(_, value)| value).zip(owners).collect();
        let values = collective.broadcast(values)?;
        Ok(model.map(&mut PutInner { values: values.into_iter() }))
    }

    /// All tensors of a checkpoint of `model` on rank 0, `None` on the others: one tensor after another, so that rank 0
    /// needs no memory for all of them on its device.
    ///
    /// # Errors
    /// When a rank is lost.
    ///
    /// # Panics
    /// When the optimiser was made for another model.
    pub(crate) fn saved<M: Module<B>>(
        &self,
        model: &M,
        collective: &dyn Collective<B>,
    ) -> Result<Option<Saved>, CollectiveError> {
        let mut values = Values { found: vec![] };
        model.visit(&mut values);
        assert_eq!(values.found.len(), self.slots.len(), "as many parameters as slots");
        let (mut weights, mut optimizer, mut ema) = (vec![], vec![], vec![]);
        for (slot, (shape, value)) in self.slots.iter().zip(values.found) {
            let Slot { rule, layout, state, master, average, .. } = slot;
            let path = &rule.parameter.path;
            let device = B::float_device(&value);
            let fetch = |own: Option<FloatTensor<B>>, shape: &[usize]| {
                self.fetch(slot, own, shape, &device, collective)
            };
            // What the model holds in f32, all ranks have.
            let whole = match TensorMetadata::dtype(&value) {
                DType::F32 => self.world.is_first().then(|| elements::<B>(value)),
                _ => fetch(master.clone(), &shape)?,
            };
            weights.extend(whole.map(|whole| (path.clone(), shape.clone(), whole)));
            for (at, StateTensor { name, shape }) in layout.iter().enumerate() {
                let whole = fetch(state.get(at).cloned(), shape)?;
                optimizer.extend(whole.map(|all| (format!("{name}.{path}"), shape.clone(), all)));
            }
            if self.averages {
                let whole = fetch(average.clone(), &shape)?;
                ema.extend(whole.map(|whole| (path.clone(), shape, whole)));
            }
        }
        let saved = Saved { weights, optimizer, ema: self.averages.then_some(ema) };
        Ok(self.world.is_first().then_some(saved))
    }

    /// A tensor of f32 numbers that the owner of `slot` has, on rank 0.
    fn fetch(
        &self,
        slot: &Slot<B>,
        own: Option<FloatTensor<B>>,
        shape: &[usize],
        device: &B::Device,
        collective: &dyn Collective<B>,
    ) -> Result<Option<Vec<f32>>, CollectiveError> {
        assert_eq!(own.is_some(), slot.own, "the state of {}", slot.rule.parameter.path);
        let first = self.world.is_first();
        if slot.owner == 0 {
            return Ok(own.filter(|_| first).map(elements::<B>));
        }
        let count = shape.iter().product::<usize>();
        let room = || primitive(Tensor::<B, 1>::empty([count], device));
        let tensor = own.map_or_else(room, |own| B::float_reshape(own, [count].into()));
        let received = collective.broadcast(vec![(tensor, slot.owner)])?.swap_remove(0);
        Ok(first.then(|| elements::<B>(received)))
    }
}

/// The elements of `x` in main memory, in f32.
fn elements<B: OpBackend>(x: FloatTensor<B>) -> Vec<f32> {
    let count = TensorMetadata::shape(&x).num_elements();
    let flat = B::float_reshape(x, [count].into());
    tensor::<B, 1>(flat).into_data().iter::<f32>().collect()
}

/// Takes the values out of a model, and leaves one element in their place.
pub(super) struct Take<B: OpBackend> {
    pub values: Vec<FloatTensor<B>>,
}

impl<B: OpBackend> ModuleMapper<Autodiff<B>> for Take<B> {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Autodiff<B>, D>>,
    ) -> Param<Tensor<Autodiff<B>, D>> {
        let (id, value, mapper) = param.consume();
        let nothing = Tensor::empty([1; D], &value.device());
        self.values.push(primitive(value.inner()));
        Param::from_mapped_value(id, nothing, mapper)
    }
}

/// Puts values into a model.
pub(super) struct Put<I> {
    pub values: I,
}

impl<B: OpBackend, I: Iterator<Item = FloatTensor<B>>> ModuleMapper<Autodiff<B>> for Put<I> {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Autodiff<B>, D>>,
    ) -> Param<Tensor<Autodiff<B>, D>> {
        let (id, _, mapper) = param.consume();
        let value = tensor::<B, D>(self.values.next().expect("a value for each parameter"));
        Param::from_mapped_value(id, Tensor::from_inner(value).require_grad(), mapper)
    }
}

/// As above, into a model without gradients.
struct PutInner<I> {
    values: I,
}

impl<B: OpBackend, I: Iterator<Item = FloatTensor<B>>> ModuleMapper<B> for PutInner<I> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let value = self.values.next().expect("a value for each parameter");
        param.map(|_| tensor::<B, D>(value))
    }
}

/// The shapes and values of a model's parameters.
struct Values<B: OpBackend> {
    found: Vec<(Vec<usize>, FloatTensor<B>)>,
}

impl<B: OpBackend> ModuleVisitor<B> for Values<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.found.push((param.dims().to_vec(), primitive(param.val())));
    }
}
