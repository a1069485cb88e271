use burn::module::Module;
use burn::tensor::Tensor;
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::attention::probe::Probe;
use longwall_kernels::backend::OpBackend;

use super::carried::Carried;
use super::norm::Input;
use super::span::Span;
use super::time::{History, Preceding};
use super::{Attention, AttentionLayerState, LayerWeights, Mlp, Norm};
use crate::config::{ModelConfig, NormPosition};
use crate::init::WeightInit;

/// A block: attention, then an MLP, each added to the residual stream; [`NormPosition`] says where
/// the norms are.
#[derive(Module, Debug)]
pub struct Block<B: OpBackend> {
    /// Norm of attention's input; in post-norm blocks, of its sum with the residual stream.
    pub attention_norm: Norm<B>,
    /// The attention layer.
    pub attention: Attention<B>,
    /// Norm of attention's output, in sandwich-norm blocks.
    pub attention_out_norm: Option<Norm<B>>,
    /// Norm of the MLP's input; in post-norm blocks, of its sum with the residual stream.
    pub mlp_norm: Norm<B>,
    /// The MLP.
    pub mlp: Mlp<B>,
    /// Norm of the MLP's output, in sandwich-norm blocks.
    pub mlp_out_norm: Option<Norm<B>>,
    #[module(skip)]
    position: NormPosition,
}

/// What decoding keeps of one block.
#[derive(Clone, Debug)]
pub struct BlockState<B: OpBackend> {
    attention: AttentionLayerState<B>,
    /// Of the MLP's token shift.
    mlp: History<B>,
}

impl<B: OpBackend> BlockState<B> {
    /// Elements held.
    pub fn elements(&self) -> usize {
        self.attention.elements() + self.mlp.elements()
    }
}

impl<B: OpBackend> Block<B> {
    pub(crate) fn new(init: &WeightInit<B>, config: &ModelConfig, layer: usize) -> Self {
        let norm = |name| Norm::new(&init.part(name), config.norm, config.width, config.norm_bias);
        let out_norm = |name| (config.norm_position == NormPosition::Sandwich).then(|| norm(name));
        Block {
            attention_norm: norm("attention_norm"),
            attention: Attention::new(&init.part("attention"), config, layer),
            attention_out_norm: out_norm("attention_out_norm"),
            mlp_norm: norm("mlp_norm"),
            mlp: Mlp::new(&init.part("mlp"), config, layer),
            mlp_out_norm: out_norm("mlp_out_norm"),
            position: config.norm_position,
        }
    }

    /// The block's output for whole rows, or for this rank's part of shared rows: `x` and the result are
    /// `[batch, n, width]`, `first_values` is as in [`Attention::forward`].
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        span: &Span<B>,
        first_values: &mut Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let x =
            self.add(&self.attention_norm, self.attention_out_norm.as_ref(), x, |x, residual| {
                self.attention.forward(x.value(), span, first_values, residual)
            });
        self.add(&self.mlp_norm, self.mlp_out_norm.as_ref(), x, |x, residual| {
            self.mlp.forward(Input::of(x.value()), span.preceding(), residual)
        })
    }

    /// As [`Block::forward`] for whole rows, each of which continues the one that left `carried`, `[rows,
    /// carried_elements]` in f32, 0 before the first token of all; leaves in it what the rows that continue these need.
    /// No gradient reaches it.
    ///
    /// A document that starts with its row is one that goes on from before: where it is not, `carried` is 0.
    ///
    /// # Panics
    /// When the layer's kind carries no state.
    pub fn forward_from(
        &self,
        x: Tensor<B, 3>,
        documents: DocumentStarts<B>,
        carried: &mut Tensor<B, 2>,
        first_values: &mut Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let documents = documents.map(|starts| starts.clone().mask_fill(starts.equal_elem(0), -1));
        let mut parts = Carried::of(carried);
        let x =
            self.add(&self.attention_norm, self.attention_out_norm.as_ref(), x, |x, residual| {
                let x = x.value();
                self.attention.forward_from(x, &documents, first_values, residual, &mut parts)
            });
        let x = self.add(&self.mlp_norm, self.mlp_out_norm.as_ref(), x, |x, residual| {
            let x = x.value();
            let mut history = parts.next_history(self.mlp.history_shape(), x.dtype());
            let preceding = Preceding::Rows(&documents, &mut history);
            let y = self.mlp.forward(Input::of(x), preceding, residual);
            parts.replace_history(history);
            y
        });
        parts.finish();
        x
    }

    /// Elements that a row hands over to the row that continues it.
    pub fn carried_elements(&self) -> usize {
        let [tokens, channels] = self.mlp.history_shape();
        self.attention.carried_elements() + tokens * channels
    }

    /// Reports the block's metrics of [`Block::forward`] over whole rows.
    pub fn observe(
        &self,
        x: &Tensor<B, 3>,
        documents: &DocumentStarts<B>,
        first_values: &mut Option<Tensor<B, 3>>,
        probe: &mut Probe,
    ) {
        self.attention.observe(self.attention_input(x), documents, first_values, probe);
    }

    /// The weights that the block's attention gives to the keys of one sequence: `x` is `[1, seq_len, width]`,
    /// `first_values` is as in [`Attention::forward`].
    pub fn attention_weights(
        &self,
        x: &Tensor<B, 3>,
        first_values: &mut Option<Tensor<B, 3>>,
    ) -> LayerWeights {
        self.attention.weights(self.attention_input(x), first_values)
    }

    /// What attention reads, of the block's input.
    fn attention_input(&self, x: &Tensor<B, 3>) -> Tensor<B, 3> {
        match self.position {
            NormPosition::Post => x.clone(),
            _ => self.attention_norm.forward(x.clone()),
        }
    }

    /// The decoding state before the first token.
    pub fn init_state(&self) -> BlockState<B> {
        BlockState { attention: self.attention.init_state(), mlp: History::new() }
    }

    /// The block's output for new tokens, which follow those in `state`: `x` and the result are
    /// `[batch, n, width]`, `first_values` is as in [`Attention::forward`].
    pub fn extend(
        &self,
        x: Tensor<B, 3>,
        state: &mut BlockState<B>,
        first_values: &mut Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        let x =
            self.add(&self.attention_norm, self.attention_out_norm.as_ref(), x, |x, residual| {
                self.attention.extend(x, &mut state.attention, first_values, residual)
            });
        self.add(&self.mlp_norm, self.mlp_out_norm.as_ref(), x, |x, residual| {
            self.mlp.forward(x, Preceding::Held(&mut state.mlp), residual)
        })
    }

    /// Adds f (attention or MLP) to the residual stream `x`, with the norms around it. `f` takes its
    /// input and, optionally, the residual to add its output to.
    fn add(
        &self,
        norm: &Norm<B>,
        out_norm: Option<&Norm<B>>,
        x: Tensor<B, 3>,
        f: impl FnOnce(Input<B>, Option<Tensor<B, 3>>) -> Tensor<B, 3>,
    ) -> Tensor<B, 3> {
        if self.position == NormPosition::Post {
            return norm.forward(f(Input::of(x.clone()), Some(x)));
        }
        let normed = Input::normed(x.clone(), norm);
        match out_norm {
            Some(out_norm) => x + out_norm.forward(f(normed, None)),
            None => f(normed, Some(x)),
        }
    }
}
