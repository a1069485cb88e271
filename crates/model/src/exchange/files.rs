//! The folder that `transformers` reads: config.json, and safetensors in one file or in shards with an index.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use super::Tensor;
use crate::weights::TensorMap;

/// Why a model cannot be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// A file cannot be read or written.
    #[error("cannot {action} {}: {source}\n  hint: check the path and its permissions, and the room on the disk", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file has no valid content.
    #[error("{} is damaged: {reason}\n  hint: fetch the model again", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A config.json is of no known layout.
    #[error("{} has model_type \"{found}\"; allowed: {known}\n  hint: import a model of one of these layouts", path.display())]
    UnknownLayout {
        /// The file.
        path: PathBuf,
        /// Its model_type.
        found: String,
        /// The layouts.
        known: String,
    },
    /// A config.json describes a model that does not exist here.
    #[error("{} cannot be imported: {problems}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// All reasons.
        problems: Problems,
    },
    /// No layout can express the model.
    #[error("the model cannot be exported{}", in_each(problems))]
    Inexpressible {
        /// The reasons, by layout.
        problems: Vec<(&'static str, Problems)>,
    },
    /// No layout has the model's attention kind.
    #[error(
        "the model cannot be exported: its first layer has kind = \"{kind}\"; allowed: {known}\n  hint: share the run's folder instead"
    )]
    NoLayout {
        /// The kind.
        kind: &'static str,
        /// The kinds that have a layout.
        known: String,
    },
    /// The tensors are not those of the configuration.
    #[error("the tensors in {} do not fit its config.json:{}\n  hint: fetch the model again", path.display(), tensors.iter().take(12).map(|t| format!("\n  {t}")).collect::<String>())]
    Tensors {
        /// The folder.
        path: PathBuf,
        /// What does not fit.
        tensors: Vec<String>,
    },
    /// The folder to write exists.
    #[error("{} exists already\n  hint: choose another folder, or remove it", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
}

fn in_each(problems: &[(&'static str, Problems)]) -> String {
    let one = |(layout, problems): &(&str, Problems)| {
        let lines = problems.as_slice().iter().map(|problem| format!("\n  {problem}"));
        format!("\nin the layout of {layout}:{}", lines.collect::<String>())
    };
    problems.iter().map(one).collect()
}

/// The files beside the weights.
#[derive(Clone, Debug)]
pub struct WriteHf<'a> {
    /// config.json.
    pub config: &'a Value,
    /// Further files, by name.
    pub others: Vec<(&'static str, Vec<u8>)>,
    /// Largest size of a file of weights, in bytes: a larger model is sharded.
    pub max_shard_bytes: u64,
}

impl WriteHf<'_> {
    /// Writes the folder `path`, which must not exist: first beside it, then renamed.
    ///
    /// # Errors
    /// When it exists or cannot be written; nothing is left then.
    pub fn write(&self, path: &Path, tensors: &[(String, Tensor)]) -> Result<(), ExchangeError> {
        if path.exists() {
            return Err(ExchangeError::Exists { path: path.to_owned() });
        }
        // Without a slash at its end.
        let mut temporary = path.components().as_path().as_os_str().to_owned();
        temporary.push(format!(".{}.tmp", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let io = |source| ExchangeError::Io { action: "write", path: path.to_owned(), source };
        // A process of the same number that was killed may have left it.
        if temporary.exists() {
            fs::remove_dir_all(&temporary).map_err(io)?;
        }
        let written = fs::create_dir_all(&temporary)
            .map_err(io)
            .and_then(|()| self.fill(&temporary, tensors))
            .and_then(|()| sync_files_in(&temporary).map_err(io))
            .and_then(|()| fs::rename(&temporary, path).map_err(io));
        written.inspect_err(|_| {
            let _ = fs::remove_dir_all(&temporary);
        })
    }

    fn fill(&self, folder: &Path, tensors: &[(String, Tensor)]) -> Result<(), ExchangeError> {
        write_json(&folder.join(CONFIG), self.config)?;
        for (name, bytes) in &self.others {
            write(&folder.join(name), bytes)?;
        }
        let shards = shards(tensors, self.max_shard_bytes);
        if let [all] = &shards[..] {
            return write_shard(&folder.join(WEIGHTS), all);
        }
        let mut weight_map = BTreeMap::new();
        let mut total = 0;
        for (at, shard) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", at + 1, shards.len());
            write_shard(&folder.join(&name), shard)?;
            for (tensor, (_, data)) in *shard {
                weight_map.insert(tensor, name.clone());
                total += 4 * data.len() as u64;
            }
        }
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_json(&folder.join(INDEX), &index)
    }
}

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// `tensors` in files of at most `max_bytes`; a larger tensor has a file of its own.
fn shards(tensors: &[(String, Tensor)], max_bytes: u64) -> Vec<&[(String, Tensor)]> {
    let (mut shards, mut start, mut bytes) = (vec![], 0, 0);
    for (at, (_, (_, data))) in tensors.iter().enumerate() {
        let size = 4 * data.len() as u64;
        if at > start && bytes + size > max_bytes {
            shards.push(&tensors[start..at]);
            (start, bytes) = (at, 0);
        }
        bytes += size;
    }
    shards.push(&tensors[start..]);
    shards
}

fn write_shard(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), ExchangeError> {
    let views = tensors.iter().map(|(name, (shape, data))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(data));
        (name, view.expect("the elements are those of the shape"))
    });
    // transformers asks for the framework that wrote the file.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| {
        let source = std::io::Error::other(error.to_string());
        ExchangeError::Io { action: "write", path: path.to_owned(), source }
    })
}

/// Flushes the files in `folder` to disk.
fn sync_files_in(folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        File::options().read(true).write(true).open(entry?.path())?.sync_all()?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), ExchangeError> {
    let io = |source| ExchangeError::Io { action: "write", path: path.to_owned(), source };
    fs::write(path, bytes).map_err(io)
}

fn write_json(path: &Path, value: &Value) -> Result<(), ExchangeError> {
    let text = serde_json::to_string_pretty(value).expect("JSON has a text form");
    write(path, (text + "\n").as_bytes())
}

/// A folder with a model in Hugging Face's format.
#[derive(Clone, Debug)]
pub struct HfFolder {
    path: PathBuf,
    /// config.json.
    pub config: Value,
}

impl HfFolder {
    /// Reads the config.json in `path`.
    ///
    /// # Errors
    /// When it is not there, or no JSON.
    pub fn open(path: &Path) -> Result<Self, ExchangeError> {
        let config = read_json(&path.join(CONFIG))?;
        Ok(HfFolder { path: path.to_owned(), config })
    }

    /// The path of config.json.
    pub fn config_path(&self) -> PathBuf {
        self.path.join(CONFIG)
    }

    /// All tensors, in f32.
    ///
    /// # Errors
    /// When a file is missing or damaged, or has a type other than f32, bf16 and f16.
    pub fn tensors(&self) -> Result<TensorMap, ExchangeError> {
        let mut files = vec![self.path.join(WEIGHTS)];
        let index = self.path.join(INDEX);
        if index.is_file() {
            let map = read_json(&index)?;
            let names = map["weight_map"].as_object().into_iter().flat_map(|map| map.values());
            let mut names: Vec<&str> = names.filter_map(Value::as_str).collect();
            names.sort_unstable();
            names.dedup();
            let inside = |name: &&str| !name.contains(['/', '\\']);
            if names.is_empty() || !names.iter().all(inside) {
                let reason = "its weight_map names no files of this folder".to_owned();
                return Err(ExchangeError::Format { path: index, reason });
            }
            files = names.into_iter().map(|name| self.path.join(name)).collect();
        }
        let mut tensors = TensorMap::new();
        for file in files {
            read_shard(&file, &mut tensors)?;
        }
        Ok(tensors)
    }
}

fn read_json(path: &Path) -> Result<Value, ExchangeError> {
    let bytes = read(path)?;
    serde_json::from_slice(&bytes).map_err(|error| {
        let reason = error.to_string();
        ExchangeError::Format { path: path.to_owned(), reason }
    })
}

fn read(path: &Path) -> Result<Vec<u8>, ExchangeError> {
    let io = |source| ExchangeError::Io { action: "read", path: path.to_owned(), source };
    fs::read(path).map_err(io)
}

fn read_shard(path: &Path, tensors: &mut TensorMap) -> Result<(), ExchangeError> {
    let bytes = read(path)?;
    let format = |reason: String| ExchangeError::Format { path: path.to_owned(), reason };
    let file = SafeTensors::deserialize(&bytes).map_err(|error| format(error.to_string()))?;
    for (name, view) in file.iter() {
        let data = in_f32(view.dtype(), view.data());
        let Some(data) = data else {
            // Stored masks are of other types, and belong to no weight.
            if matches!(view.dtype(), Dtype::BOOL | Dtype::U8) {
                continue;
            }
            let dtype = view.dtype();
            return Err(format(format!("{name} is {dtype:?}; allowed: F32, BF16, F16")));
        };
        tensors.insert(name.to_owned(), (view.shape().to_vec(), data));
    }
    Ok(())
}

/// Little-endian elements as f32.
fn in_f32(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        Dtype::F32 => {
            let words = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            Some(words.collect())
        }
        Dtype::BF16 => Some(pairs().map(|x| f32::from_bits(u32::from(x) << 16)).collect()),
        Dtype::F16 => Some(pairs().map(f16_to_f32).collect()),
        _ => None,
    }
}

/// IEEE 754 binary16.
fn f16_to_f32(bits: u16) -> f32 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    match exponent {
        0 => sign * fraction * (-24f32).exp2(),
        31 if fraction == 0.0 => sign * f32::INFINITY,
        31 => f32::NAN,
        _ => sign * (1.0 + fraction / 1024.0) * ((exponent - 15) as f32).exp2(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_is_read_exactly() {
        let cases = [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x3555, 0.33325195),
            (0x0001, 5.9604645e-8),
            (0x7bff, 65504.0),
            (0x7c00, f32::INFINITY),
        ];
        for (bits, value) in cases {
            assert_eq!(f16_to_f32(bits), value);
        }
        assert!(f16_to_f32(0x7e00).is_nan());
        assert_eq!(in_f32(Dtype::BF16, &[0x80, 0x3f]), Some(vec![1.0]));
    }

    #[test]
    fn shards_hold_whole_tensors_up_to_their_size() {
        let tensor = |n: usize| (n.to_string(), (vec![n], vec![0.0; n]));
        let tensors: Vec<_> = [4, 4, 10, 1].map(tensor).into();
        let sizes =
            |max| -> Vec<usize> { shards(&tensors, max).iter().map(|shard| shard.len()).collect() };
        assert_eq!(sizes(1 << 20), [4]);
        assert_eq!(sizes(32), [2, 1, 1]);
        assert_eq!(sizes(4), [1, 1, 1, 1]);
    }
}
