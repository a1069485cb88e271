use std::io::Write;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, IntoRawFd};

use super::connect::{Hello, PROTOCOL, RETRY, disagreement, inherited};
use super::*;

/// Short waits, and no end of the process.
const OPTIONS: StoreOptions = StoreOptions {
    connect: Duration::from_secs(20),
    step: Duration::from_secs(60),
    silence: Duration::from_secs(20),
    exits: false,
};

fn environment(rank: usize, size: usize, port: u16) -> Environment {
    let world = World { rank, size };
    Environment { world, local_rank: rank, address: "127.0.0.1".to_owned(), port, listener: None }
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn facts(pairs: &[(&str, &str)]) -> Facts {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Connects ranks in threads of their own, each with its facts.
fn connect(
    ranks: &[(usize, Facts)],
    size: usize,
    options: StoreOptions,
) -> Vec<Result<Store, CollectiveError>> {
    let port = free_port();
    let threads: Vec<_> = ranks
        .iter()
        .cloned()
        .map(|(rank, facts)| {
            let environment = environment(rank, size, port);
            thread::spawn(move || Store::connect(&environment, &facts, options))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn stores(size: usize, options: StoreOptions) -> Vec<Store> {
    let ranks: Vec<_> = (0..size).map(|rank| (rank, facts(&[("version", "1")]))).collect();
    connect(&ranks, size, options).into_iter().map(|store| store.unwrap()).collect()
}

/// Without numbers of processes and names of machines.
fn text(error: &CollectiveError) -> String {
    error.to_string().replace(&host(), "HOST")
}

/// What the others get when they gather, while these ranks do something else.
fn errors_of(others: &[&Store]) -> Vec<String> {
    thread::scope(|scope| {
        let mut threads = vec![];
        for &store in others {
            threads.push(scope.spawn(move || store.all_gather(vec![]).unwrap_err()));
        }
        threads.into_iter().map(|thread| text(&thread.join().unwrap())).collect()
    })
}

#[test]
fn messages_come_to_all_ranks_in_the_order_of_the_ranks() {
    for size in [2, 3] {
        let stores = stores(size, OPTIONS);
        thread::scope(|scope| {
            for store in &stores {
                scope.spawn(move || {
                    let rank = store.world().rank;
                    for round in 0..50u8 {
                        let all = store.all_gather(vec![round; rank]).unwrap();
                        let expected: Vec<_> = (0..size).map(|rank| vec![round; rank]).collect();
                        assert_eq!(all, expected);
                    }
                    store.close();
                });
            }
        });
    }
}

#[test]
fn a_rank_that_differs_is_refused_by_name_on_all_ranks() {
    let ours = facts(&[("version", "1"), ("train.lr", "0.1")]);
    let theirs = facts(&[("version", "1"), ("train.lr", "0.2")]);
    let ranks = [(0, ours.clone()), (1, theirs), (2, ours)];
    let results = connect(&ranks, 3, StoreOptions { connect: Duration::from_secs(3), ..OPTIONS });
    let errors: Vec<String> = results.into_iter().map(|x| text(&x.err().unwrap())).collect();
    let reason = "rank 1 (HOST) has train.lr 0.2, but rank 0 has 0.1";
    assert!(errors[0].starts_with(reason), "{errors:?}");
    assert!(errors[1].starts_with(&format!("rank 0 refuses rank 1: {reason}")), "{errors:?}");
    // Rank 2 is told, or finds nobody any more.
    let told = errors[2].contains(reason) || errors[2].starts_with("rank 0 does not answer");
    assert!(told, "{errors:?}");
}

#[test]
fn a_fact_that_one_rank_lacks_is_a_difference() {
    let hello = Hello {
        protocol: PROTOCOL.to_owned(),
        rank: 3,
        host: "h".to_owned(),
        facts: facts(&[("version", "1"), ("train.clip", "1.0")]),
    };
    let error = disagreement(&hello, &facts(&[("version", "1")])).unwrap().to_string();
    assert!(error.starts_with("rank 3 (h) has train.clip 1.0, but rank 0 has (unset)"), "{error}");
    assert_eq!(disagreement(&hello, &hello.facts), None);
}

#[test]
fn two_processes_cannot_be_one_rank() {
    let same = facts(&[]);
    let options = StoreOptions { connect: Duration::from_secs(3), ..OPTIONS };
    let results = connect(&[(0, same.clone()), (1, same.clone()), (1, same)], 3, options);
    let error = text(results[0].as_ref().err().unwrap());
    assert!(error.starts_with("two processes are rank 1: one on HOST, one on HOST"), "{error}");
}

#[test]
fn missing_ranks_are_named() {
    let options = StoreOptions { connect: Duration::from_millis(600), ..OPTIONS };
    let same = facts(&[]);
    let results = connect(&[(0, same.clone()), (2, same)], 4, options);
    let error = text(results[0].as_ref().err().unwrap());
    assert!(error.starts_with("ranks 1 and 3 did not connect to 127.0.0.1:"), "{error}");
    let told = text(results[1].as_ref().err().unwrap());
    assert_eq!(told, "rank 0 refuses rank 2: ranks 1 and 3 did not connect");
}

#[test]
fn a_missing_rank_0_is_named() {
    let options = StoreOptions { connect: Duration::from_millis(300), ..OPTIONS };
    let error = text(connect(&[(1, facts(&[]))], 2, options)[0].as_ref().err().unwrap());
    assert!(error.starts_with("rank 0 does not answer at 127.0.0.1:"), "{error}");
    assert!(error.contains("MASTER_ADDR and MASTER_PORT"), "{error}");
}

#[test]
fn a_port_in_use_is_an_error_that_names_it() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Store::connect(&environment(0, 2, port), &vec![], OPTIONS).err().unwrap();
    let error = text(&error);
    assert!(error.starts_with(&format!("rank 0 cannot listen at 127.0.0.1:{port}: ")), "{error}");
    assert!(error.contains("choose another MASTER_PORT"), "{error}");
}

#[test]
fn rank_0_listens_with_what_it_inherits() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    // As in a process that is launched: nothing here closes it any more.
    let listener = Some(listener.into_raw_fd());
    let first = Environment { listener, ..environment(0, 2, port) };
    let thread = thread::spawn(move || Store::connect(&first, &vec![], OPTIONS));
    let rank = Store::connect(&environment(1, 2, port), &vec![], OPTIONS).unwrap();
    let first = thread.join().unwrap().unwrap();
    first.close();
    rank.close();
}

#[test]
fn a_descriptor_of_something_else_is_left_alone() {
    let file = tempfile::tempfile().unwrap();
    let other = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = other.local_addr().unwrap().port();
    assert!(inherited(file.as_raw_fd(), port).is_none());
    assert!(inherited(other.as_raw_fd(), port.wrapping_add(1)).is_none());
    assert_eq!(other.local_addr().unwrap().port(), port);
    assert!(file.metadata().is_ok());
}

#[test]
fn other_programs_on_the_port_are_ignored() {
    let port = free_port();
    let thread = thread::spawn(move || Store::connect(&environment(0, 2, port), &vec![], OPTIONS));
    let mut other = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(RETRY),
        }
    };
    other.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let rank = Store::connect(&environment(1, 2, port), &vec![], OPTIONS).unwrap();
    thread.join().unwrap().unwrap().close();
    rank.close();
}

#[test]
fn the_end_of_a_rank_fails_the_others_and_says_how_far_it_was() {
    let mut stores = stores(3, OPTIONS);
    stores[1].watch_step(17, true);
    stores[1].finished();
    // Until it has told rank 0.
    while stores[0].shared.lock().peers[0].step != 17 {
        thread::sleep(RETRY);
    }
    // As if killed: without a word.
    let lost = stores.remove(1);
    lost.shared.lock().closed = true;
    drop(lost);
    for error in errors_of(&[&stores[0], &stores[1]]) {
        let expected = "rank 1 (HOST) has ended; the last step it is known to have finished is 17";
        assert_eq!(error, expected);
    }
}

#[test]
fn the_end_of_rank_0_fails_the_others() {
    let mut stores = stores(3, OPTIONS);
    let lost = stores.remove(0);
    lost.shared.lock().closed = true;
    drop(lost);
    assert_eq!(errors_of(&[&stores[0], &stores[1]]), ["rank 0 (HOST) has ended"; 2]);
}

#[test]
fn a_failure_is_told_with_its_reason() {
    let stores = stores(3, OPTIONS);
    stores[2].fail("the disk is full");
    let errors = errors_of(&[&stores[0], &stores[1]]);
    assert_eq!(errors, ["rank 2 (HOST) failed: the disk is full"; 2]);
}

#[test]
fn a_rank_dropped_early_has_failed_and_one_that_said_goodbye_has_not() {
    let mut ranks = stores(2, OPTIONS);
    drop(ranks.remove(1));
    assert_eq!(errors_of(&[&ranks[0]]), ["rank 1 (HOST) failed: it ended early"]);

    let mut ranks = stores(2, OPTIONS);
    let last = ranks.remove(1);
    last.close();
    drop(last);
    thread::sleep(Duration::from_millis(300));
    assert_eq!(ranks[0].shared.lock().failure, None);
    ranks[0].close();
}

#[test]
fn a_step_that_takes_too_long_fails_all_ranks() {
    let options = StoreOptions { step: Duration::from_secs(1), ..OPTIONS };
    let stores = stores(2, options);
    stores[1].watch_step(1, true);
    stores[1].finished();
    stores[1].watch_step(2, false);
    let error = &errors_of(&[&stores[0]])[0];
    assert_eq!(error, "rank 1 (HOST) gave up: step 2 has not finished within 1 s");
    let own = text(&stores[1].all_gather(vec![]).unwrap_err());
    assert!(own.starts_with("rank 1 (HOST): step 2 has not finished within 1 s\n  hint:"), "{own}");
}

#[test]
fn a_step_that_compiles_kernels_has_three_times_as_long() {
    let options = StoreOptions { step: Duration::from_secs(1), ..OPTIONS };
    let stores = stores(2, options);
    let started = Instant::now();
    stores[1].watch_step(7, true);
    let error = &errors_of(&[&stores[0]])[0];
    assert_eq!(error, "rank 1 (HOST) gave up: step 7 has not finished within 3 s");
    assert!(started.elapsed() >= Duration::from_secs(3));
}

#[test]
fn a_silent_rank_is_lost() {
    let port = free_port();
    let options = StoreOptions { silence: Duration::from_secs(1), ..OPTIONS };
    let thread = thread::spawn(move || Store::connect(&environment(0, 2, port), &vec![], options));
    // Greets, and says nothing more, as a stopped process.
    let mut silent = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(RETRY),
        }
    };
    let (protocol, host) = (PROTOCOL.to_owned(), "far".to_owned());
    let hello = Hello { protocol, rank: 1, host, facts: vec![] };
    frame::write(&mut silent, Kind::Hello, &serde_json::to_vec(&hello).unwrap()).unwrap();
    let store = thread.join().unwrap().unwrap();
    let error = text(&store.all_gather(vec![]).unwrap_err());
    assert_eq!(error, "rank 1 (far) has not answered for 1 s");
}
