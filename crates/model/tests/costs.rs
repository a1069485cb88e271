use burn::backend::Flex;
use burn::module::Module;
use longwall_model::cost::Parameters;
use longwall_model::{LanguageModel, cost};

use crate::configs::{SEQ_LEN, VOCAB, configs};

#[test]
fn parameters_are_counted_as_they_are_made() {
    for config in configs() {
        let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 0, &Default::default());
        let counted = Parameters::of(&config, VOCAB, SEQ_LEN).total();
        assert_eq!(counted, model.num_params(), "{config:?}");
    }
}

/// GPT-2 124M: 124,439,808 parameters, and the FLOPs that follow from its matrices by hand.
#[test]
fn gpt2_124m_has_its_known_size() {
    let config: longwall_model::ModelConfig = toml::from_str(
        r#"
        layers = 12
        width = 768
        heads = 12
        bias = true
        positions = "learned"
        attention = { kind = "rope", position = "none" }
        "#,
    )
    .unwrap();
    assert_eq!(Parameters::of(&config, 50257, 1024).total(), 124_439_808);
    let matrices = 12.0 * 12.0 * 768.0 * 768.0 + 50257.0 * 768.0;
    let attention = 12.0 * 4.0 * 768.0 * (1025.0 / 2.0);
    let flops = cost::forward_flops_per_token(&config, 50257, 1024);
    assert!((flops - (2.0 * matrices + attention)).abs() < 1.0, "{flops}");
}
