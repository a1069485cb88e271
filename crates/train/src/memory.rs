//! How much memory a run needs at least.

use longwall_kernels::device::DeviceKind;
use longwall_model::Precision;
use longwall_model::cost::Parameters;

use crate::config::RunConfig;
use crate::optimiser::Parameter;

/// Bytes of the device that training needs at least: weights, their gradients and the optimiser's state in
/// f32, and of the activations the input of each block for one micro-batch, in `precision`. On the CPU also
/// a step's inputs, targets and loss weights, and the copy of weights and state that a checkpoint is written
/// from.
pub fn least_for_training(
    config: &RunConfig,
    vocab_size: usize,
    micro_batch: usize,
    precision: Precision,
    device: DeviceKind,
) -> u128 {
    let model = &config.model;
    let parameters = Parameters::of(model, vocab_size, config.data.seq_len).total();
    // All parameters as one, as far as the size of its state is concerned.
    let all = Parameter { path: String::new(), shape: vec![parameters] };
    let state = config.train.optimiser.state(&all).into_iter();
    let state: u128 = state.map(|tensor| elements(&tensor.shape)).sum();
    let inputs = elements(&[model.layers, micro_batch, config.data.seq_len, model.width]);
    let inputs = if precision == Precision::Bf16 { 2 * inputs } else { 4 * inputs };
    let (weights, state) = (4 * parameters as u128, 4 * state);
    let on_host = match device {
        DeviceKind::Cpu => weights + state + 12 * u128::from(config.train.batch_tokens),
        DeviceKind::Cuda => 0,
    };
    2 * weights + state + inputs + on_host
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
        let least = |precision, device| least_for_training(&config, 257, 4, precision, device);
        // AdamW keeps two moments.
        let on_gpu = least(Precision::Bf16, DeviceKind::Cuda);
        assert_eq!(on_gpu, 16 * parameters + 2 * inputs);
        let on_cpu = least(Precision::F32, DeviceKind::Cpu);
        assert_eq!(on_cpu, (16 + 12) * parameters + 4 * inputs + batch);
        assert!(parameters > 170_000_000_000, "{parameters}");
    }
}
