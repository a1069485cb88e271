use super::*;
use crate::input::cargo;

fn registry(dir: &TempDir) -> Corpus {
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
        put(dir, name, content);
    }
    put(dir, "index-0a1b/one-1.0.0/src/latin1.rs", b"// caf\xe9");
    Corpus::CargoSources { max_bytes: 1_000_000, path: Some(dir.path().to_path_buf()) }
}

#[test]
fn cargo_sources_leave_out_copies_and_what_nobody_wrote() {
    let dir = folder();
    let mut found = texts(&registry(&dir)).unwrap();
    let order = found.clone();
    found.sort();
    assert_eq!(found, ["fn one() {}", "fn three() {}", "fn two() {}"]);

    // The same crates below another index: the order stays.
    let other = folder();
    registry(&other);
    std::fs::rename(other.path().join("index-0a1b"), other.path().join("mirror-77")).unwrap();
    let corpus = Corpus::CargoSources { max_bytes: 1_000_000, path: Some(other.path().into()) };
    assert_eq!(texts(&corpus).unwrap(), order);

    let limited = Corpus::CargoSources { max_bytes: 24, path: Some(dir.path().into()) };
    assert_eq!(texts(&limited).unwrap(), order[..texts(&limited).unwrap().len()]);
    assert!(texts(&limited).unwrap().len() < 3);
}

#[test]
fn cargo_sources_continue_behind_any_document() {
    let dir = folder();
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
        assert_eq!(cargo::crate_name(Path::new(path)), name);
    }
}

#[test]
fn a_missing_registry_is_refused_with_a_remedy() {
    let dir = folder();
    let at = |path: &str| Corpus::CargoSources { max_bytes: 1, path: Some(dir.path().join(path)) };
    insta::assert_snapshot!(message(&dir, &at("none")), @r#"
    cargo's registry folder DIR/none does not exist
      hint: build Longwall once on this machine, set CARGO_HOME or the source's `path`, or use kind = "text"
    "#);
    insta::assert_snapshot!(message(&dir, &at("")), @r#"
    no Rust source found in DIR/
      hint: set the source's `path` to cargo's registry/src folder, or use kind = "text"
    "#);
}
