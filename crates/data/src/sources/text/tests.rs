mod damage;
mod errors;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use ::parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use tempfile::TempDir;

use super::*;
use crate::corpus::{Decoded, Document, Position};
use crate::sources::testing::{Example, put, texts, texts_from, texts_message};

impl Example for Config {
    fn example(folder: &Path) -> Self {
        for n in 0..60 {
            put(folder, &format!("text/{n}.txt"), format!("document {n} ").repeat(40));
        }
        Config::new(vec![folder.join("text")])
    }
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

fn files(path: impl AsRef<Path>) -> Config {
    Config::new(vec![path.as_ref().to_path_buf()])
}

fn separated(path: &Path, by: &str) -> Config {
    Config { separator: Some(by.into()), ..files(path) }
}

#[test]
fn every_format_is_read_plain_and_compressed() {
    let lines = b"{\"text\": \"one\", \"id\": 1}\n\n{\"id\": 2, \"text\": \"two\"}\n";
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in [
        ("a.jsonl", lines.to_vec()),
        ("b.jsonl.gz", gzip(lines)),
        ("c.ndjson.zst", zstd::encode_all(&lines[..], 1).unwrap()),
        ("d.json", lines.to_vec()),
    ] {
        assert_eq!(
            texts(&files(put(dir.path(), name, content))).unwrap(),
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
            texts(&files(put(dir.path(), name, content))).unwrap(),
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
    let dir = tempfile::tempdir().unwrap();
    let content = "one<|endoftext|>two\n<|endoftext|><|endoftext|>>three";
    let expected = ["one", "two\n", "-", ">three"];
    let plain = put(dir.path(), "a.txt", content);
    assert_eq!(texts(&separated(&plain, "<|endoftext|>")).unwrap(), expected);
    let compressed = put(dir.path(), "a.txt.gz", gzip(content.as_bytes()));
    assert_eq!(texts(&separated(&compressed, "<|endoftext|>")).unwrap(), expected);
    let paragraphs = put(dir.path(), "b.txt", "a\n\nb\n\n\nc");
    assert_eq!(texts(&separated(&paragraphs, "\n\n")).unwrap(), ["a", "b", "\nc"]);
}

#[test]
fn folders_are_read_in_the_order_of_their_paths_without_hidden_and_binary_files() {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in [("b/2.txt", "b2"), ("b/1.txt", "b1"), ("a.txt", "a"), (".hidden", "h")]
    {
        put(dir.path(), name, content);
    }
    put(dir.path(), "c.bin", b"\0\x01");
    put(dir.path(), ".git/config", "no");
    assert_eq!(texts(&files(dir.path())).unwrap(), ["a", "b1", "b2", "#"]);
    assert_eq!(texts(&files(dir.path().join("**/*.txt"))).unwrap(), ["a", "b1", "b2"]);
    let twice = Config::new(vec![dir.path().join("b/2.txt"), dir.path().join("b")]);
    assert_eq!(texts(&twice).unwrap(), ["b2", "b1"]);
}

#[test]
fn reading_continues_behind_any_document() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "a.jsonl", "{\"text\":\"1\"}\n{\"text\":\"2\"}\n{\"text\":\"3\"}\n");
    put(dir.path(), "b.txt", "4");
    parquet_file(&dir, "c.parquet");
    put(dir.path(), "d.txt.gz", gzip(b"5"));
    let corpus = files(dir.path());
    let all = texts_from(&corpus, Position::default()).unwrap();
    assert_eq!(all.len(), 11);
    for (at, (_, behind)) in all.iter().enumerate() {
        assert_eq!(texts_from(&corpus, *behind).unwrap(), all[at + 1..]);
    }
}

#[test]
fn a_byte_order_mark_is_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let lines = put(dir.path(), "a.jsonl", "\u{feff}{\"text\": \"one\"}\n");
    assert_eq!(texts(&files(lines)).unwrap(), ["one"]);
    assert_eq!(texts(&files(put(dir.path(), "a.txt", "\u{feff}one"))).unwrap(), ["one"]);
}

#[test]
fn invalid_utf8_is_replaced_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = put(dir.path(), "latin1.txt", b"caf\xe9");
    let inputs = files(path).find().unwrap();
    let document = Document { input: 0, payload: Payload::File, group: None };
    let Decoded::Document(text) = document.text(&inputs).unwrap() else { panic!("no document") };
    assert_eq!((text.text.as_str(), text.replaced), ("caf\u{fffd}", true));
}
