//! What users see when something is wrong: what, where, the value, what is allowed, what to do.

use std::fs;

use crate::support::{CONFIG, Workspace};

/// Trains `tiny.toml` with overrides and expects an error.
fn train_error(w: &Workspace, sets: &[&str]) -> String {
    let mut args = vec!["train", "--config", "tiny.toml"];
    for set in sets {
        args.extend(["--set", set]);
    }
    let error = w.fail(&args);
    assert!(!w.path("runs/tiny/metrics.jsonl").exists(), "a run that cannot start leaves nothing");
    error
}

#[test]
fn unknown_key() {
    let w = Workspace::new();
    w.write("tiny.toml", &CONFIG.replace("lr = 1e-2", "lr = 1e-2\nlearning_rate = 1e-3"));
    insta::assert_snapshot!(train_error(&w, &[]));
}

#[test]
fn unknown_key_of_an_attention_kind() {
    let w = Workspace::new();
    insta::assert_snapshot!(train_error(&w, &["model.attention={ kind = \"fox\", softcap = 30 }"]));
}

#[test]
fn unknown_attention_kind() {
    let w = Workspace::new();
    insta::assert_snapshot!(train_error(&w, &["model.attention.kind=roap"]));
}

#[test]
fn costs_at_no_length_or_beyond_numbers() {
    let w = Workspace::new();
    for (len, name) in [("0", "zero"), ("9000000B", "beyond")] {
        let error = w.fail(&["info", "--config", "tiny.toml", "--seq-len", len]);
        insta::assert_snapshot!(format!("length_of_costs_{name}"), error);
    }
}

#[test]
fn window_with_a_kind_that_allows_none() {
    let w = Workspace::new();
    let sets = ["model.attention.kind=linear", "model.window=8"];
    insta::assert_snapshot!(train_error(&w, &sets));
}

#[test]
fn a_wrong_pattern_of_kinds() {
    let w = Workspace::new();
    let sets = [
        "model.pattern=[\"locl\", \"linear\"]",
        "model.kinds.local={ kind = \"rope\", window = 64 }",
        "model.kinds.linear={ kind = \"linear\", window = 8 }",
    ];
    let error = train_error(&w, &sets);
    for part in ["model.pattern.0 is \"locl\"", "model.kinds.linear.window is 8"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn wrong_type() {
    let w = Workspace::new();
    w.write("tiny.toml", &CONFIG.replace("layers = 2", "layers = \"two\""));
    insta::assert_snapshot!(train_error(&w, &[]));
}

#[test]
fn values_out_of_range_are_all_reported() {
    let w = Workspace::new();
    let sets =
        ["model.heads=3", "train.lr=-1", "train.batch_tokens=100", "model.attention.theta=0"];
    insta::assert_snapshot!(train_error(&w, &sets));
}

#[test]
fn bf16_on_the_cpu() {
    let w = Workspace::new();
    insta::assert_snapshot!(train_error(&w, &["run.precision=bf16"]));
    // The device comes from the command line, after the file was validated.
    let sets = ["--set", "run.precision=bf16", "--set", "run.device=auto", "--device", "cpu"];
    let error = w.fail(&[&["train", "--config", "tiny.toml"], &sets[..]].concat());
    insta::assert_snapshot!("bf16_on_the_cpu_of_the_command_line", error);
}

#[test]
fn not_toml() {
    let w = Workspace::new();
    w.write("tiny.toml", "[run\nname = 1");
    insta::assert_snapshot!(train_error(&w, &[]));
}

#[test]
fn missing_configuration() {
    let w = Workspace::new();
    insta::assert_snapshot!(w.fail(&["train", "--config", "absent.toml"]));
}

#[test]
fn missing_text() {
    let w = Workspace::new();
    insta::assert_snapshot!(train_error(&w, &["data.sources.0.paths=[\"absent\"]"]));
}

#[test]
fn empty_corpus() {
    let w = Workspace::new();
    fs::create_dir(w.path("empty")).unwrap();
    insta::assert_snapshot!(train_error(&w, &["data.sources.0.paths=[\"empty\"]"]));
}

#[test]
fn corpus_shorter_than_a_row() {
    let w = Workspace::new();
    let sets = [
        "data.seq_len=65536",
        "train.batch_tokens=65536",
        "train.micro_batch=1",
        "data.validation_tokens=65536",
    ];
    insta::assert_snapshot!(train_error(&w, &sets));
}

/// Shards of the corpus, one of which is damaged.
fn damaged_shard(damage: impl Fn(&mut Vec<u8>)) -> (Workspace, String) {
    let w = Workspace::new();
    w.succeed(&["prepare", "corpus", "--out", "shards", "--tokenizer", "bytes"]);
    w.damage("shards/text_train_000001.bin", damage);
    let source = "data.sources.0={ kind = \"shards\", train = [\"shards/text_train_000001.bin\"] }";
    let error = train_error(&w, &[source]);
    (w, error)
}

#[test]
fn shard_with_a_bad_magic() {
    insta::assert_snapshot!(damaged_shard(|bytes| bytes[0] ^= 1).1);
}

#[test]
fn truncated_shard() {
    insta::assert_snapshot!(damaged_shard(|bytes| bytes.truncate(3000)).1);
}

#[test]
fn shard_of_another_tokenizer() {
    let w = Workspace::new();
    w.succeed(&["prepare", "corpus", "--out", "shards", "--tokenizer", "gpt2"]);
    let source =
        "data.sources.0={ kind = \"shards\", train = [\"shards\"], validation = [\"shards\"] }";
    insta::assert_snapshot!(train_error(&w, &[source]));
}

#[test]
fn checkpoint_of_another_tokenizer() {
    let w = Workspace::new();
    let train = |out: &str, size: &str| {
        w.succeed(&["tokenizer", "train", "corpus", "--out", out, "--vocab-size", size]);
    };
    train("bpe.json", "300");
    w.train("bpe", &["tokenizer={ kind = \"file\", path = \"bpe.json\" }", "train.tokens=256"]);
    train("other.json", "290");
    fs::copy(w.path("other.json"), w.path("runs/bpe/tokenizer.json")).unwrap();
    insta::assert_snapshot!(w.fail(&["generate", "--run", "runs/bpe"]));
}

#[test]
fn tokenizer_that_exists() {
    let w = Workspace::new();
    let args =
        ["tokenizer", "train", "corpus", "--out", "bpe.json", "--vocab-size", "300", "--force"];
    w.succeed(&args);
    let before = w.read("bpe.json");
    insta::assert_snapshot!(w.fail(&args[..args.len() - 1]));
    assert_eq!(w.read("bpe.json"), before);
    w.succeed(&args);
}

#[test]
fn checkpoint_of_another_configuration() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=640"]);
    let args =
        ["train", "--resume", "runs/tiny", "--set", "model.width=32", "--set", "train.tokens=1280"];
    insta::assert_snapshot!(w.fail(&args));
}

#[test]
fn run_folder_that_exists() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    let before = w.read("runs/tiny/metrics.jsonl");
    insta::assert_snapshot!(w.fail(&["train", "--config", "tiny.toml"]));
    assert_eq!(w.read("runs/tiny/metrics.jsonl"), before);
    w.succeed(&["train", "--config", "tiny.toml", "--set", "train.tokens=128", "--force"]);
    assert_ne!(w.read("runs/tiny/metrics.jsonl"), before);
}

#[test]
fn run_folder_that_cannot_be_made() {
    let w = Workspace::new();
    w.write("runs", "a file where the folder should be");
    insta::assert_snapshot!(w.fail(&["train", "--config", "tiny.toml"]));
}

#[test]
fn no_run_to_resume() {
    let w = Workspace::new();
    insta::assert_snapshot!(w.fail(&["train", "--resume", "runs/absent"]));
}

#[test]
fn no_run_to_evaluate() {
    let w = Workspace::new();
    insta::assert_snapshot!(w.fail(&["eval", "passkey", "--run", "runs/absent"]));
}

#[test]
fn damaged_weights() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    w.write("runs/tiny/checkpoints/step-2/weights.safetensors", "not weights");
    insta::assert_snapshot!(w.fail(&["generate", "--run", "runs/tiny"]));
}

/// One flipped bit in the weights stops every command that would use them, and `verify` finds it.
#[test]
fn flipped_bit_in_the_weights() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=1280"]);
    assert!(w.succeed(&["verify", "runs/tiny"]).ends_with("files are sound\n"));
    w.damage("runs/tiny/checkpoints/step-10/weights.safetensors", |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    });
    let damaged = "weights.safetensors is damaged: its CRC-32C is";
    let resume = ["train", "--resume", "runs/tiny", "--set", "train.tokens=2560"];
    let eval = ["eval", "passkey", "--run", "runs/tiny", "--lengths", "200"];
    for args in [&resume[..], &eval, &["generate", "--run", "runs/tiny"]] {
        let error = w.fail(args);
        assert!(error.contains(damaged), "{args:?}: {error}");
        assert!(
            error.contains("hint: step 5 is sound: remove runs/tiny/checkpoints/step-10"),
            "{error}"
        );
    }
    w.succeed(&["generate", "--run", "runs/tiny", "--checkpoint", "5", "--max-tokens", "1"]);
    let output = w.run(&["verify", "runs/tiny"]);
    assert_eq!(output.status.code(), Some(1));
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(stdout.lines().filter(|line| !line.ends_with(": ok")).count(), 1, "{stdout}");
    assert!(stdout.contains("step-10/weights.safetensors: is damaged: its CRC-32C is"), "{stdout}");
    // A tokenizer that is built in has no file.
    assert!(!stdout.contains("tokenizer.json"), "{stdout}");
    // Without the damaged checkpoint, the run goes on from the one before.
    fs::remove_dir_all(w.path("runs/tiny/checkpoints/step-10")).unwrap();
    w.succeed(&resume);
}

/// Lost metrics are noticed, and training goes on from the last whole line; a line that is no record stops it at once.
#[test]
fn damaged_metrics() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    let metrics = "runs/tiny/metrics.jsonl";
    let whole = fs::read_to_string(w.path(metrics)).unwrap();
    w.write(metrics, &whole[..whole.len() - 30]);
    let output = w.run(&["verify", "runs/tiny"]);
    assert_eq!(output.status.code(), Some(1));
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(stdout.contains("metrics.jsonl: has "), "{stdout}");
    w.succeed(&["train", "--resume", "runs/tiny", "--set", "train.tokens=512"]);
    let grown = fs::read_to_string(w.path(metrics)).unwrap();
    let kept = &whole[..=whole[..whole.len() - 1].rfind('\n').unwrap()];
    assert!(grown.starts_with(kept) && grown.ends_with("}\n"), "{grown}");
    w.succeed(&["plot", "runs/tiny", "--out", "loss.svg"]);

    w.write(metrics, &grown.replacen('{', "garbage", 1));
    let more = ["train", "--resume", "runs/tiny", "--set", "train.tokens=1024"];
    let error = w.fail(&more);
    assert!(error.contains("metrics.jsonl:1: no metrics record"), "{error}");
    assert!(w.path("runs/tiny/finished.json").exists());
}

#[test]
fn checkpoint_where_a_run_is_asked_for() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    let checkpoint = "runs/tiny/checkpoints/step-2";
    for args in [["train", "--resume", checkpoint], ["generate", "--run", checkpoint]] {
        let error = w.fail(&args);
        assert!(error.contains(&format!("{checkpoint} is a checkpoint, and no run")), "{error}");
        assert!(error.contains("hint: give the folder of its run, runs/tiny;"), "{error}");
    }
    assert!(!w.path(checkpoint).join("lock").exists());
    w.succeed(&["generate", "--checkpoint", checkpoint, "--max-tokens", "1"]);
}

#[test]
fn shards_are_verified() {
    let w = Workspace::new();
    w.succeed(&["prepare", "corpus", "--out", "shards", "--tokenizer", "bytes"]);
    assert!(w.succeed(&["verify", "shards"]).ends_with("files are sound\n"));
    w.damage("shards/text_train_000001.bin", |bytes| bytes[2000] ^= 1);
    let source =
        "data.sources.0={ kind = \"shards\", train = [\"shards\"], validation = [\"shards\"] }";
    let train = ["train", "--config", "tiny.toml", "--set", source, "--verify"];
    let error = w.fail(&train);
    assert!(error.contains("text_train_000001.bin"), "{error}");
    let error = w.fail(&["verify", "shards"]);
    assert!(error.contains("1 of "), "{error}");
    insta::assert_snapshot!(w.fail(&["verify", "corpus"]));
}

#[test]
fn model_that_does_not_fit_into_memory() {
    let w = Workspace::new();
    let error = train_error(&w, &["model.layers=96", "model.width=12288", "model.heads=96"]);
    assert!(error.contains("training needs at least "), "{error}");
    assert!(error.contains("hint: choose a smaller model"), "{error}");
}

#[test]
fn too_many_threads() {
    let w = Workspace::new();
    insta::assert_snapshot!(train_error(&w, &["run.threads=100000"]));
}

#[test]
fn kind_that_is_an_option_of_another() {
    let w = Workspace::new();
    let error = train_error(&w, &["model.attention.kind=alibi"]);
    assert!(error.contains("write kind = \"rope\", position = \"alibi\""), "{error}");
    let args = ["op", "--kind", "rop", "--input", "in", "--output", "out"];
    assert!(w.fail(&args).contains("did you mean rope?"));
}

#[test]
fn negative_temperature() {
    let w = Workspace::new();
    insta::assert_snapshot!(w.fail(&["generate", "--run", "runs/tiny", "--temperature", "-1"]));
}

#[test]
fn missing_prompt_file() {
    let w = Workspace::new();
    insta::assert_snapshot!(w.fail(&["generate", "--run", "runs/tiny", "--prompt-file", "absent"]));
}

#[test]
fn context_longer_than_learned_positions() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256", "model.positions=learned"]);
    let args = ["generate", "--run", "runs/tiny", "--prompt", "The cat", "--max-tokens", "40"];
    insta::assert_snapshot!(w.fail(&args));
}

/// A limit on file sizes simulates a full disk: the write fails in the same way.
#[test]
#[cfg(unix)]
fn disk_full_while_checkpointing() {
    let w = Workspace::new();
    w.train("fills-the-data-cache", &["train.tokens=128"]);
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" train --config tiny.toml";
    let output = std::process::Command::new("bash")
        .args(["-c", script, env!("CARGO_BIN_EXE_longwall")])
        .current_dir(w.path(""))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = w.without_folder(&String::from_utf8(output.stderr).unwrap());
    insta::assert_snapshot!(&stderr[stderr.find("error: ").expect("an error")..]);
    assert_eq!(w.list("runs/tiny/checkpoints"), [""; 0], "nothing half-written stays");
}

#[test]
fn cuda_without_a_gpu() {
    let w = Workspace::new();
    if longwall_kernels::device::cuda().is_ok() {
        return; // This machine has a GPU: the error cannot occur.
    }
    let error = train_error(&w, &["run.device=cuda"]);
    // The reason depends on the machine.
    let reason = error.split("but ").nth(1).unwrap().split('\n').next().unwrap().to_owned();
    insta::assert_snapshot!(error.replace(&reason, "<reason>"));
}

#[test]
fn evaluation_shorter_than_its_prompt() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    insta::assert_snapshot!(w.fail(&["eval", "passkey", "--run", "runs/tiny", "--lengths", "50"]));
}

#[test]
fn unknown_suite_in_a_configuration() {
    let w = Workspace::new();
    w.write("tiny.toml", &format!("{CONFIG}\n[[eval]]\nsuite = \"passkeys\"\n"));
    insta::assert_snapshot!(train_error(&w, &[]));
}

#[test]
fn unknown_option_of_a_suite_in_a_configuration() {
    let w = Workspace::new();
    w.write("tiny.toml", &format!("{CONFIG}\n[[eval]]\nsuite = \"passkey\"\nlenghts = [500]\n"));
    insta::assert_snapshot!(train_error(&w, &[]));
}

#[test]
fn wrong_type_of_a_suites_option_in_a_configuration() {
    let w = Workspace::new();
    let eval = "[[eval]]\nsuite = \"passkey\"\nlengths = [500]\nbatch_tokens = true\n";
    w.write("tiny.toml", &format!("{CONFIG}\n{eval}"));
    insta::assert_snapshot!(train_error(&w, &[]));
}

#[test]
fn option_out_of_range() {
    let w = Workspace::new();
    w.train("tiny", &["train.tokens=256"]);
    insta::assert_snapshot!(w.fail(&["generate", "--run", "runs/tiny", "--top-p", "1.5"]));
}

#[test]
fn usage_errors_exit_with_2() {
    let w = Workspace::new();
    for args in [&["trian"][..], &["train", "--confg", "x"], &["prepare"]] {
        assert_eq!(w.run(args).status.code(), Some(2), "{args:?}");
    }
}
