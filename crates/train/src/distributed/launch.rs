//! Starts the ranks of one machine, and ends all of them when one ends early.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use longwall_config::shell_quoted;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level;

use super::{Environment, World};
use crate::checkpoint::{CheckpointFolder, MOST_WRITING};
use crate::metrics;
use crate::signals::{self, StopFlag};

/// The exit code of a rank that ends because another one did.
pub const LOST_RANK: u8 = 75;

/// Set for processes that [`Launch`] starts.
const LAUNCHED: &str = "LONGWALL_LAUNCHED";

/// How often the processes are looked at.
const TICK: Duration = Duration::from_millis(50);

/// The last lines of a rank's output that are kept.
const MOST_LINES: usize = 30;

/// Ranks of one machine.
pub struct Launch<'a> {
    /// The program that each rank runs.
    pub program: &'a Path,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// How many ranks there are, each with the GPU of its number.
    pub ranks: usize,
    /// The folder of the run that they train.
    pub run_dir: Option<&'a Path>,
    /// How long the others have to end after one has ended early, before they are killed. Rank 0 may first write the
    /// checkpoint under way.
    pub patience: Duration,
}

/// A rank that ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFailure {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub process: u32,
    /// How it ended, in words.
    pub how: String,
    /// Its exit code, if no signal ended it.
    pub code: Option<i32>,
    /// The last step that the run recorded.
    pub step: Option<u64>,
    /// The newest checkpoint, and whether all its files are as they were written.
    pub checkpoint: Option<(PathBuf, bool)>,
    /// The folder of the run that they trained.
    pub run_dir: Option<PathBuf>,
    /// How many ranks there were.
    pub ranks: usize,
    /// The last lines that it wrote to stderr; empty for rank 0, whose output is not captured.
    pub output: Vec<String>,
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RankFailure { rank, process, how, run_dir, ranks, .. } = self;
        write!(f, "rank {rank} (process {process} on this machine) {how}")?;
        match self.step {
            _ if run_dir.is_none() => {}
            Some(step) => write!(f, "; the last finished step is {step}")?,
            None => write!(f, " before the first step was finished")?,
        }
        for line in &self.output {
            write!(f, "\n  rank {rank}: {line}")?;
        }
        let Some(run_dir) = run_dir else {
            return write!(
                f,
                "\n  hint: what was finished is kept; run the same command again to go on"
            );
        };
        match &self.checkpoint {
            Some((path, true)) => write!(
                f,
                "\n  the last checkpoint, {}, is whole; continue from it with: longwall train --gpus {ranks} --resume {}",
                path.display(),
                shell_quoted(run_dir)
            ),
            Some((path, false)) => write!(
                f,
                "\n  the last checkpoint, {}, is damaged; longwall verify {} names the files",
                path.display(),
                shell_quoted(run_dir)
            ),
            None => write!(f, "\n  there is no checkpoint yet"),
        }
    }
}

impl std::error::Error for RankFailure {}

/// Why ranks did not train.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A process cannot be started.
    #[error("cannot start rank {rank}: {source}")]
    Start {
        /// The rank.
        rank: usize,
        /// What the system said.
        source: io::Error,
    },
    /// There is no free port.
    #[error("no port is free for the ranks to connect: {0}")]
    Port(io::Error),
    /// A rank ended early.
    #[error("{0}")]
    Rank(Box<RankFailure>),
}

/// A process.
struct Rank {
    child: Child,
    /// How it ended.
    status: Option<ExitStatus>,
    lines: Arc<Mutex<VecDeque<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Launch<'_> {
    /// Starts the ranks, and waits until all have ended. Rank 0 has this process's stdout and stderr. If one ends
    /// early, the others are ended. If `stop` is raised, all are asked to stop, with the signal that raised it.
    ///
    /// Returns the exit code of rank 0: after a stop, that of the signal.
    ///
    /// # Errors
    /// When a process cannot be started, or ends early.
    pub fn run(&self, stop: &StopFlag) -> Result<u8, LaunchError> {
        let started = SystemTime::now();
        // Any free port. It stays taken: rank 0 inherits the listener.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(LaunchError::Port)?;
        let mut ranks: Vec<Rank> = vec![];
        for rank in 0..self.ranks {
            match self.start(rank, &listener) {
                Ok(started) => ranks.push(started),
                Err(source) => {
                    end_all(&mut ranks);
                    return Err(LaunchError::Start { rank, source });
                }
            }
        }
        // Rank 0's alone: it ends with that rank.
        drop(listener);
        let mut asked = false;
        let mut failed: Option<(usize, Instant)> = None;
        let (mut lost_since, mut silent, mut written) = (None, None, None);
        while ranks.iter().any(|rank| rank.status.is_none()) {
            for rank in &mut ranks {
                if rank.status.is_none() {
                    rank.status = rank.child.try_wait().ok().flatten();
                }
            }
            if stop.is_raised() && !asked {
                asked = true;
                ranks.iter().for_each(|rank| rank.ask_to_stop());
            }
            if failed.is_none() {
                failed = first_failed(&ranks, asked).map(|rank| (rank, Instant::now()));
            }
            if lost_since.is_none() && ranks.iter().any(Rank::has_lost_another) {
                lost_since = Some(Instant::now());
            }
            let since = failed.map(|(_, since)| since).or(lost_since);
            let may_write = since.is_some_and(|since| since.elapsed() < MOST_WRITING);
            if may_write && self.is_writing(&ranks, started) {
                written = Some(Instant::now());
            }
            if since.max(written).is_some_and(|since| since.elapsed() > self.patience) {
                // Others have given up on one that has not ended.
                silent = ranks.iter().position(|rank| rank.status.is_none());
                end_all(&mut ranks);
            }
            thread::sleep(TICK);
        }
        for reader in ranks.iter_mut().filter_map(|rank| rank.reader.take()) {
            let _ = reader.join();
        }
        let failure = |rank: usize| self.failure(rank, &ranks[rank]);
        match (failed, silent) {
            (Some((rank, _)), _) => Err(LaunchError::Rank(Box::new(failure(rank)))),
            (None, Some(rank)) => {
                let how = "did not answer the others, and was killed".to_owned();
                Err(LaunchError::Rank(Box::new(RankFailure { how, ..failure(rank) })))
            }
            (None, None) => {
                let status = ranks[0].status.expect("rank 0 has ended");
                let by_signal = || status.signal().map(|signal| 128 + signal);
                Ok(status.code().or_else(by_signal).expect("a code or a signal") as u8)
            }
        }
    }

    fn start(&self, rank: usize, listener: &TcpListener) -> io::Result<Rank> {
        let world = World { rank, size: self.ranks };
        let at = listener.local_addr()?;
        let (address, port) = (at.ip().to_string(), at.port());
        let listener = world.is_first().then_some(listener.as_raw_fd());
        let environment = Environment { world, local_rank: rank, address, port, listener };
        let mut command = Command::new(self.program);
        if let Some(descriptor) = listener {
            // SAFETY: a system call on a number, of a listener that lives until the process has started.
            let inherit = move || match unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            };
            // SAFETY: between fork and exec it makes that call alone, and allocates nothing.
            unsafe { command.pre_exec(inherit) };
        }
        // A group of its own: Ctrl-C in a terminal reaches this process alone, which asks all ranks once.
        command.args(&self.args).envs(environment.variables()).env(LAUNCHED, "1").process_group(0);
        // Its end tells the rank that this process has ended.
        command.stdin(Stdio::piped());
        if rank > 0 {
            command.stdout(Stdio::null()).stderr(Stdio::piped());
        }
        let mut child = command.spawn()?;
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let reader = child.stderr.take().map(|stderr| {
            let kept = Arc::clone(&lines);
            thread::spawn(move || keep_last_lines(stderr, &kept))
        });
        Ok(Rank { child, status: None, lines, reader })
    }

    /// Whether rank 0, which was started after `since`, is writing a checkpoint.
    fn is_writing(&self, ranks: &[Rank], since: SystemTime) -> bool {
        let unfinished = |dir| CheckpointFolder::new(dir).has_unfinished(since);
        ranks[0].status.is_none() && self.run_dir.is_some_and(unfinished)
    }

    /// What is known of the end of a rank.
    fn failure(&self, rank: usize, ended: &Rank) -> RankFailure {
        let checkpoint = |dir: &Path| {
            let folder = CheckpointFolder::new(dir);
            let step = *folder.steps().ok()?.last()?;
            let files = folder.verify(step);
            let is_whole = files.is_ok_and(|files| files.iter().all(|(_, error)| error.is_none()));
            Some((folder.step_dir(step), is_whole))
        };
        let lines = ended.lines.lock().unwrap_or_else(PoisonError::into_inner);
        RankFailure {
            rank,
            process: ended.child.id(),
            how: ended.status.map_or("did not end".to_owned(), in_words),
            code: ended.status.and_then(|status| status.code()),
            step: self.run_dir.and_then(metrics::last_step),
            checkpoint: self.run_dir.and_then(checkpoint),
            run_dir: self.run_dir.map(Path::to_owned),
            ranks: self.ranks,
            output: lines.iter().cloned().collect(),
        }
    }
}

impl Rank {
    /// Whether it has ended because another one has.
    fn has_lost_another(&self) -> bool {
        self.status.is_some_and(|status| status.code() == Some(i32::from(LOST_RANK)))
    }

    /// Sends the signal that this process received.
    fn ask_to_stop(&self) {
        let signal = signals::exit_code().map_or(SIGTERM, |code| i32::from(code) - 128);
        if self.status.is_none() {
            // SAFETY: a signal to a child that was not waited for, whose number is therefore still its own.
            unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
        }
    }
}

/// Kills those that run, and waits for them.
fn end_all(ranks: &mut [Rank]) {
    for rank in ranks.iter_mut().filter(|rank| rank.status.is_none()) {
        let _ = rank.child.kill();
        rank.status = rank.child.wait().ok();
    }
}

/// The rank that ended early and is not known to have done so because of another one: one that a signal ended comes
/// first.
fn first_failed(ranks: &[Rank], asked: bool) -> Option<usize> {
    let failed = |rank: &Rank| {
        let status = rank.status.filter(|status| !status.success())?;
        // A rank that was asked to stop ends with the code of the signal, or by it before it handles signals.
        let stopped = asked
            && (status.code().is_some_and(|code| [130, 143].contains(&code))
                || status.signal().is_some_and(|signal| [SIGINT, SIGTERM].contains(&signal)));
        (!stopped).then(|| match status.code() {
            None => 0,
            Some(code) if code != i32::from(LOST_RANK) => 1,
            Some(_) => 2,
        })
    };
    let all = ranks.iter().enumerate().filter_map(|(at, rank)| Some((failed(rank)?, at)));
    // Those that only follow another one wait for it to be seen, unless all have ended.
    let ended = ranks.iter().all(|rank| rank.status.is_some());
    all.filter(|(severity, _)| *severity < 2 || ended).min().map(|(_, at)| at)
}

/// How a process ended.
fn in_words(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name = low_level::signal_name(signal).map(|name| format!(" ({name})"));
            format!("was ended by signal {signal}{}", name.unwrap_or_default())
        }
        (None, Some(code)) => format!("ended with exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

fn keep_last_lines(from: impl Read, kept: &Mutex<VecDeque<String>>) {
    for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(&line)).into_owned();
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == MOST_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}

/// In a process that [`Launch`] has started: raises `stop` when the launching process ends without a word, or ends this
/// one if it is raised already. Elsewhere it does nothing.
pub fn follow_launcher(stop: &StopFlag) {
    if std::env::var_os(LAUNCHED).is_none() {
        return;
    }
    let stop = stop.clone();
    thread::spawn(move || {
        let mut nothing = [0; 16];
        while io::stdin().read(&mut nothing).is_ok_and(|read| read > 0) {}
        if stop.is_raised() {
            low_level::exit(i32::from(LOST_RANK));
        }
        stop.raise();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks that run a shell script, in a folder without checkpoints.
    fn run(script: &str, run_dir: &Path, stop: &StopFlag) -> Result<u8, LaunchError> {
        let launch = Launch {
            program: Path::new("sh"),
            args: vec!["-c".into(), script.into()],
            ranks: 3,
            run_dir: Some(run_dir),
            patience: Duration::from_millis(500),
        };
        launch.run(stop)
    }

    fn failure(script: &str) -> RankFailure {
        let folder = tempfile::tempdir().unwrap();
        match run(script, folder.path(), &StopFlag::new()).unwrap_err() {
            LaunchError::Rank(failure) => *failure,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn every_rank_has_its_variables() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("ranks");
        let out = out.display();
        let script = format!(
            r#"echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $LONGWALL_LAUNCHED" >> {out}; test $MASTER_PORT -gt 0"#
        );
        assert_eq!(run(&script, folder.path(), &StopFlag::new()).unwrap(), 0);
        let text = std::fs::read_to_string(folder.path().join("ranks")).unwrap();
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["0 3 0 127.0.0.1 1", "1 3 1 127.0.0.1 1", "2 3 2 127.0.0.1 1"]);
    }

    #[test]
    fn rank_0_alone_inherits_a_listener() {
        let folder = tempfile::tempdir().unwrap();
        let socket = |descriptor: &str| format!("test -S /proc/self/fd/{descriptor}");
        let inherits = socket("$LONGWALL_LISTENER");
        let script = format!(
            r#"if [ $RANK = 0 ]; then {inherits}; else test -z "$LONGWALL_LISTENER" || exit 4; fi"#
        );
        assert_eq!(run(&script, folder.path(), &StopFlag::new()).unwrap(), 0);
    }

    #[test]
    fn a_rank_that_is_killed_ends_the_others_and_is_named() {
        let started = Instant::now();
        let failure = failure("if [ $RANK = 1 ]; then kill -9 $$; fi; exec sleep 60");
        assert!(started.elapsed() < Duration::from_secs(20));
        assert_eq!((failure.rank, failure.how.as_str()), (1, "was ended by signal 9 (SIGKILL)"));
        let text = failure.to_string();
        assert!(text.contains("on this machine) was ended by signal 9"), "{text}");
        assert!(text.ends_with("there is no checkpoint yet"), "{text}");
    }

    #[test]
    fn the_rank_that_failed_is_named_and_not_those_that_followed_it() {
        let failure = failure(
            "if [ $RANK = 2 ]; then echo told; sleep 0.3; echo why >&2; exit 1; fi; exit 75",
        );
        assert_eq!((failure.rank, failure.how.as_str()), (2, "ended with exit code 1"));
        assert_eq!(failure.output, ["why"]);
    }

    /// A library of the system may write paths in another encoding.
    #[test]
    fn output_that_is_not_utf_8_is_kept() {
        let failure =
            failure(r"if [ $RANK = 1 ]; then printf 'a\377b\nlast\n' >&2; exit 1; fi; exit 75");
        assert_eq!(failure.output, ["a\u{fffd}b", "last"]);
    }

    #[test]
    fn a_rank_that_does_not_answer_is_killed_and_named() {
        let started = Instant::now();
        let failure = failure("if [ $RANK = 2 ]; then exec sleep 60; fi; exit 75");
        assert!(started.elapsed() < Duration::from_secs(20));
        let how = "did not answer the others, and was killed";
        assert_eq!((failure.rank, failure.how.as_str()), (2, how));
    }

    #[test]
    fn rank_0_may_finish_a_checkpoint_after_another_rank_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = folder.path().join("checkpoints");
        // One that a killed run has left counts for nothing.
        let left = checkpoints.join("step-2.tmp");
        std::fs::create_dir_all(&left).unwrap();
        std::fs::File::open(&left).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let (from, to) = (checkpoints.join("step-4.tmp"), checkpoints.join("step-4"));
        let (made, moved) = (from.display(), to.display());
        let write = format!("mkdir {made}; sleep 2; mv {made} {moved}; exit 75");
        let fails = format!("until test -d {made}; do sleep 0.05; done; exit 3");
        let script =
            format!("if [ $RANK = 0 ]; then {write}; fi; if [ $RANK = 1 ]; then {fails}; fi");
        let failure = run(&script, folder.path(), &StopFlag::new()).unwrap_err();
        assert!(failure.to_string().contains("ended with exit code 3"), "{failure}");
        assert!(to.exists(), "rank 0 was killed before it had written");

        // With nothing to write it has no more time than the others.
        let script = "if [ $RANK = 0 ]; then exec sleep 60; fi; exit 3";
        let started = Instant::now();
        run(script, folder.path(), &StopFlag::new()).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_stop_reaches_all_ranks_and_is_no_failure() {
        let folder = tempfile::tempdir().unwrap();
        let stop = StopFlag::new();
        stop.raise();
        let script = "trap 'exit 143' TERM; while :; do sleep 0.05; done";
        // If the signal comes before the trap is set, it ends the rank itself.
        assert_eq!(run(script, folder.path(), &stop).unwrap(), 143);
    }
}
