//! The kernels against recurrences in f64, and these against the CPU kernel.

mod oracle;

use std::f64::consts::LN_2;

use burn::backend::{Autodiff, Flex};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};

use self::oracle::{Case, Results, Shape};
use super::layout::{BLOCK, BlockConfig, two_fit};
use super::{BlockUpstream, Blocks};
use crate::Cuda;
use crate::attention::ExecPath;
use crate::attention::decay::DecaySums;
use crate::attention::path::cuda::split::joined;
use crate::attention::path::op::{Path, PathInputs, path_attention};
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, contiguous};
use crate::device::DeviceKind;
use crate::testing::record;
use crate::tile::CHUNK;

/// Half a unit in the last place of bf16, relative to the number.
const BF16: f64 = 1.0 / 256.0;

/// The error of a product of two numbers, relative to it: each is the sum of two in bf16, of whose products the
/// smallest is left out.
const SPLIT: f64 = 3.0 / (1 << 18) as f64;

/// Largest errors of a sequence of products in units of [`SPLIT`], relative to the largest value: in general, and where
/// one direction repeats, so that substitution in tiles amplifies errors.
const GROWTH: f64 = 4.0;
const GROWTH_OF_REPEATED: f64 = 40.0;

/// Errors are relative to a largest value of at least this.
const SMALLEST: f64 = 1e-3;

fn float<const D: usize>(x: &[f32], shape: [usize; D]) -> Tensor<Cuda, D> {
    Tensor::from_data(TensorData::new(x.to_vec(), shape), &Default::default())
}

/// `[batch, heads, tokens, …]` as a view of the memory order batch, tokens, heads.
fn strided<const D: usize>(x: &[f32], shape: [usize; D]) -> Tensor<Cuda, D> {
    let x = float(x, shape).swap_dims(1, 2);

    Tensor::from_data(x.into_data(), &Default::default()).swap_dims(1, 2)
}

fn values(x: &CudaTensor) -> Vec<f64> {
    let shape: Vec<usize> = x.meta.shape().to_vec();
    let x = match shape.len() {
        3 => tensor::<Cuda, 3>(x.clone()).cast(FloatDType::F32).into_data(),
        4 => tensor::<Cuda, 4>(x.clone()).cast(FloatDType::F32).into_data(),
        _ => tensor::<Cuda, 5>(x.clone()).cast(FloatDType::F32).into_data(),
    };
    x.iter::<f64>().collect()
}

/// `x`, whose dimension `dim` is 1, as the sum of two in bf16.
fn split<const D: usize>(x: Tensor<Cuda, D>, dim: usize) -> CudaTensor {
    let high = x.clone().cast(FloatDType::BF16);
    let low = x - high.clone().cast(FloatDType::F32);
    contiguous(&primitive(Tensor::cat(vec![high, low.cast(FloatDType::BF16)], dim)))
}

/// What the kernels return for a case; the log-sum-exps that the backward pass takes are those of `want`.
fn run(case: &Case, want: &Results) -> Results {
    let Shape { batch, kv_heads, tokens, d, .. } = case.shape;
    let (heads, padded, blocks) = (case.shape.heads(), case.shape.padded(), case.shape.blocks());
    let rounded =
        |x: &[f32], heads| primitive(strided(x, [batch, heads, tokens, d]).cast(FloatDType::BF16));
    let of_queries = |x: &[f32]| primitive(float(x, [batch, heads, tokens]));
    let [q, k, v] =
        [rounded(&case.q, heads), rounded(&case.k, kv_heads), rounded(&case.v, kv_heads)];
    let w = primitive(strided(&case.w, [batch, kv_heads, tokens, d]));
    let beta = primitive(strided(&case.beta, [batch, kv_heads, tokens]));
    let decay = case.shape.decay.map(|_| DecaySums::new(&of_queries(&case.log_decay)));
    let starts: Vec<i32> =
        (0..batch * tokens).map(|i| case.shape.document(i % tokens) as i32).collect();
    let documents = case.shape.documents.map(|_| {
        let data = TensorData::new(starts, [batch, tokens]);
        Tensor::<Cuda, 2, Int>::from_data(data, &Default::default()).into_primitive()
    });
    let blocks_of = Blocks::new([&q, &k, &v, &w], &beta, case.shape.scale())
        .window(case.shape.window)
        .documents(documents.as_ref())
        .decay(decay.as_ref());
    let (moved, own) = blocks_of.forward();

    let lse = want.lse.iter().zip(&case.beyond);
    let lse: Vec<f32> = lse.map(|(lse, more)| (*lse as f32 + more) / LN_2 as f32).collect();
    let [d_q, d_k, d_v, d_r] = &case.moved;
    let ds = case.ds.each_ref().map(|x| contiguous(&of_queries(x)));
    let d_v = contiguous(&primitive(float(d_v, [batch, padded, kv_heads, d])));
    let grads = blocks_of.backward(
        &moved.inverses,
        &BlockUpstream {
            d_o: &rounded(&case.d_o, heads),
            lse: &of_queries(&lse),
            delta: &of_queries(&case.delta),
            d_q: &split(float(d_q, [1, batch, padded, heads, d]), 0),
            d_k: &split(float(d_k, [1, batch, padded, kv_heads, d]), 0),
            d_v: &d_v,
            d_r: &split(float(d_r, [batch, blocks, kv_heads, 1, d, d]), 3),
            ds: decay.as_ref().map(|_| [&ds[0], &ds[1]]),
        },
    );
    Results {
        q: values(&moved.q),
        k: values(&moved.k),
        r: joined::<6>(&moved.r, 3).into_data().iter::<f64>().collect(),
        o: values(&own.o),
        lse: values(&own.lse).iter().map(|lse| lse * LN_2).collect(),
        d_q: values(&grads.q),
        d_k: values(&grads.k),
        d_v: values(&grads.v),
        d_w: values(&grads.w),
        d_beta: values(&grads.beta),
        ds: ds.each_ref().map(values),
    }
}

/// The largest error beyond `own` of each element may be `allowed` of the largest element, or of `least`.
fn hold(what: &str, got: &[f64], want: &[f64], [own, least, allowed]: [f64; 3]) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let scale = want.iter().fold(least, |a, x| a.max(x.abs()));
    let mut worst = 0.0f64;
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs() - own * want.abs();
        assert!(
            error <= allowed * scale,
            "{what}, element {at}: found {got}, want {want}; the largest is {scale}"
        );
        worst = worst.max(error / scale);
    }
    record(worst);
}

/// The case with the sums of its decay that the kernels get.
fn with_decay_sums(case: Case) -> Case {
    let Shape { batch, tokens, .. } = case.shape;
    let log_decay = primitive(float(&case.log_decay, [batch, case.shape.heads(), tokens]));
    let decay_sums = case.shape.decay.map(|_| values(&DecaySums::new(&log_decay).within));
    Case { decay_sums: decay_sums.unwrap_or_default(), ..case }
}

fn check(what: &str, case: Case, growth: f64) {
    let case = with_decay_sums(case);
    // Sums of decays over a block are rounded to f32.
    let of_decay = case.shape.decay.map_or(0.0, |decay| f64::from(decay) * BLOCK as f64);
    let allowed = growth * SPLIT + of_decay * f64::from(f32::EPSILON);
    let want = case.expected();
    let got = run(&case, &want);
    // Gradients in bf16 have its rounding. I − P may vanish, while rounding is relative to P, of norm 1.
    let mut results = vec![
        ("moved queries", &got.q, &want.q, 0.0, SMALLEST),
        ("moved keys", &got.k, &want.k, 0.0, SMALLEST),
        ("transforms", &got.r, &want.r, 0.0, 1.0),
        ("outputs", &got.o, &want.o, 0.0, SMALLEST),
        ("log-sum-exps", &got.lse, &want.lse, 0.0, SMALLEST),
        ("gradient of q", &got.d_q, &want.d_q, BF16, SMALLEST),
        ("gradient of k", &got.d_k, &want.d_k, BF16, SMALLEST),
        ("gradient of v", &got.d_v, &want.d_v, BF16, SMALLEST),
        ("gradient of w", &got.d_w, &want.d_w, 0.0, SMALLEST),
        ("gradient of beta", &got.d_beta, &want.d_beta, 0.0, SMALLEST),
    ];
    if case.shape.decay.is_some() {
        let [rows, columns] = [0, 1].map(|i| (&got.ds[i], &want.ds[i]));
        results.push(("sums of dS over rows", rows.0, rows.1, 0.0, SMALLEST));
        results.push(("sums of dS over columns", columns.0, columns.1, 0.0, SMALLEST));
    }
    for (name, got, want, own, least) in results {
        hold(&format!("{what}, {:?}: {name}", case.shape), got, want, [own, least, allowed]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn blocks_of_any_length_agree_with_recurrences() {
    for tokens in [1, 15, 16, 64, 100, 257] {
        check("random", Case::new(Shape::new(tokens, 64, 1)), GROWTH);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn heads_of_any_width_and_group_agree_with_recurrences() {
    for d in [16, 32, 48, 80, 96, 112, 128] {
        check("random", Case::new(Shape::new(100, d, 1)), GROWTH);
    }
    for d in [16, 128] {
        let shape = Shape { batch: 2, kv_heads: 2, ..Shape::new(70, d, 3) };
        check("groups", Case::new(shape), GROWTH);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn masks_and_decays_agree_with_recurrences() {
    for window in [None, Some(1), Some(20), Some(1000)] {
        for documents in [None, Some(9), Some(70)] {
            let shape = Shape { window, documents, ..Shape::new(150, 16, 2) };
            check("masks", Case::new(shape), GROWTH);
        }
    }
    for decay in [1e-3, 1.0, 30.0] {
        let shape = Shape { decay: Some(decay), batch: 2, ..Shape::new(100, 16, 3) };
        check("decays", Case::new(shape), GROWTH);
        check(
            "decays",
            Case::new(Shape { window: Some(20), documents: Some(30), ..shape }),
            GROWTH,
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn repeated_transforms_agree_with_recurrences() {
    for beta in [0.0, 0.5, 1.0, 2.0] {
        check(
            "one direction",
            Case::new(Shape::new(128, 64, 1)).one_direction(beta),
            GROWTH_OF_REPEATED,
        );
    }
    let mut case = Case::new(Shape::new(128, 16, 1));
    case.beta.fill(2.0);
    check("reflections", case, GROWTH_OF_REPEATED);
}

#[test]
#[ignore = "needs a GPU"]
fn more_blocks_than_run_at_once_agree_with_recurrences() {
    let shape = Shape { batch: 3, kv_heads: 50, ..Shape::new(70, 64, 1) };
    check("many", Case::new(shape), GROWTH);
}

#[test]
#[ignore = "needs a GPU"]
fn blocks_have_the_same_bits_every_time() {
    let shape = Shape { batch: 2, decay: Some(0.1), ..Shape::new(150, 32, 3) };
    let case = with_decay_sums(Case::new(shape));
    let want = case.expected();
    let all = |x: Results| {
        let [rows, columns] = x.ds;
        let all = [x.q, x.k, x.r, x.o, x.lse, x.d_q, x.d_k, x.d_v, x.d_w, x.d_beta, rows, columns];
        all.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    assert!(all(run(&case, &want)) == all(run(&case, &want)));
}

/// A sequence of one block, where nothing comes from other blocks.
#[test]
fn recurrences_of_one_block_agree_with_the_cpu_kernel() {
    let shape = Shape { window: Some(30), ..Shape::new(50, 16, 2) };
    let mut case = Case::new(shape);
    case.moved.iter_mut().for_each(|x| x.fill(0.0));
    case.beyond.fill(0.0);
    let o = case.expected().o;
    // The recurrences have o by token, dO by head.
    let (d, n) = (shape.d, shape.tokens);
    for head in 0..2 {
        for t in 0..n {
            let own = head * n + t;
            let o = &o[(t * 2 + head) * d..][..d];
            let d_o = &case.d_o[own * d..][..d];
            let delta = o.iter().zip(d_o).map(|(o, d_o)| o * f64::from(*d_o)).sum::<f64>();
            case.delta[own] = delta as f32;
        }
    }
    let want = case.expected();

    type Ad = Autodiff<Flex>;
    let input = |x: &[f32], dims: [usize; 4]| {
        let data = TensorData::new(x.to_vec(), dims);
        Tensor::<Ad, 4>::from_data(data, &Default::default()).require_grad()
    };
    let q = input(&case.q, [1, 2, n, d]);
    let [k, v, w] = [&case.k, &case.v, &case.w].map(|x| input(x, [1, 1, n, d]));
    let beta = input(&case.beta, [1, 1, n, 1]);
    let [q2, k2, v2, w2, beta2] = [&q, &k, &v, &w, &beta].map(Clone::clone);
    let inputs = PathInputs { q: q2, k: k2, v: v2, w: w2, beta: beta2, log_decay: None };
    let op = Path { scale: shape.scale(), window: shape.window };
    let o = path_attention(&op, inputs, None, ExecPath::Kernel(DeviceKind::Cpu));
    let d_o =
        Tensor::from_data(TensorData::new(case.d_o.clone(), [1, 2, n, d]), &Default::default());
    let grads = (o.clone() * d_o).sum().backward();
    let read = |x: Tensor<Flex, 4>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    hold("outputs", &read(o.inner().swap_dims(1, 2)), &want.o, [0.0, SMALLEST, 2e-5]);
    let wants = [&want.d_q, &want.d_k, &want.d_v, &want.d_w, &want.d_beta];
    for ((name, x), want) in
        [("q", q), ("k", k), ("v", v), ("w", w), ("beta", beta)].into_iter().zip(wants)
    {
        let got = read(x.grad(&grads).expect("a gradient"));
        hold(&format!("gradient of {name}"), &got, want, [0.0, SMALLEST, 2e-5]);
    }
}

/// 227 KB for a thread block, and two thread blocks of the forward pass on a multiprocessor.
#[test]
fn shared_memory_holds_a_block_of_any_width() {
    for head_dim in (16..=128).step_by(16) {
        let config = BlockConfig { head_dim, documents: true, window: true, decay: true };
        for chunks in [config.forward_chunks(), config.backward_chunks()] {
            assert!(chunks * 16 + 12 * 64 * 4 <= 227 << 10, "{head_dim} channels: {chunks} chunks");
        }
        // A part of dR takes the place of gradients of vectors.
        let d_r = config.d_r().high;
        let chunks = d_r.rows * config.columns() / CHUNK;
        assert!(d_r.at + chunks <= config.ds().high.at, "{head_dim} channels: dR");
    }
    let config = BlockConfig { head_dim: 64, documents: true, window: true, decay: true };
    assert!(two_fit(config.forward_chunks()));
}
