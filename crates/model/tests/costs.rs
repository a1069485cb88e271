use burn::backend::Flex;
use burn::module::Module;
use burn::tensor::Tensor;
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

/// The state of a model whose attention keeps a state of fixed size, with every kind of history.
#[test]
fn the_state_is_counted_as_it_is_held() {
    for kind in ["rwkv7", "linear", "gated_delta_net", "kda", "mamba2"] {
        let text = format!(
            "layers = 2\nwidth = 16\nheads = 2\nshort_conv = true\ntoken_shift = true\n\
             output_gate = true\nattention = {{ kind = \"{kind}\" }}"
        );
        let config: longwall_model::ModelConfig = toml::from_str(&text).unwrap();
        let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 0, &Default::default());
        let mut state = model.init_state();
        for seq_len in 1..6 {
            model.extend(Tensor::zeros([3, 1], &Default::default()), &mut state);
            let counted = cost::state_elements(&config, seq_len) as usize;
            assert_eq!(state.elements(), 3 * counted, "{kind} after {seq_len} tokens");
        }
    }
}

/// RWKV-7's released models initialise the token shift of decay and rate differently from the gate's.
#[test]
fn token_shifts_start_with_each_projections_exponent() {
    let config: longwall_model::ModelConfig = toml::from_str(
        "arch = \"rwkv7\"\nlayers = 2\nwidth = 16\nheads = 2\nattention = { kind = \"rwkv7\" }",
    )
    .unwrap();
    let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 0, &Default::default());
    let attention = &model.blocks[0].attention;
    let extra = |name| attention.extra.get(name).expect("RWKV-7 projects it");
    for (projection, exponent) in [
        (&attention.q, 0.2),
        (&attention.k, 0.7),
        (&attention.v, 0.7),
        (extra("decay"), 0.9),
        (extra("rate"), 0.9),
        (extra("gate"), 0.2),
    ] {
        let mu = projection.shift.as_ref().expect("the blocks shift tokens").val();
        // Channel 4 of 16 in the first of two layers.
        let got = mu.into_data().to_vec::<f32>().unwrap()[4];
        let want = 1.0 - 0.25f32.powf(exponent);
        assert!((got - want).abs() < 1e-6, "{got} for {want}");
    }
    assert_eq!(attention.extra.names().len(), 3);
}

/// A kind's convolutions are there without `model.short_conv`, and its decays start in the range that it asks for,
/// each layer's with its own values.
#[test]
fn a_kinds_convolutions_and_initial_decays_are_made() {
    let config: longwall_model::ModelConfig = toml::from_str(
        "layers = 3\nwidth = 64\nheads = 32\npattern = [\"kda\", \"kda\", \"rope\"]",
    )
    .unwrap();
    let model = LanguageModel::<Flex>::new(&config, VOCAB, SEQ_LEN, 0, &Default::default());
    let convolved = model.blocks.iter().map(|block| block.attention.q.conv.is_some());
    assert_eq!(convolved.collect::<Vec<_>>(), [true, true, false]);
    let rates = |layer: usize| {
        let rate = model.blocks[layer].attention.parameters.get("decay_rate").unwrap().val();
        rate.exp().into_data().to_vec::<f32>().unwrap()
    };
    let (first, second) = (rates(0), rates(1));
    assert_ne!(first, second);
    for rates in [first, second] {
        assert!(rates.iter().all(|rate| (1.0..=16.0).contains(rate)), "{rates:?}");
        let mean = rates.iter().sum::<f32>() / 32.0;
        assert!((6.0..11.0).contains(&mean), "a mean of {mean}, where 8.5 is expected");
    }
}

/// Table 2 of Gelada et al. (2025): 124M GPT-2 with softmax is 8:1 at 1,024 tokens, 1:1 at 8,192,
/// 1:8 at 65,536 and 1:125 at a million; the paper rounds them, roughly to powers of two.
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

#[test]
fn figures_of_the_largest_models_do_not_wrap_around() {
    let config = |attention: &str| -> longwall_model::ModelConfig {
        let text = format!(
            "layers = 1024\nwidth = 262144\nheads = 1\nhead_dim = 262144\nattention = {{ {attention} }}"
        );
        toml::from_str(&text).unwrap()
    };
    let large = config("kind = \"rope\"");
    assert_eq!(cost::state_elements(&large, 1 << 40), u64::MAX);
    assert_eq!(cost::by_kind(&large, 1 << 40)[0].state_elements, u64::MAX);
    // With an expansion of 2⁶⁷ channels, no sequence is long enough for the chunked form.
    let power = config("kind = \"power\", p = 4, gate = false, rope = false");
    let seq_len = 1 << 24;
    let same = cost::attention_flops_per_token(&large, seq_len);
    assert_eq!(cost::attention_flops_per_token(&power, seq_len), same);
    let mut problems = longwall_config::Problems::new();
    config("kind = \"power\", p = 4, form = \"chunked\"").validate(&mut problems);
    let problems = problems.into_result().unwrap_err().to_string();
    assert!(
        problems.contains("268435456 elements per kv head, not 1844674407370955"),
        "{problems}"
    );
}

#[test]
fn a_padded_vocabulary_is_counted_and_a_bad_multiple_refused() {
    let config = |multiple: usize| -> longwall_model::ModelConfig {
        toml::from_str(&format!(
            "layers = 12\nwidth = 768\nheads = 12\ntie_embeddings = false\nvocab_multiple = {multiple}\n\
             attention = {{ kind = \"rope\" }}"
        ))
        .unwrap()
    };
    for multiple in [64, 128] {
        assert_eq!(config(multiple).padded_vocab(50_257), 50_304);
    }
    assert_eq!(config(1).padded_vocab(50_257), 50_257);
    // The GPT-2-162M of Huang et al. (2026).
    let of = |multiple| Parameters::of(&config(multiple), 50_257, 1024);
    assert_eq!(of(64).total(), 162_220_800);
    assert_eq!(of(64).head, 50_304 * 768);
    let flops = |multiple| cost::forward_flops_per_token(&config(multiple), 50_257, 1024);
    assert_eq!(flops(64) - flops(1), 2.0 * 47.0 * 768.0);
    for multiple in [0, 65_537] {
        let mut problems = longwall_config::Problems::new();
        config(multiple).validate(&mut problems);
        let [problem] = problems.as_slice() else { panic!("{problems:?}") };
        assert_eq!(problem.key, "model.vocab_multiple");
        assert_eq!(problem.value, multiple.to_string());
    }
}
