//! The number formats that a model computes in.

use std::fmt::{self, Display};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

/// The number format of a model's matrices and activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// f32 throughout.
    #[default]
    F32,
    /// f32 throughout, but linear layers on CUDA round the matrices they multiply to TF32 (10 bits of
    /// mantissa).
    Tf32,
    /// As [`Bf16`](Precision::Bf16), but linear layers on CUDA, except the output layer, round the matrices
    /// they multiply to e4m3: 3 bits of mantissa, and one scale per matrix.
    Fp8,
    /// Activations, and parameters of two or more dimensions, are in bf16. Parameters that are
    /// vectors stay in f32, and so do the statistics of softmax and norms, losses, and gradients of
    /// parameters.
    Bf16,
}

impl Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::Fp8 => "fp8",
        })
    }
}

impl Precision {
    /// The element type of a parameter of `rank` dimensions.
    pub fn parameter(self, rank: usize) -> DType {
        match self {
            Precision::Bf16 | Precision::Fp8 if rank >= 2 => DType::BF16,
            _ => DType::F32,
        }
    }

    /// The precision in which a model trained in this one is evaluated, on the same device: bf16 after fp8.
    pub fn of_evaluation(self) -> Self {
        if self == Precision::Fp8 { Precision::Bf16 } else { self }
    }

    /// `module` with every parameter converted to the type of this precision, rounded to nearest.
    pub fn convert<B: Backend, M: Module<B>>(self, module: M) -> M {
        module.map(&mut Convert(self))
    }
}

struct Convert(Precision);

impl<B: Backend> ModuleMapper<B> for Convert {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let dtype = self.0.parameter(D);
        param.map(|old| {
            if old.dtype() == dtype {
                return old;
            }
            // A parameter is a leaf: its conversion must not be part of the graph.
            let wants_grad = old.is_require_grad();
            let new = old.detach().cast(dtype).detach();
            if wants_grad { new.require_grad() } else { new }
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Autodiff;
    use longwall_kernels::Cpu;

    use super::*;
    use crate::weights::named_tensors;
    use crate::{LanguageModel, ModelConfig};

    fn model() -> LanguageModel<Autodiff<Cpu>> {
        let config = "layers = 1\nwidth = 16\nheads = 2\nattention = { kind = \"rope\" }";
        let config: ModelConfig = toml::from_str(config).unwrap();
        LanguageModel::new(&config, 23, 16, 0, &Default::default())
    }

    #[test]
    fn matrices_are_rounded_and_vectors_are_not() {
        let model = model();
        let rounded = Precision::Bf16.convert(model.clone());
        assert_eq!(rounded.embedding.val().dtype(), DType::BF16);
        assert_eq!(rounded.norm.weight.val().dtype(), DType::F32);
        assert!(rounded.embedding.val().is_require_grad());
        for ((name, shape, exact), (_, _, rounded)) in
            named_tensors(&model).iter().zip(named_tensors(&rounded))
        {
            for (x, y) in exact.iter().zip(rounded) {
                let allowed = if shape.len() >= 2 { x.abs() / 256.0 } else { 0.0 };
                assert!((x - y).abs() <= allowed, "{name}: {x} became {y}");
            }
        }
    }

    #[test]
    fn fp8_has_the_tensors_of_bf16_and_is_evaluated_in_it() {
        let model = model();
        let rounded = [Precision::Fp8, Precision::Bf16].map(|p| p.convert(model.clone()));
        assert_eq!(named_tensors(&rounded[0]), named_tensors(&rounded[1]));
        assert_eq!(rounded[0].embedding.val().dtype(), DType::BF16);
        assert_eq!(Precision::Fp8.of_evaluation(), Precision::Bf16);
        for other in [Precision::F32, Precision::Tf32, Precision::Bf16] {
            assert_eq!(other.of_evaluation(), other);
        }
    }

    #[test]
    fn f32_changes_nothing() {
        let model = model();
        assert_eq!(named_tensors(&Precision::F32.convert(model.clone())), named_tensors(&model));
    }
}
