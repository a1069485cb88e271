use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::shard::{Shard, TokenStream};
use crate::sources::testing::logged;
use crate::sources::{cargo_sources, text};
use crate::{NoProgress, TokenizerConfig};

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&TokenizerConfig::Bytes).unwrap()
}

/// JSONL, plain and compressed text: 300 documents in total.
fn corpus(dir: &Path) -> PathBuf {
    let folder = dir.join("corpus");
    if folder.exists() {
        return folder;
    }
    std::fs::create_dir(&folder).unwrap();
    for file in 0..3 {
        let line =
            |n: usize| format!("{{\"text\": \"{}\"}}\n", format!("word {n} ").repeat(1 + n % 37));
        let lines: String = (file * 90..file * 90 + 90).map(line).collect();
        std::fs::write(folder.join(format!("{file}.jsonl")), lines).unwrap();
    }
    for file in 0..30 {
        let text = format!("file {file} of text\n").repeat(1 + file % 7);
        std::fs::write(folder.join(format!("text{file}.txt")), text).unwrap();
    }
    folder
}

fn text(path: PathBuf) -> Arc<text::Config> {
    Arc::new(text::Config::new(vec![path]))
}

fn options(dir: &TempDir, out: &str) -> PrepareOptions {
    options_in(dir.path(), out)
}

fn options_in(dir: &Path, out: &str) -> PrepareOptions {
    PrepareOptions {
        validation_fraction: 0.1,
        shard_tokens: 5000,
        batch_bytes: 1000,
        save_every: Duration::ZERO,
        ..PrepareOptions::new(text(corpus(dir)), dir.join(out), "x")
    }
}

/// Every file of a folder by name.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// Cancels at the n-th batch.
struct CancelAt(usize, AtomicUsize);

impl Progress for CancelAt {
    fn cancelled(&self) -> bool {
        self.1.fetch_add(1, Ordering::Relaxed) + 1 >= self.0
    }
}

#[test]
fn shards_hold_every_document_once_with_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, "out");
    let report = prepare(&options, &tokenizer(), &NoProgress).unwrap();
    let manifest = &report.manifest;
    assert_eq!((manifest.documents, report.start), (300, PrepareStart::Fresh));

    let mut found = Vec::new();
    for split in [&manifest.train, &manifest.validation] {
        let shards =
            split.shards.iter().map(|shard| Shard::open(&options.out.join(&shard.file)).unwrap());
        let stream = TokenStream::new(shards.collect());
        let mut tokens = vec![0; stream.tokens() as usize];
        stream.read(0, &mut tokens).unwrap();
        assert_eq!(tokens.len() as u64, split.tokens);
        assert_eq!(tokens.last(), Some(&256));
        let documents: Vec<Vec<u8>> = tokens
            .split(|&token| token == 256)
            .map(|d| d.iter().map(|&b| b as u8).collect())
            .collect();
        assert_eq!(documents.len() as u64 - 1, split.documents);
        found.extend(documents.into_iter().filter(|document| !document.is_empty()));
    }
    assert_eq!(found.iter().map(Vec::len).sum::<usize>() as u64, manifest.bytes);
    let mut texts: Vec<String> =
        found.into_iter().map(|text| String::from_utf8(text).unwrap()).collect();
    texts.sort();
    let mut expected: Vec<String> =
        (0..270).map(|n: usize| format!("word {n} ").repeat(1 + n % 37)).collect();
    expected.extend((0..30).map(|n: usize| format!("file {n} of text\n").repeat(1 + n % 7)));
    expected.sort();
    assert_eq!(texts, expected);
    assert!((10..60).contains(&manifest.validation.documents), "{}", manifest.validation.documents);
    let names: Vec<String> = contents(&options.out).into_keys().collect();
    assert!(
        names.contains(&"x_train_000001.bin".into()) && names.contains(&"x_val_000000.bin".into())
    );
    assert!(names.iter().all(|name| !name.starts_with('.')), "left behind: {names:?}");
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut made = Vec::new();
    for threads in [1, 2, 7] {
        let options =
            PrepareOptions { threads: Some(threads), ..options(&dir, &format!("out{threads}")) };
        prepare(&options, &tokenizer(), &NoProgress).unwrap();
        made.push(contents(&options.out));
    }
    assert!(made[0].len() > 3);
    assert!(made[0] == made[1] && made[0] == made[2]);
}

#[test]
fn a_run_that_was_interrupted_ends_as_an_unbroken_one() {
    let dir = tempfile::tempdir().unwrap();
    let whole = options(&dir, "whole");
    prepare(&whole, &tokenizer(), &NoProgress).unwrap();
    for stop in [1, 2, 5, 11, 23] {
        let options = options(&dir, &format!("stop{stop}"));
        let error =
            prepare(&options, &tokenizer(), &CancelAt(stop, AtomicUsize::new(0))).unwrap_err();
        assert!(matches!(error, DataError::Interrupted { .. }), "{error}");
        // A killed process may have written more than its last saved state records.
        for (name, mut bytes) in contents(&options.out) {
            if name.ends_with(".partial") {
                bytes.extend(b"lost work");
                std::fs::write(options.out.join(name), bytes).unwrap();
            }
        }
        let report = prepare(&options, &tokenizer(), &NoProgress).unwrap();
        assert_eq!(report.start, PrepareStart::Resumed);
        assert!(report.encoded_bytes < report.manifest.bytes);
        assert!(contents(&options.out) == contents(&whole.out), "stop {stop}");
    }
}

const KILLED_IN: &str = "LONGWALL_TEST_KILLED_IN";

/// Slows the work down, so that the parent can kill it half-way.
struct Slow;

impl Progress for Slow {
    fn advance(&self, _: u64) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Prepares in the folder that the environment variable names, until it is killed.
#[test]
#[ignore = "the child process of a_killed_process_leaves_nothing_that_matters"]
fn work_until_killed() {
    let folder = std::env::var_os(KILLED_IN).expect("the parent sets the folder");
    let options = options_in(Path::new(&folder), "killed");
    prepare(&options, &tokenizer(), &Slow).unwrap();
}

#[test]
fn a_killed_process_leaves_nothing_that_matters() {
    let dir = tempfile::tempdir().unwrap();
    let whole = options(&dir, "whole");
    prepare(&whole, &tokenizer(), &NoProgress).unwrap();
    let killed = options(&dir, "killed");
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "prepare::tests::work_until_killed"])
        .env(KILLED_IN, dir.path())
        .spawn()
        .unwrap();
    // Until its first shard is whole.
    while !killed.out.join("x_train_000001.bin").exists() {
        assert!(child.try_wait().unwrap().is_none(), "the child ended early");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!killed.out.join("manifest.json").exists(), "the child was done before it was killed");
    let report = prepare(&killed, &tokenizer(), &NoProgress).unwrap();
    assert_eq!(report.start, PrepareStart::Resumed);
    assert!(contents(&killed.out) == contents(&whole.out));
}

#[test]
fn a_complete_folder_is_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, "out");
    prepare(&options, &tokenizer(), &NoProgress).unwrap();
    let before = contents(&options.out);
    // As a run killed after its manifest leaves it.
    std::fs::write(options.out.join(".prepare.json"), "{}").unwrap();
    let report = prepare(&options, &tokenizer(), &NoProgress).unwrap();
    assert_eq!((report.start, report.encoded_bytes), (PrepareStart::Complete, 0));
    assert!(contents(&options.out) == before);
}

#[test]
fn another_document_moves_none_to_the_other_split() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, "out");
    prepare(&options, &tokenizer(), &NoProgress).unwrap();
    let more = PrepareOptions { out: dir.path().join("more"), ..options.clone() };
    // Sorted before all others, and empty: it changes only positions.
    std::fs::write(dir.path().join("corpus/0.jsonl.a.txt"), "an added document").unwrap();
    let report = prepare(&more, &tokenizer(), &NoProgress).unwrap();
    assert_eq!(report.manifest.documents, 301);
    let added = is_added_to_validation();
    let split = if added { "x_train_000001.bin" } else { "x_val_000000.bin" };
    assert_eq!(contents(&options.out)[split], contents(&more.out)[split]);
}

fn is_added_to_validation() -> bool {
    holdout::is_validation("an added document", 0.1)
}

proptest! {
    #[test]
    fn a_greater_fraction_holds_out_more_and_gives_nothing_back(text in ".{0,20}", a in 0.0f64..1.0, b in 0.0f64..1.0) {
        let (low, high) = (a.min(b), a.max(b));
        prop_assert!(!holdout::is_validation(&text, low) || holdout::is_validation(&text, high));
        prop_assert!(!holdout::is_validation(&text, 0.0));
    }
}

#[test]
fn the_held_out_share_is_the_fraction() {
    let held_out = (0..20_000).filter(|n| holdout::is_validation(&n.to_string(), 0.05)).count();
    // 1000 expected, sigma 31.
    assert!((850..1150).contains(&held_out), "{held_out}");
}

fn message(dir: &TempDir, options: &PrepareOptions) -> String {
    let error = prepare(options, &tokenizer(), &NoProgress).unwrap_err();
    error.to_string().replace(&dir.path().display().to_string(), "DIR")
}

#[test]
fn unusable_options_are_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let good = options(&dir, "out");
    let with = |change: fn(&mut PrepareOptions)| {
        let mut options = good.clone();
        change(&mut options);
        message(&dir, &options)
    };
    insta::assert_snapshot!(with(|o| o.validation_fraction = 1.5), @r"
    validation_fraction is 1.5; allowed: 0 to below 1
      hint: 0.01 holds out one document in a hundred
    ");
    insta::assert_snapshot!(with(|o| o.shard_tokens = 0), @r"
    shard_tokens is 0; allowed: 1 to 2147483647 tokens
      hint: 100M is the default
    ");
    insta::assert_snapshot!(with(|o| o.name = "a/b".into()), @r#"
    name is "a/b"; allowed: a file name without a dot in front and without slashes
      hint: choose a short word, for example "books"
    "#);
    insta::assert_snapshot!(with(|o| o.threads = Some(0)), @r"
    threads is 0; allowed: 1 or more
      hint: leave it out for one thread per core
    ");
}

#[test]
fn an_empty_corpus_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(&dir, "out");
    let empty = dir.path().join("empty.txt");
    std::fs::write(&empty, " \n").unwrap();
    options.corpus = text(empty);
    insta::assert_snapshot!(message(&dir, &options), @r"
    the corpus is empty: files read: 1, documents with text: 0
      hint: give at least one file with text in it
    ");
    assert!(!options.out.exists());
}

#[test]
fn a_bad_line_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, "out");
    std::fs::write(dir.path().join("corpus/2.jsonl"), "{\"text\": \"fine\"}\nnot JSON\n").unwrap();
    insta::assert_snapshot!(message(&dir, &options), @r"
    DIR/corpus/2.jsonl:2: not valid JSON at column 2: expected ident
      hint: every line must hold one JSON object; rename the file to .txt if it is plain text
    ");
    assert!(!options.out.exists());
}

#[test]
fn a_folder_with_something_else_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, "out");
    prepare(&options, &tokenizer(), &NoProgress).unwrap();
    let other = PrepareOptions { shard_tokens: 6000, ..options.clone() };
    insta::assert_snapshot!(message(&dir, &other), @r"
    DIR/out holds shards of other text, options or tokenizer
      hint: choose another folder, or delete this one
    ");

    std::fs::remove_file(options.out.join("manifest.json")).unwrap();
    insta::assert_snapshot!(message(&dir, &options), @r"
    DIR/out holds shards without a manifest, made elsewhere
      hint: choose another folder, or delete this one
    ");

    let halted = PrepareOptions { out: dir.path().join("halted"), ..options.clone() };
    prepare(&halted, &tokenizer(), &CancelAt(3, AtomicUsize::new(0))).unwrap_err();
    let other = PrepareOptions { shard_tokens: 6000, ..halted };
    insta::assert_snapshot!(message(&dir, &other), @r"
    DIR/halted holds an unfinished run with other text, options or tokenizer
      hint: choose another folder, or delete this one
    ");
}

#[test]
fn an_unwritable_folder_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(&dir, "out");
    std::fs::write(dir.path().join("file"), "in the way").unwrap();
    options.out = dir.path().join("file/out");
    insta::assert_snapshot!(message(&dir, &options), @r"
    cannot write DIR/file/out: Not a directory (os error 20)
      hint: choose a folder you may write to, with enough space on its disk
    ");
}

#[test]
fn the_key_of_a_frozen_corpus_never_changes() {
    let corpus = Arc::new(cargo_sources::Config { max_bytes: 64_000_000, path: None });
    let options = PrepareOptions::new(corpus, PathBuf::new(), "cargo-sources");
    // Another key would re-encode the text of every cache, and change the data of existing runs.
    assert!(key(&options, &tokenizer(), None).starts_with("1237c129c4c6288e"));
}

#[test]
fn an_interruption_says_how_to_continue() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, "out");
    let error = prepare(&options, &tokenizer(), &CancelAt(3, AtomicUsize::new(0))).unwrap_err();
    let message = error.to_string().replace(&dir.path().display().to_string(), "DIR");
    insta::assert_snapshot!(message, @r"
    interrupted after 27 documents
      hint: run the same command again to continue from DIR/out
    ");
}

#[test]
fn processes_that_prepare_the_same_cache_share_one_result() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir, "unused");
    let cache = dir.path().join("cache");
    std::thread::scope(|scope| {
        let open = || prepare_cached(options.clone(), &cache, &tokenizer(), &NoProgress).unwrap();
        let all: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
        let all: Vec<_> = all.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(all.iter().all(|result| *result == all[0]));
    });
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 1);
}

#[test]
fn of_one_text_file_the_end_is_held_out() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("book.txt");
    let paragraph = |n: usize| format!("paragraph {n}\n{}\n", "more of it\n".repeat(9));
    let book: String = (0..200).map(paragraph).collect();
    std::fs::write(&file, &book).unwrap();
    let options = PrepareOptions {
        validation_fraction: 0.1,
        ..PrepareOptions::new(text(file), dir.path().join("out"), "x")
    };
    let mut report = None;
    let lines = logged(|| report = Some(prepare(&options, &tokenizer(), &NoProgress).unwrap()));
    insta::assert_snapshot!(lines.join("\n"), @r"INFO the corpus is one text file: its last 2281 of 22692 tokens (10.05 %) are held out for validation");
    let manifest = report.unwrap().manifest;
    assert_eq!((manifest.train.documents, manifest.validation.documents), (1, 1));
    assert_eq!(manifest.bytes, book.len() as u64);
    let read = |name: &str| {
        let stream = TokenStream::new(vec![Shard::open(&options.out.join(name)).unwrap()]);
        let mut tokens = vec![0; stream.tokens() as usize];
        stream.read(0, &mut tokens).unwrap();
        assert_eq!(tokens.pop(), Some(256));
        String::from_utf8(tokens.into_iter().map(|token| token as u8).collect()).unwrap()
    };
    let (train, validation) = (read("x_train_000001.bin"), read("x_val_000000.bin"));
    assert_eq!([train, validation.clone()].concat(), book);
    assert!(validation.starts_with("paragraph 180\n"), "{}", &validation[..20]);

    // With 0, nothing is held out; in other folders, the key differs.
    let none = PrepareOptions {
        validation_fraction: 0.0,
        out: dir.path().join("none"),
        ..options.clone()
    };
    let lines = logged(|| {
        let report = prepare(&none, &tokenizer(), &NoProgress).unwrap();
        assert_eq!((report.manifest.train.documents, report.manifest.validation.tokens), (1, 0));
    });
    assert!(lines.is_empty(), "{lines:?}");
}

#[test]
fn holding_out_nothing_warns() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("few");
    std::fs::create_dir(&folder).unwrap();
    (0..3).for_each(|n| std::fs::write(folder.join(n.to_string()), format!("text {n}")).unwrap());
    let options = PrepareOptions {
        validation_fraction: 0.001,
        ..PrepareOptions::new(text(folder), dir.path().join("out"), "x")
    };
    let lines = logged(|| drop(prepare(&options, &tokenizer(), &NoProgress).unwrap()));
    insta::assert_snapshot!(lines.join("\n"), @r"WARN no text is held out for validation: none of 3 documents has a hash below the validation fraction of 0.001; give more documents, or a greater fraction");
}

/// As after a failure of the process that had the lock: its file and the folder are gone.
#[test]
fn a_lock_whose_file_was_removed_is_taken_again() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("shards");
    let first = Lock::take(&out).unwrap();
    let waiting = std::thread::spawn({
        let out = out.clone();
        move || Lock::take(&out).unwrap()
    });
    std::thread::sleep(Duration::from_millis(200));
    let Lock { path, _file } = first;
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_dir(&out).unwrap();
    drop(_file);
    let second = waiting.join().unwrap();
    assert!(File::open(&path).unwrap().try_lock().is_err(), "the lock is not that of the folder");
    second.release();
    assert!(!path.exists());
}
