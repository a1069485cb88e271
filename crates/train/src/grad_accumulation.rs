//! Gradient accumulation: forward and backward over a batch, one micro-batch after another.

mod blocks;

use std::ops::Range;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use longwall_data::Batch;
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::all_to_all::Peers;
use longwall_model::LanguageModel;
use longwall_model::layers::{SharedRows, Span, own_part};

use self::blocks::block_by_block;
use crate::carried::Carried;
use crate::distributed::{Collective, CollectiveError, sum_over_ranks};
use crate::gradients::Gradients;
use crate::noise_scale::MicroBatchNorm;
use crate::signals::StopFlag;

/// Some rows of a batch, on the device; each tensor is `[rows, seq_len]`.
pub(crate) struct MicroBatch<B: OpBackend> {
    pub inputs: Tensor<B, 2, Int>,
    pub targets: Tensor<B, 2, Int>,
    pub document_starts: DocumentStarts<B>,
}

impl<B: OpBackend> MicroBatch<B> {
    pub fn new(batch: &Batch, rows: Range<usize>, device: &B::Device) -> Self {
        let shape = [rows.len(), batch.seq_len];
        let part = rows.start * batch.seq_len..rows.end * batch.seq_len;
        let ints = |all: &[i32]| {
            Tensor::from_data(TensorData::new(all[part.clone()].to_vec(), shape), device)
        };
        MicroBatch {
            inputs: ints(&batch.inputs),
            targets: ints(&batch.targets),
            document_starts: batch.document_starts.as_deref().map(ints),
        }
    }
}

/// The loss and gradients of a whole batch, still on the device.
pub struct BatchGradients<B: OpBackend> {
    /// Gradients of the mean loss, z-loss included.
    pub gradients: Gradients<B>,
    /// The terms of the mean loss over the batch's loss weights: the cross-entropy and, if it is on, the z-loss.
    terms: Tensor<B, 1>,
    /// Of each micro-batch, the sum of its loss weights, and what its gradient's squares add up from; empty unless the
    /// plan measures them.
    micro_batches: Vec<(f64, Vec<Tensor<B, 1>>)>,
    /// What the rows hand over, if they are rows of streams.
    pub carried: Option<Carried<B>>,
}

/// The scalars of a whole batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchScalars {
    /// The mean cross-entropy.
    pub loss: f32,
    /// The mean z-loss, if it is on.
    pub z_loss: Option<f32>,
    /// The global gradient norm.
    pub grad_norm: f32,
}

impl BatchScalars {
    /// From the square of the gradient norm, the loss and, if it is on, the z-loss.
    fn of(sums: &[f64]) -> Self {
        let term = |at: usize| sums.get(at).map(|term| *term as f32);
        let loss = term(1).unwrap_or(f32::NAN);
        BatchScalars { loss, z_loss: term(2), grad_norm: sums[0].sqrt() as f32 }
    }
}

impl<B: OpBackend> BatchGradients<B> {
    /// Losses and gradient norm, with one read from the device.
    pub fn scalars(&self) -> BatchScalars {
        BatchScalars::of(&self.sums())
    }

    /// As [`BatchGradients::scalars`], of the rows of all ranks, once the gradients are summed to their owners. Also
    /// returns whether `asked` is set on any rank.
    ///
    /// # Errors
    /// When a rank is lost.
    pub(crate) fn scalars_of_ranks(
        &self,
        asked: bool,
        collective: &dyn Collective<B>,
    ) -> Result<(BatchScalars, bool), CollectiveError> {
        let mut sums = vec![f64::from(u8::from(asked))];
        sums.extend(self.sums());
        let sums = sum_over_ranks(collective, &sums)?;
        Ok((BatchScalars::of(&sums[1..]), sums[0] > 0.0))
    }

    /// The square of the gradient norm, and the terms of the loss.
    fn sums(&self) -> Vec<f64> {
        let mut scalars = vec![self.terms.clone()];
        scalars.extend(self.gradients.square_sums());
        let scalars = Tensor::cat(scalars, 0).into_data();
        let mut scalars = scalars.iter::<f32>().map(f64::from);
        let [terms] = self.terms.dims();
        let mut sums: Vec<f64> = scalars.by_ref().take(terms).collect();
        sums.insert(0, scalars.sum());
        sums
    }

    /// Whether the plan measures the micro-batches' gradients.
    pub(crate) fn is_measured(&self) -> bool {
        !self.micro_batches.is_empty()
    }

    /// The norms of the micro-batches' gradients, with one read from the device; empty unless the plan measures them.
    pub fn micro_batch_norms(&self) -> Vec<MicroBatchNorm> {
        let sums: Vec<_> = self.micro_batches.iter().flat_map(|(_, sums)| sums.clone()).collect();
        if sums.is_empty() {
            return vec![];
        }
        let squares = Tensor::cat(sums, 0).into_data();
        let mut squares = squares.iter::<f64>();
        let of = |(weight, sums): &(f64, Vec<Tensor<B, 1>>)| {
            let square = squares.by_ref().take(sums.len()).sum();
            MicroBatchNorm { weight: *weight, square }
        };
        self.micro_batches.iter().map(of).collect()
    }
}

/// Sum of a batch's loss weights.
pub fn weight_sum(batch: &Batch) -> f64 {
    weight_of(batch, 0..batch.rows)
}

/// Sum of the loss weights of some rows.
fn weight_of(batch: &Batch, rows: Range<usize>) -> f64 {
    let weights = &batch.loss_weights[rows.start * batch.seq_len..rows.end * batch.seq_len];
    weights.iter().map(|&weight| f64::from(weight)).sum()
}

/// How a batch is processed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AccumulationPlan {
    /// Rows of one forward and backward pass.
    pub micro_batch: usize,
    /// Whether the backward pass recomputes each block's forward pass.
    pub recompute: bool,
    /// The coefficient of the z-loss.
    pub z_loss: f32,
    /// Whether the norms of the micro-batches' gradients are measured, which takes the memory of another gradient.
    pub measure_noise: bool,
}

/// Called with all gradients and the range of those that are final, which it may take out.
pub type FinishedGradients<'a, B> = &'a mut dyn FnMut(&mut Gradients<B>, Range<usize>);

/// Runs `model` forward and backward over `batch`, a micro-batch at a time.
///
/// Every position is weighted by its loss weight over `weight_sum`, the sum over the whole batch, so
/// that the micro-batches' losses and gradients sum to those of the batch's mean loss.
///
/// Rows of streams go on from `carried`, and hand over what is in the result; other rows need none. If `peers` share
/// the rows, this rank computes its part of their tokens, and the ranks' losses and gradients sum to those of the rows.
///
/// `finished` is called in the last micro-batch, after each block's backward pass; what it takes out is missing in the
/// result. It is not called when the plan measures noise, which reads all gradients at the end.
///
/// Returns `None` if `stop` is raised before the last micro-batch: what is computed by then is discarded.
///
/// # Panics
/// When the batch has no rows, or rows of streams that `carried` is not of.
pub fn forward_backward<B: OpBackend>(
    model: &LanguageModel<Autodiff<B>>,
    batch: &Batch,
    carried: Option<&Carried<B>>,
    peers: Option<&Arc<dyn Peers>>,
    weight_sum: f64,
    plan: AccumulationPlan,
    stop: &StopFlag,
    mut finished: Option<FinishedGradients<'_, B>>,
    device: &B::Device,
) -> Option<BatchGradients<B>> {
    let streams = batch.goes_on.as_ref();
    let streams = streams.map(|goes_on| (goes_on, carried.expect("rows of streams go on")));
    let mut handed_over = vec![];
    let mut gradients = Gradients::none(model);
    let mut terms: Option<Tensor<B, 1>> = None;
    let mut micro_batches = vec![];
    for first in (0..batch.rows).step_by(plan.micro_batch) {
        if stop.is_raised() {
            return None;
        }
        let rows = first..(first + plan.micro_batch).min(batch.rows);
        let before = plan.measure_noise.then(|| gradients.copies());
        let weight = weight_of(batch, rows.clone());
        let weights = weights::<Autodiff<B>>(batch, rows.clone(), weight_sum, device);
        let mut past = streams.map(|(goes_on, carried)| carried.of_rows(rows.clone(), goes_on));
        // A gradient that is measured is read after the pass.
        let is_last = rows.end == batch.rows;
        let finished = finished.take_if(|_| is_last && !plan.measure_noise);
        let tokens = Tokens::new(MicroBatch::new(batch, rows, device), weights, peers);
        let past_of_rows = past.as_deref_mut();
        let loss = block_by_block(model, tokens, past_of_rows, plan, &mut gradients, finished);
        handed_over.extend(past);
        if let Some(before) = before {
            micro_batches.push((weight, gradients.square_sums_since(before)));
        }
        // Without a kernel, the loss has the model's type.
        let loss = loss.terms.inner().cast(DType::F32);
        terms = Some(match terms {
            None => loss,
            Some(sum) => sum + loss,
        });
    }
    let terms = terms.expect("a batch has at least one row");
    let carried = streams.map(|_| Carried::joined(handed_over));
    Some(BatchGradients { gradients, terms, micro_batches, carried })
}

/// What this rank computes of a micro-batch; each tensor is `[rows, n]`.
struct Tokens<B: OpBackend> {
    inputs: Tensor<B, 2, Int>,
    targets: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
    span: Span<B>,
}

impl<B: OpBackend> Tokens<B> {
    /// All tokens of `rows`, or this rank's part of them if `peers` share the rows.
    fn new(rows: MicroBatch<B>, weights: Tensor<B, 2>, peers: Option<&Arc<dyn Peers>>) -> Self {
        let MicroBatch { inputs, targets, document_starts } = rows;
        let Some(peers) = peers else {
            return Tokens { inputs, targets, weights, span: Span::Whole(document_starts) };
        };
        let own = own_part(peers.as_ref(), inputs.dims()[1]);
        let (first, n) = (own.start, own.len());
        Tokens {
            inputs: inputs.narrow(1, first, n),
            targets: targets.narrow(1, first, n),
            weights: weights.narrow(1, first, n),
            span: Span::Part(SharedRows::new(Arc::clone(peers), document_starts)),
        }
    }
}

/// The loss weights of `rows` divided by `weight_sum`, `[rows, seq_len]`.
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
    use burn::tensor::TensorMetadata;
    use burn::tensor::ops::FloatTensorOps;
    use longwall_kernels::backend::{primitive, tensor};

    use super::*;
    use crate::config::SkipConfig;
    use crate::guard::{GuardState, SkipReason, StepGuard};
    use crate::testing::{TestBackend, tiny_model};

    /// Four rows, the first document of each ends after six tokens; every fifth token has no loss.
    pub(super) fn batch() -> Batch {
        let token = |i: usize| (i * i % 23) as i32;
        Batch {
            rows: 4,
            seq_len: 16,
            inputs: (0..64).map(token).collect(),
            targets: (1..65).map(token).collect(),
            loss_weights: (0..64).map(|i| if i % 5 == 0 { 0.0 } else { 1.0 }).collect(),
            document_starts: Some((0..64).map(|i| if i % 16 < 6 { 0 } else { 6 }).collect()),
            goes_on: None,
        }
    }

    pub(super) const PLAN: AccumulationPlan =
        AccumulationPlan { micro_batch: 2, recompute: false, z_loss: 0.0, measure_noise: false };

    fn pass(micro_batch: usize, stop: &StopFlag) -> Option<BatchGradients<TestBackend>> {
        pass_with(AccumulationPlan { micro_batch, ..PLAN }, stop)
    }

    fn pass_with(plan: AccumulationPlan, stop: &StopFlag) -> Option<BatchGradients<TestBackend>> {
        let batch = batch();
        let device = Default::default();
        forward_backward(
            &tiny_model(0),
            &batch,
            None,
            None,
            weight_sum(&batch),
            plan,
            stop,
            None,
            &device,
        )
    }

    fn run(micro_batch: usize) -> BatchScalars {
        pass(micro_batch, &StopFlag::new()).expect("nobody asks to stop").scalars()
    }

    #[test]
    fn a_nan_in_one_gradient_skips_the_step() {
        let mut pass = pass(2, &StopFlag::new()).unwrap();
        let gradient = pass.gradients.tensors.iter_mut().flatten().nth(3).unwrap();
        let len = gradient.shape().num_elements();
        let flat = TestBackend::float_reshape(gradient.clone(), [len].into());
        let flat = tensor::<TestBackend, 1>(flat).slice_fill(len - 1..len, f32::NAN);
        *gradient = primitive(flat);
        let BatchScalars { loss, grad_norm, .. } = pass.scalars();
        assert!(loss.is_finite() && grad_norm.is_nan(), "{loss}, {grad_norm}");
        let mut guard = StepGuard::new(&SkipConfig::default(), GuardState::default());
        let skip = guard.judge(loss, grad_norm, 1.0);
        assert!(matches!(skip, Some(SkipReason::GradNormNotFinite(_))), "{skip:?}");
    }

    /// A batch's rows in two parts, the second of which goes on from the first: the loss is that of the whole rows, and
    /// their second halves' gradients without those through the first.
    #[test]
    fn rows_that_go_on_have_the_losses_of_longer_rows() {
        let keys = "layers = 2\ntoken_shift = true\nshort_conv = true";
        let table = format!("{keys}\nwidth = 16\nheads = 2\nattention = {{ kind = \"kda\" }}");
        let model = crate::testing::model_of(&toml::from_str(&table).unwrap());
        let (device, never) = (Default::default(), StopFlag::new());
        for document_mask in [true, false] {
            let mut whole = batch();
            whole.document_starts = whole.document_starts.filter(|_| document_mask);
            let sum = weight_sum(&whole);
            let run = |batch: &Batch, carried: Option<&Carried<TestBackend>>, plan| {
                forward_backward(&model, batch, carried, None, sum, plan, &never, None, &device)
                    .unwrap()
            };
            let want = run(&whole, None, PLAN).scalars().loss;
            let halves = whole.clone().cut(8);
            let half = |side: usize, goes_on: bool| {
                let rows: Vec<Batch> =
                    (0..4).map(|row| halves.part(2 * row + side..2 * row + side + 1)).collect();
                let all = |of: fn(&Batch) -> Vec<i32>| rows.iter().flat_map(of).collect();
                Batch {
                    rows: 4,
                    seq_len: 8,
                    inputs: all(|row| row.inputs.clone()),
                    targets: all(|row| row.targets.clone()),
                    loss_weights: rows.iter().flat_map(|row| row.loss_weights.clone()).collect(),
                    document_starts: document_mask
                        .then(|| all(|row| row.document_starts.clone().unwrap())),
                    goes_on: Some(vec![goes_on; 4]),
                }
            };
            for (micro_batch, recompute) in [(4, false), (1, false), (2, true)] {
                let plan = AccumulationPlan { micro_batch, recompute, ..PLAN };
                let nothing = Carried::nothing(&model, 4, &device);
                let first = run(&half(0, false), Some(&nothing), plan);
                let carried = first.carried.clone();
                let second = run(&half(1, true), carried.as_ref(), plan);
                let got = first.scalars().loss + second.scalars().loss;
                assert!((got - want).abs() < 1e-5, "{plan:?}: {got} for {want}");
                let alone = run(&half(1, false), carried.as_ref(), plan).scalars().loss;
                let gain = (second.scalars().loss - alone).abs();
                assert!(gain > 1e-4, "the second halves do not read the first: {gain}");
            }
        }
    }

    /// What is not finite does not reach rows that begin.
    #[test]
    fn rows_without_a_past_go_on_from_0() {
        let table = "layers = 1\nwidth = 16\nheads = 2\nattention = { kind = \"kda\" }";
        let model = crate::testing::model_of(&toml::from_str(table).unwrap());
        let nan = model.nothing_carried(3, &Default::default()).into_iter().map(|x| x + f32::NAN);
        let carried = Carried::<TestBackend>::joined(vec![nan.collect()]);
        let values = |goes_on: &[bool]| -> Vec<bool> {
            let part = carried.of_rows(1..3, goes_on).swap_remove(0).into_data();
            let elements = part.shape[1];
            let nan = part.iter::<f32>().map(f32::is_nan).collect::<Vec<_>>();
            nan.chunks(elements).map(|row| row.iter().all(|nan| *nan)).collect()
        };
        assert_eq!(values(&[true, false, true]), [false, true]);
        assert_eq!(values(&[false, true, false]), [true, false]);
    }

    #[test]
    fn a_stop_is_seen_between_micro_batches() {
        let stop = StopFlag::new();
        stop.raise();
        assert!(pass(2, &stop).is_none());
    }

    #[test]
    fn the_loss_is_the_mean_over_the_weights_of_the_whole_batch() {
        let BatchScalars { loss, grad_norm, .. } = run(4);
        // An untrained model with 23 tokens is near the uniform loss.
        assert!((loss - 23f32.ln()).abs() < 0.5, "{loss}");
        assert!(grad_norm > 0.01);
        for micro_batch in [1, 2, 3] {
            let BatchScalars { loss: other, grad_norm: other_norm, .. } = run(micro_batch);
            assert!((loss - other).abs() < 1e-5, "{loss} and {other}");
            assert!((grad_norm - other_norm).abs() < 1e-4, "{grad_norm} and {other_norm}");
        }
    }

    /// Measuring changes no bit of the gradients, and finds the norms that the micro-batches have on their own.
    #[test]
    fn the_norms_of_micro_batches_are_those_of_their_own_gradients() {
        for recompute in [false, true] {
            let plan = AccumulationPlan { recompute, measure_noise: true, ..PLAN };
            let measured = pass_with(plan, &StopFlag::new()).unwrap();
            assert_eq!(measured.scalars(), run(2));
            let whole = batch();
            let norms = measured.micro_batch_norms();
            assert_eq!(norms.iter().map(|norm| norm.weight).sum::<f64>(), weight_sum(&whole));
            for (norm, first) in norms.iter().zip([0, 2]) {
                let part = |all: &[i32]| all[first * 16..(first + 2) * 16].to_vec();
                let alone = Batch {
                    rows: 2,
                    seq_len: 16,
                    inputs: part(&whole.inputs),
                    targets: part(&whole.targets),
                    loss_weights: whole.loss_weights[first * 16..(first + 2) * 16].to_vec(),
                    document_starts: whole.document_starts.as_deref().map(part),
                    goes_on: None,
                };
                assert_eq!(weight_sum(&alone), norm.weight);
                let plan = AccumulationPlan { measure_noise: false, ..plan };
                let (model, device, sum) = (tiny_model(0), Default::default(), weight_sum(&whole));
                let pass = forward_backward(
                    &model,
                    &alone,
                    None,
                    None,
                    sum,
                    plan,
                    &StopFlag::new(),
                    None,
                    &device,
                );
                let expected = f64::from(pass.unwrap().scalars().grad_norm).powi(2);
                assert!((norm.square / expected - 1.0).abs() < 1e-4, "{norm:?}, {expected}");
            }
        }
        assert!(pass(2, &StopFlag::new()).unwrap().micro_batch_norms().is_empty());
    }

    /// It changes the gradients, and is reported beside the cross-entropy, which it leaves as it is.
    #[test]
    fn the_z_loss_is_the_mean_over_the_weights_of_the_whole_batch() {
        let off = run(2);
        assert_eq!(off.z_loss, None);
        for micro_batch in [1, 2, 4] {
            let plan = AccumulationPlan { micro_batch, z_loss: 0.1, ..PLAN };
            let on = pass_with(plan, &StopFlag::new()).unwrap().scalars();
            // The logits of an untrained model are near 0.
            let (z_loss, want) = (on.z_loss.unwrap(), 0.1 * 23f32.ln().powi(2));
            assert!((z_loss - want).abs() < 0.1, "{z_loss} for {want}");
            assert!((on.loss - off.loss).abs() < 1e-5, "{on:?} and {off:?}");
            assert!((on.grad_norm - off.grad_norm).abs() > 1e-3, "{on:?} and {off:?}");
        }
    }

    #[test]
    fn the_same_batch_gives_the_same_bits() {
        assert_eq!(run(2), run(2));
    }
}
