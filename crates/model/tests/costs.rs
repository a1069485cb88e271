use burn::backend::Flex;
use burn::module::Module;
use longwall_model::cost::Parameters;
use longwall_model::{LanguageModel, cost};

use crate::configs::{SEQ_LEN, VOCAB, configs_and_kinds};

#[test]
fn parameters_are_counted_as_they_are_made() {
    for config in configs_and_kinds() {
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

/// Table 2 of Gelada et al. (2025): 124M GPT-2 with softmax is 8:1 at 1,024 tokens, 1:1 at 8,192,
/// 1:8 at 65,536 and 1:125 at a million, rounded there to powers of two or so.
#[test]
fn weight_to_state_ratios_are_the_papers() {
    let config: longwall_model::ModelConfig =
        toml::from_str("layers = 12\nwidth = 768\nheads = 12\nattention = { kind = \"rope\" }")
            .unwrap();
    for (seq_len, want) in [(1024, 8.0), (8192, 1.0), (65_536, 1.0 / 8.0), (1_000_000, 1.0 / 125.0)]
    {
        let ratio: f64 = cost::weight_state_ratio(&config, seq_len) / want;
        assert!((0.8..1.25).contains(&ratio), "{ratio} of the paper's at {seq_len}");
    }
}
