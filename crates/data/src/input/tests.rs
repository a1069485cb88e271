use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use ::parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use tempfile::TempDir;

use super::*;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn put(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, content).unwrap();
    path
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// Two row groups; the middle text of each is missing.
fn parquet_file(folder: &TempDir, name: &str) -> PathBuf {
    let path = folder.path().join(name);
    let schema = "message m { required int64 id; optional binary text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::default());
    let mut writer =
        SerializedFileWriter::new(File::create(&path).unwrap(), schema, properties).unwrap();
    for group in 0..2 {
        let mut rows = writer.next_row_group().unwrap();
        let mut ids = rows.next_column().unwrap().unwrap();
        ids.typed::<Int64Type>()
            .write_batch(&[1, 2, 3], None, None)
            .unwrap();
        ids.close().unwrap();
        let mut texts = rows.next_column().unwrap().unwrap();
        let values = [format!("first {group}"), format!("third {group}")];
        let values = values.map(|text| ByteArray::from(text.into_bytes()));
        texts
            .typed::<ByteArrayType>()
            .write_batch(&values, Some(&[1, 0, 1]), None)
            .unwrap();
        texts.close().unwrap();
        rows.close().unwrap();
    }
    writer.close().unwrap();
    path
}

/// The texts of a corpus from `start` on; `-` for an empty document, `#` for a binary file.
fn texts_from(corpus: &Corpus, start: Position) -> Result<Vec<(String, Position)>, DataError> {
    let inputs = corpus.open()?;
    let mut texts = Vec::new();
    let mut failure = Ok(());
    read(
        &inputs,
        start,
        &ReadBytes::default(),
        &mut |document, next| {
            match document.text(&inputs) {
                Ok(Outcome::Document(text)) => texts.push((text.text, next)),
                Ok(Outcome::Empty) => texts.push(("-".into(), next)),
                Ok(Outcome::Binary) => texts.push(("#".into(), next)),
                Err(error) => failure = Err(error),
            }
            failure.is_ok()
        },
    )?;
    failure.map(|()| texts)
}

fn texts(corpus: &Corpus) -> Result<Vec<String>, DataError> {
    Ok(texts_from(corpus, Position::default())?
        .into_iter()
        .map(|(text, _)| text)
        .collect())
}

fn files(path: impl AsRef<Path>) -> Corpus {
    Corpus::files(vec![path.as_ref().to_path_buf()])
}

fn separated(path: &Path, by: &str) -> Corpus {
    Corpus::Files {
        paths: vec![path.to_path_buf()],
        text_field: "text".into(),
        separator: Some(by.into()),
    }
}

fn message(folder: &TempDir, corpus: &Corpus) -> String {
    let text = texts(corpus).unwrap_err().to_string();
    text.replace(&folder.path().display().to_string(), "DIR")
}

#[test]
fn every_format_is_read_plain_and_compressed() {
    let lines = b"{\"text\": \"one\", \"id\": 1}\n\n{\"id\": 2, \"text\": \"two\"}\n";
    let dir = folder();
    for (name, content) in [
        ("a.jsonl", lines.to_vec()),
        ("b.jsonl.gz", gzip(lines)),
        ("c.ndjson.zst", zstd::encode_all(&lines[..], 1).unwrap()),
        ("d.json", lines.to_vec()),
    ] {
        assert_eq!(
            texts(&files(put(&dir, name, content))).unwrap(),
            ["one", "two"],
            "{name}"
        );
    }
    for (name, content) in [
        ("a.txt", b"one\ntwo\n".to_vec()),
        ("b.md.gz", [gzip(b"one\n"), gzip(b"two\n")].concat()),
        ("c.zst", zstd::encode_all(&b"one\ntwo\n"[..], 1).unwrap()),
    ] {
        assert_eq!(
            texts(&files(put(&dir, name, content))).unwrap(),
            ["one\ntwo\n"],
            "{name}"
        );
    }
    let parquet = parquet_file(&dir, "e.parquet");
    let expected = ["first 0", "-", "third 0", "first 1", "-", "third 1"];
    assert_eq!(texts(&files(parquet)).unwrap(), expected);
}

#[test]
fn a_separator_cuts_plain_text() {
    let dir = folder();
    let content = "one<|endoftext|>two\n<|endoftext|><|endoftext|>>three";
    let expected = ["one", "two\n", "-", ">three"];
    let plain = put(&dir, "a.txt", content);
    assert_eq!(
        texts(&separated(&plain, "<|endoftext|>")).unwrap(),
        expected
    );
    let compressed = put(&dir, "a.txt.gz", gzip(content.as_bytes()));
    assert_eq!(
        texts(&separated(&compressed, "<|endoftext|>")).unwrap(),
        expected
    );
    let paragraphs = put(&dir, "b.txt", "a\n\nb\n\n\nc");
    assert_eq!(
        texts(&separated(&paragraphs, "\n\n")).unwrap(),
        ["a", "b", "\nc"]
    );
}

#[test]
fn folders_are_read_in_the_order_of_their_paths_without_hidden_and_binary_files() {
    let dir = folder();
    for (name, content) in [
        ("b/2.txt", "b2"),
        ("b/1.txt", "b1"),
        ("a.txt", "a"),
        (".hidden", "h"),
    ] {
        put(&dir, name, content);
    }
    put(&dir, "c.bin", b"\0\x01");
    put(&dir, ".git/config", "no");
    assert_eq!(texts(&files(dir.path())).unwrap(), ["a", "b1", "b2", "#"]);
    assert_eq!(
        texts(&files(dir.path().join("**/*.txt"))).unwrap(),
        ["a", "b1", "b2"]
    );
    let twice = Corpus::files(vec![dir.path().join("b/2.txt"), dir.path().join("b")]);
    assert_eq!(texts(&twice).unwrap(), ["b2", "b1"]);
}

#[test]
fn reading_continues_behind_any_document() {
    let dir = folder();
    put(
        &dir,
        "a.jsonl",
        "{\"text\":\"1\"}\n{\"text\":\"2\"}\n{\"text\":\"3\"}\n",
    );
    put(&dir, "b.txt", "4");
    parquet_file(&dir, "c.parquet");
    put(&dir, "d.txt.gz", gzip(b"5"));
    let corpus = files(dir.path());
    let all = texts_from(&corpus, Position::default()).unwrap();
    assert_eq!(all.len(), 11);
    for (at, (_, behind)) in all.iter().enumerate() {
        assert_eq!(texts_from(&corpus, *behind).unwrap(), all[at + 1..]);
    }
}

#[test]
fn invalid_utf8_is_replaced_and_reported() {
    let dir = folder();
    let path = put(&dir, "latin1.txt", b"caf\xe9");
    let inputs = files(path).open().unwrap();
    let document = Document {
        input: 0,
        line: 0,
        payload: document::Payload::File,
        group: None,
    };
    let Outcome::Document(text) = document.text(&inputs).unwrap() else {
        panic!("no document")
    };
    assert_eq!((text.text.as_str(), text.replaced), ("caf\u{fffd}", true));
}

#[test]
fn missing_inputs_are_refused_with_a_remedy() {
    let dir = folder();
    insta::assert_snapshot!(message(&dir, &files(dir.path().join("none.txt"))), @r"
    text file DIR/none.txt does not exist
      hint: check the spelling; relative paths start at the folder the command runs in
    ");
    insta::assert_snapshot!(message(&dir, &files(dir.path().join("*.txt"))), @r"
    no text file found in DIR/*.txt
      hint: check the spelling; relative paths start at the folder the command runs in
    ");
    insta::assert_snapshot!(message(&dir, &files(dir.path().join("a***"))), @r#"
    "DIR/a***" is not a file pattern: wildcards are either regular `*` or recursive `**`
      hint: allowed are *, **, ? and [abc]; write [[] for a literal bracket
    "#);
    insta::assert_snapshot!(message(&dir, &files(dir.path())), @r"
    no text file found in DIR
      hint: check the spelling; relative paths start at the folder the command runs in
    ");
}

#[test]
fn bad_lines_are_refused_with_file_and_line() {
    let dir = folder();
    let bad = |line: &str| {
        let path = put(&dir, "a.jsonl", format!("{{\"text\": \"fine\"}}\n{line}\n"));
        message(&dir, &files(path))
    };
    insta::assert_snapshot!(bad("{\"text\": \"cut"), @r"
    DIR/a.jsonl:2: the line is not valid JSON: control character (\u0000-\u001F) found while parsing a string at line 2 column 0
      hint: every line must hold one JSON object; rename the file to .txt if it is plain text
    ");
    insta::assert_snapshot!(bad("[1, 2]"), @r"
    DIR/a.jsonl:2: the line is JSON, but no object
      hint: every line must hold one JSON object
    ");
    insta::assert_snapshot!(bad("{\"body\": \"a\", \"id\": 3}"), @r#"
    DIR/a.jsonl:2: the record has no field "text"; it has body, id
      hint: set text_field (--text-field) to the field that holds the text
    "#);
    insta::assert_snapshot!(bad("{\"text\": [\"a\"]}"), @r#"
    DIR/a.jsonl:2: "text" is ["a"], not a text
      hint: set text_field (--text-field) to the field that holds the text
    "#);
}

#[test]
fn damaged_compression_is_refused_with_a_remedy() {
    let dir = folder();
    let text: Vec<u8> = (0..100_000u32)
        .flat_map(|n| n.to_string().into_bytes())
        .collect();
    let cut = |mut bytes: Vec<u8>| {
        bytes.truncate(bytes.len() / 2);
        bytes
    };
    let gz = put(&dir, "a.txt.gz", cut(gzip(&text)));
    insta::assert_snapshot!(message(&dir, &files(gz)), @r"
    cannot decompress DIR/a.txt.gz as gzip: incomplete deflate stream
      hint: the file is damaged, cut short, or not gzip; fetch it again, or correct its extension
    ");
    let not_gz = put(&dir, "b.jsonl.gz", "{\"text\": \"plain\"}");
    insta::assert_snapshot!(message(&dir, &files(not_gz)), @r"
    cannot decompress DIR/b.jsonl.gz as gzip: invalid gzip header
      hint: the file is damaged, cut short, or not gzip; fetch it again, or correct its extension
    ");
    let zst = put(
        &dir,
        "c.txt.zst",
        cut(zstd::encode_all(&text[..], 1).unwrap()),
    );
    insta::assert_snapshot!(message(&dir, &files(zst)), @r"
    cannot decompress DIR/c.txt.zst as zstd: incomplete frame
      hint: the file is damaged, cut short, or not zstd; fetch it again, or correct its extension
    ");
    let not_zst = put(&dir, "d.zst", "plain");
    insta::assert_snapshot!(message(&dir, &files(not_zst)), @r"
    cannot decompress DIR/d.zst as zstd: Unknown frame descriptor
      hint: the file is damaged, cut short, or not zstd; fetch it again, or correct its extension
    ");
}

#[test]
fn unusable_parquet_is_refused_with_a_remedy() {
    let dir = folder();
    let path = parquet_file(&dir, "a.parquet");
    let with = |field: &str| Corpus::Files {
        paths: vec![path.clone()],
        text_field: field.into(),
        separator: None,
    };
    insta::assert_snapshot!(message(&dir, &with("body")), @r#"
    DIR/a.parquet has no text column "body": its columns are id, text
      hint: set text_field (--text-field) to the column that holds the text
    "#);
    insta::assert_snapshot!(message(&dir, &with("id")), @r#"
    DIR/a.parquet has no text column "id": that column holds INT64, not one text a row
      hint: set text_field (--text-field) to the column that holds the text
    "#);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(bytes.len() - 9);
    let cut = put(&dir, "cut.parquet", bytes);
    insta::assert_snapshot!(message(&dir, &files(cut)), @r"
    cannot read DIR/cut.parquet as Parquet: Parquet error: Invalid Parquet file. Corrupt footer
      hint: the file is damaged, cut short, or not Parquet; fetch it again, or correct its extension
    ");
    let compressed = put(&dir, "b.parquet.gz", "");
    insta::assert_snapshot!(message(&dir, &files(compressed)), @r"
    cannot read DIR/b.parquet.gz as Parquet: Parquet files are compressed inside; decompress it first
      hint: the file is damaged, cut short, or not Parquet; fetch it again, or correct its extension
    ");
}

#[test]
fn a_named_binary_file_is_refused() {
    let dir = folder();
    let path = put(&dir, "a.txt", b"\x7fELF\0\0");
    insta::assert_snapshot!(message(&dir, &files(path)), @r"
    DIR/a.txt is not text: it holds a NUL byte
      hint: give text, JSONL (.jsonl) or Parquet (.parquet), plain or compressed (.gz, .zst)
    ");
}

fn registry(dir: &TempDir) -> Corpus {
    for (name, content) in [
        ("index-0a1b/one-1.0.0/src/lib.rs", "fn one() {}".to_string()),
        ("index-0a1b/one-1.0.1/src/lib.rs", "fn one() {}".to_string()),
        (
            "index-0a1b/two-rs-0.2.0-rc.1/src/lib.rs",
            "fn two() {}".to_string(),
        ),
        (
            "index-0a1b/two-rs-0.2.0-rc.1/README.md",
            "no Rust".to_string(),
        ),
        (
            "index-0a1b/long-3.0.0/src/table.rs",
            format!("const T: &str = \"{}\";", "x".repeat(2000)),
        ),
        (
            "index-0a1b/made-3.0.0/src/lib.rs",
            "// @generated\nfn made() {}".to_string(),
        ),
        (
            "index-0a1b/great-3.0.0/src/lib.rs",
            "fn great() {}\n".repeat(30_000),
        ),
        (
            "index-0a1b/three-4.0.0/src/lib.rs",
            "fn three() {}".to_string(),
        ),
    ] {
        put(dir, name, content);
    }
    put(dir, "index-0a1b/one-1.0.0/src/latin1.rs", b"// caf\xe9");
    Corpus::CargoSources {
        max_bytes: 1_000_000,
        path: Some(dir.path().to_path_buf()),
    }
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
    std::fs::rename(
        other.path().join("index-0a1b"),
        other.path().join("mirror-77"),
    )
    .unwrap();
    let corpus = Corpus::CargoSources {
        max_bytes: 1_000_000,
        path: Some(other.path().into()),
    };
    assert_eq!(texts(&corpus).unwrap(), order);

    let limited = Corpus::CargoSources {
        max_bytes: 24,
        path: Some(dir.path().into()),
    };
    assert_eq!(
        texts(&limited).unwrap(),
        order[..texts(&limited).unwrap().len()]
    );
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
        (
            "index.crates.io-1949cf8c6b5b557f/serde-1.0.200/src/lib.rs",
            "serde",
        ),
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
    let at = |path: &str| Corpus::CargoSources {
        max_bytes: 1,
        path: Some(dir.path().join(path)),
    };
    insta::assert_snapshot!(message(&dir, &at("none")), @r#"
    cargo's registry folder DIR/none does not exist
      hint: build Longwall once on this machine, set CARGO_HOME or the source's `path`, or use kind = "text"
    "#);
    insta::assert_snapshot!(message(&dir, &at("")), @r#"
    no Rust source found in DIR/
      hint: set the source's `path` to cargo's registry/src folder, or use kind = "text"
    "#);
}
