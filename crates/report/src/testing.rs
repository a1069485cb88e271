//! Runs that were never trained.

use std::path::Path;

use longwall_train::config::RunConfig;
use longwall_train::metrics::{Record, ValidationRecord};

use crate::runs::Run;

const CONFIG: &str = r#"
data = { seq_len = 32, sources = [{ kind = "text", paths = ["corpus"] }] }
model = { layers = 1, width = 16, heads = 2, attention = { kind = "rope" } }
train = { tokens = 1280, batch_tokens = 128, lr = 1e-2 }
"#;

/// A run of this name and seed that ended with a validation loss; `sets` override the configuration.
pub(crate) fn run(name: &str, seed: u64, loss: f64, sets: &[&str]) -> Run {
    let own = [format!("run.name={name}"), format!("run.seed={seed}")];
    let sets: Vec<String> = own.into_iter().chain(sets.iter().map(|s| (*s).to_owned())).collect();
    let validation = ValidationRecord {
        step: 10,
        tokens: 1280,
        flops: None,
        validation_loss: loss,
        perplexity: loss.exp(),
        bits_per_byte: loss,
        loss_by_position: vec![],
        best_context_loss: None,
        probe: Default::default(),
        ema_validation_loss: None,
        seconds: 1.0,
    };
    Run {
        dir: Path::new("runs").join(name),
        config: RunConfig::parse(CONFIG, Path::new("base.toml"), &sets).unwrap(),
        finished: None,
        records: vec![Record::Validation(validation)],
        evaluations: vec![],
    }
}
