//! How ranks find each other, and check that they agree.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::{FromRawFd, IntoRawFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::frame::{self, Frame, Kind};
use crate::distributed::facts::{Facts, difference};
use crate::distributed::{CollectiveError, Environment, World, shown_ranks};

/// Time between two attempts to connect.
pub(super) const RETRY: Duration = Duration::from_millis(100);

/// How long rank 0 waits for the first words of a connection, which may be from no rank at all.
const FIRST_WORDS: Duration = Duration::from_secs(5);

/// Tells ranks from other programs, and from those of other versions of the protocol.
pub(super) const PROTOCOL: &str = "longwall ranks 2";

/// The first words of a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub protocol: String,
    pub rank: usize,
    pub host: String,
    pub facts: Facts,
}

/// The other end of a connection.
pub(super) struct Peer {
    pub rank: usize,
    pub host: String,
    /// For writing.
    pub stream: Mutex<TcpStream>,
}

impl Peer {
    pub fn send(&self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        frame::write(&mut *stream, kind, payload)
    }
}

/// Connects this rank within `patience`: rank 0 to all others, in their order, and another to rank 0, once all are there and
/// agree on `facts`. With each peer comes its stream for reading.
///
/// # Errors
/// As [`Store::connect`](super::Store::connect).
pub(super) fn connected(
    environment: &Environment,
    host: &str,
    facts: &Facts,
    patience: Duration,
) -> Result<Vec<(Peer, TcpStream)>, CollectiveError> {
    let world = environment.world;
    let deadline = Instant::now() + patience;
    if !world.is_first() {
        return Ok(vec![join(environment, host, facts, deadline, patience)?]);
    }
    let listener = listen(environment)?;
    gather_ranks(&listener, world, host, facts, deadline).map_err(|ranks| match ranks {
        Gathering::Missing(ranks) => CollectiveError::Missing {
            ranks,
            address: format!("{}:{}", environment.address, environment.port),
            seconds: patience.as_secs(),
        },
        Gathering::Refused(error) => error,
    })
}

/// This machine's name and this process's number.
pub(in crate::distributed) fn host() -> String {
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
pub(super) fn inherited(descriptor: RawFd, port: u16) -> Option<TcpListener> {
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
                    let text = format!("{} did not connect", shown_ranks(&missing));
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
        // A rank of a larger world has other facts.
        let Some(place) = found.get_mut(rank - 1) else { continue };
        *place = Some((peer, reader));
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
pub(super) fn disagreement(hello: &Hello, facts: &Facts) -> Option<CollectiveError> {
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
