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

#[test]
fn hidden_files_are_mentioned_when_nothing_else_is_found() {
    let dir = tempfile::tempdir().unwrap();
    for name in [".a.txt", ".git/config", ".hidden/b.txt", "empty/.c.txt"] {
        put(dir.path(), name, "text");
    }
    insta::assert_snapshot!(texts_message(&dir, &files(dir.path())), @r"
    no text file found in DIR
      hint: hidden files and folders are left out, here 4 (DIR/.a.txt, DIR/.git, DIR/.hidden, …); name one itself to read it
    ");
    insta::assert_snapshot!(texts_message(&dir, &files(dir.path().join("empty/*.txt"))), @r"
    no text file found in DIR/empty/*.txt
      hint: hidden files and folders are left out, here 1 (DIR/empty/.c.txt); name one itself to read it
    ");
    assert_eq!(texts(&files(dir.path().join(".hidden"))).unwrap(), ["text"]);
}

#[cfg(unix)]
#[test]
fn links_that_lead_to_no_file_are_left_out_with_a_warning() {
    use crate::sources::testing::logged;
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "b.txt", "text");
    put(dir.path(), "c/d.txt", "more");
    std::os::unix::fs::symlink("nowhere", dir.path().join("a.txt")).unwrap();
    std::os::unix::fs::symlink("gone/x", dir.path().join("c/e.txt")).unwrap();
    std::os::unix::fs::symlink("..", dir.path().join("c/loop")).unwrap();
    std::os::unix::fs::symlink("nowhere", dir.path().join(".hidden")).unwrap();
    let message =
        |lines: Vec<String>| lines.join("\n").replace(&dir.path().display().to_string(), "DIR");
    let lines = logged(|| assert_eq!(texts(&files(dir.path())).unwrap(), ["text", "more"]));
    insta::assert_snapshot!(message(lines), @r"WARN left out links that lead to no file: 3, the first of them DIR/a.txt");
    let pattern = dir.path().join("*.txt");
    let lines = logged(|| assert_eq!(texts(&files(&pattern)).unwrap(), ["text"]));
    insta::assert_snapshot!(message(lines), @r"WARN left out links that lead to no file: 1, the first of them DIR/a.txt");
}
