//! `longwall report RUN|SWEEP…`.

use std::path::PathBuf;

use anyhow::Result;
use longwall_report::Live;

use crate::numbers::whole;
use crate::output::outln;

/// Arguments of `longwall report`.
#[derive(clap::Args)]
pub struct Args {
    /// Folders of runs or sweeps; runs are also found in their folders, two levels deep
    #[arg(required = true, value_name = "RUN|SWEEP")]
    paths: Vec<PathBuf>,

    /// The page; by default report.html in the first folder
    #[arg(long, value_name = "FILE", conflicts_with = "watch")]
    output: Option<PathBuf>,

    /// Serve the page on 127.0.0.1 and follow the runs as they train, until Ctrl-C
    #[arg(long)]
    watch: bool,

    /// The port of --watch; 0 is any that is free
    #[arg(long, default_value_t = 8017, value_parser = whole::<u16>(0..=u16::MAX.into()), requires = "watch")]
    port: u16,
}

/// Writes the page and prints its name, or serves it.
pub fn run(args: Args) -> Result<()> {
    if args.watch {
        let live = Live::bind(&args.paths, args.port)?;
        outln!("{}", live.address())?;
        live.serve();
        return Ok(());
    }
    let output = args.output.unwrap_or_else(|| args.paths[0].join("report.html"));
    longwall_report::write(&args.paths, &output)?;
    outln!("{}", output.display())
}
