//! One global batch: forward and backward, one micro-batch after another.

use std::ops::Range;

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_data::Batch;
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;

use crate::gradients::Gradients;

/// Some rows of a batch on the device, each tensor `[rows, seq_len]`.
pub(crate) struct Rows<B: OpBackend> {
    pub inputs: Tensor<B, 2, Int>,
    pub targets: Tensor<B, 2, Int>,
    pub document_starts: DocumentStarts<B>,
}

impl<B: OpBackend> Rows<B> {
    pub fn new(batch: &Batch, rows: Range<usize>, device: &B::Device) -> Self {
        let shape = [rows.len(), batch.seq_len];
        let part = rows.start * batch.seq_len..rows.end * batch.seq_len;
        let ints = |all: &[i32]| {
            Tensor::from_data(TensorData::new(all[part.clone()].to_vec(), shape), device)
        };
        Rows {
            inputs: ints(&batch.inputs),
            targets: ints(&batch.targets),
            document_starts: batch.document_starts.as_deref().map(ints),
        }
    }
}

/// The gradients of a global batch, not yet read back.
pub struct Pass<B: OpBackend> {
    /// Gradients of the mean loss.
    pub gradients: Gradients<B>,
    /// The mean loss over the batch's loss weights, `[1]`.
    loss: Tensor<B, 1>,
}

impl<B: OpBackend> Pass<B> {
    /// The mean loss and the global gradient norm, in one read from the device.
    ///
    /// The norm's squares are added up in f64, in the order of the parameters.
    pub fn loss_and_grad_norm(&self) -> (f32, f32) {
        let mut scalars = vec![self.loss.clone()];
        scalars.extend(self.gradients.square_sums());
        let scalars = Tensor::cat(scalars, 0).into_data();
        let mut scalars = scalars.iter::<f32>();
        let loss = scalars.next().unwrap_or(f32::NAN);
        (loss, scalars.map(f64::from).sum::<f64>().sqrt() as f32)
    }
}

/// Sum of a batch's loss weights.
pub fn weight_sum(batch: &Batch) -> f64 {
    batch.loss_weights.iter().map(|&weight| f64::from(weight)).sum()
}

/// Runs `model` forward and backward over `batch`, `micro_batch` rows at a time.
///
/// Every position is weighted by its loss weight over `weight_sum`, that of the whole batch, so
/// that losses and gradients of the micro-batches add up to those of the batch's mean.
///
/// # Panics
/// When the batch has no rows.
pub fn forward_backward<B: OpBackend>(
    model: &LanguageModel<Autodiff<B>>,
    batch: &Batch,
    weight_sum: f64,
    micro_batch: usize,
    device: &B::Device,
) -> Pass<B> {
    let mut pass: Option<Pass<B>> = None;
    for first in (0..batch.rows).step_by(micro_batch) {
        let rows = first..(first + micro_batch).min(batch.rows);
        let weights = weights::<Autodiff<B>>(batch, rows.clone(), weight_sum, device);
        let Rows { inputs, targets, document_starts } = Rows::new(batch, rows, device);
        let loss = model.loss(inputs, targets, weights, document_starts);
        let gradients = Gradients::collect(model, loss.backward());
        let loss = loss.inner();
        pass = Some(match pass {
            None => Pass { gradients, loss },
            Some(mut sum) => {
                sum.gradients.add(gradients);
                Pass { loss: sum.loss + loss, ..sum }
            }
        });
    }
    pass.expect("a batch has at least one row")
}

/// The loss weights of `rows` over `weight_sum`, `[rows, seq_len]`.
fn weights<B: Backend>(
    batch: &Batch,
    rows: Range<usize>,
    weight_sum: f64,
    device: &B::Device,
) -> Tensor<B, 2> {
    let shape = [rows.len(), batch.seq_len];
    let part = &batch.loss_weights[rows.start * batch.seq_len..rows.end * batch.seq_len];
    let scaled: Vec<f32> = part.iter().map(|&w| (f64::from(w) / weight_sum) as f32).collect();
    Tensor::from_data(TensorData::new(scaled, shape), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestBackend, tiny_model};

    fn batch() -> Batch {
        let token = |i: usize| (i * i % 23) as i32;
        Batch {
            rows: 4,
            seq_len: 16,
            inputs: (0..64).map(token).collect(),
            targets: (1..65).map(token).collect(),
            loss_weights: (0..64).map(|i| if i % 5 == 0 { 0.0 } else { 1.0 }).collect(),
            document_starts: Some((0..64).map(|i| if i % 16 < 6 { 0 } else { 6 }).collect()),
        }
    }

    fn run(micro_batch: usize) -> (f32, f32) {
        let batch = batch();
        let pass = forward_backward::<TestBackend>(
            &tiny_model(0),
            &batch,
            weight_sum(&batch),
            micro_batch,
            &Default::default(),
        );
        pass.loss_and_grad_norm()
    }

    #[test]
    fn the_loss_is_the_mean_over_the_weights_of_the_whole_batch() {
        let (loss, grad_norm) = run(4);
        // An untrained model of 23 tokens is near the uniform loss.
        assert!((loss - 23f32.ln()).abs() < 0.5, "{loss}");
        assert!(grad_norm > 0.01);
        for micro_batch in [1, 2, 3] {
            let (other, other_norm) = run(micro_batch);
            assert!((loss - other).abs() < 1e-5, "{loss} and {other}");
            assert!((grad_norm - other_norm).abs() < 1e-4, "{grad_norm} and {other_norm}");
        }
    }

    #[test]
    fn the_same_batch_gives_the_same_bits() {
        assert_eq!(run(2), run(2));
    }
}
