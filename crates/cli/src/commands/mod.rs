//! One file per command.

pub mod bench;
pub mod eval;
pub mod exchange;
pub mod generate;
pub mod info;
pub mod log;
pub mod op;
pub mod plot;
pub mod prepare;
pub mod report;
pub mod sweep;
pub mod tokenizer;
pub mod train;
pub mod variants;
pub mod verify;
