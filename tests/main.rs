//! Whole-system tests: the `longwall` binary as its users run it.

mod bench;
mod checkpoints;
mod configs;
mod errors;
mod evaluation;
mod exchange;
mod get_data;
mod hybrid;
#[cfg(unix)]
mod kills;
mod op;
mod output;
mod pipeline;
mod ranks;
mod report;
mod resume;
mod starts;
mod support;
mod sweep;
