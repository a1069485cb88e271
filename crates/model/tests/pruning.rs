use burn::backend::Flex;
use burn::module::Param;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_kernels::attention::probe::PRUNED_FRACTION;
use longwall_model::layers::Attention;
use longwall_model::{LanguageModel, ModelConfig};

const TOKENS: usize = 90;

/// The fraction of pairs that FoX skips if all keys are zero and each step decays by `decay`: a query
/// at position i keeps keys less than (24 ln 2 + ln (i + 1)) / decay positions back.
fn share(decay: f64, starts: &[usize]) -> f64 {
    let (mut left_out, mut pairs) = (0, 0);
    for (i, start) in starts.iter().enumerate() {
        let kept = (24.0 * 2f64.ln() + (i as f64 + 1.0).ln()) / decay;
        left_out += ((i as f64 - kept).floor() as i64 + 1 - *start as i64).max(0);
        pairs += i + 1 - start;
    }
    left_out as f64 / pairs as f64
}

/// Makes all keys zero and lets each step decay by `decay`.
fn decay_by(decay: f64, attention: &mut Attention<Flex>) {
    let zeros = |x: &Param<Tensor<Flex, 2>>| Param::from_tensor(x.val().zeros_like());
    attention.k.weight = zeros(&attention.k.weight);
    let gate = attention.extra.get_mut("forget_gate").expect("FoX has one");
    gate.weight = zeros(&gate.weight);
    // ln σ(logit) = −decay.
    let logit = -(f64::exp(decay) - 1.0).ln();
    let logits = Tensor::full([2], logit as f32, &Default::default());
    gate.bias = Some(Param::from_tensor(logits));
}

fn ints(values: Vec<i32>) -> Tensor<Flex, 2, Int> {
    Tensor::from_data(TensorData::new(values, [1, TOKENS]), &Default::default())
}

fn tokens() -> Tensor<Flex, 2, Int> {
    ints((0..TOKENS as i32).map(|t| t * t % 23).collect())
}

#[test]
fn the_pruned_fraction_is_that_of_layers_which_prune() {
    let table = "layers = 3\nwidth = 16\nheads = 2\npattern = [\"rope\", \"fox\"]\n\
                 kinds.fox = { kind = \"fox\", prune = true }";
    let config: ModelConfig = toml::from_str(table).expect("a valid table");
    let mut model = LanguageModel::<Flex>::new(&config, 23, TOKENS, 3, &Default::default());
    decay_by(0.5, &mut model.blocks[1].attention);
    let probe = model.observe(tokens(), None);
    assert_eq!(probe.observations().iter().map(|o| o.layer).collect::<Vec<_>>(), [1]);
    let got = probe.mean(PRUNED_FRACTION).expect("FoX prunes");
    let want = share(0.5, &[0; TOKENS]);
    assert!(want > 0.0 && (got - want).abs() < 1e-12, "{got} for {want}");
}

/// The mean over the layers, each with its own gates, for every placement of norms and residuals.
#[test]
fn every_layer_reports_its_pruned_fraction() {
    let device = Default::default();
    let decays = [0.5, 2.0];
    let packed: Vec<usize> = (0..TOKENS).map(|t| if t < 40 { 0 } else { 40 }).collect();
    for position in ["pre", "post", "sandwich"] {
        for residual in ["none", "learned", "gated"] {
            let table = format!(
                "layers = 2\nwidth = 16\nheads = 2\nnorm_position = {position:?}\n\
                 value_residual = {residual:?}\nattention = {{ kind = \"fox\", prune = true }}"
            );
            let config: ModelConfig = toml::from_str(&table).expect("a valid table");
            let mut model = LanguageModel::<Flex>::new(&config, 23, TOKENS, 3, &device);
            for (block, decay) in model.blocks.iter_mut().zip(decays) {
                decay_by(decay, &mut block.attention);
            }
            for starts in [None, Some(&packed)] {
                let documents =
                    starts.map(|starts| ints(starts.iter().map(|&t| t as i32).collect()));
                let probe = model.observe(tokens(), documents);
                let got = probe.mean(PRUNED_FRACTION).expect("FoX prunes");
                let starts = starts.cloned().unwrap_or(vec![0; TOKENS]);
                let want = decays.map(|decay| share(decay, &starts)).iter().sum::<f64>() / 2.0;
                assert!((got - want).abs() < 1e-12, "{position}, {residual}: {got} for {want}");
            }
        }
    }
}
