//! `longwall bench …`: how fast things are on this machine.

mod train;

use anyhow::Result;

/// Subcommands of `longwall bench`.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Time training steps of a configuration's model on one random batch
    Train(train::Args),
}

/// Runs a benchmark and prints its results.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Train(args) => train::run(args),
    }
}
