use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use tokenizers::models::bpe::BPE;
use tokenizers::models::wordlevel::WordLevel;

use super::*;
use crate::sources::text;

fn load(config: TokenizerConfig) -> Tokenizer {
    Tokenizer::load(&config).unwrap()
}

fn file(path: &Path) -> Result<Tokenizer, DataError> {
    Tokenizer::load(&TokenizerConfig::File { path: path.to_path_buf() })
}

#[test]
fn gpt2_gives_the_known_tokens() {
    let gpt2 = load(TokenizerConfig::Gpt2);
    assert_eq!(gpt2.encode("Hello, world! 12345"), [15496, 11, 995, 0, 17031, 2231]);
    assert_eq!((gpt2.vocab_size(), gpt2.end_of_text(), gpt2.name()), (50_257, 50_256, "gpt2"));
    assert_eq!(gpt2.decode(&[15496, 11, 995, 50_256]), "Hello, world<|endoftext|>");
}

#[test]
fn bytes_are_their_own_tokens() {
    let bytes = load(TokenizerConfig::Bytes);
    assert_eq!(bytes.encode("aé"), [97, 0xc3, 0xa9]);
    assert_eq!((bytes.vocab_size(), bytes.end_of_text(), bytes.name()), (257, 256, "bytes"));
    assert_eq!(bytes.decode(&[97, 0xc3, 0xa9, 0xff]), "aé\u{fffd}");
    assert_eq!(bytes.decode_bytes(&[0xff, 0]), [0xff, 0]);
}

#[test]
fn special_tokens_in_a_text_are_text() {
    for config in [TokenizerConfig::Gpt2, TokenizerConfig::Bytes] {
        let tokenizer = load(config);
        let tokens = tokenizer.encode("a<|endoftext|>b");
        assert!(!tokens.contains(&tokenizer.end_of_text()));
        assert_eq!(tokenizer.decode(&tokens), "a<|endoftext|>b");
    }
}

#[test]
fn tokens_outside_the_vocabulary_decode_to_the_replacement_character() {
    assert_eq!(load(TokenizerConfig::Gpt2).decode(&[15496, 50_300]), "Hello\u{fffd}");
}

#[test]
fn byte_lengths_add_up_to_the_text() {
    let text = "Καλημέρα, 世界! 🙂\n\n\tfn main() {}  ";
    for config in [TokenizerConfig::Gpt2, TokenizerConfig::Bytes] {
        let tokenizer = load(config);
        let lengths = tokenizer.token_byte_lengths();
        let sum: u32 = tokenizer.encode(text).iter().map(|&token| lengths[token as usize]).sum();
        assert_eq!(sum as usize, text.len());
        assert_eq!(lengths[tokenizer.end_of_text() as usize], 0);
        assert_eq!(lengths.len(), tokenizer.vocab_size());
    }
}

#[test]
fn fingerprints_differ_and_are_stable() {
    let (gpt2, bytes) = (load(TokenizerConfig::Gpt2), load(TokenizerConfig::Bytes));
    assert_ne!(gpt2.fingerprint(), bytes.fingerprint());
    assert_eq!(gpt2.fingerprint().len(), 64);
    // A change of this value makes all existing checkpoints and shards unusable.
    insta::assert_snapshot!(&gpt2.fingerprint()[..16], @"e587dc115a73802b");
    insta::assert_snapshot!(&bytes.fingerprint()[..16], @"0b0b1bc8348c9b9c");
}

#[test]
fn a_very_long_run_of_white_space_is_encoded() {
    let gpt2 = load(TokenizerConfig::Gpt2);
    for unit in [" ", "\n", " \n", "a", "-", "é"] {
        for end in ["y", "é", ""] {
            let text = format!("x{}{end}", unit.repeat(1_200_000 / unit.len()));
            assert_eq!(gpt2.decode(&gpt2.encode(&text)), text, "{unit:?}");
        }
    }
}

#[test]
fn the_table_refuses_keys_of_another_kind() {
    let parse = |text: &str| toml::from_str::<TokenizerConfig>(text);
    assert_eq!(parse("kind = \"gpt2\"").unwrap(), TokenizerConfig::Gpt2);
    assert_eq!(
        parse("kind = \"file\"\npath = \"t.json\"").unwrap(),
        TokenizerConfig::File { path: "t.json".into() }
    );
    assert!(
        parse("kind = \"gpt2\"\npath = \"t.json\"")
            .unwrap_err()
            .to_string()
            .contains("unknown field `path`")
    );
    assert!(
        parse("kind = \"gpt3\"")
            .unwrap_err()
            .to_string()
            .contains("expected one of `gpt2`, `bytes`, `file`")
    );
    let written = toml::to_string(&TokenizerConfig::File { path: "t.json".into() }).unwrap();
    assert_eq!(written, "kind = \"file\"\npath = \"t.json\"\n");
}

fn save(folder: &Path, tokenizer: &tokenizers::Tokenizer) -> std::path::PathBuf {
    let path = folder.join("tokenizer.json");
    tokenizer.save(&path, false).unwrap();
    path
}

#[test]
fn a_byte_level_file_round_trips_every_text() {
    let folder = tempfile::tempdir().unwrap();
    let mut alphabet: Vec<char> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab = alphabet.iter().enumerate().map(|(id, c)| (c.to_string(), id as u32 + 1));
    let vocab: tokenizers::models::bpe::Vocab =
        vocab.chain([("<|endoftext|>".to_string(), 0)]).collect();
    let mut made =
        tokenizers::Tokenizer::new(BPE::builder().vocab_and_merges(vocab, vec![]).build().unwrap());
    let byte_level = tokenizers::pre_tokenizers::byte_level::ByteLevel::new(false, true, true);
    made.with_pre_tokenizer(Some(byte_level)).with_decoder(Some(byte_level));
    made.add_special_tokens(&[tokenizers::AddedToken::from("<|endoftext|>", true)]);
    let loaded = file(&save(folder.path(), &made)).unwrap();

    assert_eq!((loaded.vocab_size(), loaded.end_of_text()), (257, 0));
    let text = "a<|endoftext|>é 🙂\u{0}\n";
    let tokens = loaded.encode(text);
    assert!(!tokens.contains(&0), "a special token in the text was recognised");
    assert_eq!(tokens.len(), text.len());
    assert_eq!(loaded.decode_bytes(&tokens), text.as_bytes());
    assert_eq!(loaded.token_byte_lengths()[1..], [1; 256]);

    let pretty = folder.path().join("pretty.json");
    made.save(&pretty, true).unwrap();
    assert_eq!(
        file(&pretty).unwrap().fingerprint(),
        loaded.fingerprint(),
        "layout must not matter"
    );
}

#[test]
fn unusable_files_are_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let message = |path: &Path| {
        let text = file(path).unwrap_err().to_string();
        text.replace(&folder.path().display().to_string(), "DIR")
    };
    insta::assert_snapshot!(message(&folder.path().join("none.json")), @r"
    tokenizer file DIR/none.json does not exist
      hint: check tokenizer.path, or make one with `longwall tokenizer train`
    ");

    let broken = folder.path().join("broken.json");
    std::fs::write(&broken, "{\"model\":").unwrap();
    insta::assert_snapshot!(message(&broken), @r"
    cannot use the tokenizer DIR/broken.json: it is not JSON: EOF while parsing a value at line 1 column 9
      hint: give a Hugging Face tokenizer.json, or make one with `longwall tokenizer train`
    ");

    let model = r#"{"type":"WordLevel","vocab":{"</s>":0,"a":1,"b":4000000000},"unk_token":"a"}"#;
    std::fs::write(&broken, format!("{{\"version\":\"1.0\",\"model\":{model}}}")).unwrap();
    insta::assert_snapshot!(message(&broken), @r"
    cannot use the tokenizer DIR/broken.json: its greatest token is 4000000000; allowed: below 16777216
      hint: fetch the file again: no vocabulary is so large
    ");

    let words = |names: &[&str], unknown: &str| {
        let vocab =
            names.iter().enumerate().map(|(id, name)| (name.to_string(), id as u32)).collect();
        let model = WordLevel::builder().vocab(vocab).unk_token(unknown.into()).build().unwrap();
        save(folder.path(), &tokenizers::Tokenizer::new(model))
    };
    insta::assert_snapshot!(message(&words(&["a", "</s>"], "<unk>")), @r"
    cannot use the tokenizer DIR/tokenizer.json: it cannot encode every text: WordLevel error: Missing [UNK] token from the vocabulary
      hint: give it a token for unknown characters, or train a byte-level one with `longwall tokenizer train`
    ");
    insta::assert_snapshot!(message(&words(&["a", "<unk>"], "<unk>")), @r#"
    cannot use the tokenizer DIR/tokenizer.json: it has no end-of-text token; looked for <|endoftext|>, <|end_of_text|>, </s>, <eos>, <|eos|>, [EOS]
      hint: add one of these to its added_tokens, with "special": true
    "#);
}

#[test]
fn tokens_that_are_not_byte_level_count_the_bytes_they_stand_for() {
    for (token, bytes) in
        [("▁the", " the"), ("<0x0A>", "\n"), ("##ing", "ing"), ("##", "##"), ("<0x>", "<0x>")]
    {
        assert_eq!(super::file::plain_bytes(token), bytes.as_bytes(), "{token}");
    }
}

static BUILT_IN: LazyLock<[Tokenizer; 2]> =
    LazyLock::new(|| [load(TokenizerConfig::Gpt2), load(TokenizerConfig::Bytes)]);

proptest! {
    #[test]
    fn built_in_tokenizers_round_trip(text in any::<String>()) {
        for tokenizer in BUILT_IN.iter() {
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text)), text.clone());
        }
    }
}

fn train(
    folder: &Path,
    vocab_size: usize,
    max_bytes: Option<u64>,
) -> Result<TrainBpeReport, DataError> {
    train_to(&folder.join("bpe.json"), folder, vocab_size, max_bytes)
}

fn train_to(
    out: &Path,
    folder: &Path,
    vocab_size: usize,
    max_bytes: Option<u64>,
) -> Result<TrainBpeReport, DataError> {
    let text = folder.join("text.txt");
    std::fs::write(&text, "the cat sat on the mat, and the dog did not. ".repeat(50)).unwrap();
    let options = TrainBpe {
        corpus: Arc::new(text::Config::new(vec![text])),
        out: out.to_path_buf(),
        vocab_size,
        min_frequency: 2,
        max_bytes,
    };
    train_bpe(&options, &crate::NoProgress)
}

#[test]
fn a_trained_tokenizer_compresses_its_text_and_round_trips_any() {
    let folder = tempfile::tempdir().unwrap();
    let report = train(folder.path(), 270, None).unwrap();
    assert_eq!((report.vocab_size, report.documents, report.bytes), (270, 1, 2250));
    let trained = file(&report.out).unwrap();
    assert_eq!((trained.vocab_size(), trained.end_of_text()), (270, 0));
    assert!(trained.encode("the cat sat").len() < 8);
    let other = "Größe <|endoftext|> 🙂\u{0}";
    assert_eq!(trained.decode(&trained.encode(other)), other);
    let lengths = trained.token_byte_lengths();
    let bytes: u32 = trained.encode(other).iter().map(|&token| lengths[token as usize]).sum();
    assert_eq!(bytes as usize, other.len());

    let first = std::fs::read(&report.out).unwrap();
    let again = train(folder.path(), 270, None).unwrap();
    assert_eq!(std::fs::read(&again.out).unwrap(), first, "the same text must give the same file");
}

#[test]
fn training_reads_no_more_than_it_may() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(train(folder.path(), 260, Some(100)).unwrap().bytes, 100);
}

#[test]
fn training_refuses_what_cannot_work_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    insta::assert_snapshot!(train(folder.path(), 100, None).unwrap_err(), @r"
    vocab_size is 100; allowed: 257 or more
      hint: 256 bytes and end of text are always there; a common size is 32768
    ");
    std::fs::create_dir(folder.path().join("bpe.json")).unwrap();
    let error = train(folder.path(), 260, None).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(&folder.path().display().to_string(), "DIR"), @r"
    out is the folder DIR/bpe.json; allowed: a file
      hint: name a file, for example DIR/bpe.json/tokenizer.json
    ");
}

#[test]
fn the_folder_of_a_trained_tokenizer_is_made_or_refused_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let new = folder.path().join("new/folder");
    train_to(&new.join("bpe.json"), folder.path(), 260, None).unwrap();
    assert_eq!(std::fs::read_dir(new).unwrap().count(), 1, "only the tokenizer");

    struct Untouched;
    impl crate::Progress for Untouched {
        fn start(&self, _: &str, _: Option<u64>) {
            panic!("training began");
        }
    }
    let text = folder.path().join("text.txt");
    let options = TrainBpe {
        corpus: Arc::new(text::Config::new(vec![text.clone()])),
        out: text.join("bpe.json"),
        vocab_size: 260,
        min_frequency: 2,
        max_bytes: None,
    };
    let error = train_bpe(&options, &Untouched).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot write {}", options.out.display())), "{error}");
}
