use tempfile::TempDir;

use super::*;
use crate::corpus::Position;
use crate::sources::testing::{Example, put, texts, texts_from, texts_message};

impl Example for Config {
    fn example(folder: &Path) -> Self {
        for n in 0..60 {
            let name = format!("index-0a1b/crate{n}-1.0.0/src/lib.rs");
            put(folder, &name, format!("fn number_{n}() {{}}\n").repeat(40));
        }
        Config { max_bytes: 50_000, path: Some(folder.to_path_buf()) }
    }
}

fn at(path: impl Into<PathBuf>, max_bytes: u64) -> Config {
    Config { max_bytes, path: Some(path.into()) }
}

/// A registry folder with files to read and files to skip.
fn registry(dir: &TempDir) -> Config {
    for (name, content) in [
        ("index-0a1b/one-1.0.0/src/lib.rs", "fn one() {}".to_string()),
        ("index-0a1b/one-1.0.1/src/lib.rs", "fn one() {}".to_string()),
        ("index-0a1b/two-rs-0.2.0-rc.1/src/lib.rs", "fn two() {}".to_string()),
        ("index-0a1b/two-rs-0.2.0-rc.1/README.md", "no Rust".to_string()),
        (
            "index-0a1b/long-3.0.0/src/table.rs",
            format!("const T: &str = \"{}\";", "x".repeat(2000)),
        ),
        ("index-0a1b/made-3.0.0/src/lib.rs", "// @generated\nfn made() {}".to_string()),
        ("index-0a1b/great-3.0.0/src/lib.rs", "fn great() {}\n".repeat(30_000)),
        ("index-0a1b/three-4.0.0/src/lib.rs", "fn three() {}".to_string()),
    ] {
        put(dir.path(), name, content);
    }
    put(dir.path(), "index-0a1b/one-1.0.0/src/latin1.rs", b"// caf\xe9");
    at(dir.path(), 1_000_000)
}

#[test]
fn cargo_sources_leave_out_copies_and_what_nobody_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let mut found = texts(&registry(&dir)).unwrap();
    let order = found.clone();
    found.sort();
    assert_eq!(found, ["fn one() {}", "fn three() {}", "fn two() {}"]);

    // The same crates below another index: the same order.
    let other = tempfile::tempdir().unwrap();
    registry(&other);
    std::fs::rename(other.path().join("index-0a1b"), other.path().join("mirror-77")).unwrap();
    assert_eq!(texts(&at(other.path(), 1_000_000)).unwrap(), order);

    let limited = at(dir.path(), 24);
    assert_eq!(texts(&limited).unwrap(), order[..texts(&limited).unwrap().len()]);
    assert!(texts(&limited).unwrap().len() < 3);
}

#[test]
fn cargo_sources_continue_behind_any_document() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = registry(&dir);
    let all = texts_from(&corpus, Position::default()).unwrap();
    for (at, (_, behind)) in all.iter().enumerate() {
        assert_eq!(texts_from(&corpus, *behind).unwrap(), all[at + 1..]);
    }
}

#[test]
fn crates_are_named_without_their_version() {
    for (path, name) in [
        ("mirror.example-1949cf8c6b5b557f/serde-1.0.200/src/lib.rs", "serde"),
        ("index-0a1b/windows-sys-0.52.0/src/lib.rs", "windows-sys"),
        ("index-0a1b/two-rs-0.2.0-rc.1/tests/x-1.0.0/a.rs", "two-rs"),
        ("index-0a1b/box-2d-0.1.0/src/lib.rs", "box-2d"),
        ("elsewhere/lib.rs", ""),
    ] {
        assert_eq!(crate_name(Path::new(path)), name);
    }
}

#[test]
fn a_missing_registry_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| at(dir.path().join(path), 1);
    insta::assert_snapshot!(texts_message(&dir, &at("none")), @r#"
    cargo's registry folder DIR/none does not exist
      hint: build Longwall once on this machine, set CARGO_HOME or the source's `path`, or use kind = "text"
    "#);
    insta::assert_snapshot!(texts_message(&dir, &at("")), @r#"
    no Rust source found in DIR/
      hint: set the source's `path` to cargo's registry/src folder, or use kind = "text"
    "#);
}
