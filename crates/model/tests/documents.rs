use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_model::{LanguageModel, ModelConfig};

use crate::configs::{SEQ_LEN, VOCAB, configs_and_kinds};

fn row(values: &[i32]) -> Tensor<Flex, 2, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [1, values.len()]), &Default::default())
}

fn carries(config: &ModelConfig) -> bool {
    (0..config.layers).all(|layer| config.attention_of(layer).carries_state())
}

/// A row's documents: those of `starts`, or one.
const PACKINGS: [Option<[i32; 12]>; 3] =
    [None, Some([0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 11]), Some([0, 0, 0, 0, 0, 5, 5, 5, 8, 8, 8, 8])];

const TOKENS: [i32; 12] = [1, 5, 3, 9, 9, 0, 2, 8, 3, 3, 7, 6];

/// Text in short rows, each of which continues the one before, has the losses that it has in one row.
#[test]
fn rows_that_continue_one_another_have_the_losses_of_one_row() {
    let (mut targets, mut carrying) = (TOKENS, 0);
    targets.rotate_left(1);
    for config in configs_and_kinds().filter(carries) {
        carrying += 1;
        let device = Default::default();
        let model = LanguageModel::<Flex>::new(&config, VOCAB, 12, 3, &device);
        for starts in PACKINGS {
            let whole = model.token_losses(row(&TOKENS), row(&targets), starts.map(|x| row(&x)));
            let whole = whole.into_data().to_vec::<f32>().unwrap();
            let mut carried = model.nothing_carried(1, &device);
            let elements: usize = carried.iter().map(|x| x.dims()[1]).sum();
            assert_eq!(elements as u64, longwall_model::cost::state_elements(&config, 12));
            let mut first = 0;
            for n in [2, 5, 1, 3, 1] {
                let part = first..first + n;
                let begins = starts.is_some_and(|starts| starts[first] as usize == first);
                if begins {
                    carried = model.nothing_carried(1, &device);
                }
                let within = |start: i32| (start - first as i32).max(0);
                let starts = starts
                    .map(|x| row(&x[part.clone()].iter().map(|&s| within(s)).collect::<Vec<_>>()));
                let (tokens, targets) = (row(&TOKENS[part.clone()]), row(&targets[part.clone()]));
                let weights = Tensor::ones([1, n], &device);
                let loss = model.loss_from(tokens, targets, weights, starts, 0.0, &mut carried);
                let (got, want): (f32, f32) = (loss.total.into_scalar(), whole[part].iter().sum());
                assert!((got - want).abs() < 1e-5, "{config:?}, {first}: {got} for {want}");
                first += n;
            }
        }
    }
    assert!(carrying >= 10, "{carrying} configurations carry a state");
}

/// In a row that packs two documents, each has the losses that it has alone.
#[test]
fn packed_documents_have_the_losses_they_have_alone() {
    let (tokens, targets) = ([1, 5, 3, 9, 9, 0, 2], [5, 3, 10, 9, 0, 2, 10]);
    let starts = [0, 0, 0, 3, 3, 3, 3];
    for config in configs_and_kinds() {
        let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 3, &Default::default());
        let losses = |tokens: &[i32], targets: &[i32], starts: Option<&[i32]>| {
            let losses = model.token_losses(row(tokens), row(targets), starts.map(row));
            losses.into_data().to_vec::<f32>().unwrap()
        };
        let packed = losses(&tokens, &targets, Some(&starts));
        let mut alone = losses(&tokens[..3], &targets[..3], None);
        alone.extend(losses(&tokens[3..], &targets[3..], None));
        for (packed, alone) in packed.iter().zip(&alone) {
            assert!((packed - alone).abs() < 2e-6, "{config:?}: {packed} for {alone}");
        }
    }
}
