//! The suites that every registered kind gets. `in_f32` runs on the CPU, and a part of it on CUDA as
//! `references`; `in_bf16` runs on CUDA for each kind with bf16 kernels. A kind's `tests.rs` supplies cases
//! and an f64 definition ([`Conformance`]); suites do not depend on kinds.
//!
//! Every call is checked for what served it ([`run`]): a suite fails if a kernel of
//! [`VariantSpec::KERNELS`](super::VariantSpec::KERNELS) declines one of its shapes, or if the reference
//! runs in its place.

mod carried;
mod head_parts;
pub mod in_bf16;
pub mod in_f32;
mod length;
mod oracles;
pub mod prepared;
mod problem;
pub mod rowwise;
mod run;

pub use self::head_parts::heads_in_parts_equal_all;
pub use self::length::{Decay, holds_at_length};
pub use self::oracles::{YARN, rotated, rotated_and_scaled, softmax_oracle};
pub use self::problem::{Problem, Sizes, cut};
pub use self::run::observed_pruning;
use super::{AttentionShape, Variant};
use crate::device::DeviceKind;
use crate::testing::Tensor64;

/// What a kind's `tests.rs` implements.
pub trait Conformance: Variant {
    /// Step of the central differences; smaller for a kind with kinks, which a step may cross.
    const STEP: f64 = 1e-5;

    /// The widest heads that the CUDA kernels serve.
    const WIDEST_HEAD: usize = 256;

    /// Configurations to test, which together use every option.
    fn cases() -> Vec<Self>;

    /// Those of [`Conformance::cases`], or others, that the CUDA kernels serve at any length and in the suite's sizes
    /// of heads: not those that are the reference's by [`VariantSpec::serves`](super::VariantSpec::serves), those with
    /// which some lengths are by [`VariantSpec::serves_length`](super::VariantSpec::serves_length), and those that
    /// amplify the rounding of q and k beyond a useful bound, whose kernels [`PreparedCase`](prepared::PreparedCase)
    /// checks.
    fn kernel_cases() -> Vec<Self> {
        Self::cases()
    }

    /// Configurations for layers of four heads of keys and values, which are computed in parts.
    fn divided_cases() -> Vec<Self> {
        Self::cases()
    }

    /// Changes a problem's random inputs (q, k, v, the projections, the parameters) where they would be at
    /// a kink, or where results would be only rounding.
    fn prepare(&self, inputs: &mut [Tensor64]) {
        let _ = inputs;
    }

    /// The number of roundings to bf16 that a result or a gradient of a kernel depends on. Five: q and k
    /// when rotated, the weights or their derivatives, the result, and a gradient rotated back.
    fn roundings(&self) -> u32 {
        5
    }

    /// The size below which a gradient in bf16 counts as vanished, relative to that of all gradients
    /// together: where larger terms cancel, as for a single key, only rounding remains.
    fn vanished(&self) -> f64 {
        0.1
    }

    /// Whether gradients jump where scores cross a value, as for rectified scores. Rounding moves a few
    /// scores across it, and their gradients are then off by their own size: only the root mean square of
    /// gradients' errors in bf16 is limited.
    fn has_kinks(&self) -> bool {
        false
    }

    /// The learned vectors whose gradients nearly cancel in the suites' problems, as a norm makes those of
    /// scalars before it do: in bf16 only rounding remains, and tests of the kind's own check them.
    fn cancelling(&self) -> &'static [&'static str] {
        &[]
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

/// Defines tests that call a suite's functions.
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

/// The test modules of a registered kind whose CUDA kernels take these types.
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
                    a_thorough_probe_measures_weights_and_gates
                    decoding_equals_the_full_pass
                    rows_go_on_from_a_state
                    the_state_is_as_large_as_documented
                    is_deterministic
                    a_nan_shows
                );

                #[test]
                fn heads_in_parts_equal_all() {
                    crate::attention::conformance::heads_in_parts_equal_all::<
                        super::Kind,
                        crate::Cpu,
                    >();
                }
            }

            mod cuda {
                $(crate::attention::conformance::suites!(@ $precision);)*

                /// The references, in f32, which run where there is no kernel.
                mod references {
                    crate::attention::conformance::tests!(
                        super::super::Kind, in_f32 on Cuda:
                        #[ignore = "needs a GPU"] agrees_with_the_oracle
                        #[ignore = "needs a GPU"] gradients_agree_with_the_oracle
                        #[ignore = "needs a GPU"] documents_do_not_see_each_other
                        #[ignore = "needs a GPU"] decoding_equals_the_full_pass
                        #[ignore = "needs a GPU"] rows_go_on_from_a_state
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
                #[ignore = "needs a GPU"] rows_go_on_from_a_state
                #[ignore = "needs a GPU"] is_causal
                #[ignore = "needs a GPU"] is_deterministic_on_a_full_device
                #[ignore = "needs a GPU"] a_nan_shows
            );
        }
    };
}
pub(crate) use suites;

/// The registry's line names exactly the types of the kind's CUDA kernels; CPU kernels are in f32.
pub fn every_kernel_has_a_suite<V: Variant>(suites: &[&str]) {
    let types = |device: DeviceKind| -> Vec<&str> {
        let kernels = V::KERNELS.iter().filter(|kernel| kernel.device == device);
        kernels.map(|kernel| kernel.dtype.name()).collect()
    };
    assert_eq!(types(DeviceKind::Cuda), suites, "the registry's line, after `kernels for cuda in`");
    assert!(types(DeviceKind::Cpu).iter().all(|dtype| *dtype == "f32"), "{:?}", V::KERNELS);
}
