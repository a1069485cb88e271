mod cargo;
mod errors;

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
        ids.typed::<Int64Type>().write_batch(&[1, 2, 3], None, None).unwrap();
        ids.close().unwrap();
        let mut texts = rows.next_column().unwrap().unwrap();
        let values = [format!("first {group}"), format!("third {group}")];
        let values = values.map(|text| ByteArray::from(text.into_bytes()));
        texts.typed::<ByteArrayType>().write_batch(&values, Some(&[1, 0, 1]), None).unwrap();
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
    read(&inputs, start, &ReadBytes::default(), &mut |document, next| {
        match document.text(&inputs) {
            Ok(Outcome::Document(text)) => texts.push((text.text, next)),
            Ok(Outcome::Empty) => texts.push(("-".into(), next)),
            Ok(Outcome::Binary) => texts.push(("#".into(), next)),
            Err(error) => failure = Err(error),
        }
        failure.is_ok()
    })?;
    failure.map(|()| texts)
}

fn texts(corpus: &Corpus) -> Result<Vec<String>, DataError> {
    Ok(texts_from(corpus, Position::default())?.into_iter().map(|(text, _)| text).collect())
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
        assert_eq!(texts(&files(put(&dir, name, content))).unwrap(), ["one", "two"], "{name}");
    }
    for (name, content) in [
        ("a.txt", b"one\ntwo\n".to_vec()),
        ("b.md.gz", [gzip(b"one\n"), gzip(b"two\n")].concat()),
        ("c.zst", zstd::encode_all(&b"one\ntwo\n"[..], 1).unwrap()),
    ] {
        assert_eq!(texts(&files(put(&dir, name, content))).unwrap(), ["one\ntwo\n"], "{name}");
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
    assert_eq!(texts(&separated(&plain, "<|endoftext|>")).unwrap(), expected);
    let compressed = put(&dir, "a.txt.gz", gzip(content.as_bytes()));
    assert_eq!(texts(&separated(&compressed, "<|endoftext|>")).unwrap(), expected);
    let paragraphs = put(&dir, "b.txt", "a\n\nb\n\n\nc");
    assert_eq!(texts(&separated(&paragraphs, "\n\n")).unwrap(), ["a", "b", "\nc"]);
}

#[test]
fn folders_are_read_in_the_order_of_their_paths_without_hidden_and_binary_files() {
    let dir = folder();
    for (name, content) in [("b/2.txt", "b2"), ("b/1.txt", "b1"), ("a.txt", "a"), (".hidden", "h")]
    {
        put(&dir, name, content);
    }
    put(&dir, "c.bin", b"\0\x01");
    put(&dir, ".git/config", "no");
    assert_eq!(texts(&files(dir.path())).unwrap(), ["a", "b1", "b2", "#"]);
    assert_eq!(texts(&files(dir.path().join("**/*.txt"))).unwrap(), ["a", "b1", "b2"]);
    let twice = Corpus::files(vec![dir.path().join("b/2.txt"), dir.path().join("b")]);
    assert_eq!(texts(&twice).unwrap(), ["b2", "b1"]);
}

#[test]
fn reading_continues_behind_any_document() {
    let dir = folder();
    put(&dir, "a.jsonl", "{\"text\":\"1\"}\n{\"text\":\"2\"}\n{\"text\":\"3\"}\n");
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
fn a_byte_order_mark_is_no_text() {
    let dir = folder();
    let lines = put(&dir, "a.jsonl", "\u{feff}{\"text\": \"one\"}\n");
    assert_eq!(texts(&files(lines)).unwrap(), ["one"]);
    assert_eq!(texts(&files(put(&dir, "a.txt", "\u{feff}one"))).unwrap(), ["one"]);
}

#[test]
fn invalid_utf8_is_replaced_and_reported() {
    let dir = folder();
    let path = put(&dir, "latin1.txt", b"caf\xe9");
    let inputs = files(path).open().unwrap();
    let document = Document { input: 0, line: 0, payload: document::Payload::File, group: None };
    let Outcome::Document(text) = document.text(&inputs).unwrap() else { panic!("no document") };
    assert_eq!((text.text.as_str(), text.replaced), ("caf\u{fffd}", true));
}
