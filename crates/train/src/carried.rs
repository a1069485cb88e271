//! What the rows of a step hand over to those of the next, with `data.rows = "streams"`.

use std::ops::Range;
use std::path::Path;

use burn::backend::Autodiff;
use burn::tensor::{Bool, Tensor, TensorData};
use longwall_kernels::backend::{OpBackend, primitive, tensor};
use longwall_model::LanguageModel;
use longwall_model::weights::{NamedTensors, WeightsError, read_tensors};

use crate::distributed::{Collective, CollectiveError, World};

/// What the rows of a batch, or a rank's part of them, hand over: of each block `[rows, elements]` in f32.
#[derive(Clone, Debug)]
pub struct Carried<B: OpBackend> {
    blocks: Vec<Tensor<B, 2>>,
}

impl<B: OpBackend> Carried<B> {
    /// What `rows` rows without a past go on from.
    pub fn nothing(model: &LanguageModel<Autodiff<B>>, rows: usize, device: &B::Device) -> Self {
        let blocks = model.nothing_carried(rows, device);
        Carried { blocks: blocks.into_iter().map(Tensor::inner).collect() }
    }

    /// What as many rows without a past go on from.
    pub(crate) fn emptied(&self) -> Self {
        Carried { blocks: self.blocks.iter().map(Tensor::zeros_like).collect() }
    }

    /// What some rows go on from, by block: 0 for those that `goes_on`, of all rows, says have no past.
    ///
    /// # Panics
    /// When there are fewer rows.
    pub(crate) fn of_rows(
        &self,
        rows: Range<usize>,
        goes_on: &[bool],
    ) -> Vec<Tensor<Autodiff<B>, 2>> {
        let begins: Vec<bool> = goes_on[rows.clone()].iter().map(|goes_on| !goes_on).collect();
        let begins = TensorData::new(begins, [rows.len(), 1]);
        let begins = Tensor::<B, 2, Bool>::from_data(begins, &self.blocks[0].device());
        let of_block = |block: &Tensor<B, 2>| {
            let part = block.clone().narrow(0, rows.start, rows.len());
            // Not a product, which a NaN would survive.
            let begins = begins.clone().expand(part.dims());
            Tensor::from_inner(part.mask_fill(begins, 0.0))
        };
        self.blocks.iter().map(of_block).collect()
    }

    /// What all rows hand over, from that of consecutive micro-batches, by block.
    pub(crate) fn joined(micro_batches: Vec<Vec<Tensor<Autodiff<B>, 2>>>) -> Self {
        let mut parts: Vec<_> = micro_batches.into_iter().map(Vec::into_iter).collect();
        // Block by block: the parts of one are released before those of the next are joined.
        let of_block = || {
            let parts: Vec<_> = parts.iter_mut().filter_map(|parts| parts.next()).collect();
            let parts = parts.into_iter().map(Tensor::inner).collect::<Vec<_>>();
            (!parts.is_empty()).then(|| Tensor::cat(parts, 0))
        };
        Carried { blocks: std::iter::from_fn(of_block).collect() }
    }

    /// The rows of all ranks by name, on rank 0, for a checkpoint. All ranks call this.
    ///
    /// # Errors
    /// When a rank is lost.
    pub(crate) fn of_ranks(
        &self,
        collective: &dyn Collective<B>,
    ) -> Result<Option<NamedTensors>, CollectiveError> {
        let world = collective.world();
        let mut named = vec![];
        for (at, block) in self.blocks.iter().enumerate() {
            // What other ranks own is only room for it.
            let of_rank = |rank| {
                let own = rank == world.rank;
                (primitive(if own { block.clone() } else { block.zeros_like() }), rank)
            };
            let parts = collective.broadcast((0..world.size).map(of_rank).collect())?;
            if !world.is_first() {
                continue;
            }
            let whole = Tensor::cat(parts.into_iter().map(tensor::<B, 2>).collect(), 0);
            let shape = whole.dims().to_vec();
            named.push((name(at), shape, whole.into_data().iter::<f32>().collect()));
        }
        Ok(world.is_first().then_some(named))
    }

    /// A rank's part of the `rows` rows in a checkpoint's file.
    ///
    /// # Errors
    /// When the file cannot be read, or holds other rows or those of another model.
    pub(crate) fn load(
        path: &Path,
        model: &LanguageModel<Autodiff<B>>,
        rows: usize,
        world: World,
        device: &B::Device,
    ) -> Result<Self, WeightsError> {
        let mismatch = |reason| WeightsError::Mismatch { path: path.to_owned(), reason };
        let (mut tensors, part) = (read_tensors(path)?, world.part(rows));
        let mut blocks = vec![];
        for (at, block) in model.blocks.iter().enumerate() {
            let (name, shape) = (name(at), [rows, block.carried_elements()]);
            let Some((found, elements)) = tensors.remove(&name) else {
                return Err(mismatch(format!("{name} is missing from the file")));
            };
            if found != shape {
                return Err(mismatch(format!("{name} has shape {found:?}, the run's {shape:?}")));
            }
            let own = elements[part.start * shape[1]..part.end * shape[1]].to_vec();
            let own = TensorData::new(own, [part.len(), shape[1]]);
            blocks.push(Tensor::from_data(own, device));
        }
        match tensors.keys().min() {
            None => Ok(Carried { blocks }),
            Some(name) => Err(mismatch(format!("{name} is no block of the model"))),
        }
    }
}

fn name(block: usize) -> String {
    format!("blocks.{block}.carried")
}
