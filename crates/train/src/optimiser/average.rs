//! The exponential moving average of the weights.

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use longwall_kernels::backend::{OpBackend, primitive, tensor};

use super::{Optimiser, Slot};

impl<B: OpBackend> Optimiser<B> {
    /// Starts the average at the values of the f32 `model`.
    ///
    /// # Panics
    /// When the optimiser was made for another model.
    pub fn start_average<M: Module<Autodiff<B>>>(&mut self, model: &M) {
        model.visit(&mut Start { slots: self.slots.iter_mut() });
        self.averages = true;
    }

    /// Moves the average towards the values of `model`, or towards their f32 masters:
    /// a ← decay · a + (1 − decay) · w.
    ///
    /// # Panics
    /// When there is no average, or the optimiser was made for another model.
    pub fn update_average<M: Module<Autodiff<B>>>(&mut self, model: &M, decay: f64) {
        model.visit(&mut Move { slots: self.slots.iter_mut(), decay });
    }

    /// `model` with the average in place of its values, rounded as they are; among ranks, of the parameters that
    /// this one owns.
    ///
    /// # Panics
    /// When there is no average, or the optimiser was made for another model.
    pub fn with_average<M: Module<B>>(&self, model: M) -> M {
        model.map(&mut Put { slots: self.slots.iter() })
    }
}

struct Start<I> {
    slots: I,
}

impl<'a, B: OpBackend, I> ModuleVisitor<Autodiff<B>> for Start<I>
where
    I: Iterator<Item = &'a mut Slot<B>>,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
        let slot = self.slots.next().expect("as many slots as parameters");
        slot.average = slot.own.then(|| primitive(param.val().inner()));
    }
}

struct Move<I> {
    slots: I,
    decay: f64,
}

impl<'a, B: OpBackend, I> ModuleVisitor<Autodiff<B>> for Move<I>
where
    I: Iterator<Item = &'a mut Slot<B>>,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
        let slot = self.slots.next().expect("as many slots as parameters");
        if !slot.own {
            return;
        }
        let value = slot.master.clone().unwrap_or_else(|| primitive(param.val().inner()));
        let average = slot.average.take().expect("an average was started");
        let [average, value] = [average, value].map(tensor::<B, D>);
        // Not a·decay + w·(1 − decay): rounded to f32, the two factors do not add up to 1.
        let moved = average.clone() + (value - average) * (1.0 - self.decay);
        slot.average = Some(primitive(moved));
    }
}

struct Put<I> {
    slots: I,
}

impl<'a, B: OpBackend, I: Iterator<Item = &'a Slot<B>>> ModuleMapper<B> for Put<I> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let slot = self.slots.next().expect("as many slots as parameters");
        if !slot.own {
            return param;
        }
        let average = slot.average.clone().expect("an average was started");
        param.map(|value| tensor::<B, D>(average).cast(value.dtype()))
    }
}
