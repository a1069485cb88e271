use super::*;

#[test]
fn missing_inputs_are_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    insta::assert_snapshot!(texts_message(&dir, &files(dir.path().join("none.txt"))), @r"
    text file DIR/none.txt does not exist
      hint: check the spelling; relative paths start at the folder the command runs in
    ");
    insta::assert_snapshot!(texts_message(&dir, &files(dir.path().join("*.txt"))), @r"
    no text file found in DIR/*.txt
      hint: check the spelling; relative paths start at the folder the command runs in
    ");
    insta::assert_snapshot!(texts_message(&dir, &files(dir.path().join("a***"))), @r#"
    "DIR/a***" is not a file pattern: wildcards are either regular `*` or recursive `**`
      hint: allowed are *, **, ? and [abc]; write [[] for a literal bracket
    "#);
    insta::assert_snapshot!(texts_message(&dir, &files(dir.path())), @r"
    no text file found in DIR
      hint: check the spelling; relative paths start at the folder the command runs in
    ");
}

#[test]
fn bad_lines_are_refused_with_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let bad = |line: &str| {
        let path = put(dir.path(), "a.jsonl", format!("{{\"text\": \"fine\"}}\n{line}\n"));
        texts_message(&dir, &files(path))
    };
    insta::assert_snapshot!(bad("{\"text\": \"cut"), @r"
    DIR/a.jsonl:2: not valid JSON at column 13: EOF while parsing a string
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
    let dir = tempfile::tempdir().unwrap();
    let text: Vec<u8> = (0..100_000u32).flat_map(|n| n.to_string().into_bytes()).collect();
    let cut = |mut bytes: Vec<u8>| {
        bytes.truncate(bytes.len() / 2);
        bytes
    };
    let gz = put(dir.path(), "a.txt.gz", cut(gzip(&text)));
    insta::assert_snapshot!(texts_message(&dir, &files(gz)), @r"
    cannot decompress DIR/a.txt.gz as gzip: incomplete deflate stream
      hint: the file is damaged, cut short, or not gzip; fetch it again, or correct its extension
    ");
    let not_gz = put(dir.path(), "b.jsonl.gz", "{\"text\": \"plain\"}");
    insta::assert_snapshot!(texts_message(&dir, &files(not_gz)), @r"
    cannot decompress DIR/b.jsonl.gz as gzip: invalid gzip header
      hint: the file is damaged, cut short, or not gzip; fetch it again, or correct its extension
    ");
    let zst = put(dir.path(), "c.txt.zst", cut(zstd::encode_all(&text[..], 1).unwrap()));
    insta::assert_snapshot!(texts_message(&dir, &files(zst)), @r"
    cannot decompress DIR/c.txt.zst as zstd: incomplete frame
      hint: the file is damaged, cut short, or not zstd; fetch it again, or correct its extension
    ");
    let not_zst = put(dir.path(), "d.zst", "plain");
    insta::assert_snapshot!(texts_message(&dir, &files(not_zst)), @r"
    cannot decompress DIR/d.zst as zstd: Unknown frame descriptor
      hint: the file is damaged, cut short, or not zstd; fetch it again, or correct its extension
    ");
}

#[test]
fn unusable_parquet_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = parquet_file(&dir, "a.parquet");
    let with = |field: &str| Config { text_field: field.into(), ..files(&path) };
    insta::assert_snapshot!(texts_message(&dir, &with("body")), @r#"
    DIR/a.parquet has no text column "body": its columns are id, text
      hint: set text_field (--text-field) to the column that holds the text
    "#);
    insta::assert_snapshot!(texts_message(&dir, &with("id")), @r#"
    DIR/a.parquet has no text column "id": that column holds INT64, not one text per row
      hint: set text_field (--text-field) to the column that holds the text
    "#);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(bytes.len() - 9);
    let cut = put(dir.path(), "cut.parquet", bytes);
    insta::assert_snapshot!(texts_message(&dir, &files(cut)), @r"
    cannot read DIR/cut.parquet as Parquet: Parquet error: Invalid Parquet file. Corrupt footer
      hint: the file is damaged, cut short, or not Parquet; fetch it again, or correct its extension
    ");
    let compressed = put(dir.path(), "b.parquet.gz", "");
    insta::assert_snapshot!(texts_message(&dir, &files(compressed)), @r"
    cannot read DIR/b.parquet.gz as Parquet: Parquet files are compressed inside; decompress it first
      hint: the file is damaged, cut short, or not Parquet; fetch it again, or correct its extension
    ");
}

#[test]
fn a_named_binary_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = put(dir.path(), "a.txt", b"\x7fELF\0\0");
    insta::assert_snapshot!(texts_message(&dir, &files(path)), @r"
    DIR/a.txt is not text: it holds a NUL byte
      hint: give text, JSONL (.jsonl) or Parquet (.parquet), plain or compressed (.gz, .zst)
    ");
}
