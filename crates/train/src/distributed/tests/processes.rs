//! Ranks that are processes: burn 0.21 keeps the graphs of all threads together, and a thread that has ended a backward
//! pass waits for those of others. Ranks that share rows wait for each other within theirs.

use std::env;
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::over_tcp::OverTcp;
use super::*;

/// The variable that names the file of a rank's [`Rank`].
const VARIABLE: &str = "LONGWALL_TEST_RANK";

/// How long a job may take.
const LIMIT: Duration = Duration::from_secs(600);

/// What a process does.
#[derive(Serialize, Deserialize)]
struct Rank {
    rank: usize,
    size: usize,
    port: u16,
    job: Job,
    /// Where it writes what a run returned.
    result: PathBuf,
}

/// What all ranks do.
#[derive(Clone, Serialize, Deserialize)]
pub enum Job {
    /// Compares losses and gradients with those of one rank alone.
    Gradients(shared_rows::Case),
    /// A run.
    Train {
        /// The text of its configuration.
        config: String,
        /// The folder of a run that is resumed.
        resume: Option<PathBuf>,
        bf16: bool,
        /// The rank and the step during which a stop is asked for.
        stop: Option<(usize, u64)>,
        /// The rank and the step after which it leaves without a word.
        leave: Option<(usize, u64)>,
    },
}

/// The step at which a run ended, or the error.
pub type Ended = Result<u64, String>;

/// Does `job` on `size` processes; returns how their runs ended, in their order.
pub fn on_processes(size: usize, job: &Job) -> Vec<Ended> {
    let folder = tempfile::tempdir().unwrap();
    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let [spec, result] =
            ["spec", "result"].map(|name| folder.path().join(format!("{name}-{rank}")));
        let own = Rank { rank, size, port, job: job.clone(), result: result.clone() };
        fs::write(&spec, serde_json::to_vec(&own).unwrap()).unwrap();
        let process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "distributed::tests::processes::a_rank", "--nocapture"])
            .env(VARIABLE, spec)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        (process, result)
    };
    let mut ranks: Vec<(Child, PathBuf)> = (0..size).map(start).collect();
    let deadline = Instant::now() + LIMIT;
    while ranks.iter_mut().any(|(process, _)| process.try_wait().unwrap().is_none()) {
        if Instant::now() > deadline {
            ranks.iter_mut().for_each(|(process, _)| process.kill().unwrap());
            panic!("{size} ranks have not ended within {LIMIT:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    let end = |(rank, (mut process, result)): (usize, (Child, PathBuf))| {
        assert!(process.wait().unwrap().success(), "rank {rank} has failed; see above");
        serde_json::from_slice(&fs::read(result).unwrap()).unwrap()
    };
    ranks.into_iter().enumerate().map(end).collect()
}

/// Not a test of its own: a rank of [`on_processes`], if that has started the process.
#[test]
fn a_rank() {
    let Some(spec) = env::var_os(VARIABLE) else { return };
    let Rank { rank, size, port, job, result } =
        serde_json::from_slice(&fs::read(spec).unwrap()).unwrap();
    let (world, address) = (World { rank, size }, "127.0.0.1".to_owned());
    let environment = Environment { world, local_rank: rank, address, port, listener: None };
    let limits = StoreOptions { exits: false, ..StoreOptions::default() };
    let ranks = OverTcp::new(Store::connect(&environment, &vec![], limits).unwrap());
    let ended = match job {
        Job::Gradients(case) => {
            shared_rows::compare(&case, &ranks);
            Ok(0)
        }
        Job::Train { config, resume, bf16, stop, leave } => {
            let config = RunConfig::parse(&config, Path::new("config.toml"), &[]).unwrap();
            let precision = if bf16 { Precision::Bf16 } else { Precision::F32 };
            let at = |asked: Option<(usize, u64)>| {
                asked.filter(|(who, _)| *who == rank).map(|(_, step)| step)
            };
            let flag = StopFlag::new();
            let mut console: Box<dyn Console> = match (at(stop), at(leave)) {
                (Some(step), _) => Box::new(After { step, action: || flag.raise() }),
                (_, Some(step)) => Box::new(After { step, action: || ranks.store.hang_up() }),
                _ => Box::new(SilentConsole),
            };
            let start = resume.map_or(RunStart::New, RunStart::Resume);
            let options = options(precision, start, flag.clone());
            let (console, none) = (console.as_mut(), &mut NoEvaluations);
            let device = Default::default();
            let outcome =
                train_as_rank::<TestBackend>(&config, &device, &options, &ranks, console, none);
            outcome.map(|outcome| outcome.step).map_err(|error| error.to_string())
        }
    };
    fs::write(result, serde_json::to_vec(&ended).unwrap()).unwrap();
    if ended.is_ok() {
        ranks.store.close();
    }
}
