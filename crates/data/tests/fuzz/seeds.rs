//! Valid input of every kind.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::sync::Arc;

use longwall_data::sources::text;
use longwall_data::{
    NoProgress, PrepareOptions, Tokenizer, TokenizerConfig, TrainBpe, prepare, train_bpe,
};
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

/// A shard of each version, with documents of the tokenizer of bytes.
pub fn shard_files() -> Vec<Vec<u8>> {
    let tokens: Vec<u32> = (0..400u32).map(|n| if n % 40 == 39 { 256 } else { n % 200 }).collect();
    let shard = |version: i32| {
        let fields = [20_240_520, version, tokens.len() as i32];
        let mut bytes: Vec<u8> = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        for token in &tokens {
            let width = if version == 1 { 2 } else { 4 };
            bytes.extend_from_slice(&token.to_le_bytes()[..width]);
        }
        bytes
    };
    vec![shard(1), shard(2)]
}

fn lines() -> String {
    let line = |n: usize| {
        format!(
            "{{\"text\": \"line {n} \\u00e9 \\\"quoted\\\" {}\", \"id\": {n}}}\n",
            "word ".repeat(n % 9)
        )
    };
    (0..60).map(line).collect()
}

/// The files of a prepared folder with a training and a validation shard.
pub fn prepared() -> BTreeMap<String, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    fs::write(&path, lines()).unwrap();
    let corpus = Arc::new(text::Config::new(vec![path]));
    let mut options = PrepareOptions::new(corpus, dir.path().join("out"), "x");
    options.validation_fraction = 0.2;
    let bytes = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
    prepare(&options, &bytes, &NoProgress).unwrap();
    let entries = fs::read_dir(&options.out).unwrap().map(|entry| entry.unwrap().path());
    let files: BTreeMap<String, Vec<u8>> = entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().into(), fs::read(path).unwrap()))
        .collect();
    assert_eq!(files.len(), 3);
    files
}

/// A trained byte-level BPE, and files with other models.
pub fn tokenizer_files() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let (corpus, out) = (dir.path().join("a.txt"), dir.path().join("bpe.json"));
    fs::write(&corpus, "the quick brown fox jumps over the lazy dog\n".repeat(20)).unwrap();
    let corpus = Arc::new(text::Config::new(vec![corpus]));
    let options =
        TrainBpe { corpus, out: out.clone(), vocab_size: 300, min_frequency: 2, max_bytes: None };
    train_bpe(&options, &NoProgress).unwrap();
    let added = r#""added_tokens":[{"id":0,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}]"#;
    let file = |parts: &str, model: &str| {
        format!(r#"{{"version":"1.0","truncation":null,"padding":null,{added},{parts},"model":{model}}}"#).into_bytes()
    };
    let unigram = file(
        r#""normalizer":{"type":"NFKC"},"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},"post_processor":null,"decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}"#,
        r#"{"type":"Unigram","unk_id":1,"vocab":[["</s>",0.0],["<unk>",0.0],["▁the",-2.0],["▁",-3.0],["quick",-4.5],["e",-3.5]],"byte_fallback":false}"#,
    );
    let word_piece = file(
        r###""normalizer":{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,"lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"post_processor":null,"decoder":{"type":"WordPiece","prefix":"##","cleanup":true}"###,
        r###"{"type":"WordPiece","unk_token":"<unk>","continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{"</s>":0,"<unk>":1,"the":2,"quick":3,"##ly":4}}"###,
    );
    let word_level = file(
        r#""normalizer":null,"pre_tokenizer":{"type":"Split","pattern":{"Regex":"\\s+"},"behavior":"Removed","invert":false},"post_processor":null,"decoder":null"#,
        r#"{"type":"WordLevel","vocab":{"</s>":0,"<unk>":1,"fox":2},"unk_token":"<unk>"}"#,
    );
    let files = vec![fs::read(out).unwrap(), unigram, word_piece, word_level];
    for (n, file) in files.iter().enumerate() {
        let path = dir.path().join(format!("{n}.json"));
        fs::write(&path, file).unwrap();
        Tokenizer::load(&TokenizerConfig::File { path }).unwrap();
    }
    files
}

/// Files with dictionaries and without, of both page versions, with and without compression.
pub fn parquet_files() -> Vec<Vec<u8>> {
    let schema = "message m { required int64 id; optional binary text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut files = Vec::new();
    for (version, codec, dictionary) in [
        (WriterVersion::PARQUET_1_0, Compression::UNCOMPRESSED, true),
        (WriterVersion::PARQUET_1_0, Compression::SNAPPY, false),
        (WriterVersion::PARQUET_2_0, Compression::ZSTD(Default::default()), true),
        (WriterVersion::PARQUET_2_0, Compression::GZIP(Default::default()), false),
        (WriterVersion::PARQUET_2_0, Compression::LZ4_RAW, true),
        (WriterVersion::PARQUET_1_0, Compression::BROTLI(Default::default()), true),
    ] {
        let properties = WriterProperties::builder()
            .set_writer_version(version)
            .set_compression(codec)
            .set_dictionary_enabled(dictionary)
            .build();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let raw: File = file.as_file().try_clone().unwrap();
        let mut writer =
            SerializedFileWriter::new(raw, schema.clone(), Arc::new(properties)).unwrap();
        for group in 0..2 {
            let mut rows = writer.next_row_group().unwrap();
            let mut ids = rows.next_column().unwrap().unwrap();
            ids.typed::<Int64Type>().write_batch(&[1, 2, 3, 4], None, None).unwrap();
            ids.close().unwrap();
            let mut texts = rows.next_column().unwrap().unwrap();
            let values = [format!("first {group}"), "second text".into(), "second text".into()];
            let values = values.map(|text| ByteArray::from(text.into_bytes()));
            texts.typed::<ByteArrayType>().write_batch(&values, Some(&[1, 0, 1, 1]), None).unwrap();
            texts.close().unwrap();
            rows.close().unwrap();
        }
        writer.close().unwrap();
        file.flush().unwrap();
        files.push(fs::read(file.path()).unwrap());
    }
    files
}

pub fn json_lines() -> Vec<Vec<u8>> {
    let nested = "{\"id\": [1, {\"a\": null}], \"text\": \"nested\"}\r\n\n{\"text\": null}\n";
    vec![lines().into_bytes(), nested.into(), "\u{feff}{\"text\": \"mark\"}".into()]
}

pub fn plain_text() -> Vec<Vec<u8>> {
    let separated = "one<|end|>two\n\nthree<|end|><|end|>four";
    vec![lines().into_bytes(), separated.into(), "\u{feff}é中🙂\n\n".repeat(9).into()]
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

/// One member, two members, stored and highly compressed text.
pub fn gzip_files() -> Vec<Vec<u8>> {
    let lines = lines().into_bytes();
    let mut stored = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    stored.write_all(&lines).unwrap();
    let spaces = [vec![b' '; 100_000], lines.clone()].concat();
    vec![
        gzip(&lines),
        [gzip(&lines), gzip(b"{\"text\": \"more\"}")].concat(),
        stored.finish().unwrap(),
        gzip(&spaces),
    ]
}

/// One frame, two frames, and highly compressed text.
pub fn zstd_files() -> Vec<Vec<u8>> {
    let lines = lines().into_bytes();
    let encode = |content: &[u8]| zstd::encode_all(content, 3).unwrap();
    let spaces = [vec![b' '; 100_000], lines.clone()].concat();
    vec![
        encode(&lines),
        [encode(&lines), encode(b"{\"text\": \"more\"}")].concat(),
        encode(&spaces),
    ]
}

/// Tables with every kind of source.
pub fn configurations() -> Vec<Vec<u8>> {
    let all = r#"
seq_len = 1024
document_mask = true
validation_fraction = 0.01
validation_tokens = "256k"
cache_dir = "data/cache"

[[sources]]
kind = "text"
weight = 0.5
paths = ["corpus/", "more/*.jsonl.gz"]
text_field = "body"
separator = "<|endoftext|>"

[[sources]]
kind = "cargo-sources"
max_bytes = "64M"

[[sources]]
kind = "shards"
weight = 2
train = ["a.bin"]
validation = []

[[sources]]
kind = "passkey"
min_len = 128
max_len = 1024

[[sources]]
kind = "fflm"
instructions = 256
p_write = 0.1
p_read = 0.1
p_ignore = 0.8

[[sources]]
kind = "phonebook"
answer_only = false

[[sources]]
kind = "mqar"
form = "forgetting"
length = 128
pairs = 8
updates = 3
vocab = 200
power = 0.5

[[sources]]
kind = "word-problem"
group = "s5"
max_len = 12

[[sources]]
kind = "mqrar"
back = 3
keys = 8
"#;
    let short = "seq_len = 8\nsources = [{ kind = \"cargo-sources\" }]\n";
    for text in [all, short] {
        toml::from_str::<longwall_data::DataConfig>(text).unwrap();
    }
    vec![all.into(), short.into()]
}
