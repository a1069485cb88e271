//! Decoding: keys are cached relative to the starts of their tiles of 64 tokens, so that none is rewritten;
//! for the gate only E at the tiles' starts is stored ([`operands`](super::operands)).

use burn::tensor::{DType, Int, Tensor, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::kernels::{GateConfig, GateLogits, WallShape, decays};
use super::operands::TILE;
use super::rescaled::RescaledKv;
use super::{PAIR, Wall, WallParams};
use crate::Cuda;
use crate::attention::blocks::repeat_heads;
use crate::attention::decay::{DecaySumsCache, Sums, log_decay};
use crate::attention::flash::{CacheBuffer, HeadPairs, Heads, expired, padded};
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, buffer, contiguous, narrow, unshare, zeros};
use crate::ops::activation::kernel::{Function, value};
use crate::tile::{Pair, define_exp2, exp2};

/// Keys, values and decays of the tokens so far.
#[derive(Clone, Debug)]
pub struct RescaledKvCache {
    tokens: RescaledKv,
    /// Sequences.
    batch: usize,
    /// Heads of v.
    kv_heads: usize,
    /// E at the starts of tiles, up to the tile of the next token, `[batch, gate heads, tiles,
    /// padded(head_dim)]`, 32-bit integers.
    starts: CacheBuffer,
    /// p at the last token, relative to E of the next one's tile, `[batch, gate heads,
    /// padded(head_dim)]`.
    since: CudaTensor,
    /// With a forget gate, the prefix sums of its log decays.
    forget: Option<DecaySumsCache>,
}

/// Tokens that kv heads evict.
pub struct Evicted {
    /// How many, `[batch · kv_heads]`.
    pub tokens: Vec<usize>,
    /// The sums of their values, `[batch · kv_heads, head_dim]`.
    pub sums: Tensor<Cuda, 2>,
}

/// What a call takes beside q, k and v.
pub struct GateInputs {
    /// The gate's logits, as [`Wall`] takes them.
    pub gate: CudaTensor,
    /// The forget gate's logits, `[batch, tokens, heads]` in f32 or bf16.
    pub forget_logits: Option<CudaTensor>,
    /// `[heads]`
    pub sinks: Option<CudaTensor>,
}

impl RescaledKvCache {
    /// An empty cache for keys of each gate like `k`, `[batch, gate heads, _, head_dim]`, values like `v` and a forget
    /// gate of `forgetting` heads, if there is one, with room for `capacity` tokens.
    pub fn new(k: &CudaTensor, v: &CudaTensor, forgetting: Option<usize>, capacity: usize) -> Self {
        let [batch, gate_heads, _, head_dim]: [usize; 4] = k.meta.shape().dims();
        let tokens = |x: &CudaTensor| {
            let heads = x.meta.shape()[1];
            CacheBuffer::new(x, [batch, heads, head_dim], x.dtype, capacity)
        };
        let dim = padded(head_dim);
        let mut starts =
            CacheBuffer::new(k, [batch, gate_heads, dim], DType::I32, capacity / TILE + 1);
        starts.add(1);
        RescaledKvCache {
            tokens: RescaledKv::Even([k, v].map(tokens)),
            batch,
            kv_heads: v.meta.shape()[1],
            starts,
            since: zeros(k, &[batch, gate_heads, dim], DType::F32),
            forget: forgetting.map(|heads| DecaySumsCache::new(k, [batch, heads], capacity)),
        }
    }

    /// Elements of all buffers.
    pub fn elements(&self) -> usize {
        let gates = self.starts.elements() + self.since.meta.shape().num_elements();
        let forget = self.forget.as_ref().map_or(0, DecaySumsCache::elements);
        self.tokens.elements() + gates + forget
    }

    /// Appends tokens; returns their outputs, `[batch, heads, tokens, head_dim]`, and their log-sum-exp,
    /// base 2, `[batch, heads, tokens, 1]`.
    ///
    /// - `k`: of each gate, `[batch, gate heads, tokens, head_dim]`
    ///
    /// # Panics
    /// For several tokens after an [eviction](Self::evict), unless [restored](Self::restore).
    pub fn extend(
        &mut self,
        op: &Wall,
        [q, k, v]: [&CudaTensor; 3],
        GateInputs { gate, forget_logits, sinks }: &GateInputs,
    ) -> [Tensor<Cuda, 4>; 2] {
        let tokens = k.meta.shape()[2];
        self.drop_first(expired(op.shape.window, self.tokens.len(), tokens) / TILE);
        let held = self.tokens.len();
        let tile_offset = held % TILE;
        let mut params = WallParams {
            tile_offset,
            from_starts: true,
            sinks: sinks.clone(),
            ..WallParams::new(op, q, k, gate)
        };
        self.starts.add((held + tokens) / TILE - held / TILE);
        unshare(&mut self.since);
        if tokens == 1 {
            self.tokens.add();
            if let Some(forget) = &mut self.forget {
                forget.add(1);
            }
            let queries = self.append(&params, [q, k, v], forget_logits.as_ref());
            params.forget = self.forget.as_ref().map(DecaySumsCache::held);
            let starts = self.starts.held();
            let result = match &self.tokens {
                RescaledKv::Even(kv) => {
                    let [keys, values] = kv.each_ref().map(CacheBuffer::held);
                    params.flash([&queries, &keys, &values], &starts, None, None).decode()
                }
                RescaledKv::Ragged(kv) => params.flash_of_ragged(&queries, kv, &starts).decode(),
            };
            return result.map(with_rows);
        }
        if let Some((forget, logits)) = self.forget.as_mut().zip(forget_logits.clone()) {
            forget.append(&primitive(log_decay(tensor::<Cuda, 3>(logits))));
        }
        params.forget = self.forget.as_ref().map(DecaySumsCache::held);
        let (queries, [keys, values]) = self.append_many(&params, [q, k, v]);
        let share = k.meta.shape()[1] / v.meta.shape()[1];
        let values = primitive(repeat_heads(tensor::<Cuda, 4>(values), share));
        let starts = self.starts.held();
        let flash = params.flash([&queries, &keys, &values], &starts, None, None);
        let result = flash.softmax(sinks.is_some());
        [result.o, result.lse].map(with_rows).map(|x| x.narrow(2, tile_offset, tokens))
    }

    /// Appends one token; returns its queries relative to its tile's start.
    fn append(
        &mut self,
        params: &WallParams,
        [q, k, v]: [&CudaTensor; 3],
        forget_logits: Option<&CudaTensor>,
    ) -> CudaTensor {
        let [q, k, v] = [q, k, v].map(Heads::new);
        let [keys, values] = self.tokens.buffers().map(Heads::in_place);
        let queries = q.like();
        let launch = match [Some(&params.gate), forget_logits].map(|x| x.map(|x| x.dtype)) {
            [Some(DType::BF16), Some(DType::BF16)] => Self::launch_append::<bf16, bf16>,
            [Some(DType::BF16), _] => Self::launch_append::<bf16, f32>,
            [_, Some(DType::BF16)] => Self::launch_append::<f32, bf16>,
            _ => Self::launch_append::<f32, f32>,
        };
        launch(self, params, [&q, &k, &v], [&queries, &keys, &values], forget_logits);
        queries.tensor
    }

    fn launch_append<Z: Numeric, F: Float>(
        &self,
        params: &WallParams,
        [q, k, v]: [&Heads; 3],
        [queries, keys, values]: [&Heads; 3],
        forget_logits: Option<&CudaTensor>,
    ) {
        let forget_logits = forget_logits.map(contiguous);
        let forget = self.forget.as_ref().zip(forget_logits.as_ref()).map(|(sums, logits)| {
            ForgetTokenLaunch::new(buffer(logits, 1), sums.buffers().launch())
        });
        let (forgets, bases) = (forget.is_some(), self.tokens.bases());
        // SAFETY: a block handles one gate head, and stays within its token.
        unsafe {
            append::launch_unchecked::<Z, F, CudaRuntime>(
                &params.gate.client,
                CubeCount::Static(1, params.rows() as u32, 1),
                params.pairs(),
                TokenLaunch::new(q.pairs(), k.pairs(), v.pairs(), queries.pairs()),
                params.gate::<Z>(),
                CacheLaunch::new(
                    keys.pairs(),
                    values.pairs(),
                    buffer(&self.since, PAIR),
                    buffer(self.starts.buffer(), PAIR),
                    (self.tokens.len() - 1) as u32,
                    self.starts.capacity(),
                    (k.dims[1] / v.dims[1]) as u32,
                    bases.map(|x| buffer(x, 1)).into(),
                ),
                forget.into(),
                params.shape(),
                params.config(),
                forgets,
                bases.is_some(),
            );
        }
    }

    /// Appends tokens; returns their queries, preceded by rows of zeros up to the start of the first token's tile, and
    /// keys and values of all tokens, `[batch, heads, tokens, head_dim]`.
    fn append_many(
        &mut self,
        params: &WallParams,
        [q, k, v]: [&CudaTensor; 3],
    ) -> (CudaTensor, [CudaTensor; 2]) {
        let RescaledKv::Even([all_keys, all_values]) = &mut self.tokens else {
            panic!("several tokens after an eviction")
        };
        let [batch, heads, tokens, head_dim]: [usize; 4] = q.meta.shape().dims();
        let (fractions, sums) = (params.table(params.tiles() + 1, DType::F32), params.tile_sums());
        let held = all_keys.rows();
        all_keys.add(tokens);
        all_values.append(v.clone());
        let pairs = all_keys.elements() / PAIR;
        assert!(
            u32::try_from(pairs).is_ok(),
            "a cache of {pairs} pairs of channels of k, 2^32 or more"
        );
        let queries = zeros(q, &[batch, heads, params.tile_offset + tokens, head_dim], q.dtype);
        let keys = narrow(all_keys.buffer(), 2, held..held + tokens);
        // SAFETY: a unit handles a channel of one gate head, and stays within its tokens.
        unsafe {
            extend_prefix::launch_unchecked::<CudaRuntime>(
                &params.gate.client,
                params.by_row(),
                params.channels(),
                buffer(&sums, 1),
                buffer(&self.since, 1),
                buffer(self.starts.buffer(), 1),
                buffer(&fractions, 1),
                params.shape(),
                held as u32,
                self.starts.capacity(),
            );
        }
        let rescaled_q =
            Heads::in_place(&narrow(&queries, 2, params.tile_offset..params.tile_offset + tokens));
        let keys = Heads::in_place(&keys);
        params.rescale(
            [&Heads::new(q), &Heads::new(k)],
            [self.starts.buffer(), &fractions],
            [&rescaled_q, &keys],
        );
        (queries, [all_keys.held(), all_values.held()])
    }

    /// Once a tile is complete: evicts the oldest tiles of each kv head of each sequence whose tokens have all factors
    /// below `threshold`.
    pub fn evict(&mut self, query_heads: usize, threshold: f32) -> Option<Evicted> {
        let heads = self.evictable_tiles(threshold);
        let none = vec![0; heads.len()];
        let firsts = self.firsts().unwrap_or(&none);
        let until = heads.iter().zip(firsts).map(|(tiles, &first)| first.max(tiles * TILE));
        let until: Vec<_> = until.collect();
        if until == firsts {
            return None;
        }
        let tokens = until.iter().zip(firsts).map(|(until, first)| until - first).collect();
        let sums = self.tokens.evict(query_heads, &until);
        self.starts.drop_first(until.iter().min().expect("a head") / TILE);
        Some(Evicted { tokens, sums })
    }

    /// After an eviction: how many of the tokens that some head holds each kv head has evicted, `[batch · kv_heads]`.
    pub fn firsts(&self) -> Option<&[usize]> {
        self.tokens.firsts()
    }

    /// Gives all heads all tokens that some head holds, with room for `new` more: those evicted with keys of 0 and the
    /// mean value of their head, `[batch · kv_heads, head_dim]` in bf16.
    pub fn restore(&mut self, means: &CudaTensor, new: usize) {
        if let RescaledKv::Ragged(kv) = &self.tokens {
            self.tokens = RescaledKv::Even(kv.to_even(means, new));
        }
    }

    /// Drops tiles that no later token sees under a window, with which nothing is evicted.
    fn drop_first(&mut self, tiles: usize) {
        if let RescaledKv::Even(kv) = &mut self.tokens {
            kv.iter_mut().for_each(|x| x.drop_first(tiles * TILE));
        }
        self.starts.drop_first(tiles);
        if let Some(forget) = &mut self.forget {
            forget.drop_first(tiles * TILE);
        }
    }

    /// Complete tiles held.
    pub fn tiles(&self) -> usize {
        self.starts.rows() - 1
    }

    /// The number of oldest tiles of each kv head of each sequence whose tokens have all factors below `threshold`.
    fn evictable_tiles(&self, threshold: f32) -> Vec<usize> {
        let (tiles, batch, kv_heads) = (self.tiles(), self.batch, self.kv_heads);
        // Channels past the head's never decay.
        let head_dim = self.tokens.buffers()[0].meta.shape()[3];
        let starts = Tensor::<Cuda, 4, Int>::from_primitive(self.starts.held());
        let share = starts.dims()[1] / kv_heads;
        let starts = starts.narrow(3, 0, head_dim);
        // p − p_j < E + 1 − E_J for the tokens of tile J, as p is below E + 1 and p_j at least E_J.
        let now = starts.clone().narrow(2, tiles, 1);
        let ends = starts.narrow(2, 1, tiles);
        // Factors grow from tile to tile.
        let below = (now - ends).max_dim(3).lower_equal_elem(threshold.log2().floor() as i32 - 1);
        let of_gates = below.int().sum_dim(2).reshape([batch * kv_heads, share]);
        of_gates.min_dim(1).into_data().iter::<i64>().map(|tiles| tiles as usize).collect()
    }
}

/// Adds a channel dimension to `[batch, heads, queries]`; returns tensors of four dimensions unchanged.
fn with_rows(x: CudaTensor) -> Tensor<Cuda, 4> {
    let dims = x.meta.shape().to_vec();
    match dims[..] {
        [batch, heads, queries] => tensor::<Cuda, 3>(x).reshape([batch, heads, queries, 1]),
        _ => tensor(x),
    }
}

/// A new token.
#[derive(CubeType, CubeLaunch)]
struct Token {
    /// `[batch, heads, 1, head_dim]`
    q: HeadPairs<bf16>,
    /// `[batch, gate heads, 1, head_dim]`
    k: HeadPairs<bf16>,
    /// `[batch, kv_heads, 1, head_dim]`
    v: HeadPairs<bf16>,
    /// q relative to the start of the token's tile.
    rescaled_q: HeadPairs<bf16>,
}

/// The cache of the tokens before, see [`RescaledKvCache`].
#[derive(CubeType, CubeLaunch)]
struct Cache {
    keys: HeadPairs<bf16>,
    values: HeadPairs<bf16>,
    since: Array<Pair>,
    starts: Array<Vector<i32, Const<2>>>,
    /// Number of tokens.
    held: u32,
    /// Capacity of `starts` in tiles.
    capacity: u32,
    /// Heads of k per head of v.
    share: u32,
    /// With ragged heads, the rows of position 0 of each head in `keys` and `values`, `[batch · gate heads, 2]`.
    bases: ComptimeOption<Array<i32>>,
}

/// A new token's forget gate.
#[derive(CubeType, CubeLaunch)]
struct ForgetToken<F: Float> {
    /// `[batch, 1, heads]`
    logits: Array<F>,
    /// Those of the tokens before.
    sums: Sums,
}

/// Appends one token to the cache, with q and k relative to the start of its tile.
///
/// Grid: 1, batch · gate heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
fn append<Z: Numeric, F: Float>(
    token: &mut Token,
    gate: &GateLogits<Z>,
    cache: &mut Cache,
    forget: &mut ComptimeOption<ForgetToken<F>>,
    shape: WallShape,
    #[comptime] config: GateConfig,
    #[comptime] forgets: bool,
    #[comptime] ragged: bool,
) {
    define_exp2();
    let unit = UNIT_POS as usize;
    let channel = unit * 2;
    let row = CUBE_POS_Y as usize;
    let (gate_heads, group) = (shape.kv_heads as usize, shape.group as usize);
    let (batch, gate_head) = (row / gate_heads, row % gate_heads);
    let (held, share) = (cache.held as usize, cache.share as usize);
    let half = comptime!(config.padded_head_dim / 2);

    let gates = gate.load(gate.base(&shape), 0usize, channel, config);
    let at = row * half + unit;
    let mut sum = cache.since[at] + decays(gates, channel, &gate.clamp, config);
    if channel < config.head_dim {
        let mut down = Pair::empty();
        let mut up = Pair::empty();
        #[unroll]
        for e in 0..2usize {
            down[e] = exp2(sum[e]);
            up[e] = exp2(-sum[e]);
        }
        let from = token.k.at(batch, gate_head, 0usize, unit);
        let key = Pair::cast_from(token.k.pairs[from]);
        let mut to_key = cache.keys.at(batch, gate_head, held, unit);
        let mut to_value = cache.values.at(batch, gate_head / share, held, unit);
        if ragged {
            let bases = cache.bases.as_ref().unwrap();
            let (of_keys, of_values) = (bases[row * 2], bases[row * 2 + 1]);
            let zero = usize::cast_from(0u32);
            to_key = cache.keys.at(zero, zero, usize::cast_from(of_keys) + held, unit);
            to_value = cache.values.at(zero, zero, usize::cast_from(of_values) + held, unit);
        }
        cache.keys.pairs[to_key] = Vector::cast_from(key * up);
        if gate_head % share == 0 {
            let head = gate_head / share;
            let from = token.v.at(batch, head, 0usize, unit);
            cache.values.pairs[to_value] = token.v.pairs[from];
        }
        for member in 0..group {
            let head = gate_head * group + member;
            let from = token.q.at(batch, head, 0usize, unit);
            let query = Pair::cast_from(token.q.pairs[from]);
            let to = token.rescaled_q.at(batch, head, 0usize, unit);
            token.rescaled_q.pairs[to] = Vector::cast_from(query * down);
        }
    }
    if (held + 1) % TILE == 0 {
        let from = (row * cache.capacity as usize + held / TILE) * half + unit;
        let mut start = cache.starts[from];
        #[unroll]
        for e in 0..2usize {
            let whole = Floor::floor(sum[e]);
            start[e] += i32::cast_from(whole);
            sum[e] -= whole;
        }
        cache.starts[from + half] = start;
    }
    cache.since[at] = sum;
    if forgets {
        let forget = forget.as_mut().unwrap();
        // A unit for each query head of the gate.
        let mut member = unit;
        while member < group {
            let head = row * group + member;
            let log_decay = value(f32::cast_from(forget.logits[head]), Function::LogSigmoid);
            forget.sums.append(head, held, log_decay, true);
            member += CUBE_DIM as usize;
        }
    }
}

/// Extends E and p over the tokens that follow the `held` ones, from their
/// [`tile_sums`](super::kernels::tile_sums): E at the starts of tiles, p at the last token, and in `fractions`
/// p before the first of these tokens in each tile, relative to the tile's E.
///
/// - `since`, `starts`: as in [`RescaledKvCache`], with room for `capacity` tiles
/// - `fractions`: `[batch · gate heads, tiles + 1, dim]`
///
/// Grid: batch · gate heads; a unit for each channel.
#[cube(launch_unchecked, address_type = "u64")]
fn extend_prefix(
    sums: &Array<f32>,
    since: &mut Array<f32>,
    starts: &mut Array<i32>,
    fractions: &mut Array<f32>,
    shape: WallShape,
    held: u32,
    capacity: u32,
) {
    let dim = CUBE_DIM as usize;
    let row = CUBE_POS_X as usize;
    let tiles = shape.tiles();
    let own = row * dim + UNIT_POS as usize;
    let sums_at = row * tiles * dim + UNIT_POS as usize;
    let fractions_at = row * (tiles + 1) * dim + UNIT_POS as usize;
    let mut to = (row * capacity as usize + held as usize / TILE) * dim + UNIT_POS as usize;
    let mut start = starts[to];
    let mut sum = f64::cast_from(since[own]);
    for tile in 0..tiles {
        fractions[fractions_at + tile * dim] = f32::cast_from(sum);
        sum += f64::cast_from(sums[sums_at + tile * dim]);
        if (tile + 1) * TILE <= (shape.tile_offset + shape.tokens) as usize {
            let whole = Floor::floor(sum);
            start += i32::cast_from(whole);
            sum -= whole;
            to += dim;
            starts[to] = start;
        }
    }
    since[own] = f32::cast_from(sum);
}
