//! Numerics over long rows with adversarial gates.

use burn::tensor::DType;

use crate::Cpu;
use crate::attention::conformance::{Decay, holds_at_length};
use crate::attention::fox::Config;

#[test]
fn holds_at_length_on_the_cpu() {
    holds_at_length::<Config, Cpu>(&Config::default(), Decay::OfHeads, DType::F32, 3000);
}
