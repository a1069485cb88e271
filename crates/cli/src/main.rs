//! The `longwall` binary: parses the command line, dispatches, prints errors.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod commands;
mod comparison;
mod context;
mod costs;
mod evaluator;
#[cfg(test)]
mod fuzz;
mod numbers;
mod output;
mod progress;
mod ranks;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use longwall_eval::EvalError;
use longwall_train::TrainError;
use longwall_train::distributed::{CollectiveError, Environment, LOST_RANK};

use self::output::{CLOSED, ClosedStdout, print_to_stderr};

// Tests count memory with an allocator of their own.
#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Pretrain language models and measure how their attention behaves as context grows.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model from a configuration file, or resume a run
    Train(commands::train::Args),
    /// Evaluate a run's checkpoint
    Eval(commands::eval::Args),
    /// Train and evaluate every combination of some settings, and compare them
    Sweep(commands::sweep::Args),
    /// Continue a prompt with a run's model
    Generate(commands::generate::Args),
    /// Write a run's model in Hugging Face's format
    Export(commands::exchange::ExportArgs),
    /// Make a run folder of a model in Hugging Face's format
    Import(commands::exchange::ImportArgs),
    /// Turn text into token shards
    Prepare(commands::prepare::Args),
    /// Train tokenizers
    #[command(subcommand)]
    Tokenizer(commands::tokenizer::Command),
    /// Compare the files of runs and of shards with their checksums
    Verify(commands::verify::Args),
    /// Draw the loss curves of one or several runs
    Plot(commands::plot::Args),
    /// Write a page about runs or a sweep: differences, losses, evaluations, samples
    Report(commands::report::Args),
    /// Write a run's metrics for other programs
    #[command(subcommand)]
    Log(commands::log::Command),
    /// Show what a configuration's model costs: parameters, FLOPs, memory to train, state that decoding keeps
    Info(commands::info::Args),
    /// List the attention kinds: source, keys, kernels
    Variants(commands::variants::Args),
    /// Run one attention operation on tensors from a file
    Op(commands::op::Args),
    /// Measure speed and memory on this machine
    #[command(subcommand)]
    Bench(commands::bench::Command),
}

fn main() -> ExitCode {
    if let Err(missing) = check_cpu() {
        print_to_stderr(format_args!("error: {missing}"));
        return ExitCode::FAILURE;
    }
    keep_freed_memory();
    // Each shard of a corpus is an open file. If the limit cannot be raised, opening one too many says so.
    let _ = rlimit::increase_nofile_limit(u64::MAX);
    let cli = parse();
    init_logs();
    let result = match cli.command {
        Command::Train(args) => commands::train::run(args),
        Command::Eval(args) => commands::eval::run(args),
        Command::Sweep(args) => commands::sweep::run(args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Export(args) => commands::exchange::export(args),
        Command::Import(args) => commands::exchange::import(args),
        Command::Log(command) => commands::log::run(command),
        Command::Prepare(args) => commands::prepare::run(args),
        Command::Tokenizer(command) => commands::tokenizer::run(command),
        Command::Verify(args) => commands::verify::run(args),
        Command::Plot(args) => commands::plot::run(args),
        Command::Report(args) => commands::report::run(args),
        Command::Info(args) => commands::info::run(args),
        Command::Variants(args) => commands::variants::run(args),
        Command::Op(args) => commands::op::run(args),
        Command::Bench(command) => commands::bench::run(command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<ClosedStdout>() => ExitCode::from(CLOSED),
        Err(error) => match longwall_train::signals::exit_code() {
            // A command that a signal stopped says what is left to do.
            Some(code) => {
                print_to_stderr(format_args!("stopped: {}", describe(&error)));
                ExitCode::from(code)
            }
            None => {
                print_to_stderr(format_args!("error: {}", describe(&error)));
                if is_of_another_rank(&error) {
                    ExitCode::from(LOST_RANK)
                } else {
                    ExitCode::FAILURE
                }
            }
        },
    }
}

/// The command line. On an error, says it and ends the process.
fn parse() -> Cli {
    let mut command = with_negative_numbers(Cli::command());
    let matches = command.get_matches_mut();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit())
}

/// The command, whose options take negative numbers as values: their parsers say what is allowed.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let option = |arg: clap::Arg| match arg.get_action().takes_values() && !arg.is_positional() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(option).mut_subcommands(with_negative_numbers)
}

/// Whether this process fails only because another rank of its run does.
fn is_of_another_rank(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let run = cause.downcast_ref::<TrainError>().is_some_and(TrainError::is_of_another_rank);
        let lost = cause.downcast_ref().is_some_and(CollectiveError::is_of_another_rank);
        run || lost || matches!(cause.downcast_ref(), Some(EvalError::Rank { .. }))
    })
}

/// An error and its causes, without causes that the message already contains.
fn describe(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.as_str() {
            "" => cause,
            told if told.contains(&cause) => text,
            _ => format!("{text}: {cause}"),
        }
    })
}

/// The binary is compiled for processors with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
fn check_cpu() -> Result<(), &'static str> {
    if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
        return Ok(());
    }
    Err(
        "this processor lacks AVX2 or FMA, which the binary was compiled for\n  hint: remove target-cpu from .cargo/config.toml and build again",
    )
}

#[cfg(not(target_arch = "x86_64"))]
fn check_cpu() -> Result<(), &'static str> {
    Ok(())
}

/// Training allocates and frees the same large buffers in every step; pages returned to the system
/// would have to be zeroed again.
fn keep_freed_memory() {
    // mi_option_purge_delay of mimalloc.h, which the bindings do not name; −1 is never.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: sets a number in the allocator's table of options, before other threads start.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}

/// Logs go to stderr; `LONGWALL_LOG=debug` shows more. Of several ranks, the first one informs.
fn init_logs() {
    let rank = Environment::read().ok().flatten().map_or(0, |environment| environment.world.rank);
    let levels = if rank == 0 { "warn,longwall=info" } else { "warn" };
    let filter = tracing_subscriber::EnvFilter::try_from_env("LONGWALL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(levels));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        // They would go to stderr, too, and panic if that is closed.
        .log_internal_errors(false)
        .with_target(false)
        .without_time()
        .init();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message for a command line that is no valid one.
    fn error(line: &str) -> String {
        let command = with_negative_numbers(Cli::command());
        let words = line.split(' ');
        command.try_get_matches_from(words).expect_err("an error").to_string()
    }

    #[test]
    fn the_command_line_is_consistent() {
        with_negative_numbers(Cli::command()).debug_assert();
    }

    #[test]
    fn numbers_that_are_not_allowed_are_told_what_is() {
        let any = "allowed: a whole number from 0 to 18446744073709551615";
        for value in ["-1", "1k", "99999999999999999999"] {
            for option in ["max-tokens", "seed"] {
                let error = error(&format!("longwall generate --{option} {value}"));
                assert!(error.contains(any), "{error}");
            }
        }
        let error = error("longwall train --config x --gpus -5");
        assert!(error.contains("allowed: a whole number from 1 to 65535"), "{error}");
        let plot = ["longwall", "plot", "runs/x", "--smooth", "-1", "--max-loss", "-5"];
        assert!(with_negative_numbers(Cli::command()).try_get_matches_from(plot).is_ok());
    }

    #[test]
    fn alternatives_of_a_missing_argument_are_named() {
        for (line, alternatives) in [
            ("longwall train", ["--config", "--resume"]),
            ("longwall info", ["--config", "--run"]),
            ("longwall plot", ["RUNS", "--bench"]),
            ("longwall prepare --out x", ["PATHS", "--cargo-sources"]),
            ("longwall eval nosuch", ["longwall eval list", "--preset"]),
        ] {
            let error = error(line);
            assert!(alternatives.iter().all(|name| error.contains(name)), "{line}: {error}");
        }
    }
}
