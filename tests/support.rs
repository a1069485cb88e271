//! A folder to work in, and the binary.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A temporary folder with a text corpus and a configuration of a tiny model.
pub struct Workspace {
    folder: tempfile::TempDir,
}

/// The configuration: 40 steps of a model with two layers of width 16.
pub const CONFIG: &str = r#"
[run]
name = "tiny"
device = "cpu"
threads = 1

[data]
seq_len = 32
validation_fraction = 0.2
validation_tokens = 512

[[data.sources]]
kind = "text"
paths = ["corpus"]

[tokenizer]
kind = "bytes"

[model]
layers = 2
width = 16
heads = 2

[model.attention]
kind = "rope"

[train]
tokens = 5120
batch_tokens = 128
micro_batch = 2
lr = 1e-2

[train.validate]
every = 10

[train.checkpoint]
every = 5
"#;

/// A sweep of `tiny.toml` over two attention kinds, with these seeds; each run trains on `tokens`.
pub fn sweep(seeds: &str, tokens: u32) -> String {
    format!(
        r#"
base = "tiny.toml"
seeds = [{seeds}]
set = {{ "train.tokens" = {tokens} }}

[[axes]]
key = "model.attention"
values = [{{ kind = "rope" }}, {{ kind = "fox" }}]

[[eval]]
suite = "extrapolate"
lengths = [16, 32]
"#
    )
}

impl Workspace {
    /// A folder with `corpus/*.txt` and `tiny.toml`.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let workspace = Workspace { folder };
        fs::create_dir(workspace.path("corpus")).unwrap();
        for file in 0..40 {
            workspace.write(&format!("corpus/{file:02}.txt"), &story(file));
        }
        workspace.write("tiny.toml", CONFIG);
        workspace
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file.
    pub fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).unwrap();
    }

    /// Changes the bytes of a file.
    pub fn damage(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let path = self.path(name);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
    }

    /// Reads a file.
    pub fn read(&self, name: &str) -> String {
        let path = self.path(name);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// The binary with these arguments, not yet started.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_longwall"));
        command.args(args).current_dir(self.folder.path()).stdin(Stdio::null());
        command.env_remove("LONGWALL_LOG").env_remove("CARGO_HOME");
        command
    }

    /// Runs the binary.
    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the binary starts")
    }

    /// Runs the binary, which must succeed; returns its stdout.
    pub fn succeed(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "longwall {args:?} failed:\n{stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs the binary, which must fail with exit code 1; returns its error, without the folder's path.
    pub fn fail(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "longwall {args:?}:\n{stderr}");
        let start = stderr.find("error: ").unwrap_or_else(|| panic!("no error in:\n{stderr}"));
        self.without_folder(&stderr[start..])
    }

    /// `text` with the folder's path written as `<folder>`.
    pub fn without_folder(&self, text: &str) -> String {
        let plain = self.folder.path().display().to_string();
        let real = fs::canonicalize(self.folder.path()).unwrap().display().to_string();
        text.replace(&real, "<folder>").replace(&plain, "<folder>")
    }

    /// Trains `tiny.toml` with overrides into `runs/NAME`.
    pub fn train(&self, name: &str, sets: &[&str]) {
        let name = format!("run.name={name}");
        let mut args = vec!["train", "--config", "tiny.toml", "--set", &name];
        for set in sets {
            args.extend(["--set", set]);
        }
        self.succeed(&args);
    }

    /// The lines of a run's metrics.jsonl, without the times.
    pub fn metrics(&self, run: &str) -> Vec<String> {
        let text = self.read(&format!("{run}/metrics.jsonl"));
        let without_times = |line: &str| {
            let mut record: serde_json::Map<String, serde_json::Value> =
                serde_json::from_str(line).unwrap();
            for key in ["seconds", "tokens_per_second", "mfu"] {
                record.remove(key);
            }
            serde_json::to_string(&record).unwrap()
        };
        text.lines().map(without_times).collect()
    }

    /// Names in a folder, sorted.
    pub fn list(&self, folder: &str) -> Vec<String> {
        list(&self.path(folder))
    }
}

/// Names in a folder, sorted.
pub fn list(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A text with some structure to learn, different for each number.
fn story(number: usize) -> String {
    let animals = ["cat", "dog", "owl", "fox", "hen"];
    let verbs = ["sees", "hears", "follows", "likes"];
    let mut text = String::new();
    for sentence in 0..12 {
        let at = number * 31 + sentence * 17;
        let (a, b) = (animals[at % 5], animals[(at / 3) % 5]);
        text.push_str(&format!("The {a} {} the {b}. ", verbs[at % 4]));
    }
    text
}

/// Waits for something that happens within two minutes.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(120), "waited too long for {what}");
        sleep(Duration::from_millis(2));
    }
}
