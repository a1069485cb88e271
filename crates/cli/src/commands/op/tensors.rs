//! Tensors in safetensors files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use longwall_data::files::write_atomically;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// An f32 tensor in row-major order.
pub struct Floats {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

/// A tensor as stored in the file.
struct Raw {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The tensors of a file that have not been taken yet.
pub struct InputFile {
    path: PathBuf,
    tensors: BTreeMap<String, Raw>,
}

/// Name of the optional tensor that packs documents.
const DOCUMENTS: &str = "document_starts";

impl InputFile {
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|error| {
            anyhow!(
                "cannot read the input file {}: {error}\n  \
                 hint: check the path, and that you may read the file",
                path.display()
            )
        })?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| {
            anyhow!(
                "{} is no valid safetensors file: {error}\n  \
                 hint: it was cut short, damaged or saved in another format; save it again",
                path.display()
            )
        })?;
        let raw = |view: &TensorView| Raw {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        };
        let tensors = file.iter().map(|(name, view)| (name.to_owned(), raw(&view))).collect();
        Ok(InputFile { path: path.to_owned(), tensors })
    }

    fn get(&self, name: &str) -> Result<&Raw> {
        let Some(tensor) = self.tensors.get(name) else {
            bail!(
                "{} has no tensor {name}\n  hint: docs/op-files.md lists what each kind takes",
                self.path.display()
            );
        };
        Ok(tensor)
    }

    /// The sizes of a tensor of 4 dimensions, none of them 0.
    pub fn dims(&self, name: &str) -> Result<[usize; 4]> {
        let shape = &self.get(name)?.shape;
        match <[usize; 4]>::try_from(shape.as_slice()) {
            Ok(dims) if !dims.contains(&0) => Ok(dims),
            _ => bail!(
                "{name} in {} has shape {shape:?}; allowed: [batch, heads, seq_len, channels], \
                 none of them 0\n  hint: docs/op-files.md lists the shapes",
                self.path.display()
            ),
        }
    }

    /// Removes and returns a tensor of the given shape; every element must be finite.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Floats> {
        let path = self.path.display();
        let raw = self.get(name)?;
        if raw.shape != shape {
            bail!(
                "{name} in {path} has shape {:?}; allowed: {shape:?}, which follows from q, k and \
                 the kind's keys\n  hint: docs/op-files.md lists the shapes",
                raw.shape
            );
        }
        if raw.dtype != Dtype::F32 {
            bail!(
                "{name} in {path} is {:?}; allowed: F32\n  hint: convert it before saving",
                raw.dtype
            );
        }
        let data = raw.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let data: Vec<f32> = data.collect();
        if let Some(at) = data.iter().position(|x| !x.is_finite()) {
            bail!(
                "{name} in {path} is {} at {:?}; allowed: finite numbers\n  \
                 hint: use a large finite number instead of an infinity; look for the source of a \
                 NaN where the file was made",
                data[at],
                index_of(at, shape)
            );
        }
        self.tensors.remove(name);
        Ok(Floats { shape: shape.to_vec(), data })
    }

    /// Removes and returns the starts of packed documents, if there are any: i32 or i64,
    /// `[batch, seq_len]`.
    pub fn take_documents(
        &mut self,
        batch: usize,
        seq_len: usize,
    ) -> Result<Option<(Vec<i32>, [usize; 2])>> {
        let Some(raw) = self.tensors.remove(DOCUMENTS) else { return Ok(None) };
        let path = self.path.display();
        let starts: Vec<i64> = match raw.dtype {
            Dtype::I32 => raw
                .bytes
                .chunks_exact(4)
                .map(|b| i64::from(i32::from_le_bytes(b.try_into().expect("4 bytes"))))
                .collect(),
            Dtype::I64 => raw
                .bytes
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")))
                .collect(),
            other => {
                bail!("{DOCUMENTS} in {path} is {other:?}; allowed: I32, I64\n  hint: convert it")
            }
        };
        if raw.shape != [batch, seq_len] {
            bail!(
                "{DOCUMENTS} in {path} has shape {:?}; allowed: {:?}, batch and seq_len of q\n  \
                 hint: docs/op-files.md lists the shapes",
                raw.shape,
                [batch, seq_len]
            );
        }
        for (at, &start) in starts.iter().enumerate() {
            let t = at % seq_len;
            let continues = t > 0 && start == starts[at - 1];
            if start != t as i64 && !continues {
                bail!(
                    "{DOCUMENTS} in {path} is {start} at row {}, position {t}; allowed: {t}, where a \
                     document starts, or the value before it, where one continues\n  \
                     hint: give each position the index of its document's first token",
                    at / seq_len
                );
            }
        }
        Ok(Some((starts.into_iter().map(|s| s as i32).collect(), [batch, seq_len])))
    }

    /// Checks that no tensor is left that the operation would ignore.
    pub fn finish(self, expected: &[(String, Vec<usize>)]) -> Result<()> {
        let Some(name) = self.tensors.keys().next() else { return Ok(()) };
        let names: Vec<_> = expected.iter().map(|(name, _)| name.as_str()).collect();
        bail!(
            "{} has a tensor {name} that the operation does not take; allowed: {}, {DOCUMENTS}\n  \
             hint: leave it out, add --grad if it is the upstream gradient, or set the key that \
             uses it with --set",
            self.path.display(),
            names.join(", ")
        )
    }
}

/// The index in a tensor of `shape` of the element at offset `at`.
fn index_of(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (place, &size) in index.iter_mut().zip(shape).rev() {
        *place = at % size;
        at /= size;
    }
    index
}

/// Writes a file atomically.
pub fn write(path: &Path, tensors: &[(String, Floats)]) -> Result<()> {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, x)| x.data.iter().flat_map(|x| x.to_le_bytes()).collect())
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, x), bytes)| {
        let view = TensorView::new(Dtype::F32, x.shape.clone(), bytes);
        (name, view.expect("the elements are those of the shape"))
    });
    let file = safetensors::serialize(views, None).expect("named f32 tensors can be serialised");
    write_atomically(path, &file).map_err(|error| {
        anyhow!(
            "cannot write the output file {}: {error}\n  \
             hint: make room on the disk, or check the permissions of the folder",
            path.display()
        )
    })
}
