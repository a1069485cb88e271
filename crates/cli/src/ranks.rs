//! The ranks of a command: started with `--gpus N`, or by torchrun or Slurm.

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use longwall_kernels::device::gpus as gpus_here;
use longwall_train::distributed::{
    Environment, Facts, Launch, LaunchError, Store, StoreOptions, follow_launcher,
};
use longwall_train::signals::StopFlag;

/// How long the other ranks have to end after one has ended early.
const PATIENCE: Duration = Duration::from_secs(8);

/// The rank that the environment says this process is, if there are several.
pub fn of_environment(gpus: Option<u16>) -> Result<Option<Environment>> {
    match (Environment::read()?, gpus) {
        (Some(environment), Some(gpus)) => bail!(
            "--gpus is {gpus}, but the environment says that this process is rank {} of {}\n  hint: leave out --gpus, \
             or unset RANK and WORLD_SIZE",
            environment.world.rank,
            environment.world.size
        ),
        (environment, _) => Ok(environment),
    }
}

/// Refuses more GPUs than there are; `remedy` is for a machine without any.
pub fn check_gpus(gpus: usize, remedy: &str) -> Result<()> {
    let count =
        gpus_here().map_err(|why| anyhow!("--gpus is {gpus}, but {why}\n  hint: {remedy}"))?;
    if gpus > count {
        bail!("--gpus is {gpus}; allowed: 1 to {count}, the GPUs that the driver shows");
    }
    Ok(())
}

/// Starts this program once for each of `ranks` ranks, and waits for them. `run_dir` is the run that they train.
pub fn launch(ranks: usize, run_dir: Option<&Path>) -> Result<()> {
    // Rank 0 answers the first signal.
    let stop = StopFlag::install_quietly()?;
    let program = std::env::current_exe()?;
    let args = without_gpus(std::env::args_os().skip(1));
    let launch = Launch { program: &program, args, ranks, run_dir, patience: PATIENCE };
    match launch.run(&stop) {
        Ok(0) => Ok(()),
        // Rank 0 has said why.
        Ok(code) => std::process::exit(code.into()),
        Err(error) => match error {
            LaunchError::Rank(failure) if failure.rank == 0 && failure.code.is_some() => {
                std::process::exit(failure.code.unwrap_or(1))
            }
            error => Err(error.into()),
        },
    }
}

/// Command line arguments without `--gpus N`.
fn without_gpus(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args = args.peekable();
    let mut kept = vec![];
    while let Some(arg) = args.next() {
        if arg == "--gpus" {
            args.next();
        } else if !arg.to_string_lossy().starts_with("--gpus=") {
            kept.push(arg);
        }
    }
    kept
}

/// The arguments of this process, in words.
pub fn command_line() -> String {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Connects this rank with the others, which must have the same version and `facts`.
pub fn connect(
    environment: &Environment,
    facts: impl IntoIterator<Item = (String, String)>,
    options: StoreOptions,
    stop: &StopFlag,
) -> Result<Store> {
    follow_launcher(stop);
    let own = [
        ("WORLD_SIZE", environment.world.size.to_string()),
        ("the version", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    let own = own.map(|(name, value)| (name.to_owned(), value));
    let facts: Facts = own.into_iter().chain(facts).collect();
    let connect = || Store::connect(environment, &facts, options);
    let store = stop.interruptible("the ranks were not connected yet", connect)?;
    tracing::info!("{} ranks are connected", environment.world.size);
    Ok(store)
}

/// A connected rank of a command.
pub type Rank = (Environment, Store);

/// Calls `work` with the connection of an evaluation's ranks, and tells the others if it fails.
pub fn together<T>(
    rank: Option<&Rank>,
    work: impl FnOnce(longwall_eval::Ranks<'_>) -> Result<T>,
) -> Result<T> {
    let Some((Environment { world, .. }, store)) = rank else {
        return work(longwall_eval::Ranks::ALONE);
    };
    let exchange = |message| {
        store.all_gather(message).map_err(|error| -> Box<dyn Error + Send + Sync> { error.into() })
    };
    let ranks = longwall_eval::Ranks { rank: world.rank, size: world.size, exchange: &exchange };
    work(ranks).inspect_err(|error| store.fail(&error.to_string()))
}
