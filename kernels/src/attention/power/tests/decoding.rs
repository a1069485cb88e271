//! Decoding on CUDA beyond the tokens that are kept whole, against whole sequences on the CPU.

use burn::tensor::{FloatDType, Tensor};

use super::chunked::{Case, Numbers};
use crate::attention::conformance::cut;
use crate::attention::power::state::{Folding, State};
use crate::attention::power::{Config, Form};
use crate::attention::{DecodeState, ExecPath, Kernel, Variant, VariantSpec, dispatch};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::{Cpu, Cuda};

/// The root mean square error, as a part of the outputs' own: that of rounding them is a third of it.
const ALLOWED: f64 = 0.005;

/// Decodes the tokens of a case, in pieces; after each, `seen` gets the state.
fn decode(
    config: &Config,
    case: &Case,
    numbers: &Numbers,
    pieces: &[usize],
    mut seen: impl FnMut(&State<Cuda>),
) -> Vec<f32> {
    let kernel = ExecPath::Kernel(DeviceKind::Cuda);
    let shape = case.shape();
    let path = ExecPath::of(config, Kernel::CUDA_BF16, &shape, case.batch, None);
    assert_eq!(path, kernel, "{config:?}, {case:?}");
    assert_eq!(pieces.iter().sum::<usize>(), case.tokens, "tokens in pieces");
    let inputs = case.inputs::<Cuda>(numbers, FloatDType::BF16);
    let mut state = config.init_state::<Cuda>(&shape, kernel, 0);
    let mut outputs = vec![];
    let mut first = 0;
    for &n in pieces {
        outputs.push(config.extend(&shape, cut(&inputs, first, n), &mut state, kernel));
        assert!(matches!(state, State::Cuda(_)), "{config:?} left its kernels");
        seen(&state);
        first += n;
    }
    to_vec(Tensor::cat(outputs, 2))
}

fn to_vec<B: OpBackend>(x: Tensor<B, 4>) -> Vec<f32> {
    x.cast(FloatDType::F32).into_data().to_vec().unwrap()
}

/// Compares decoding with the attention form on the CPU, and two runs bit for bit.
fn check(config: &Config, case: &Case, numbers: &Numbers, pieces: &[usize]) {
    let attention = case.config(Form::Attention);
    let inputs = case.inputs::<Cpu>(numbers, FloatDType::F32);
    let want = dispatch::attend(&attention, &case.shape(), inputs, None);
    let [got, again] = [(); 2].map(|()| decode(config, case, numbers, pieces, |_| ()));
    assert!(got == again, "{config:?}, {case:?}: two runs differ");
    case.assert_close(&[to_vec(want)], &[got], ALLOWED);
}

/// Pieces of `first`, then of `then` in turn, `tokens` in all.
fn pieces(tokens: usize, first: usize, then: &[usize]) -> Vec<usize> {
    let mut pieces = vec![first];
    let mut left = tokens - first;
    for &n in then.iter().cycle() {
        if left == 0 {
            break;
        }
        pieces.push(n.min(left));
        left -= n.min(left);
    }
    pieces
}

/// Sequences are kept whole up to 300 tokens, or never; prompts are shorter or longer.
#[test]
#[ignore = "needs a GPU"]
fn decoding_goes_on_from_sums() {
    let default = || Case { tokens: 400, ..Case::default() };
    for case in [
        Case { batch: 3, heads: 4, kv_heads: 2, ..default() },
        Case { logits: vec![], heads: 3, kv_heads: 1, ..default() },
        Case { head_dim: 32, heads: 12, kv_heads: 1, ..default() },
        Case { head_dim: 128, heads: 2, kv_heads: 1, ..default() },
    ] {
        let numbers = case.numbers();
        let chunked = case.config(Form::Chunked);
        check(&chunked, &case, &numbers, &pieces(400, 250, &[1, 1, 4, 1, 1, 70, 1]));
        check(&chunked, &case, &numbers, &pieces(400, 390, &[1]));
        let auto = Config { switch_len: Some(300), ..case.config(Form::Auto) };
        check(&auto, &case, &numbers, &pieces(400, 298, &[1, 1, 1, 83, 1, 3]));
    }
}

/// Several chunks leave the cache at once.
#[test]
#[ignore = "needs a GPU"]
fn long_pieces_cross_many_chunks() {
    let case = Case { tokens: 1000, heads: 2, kv_heads: 1, ..Case::default() };
    let numbers = case.numbers();
    for switch_len in [300, 600] {
        let config = Config { switch_len: Some(switch_len), ..case.config(Form::Auto) };
        check(&config, &case, &numbers, &[550, 1, 440, 1, 8]);
        check(&config, &case, &numbers, &[998, 1, 1]);
        // To the end of a chunk, and one token beyond.
        check(&config, &case, &numbers, &[768, 1, 127, 104]);
        check(&config, &case, &numbers, &[769, 231]);
    }
}

/// A part of one token in more than one sequence, and chunks that are longer than the shortest ones.
#[test]
#[ignore = "needs a GPU"]
fn pieces_end_with_chunks() {
    let case = Case { batch: 2, tokens: 355, ..Case::default() };
    check(&case.config(Form::Chunked), &case, &case.numbers(), &[255, 100]);
    let case = Case { tokens: 700, chunk: 256, ..Case::default() };
    check(&case.config(Form::Chunked), &case, &case.numbers(), &[511, 188, 1]);
    let auto = Config { switch_len: Some(300), ..case.config(Form::Auto) };
    check(&auto, &case, &case.numbers(), &[300, 1, 398, 1]);
}

#[test]
#[ignore = "needs a GPU"]
fn token_by_token_from_the_first_one() {
    let case = Case { head_dim: 32, heads: 2, kv_heads: 1, tokens: 262, ..Case::default() };
    check(&case.config(Form::Chunked), &case, &case.numbers(), &[1; 262]);
}

#[test]
#[ignore = "needs a GPU"]
fn decoding_agrees_for_gates_and_scores_of_any_size() {
    let then = [1, 1, 30, 1];
    for logits in [vec![-2.0], vec![9.0], vec![2.0, 8.0, 100.0, 6.0, -1.0]] {
        let case = Case { tokens: 330, logits, ..Case::default() };
        let config = case.config(Form::Chunked);
        check(&config, &case, &case.numbers(), &pieces(330, 254, &then));
    }
    // Decays of e^−100 end what the sums hold: before, on and after the last token of a chunk.
    for closed in [100, 127, 128, 260] {
        let logits = (0..330).map(|t| if t == closed { -100.0 } else { 9.0 }).collect();
        let case = Case { tokens: 330, kv_heads: 1, logits, ..Case::default() };
        let config = case.config(Form::Chunked);
        check(&config, &case, &case.numbers(), &pieces(330, 254, &then));
    }
    for size in [1e-2, 1e4] {
        let case = Case { tokens: 330, size, ..Case::default() };
        let config = case.config(Form::Chunked);
        check(&config, &case, &case.numbers(), &pieces(330, 254, &then));
    }
}

/// Keys of 0 in the sums, then in the cache, and queries of 0.
#[test]
#[ignore = "needs a GPU"]
fn queries_without_a_score_on_one_side_read_the_other() {
    for zeros in [0..128, 128..330] {
        let case = Case { tokens: 330, ..Case::default() };
        let mut numbers = case.numbers();
        let token = |at: usize| at / case.head_dim % case.tokens;
        for (at, x) in numbers.heads[1].iter_mut().enumerate() {
            if zeros.contains(&token(at)) {
                *x = 0.0;
            }
        }
        for (at, x) in numbers.heads[0].iter_mut().enumerate() {
            if [300, 329].contains(&token(at)) {
                *x = 0.0;
            }
        }
        let config = case.config(Form::Chunked);
        check(&config, &case, &numbers, &pieces(330, 299, &[1, 20, 1]));
    }
}

/// The second chunk enters the sums of both copies.
#[test]
#[ignore = "needs a GPU"]
fn copies_of_a_state_do_not_share_sums() {
    let case = Case { tokens: 386, ..Case::default() };
    let (numbers, config) = (case.numbers(), case.config(Form::Chunked));
    let mut copy = None;
    let pieces = [382, 1, 1, 1, 1];
    let outputs = decode(&config, &case, &numbers, &pieces, |state| {
        copy.get_or_insert_with(|| state.clone());
    });
    let kernel = ExecPath::Kernel(DeviceKind::Cuda);
    let inputs = case.inputs::<Cuda>(&numbers, FloatDType::BF16);
    let mut copy = copy.expect("the state after the first piece");
    for first in 382..386 {
        let o = config.extend(&case.shape(), cut(&inputs, first, 1), &mut copy, kernel);
        let o = to_vec(o);
        for (head, o) in o.chunks(case.head_dim).enumerate() {
            let at = (head * case.tokens + first) * case.head_dim;
            assert!(outputs[at..at + case.head_dim] == *o, "token {first} of head {head}");
        }
    }
}

/// A NaN in the sums reaches later outputs.
#[test]
#[ignore = "needs a GPU"]
fn a_nan_in_the_sums_shows() {
    let case = Case { tokens: 260, heads: 1, kv_heads: 1, ..Case::default() };
    for input in [1, 2] {
        let mut numbers = case.numbers();
        numbers.heads[input][5] = f32::NAN;
        let outputs = decode(&case.config(Form::Chunked), &case, &numbers, &[258, 2], |_| ());
        let last = &outputs[259 * case.head_dim..];
        assert!(last.iter().any(|x| x.is_nan()), "a NaN in input {input}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_state_of_the_kernels_stops_growing() {
    let case = Case { tokens: 1280, ..Case::default() };
    let numbers = case.numbers();
    let auto = Config { switch_len: Some(500), ..case.config(Form::Auto) };
    for config in [case.config(Form::Chunked), auto] {
        let mut sizes = vec![];
        let pieces = pieces(case.tokens, 64, &[64]);
        decode(&config, &case, &numbers, &pieces, |state| sizes.push(state.elements()));
        let (before, after) = sizes.split_at(12);
        let settled = &after[..4];
        assert!(settled.iter().all(|size| before.iter().max() >= Some(size)), "{sizes:?}");
        assert_eq!(&after[4..], settled, "{sizes:?}");
        let documented = config.state_elements(&case.shape(), 1280);
        assert!(settled.iter().all(|&size| size < 2 * documented as usize), "{sizes:?}");
    }
}

#[test]
fn chunks_leave_once_the_next_one_is_complete() {
    let folding = Folding { chunk: 128, switch: 0 };
    let near = [1, 255, 256, 257, 383, 384].map(|tokens| folding.near(tokens));
    assert_eq!(near, [1, 255, 128, 129, 255, 128]);
    let folding = Folding { switch: 300, ..folding };
    assert_eq!([300, 301, 383, 384].map(|tokens| folding.near(tokens)), [300, 173, 255, 128]);
    // Up to 300 tokens at once, then to the end of a chunk.
    let pieces = [(0, 300), (250, 51), (255, 200), (256, 127), (300, 1000)];
    let pieces = pieces.map(|(position, new)| folding.piece(position, new));
    assert_eq!(pieces, [300, 6, 1, 127, 84]);
}
