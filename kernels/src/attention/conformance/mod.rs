//! The suites that every registered kind gets. `in_f32` runs on the CPU, and on CUDA as
//! `references`, smaller; `in_bf16` runs on CUDA for each kind with kernels for it. A kind's
//! `tests.rs` supplies cases and an f64 definition ([`Conformance`]); no suite knows a kind.
//!
//! Every call is checked for what served it ([`run`]): a suite fails where a kernel of
//! [`VariantSpec::KERNELS`](super::VariantSpec::KERNELS) declines one of its shapes, or runs its
//! reference.

pub mod in_bf16;
pub mod in_f32;
mod length;
mod oracles;
mod problem;
pub mod rowwise;
mod run;

pub use self::length::{Decay, holds_at_length};
pub use self::oracles::{rotated, softmax_oracle};
use self::problem::Problem;
pub use self::problem::Sizes;
pub use self::run::observed_pruning;
use super::{AttentionShape, Variant};
use crate::device::DeviceKind;
use crate::testing::Tensor64;

/// What a kind's `tests.rs` supplies.
pub trait Conformance: Variant {
    /// Step of the central differences: smaller for a kind with kinks, which a step may pass.
    const STEP: f64 = 1e-5;

    /// Configurations to test, which together use every option.
    fn cases() -> Vec<Self>;

    /// Changes a problem's random inputs (q, k, v, the projections, the parameters) where they
    /// would meet a kink, or leave nothing but rounding to compare.
    fn prepare(&self, inputs: &mut [Tensor64]) {
        let _ = inputs;
    }

    /// How often a kernel in bf16 rounds what a result or a gradient comes from. Five: q and k where
    /// they are rotated, the weights or their slopes, the result, a gradient that is rotated back.
    fn roundings(&self) -> u32 {
        5
    }

    /// The size below which a gradient in bf16 counts as vanished, relative to all gradients' together:
    /// what is left where larger terms cancel, as for a single key, is rounding.
    fn vanished(&self) -> f64 {
        0.1
    }

    /// The operation by its definition: `inputs` are q, k, v, the projections, the parameters;
    /// `documents[b][t]` is where the document of position t starts.
    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64;
}

/// Tests that call functions of a suite.
macro_rules! tests {
    ($kind:ty, $suite:ident on $device:ident: $($(#[$ignore:meta])? $test:ident)+) => {
        $(
            #[test]
            $(#[$ignore])?
            fn $test() {
                crate::attention::conformance::$suite::$test::<$kind, crate::$device>();
            }
        )+
    };
}
pub(crate) use tests;

/// The test modules of a registered kind, whose kernels for CUDA take these types.
macro_rules! suites {
    ($module:ident $($precision:ident)*) => {
        mod $module {
            type Kind = crate::attention::$module::Config;

            mod cpu {
                crate::attention::conformance::tests!(
                    super::Kind, in_f32 on Cpu:
                    agrees_with_the_oracle
                    gradients_agree_with_the_oracle
                    windows_agree_with_the_oracle
                    documents_do_not_see_each_other
                    is_causal
                    decoding_equals_the_full_pass
                    the_state_is_as_large_as_documented
                    is_deterministic
                    a_nan_shows
                );
            }

            mod cuda {
                $(crate::attention::conformance::suites!(@ $precision);)*

                /// What calls without a kernel run, in f32.
                mod references {
                    crate::attention::conformance::tests!(
                        super::super::Kind, in_f32 on Cuda:
                        #[ignore = "needs a GPU"] agrees_with_the_oracle
                        #[ignore = "needs a GPU"] gradients_agree_with_the_oracle
                        #[ignore = "needs a GPU"] documents_do_not_see_each_other
                        #[ignore = "needs a GPU"] decoding_equals_the_full_pass
                        #[ignore = "needs a GPU"] agrees_with_the_cpu_at_a_models_size
                    );
                }
            }

            #[test]
            fn every_kernel_has_a_suite() {
                crate::attention::conformance::every_kernel_has_a_suite::<Kind>(
                    &[$(stringify!($precision)),*],
                );
            }
        }
    };
    (@ bf16) => {
        mod bf16 {
            crate::attention::conformance::tests!(
                super::super::Kind, in_bf16 on Cuda:
                #[ignore = "needs a GPU"] agrees_with_the_oracle
                #[ignore = "needs a GPU"] windows_agree_with_the_oracle
                #[ignore = "needs a GPU"] documents_do_not_see_each_other
                #[ignore = "needs a GPU"] decoding_equals_the_full_pass
                #[ignore = "needs a GPU"] is_causal
                #[ignore = "needs a GPU"] is_deterministic_on_a_full_device
                #[ignore = "needs a GPU"] a_nan_shows
            );
        }
    };
}
pub(crate) use suites;

/// The types that the registry's line names are those of the kind's kernels for CUDA; on the CPU
/// kernels are in f32.
pub fn every_kernel_has_a_suite<V: Variant>(suites: &[&str]) {
    let types = |device: DeviceKind| -> Vec<&str> {
        let kernels = V::KERNELS.iter().filter(|kernel| kernel.device == device);
        kernels.map(|kernel| kernel.dtype.name()).collect()
    };
    assert_eq!(types(DeviceKind::Cuda), suites, "the registry's line, after `kernels for cuda in`");
    assert!(types(DeviceKind::Cpu).iter().all(|dtype| *dtype == "f32"), "{:?}", V::KERNELS);
}
