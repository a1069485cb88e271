//! The scalars of a run by tag, as TensorBoard shows them, and their export from `metrics.jsonl`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use longwall_data::files;

use crate::metrics::{self, MetricsError, Record};
use crate::tensorboard;

/// Tag and value of every scalar in a record; what is not finite is NaN.
pub(crate) fn scalars(record: &Record) -> Vec<(String, f64)> {
    let or_nan = |value: Option<f32>| value.map_or(f64::NAN, f64::from);
    let named = |values: Vec<(&str, f64)>| -> Vec<(String, f64)> {
        values.into_iter().map(|(tag, value)| (tag.to_owned(), value)).collect()
    };
    match record {
        Record::Step(step) => {
            let mut values = vec![
                ("train/loss", or_nan(step.loss)),
                ("train/grad_norm", or_nan(step.grad_norm)),
                ("train/lr", step.lr),
                ("train/tokens_per_second", step.tokens_per_second),
            ];
            values.extend(step.z_loss.map(|z_loss| ("train/z_loss", f64::from(z_loss))));
            values.extend(step.mfu.map(|mfu| ("train/mfu", mfu)));
            values.extend(step.batch_tokens.map(|n| ("train/batch_tokens", n as f64)));
            values.extend(step.seq_len.map(|n| ("train/seq_len", n as f64)));
            values.extend(step.window.map(|n| ("train/window", n as f64)));
            named(values)
        }
        Record::Validation(record) => {
            let mut values = vec![
                ("validation/loss", record.validation_loss),
                ("validation/perplexity", record.perplexity),
                ("validation/bits_per_byte", record.bits_per_byte),
            ];
            values.extend(record.best_context_loss.map(|x| ("validation/best_context_loss", x)));
            values.extend(record.ema_validation_loss.map(|loss| ("validation/ema_loss", loss)));
            let measured = record.probe.iter().map(|(name, x)| (format!("validation/{name}"), *x));
            named(values).into_iter().chain(measured).collect()
        }
        Record::Norms(record) => {
            let of_layer = |(layer, norm): (&String, &crate::optimiser::LayerNorm)| {
                let values = [
                    ("grad_norm", norm.grad_norm),
                    ("weight_norm", norm.weight_norm),
                    ("update_ratio", norm.update_ratio),
                ];
                values.map(|(name, value)| {
                    (format!("layers/{layer}/{name}"), value.unwrap_or(f64::NAN))
                })
            };
            record.layers.iter().flat_map(of_layer).collect()
        }
        Record::Noise(record) => {
            let mut values = vec![
                ("gradient_noise/trace", record.noise_trace),
                ("gradient_noise/gradient_square", record.gradient_square),
            ];
            values.extend(record.noise_scale.map(|scale| ("gradient_noise/scale", scale)));
            named(values)
        }
    }
}

/// Steps and tokens of a record.
pub(crate) fn place(record: &Record) -> (u64, u64) {
    let tokens = match record {
        Record::Step(record) => record.tokens,
        Record::Validation(record) => record.tokens,
        Record::Norms(record) => record.tokens,
        Record::Noise(record) => record.tokens,
    };
    (record.step(), tokens)
}

/// The scalars of a run by tag, in the order in which the tags first occur; of each, the steps with their values.
pub fn by_step(records: &[Record]) -> Vec<(String, Vec<(u64, f64)>)> {
    let mut all: Vec<(String, Vec<(u64, f64)>)> = vec![];
    let mut places: HashMap<String, usize> = HashMap::new();
    for record in records {
        let (step, _) = place(record);
        for (tag, value) in scalars(record) {
            let at = *places.entry(tag.clone()).or_insert_with(|| {
                all.push((tag, vec![]));
                all.len() - 1
            });
            all[at].1.push((step, value));
        }
    }
    all
}

/// Writes the scalars of the run in `run_dir` as CSV: one row per step, one column per tag, in the order in which
/// the tags first occur. A cell is empty where a step has no such scalar, or one that is not finite.
///
/// # Errors
/// When the metrics cannot be read, or the file cannot be written.
pub fn export_csv(run_dir: &Path, out: &Path) -> Result<(), MetricsError> {
    let mut tags: Vec<String> = vec![];
    let mut rows: BTreeMap<u64, (u64, BTreeMap<String, f64>)> = BTreeMap::new();
    for record in metrics::read(&run_dir.join("metrics.jsonl"))? {
        let (step, tokens) = place(&record);
        let (_, row) = rows.entry(step).or_insert_with(|| (tokens, BTreeMap::new()));
        for (tag, value) in scalars(&record) {
            if !tags.contains(&tag) {
                tags.push(tag.clone());
            }
            row.insert(tag, value);
        }
    }
    let header = ["step", "tokens"].into_iter().chain(tags.iter().map(String::as_str));
    let mut csv = header.collect::<Vec<_>>().join(",") + "\n";
    for (step, (tokens, row)) in &rows {
        let finite = |tag| row.get(tag).filter(|value: &&f64| value.is_finite());
        let cells = tags.iter().map(|tag| finite(tag).map_or_else(String::new, f64::to_string));
        let cells = [step.to_string(), tokens.to_string()].into_iter().chain(cells);
        csv += &(cells.collect::<Vec<_>>().join(",") + "\n");
    }
    let io = |source| MetricsError::Io { path: out.to_owned(), source };
    files::write_atomically(out, csv.as_bytes()).map_err(io)
}

/// Writes the scalars of the run in `run_dir` as a TensorBoard event file into the folder `out`, in place of an earlier
/// export's.
///
/// # Errors
/// As [`export_csv`].
pub fn export_tensorboard(run_dir: &Path, out: &Path) -> Result<(), MetricsError> {
    let records = metrics::read(&run_dir.join("metrics.jsonl"))?;
    tensorboard::export(out, records.iter().map(|record| (place(record).0, scalars(record))))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const METRICS: &str = r#"{"step":1,"tokens":64,"loss":3.5,"grad_norm":null,"lr":0.001,"tokens_per_second":10.0,"mfu":null,"seconds":1.0,"skipped":false}
{"step":1,"tokens":64,"layers":{"embedding":{"grad_norm":1.0,"weight_norm":2.0,"update_ratio":null}}}
{"step":2,"tokens":128,"loss":3.0,"grad_norm":0.5,"lr":0.002,"tokens_per_second":11.0,"mfu":0.25,"seconds":2.0,"skipped":false}
{"step":2,"tokens":128,"noise_scale":4096.5,"noise_trace":8.0,"gradient_square":0.25}
{"step":2,"tokens":128,"validation_loss":2.5,"perplexity":12.0,"bits_per_byte":1.5,"probe":{"pruned_fraction":0.5},"seconds":3.0}
"#;

    fn run() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("metrics.jsonl"), METRICS).unwrap();
        folder
    }

    #[test]
    fn csv_has_a_row_for_each_step_and_a_column_for_each_scalar() {
        let folder = run();
        let out = folder.path().join("run.csv");
        export_csv(folder.path(), &out).unwrap();
        insta::assert_snapshot!(fs::read_to_string(out).unwrap(), @r"
        step,tokens,train/loss,train/grad_norm,train/lr,train/tokens_per_second,layers/embedding/grad_norm,layers/embedding/weight_norm,layers/embedding/update_ratio,train/mfu,gradient_noise/trace,gradient_noise/gradient_square,gradient_noise/scale,validation/loss,validation/perplexity,validation/bits_per_byte,validation/pruned_fraction
        1,64,3.5,,0.001,10,1,2,,,,,,,,,
        2,128,3,0.5,0.002,11,,,,0.25,8,0.25,4096.5,2.5,12,1.5,0.5
        ");
    }

    #[test]
    fn tensorboard_gets_every_tag() {
        let folder = run();
        let out = folder.path().join("events");
        export_tensorboard(folder.path(), &out).unwrap();
        let file = fs::read_dir(out).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(file).unwrap();
        for tag in ["train/loss", "layers/embedding/weight_norm", "validation/pruned_fraction"] {
            assert!(bytes.windows(tag.len()).any(|part| part == tag.as_bytes()), "{tag}");
        }
    }

    #[test]
    fn a_folder_without_metrics_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = export_csv(folder.path(), &folder.path().join("a.csv")).unwrap_err();
        assert!(error.to_string().contains("give the folder of a run that has trained"), "{error}");
    }
}
