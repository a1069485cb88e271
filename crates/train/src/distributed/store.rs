//! The ranks' small messages, over TCP: rank 0 listens, every other rank has one connection to it.
//!
//! At the start each rank says who it is and what must be equal on all ranks; rank 0 refuses what differs. Later the
//! ranks gather messages, and each says every second that it lives, so that all of them learn within seconds that one
//! has ended, failed, or stopped.

mod frame;

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{FromRawFd, IntoRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use signal_hook::low_level;

use self::frame::{Frame, Kind};
use super::facts::{Facts, difference};
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

/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(100);

/// How long rank 0 waits for the first words of a connection, which may be from no rank at all.
const FIRST_WORDS: Duration = Duration::from_secs(5);

/// How long a rank that cannot send a message waits for the end of the connection to be read.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Tells ranks from other programs, and from those of other versions of the protocol.
const PROTOCOL: &str = "longwall ranks 2";

/// The first words of a rank.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    protocol: String,
    rank: usize,
    host: String,
    facts: Facts,
}

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

/// The other end of a connection.
struct Peer {
    rank: usize,
    host: String,
    /// For writing.
    stream: Mutex<TcpStream>,
}

impl Peer {
    fn send(&self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        frame::write(&mut *stream, kind, payload)
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
        let address = format!("{}:{}", environment.address, environment.port);
        let deadline = Instant::now() + options.connect;
        let peers = match world.is_first() {
            true => {
                let listener = listen(environment)?;
                gather_ranks(&listener, world, &host, facts, deadline).map_err(
                    |ranks| match ranks {
                        Gathering::Missing(ranks) => CollectiveError::Missing {
                            ranks,
                            address,
                            seconds: options.connect.as_secs(),
                        },
                        Gathering::Refused(error) => error,
                    },
                )?
            }
            false => vec![join(environment, &host, facts, deadline, options.connect)?],
        };
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
    eprintln!("error: {error}");
    low_level::exit(i32::from(signals::exit_code().unwrap_or(LOST_RANK)))
}

/// This machine's name and this process's number.
pub(super) fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    let name = name.or_else(|| std::env::var("HOSTNAME").ok());
    format!("{}, process {}", name.as_deref().unwrap_or("unnamed host"), std::process::id())
}

/// Listens at this machine's own address if all ranks are here, else at all of its addresses: its name may stand for
/// one that others do not reach.
fn listen(environment: &Environment) -> Result<TcpListener, CollectiveError> {
    let Environment { address, port, .. } = environment;
    let inherited = environment.listener.and_then(|descriptor| inherited(descriptor, *port));
    let bind = || match address.as_str() {
        "127.0.0.1" | "localhost" | "::1" => TcpListener::bind((address.as_str(), *port)),
        _ => match TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port)) {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port))
            }
            bound => bound,
        },
    };
    let listener = inherited.map_or_else(bind, Ok).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.map_err(|error| CollectiveError::Listen {
        address: format!("{address}:{port}"),
        reason: error.to_string(),
    })
}

/// The listener at `port` that the launching process has left open for this one.
fn inherited(descriptor: RawFd, port: u16) -> Option<TcpListener> {
    // SAFETY: nothing else in this process owns the descriptor, or it is given back below.
    let listener = unsafe { TcpListener::from_raw_fd(descriptor) };
    match listener.local_addr() {
        Ok(address) if address.port() == port => {
            // Processes that this one starts do not inherit it.
            // SAFETY: a system call on a number.
            unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
            Some(listener)
        }
        _ => {
            let _ = listener.into_raw_fd();
            None
        }
    }
}

/// Why not all ranks are there.
enum Gathering {
    Missing(Vec<usize>),
    Refused(CollectiveError),
}

/// Waits for the other ranks, and checks that they agree with rank 0. Returns them in their order, each with its
/// stream for reading.
fn gather_ranks(
    listener: &TcpListener,
    world: World,
    host: &str,
    facts: &Facts,
    deadline: Instant,
) -> Result<Vec<(Peer, TcpStream)>, Gathering> {
    let mut found: Vec<Option<(Peer, TcpStream)>> = (1..world.size).map(|_| None).collect();
    while found.iter().any(Option::is_none) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(_) if Instant::now() < deadline => {
                thread::sleep(RETRY / 4);
                continue;
            }
            Err(_) => {
                let missing: Vec<usize> =
                    (1..world.size).filter(|rank| found[rank - 1].is_none()).collect();
                let seen = found.iter().flatten().map(|(peer, _)| peer);
                seen.for_each(|peer| {
                    let text = format!("{} did not connect", super::shown_ranks(&missing));
                    let _ = peer.send(Kind::Refused, text.as_bytes());
                });
                return Err(Gathering::Missing(missing));
            }
        };
        // Another program's connection is dropped.
        let Some((hello, stream)) = first_words(stream) else { continue };
        let rank = hello.rank;
        let (peer, reader) = match peer(rank, hello.host.clone(), stream) {
            Ok(connected) => connected,
            Err(_) => continue,
        };
        let first = found.get(rank.wrapping_sub(1)).and_then(Option::as_ref);
        let refused = disagreement(&hello, facts).or_else(|| {
            match first {
                _ if rank == 0 => Some((0, host.to_owned())),
                Some((first, _)) => Some((rank, first.host.clone())),
                None => None,
            }
            .map(|(rank, first)| CollectiveError::Twice {
                rank,
                first,
                second: hello.host.clone(),
            })
        });
        if let Some(error) = refused {
            let text = error.to_string();
            for peer in found.iter().flatten().map(|(peer, _)| peer).chain([&peer]) {
                let _ = peer.send(Kind::Refused, text.as_bytes());
            }
            return Err(Gathering::Refused(error));
        }
        found[rank - 1] = Some((peer, reader));
    }
    for (peer, _) in found.iter().flatten() {
        // One that has gone since is noticed by its reader.
        let _ = peer.send(Kind::Welcome, host.as_bytes());
    }
    Ok(found.into_iter().flatten().collect())
}

/// What a new connection says, if it is a rank.
fn first_words(mut stream: TcpStream) -> Option<(Hello, TcpStream)> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(FIRST_WORDS)).ok()?;
    let Frame { kind: Kind::Hello, payload } = frame::read(&mut stream).ok()?? else { return None };
    let hello: Hello = serde_json::from_slice(&payload).ok()?;
    stream.set_read_timeout(None).ok()?;
    (hello.protocol == PROTOCOL).then_some((hello, stream))
}

/// The first fact in which a rank differs from rank 0.
fn disagreement(hello: &Hello, facts: &Facts) -> Option<CollectiveError> {
    let [what, theirs, ours] = difference(facts, &hello.facts)?;
    let (rank, host) = (hello.rank, hello.host.clone());
    Some(CollectiveError::Differs { rank, host, what, theirs, ours })
}

/// A peer, and its stream for reading.
fn peer(rank: usize, host: String, stream: TcpStream) -> io::Result<(Peer, TcpStream)> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(FIRST_WORDS))?;
    let reader = stream.try_clone()?;
    Ok((Peer { rank, host, stream: Mutex::new(stream) }, reader))
}

/// Connects to rank 0, and waits until it has found all ranks.
fn join(
    environment: &Environment,
    host: &str,
    facts: &Facts,
    deadline: Instant,
    patience: Duration,
) -> Result<(Peer, TcpStream), CollectiveError> {
    let Environment { world, address, port, .. } = environment;
    let no_first = |error: io::Error| CollectiveError::NoFirst {
        address: format!("{address}:{port}"),
        seconds: patience.as_secs(),
        reason: error.to_string(),
    };
    let stream = loop {
        match TcpStream::connect((address.as_str(), *port)) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= deadline => return Err(no_first(error)),
            Err(_) => thread::sleep(RETRY),
        }
    };
    let (mut first, mut reader) = peer(0, String::new(), stream).map_err(no_first)?;
    let hello = Hello {
        protocol: PROTOCOL.to_owned(),
        rank: world.rank,
        host: host.to_owned(),
        facts: facts.clone(),
    };
    let hello = serde_json::to_vec(&hello).expect("a greeting has a JSON form");
    first.send(Kind::Hello, &hello).map_err(no_first)?;
    // Rank 0 gives up at its own deadline, and says so.
    let left = deadline.saturating_duration_since(Instant::now()) + patience;
    reader.set_read_timeout(Some(left.max(FIRST_WORDS))).map_err(no_first)?;
    let ended = || io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended");
    let answer = frame::read(&mut reader).and_then(|answer| answer.ok_or_else(ended));
    let Frame { kind, payload } = answer.map_err(no_first)?;
    let text = String::from_utf8_lossy(&payload).into_owned();
    match kind {
        Kind::Welcome => first.host = text,
        Kind::Refused => {
            return Err(CollectiveError::Refused { rank: world.rank, reason: text });
        }
        _ => return Err(no_first(io::Error::other("another program answers"))),
    }
    reader.set_read_timeout(None).map_err(no_first)?;
    Ok((first, reader))
}

#[cfg(test)]
mod tests;
