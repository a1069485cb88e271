use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_kernels::attention::rowwise::sparsity::{
    EMPTY_ROW_FRACTION, METRICS, NONZERO_FRACTION, NONZERO_TILE_FRACTION,
};
use longwall_model::{LanguageModel, ModelConfig};

const TOKENS: usize = 150;

/// Layers of kinds without exact zeros report nothing; the others each head of each view.
#[test]
fn layers_with_exact_zeros_report_every_head_of_every_view() {
    let table = "layers = 4\nwidth = 24\nheads = 3\nkv_heads = 1\n\
                 pattern = [\"rope\", \"tra\", \"diff_rela\", \"fox\"]";
    let config: ModelConfig = toml::from_str(table).expect("a valid table");
    let model = LanguageModel::<Flex>::new(&config, 23, TOKENS, 3, &Default::default());
    assert_eq!(model.metrics(), METRICS);
    let tokens: Vec<i32> = (0..TOKENS as i32).map(|t| t * t % 23).collect();
    let tokens = TensorData::new(tokens, [1, TOKENS]);
    let probe = model.observe(Tensor::<Flex, 2, Int>::from_data(tokens, &Default::default()), None);
    let layers: Vec<_> = probe.observations().iter().map(|o| o.layer).collect();
    assert_eq!(layers, [1, 1, 1, 2, 2, 2]);
    for observation in probe.observations() {
        let heads: Vec<_> = observation.heads.iter().map(Vec::len).collect();
        assert_eq!(heads, [vec![3], vec![3, 3]][observation.layer - 1]);
        let values = observation.heads.concat();
        assert!(values.iter().all(|x| (0.0..=1.0).contains(x)), "{values:?}");
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        assert!((observation.value - mean).abs() < 1e-12);
    }
    let mean = |metric| probe.mean(metric).expect("reported");
    // Of ReLA's scores about half are above 0, of TRA's few.
    assert!((0.1..0.9).contains(&mean(NONZERO_FRACTION)));
    assert!(mean(NONZERO_TILE_FRACTION) >= mean(NONZERO_FRACTION));
    assert!(mean(EMPTY_ROW_FRACTION) < 0.5);
}
