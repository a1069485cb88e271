//! The language model: embedding, blocks, final norm, output layer.

use burn::module::{Module, Param};
use burn::tensor::{DType, FloatDType, Int, Tensor};
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::attention::probe::{Metric, Probe};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::cross_entropy::{
    LinearCrossEntropy, Loss, capped, linear_cross_entropy, token_cross_entropy,
};
use longwall_kernels::ops::embedding::embedding;
use longwall_kernels::ops::linear::linear_f32;
use longwall_kernels::ops::sample::sample;

use crate::config::{ModelConfig, Positions};
use crate::generate::Sampling;
use crate::init::WeightInit;
use crate::layers::{Block, BlockState, LayerWeights, Norm, Span};

/// A decoder-only language model.
#[derive(Module, Debug)]
pub struct LanguageModel<B: OpBackend> {
    /// Token embedding, `[padded_vocab, width]`.
    pub embedding: Param<Tensor<B, 2>>,
    /// Learned absolute positions, `[seq_len, width]`.
    pub positions: Option<Param<Tensor<B, 2>>>,
    /// Norm of the embedded tokens.
    pub embedding_norm: Option<Norm<B>>,
    /// The blocks.
    pub blocks: Vec<Block<B>>,
    /// Norm before the output layer.
    pub norm: Norm<B>,
    /// Weight of the output layer, `[padded_vocab, width]`; `None` when tied to the embedding.
    pub head: Option<Param<Tensor<B, 2>>>,
    /// Tokens of the vocabulary, at most `padded_vocab`.
    #[module(skip)]
    vocab_size: usize,
    /// [`ModelConfig::logit_softcap`].
    #[module(skip)]
    logit_softcap: Option<f32>,
}

/// What decoding keeps between calls, for a batch of sequences of equal length.
#[derive(Clone, Debug)]
pub struct ModelState<B: OpBackend> {
    blocks: Vec<BlockState<B>>,
    position: usize,
}

impl<B: OpBackend> ModelState<B> {
    /// Tokens seen so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Elements held, over all sequences.
    pub fn elements(&self) -> usize {
        self.blocks.iter().map(BlockState::elements).sum()
    }
}

impl<B: OpBackend> LanguageModel<B> {
    /// A model with initial weights. Each depends only on `seed` and on its place in the model.
    ///
    /// Learned positions, if any, cover `seq_len` tokens, the training length.
    pub fn new(
        config: &ModelConfig,
        vocab_size: usize,
        seq_len: usize,
        seed: u64,
        device: &B::Device,
    ) -> Self {
        Self::with(&WeightInit::new(seed, config, device), config, vocab_size, seq_len)
    }

    /// A model whose weights have the right shapes, and neither values nor memory.
    pub fn blank(
        config: &ModelConfig,
        vocab_size: usize,
        seq_len: usize,
        device: &B::Device,
    ) -> Self {
        Self::with(&WeightInit::blank(config, device), config, vocab_size, seq_len)
    }

    fn with(init: &WeightInit<B>, config: &ModelConfig, vocab_size: usize, seq_len: usize) -> Self {
        let (width, padded_vocab) = (config.width, config.padded_vocab(vocab_size));
        let learned = config.positions == Positions::Learned;
        let block = |n: usize| Block::new(&init.part("blocks").part(n), config, n);
        let norm = |name| Norm::new(&init.part(name), config.norm, width, config.norm_bias);
        LanguageModel {
            embedding: init.part("embedding").weight([padded_vocab, width]),
            positions: learned.then(|| init.part("positions").weight([seq_len, width])),
            embedding_norm: config.embedding_norm.then(|| norm("embedding_norm")),
            blocks: (0..config.layers).map(block).collect(),
            norm: norm("norm"),
            head: (!config.tie_embeddings).then(|| init.part("head").weight([padded_vocab, width])),
            vocab_size,
            logit_softcap: config.logit_softcap.map(|cap| cap as f32),
        }
    }

    /// Gives each layer the window that it has in `config`, the configuration of this model but for its windows.
    pub fn set_windows(&mut self, config: &ModelConfig) {
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            block.attention.set_window(config.attention_shape(layer).window);
        }
    }

    /// Size of the vocabulary, without the rows that [`ModelConfig::padded_vocab`] adds.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The longest sequence that learned positions allow; `None` if there is no limit.
    pub fn max_len(&self) -> Option<usize> {
        self.positions.as_ref().map(|positions| positions.dims()[0])
    }

    /// The weight of the output layer, `[padded_vocab, width]`.
    fn head_weight(&self) -> Tensor<B, 2> {
        self.head.as_ref().unwrap_or(&self.embedding).val()
    }

    /// The output of the last block after the final norm, for whole rows: tokens `[batch, seq_len]` to
    /// `[batch, seq_len, width]`.
    pub fn hidden(&self, tokens: Tensor<B, 2, Int>, documents: DocumentStarts<B>) -> Tensor<B, 3> {
        let span = &Span::Whole(documents);
        let mut x = self.embedded(tokens, span);
        let mut first_values = None;
        for block in &self.blocks {
            x = block.forward(x, span, &mut first_values);
        }
        self.norm.forward(x)
    }

    /// As [`LanguageModel::hidden`], where each row continues the one that left `carried`, see
    /// [`LanguageModel::nothing_carried`]; leaves in it what the rows that continue these need.
    ///
    /// # Panics
    /// When a layer's kind carries no state.
    pub fn hidden_from(
        &self,
        tokens: Tensor<B, 2, Int>,
        documents: DocumentStarts<B>,
        carried: &mut [Tensor<B, 2>],
    ) -> Tensor<B, 3> {
        assert_eq!(carried.len(), self.blocks.len(), "blocks that carry");
        let mut x = self.embedded(tokens, &Span::Whole(documents.clone()));
        let mut first_values = None;
        for (block, carried) in self.blocks.iter().zip(carried) {
            x = block.forward_from(x, documents.clone(), carried, &mut first_values);
        }
        self.norm.forward(x)
    }

    /// What `rows` rows without a past go on from: 0, `[rows, carried_elements]` for each block, in f32.
    pub fn nothing_carried(&self, rows: usize, device: &B::Device) -> Vec<Tensor<B, 2>> {
        let zeros = |block: &Block<B>| {
            Tensor::zeros([rows, block.carried_elements()], (device, DType::F32))
        };
        self.blocks.iter().map(zeros).collect()
    }

    /// The metrics that [`LanguageModel::observe`] may report, each once, in the order of the layers.
    pub fn metrics(&self) -> Vec<Metric> {
        distinct(self.blocks.iter().flat_map(|block| block.attention.metrics()))
    }

    /// The metrics that [`LanguageModel::observe_thoroughly`] may report, each once, in the order of the layers.
    pub fn thorough_metrics(&self) -> Vec<Metric> {
        distinct(self.blocks.iter().flat_map(|block| block.attention.thorough_metrics()))
    }

    /// The metrics that layers report on whole rows. Tokens and documents are `[batch, seq_len]`. If no
    /// layer has a metric, nothing is computed.
    pub fn observe(&self, tokens: Tensor<B, 2, Int>, documents: DocumentStarts<B>) -> Probe {
        if self.metrics().is_empty() {
            return Probe::default();
        }
        self.observe_by(Probe::default(), tokens, documents)
    }

    /// As [`LanguageModel::observe`], also the weights of keys and the retention of gates: a layer of T tokens takes
    /// T/value_dim times as long as its attention.
    pub fn observe_thoroughly(&self, tokens: Tensor<B, 2, Int>) -> Probe {
        self.observe_by(Probe::thorough(), tokens, None)
    }

    fn observe_by(
        &self,
        mut probe: Probe,
        tokens: Tensor<B, 2, Int>,
        documents: DocumentStarts<B>,
    ) -> Probe {
        let span = Span::Whole(documents.clone());
        let mut x = self.embedded(tokens, &span);
        let mut first_values = None;
        for (layer, block) in self.blocks.iter().enumerate() {
            probe.enter_layer(layer);
            block.observe(&x, &documents, &mut first_values, &mut probe);
            x = block.forward(x, &span, &mut first_values);
        }
        probe
    }

    /// The weights that each layer's queries give to the keys of one sequence, tokens `[1, seq_len]`. A layer takes many
    /// times seq_len as long as its attention.
    pub fn attention_weights(&self, tokens: Tensor<B, 2, Int>) -> Vec<LayerWeights> {
        let span = Span::Whole(None);
        let mut x = self.embedded(tokens, &span);
        let mut first_values = None;
        let of_block = |block: &Block<B>| {
            let weights = block.attention_weights(&x, &mut first_values);
            x = block.forward(x.clone(), &span, &mut first_values);
            weights
        };
        self.blocks.iter().map(of_block).collect()
    }

    /// The input of the first block: the tokens `[batch, n]` of a span to `[batch, n, width]`.
    pub fn embedded(&self, tokens: Tensor<B, 2, Int>, span: &Span<B>) -> Tensor<B, 3> {
        let (first, documents) = span.positions(tokens.dims()[1]);
        self.embed(tokens, first, documents)
    }

    /// Embeddings of `tokens`, the first of which is at position `first`, plus learned positions
    /// counted from the document's start, normalised if the model has an embedding norm.
    fn embed(
        &self,
        tokens: Tensor<B, 2, Int>,
        first: usize,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 3> {
        let x = self.embed_tokens(tokens, first, documents);
        match &self.embedding_norm {
            Some(norm) => norm.forward(x),
            None => x,
        }
    }

    fn embed_tokens(
        &self,
        tokens: Tensor<B, 2, Int>,
        first: usize,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 3> {
        let [batch, seq_len] = tokens.dims();
        let device = tokens.device();
        let x = embedding(self.embedding.val(), tokens);
        let Some(positions) = &self.positions else {
            return x;
        };
        let range = first as i64..(first + seq_len) as i64;
        let mut at = Tensor::<B, 1, Int>::arange(range, &device)
            .reshape([1, seq_len])
            .expand([batch, seq_len]);
        if let Some(documents) = documents {
            at = at.cast(documents.dtype()) - documents;
        }
        x + embedding(positions.val(), at)
    }

    /// Σ weight · (cross-entropy of the target + z-loss), in nats. The softmax is over the padded vocabulary:
    /// [`ModelConfig::padded_vocab`].
    ///
    /// - `tokens`, `targets`, `documents`: `[batch, seq_len]`
    /// - `weights`: `[batch, seq_len]`; if they sum to 1, the result is a mean
    /// - `z_loss`: the coefficient of the z-loss, 0 for none
    pub fn loss(
        &self,
        tokens: Tensor<B, 2, Int>,
        targets: Tensor<B, 2, Int>,
        weights: Tensor<B, 2>,
        documents: DocumentStarts<B>,
        z_loss: f32,
    ) -> Loss<B> {
        self.loss_of_hidden(self.hidden(tokens, documents), targets, weights, z_loss)
    }

    /// As [`LanguageModel::loss`], where each row continues the one that left `carried`, as in
    /// [`LanguageModel::hidden_from`].
    pub fn loss_from(
        &self,
        tokens: Tensor<B, 2, Int>,
        targets: Tensor<B, 2, Int>,
        weights: Tensor<B, 2>,
        documents: DocumentStarts<B>,
        z_loss: f32,
        carried: &mut [Tensor<B, 2>],
    ) -> Loss<B> {
        let hidden = self.hidden_from(tokens, documents, carried);
        self.loss_of_hidden(hidden, targets, weights, z_loss)
    }

    /// [`LanguageModel::loss`] from the last block's output, `[batch, seq_len, width]`.
    pub fn loss_after_blocks(
        &self,
        x: Tensor<B, 3>,
        targets: Tensor<B, 2, Int>,
        weights: Tensor<B, 2>,
        z_loss: f32,
    ) -> Loss<B> {
        self.loss_of_hidden(self.norm.forward(x), targets, weights, z_loss)
    }

    fn loss_of_hidden(
        &self,
        hidden: Tensor<B, 3>,
        targets: Tensor<B, 2, Int>,
        weights: Tensor<B, 2>,
        z_loss: f32,
    ) -> Loss<B> {
        let op = LinearCrossEntropy { softcap: self.logit_softcap, z_loss };
        linear_cross_entropy(hidden, self.head_weight(), targets, weights, op)
    }

    /// The cross-entropy of every token in nats, `[batch, seq_len]`, as in [`LanguageModel::loss`] but without
    /// gradients.
    pub fn token_losses(
        &self,
        tokens: Tensor<B, 2, Int>,
        targets: Tensor<B, 2, Int>,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 2> {
        let hidden = self.hidden(tokens, documents);
        token_cross_entropy(hidden, self.head_weight(), targets, self.logit_softcap)
    }

    /// The logits of whole rows: tokens `[batch, seq_len]` to `[batch, seq_len, vocab]`.
    pub fn logits(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        self.project(self.hidden(tokens, None))
    }

    /// The most likely token after each of `places`, `[n]`, the first of equals: tokens are `[batch, seq_len]`, a place is
    /// `row · seq_len + position`.
    pub fn likeliest(
        &self,
        tokens: Tensor<B, 2, Int>,
        places: Tensor<B, 1, Int>,
    ) -> Tensor<B, 1, Int> {
        self.likeliest_of(self.hidden_at(tokens, places))
    }

    /// ln p of the `targets`, `[n]`, each after one of `places`, `[n]`, and the most likely token there. Tokens are
    /// `[batch, seq_len]`, a place is `row · seq_len + position`.
    pub fn log_probs(
        &self,
        tokens: Tensor<B, 2, Int>,
        places: Tensor<B, 1, Int>,
        targets: Tensor<B, 1, Int>,
    ) -> (Tensor<B, 1>, Tensor<B, 1, Int>) {
        self.log_probs_of(self.hidden_at(tokens, places), targets)
    }

    /// As [`LanguageModel::log_probs`], from the outputs of the last block after the final norm, `[1, n, width]`.
    pub(crate) fn log_probs_of(
        &self,
        hidden: Tensor<B, 3>,
        targets: Tensor<B, 1, Int>,
    ) -> (Tensor<B, 1>, Tensor<B, 1, Int>) {
        let likeliest = self.likeliest_of(hidden.clone());
        // In f32 even for a bf16 model, as in `project`.
        let weight = self.head_weight().narrow(0, 0, self.vocab_size).cast(FloatDType::F32);
        let (x, targets) = (hidden.cast(FloatDType::F32), targets.unsqueeze());
        let losses = token_cross_entropy(x, weight, targets, self.logit_softcap);
        (losses.neg().flatten(0, 1), likeliest)
    }

    /// As [`LanguageModel::likeliest`], from the outputs of the last block after the final norm, `[1, n, width]`. The
    /// logits of at most 1024 places are in memory at a time.
    fn likeliest_of(&self, hidden: Tensor<B, 3>) -> Tensor<B, 1, Int> {
        let greedy = Sampling::GREEDY.sampler();
        let most = |hidden| sample(self.project(hidden).squeeze_dim(0), &greedy, None);
        Tensor::cat(hidden.split(1024, 1).into_iter().map(most).collect(), 0)
    }

    /// The output of the last block after the final norm at some places, `[1, n, width]`.
    fn hidden_at(&self, tokens: Tensor<B, 2, Int>, places: Tensor<B, 1, Int>) -> Tensor<B, 3> {
        let hidden: Tensor<B, 2> = self.hidden(tokens, None).flatten(0, 1);
        hidden.select(0, places).unsqueeze::<3>()
    }

    /// The logits of `hidden`, those of the vocabulary's tokens only, after the softcap; in f32 even for a bf16
    /// model: in bf16, close logits would tie.
    fn project(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let mut logits = linear_f32(hidden, self.head_weight());
        if logits.dims()[2] > self.vocab_size {
            logits = logits.narrow(2, 0, self.vocab_size);
        }
        capped(logits, self.logit_softcap)
    }

    /// The decoding state before the first token.
    pub fn init_state(&self) -> ModelState<B> {
        ModelState { blocks: self.blocks.iter().map(Block::init_state).collect(), position: 0 }
    }

    /// Appends tokens `[batch, n]` to the sequences in `state`; returns the logits after the last,
    /// `[batch, vocab]`.
    ///
    /// # Panics
    /// When the sequence is longer than the learned positions: see [`LanguageModel::max_len`].
    pub fn extend(&self, tokens: Tensor<B, 2, Int>, state: &mut ModelState<B>) -> Tensor<B, 2> {
        let n = tokens.dims()[1];
        let x = self.extend_blocks(tokens, state);
        self.project(self.norm.forward(x.narrow(1, n - 1, 1))).squeeze_dim(1)
    }

    /// As [`LanguageModel::extend`], but returns the output of the last block after the final norm for every token,
    /// `[batch, n, width]`.
    pub(crate) fn extend_hidden(
        &self,
        tokens: Tensor<B, 2, Int>,
        state: &mut ModelState<B>,
    ) -> Tensor<B, 3> {
        self.norm.forward(self.extend_blocks(tokens, state))
    }

    fn extend_blocks(&self, tokens: Tensor<B, 2, Int>, state: &mut ModelState<B>) -> Tensor<B, 3> {
        let n = tokens.dims()[1];
        let mut x = self.embed(tokens, state.position, None);
        let mut first_values = None;
        for (block, state) in self.blocks.iter().zip(&mut state.blocks) {
            x = block.extend(x, state, &mut first_values);
        }
        state.position += n;
        x
    }
}

/// Each metric once, in the order of first appearance.
fn distinct(metrics: impl Iterator<Item = Metric>) -> Vec<Metric> {
    let mut distinct = vec![];
    for metric in metrics {
        if !distinct.contains(&metric) {
            distinct.push(metric);
        }
    }
    distinct
}
