use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::Cpu;

const LOGITS: [f32; 4] = [0.0, 2.0, 1.0, -1.0];

const PLAIN: Sampler = Sampler { temperature: 1.0, top_k: None, top_p: None };

fn tokens<B: OpBackend>(logits: &[f32], batch: usize, sampler: &Sampler, u: &[f32]) -> Vec<usize> {
    let device = Default::default();
    let shape = [batch, logits.len() / batch];
    let logits = Tensor::from_data(TensorData::new(logits.to_vec(), shape), &device);
    // A view, as in generation.
    let numbers = [&[9.0], u].concat();
    let numbers = Tensor::from_data(TensorData::new(numbers, [u.len() + 1]), &device);
    let u = (!u.is_empty()).then(|| numbers.narrow(0, 1, u.len()));
    sample::<B>(logits, sampler, u).into_data().iter::<i64>().map(|token| token as usize).collect()
}

/// How often each token of `logits` is drawn in 20,000 draws.
fn counts(sampler: Sampler, logits: &[f32]) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let uniforms: Vec<f32> = (0..20_000).map(|_| rng.random()).collect();
    let mut counts = vec![0; logits.len()];
    for token in tokens::<Cpu>(&logits.repeat(20_000), 20_000, &sampler, &uniforms) {
        counts[token] += 1;
    }
    counts
}

#[test]
fn frequencies_follow_the_softmax() {
    let total: f32 = LOGITS.iter().map(|x| x.exp()).sum();
    for (count, logit) in counts(PLAIN, &LOGITS).iter().zip(LOGITS) {
        let want = logit.exp() / total;
        assert!((*count as f32 / 20_000.0 - want).abs() < 0.012, "{count} for {want}");
    }
}

#[test]
fn top_k_and_top_p_cut_the_tail() {
    let hot = Sampler { temperature: 2.0, ..PLAIN };
    let two = counts(Sampler { top_k: Some(2), ..hot }, &LOGITS);
    assert!(two[1] > 0 && two[2] > 0 && two[0] == 0 && two[3] == 0);
    assert_eq!(counts(Sampler { top_p: Some(0.01), ..hot }, &LOGITS), [0, 20_000, 0, 0]);
    let all = counts(Sampler { top_p: Some(1.0), ..hot }, &LOGITS);
    assert!(all.iter().all(|&count| count > 0));
    // Top-p is a share of what top-k left: 0.73 and 0.27.
    assert_eq!(counts(Sampler { top_k: Some(2), top_p: Some(0.7), ..PLAIN }, &LOGITS)[2], 0);
    assert!(counts(Sampler { top_k: Some(2), top_p: Some(0.8), ..PLAIN }, &LOGITS)[2] > 0);
}

#[test]
fn the_first_of_equal_logits_comes_first() {
    let logits = [1.0, 3.0, 3.0, 0.5, 3.0];
    assert_eq!(tokens::<Cpu>(&logits, 1, &Sampler { temperature: 0.0, ..PLAIN }, &[]), [1]);
    let two = counts(Sampler { top_k: Some(2), ..PLAIN }, &logits);
    assert!(two[1] > 0 && two[2] > 0 && two[4] == 0, "{two:?}");
    // Half of what three equal logits weigh takes two of them.
    let nucleus = Sampler { top_k: Some(3), top_p: Some(0.5), ..PLAIN };
    let nucleus = counts(nucleus, &logits);
    assert!(nucleus[1] > 0 && nucleus[2] > 0 && nucleus[4] == 0, "{nucleus:?}");
}

#[test]
#[should_panic(expected = "Some(1) numbers of 2 rows")]
fn a_row_without_a_number_is_refused() {
    tokens::<Cpu>(&[LOGITS, LOGITS].concat(), 2, &PLAIN, &[0.5]);
}

/// The cumulative probabilities around each token that `sampler` may draw: none outside these bounds is right.
fn bounds(logits: &[f32], sampler: &Sampler, token: usize) -> [f64; 2] {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let weight = |i: usize| f64::from((logits[i] - most) / sampler.temperature).exp();
    let kept = cpu::kept(logits, sampler, weight);
    assert!(kept.contains(&token), "token {token} is not kept by {sampler:?}");
    let total: f64 = kept.iter().map(|&i| weight(i)).sum();
    let before: f64 = kept.iter().filter(|&&i| i < token).map(|&i| weight(i)).sum();
    [before / total, (before + weight(token)) / total]
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_draws_the_tokens_of_the_cpu() {
    use crate::Cuda;
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for vocab in [1, 2, 31, 33, 1000, 1025, 50_257, 151_936] {
        // Some of the logits are equal.
        let batch = 6;
        let logits: Vec<f32> = (0..batch * vocab)
            .map(|_| ((rng.random::<f32>() - 0.5) * 16.0 * 8.0).round() / 8.0)
            .collect();
        let greedy = Sampler { temperature: 0.0, ..PLAIN };
        let best = tokens::<Cuda>(&logits, batch, &greedy, &[]);
        assert_eq!(best, tokens::<Cpu>(&logits, batch, &greedy, &[]), "{vocab} tokens");
        for sampler in [
            PLAIN,
            Sampler { temperature: 0.3, ..PLAIN },
            Sampler { top_k: Some(1), ..PLAIN },
            Sampler { top_k: Some(40), ..PLAIN },
            Sampler { top_k: Some(700), temperature: 3.0, ..PLAIN },
            Sampler { top_p: Some(0.9), ..PLAIN },
            Sampler { top_p: Some(0.95), temperature: 2.5, ..PLAIN },
            Sampler { top_k: Some(50), top_p: Some(0.5), ..PLAIN },
        ] {
            let uniforms = [0.0, 0.9999999, 0.1, 0.37, rng.random(), rng.random()];
            let drawn = tokens::<Cuda>(&logits, batch, &sampler, &uniforms);
            assert_eq!(drawn, tokens::<Cuda>(&logits, batch, &sampler, &uniforms), "not the same");
            for (row, &token) in drawn.iter().enumerate() {
                let logits = &logits[row * vocab..][..vocab];
                let [from, to] = bounds(logits, &sampler, token);
                let u = f64::from(uniforms[row]);
                // f32 sums of up to 151,936 weights.
                let close = from - 1e-5 <= u && u <= to + 1e-5;
                assert!(close, "{vocab} tokens, {sampler:?}: {token} at {from}..{to} for {u}");
            }
        }
    }
}
