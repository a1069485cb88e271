//! The tokens before the current piece: keys of complete chunks rescaled to their chunk's end, and the
//! open chunk unchanged.

use burn::tensor::activation::sigmoid;
use burn::tensor::{FloatDType, Tensor, TensorData};

use super::forget::add_terms;
use super::piece::{AnchoredQueries, GatedKv, PieceMask, ScoredKeys, repeat, times};
use crate::attention::blocks::{copied, repeat_heads, sums_after};
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// Complete chunks. Values have kv heads, all else gate heads.
#[derive(Clone, Debug)]
struct ClosedChunks<B: OpBackend> {
    /// k_j · exp(R_c − P_j), `[n, 1, chunks, chunk, head_dim]`, with R_c = P at the chunk's end.
    keys: Tensor<B, 5>,
    /// `[batch · kv_heads, 1, chunks, chunk, value_dim]`
    values: Tensor<B, 5>,
    /// The anchors as exp(R − R_c), where R is that of the newest chunk: no factor exceeds 1, and no sum
    /// over the whole sequence is formed. `[n, 1, chunks, 1, head_dim]`
    anchors: Tensor<B, 5>,
    /// With a forget gate.
    forget: Option<ForgetOfChunks<B>>,
}

/// The forget gate of complete chunks.
#[derive(Clone, Debug)]
struct ForgetOfChunks<B: OpBackend> {
    /// Σ ℓ after each token up to its chunk's end, `[n, group, chunks, chunk, 1]`.
    within: Tensor<B, 5>,
    /// Σ ℓ after each chunk up to the newest one's end, `[n, group, chunks, 1, 1]`.
    after: Tensor<B, 5>,
}

impl<B: OpBackend> ForgetOfChunks<B> {
    /// That of chunks with ℓ, `[n, group, chunks, chunk, 1]`, after the `old` ones.
    fn extend(old: Option<Self>, log_forget: Tensor<B, 5>) -> Self {
        let (within, total) = sums_after_and_total(log_forget);
        let after = sums_after(total.clone(), 2);
        let Some(old) = old else { return ForgetOfChunks { within, after } };
        ForgetOfChunks {
            within: Tensor::cat(vec![old.within, within], 2),
            after: Tensor::cat(vec![old.after + total.sum_dim(2), after], 2),
        }
    }
}

/// Σ x over the rows after each, `[n, group, blocks, rows, channels]`, and over all rows of a block,
/// `[n, group, blocks, 1, channels]`.
fn sums_after_and_total<B: OpBackend>(x: Tensor<B, 5>) -> (Tensor<B, 5>, Tensor<B, 5>) {
    let after = sums_after(x.clone(), 3);
    let total = after.clone().narrow(3, 0, 1) + x.narrow(3, 0, 1);
    (after, total)
}

/// The summary of the tokens that kv heads evicted. Their scores are 0 up to the threshold, so that all have the same
/// weight e⁰. They must stay in the softmax: leaving them out would change outputs however small their
/// scores are.
#[derive(Clone, Debug)]
pub(super) struct EvictedTokens<B: OpBackend> {
    /// How many, `[batch · kv_heads]`.
    tokens: Vec<usize>,
    /// Their logarithms, `[batch · kv_heads, 1, 1, 1, 1]`.
    log_tokens: Tensor<B, 5>,
    /// The mean of their values, `[batch · kv_heads, 1, 1, 1, value_dim]`.
    mean: Tensor<B, 5>,
}

impl<B: OpBackend> EvictedTokens<B> {
    fn new(tokens: Vec<usize>, mean: Tensor<B, 5>) -> Self {
        let log_tokens = of_heads(tokens.iter().map(|&tokens| (tokens as f64).ln()), &mean);
        EvictedTokens { tokens, log_tokens, mean }
    }

    /// Adds `tokens` of each head, the values of which sum to `sums`, `[batch · kv_heads, value_dim]`.
    pub fn add(old: Option<Self>, tokens: &[usize], sums: Tensor<B, 2>) -> Self {
        let [heads, value_dim] = sums.dims();
        let sums = sums.reshape([heads, 1, 1, 1, value_dim]);
        let old_tokens = old.as_ref().map_or(vec![0; heads], |old| old.tokens.clone());
        let all: Vec<_> = old_tokens.iter().zip(tokens).map(|(old, new)| old + new).collect();
        let share = |part: usize, all: usize| part as f64 / all.max(1) as f64;
        let mut mean = sums.clone() * of_heads(all.iter().map(|&all| share(1, all)), &sums);
        if let Some(old) = old {
            let kept = old_tokens.iter().zip(&all).map(|(&old, &all)| share(old, all));
            mean = mean + old.mean.clone() * of_heads(kept, &old.mean);
        }
        Self::new(all, mean)
    }

    /// Gives up `tokens` of each head, `[batch · kv_heads]`, which then have the mean value.
    pub fn give_back(self, tokens: &[usize]) -> Self {
        let left = self.tokens.iter().zip(tokens).map(|(all, back)| all - back).collect();
        Self::new(left, self.mean)
    }

    /// The mean of each head's values, `[batch · kv_heads, value_dim]`.
    pub fn means(&self) -> Tensor<B, 2> {
        let [heads, .., value_dim] = self.mean.dims();
        self.mean.clone().reshape([heads, value_dim])
    }

    /// Adds the evicted tokens to outputs `[batch, heads, rows, value_dim]` over the others, whose
    /// log-sum-exp, base 2, is `sums`, `[batch, heads, rows, 1]`.
    pub fn join(&self, o: Tensor<B, 4>, sums: Tensor<B, 4>) -> Tensor<B, 4> {
        let ([batch, heads, ..], dtype) = (o.dims(), o.dtype());
        let kv_heads = self.tokens.len() / batch;
        let of_queries = |x: &Tensor<B, 5>| {
            let channels = x.dims()[4];
            repeat_heads(x.clone().reshape([batch, kv_heads, 1, channels]), heads / kv_heads)
        };
        let [mean, log_tokens] = [&self.mean, &self.log_tokens].map(of_queries);
        let share = sigmoid(sums * std::f64::consts::LN_2 - log_tokens);
        (mean.clone() + (o.cast(FloatDType::F32) - mean) * share).cast(dtype)
    }

    /// Elements held.
    pub fn elements(&self) -> usize {
        [&self.mean, &self.log_tokens].map(|x| x.shape().num_elements()).iter().sum()
    }

    /// All of them together are equivalent to one key of score ln(tokens) with the mean value.
    fn part(&self, queries: &Tensor<B, 5>) -> ScoredKeys<B> {
        let [n, group, _, rows, _] = queries.dims();
        let scores = repeat(&self.log_tokens, n).expand([n, group, 1, rows, 1]);
        ScoredKeys { scores, values: repeat(&self.mean, n) }
    }
}

/// A number for each head, `[heads, 1, 1, 1, 1]`.
fn of_heads<B: OpBackend>(numbers: impl Iterator<Item = f64>, like: &Tensor<B, 5>) -> Tensor<B, 5> {
    let numbers: Vec<_> = numbers.map(|x| x as f32).collect();
    let heads = numbers.len();
    let data = TensorData::new(numbers, [heads]);
    Tensor::<B, 1>::from_data(data, (&like.device(), like.dtype())).reshape([heads, 1, 1, 1, 1])
}

/// Keys, values and decays of the tokens so far.
#[derive(Clone, Debug)]
pub(super) struct PastTokens<B: OpBackend> {
    /// Tokens of a chunk.
    chunk: usize,
    /// Position of the first token held; a multiple of `chunk`.
    first: usize,
    closed: Option<ClosedChunks<B>>,
    /// The incomplete chunk, not rescaled.
    open: Option<GatedKv<B>>,
    /// The summary of evicted tokens.
    evicted: Option<EvictedTokens<B>>,
}

impl<B: OpBackend> PastTokens<B> {
    /// No tokens but the evicted ones.
    pub fn new(chunk: usize, evicted: Option<EvictedTokens<B>>) -> Self {
        PastTokens { chunk, first: 0, closed: None, open: None, evicted }
    }

    /// The position of the first token held.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The evicted tokens.
    pub fn into_evicted(self) -> Option<EvictedTokens<B>> {
        self.evicted
    }

    /// Complete chunks held.
    fn chunks(&self) -> usize {
        self.closed.as_ref().map_or(0, |closed| closed.keys.dims()[2])
    }

    /// Tokens in the open chunk.
    fn open_len(&self) -> usize {
        self.open.as_ref().map_or(0, GatedKv::len)
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.chunks() * self.chunk + self.open_len()
    }

    /// The position of the next token.
    pub fn position(&self) -> usize {
        self.first + self.len()
    }

    /// Tokens until the open chunk is complete, at least 1.
    pub fn capacity(&self) -> usize {
        self.chunk - self.open_len()
    }

    /// Elements in all buffers.
    pub fn elements(&self) -> usize {
        let closed = self.closed.iter().flat_map(|x| {
            let forget = x.forget.iter().flat_map(|x| [&x.within, &x.after]);
            [&x.keys, &x.values, &x.anchors].into_iter().chain(forget)
        });
        let open = self
            .open
            .iter()
            .flat_map(|x| [&x.k, &x.v, &x.log_decay].into_iter().chain(&x.log_forget));
        let evicted = self.evicted.as_ref().map_or(0, EvictedTokens::elements);
        closed.chain(open).map(|x| x.shape().num_elements()).sum::<usize>() + evicted
    }

    /// Appends tokens.
    pub fn push(&mut self, new: GatedKv<B>) {
        let all = match self.open.take() {
            None => new,
            Some(old) => {
                let join = |old, new| Tensor::cat(vec![old, new], 3);
                GatedKv {
                    k: join(old.k, new.k),
                    v: join(old.v, new.v),
                    log_decay: join(old.log_decay, new.log_decay),
                    log_forget: old.log_forget.zip(new.log_forget).map(|(a, b)| join(a, b)),
                }
            }
        };
        let complete = all.len() / self.chunk * self.chunk;
        if complete > 0 {
            self.close(all.cut(0, complete));
        }
        if complete < all.len() {
            self.open = Some(all.cut(complete, all.len() - complete));
        }
    }

    /// Rescales and appends complete chunks.
    fn close(&mut self, tokens: GatedKv<B>) {
        let GatedKv { k, v: values, log_decay, log_forget } = tokens.map(|x| {
            let [n, group, _, tokens, channels] = x.dims();
            x.reshape([n, group, tokens / self.chunk, self.chunk, channels])
        });
        let (since, total) = sums_after_and_total(log_decay);
        let keys = k * since.exp();
        let anchors = sums_after(total.clone(), 2).exp();
        let extended = |old| log_forget.map(|new| ForgetOfChunks::extend(old, new));
        self.closed = Some(match self.closed.take() {
            None => ClosedChunks { keys, values, anchors, forget: extended(None) },
            Some(old) => {
                let join = |old, new| Tensor::cat(vec![old, new], 2);
                ClosedChunks {
                    anchors: join(old.anchors * total.sum_dim(2).exp(), anchors),
                    keys: join(old.keys, keys),
                    values: join(old.values, values),
                    forget: extended(old.forget),
                }
            }
        });
    }

    /// Scores and values of all tokens held, for the queries that follow relative to the newest token held,
    /// `[n, group, 1, rows, head_dim]`.
    pub fn parts(
        &self,
        AnchoredQueries { q, mut forget }: AnchoredQueries<B>,
        mask: &PieceMask<B>,
    ) -> Vec<ScoredKeys<B>> {
        let n = q.dims()[0];
        let mut parts: Vec<_> = self.evicted.iter().map(|evicted| evicted.part(&q)).collect();
        let mut since_closed = q.clone();
        if let Some(GatedKv { k, v, log_decay, log_forget }) = &self.open {
            let (since, total) = sums_after_and_total(log_decay.clone());
            since_closed = times(since_closed, total.exp());
            let mut scores = q.mm((k.clone() * since.exp()).transpose());
            if let Some((of_queries, log_forget)) = forget.as_mut().zip(log_forget.clone()) {
                let (of_keys, total) = sums_after_and_total(log_forget);
                scores = add_terms(scores, of_queries.clone(), of_keys);
                *of_queries = of_queries.clone() + total;
            }
            let scores = mask.apply(scores, self.position() - self.open_len());
            parts.push(ScoredKeys { scores, values: repeat(v, n) });
        }
        if let Some(ClosedChunks { keys, values, anchors, forget: of_chunks }) = &self.closed {
            // Each query is rescaled once per chunk; keys are unchanged.
            let mut scores = times(since_closed, anchors.clone()).mm(keys.clone().transpose());
            if let Some((of_queries, ForgetOfChunks { within, after })) =
                forget.zip(of_chunks.as_ref())
            {
                scores = add_terms(scores, of_queries + after.clone(), within.clone());
            }
            let scores = mask.apply(scores, self.first);
            parts.push(ScoredKeys { scores, values: repeat(values, n) });
        }
        parts
    }

    /// Once the open chunk is complete: drops chunks that no later token sees, and evicts those below the
    /// threshold.
    pub fn retain(&mut self, window: Option<usize>, evict_below: Option<f32>) {
        if self.open.is_some() {
            return;
        }
        if let Some(window) = window {
            let first_visible = (self.position() + 1).saturating_sub(window);
            let unseen = first_visible.saturating_sub(self.first) / self.chunk;
            self.drop_chunks(unseen.min(self.chunks()));
        }
        if let Some(threshold) = evict_below
            && let Some(values) = self.drop_chunks(self.evictable_chunks(threshold))
        {
            let [heads, _, chunks, chunk, value_dim] = values.dims();
            let tokens = chunks * chunk;
            let sums =
                values.reshape([heads, tokens, value_dim]).sum_dim(1).reshape([heads, value_dim]);
            self.evicted =
                Some(EvictedTokens::add(self.evicted.take(), &vec![tokens; heads], sums));
        }
    }

    /// The number of oldest chunks whose tokens have all factors below `threshold`, over all gate heads
    /// and sequences. Factors grow towards a chunk's end, which is the anchor, and from chunk to chunk, so
    /// these chunks come first.
    fn evictable_chunks(&self, threshold: f32) -> usize {
        let Some(ClosedChunks { anchors, .. }) = &self.closed else { return 0 };
        let largest = anchors.clone().max_dim(0).max_dim(4).into_data();
        largest.iter::<f32>().take_while(|&factor| factor < threshold).count()
    }

    /// Drops the oldest chunks and returns their values, `[batch · kv_heads, 1, chunks, chunk,
    /// value_dim]`; `None` for no chunks.
    fn drop_chunks(&mut self, chunks: usize) -> Option<Tensor<B, 5>> {
        let held = self.chunks();
        let closed = self.closed.take_if(|_| chunks > 0)?;
        let dropped = closed.values.clone().narrow(2, 0, chunks);
        self.first += chunks * self.chunk;
        self.closed = (chunks < held).then(|| {
            // Copied, because a slice would keep the memory of the dropped chunks alive.
            let keep = |x: Tensor<B, 5>| copied(x.narrow(2, chunks, held - chunks));
            let keep_forget = |ForgetOfChunks { within, after }| ForgetOfChunks {
                within: keep(within),
                after: keep(after),
            };
            ClosedChunks {
                forget: closed.forget.map(keep_forget),
                keys: keep(closed.keys),
                values: keep(closed.values),
                anchors: keep(closed.anchors),
            }
        });
        Some(dropped)
    }
}
