//! Input that is damaged or far too large.

use super::*;
use crate::DataError;

/// Reads documents of at most 1000 bytes.
#[derive(Debug)]
struct Small(Config);

impl Corpus for Small {
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn settings(&self) -> String {
        self.0.settings()
    }

    fn find(&self) -> Result<Inputs, DataError> {
        self.0.find()
    }

    fn read(&self, inputs: &Inputs, sink: &mut Sink) -> Result<(), Stop> {
        self.0.read_at_most(1000, inputs, sink)
    }
}

#[test]
fn documents_up_to_the_limit_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let text = "x".repeat(1000);
    let line = format!("{{\"text\": \"{}\"}}", "x".repeat(1000 - 13));
    assert_eq!(line.len(), 1000 - 1);
    for (name, content) in [
        ("a.txt", text.clone().into_bytes()),
        ("b.txt.gz", gzip(text.as_bytes())),
        ("c.zst", zstd::encode_all(text.as_bytes(), 1).unwrap()),
        ("d.jsonl.gz", gzip(format!("{line}\n{line}\n").as_bytes())),
    ] {
        let found = texts(&Small(files(put(dir.path(), name, content)))).unwrap();
        assert!(found.iter().all(|text| text.len() >= 987), "{name}");
    }
    let parts = put(dir.path(), "e.txt", format!("{0}--{0}", "x".repeat(998)));
    assert_eq!(texts(&Small(separated(&parts, "--"))).unwrap().len(), 2);
}

#[test]
fn a_document_that_is_too_large_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    // A few kilobytes that inflate to 20 MB.
    let bomb = vec![b'x'; 20_000_000];
    let small = |name: &str, content: Vec<u8>| {
        texts_message(&dir, &Small(files(put(dir.path(), name, content))))
    };
    insta::assert_snapshot!(small("a.txt.gz", gzip(&bomb)), @r"
    DIR/a.txt.gz holds a document of more than 1000 bytes; allowed: at most 1000
      hint: split the file, or set separator (--separator) to the text that stands between its documents
    ");
    insta::assert_snapshot!(small("b.jsonl.zst", zstd::encode_all(&bomb[..], 1).unwrap()), @r"
    DIR/b.jsonl.zst holds a document of more than 1000 bytes; allowed: at most 1000
      hint: split the text of that line into several lines
    ");
    insta::assert_snapshot!(small("c.txt", bomb[..1001].to_vec()), @r"
    DIR/c.txt holds a document of 1001 bytes; allowed: at most 1000
      hint: split the file, or set separator (--separator) to the text that stands between its documents
    ");
    let parts = put(dir.path(), "d.txt.gz", gzip(&bomb));
    insta::assert_snapshot!(texts_message(&dir, &Small(separated(&parts, "--"))), @r"
    DIR/d.txt.gz holds a document of more than 1000 bytes; allowed: at most 1000
      hint: split the file, or set separator (--separator) to the text that stands between its documents
    ");
    let path = dir.path().join("e.parquet");
    write_parquet(&path, &["short".into(), "x".repeat(1001)]);
    insta::assert_snapshot!(texts_message(&dir, &Small(files(path))), @r"
    DIR/e.parquet holds a document of 1001 bytes; allowed: at most 1000
      hint: split the text of that row into several rows
    ");
}

#[test]
fn the_limit_is_a_gibibyte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse.txt");
    File::create(&path).unwrap().set_len((1 << 30) + 1).unwrap();
    insta::assert_snapshot!(texts_message(&dir, &files(&path)), @r"
    DIR/sparse.txt holds a document of 1073741825 bytes; allowed: at most 1073741824
      hint: split the file, or set separator (--separator) to the text that stands between its documents
    ");
}

/// Texts with a dictionary, in one row group.
fn write_parquet(path: &Path, texts: &[String]) {
    let schema =
        Arc::new(parse_message_type("message m { required binary text (UTF8); }").unwrap());
    let properties = Arc::new(WriterProperties::default());
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
    let mut rows = writer.next_row_group().unwrap();
    let mut column = rows.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = texts.iter().map(|text| text.as_str().into()).collect();
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    rows.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn a_parquet_file_with_any_flipped_bit_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = parquet_file(&dir, "a.parquet");
    let good = std::fs::read(&path).unwrap();
    let (mut read, mut refused, mut caught) = (0, 0, 0);
    for bit in 0..8 * good.len() {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, bytes).unwrap();
        match texts(&files(&path)) {
            Ok(texts) => {
                assert!(texts.len() <= 1 << 16);
                read += 1;
            }
            Err(error) => {
                let message = error.to_string();
                assert!(message.contains("a.parquet"), "{message}");
                refused += 1;
                caught += usize::from(message.contains("the decoder failed"));
            }
        }
    }
    assert!(read > 0 && refused > 0, "{read} read, {refused} refused");
    assert!(caught > 0, "no flipped bit makes the decoder panic");
}
