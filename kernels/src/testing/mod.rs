//! The three-way test of every operation: an f64 oracle written from the definition, the f32
//! reference, and the kernel.
//!
//! The kernel's error against the oracle may be at most twice the reference's, plus rounding.
//! Gradients are held to the same budget against central differences of the oracle.
//!
//! With inputs in bf16, oracle and reference get the rounded values, so that rounding the inputs is no
//! error. A bf16 result may further differ by its own rounding, half a unit in the last of 8 bits, at most
//! 2⁻⁸ of each element. An f32 result may not.

mod budget;
mod case;
mod differences;
mod gpu_record;
pub mod served;
mod tensor64;

pub use self::budget::{assert_budget, assert_conditioned_budget, record, root_mean_square};
pub use self::case::{Case, check, check_on};
pub use self::differences::{CHECKED, differences};
pub use self::tensor64::Tensor64;
