//! Reports: one HTML page about a run, several runs or a sweep, which needs no network.
//!
//! [`Page::collect`] reads the run folders; [`Page::html`] is the page; [`Live`] serves it on localhost and follows
//! runs as they train. The page holds its data as JSON, and the code in `assets/` draws them with uPlot, which
//! `vendor/` holds.

mod curves;
mod error;
mod evaluations;
mod find;
mod groups;
mod maps;
mod page;
mod runs;
mod serve;
mod table;
#[cfg(test)]
mod testing;

pub use error::ReportError;
pub use page::{Page, write};
pub use serve::Live;
