//! Numerics of long rows with adversarial gates: of 65,536 tokens, on the CPU of 3,000.

use burn::tensor::DType;

use crate::attention::conformance::{Decay, holds_at_length};
use crate::attention::fox::Config;
use crate::{Cpu, Cuda};

#[test]
fn holds_at_length_on_the_cpu() {
    holds_at_length::<Config, Cpu>(&Config::default(), Decay::Scalar, DType::F32, 3000);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_bf16_holds_at_length() {
    for config in [Config::default(), Config { prune: true, ..Config::default() }] {
        holds_at_length::<Config, Cuda>(&config, Decay::Scalar, DType::BF16, 1 << 16);
    }
}
