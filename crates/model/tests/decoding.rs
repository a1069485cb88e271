use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_model::LanguageModel;
use longwall_model::generate::{GenerateError, Sampling, generate};

use crate::configs::{SEQ_LEN, VOCAB, configs, configs_and_kinds};

fn tokens(rows: &[Vec<u32>]) -> Tensor<Flex, 2, Int> {
    let data: Vec<i32> = rows.iter().flatten().map(|&t| t as i32).collect();
    Tensor::from_data(TensorData::new(data, [rows.len(), rows[0].len()]), &Default::default())
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
