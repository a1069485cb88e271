use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_model::LanguageModel;

use crate::configs::{SEQ_LEN, VOCAB, configs_and_kinds};

fn row(values: &[i32]) -> Tensor<Flex, 2, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [1, values.len()]), &Default::default())
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
