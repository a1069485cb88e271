//! The ranks' small messages, over TCP: rank 0 listens, every other rank has one connection to it.
//!
//! At the start each rank says who it is and what must be equal on all ranks; rank 0 refuses what differs. Later the
//! ranks gather messages, and each says twice a second that it lives, so that all of them learn within seconds that one
//! has ended, failed, or stopped.

mod connect;
mod frame;

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use signal_hook::low_level;

pub(super) use self::connect::host;
use self::connect::{Peer, connected};
use self::frame::{Frame, Kind};
use super::facts::Facts;
use super::{CollectiveError, Environment, LOST_RANK, World};
use crate::checkpoint::{self, MOST_WRITING};
use crate::signals;

/// How long a store waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// For all ranks to connect.
    pub connect: Duration,
    /// For a step; one that compiles kernels may take three times as long.
    pub step: Duration,
    /// For a sign of life from a rank.
    pub silence: Duration,
    /// Whether the process ends a few seconds after a rank is lost, but not before it has written the checkpoint under
    /// way: with the exit code of a stop if it was asked to stop, else with [`LOST_RANK`]. A rank that waits for its
    /// GPU, which waits for the lost rank, cannot end otherwise.
    pub exits: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions {
            connect: Duration::from_secs(300),
            step: Duration::from_secs(600),
            silence: Duration::from_secs(12),
            exits: true,
        }
    }
}

/// How long a rank has to end on its own after another one is lost.
const GRACE: Duration = Duration::from_secs(4);

/// Time between two signs of life.
const BEAT: Duration = Duration::from_millis(500);

/// How long a rank that cannot send a message waits for the end of the connection to be read.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What is known of a lost rank.
#[derive(Debug, Serialize, Deserialize)]
struct Loss {
    rank: usize,
    host: String,
    reason: String,
}

impl From<Loss> for CollectiveError {
    fn from(Loss { rank, host, reason }: Loss) -> Self {
        CollectiveError::Lost { rank, host, reason }
    }
}

/// What this rank knows of a peer, in the order of `Shared::peers`.
struct Known {
    messages: VecDeque<Vec<u8>>,
    heard: Instant,
    /// Its last finished step.
    step: u64,
    /// Whether it has said goodbye.
    left: bool,
}

struct State {
    peers: Vec<Known>,
    failure: Option<CollectiveError>,
    /// Whether this rank has said goodbye.
    closed: bool,
    /// This rank's last finished step.
    step: u64,
    watched: Option<Watched>,
}

/// What must end in limited time.
#[derive(Clone)]
struct Watched {
    what: String,
    /// The last finished step when it ends.
    step: u64,
    since: Instant,
    limit: Duration,
    /// What to do if it takes longer.
    hint: &'static str,
}

/// What to do if a step takes too long.
const STEP_HINT: &str =
    "another rank may hang or wait for something else; set a longer time with --rank-timeout";

struct Shared {
    world: World,
    host: String,
    options: StoreOptions,
    /// All other ranks on rank 0, in their order; rank 0 on the others.
    peers: Vec<Peer>,
    state: Mutex<State>,
    changed: Condvar,
}

/// The connection of this rank to the others. Dropping it without [`Store::close`] counts as a failure of this rank.
pub struct Store {
    shared: Arc<Shared>,
}

impl Store {
    /// Connects all ranks; returns when all are there and agree on `facts`.
    ///
    /// # Errors
    /// When rank 0 cannot listen, a rank is missing or twice, or facts differ: on all ranks that connected.
    pub fn connect(
        environment: &Environment,
        facts: &Facts,
        options: StoreOptions,
    ) -> Result<Self, CollectiveError> {
        let world = environment.world;
        let host = host();
        let peers = connected(environment, &host, facts, options.connect)?;
        let known = |_: &(Peer, TcpStream)| Known {
            messages: VecDeque::new(),
            heard: Instant::now(),
            step: 0,
            left: false,
        };
        let state = State {
            peers: peers.iter().map(known).collect(),
            failure: None,
            closed: false,
            step: 0,
            watched: None,
        };
        let (peers, readers): (Vec<_>, Vec<_>) = peers.into_iter().unzip();
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { world, host, options, peers, state, changed });
        for (at, stream) in readers.into_iter().enumerate() {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.read(at, stream));
        }
        let beating = Arc::clone(&shared);
        thread::spawn(move || beating.beat());
        Ok(Store { shared })
    }

    /// The ranks.
    pub fn world(&self) -> World {
        self.shared.world
    }

    /// This rank's machine and process, in words.
    pub fn host(&self) -> &str {
        &self.shared.host
    }

    /// The messages of all ranks, in their order.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn all_gather(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let mut all = vec![vec![]; self.world().size];
        let most = frame::PART / self.world().size;
        let mut parts = message.chunks(most);
        loop {
            let part = parts.next().unwrap_or_default();
            let own = [&[u8::from(parts.len() > 0)], part].concat();
            let mut any_more = false;
            for (all, part) in all.iter_mut().zip(self.all_gather_part(own)?) {
                any_more |= part.first() == Some(&1);
                all.extend_from_slice(part.get(1..).unwrap_or_default());
            }
            if !any_more {
                return Ok(all);
            }
        }
    }

    fn all_gather_part(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let shared = &self.shared;
        if shared.world.is_first() {
            let mut all = vec![message];
            all.extend(shared.receive()?);
            let payload = frame::join(&all);
            for at in 0..shared.peers.len() {
                shared.send(at, Kind::Gathered, &payload)?;
            }
            return Ok(all);
        }
        shared.send(0, Kind::Gather, &message)?;
        let [payload] = &shared.receive()?[..] else { unreachable!("one peer, one message") };
        frame::split(payload).ok_or_else(|| {
            let reason = "sent a message that cannot be read".to_owned();
            CollectiveError::Lost { rank: 0, host: shared.peers[0].host.clone(), reason }
        })
    }

    /// Watches step `step`, counted from 1, until [`Store::finished`]: if it takes too long, all ranks fail. It has
    /// three times as long if it `compiles` kernels.
    pub fn watch_step(&self, step: u64, compiles: bool) {
        let limit = self.shared.options.step * if compiles { 3 } else { 1 };
        let (what, since) = (format!("step {step}"), Instant::now());
        let watched = Watched { what, step, since, limit, hint: STEP_HINT };
        self.shared.lock().watched = Some(watched);
    }

    /// As [`Store::watch_step`], for a part of the start, which has the time that ranks have to connect. `hint` says what
    /// to do if it takes longer.
    pub fn watch_start(&self, what: String, hint: &'static str) {
        let limit = self.shared.options.connect;
        let watched = Watched { what, step: 0, since: Instant::now(), limit, hint };
        self.shared.lock().watched = Some(watched);
    }

    /// Says that what is watched has ended.
    pub fn finished(&self) {
        let mut state = self.shared.lock();
        if let Some(Watched { step, .. }) = state.watched.take() {
            state.step = step;
        }
    }

    /// Tells the other ranks that this one has failed, and why. Does nothing if ranks are lost already.
    pub fn fail(&self, reason: &str) {
        let (rank, host) = (self.shared.world.rank, self.shared.host.clone());
        let mut state = self.shared.lock();
        if state.failure.is_some() || state.closed {
            return;
        }
        state.closed = true;
        drop(state);
        let loss = Loss { rank, host, reason: format!("failed: {reason}") };
        self.shared.tell_all(&loss, None);
        self.shared.changed.notify_all();
    }

    /// Ends all connections without a word, as the end of the process does.
    #[cfg(test)]
    pub(super) fn hang_up(&self) {
        for peer in &self.shared.peers {
            let stream = peer.stream.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Says goodbye: this rank needs no other one any more.
    pub fn close(&self) {
        self.shared.lock().closed = true;
        for peer in &self.shared.peers {
            // A peer that is gone needs no goodbye.
            let _ = peer.send(Kind::Bye, &[]);
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.fail("it ended early");
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        for peer in &self.shared.peers {
            let stream = peer.stream.lock().unwrap_or_else(PoisonError::into_inner);
            // What was written is still delivered; the reader of this end wakes up.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, at: usize, kind: Kind, payload: &[u8]) -> Result<(), CollectiveError> {
        if let Some(failure) = &self.lock().failure {
            return Err(failure.clone());
        }
        let Err(error) = self.peers[at].send(kind, payload) else { return Ok(()) };
        // The connection may have ended, and its reader then knows why.
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), LAST_WORDS, |state| state.failure.is_none());
        let known = waited.unwrap_or_else(PoisonError::into_inner).0.failure.clone();
        Err(known.unwrap_or_else(|| self.lose(at, format!("does not take messages: {error}"))))
    }

    /// The next message of each peer.
    fn receive(&self) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.peers.iter().all(|known| !known.messages.is_empty()) {
                let next = |known: &mut Known| known.messages.pop_front().expect("a message");
                return Ok(state.peers.iter_mut().map(next).collect());
            }
            let gone = state.peers.iter().position(|known| known.left && known.messages.is_empty());
            if let Some(at) = gone {
                drop(state);
                return Err(self.lose(at, "has ended before the others".to_owned()));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads what a peer sends, until it ends.
    fn read(&self, at: usize, mut stream: TcpStream) {
        loop {
            let Some(Frame { kind, payload }) = frame::read(&mut stream).ok().flatten() else {
                let state = self.lock();
                if !state.closed && !state.peers[at].left && state.failure.is_none() {
                    drop(state);
                    self.lose(at, "has ended".to_owned());
                }
                return;
            };
            let mut state = self.lock();
            let known = &mut state.peers[at];
            known.heard = Instant::now();
            match kind {
                Kind::Gather | Kind::Gathered => known.messages.push_back(payload),
                Kind::Beat => {
                    let step = payload.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
                    known.step = step.unwrap_or(known.step);
                }
                Kind::Bye => known.left = true,
                Kind::Failed => {
                    drop(state);
                    if let Ok(loss) = serde_json::from_slice::<Loss>(&payload) {
                        self.set_failure(loss, Some(at));
                    }
                    return;
                }
                Kind::Hello | Kind::Welcome | Kind::Refused => {}
            }
            self.changed.notify_all();
        }
    }

    /// Says every now and then that this rank lives, and looks whether the others do.
    fn beat(&self) {
        let mut state = self.lock();
        while !state.closed && state.failure.is_none() {
            let step = state.step;
            let present = |known: &Known| !known.left;
            let present: Vec<bool> = state.peers.iter().map(present).collect();
            let silent = state
                .peers
                .iter()
                .position(|known| !known.left && known.heard.elapsed() > self.options.silence);
            let hung = state.watched.clone().filter(|x| x.since.elapsed() > x.limit);
            drop(state);
            if let Some(at) = silent {
                let seconds = self.options.silence.as_secs();
                self.lose(at, format!("has not answered for {seconds} s"));
            }
            if let Some(Watched { what, limit, hint, .. }) = hung {
                self.give_up(what, limit.as_secs(), hint);
            }
            for (peer, present) in self.peers.iter().zip(present) {
                if present {
                    // A connection that ended is noticed by its reader.
                    let _ = peer.send(Kind::Beat, &step.to_le_bytes());
                }
            }
            state = self.lock();
            let waited = self
                .changed
                .wait_timeout_while(state, BEAT, |state| !state.closed && state.failure.is_none());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records that peer `at` is lost, and tells the others. Returns the first loss that was recorded.
    fn lose(&self, at: usize, what: String) -> CollectiveError {
        let Peer { rank, host, .. } = &self.peers[at];
        let step = self.lock().peers[at].step;
        let reason = match step {
            0 => what,
            step => format!("{what}; the last step it is known to have finished is {step}"),
        };
        self.set_failure(Loss { rank: *rank, host: host.clone(), reason }, None)
    }

    /// Fails because `what` takes too long.
    fn give_up(&self, what: String, seconds: u64, hint: &'static str) {
        let (rank, host) = (self.world.rank, self.host.clone());
        let reason = format!("gave up: {what} has not finished within {seconds} s");
        self.tell_all(&Loss { rank, host: host.clone(), reason }, None);
        self.record(CollectiveError::Hung { rank, host, what, seconds, hint });
    }

    /// Records a loss; `from` is the peer that told of it.
    fn set_failure(&self, loss: Loss, from: Option<usize>) -> CollectiveError {
        self.tell_all(&loss, from);
        self.record(loss.into())
    }

    /// Tells all peers but `from`; rank 0 thereby passes on what it hears.
    fn tell_all(&self, loss: &Loss, from: Option<usize>) {
        let text = serde_json::to_vec(loss).expect("a loss has a JSON form");
        for (at, peer) in self.peers.iter().enumerate() {
            if Some(at) != from && peer.rank != loss.rank {
                // Those that are gone cannot be told.
                let _ = peer.send(Kind::Failed, &text);
            }
        }
    }

    fn record(&self, failure: CollectiveError) -> CollectiveError {
        let mut state = self.lock();
        if let Some(first) = &state.failure {
            return first.clone();
        }
        state.failure = Some(failure.clone());
        self.changed.notify_all();
        if self.options.exits && !state.closed {
            let error = failure.clone();
            thread::spawn(move || end_process(&error));
        }
        failure
    }
}

/// Ends this process, after a while in which it may end on its own.
fn end_process(error: &CollectiveError) -> ! {
    thread::sleep(GRACE);
    if checkpoint::is_writing() {
        tracing::warn!("a rank is lost; this one writes the checkpoint under way before it ends");
        checkpoint::wait_for_writes(MOST_WRITING);
        thread::sleep(GRACE);
    }
    // The thread of the run waits for a GPU, or for the driver to end.
    // Nobody may read it any more.
    let _ = writeln!(io::stderr(), "error: {error}");
    low_level::exit(i32::from(signals::exit_code().unwrap_or(LOST_RANK)))
}

#[cfg(test)]
mod tests;
