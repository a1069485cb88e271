//! How much memory a run needs at least.

use longwall_model::cost::Parameters;

use crate::config::RunConfig;
use crate::optimiser::Parameter;

/// Bytes that training needs at least: weights, their gradients, the optimiser's state, of the
/// activations the input of each block for one micro-batch, all in f32, and the inputs, targets and loss
/// weights of a step's tokens.
pub fn least_for_training(config: &RunConfig, vocab_size: usize, micro_batch: usize) -> u128 {
    let model = &config.model;
    let parameters = Parameters::of(model, vocab_size, config.data.seq_len).total();
    // All parameters as one, as far as the size of its state is concerned.
    let all = Parameter { path: String::new(), shape: vec![parameters] };
    let state = config.train.optimiser.state(&all).into_iter();
    let state: u128 = state.map(|tensor| elements(&tensor.shape)).sum();
    let inputs = elements(&[model.layers, micro_batch, config.data.seq_len, model.width]);
    let batch = 3 * u128::from(config.train.batch_tokens);
    4 * (2 * parameters as u128 + state + inputs + batch)
}

fn elements(shape: &[usize]) -> u128 {
    shape.iter().map(|&size| size as u128).product()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::config;

    #[test]
    fn the_need_counts_weights_gradients_state_inputs_of_blocks_and_the_batch() {
        let config = config(&["model.layers=96", "model.width=12288", "model.heads=96"]);
        let parameters = Parameters::of(&config.model, 257, config.data.seq_len).total() as u128;
        let inputs = 96 * 4 * config.data.seq_len as u128 * 12288;
        let batch = 12 * u128::from(config.train.batch_tokens);
        // AdamW keeps two moments.
        assert_eq!(least_for_training(&config, 257, 4), 16 * parameters + 4 * inputs + batch);
        assert!(parameters > 170_000_000_000, "{parameters}");
    }
}
