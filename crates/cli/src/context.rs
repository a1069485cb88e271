//! Shared by commands: the device option, and opening a run's model.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_model::{LanguageModel, weights};
use longwall_train::checkpoint::{Checkpoint, CheckpointSelector, TokenizerIdentity};
use longwall_train::config::DeviceChoice;
use longwall_train::device::{self, Compute};

/// The device on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum DeviceArg {
    /// CUDA if a driver and a GPU respond, else the CPU
    Auto,
    /// The CPU
    Cpu,
    /// CUDA; an error on a machine without it
    Cuda,
}

impl From<DeviceArg> for DeviceChoice {
    fn from(arg: DeviceArg) -> Self {
        match arg {
            DeviceArg::Auto => DeviceChoice::Auto,
            DeviceArg::Cpu => DeviceChoice::Cpu,
            DeviceArg::Cuda => DeviceChoice::Cuda,
        }
    }
}

/// A run's checkpoint, and the device to load it on.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// The run's folder
    #[arg(long, global = true, value_name = "RUN")]
    pub run: Option<PathBuf>,

    /// The checkpoint: `latest`, `best`, or a step
    #[arg(long, global = true, default_value_t)]
    pub checkpoint: CheckpointSelector,

    /// The device; by default the one the run was trained with
    #[arg(long, global = true)]
    pub device: Option<DeviceArg>,
}

/// A checkpoint with its tokenizer, before its weights are loaded.
pub struct OpenRun {
    /// The run's folder.
    pub dir: PathBuf,
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The tokenizer it was trained with.
    pub tokenizer: Tokenizer,
    /// The device and precision that the model runs in.
    pub compute: Compute,
}

impl RunArgs {
    /// Opens the checkpoint, its tokenizer and the device.
    pub fn open(&self) -> Result<OpenRun> {
        let Some(dir) = self.run.clone() else {
            bail!("no run was given\n  hint: add --run runs/NAME, the folder of a trained run");
        };
        open_run(&dir, self.checkpoint, self.device.map(Into::into))
    }
}

/// Opens a run's checkpoint, its tokenizer and the device.
pub fn open_run(
    dir: &Path,
    wanted: CheckpointSelector,
    device: Option<DeviceChoice>,
) -> Result<OpenRun> {
    let checkpoint = Checkpoint::open(dir, wanted)?;
    let config = &checkpoint.config;
    let tokenizer = Tokenizer::load(&config.tokenizer)?;
    checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
    let device = device::open(device.unwrap_or(config.run.device), config.run.threads)?;
    let compute = Compute::for_trained(device, config.run.precision);
    Ok(OpenRun { dir: dir.to_owned(), checkpoint, tokenizer, compute })
}

impl OpenRun {
    /// The model with the checkpoint's weights, in the precision it runs in.
    pub fn load<B: OpBackend>(&self, device: &B::Device) -> Result<LanguageModel<B>> {
        let config = &self.checkpoint.config;
        let (vocab, seq_len) = (self.tokenizer.vocab_size(), config.data.seq_len);
        let model = LanguageModel::<B>::new(&config.model, vocab, seq_len, config.run.seed, device);
        Ok(self.compute.precision.convert(weights::load(model, &self.checkpoint.weights())?))
    }
}

/// A word of a command that a user may paste into a shell: in single quotes if it holds a space or another
/// character that shells treat specially.
pub fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_commands_survive_a_shell() {
        assert_eq!(shell_word("runs/wall-1"), "runs/wall-1");
        for word in ["my runs/a", "it's", "a$HOME`b`\"c\"\\", "", "zwölf", "a\nb", "-x*"] {
            let command = format!("printf %s {}", shell_word(word));
            let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }
}
