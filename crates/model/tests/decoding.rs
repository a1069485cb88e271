use burn::backend::Flex;
use burn::module::Param;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_model::generate::{GenerateError, Sampling, generate, generate_after_prefixes};
use longwall_model::prefixes::{self, distinct_tokens};
use longwall_model::{LanguageModel, ModelConfig};

use crate::configs::{SEQ_LEN, VOCAB, configs, configs_and_kinds};

fn tokens(rows: &[Vec<u32>]) -> Tensor<Flex, 2, Int> {
    let data: Vec<i32> = rows.iter().flatten().map(|&t| t as i32).collect();
    Tensor::from_data(TensorData::new(data, [rows.len(), rows[0].len()]), &Default::default())
}

#[test]
fn a_window_that_is_set_is_that_of_a_model_made_with_it() {
    let row = vec![vec![1, 5, 3, 9, 9, 0, 2]];
    let mut changed = 0;
    for config in configs_and_kinds() {
        let allows = |n| {
            config
                .with_window(Some(n))
                .layers_by_kind()
                .iter()
                .all(|kind| kind.window.is_none() || kind.attention.allows_window())
        };
        if !allows(2) {
            continue;
        }
        let new = |config: &ModelConfig| {
            LanguageModel::<Flex>::new(config, VOCAB, SEQ_LEN, 3, &Default::default())
        };
        let logits = |model: &LanguageModel<Flex>| {
            let full = model.logits(tokens(&row)).into_data().to_vec::<f32>().unwrap();
            let mut state = model.init_state();
            let last = model.extend(tokens(&row), &mut state).into_data().to_vec::<f32>().unwrap();
            (full, last, state.elements())
        };
        let before = logits(&new(&config));
        for window in [Some(2), None] {
            let other = config.with_window(window);
            let mut model = new(&config);
            model.set_windows(&other);
            assert_eq!(logits(&model), logits(&new(&other)), "{config:?} with {window:?}");
            changed += usize::from(logits(&model).0 != before.0);
            model.set_windows(&config);
            assert_eq!(logits(&model), before, "{config:?}");
        }
    }
    assert!(changed > 10, "{changed}");
}

#[test]
fn cached_decoding_gives_the_logits_of_the_full_pass() {
    let rows = vec![vec![1, 5, 3, 9, 9, 0, 2], vec![4, 4, 10, 7, 1, 6, 8]];
    for config in configs_and_kinds() {
        let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 3, &Default::default());
        let full = model.logits(tokens(&rows)); // [batch, seq_len, vocab]
        let mut state = model.init_state();
        let mut at = 0;
        for n in [3, 1, 1, 2] {
            let part: Vec<_> = rows.iter().map(|row| row[at..at + n].to_vec()).collect();
            let got = model.extend(tokens(&part), &mut state).into_data().to_vec::<f32>().unwrap();
            at += n;
            let want = full.clone().narrow(1, at - 1, 1).into_data().to_vec::<f32>().unwrap();
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() < 2e-6, "{config:?} at {at}: {got} for {want}");
            }
        }
        assert_eq!(state.position(), SEQ_LEN);
    }
}

/// Rows of different lengths, filled up at the end, which a causal model does not see.
#[test]
fn log_probabilities_are_those_of_the_logits_and_ignore_the_filling() {
    let device = Default::default();
    let rows = [vec![1u32, 5, 3, 9, 9], vec![4, 4, 10]];
    let padded: Vec<Vec<u32>> =
        rows.iter().map(|row| [row.clone(), vec![0; 5 - row.len()]].concat()).collect();
    // (row, position, target).
    let wanted = [(0usize, 1usize, 3usize), (0, 4, 7), (1, 0, 4), (1, 2, 2), (1, 2, 6)];
    let ids = |ids: Vec<i32>| Tensor::<Flex, 1, Int>::from_ints(ids.as_slice(), &device);
    for config in configs_and_kinds() {
        let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 3, &device);
        let places = ids(wanted.iter().map(|(row, at, _)| (row * 5 + at) as i32).collect());
        let targets = ids(wanted.iter().map(|(_, _, target)| *target as i32).collect());
        let (log_p, likeliest) = model.log_probs(tokens(&padded), places, targets);
        let log_p: Vec<f32> = log_p.into_data().to_vec().unwrap();
        let likeliest: Vec<i64> = likeliest.into_data().iter::<i64>().collect();
        for (n, &(row, at, target)) in wanted.iter().enumerate() {
            let logits = model.logits(tokens(&rows[row..=row])).narrow(1, at, 1).into_data();
            let logits: Vec<f64> = logits.iter::<f64>().collect();
            let want = logits[target] - logits.iter().map(|z| z.exp()).sum::<f64>().ln();
            let best = (0..VOCAB).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            assert!((f64::from(log_p[n]) - want).abs() < 1e-5, "{config:?}: {} {want}", log_p[n]);
            assert_eq!(likeliest[n], best as i64, "{config:?}");
        }
    }
}

#[test]
fn greedy_generation_follows_the_full_pass_and_stops() {
    for config in configs_and_kinds() {
        let device = Default::default();
        let model = LanguageModel::<Flex>::new(&config, VOCAB, 20, 3, &device);
        let prompts = [vec![1, 2, 3], vec![7, 7, 7]];
        let run = |stop| {
            let mut seen = vec![vec![]; 2];
            let emit = |row: usize, token| seen[row].push(token);
            let out = generate(&model, &prompts, 8, &Sampling::GREEDY, stop, &device, emit);
            let out = out.unwrap();
            assert_eq!(out, seen);
            out
        };
        let free = run(None);
        for (prompt, output) in prompts.iter().zip(&free) {
            let mut text = prompt.clone();
            for &token in output {
                let [_, len, vocab] = [1, text.len(), VOCAB];
                let logits = model.logits(tokens(&[text.clone()])).narrow(1, len - 1, 1);
                let logits = logits.reshape([1, vocab]).into_data().to_vec::<f32>().unwrap();
                let best = (0..vocab).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                assert_eq!(token as usize, best);
                text.push(token);
            }
        }
        let stop = free[0][2];
        let first = free[0].iter().position(|&t| t == stop).unwrap();
        assert_eq!(run(Some(stop))[0], free[0][..first]);
    }
}

/// Prompts of a batch that differ in length are continued as alone, whatever the other rows, greedily and at random.
#[test]
fn prompts_of_different_lengths_are_continued_as_alone() {
    let device = Default::default();
    let prompts = [vec![1, 2, 3, 4, 5], vec![7], vec![7, 7, 2], vec![1, 2]];
    let random = Sampling { temperature: 1.5, seed: 7, ..Sampling::GREEDY };
    for config in configs_and_kinds() {
        let model = LanguageModel::<Flex>::new(&config, VOCAB, 20, 3, &device);
        let run = |prompts: &[Vec<u32>], sampling, stop| {
            generate(&model, prompts, 6, sampling, stop, &device, |_, _| {}).unwrap()
        };
        let alone = |prompt: &Vec<u32>, stop| {
            run(std::slice::from_ref(prompt), &Sampling::GREEDY, stop).remove(0)
        };
        let free = run(&prompts, &Sampling::GREEDY, None);
        for stop in [None, Some(free[1][2])] {
            let want: Vec<_> = prompts.iter().map(|prompt| alone(prompt, stop)).collect();
            assert_eq!(run(&prompts, &Sampling::GREEDY, stop), want, "{config:?}");
        }
        // The same rows, beside a longer one and alone: a row's random numbers are its own.
        let short = [vec![7, 7, 2], vec![1, 2, 9]];
        let longer = [&short[..], &[vec![3; 8]]].concat();
        assert_eq!(run(&longer, &random, None)[..2], run(&short, &random, None), "{config:?}");
    }
}

#[test]
fn learned_positions_bound_the_length() {
    let config = configs().next().unwrap();
    let device = Default::default();
    let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 3, &device);
    let run = |max_tokens| {
        generate(&model, &[vec![1; 5]], max_tokens, &Sampling::GREEDY, None, &device, |_, _| {})
    };
    assert_eq!(run(3).unwrap()[0].len(), 3);
    assert_eq!(run(4), Err(GenerateError::TooLong { wanted: 8, allowed: SEQ_LEN }));
    let wanted = usize::MAX;
    assert_eq!(run(wanted), Err(GenerateError::TooLong { wanted, allowed: SEQ_LEN }));
}

/// A padded vocabulary whose padding has by far the largest logits: losses are those of a softmax over all
/// rows, but logits and samples are of the vocabulary's tokens only.
#[test]
fn padding_enters_the_loss_and_is_never_sampled() {
    let text = "layers = 1\nwidth = 8\nheads = 2\ntie_embeddings = false\nvocab_multiple = 8\n\
                norm = \"rms-norm\"\nattention = { kind = \"rope\" }";
    let config: ModelConfig = toml::from_str(text).unwrap();
    let device = Default::default();
    let mut model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 3, &device);
    let width = 8;
    let head = Tensor::<Flex, 2>::zeros([16, width], &device);
    let hidden = model.hidden(tokens(&[vec![1, 2, 3]]), None);
    let last: Vec<f32> = hidden.narrow(1, 2, 1).into_data().to_vec().unwrap();
    // Row 13, of the padding, points along the hidden state of the last token.
    let last = Tensor::<Flex, 1>::from_floats(last.as_slice(), &device).reshape([1, width]);
    let length: f32 = (last.clone() * last.clone()).sum().into_scalar();
    let head = head.slice_assign([13..14, 0..width], last * (20.0 / length));
    model.head = model.head.map(|old| Param::initialized(old.id, head));

    let [prompt, targets] = [[1, 2, 3], [2, 3, 4]].map(|row| tokens(&[row.to_vec()]));
    let losses = model.token_losses(prompt.clone(), targets, None);
    let loss = losses.into_data().to_vec::<f32>().unwrap()[2];
    let want = (20f64.exp() + 15.0).ln();
    assert!((f64::from(loss) - want).abs() < 1e-3, "{loss} for {want}");

    assert_eq!(model.vocab_size(), VOCAB);
    assert_eq!(model.logits(prompt.clone()).dims(), [1, 3, VOCAB]);
    assert_eq!(model.extend(prompt, &mut model.init_state()).dims(), [1, VOCAB]);
    let sampling = Sampling { temperature: 2.0, ..Sampling::GREEDY };
    for sampling in [Sampling::GREEDY, sampling] {
        let prompts = vec![vec![1, 2, 3]; 32];
        let out = generate(&model, &prompts, 4, &sampling, None, &device, |_, _| ()).unwrap();
        assert!(out.iter().flatten().all(|&token| (token as usize) < VOCAB), "{out:?}");
    }
}

/// Sequences that branch, are prefixes of others, repeat and differ from their first token.
#[test]
fn log_probabilities_after_shared_prefixes_are_those_of_whole_rows() {
    let device = Default::default();
    let sequences: [&[u32]; 6] =
        [&[1, 5, 3, 9, 9], &[1, 5, 3, 2], &[1, 5], &[4, 4, 10], &[1, 5, 3, 9, 9], &[1, 5, 3, 2, 8]];
    let wanted = [(0, 4, 7), (1, 1, 3), (5, 3, 8), (2, 1, 0), (3, 0, 4), (4, 4, 6), (5, 4, 1)];
    let places: Vec<_> = wanted.iter().map(|(row, at, _)| (*row, *at)).collect();
    let targets: Vec<_> = wanted.iter().map(|(_, _, target)| *target).collect();
    assert_eq!(distinct_tokens(&sequences), 5 + 2 + 3);
    let padded: Vec<Vec<u32>> =
        sequences.iter().map(|row| [row, &vec![0; 5 - row.len()][..]].concat()).collect();
    let ids = |ids: Vec<i32>| Tensor::<Flex, 1, Int>::from_ints(ids.as_slice(), &device);
    for config in configs_and_kinds() {
        let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 3, &device);
        let (got, likeliest) = prefixes::log_probs(&model, &sequences, &places, &targets, &device);
        let whole = ids(places.iter().map(|(row, at)| (row * 5 + at) as i32).collect());
        let target_ids = ids(targets.iter().map(|target| *target as i32).collect());
        let (want, most) = model.log_probs(tokens(&padded), whole, target_ids);
        assert_eq!(likeliest.into_data(), most.into_data(), "{config:?}");
        let [got, want] = [got, want].map(|x| x.into_data().to_vec::<f32>().unwrap());
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-5, "{config:?}: {got} for {want}");
        }
    }
}

#[test]
fn generation_after_shared_prefixes_is_that_of_whole_prompts() {
    let device = Default::default();
    let prompts =
        [vec![1, 2, 3, 4], vec![1, 2, 3, 5], vec![7, 7, 7, 7], vec![1, 2, 3, 4], vec![1, 9, 9, 9]];
    for config in configs_and_kinds() {
        let model = LanguageModel::<Flex>::new(&config, VOCAB, 20, 3, &device);
        let whole = |prompts: &[Vec<u32>], stop| {
            generate(&model, prompts, 8, &Sampling::GREEDY, stop, &device, |_, _| {}).unwrap()
        };
        let shared = |prompts: &[Vec<u32>], stop| {
            generate_after_prefixes(&model, prompts, 8, stop, &device).unwrap()
        };
        let free = whole(&prompts, None);
        assert_eq!(shared(&prompts, None), free, "{config:?}");
        let stop = Some(free[0][2]);
        assert_eq!(shared(&prompts, stop), whole(&prompts, stop), "{config:?}");
        let single = [vec![3], vec![4]];
        assert_eq!(shared(&single, None), whole(&single, None), "{config:?}");
    }
    let model = LanguageModel::<Flex>::new(&configs().next().unwrap(), VOCAB, 20, 3, &device);
    let empty = generate_after_prefixes(&model, &[vec![]], 8, None, &device);
    assert_eq!(empty, Err(GenerateError::EmptyPrompt));
}
