//! `longwall bench …`: how fast things are on this machine.

mod attention;
mod ceiling;
mod decode;
mod gemm;
mod inputs;
mod kernels;
mod ops;
mod report;
mod setup;
mod timing;
mod train;

use anyhow::Result;

/// Subcommands of `longwall bench`.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Time training steps of a configuration's model on one random batch
    Train(train::Args),
    /// Time attention kinds' operations, forward alone and with backward
    Kernels(kernels::Args),
    /// Time the other operations of a model, forward alone and with backward
    Ops(ops::Args),
    /// Time the matrix products of linear layers, forward and backward
    Gemm(gemm::Args),
    /// Time attention kinds' decoding of one token after a long context
    Decode(decode::Args),
}

/// Runs a benchmark and prints its results.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Train(args) => train::run(args),
        Command::Kernels(args) => kernels::run(args),
        Command::Ops(args) => ops::run(args),
        Command::Gemm(args) => gemm::run(args),
        Command::Decode(args) => decode::run(args),
    }
}
