//! The memory of decoding, and the effect of eviction.

use burn::backend::Flex;
use burn::tensor::{FloatDType, Tensor, TensorData};

use super::{random, values};
use crate::Cuda;
use crate::attention::wall::{Config, GateForm, GateHeads, GateSource};
use crate::attention::{AttentionShape, DecodeState, Init, Inputs, VariantSpec, dispatch};
use crate::backend::{OpBackend, with_reference};

const BATCH: usize = 2;

fn shape() -> AttentionShape {
    AttentionShape::new(32, 4, 2, 8)
}

/// Inputs of `seq_len` tokens with gates and weights around their initial values.
fn inputs(config: &Config, seq_len: usize) -> Inputs<Flex> {
    inputs_of(config, &shape(), seq_len)
}

fn inputs_of(config: &Config, shape: &AttentionShape, seq_len: usize) -> Inputs<Flex> {
    let head_dim = shape.head_dim;
    let bias = |init: &Option<Init>| match init {
        Some(Init::Constant(bias)) => *bias,
        _ => 0.0,
    };
    Inputs {
        q: random([BATCH, shape.heads, seq_len, head_dim], 1),
        k: random([BATCH, shape.kv_heads, seq_len, head_dim], 2),
        v: random([BATCH, shape.kv_heads, seq_len, head_dim], 3),
        projections: config
            .projections(shape)
            .iter()
            .map(|p| random([BATCH, seq_len, p.features], 4) + bias(&p.bias))
            .collect(),
        parameters: config
            .parameters(shape)
            .into_iter()
            .map(|p| random([p.elements], 5) * 0.1 + bias(&Some(p.init)))
            .collect(),
    }
}

fn cut<B: OpBackend>(inputs: &Inputs<B>, first: usize, n: usize) -> Inputs<B> {
    let cut = |x: &Tensor<B, 4>| x.clone().narrow(2, first, n);
    Inputs {
        q: cut(&inputs.q),
        k: cut(&inputs.k),
        v: cut(&inputs.v),
        projections: inputs.projections.iter().map(|x| x.clone().narrow(1, first, n)).collect(),
        parameters: inputs.parameters.clone(),
    }
}

/// The outputs of a prefill and of single steps after it, and the elements held after each.
fn decode(
    config: &Config,
    prefill: usize,
    seq_len: usize,
) -> (Vec<f64>, Vec<usize>, dispatch::State<Config, Flex>) {
    let (shape, inputs) = (shape(), inputs(config, seq_len));
    let mut state = dispatch::State::new(0);
    let mut outputs = vec![dispatch::extend(config, &shape, cut(&inputs, 0, prefill), &mut state)];
    let mut held = vec![state.elements()];
    for t in prefill..seq_len {
        outputs.push(dispatch::extend(config, &shape, cut(&inputs, t, 1), &mut state));
        held.push(state.elements());
    }
    (values(Tensor::cat(outputs, 2)), held, state)
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Steps through several chunk ends, in each mode, equal the full pass.
#[test]
fn steps_across_chunks_equal_the_full_pass() {
    let key = Config { gate_source: GateSource::Key, bias_init: 2.0, ..Config::default() };
    for config in [
        Config { bias_init: 2.0, rope: true, ..Config::default() },
        Config { gate_heads: GateHeads::Query, gate_dims: Some(3), ..Config::default() },
        key.clone(),
        Config { gate_form: GateForm::Scalar, rope: true, ..key.clone() },
        Config { bias_init: 2.0, forget_gate: true, sinks: true, ..Config::default() },
        Config { gate_heads: GateHeads::Query, forget_gate: true, ..Config::default() },
        Config { forget_gate: true, forget_bias_init: Some(3.0), ..key },
    ] {
        for window in [None, Some(50), Some(128), Some(200)] {
            let shape = AttentionShape { window, ..shape() };
            let inputs = inputs(&config, 450);
            let full = values(dispatch::attend(&config, &shape, inputs.clone(), None));
            let mut state = dispatch::State::<_, Flex>::new(0);
            let (mut outputs, mut first) = (vec![], 0);
            for n in [127, 1, 1, 126, 2, 100, 1, 30, 1, 1, 60] {
                outputs.push(dispatch::extend(&config, &shape, cut(&inputs, first, n), &mut state));
                first += n;
            }
            let steps = values(Tensor::cat(outputs, 2));
            assert_eq!(first, 450);
            let difference = largest_difference(&full, &steps);
            assert!(difference < 1e-5, "{config:?}, window {window:?}: {difference:.1e}");
        }
    }
}

/// A gate from the key costs no memory: the state has keys and values, as with plain softmax.
#[test]
fn a_gate_from_the_key_stores_keys_and_values_alone() {
    let shape = shape();
    let config = Config { gate_source: GateSource::Key, ..Config::default() };
    let (_, held, _) = decode(&config, 300, 300);
    assert_eq!(held, [BATCH * 300 * 2 * shape.kv_heads * shape.head_dim]);
    assert_eq!(config.state_elements(&shape, 300), (300 * 2 * 2 * 8) as u64);
    // A forget gate adds a number per query head.
    let forgetting = Config { forget_gate: true, ..config };
    let (_, held, _) = decode(&forgetting, 300, 300);
    assert_eq!(held, [BATCH * 300 * (2 * shape.kv_heads * shape.head_dim + shape.heads)]);
    assert_eq!(forgetting.state_elements(&shape, 300), 300 * (2 * 2 * 8 + 4));
}

/// Rescaled keys, values, one anchor per chunk; the open chunk holds g too.
#[test]
fn rescaled_keys_hold_what_is_documented_to_the_element() {
    for (gate_heads, forget_gate) in
        [(GateHeads::Kv, false), (GateHeads::Query, false), (GateHeads::Kv, true)]
    {
        let config = Config { gate_heads, forget_gate, ..Config::default() };
        let (_, held, _) = decode(&config, 100, 300);
        for (step, held) in held.into_iter().enumerate() {
            let documented = config.state_elements(&shape(), 100 + step);
            assert_eq!(held, BATCH * documented as usize, "{config:?} at {}", 100 + step);
        }
    }
    let per_token = |config: &Config| config.state_elements(&shape(), 1 << 14) as f64 / 16_384.0;
    assert_eq!(per_token(&Config::default()), 2.0 * 8.0 * (2.0 + 1.0 / 128.0));
    let query = Config { gate_heads: GateHeads::Query, ..Config::default() };
    assert_eq!(per_token(&query), 8.0 * (4.0 * (1.0 + 1.0 / 128.0) + 2.0));
}

/// Eviction bounds memory, which grows without it, and changes outputs by no more than the threshold
/// allows.
#[test]
fn eviction_frees_memory_and_changes_outputs_within_its_promise() {
    let hidden = Config { bias_init: 1.0, ..Config::default() };
    let key = Config { gate_source: GateSource::Key, ..hidden.clone() };
    let sinks = Config { sinks: true, ..hidden.clone() };
    let scalar = Config { gate_form: GateForm::Scalar, ..key.clone() };
    for config in [hidden, sinks, key, scalar] {
        let (full, all, _) = decode(&config, 600, 800);
        for threshold in [1e-4f32, 1e-8] {
            let evicting = Config { evict_below: Some(threshold), ..config.clone() };
            let (evicted, held, state) = decode(&evicting, 600, 800);
            // Gates of −0.3 and stronger pass 1e-8 within a chunk: two chunks remain at most.
            let chunk = BATCH * 128 * (2 * 2 * 8 + 2 * 8);
            assert!(held.iter().all(|&held| held <= 4 * chunk), "{held:?}");
            assert!(state.elements() < *all.last().expect("held") / 2);
            // Scores are off by at most δ = threshold · scale · Σ|q k|, with |q|, |k| and |v| below
            // 1.7: weights by a factor within e^±2δ, outputs by (e^2δ − 1) · 2 · 1.7.
            let delta = f64::from(threshold) / 8f64.sqrt() * 8.0 * 1.7 * 1.7;
            let promise = (2.0 * delta).exp_m1() * 3.4 + 2e-6;
            let difference = largest_difference(&full, &evicted);
            assert!(difference <= promise, "{evicting:?}: {difference:.1e} over {promise:.1e}");
        }
    }
}

/// Leaving evicted tokens out altogether would change outputs far more than the threshold allows.
#[test]
fn evicted_tokens_keep_their_weight() {
    let config = Config { bias_init: -1000.0, evict_below: Some(1e-6), ..Config::default() };
    let (shape, n) = (shape(), 1025);
    let mut inputs = inputs(&config, n);
    // Values of evicted tokens are 1, later ones 0: the output is the share of the evicted.
    let ones = Tensor::ones([BATCH, shape.kv_heads, 896, 8], &Default::default());
    let zeros = Tensor::zeros([BATCH, shape.kv_heads, n - 896, 8], &Default::default());
    inputs.v = Tensor::cat(vec![ones, zeros], 2);
    let mut state = dispatch::State::<_, Flex>::new(0);
    dispatch::extend(&config, &shape, cut(&inputs, 0, n - 1), &mut state);
    let one_chunk = BATCH * config.state_elements(&shape, 128) as usize;
    assert!(state.elements() < 2 * one_chunk, "{} elements", state.elements());
    let share = values(dispatch::extend(&config, &shape, cut(&inputs, n - 1, 1), &mut state));
    assert!(share.iter().all(|&share| share > 0.8 && share < 0.9), "{share:?}");
}

/// Logits of the gates, `[BATCH, seq_len, kv_heads · head_dim]`: 1,000, an open gate, where `open` says so of a
/// sequence, a channel and a token; else −1,000.
fn logits(
    seq_len: usize,
    channels: usize,
    open: impl Fn(usize, usize, usize) -> bool,
) -> Tensor<Flex, 3> {
    let all = (0..BATCH * seq_len * channels).map(|at| {
        let (token, channel) = (at / channels, at % channels);
        let is_open = open(token / seq_len, channel, token % seq_len);
        if is_open { 1000.0 } else { -1000.0f32 }
    });
    let data = TensorData::new(all.collect::<Vec<_>>(), [BATCH, seq_len, channels]);
    Tensor::from_data(data, &Default::default())
}

/// A key that one channel of a head still remembers is kept, but only for this head of this sequence.
#[test]
fn one_open_channel_keeps_the_keys_of_its_head_alone() {
    let (shape, n) = (shape(), 400);
    let run = |evict_below: Option<f32>, open: Option<(usize, usize)>| {
        let config = Config { evict_below, ..Config::default() };
        let mut inputs = inputs(&config, n);
        inputs.projections[0] =
            logits(n, 16, |sequence, channel, _| open == Some((sequence, channel)));
        let mut state = dispatch::State::<_, Flex>::new(0);
        let mut outputs = vec![];
        for (first, tokens) in [(0, 380), (380, 1), (381, 19)] {
            let piece = cut(&inputs, first, tokens);
            outputs.push(dispatch::extend(&config, &shape, piece, &mut state));
        }
        (values(Tensor::cat(outputs, 2)), state.elements())
    };
    // Closed gates leave each of the four heads its newest chunk and the open one, of 16 tokens.
    let (_, all) = run(None, None);
    let (_, few) = run(Some(1e-6), None);
    assert!(few < all / 2, "{few} of {all}");
    for open in [(0, 3), (1, 12)] {
        let (want, _) = run(None, Some(open));
        let (got, one) = run(Some(1e-6), Some(open));
        assert!((one - few).abs_diff((all - few) / 4) < 64, "{one} of {all}, {few} without it");
        let difference = largest_difference(&want, &got);
        assert!(difference < 1e-5, "{open:?}: {difference:.1e}");
    }
}

/// On CUDA tiles of 64 tokens are evicted, and outputs equal those of the reference without eviction up to
/// rounding.
#[test]
#[ignore = "needs a GPU"]
fn cuda_eviction_frees_memory_and_changes_outputs_within_its_promise() {
    let (prefill, tokens) = (600, 800);
    let hidden = Config { bias_init: 1.0, ..Config::default() };
    let query = Config { gate_heads: GateHeads::Query, ..hidden.clone() };
    let key = Config { gate_source: GateSource::Key, ..hidden.clone() };
    for (config, head_dim) in [(hidden.clone(), 64), (hidden, 96), (query, 64), (key, 64)] {
        let shape = AttentionShape::new(4 * head_dim, 4, 2, head_dim);
        let drawn = inputs_of(&config, &shape, tokens);
        let inputs = inputs_on_cuda(drawn);
        let run = |evict_below: Option<f32>| {
            let config = Config { evict_below, ..config.clone() };
            let mut state = dispatch::State::<_, Cuda>::new(0);
            let mut outputs = vec![];
            let mut first = 0;
            for n in [&[prefill][..], &[1; 140], &[tokens - prefill - 140]].concat() {
                outputs.push(dispatch::extend(&config, &shape, cut(&inputs, first, n), &mut state));
                first += n;
            }
            (values(Tensor::cat(outputs, 2)), state.elements())
        };
        let ((full, all), (evicted, few)) = (run(None), run(Some(1e-4)));
        assert!(few < all / 2, "{config:?}: {few} elements of {all}");
        let want = with_reference(|| values(dispatch::attend(&config, &shape, inputs, None)));
        let largest = want.iter().fold(0.0f64, |a, x| a.max(x.abs()));
        for (name, got) in [("all", full), ("evicting", evicted)] {
            let difference = largest_difference(&want, &got);
            assert!(difference <= largest / 64.0, "{config:?}, {name}: {difference:.1e}");
        }
    }
}

/// On CUDA, too, each head of each sequence evicts tokens of its own: at once, later, and never.
#[test]
#[ignore = "needs a GPU"]
fn cuda_heads_evict_on_their_own() {
    let (tokens, head_dim) = (870, 64);
    // Whether a sequence's head has an open gate at a token.
    type Open = fn(usize, usize, usize) -> bool;
    let cases: [(&str, Open, f64); 3] = [
        ("one remembers", |sequence, head, _| (sequence, head) == (1, 0), 0.6),
        (
            "one forgets later",
            |sequence, head, token| (sequence, head) == (1, 0) && token < 640,
            0.4,
        ),
        (
            "then all remember",
            |sequence, head, token| (sequence, head) == (1, 0) || token >= 600,
            0.8,
        ),
    ];
    for (gate_heads, sinks) in [(GateHeads::Kv, false), (GateHeads::Query, true)] {
        for (name, open, most) in cases {
            let config = Config { gate_heads, sinks, ..Config::default() };
            let shape = AttentionShape::new(4 * head_dim, 4, 2, head_dim);
            let mut drawn = inputs_of(&config, &shape, tokens);
            let channels = config.gate_heads_of(&shape) * head_dim;
            drawn.projections[0] = logits(tokens, channels, |sequence, channel, token| {
                let head = channel * shape.kv_heads / channels;
                // One channel of the head; with a gate per query head, of its first one.
                channel % (channels / shape.kv_heads) == 5 && open(sequence, head, token)
            });
            let inputs = inputs_on_cuda(drawn);
            let run = |evict_below: Option<f32>| {
                let config = Config { evict_below, ..config.clone() };
                let mut state = dispatch::State::<_, Cuda>::new(0);
                let (mut outputs, mut first) = (vec![], 0);
                for n in [&[600][..], &[1; 140], &[60], &[1; 70]].concat() {
                    let piece = cut(&inputs, first, n);
                    outputs.push(dispatch::extend(&config, &shape, piece, &mut state));
                    first += n;
                }
                (values(Tensor::cat(outputs, 2)), state.elements())
            };
            let ((full, all), (evicted, few)) = (run(None), run(Some(1e-6)));
            let part = few as f64 / all as f64;
            assert!(part < most, "{config:?}, {name}: {few} elements of {all}");
            let attend = || values(dispatch::attend(&config, &shape, inputs.clone(), None));
            let want = with_reference(attend);
            let largest = want.iter().fold(0.0f64, |a, x| a.max(x.abs()));
            for (which, got) in [("all", &full), ("evicting", &evicted)] {
                let difference = largest_difference(&want, got);
                let message = format!("{config:?}, {name}, {which}: {difference:.1e}");
                assert!(difference <= largest / 64.0, "{message}");
            }
            // Evicted tokens have the mean of values in place of each one's own, rounded like o.
            let difference = largest_difference(&full, &evicted);
            assert!(difference <= largest / 64.0, "{config:?}, {name}: {difference:.1e}");
        }
    }
}

/// A copy of a state after an eviction goes its own way.
#[test]
#[ignore = "needs a GPU"]
fn cuda_copies_of_an_evicted_state_do_not_share_tokens() {
    let (tokens, head_dim) = (340, 64);
    let config = Config { evict_below: Some(1e-6), ..Config::default() };
    let shape = AttentionShape::new(4 * head_dim, 4, 2, head_dim);
    let mut drawn = inputs_of(&config, &shape, tokens);
    drawn.projections[0] = logits(tokens, 2 * head_dim, |_, channel, _| channel == 5);
    let inputs = inputs_on_cuda(drawn);
    let mut state = dispatch::State::<_, Cuda>::new(0);
    dispatch::extend(&config, &shape, cut(&inputs, 0, 300), &mut state);
    let steps = |state: &mut dispatch::State<Config, Cuda>, from: usize| {
        let step = |at| values(dispatch::extend(&config, &shape, cut(&inputs, at, 1), state));
        (from..from + 20).flat_map(step).collect::<Vec<_>>()
    };
    let mut other = state.clone();
    let want = steps(&mut state.clone(), 300);
    // The other one has other tokens at the same places.
    steps(&mut other, 320);
    assert_eq!(steps(&mut state, 300), want);
}

fn inputs_on_cuda(drawn: Inputs<Flex>) -> Inputs<Cuda> {
    let parameters = drawn.parameters.into_iter();
    Inputs {
        q: on_cuda(drawn.q),
        k: on_cuda(drawn.k),
        v: on_cuda(drawn.v),
        projections: drawn.projections.into_iter().map(on_cuda).collect(),
        parameters: parameters.map(|x| on_cuda(x).cast(FloatDType::F32)).collect(),
    }
}

/// The same numbers in bf16 on the GPU.
fn on_cuda<const D: usize>(x: Tensor<Flex, D>) -> Tensor<Cuda, D> {
    Tensor::<Cuda, D>::from_data(x.into_data(), &Default::default()).cast(FloatDType::BF16)
}
