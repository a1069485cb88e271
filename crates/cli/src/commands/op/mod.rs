//! `longwall op --kind KIND --input FILE --output FILE`.

#[cfg(test)]
mod fuzz;
mod tensors;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use clap::ValueEnum;
use longwall_kernels::attention::{
    AttentionConfig, AttentionShape, DocumentStarts, ExecPath, Inputs, Kernel,
};
use longwall_kernels::backend::{OpBackend, with_reference};
use longwall_kernels::device::{Device, DeviceKind, OnDevice};
use longwall_train::config::{SizeNames, check_kind, parse_kind};
use longwall_train::device;

use self::tensors::{Floats, InputFile, write};
use crate::context::DeviceArg;
use crate::numbers::whole;
use crate::output::outln;

/// Arguments of `longwall op`.
#[derive(clap::Args)]
pub struct Args {
    /// The attention kind, as `kind` in the table [model.attention]
    #[arg(long)]
    kind: String,

    /// The safetensors file with q, k, v and the kind's other tensors: see docs/op-files.md
    #[arg(long, value_name = "FILE")]
    input: PathBuf,

    /// The safetensors file to write
    #[arg(long, value_name = "FILE")]
    output: PathBuf,

    /// Also read the upstream gradient `grad_o`, and write the gradient of every input
    #[arg(long)]
    grad: bool,

    /// A key of the kind's table: `--set gate_dims=32`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,

    /// A token attends to itself and the WINDOW − 1 tokens before it
    #[arg(long, value_parser = whole::<usize>(0..=u64::MAX), value_name = "TOKENS")]
    window: Option<usize>,

    /// Index of the layer, from 0, for kinds whose equations depend on depth
    #[arg(long, value_parser = whole::<usize>(0..=u64::MAX), default_value_t = 0)]
    layer: usize,

    /// The device
    #[arg(long, default_value = "auto")]
    device: DeviceArg,

    /// The implementation; by default the kernel if the kind has one on the device
    #[arg(long)]
    path: Option<PathArg>,

    /// Type that q, k, v and the projections are rounded to before the operation; bf16, which training
    /// on CUDA uses, needs CUDA
    #[arg(long, default_value = "f32")]
    precision: PrecisionArg,
}

/// The type of q, k, v and the projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PrecisionArg {
    /// As they are in the file
    F32,
    /// Rounded to bf16, like o and the gradients of these inputs
    Bf16,
}

impl PrecisionArg {
    fn dtype(self) -> DType {
        match self {
            PrecisionArg::F32 => DType::F32,
            PrecisionArg::Bf16 => DType::BF16,
        }
    }
}

/// Which implementation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PathArg {
    /// Plain tensor operations
    Reference,
    /// The device's kernel; an error if the kind has none
    Kernel,
}

/// Runs the operation on the tensors of a file.
pub fn run(args: Args) -> Result<()> {
    let config = parse_kind(&args.kind, &args.sets)?;
    check_layer(args.layer)?;
    check_output(&args.input, &args.output)?;
    let mut file = InputFile::read(&args.input)?;
    let (shape, op) = read_op(&args, &config, &mut file)?;
    file.finish(&expected(&config, &shape, args.grad))?;
    let device = device::open(args.device.into(), None)?;
    let kernel = kernel(args.precision, &device)?;
    let reference = use_reference(args.path, &config, &shape, kernel)?;
    tracing::info!(
        "path: {}",
        if reference { "reference, plain tensor operations" } else { "kernel" }
    );
    let outputs = match reference {
        true => with_reference(|| device.run(op)),
        false => device.run(op),
    };
    write(&args.output, &outputs)?;
    outln!("{}: {}", args.output.display(), names(&outputs))?;
    check_finite(&outputs)
}

/// The inputs were finite, so results that are not come from a number beyond the type's range.
fn check_finite(outputs: &[(String, Floats)]) -> Result<()> {
    let mut problems = vec![];
    for (name, x) in outputs {
        let count = x.data.iter().filter(|x| !x.is_finite()).count();
        if count > 0 {
            problems.push(format!("{name}: {count} of {}", x.data.len()));
        }
    }
    if !problems.is_empty() {
        bail!(
            "elements of the results are not finite, although all inputs are ({})\n  \
             hint: the results were written; give inputs of smaller magnitude",
            problems.join(", ")
        );
    }
    Ok(())
}

/// One more than the greatest index of a layer.
const MOST_LAYERS: usize = 1024;

/// Checks the layer's index.
fn check_layer(layer: usize) -> Result<()> {
    if layer >= MOST_LAYERS {
        bail!("--layer is {layer}; allowed: 0 to {}\n  hint: layers count from 0", MOST_LAYERS - 1);
    }
    Ok(())
}

/// Checks before the operation runs that its results can be written.
fn check_output(input: &Path, output: &Path) -> Result<()> {
    let path = output.display();
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        bail!(
            "--output is {path}, and there is no folder {}; allowed: a file in a folder that \
             exists\n  hint: make the folder, or choose another path",
            folder.display()
        );
    }
    if output.is_dir() {
        bail!("--output is {path}, which is a folder; allowed: a file\n  hint: add a file name");
    }
    if let (Ok(input), Ok(output)) = (input.canonicalize(), output.canonicalize())
        && input == output
    {
        bail!(
            "--output is {path}, the input file; allowed: another file\n  hint: choose a new name"
        );
    }
    Ok(())
}

/// The kernel that inputs of this precision need.
fn kernel(precision: PrecisionArg, device: &Device) -> Result<Kernel> {
    let kernel = Kernel { device: device.kind(), dtype: precision.dtype() };
    if precision == PrecisionArg::Bf16 && kernel.device == DeviceKind::Cpu {
        bail!(
            "--precision is bf16, but the device is the CPU; allowed there: f32\n  \
             hint: leave --precision out, or use a machine with an NVIDIA GPU"
        );
    }
    Ok(kernel)
}

/// Whether the reference runs, for inputs that need `kernel`.
fn use_reference(
    path: Option<PathArg>,
    config: &AttentionConfig,
    OpShape { layer, batch, seq_len }: &OpShape,
    kernel: Kernel,
) -> Result<bool> {
    let has_kernel = config.path(kernel, layer, *batch, Some(*seq_len)) != ExecPath::Reference;
    if path == Some(PathArg::Kernel) && !has_kernel {
        let known = AttentionConfig::KINDS.iter().find(|known| known.kind == config.kind());
        let sizes = match known.is_some_and(|known| known.kernels.contains(&kernel)) {
            true => format!(
                " with this configuration, for {batch} × {} heads of {} channels and {seq_len} tokens",
                layer.heads, layer.head_dim
            ),
            false => String::new(),
        };
        bail!(
            "--path is kernel, but kind {} has no kernel for {} on {}{sizes}; allowed: reference\n  \
             hint: leave --path out, or choose another --device or --precision",
            config.kind(),
            kernel.dtype.name(),
            kernel.device
        );
    }
    Ok(path == Some(PathArg::Reference) || !has_kernel)
}

/// Every tensor that the kind takes: name and shape, with the sizes of this call.
fn expected(config: &AttentionConfig, shape: &OpShape, grad: bool) -> Vec<(String, Vec<usize>)> {
    let OpShape { layer, batch, seq_len } = shape;
    let (batch, seq_len) = (*batch, *seq_len);
    let (views, value_dim) = (config.views(), config.value_dim(layer));
    let mut tensors = vec![
        ("q", vec![batch, views * config.query_heads(layer), seq_len, layer.head_dim]),
        ("k", vec![batch, views * config.key_heads(layer), seq_len, layer.head_dim]),
        ("v", vec![batch, layer.kv_heads, seq_len, value_dim]),
    ];
    let projections = config.projections(layer).into_iter();
    tensors.extend(projections.map(|p| (p.name, vec![batch, seq_len, p.features])));
    tensors.extend(config.parameters(layer).into_iter().map(|p| (p.name, vec![p.elements])));
    if grad {
        tensors.push(("grad_o", vec![batch, layer.heads, seq_len, value_dim]));
    }
    tensors.into_iter().map(|(name, shape)| (name.to_owned(), shape)).collect()
}

/// The sizes of one call.
struct OpShape {
    layer: AttentionShape,
    batch: usize,
    seq_len: usize,
}

/// What this command calls the sizes of a layer.
const SIZE_NAMES: SizeNames = SizeNames {
    given: "options and tensors",
    head_dim: "head_dim of q",
    width: "heads · head_dim of q",
};

/// Takes the kind's tensors from the file.
fn read_op(args: &Args, config: &AttentionConfig, file: &mut InputFile) -> Result<(OpShape, Op)> {
    let [batch, q_heads, seq_len, head_dim] = file.dims("q")?;
    let [_, k_heads, _, _] = file.dims("k")?;
    let views = config.views();
    if q_heads % views != 0 || k_heads % views != 0 || k_heads == 0 || q_heads % k_heads != 0 {
        bail!(
            "q in {} has {q_heads} heads and k {k_heads}; allowed: multiples of the kind's {views} \
             views, and those of k divide those of q\n  hint: docs/op-files.md lists the shapes",
            args.input.display()
        );
    }
    // A head of k may serve several heads of v.
    let [_, v_heads, _, _] = file.dims("v")?;
    let (keys, group) = (k_heads / views, q_heads / k_heads);
    let kv_heads = if v_heads > 0 && v_heads % keys == 0 { v_heads } else { keys };
    let heads = kv_heads * group;
    let layer = AttentionShape {
        window: args.window,
        layer: args.layer,
        layers: args.layer + 1,
        ..AttentionShape::new(heads * head_dim, heads, kv_heads, head_dim)
    };
    check_kind(config, &layer, SIZE_NAMES)?;
    let shape = OpShape { layer, batch, seq_len };
    let inputs = expected(config, &shape, args.grad);
    let take = |(name, shape): &(String, Vec<usize>)| Ok((name.clone(), file.take(name, shape)?));
    let mut floats: Vec<(String, Floats)> = inputs.iter().map(take).collect::<Result<_>>()?;
    let grad = args.grad.then(|| floats.pop().expect("the upstream gradient is the last").1);
    let documents = file.take_documents(batch, seq_len)?;
    let projections = config.projections(&layer).len();
    let dtype = args.precision.dtype();
    Ok((shape, Op { config: config.clone(), layer, floats, projections, grad, documents, dtype }))
}

/// The operation with its inputs.
struct Op {
    config: AttentionConfig,
    layer: AttentionShape,
    /// q, k, v, projections, parameters.
    floats: Vec<(String, Floats)>,
    projections: usize,
    grad: Option<Floats>,
    documents: Option<(Vec<i32>, [usize; 2])>,
    /// Type of q, k, v and the projections.
    dtype: DType,
}

impl OnDevice for Op {
    type Output = Vec<(String, Floats)>;

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        match &self.grad {
            None => {
                let inputs = self.inputs::<B>(&device);
                let o = self.config.attend(&self.layer, inputs, self.documents(&device));
                vec![("o".to_owned(), floats(o))]
            }
            Some(grad) => self.gradients::<B>(grad, &device),
        }
    }
}

impl Op {
    fn inputs<B: OpBackend>(&self, device: &B::Device) -> Inputs<B> {
        let sides = 3..3 + self.projections;
        let [q, k, v] =
            [0, 1, 2].map(|at| tensor::<B, 4>(&self.floats[at].1, device).cast(self.dtype));
        let projection = |x: &(String, Floats)| tensor::<B, 3>(&x.1, device).cast(self.dtype);
        Inputs {
            q,
            k,
            v,
            projections: self.floats[sides.clone()].iter().map(projection).collect(),
            parameters: self.floats[sides.end..].iter().map(|x| tensor(&x.1, device)).collect(),
        }
    }

    fn documents<B: OpBackend>(&self, device: &B::Device) -> DocumentStarts<B> {
        let (starts, shape) = self.documents.clone()?;
        Some(Tensor::<B, 2, Int>::from_data(TensorData::new(starts, shape), device))
    }

    /// o, and the gradients of Σ grad · o with respect to every input.
    fn gradients<B: OpBackend>(&self, grad: &Floats, device: &B::Device) -> Vec<(String, Floats)> {
        let Inputs { q, k, v, projections, parameters } = self.inputs::<Autodiff<B>>(device);
        let [q, k, v] = [q, k, v].map(Tensor::require_grad);
        let projections: Vec<_> = projections.into_iter().map(Tensor::require_grad).collect();
        let parameters: Vec<_> = parameters.into_iter().map(Tensor::require_grad).collect();
        let inputs = Inputs {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            projections: projections.clone(),
            parameters: parameters.clone(),
        };
        let o = self.config.attend(&self.layer, inputs, self.documents(device));
        let grads = (o.clone().cast(DType::F32) * tensor(grad, device)).sum().backward();
        let first = [&q, &k, &v].map(|x| gradient(x, &grads));
        let projections = projections.iter().map(|x| gradient(x, &grads));
        let parameters = parameters.iter().map(|x| gradient(x, &grads));
        let names = self.floats.iter().map(|(name, _)| format!("grad_{name}"));
        let gradients = names.zip(first.into_iter().chain(projections).chain(parameters));
        std::iter::once(("o".to_owned(), floats(o.inner()))).chain(gradients).collect()
    }
}

fn tensor<B: OpBackend, const D: usize>(x: &Floats, device: &B::Device) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(x.data.clone(), x.shape.clone()), device)
}

fn floats<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Floats {
    Floats { shape: x.dims().to_vec(), data: x.into_data().iter::<f32>().collect() }
}

/// The gradient of an input; zeros if the output does not depend on it.
fn gradient<B: OpBackend, const D: usize>(
    x: &Tensor<Autodiff<B>, D>,
    grads: &<Autodiff<B> as AutodiffBackend>::Gradients,
) -> Floats {
    floats(x.grad(grads).unwrap_or_else(|| x.clone().inner().zeros_like()))
}

fn names(outputs: &[(String, Floats)]) -> String {
    let text: Vec<_> = outputs.iter().map(|(name, x)| format!("{name} {:?}", x.shape)).collect();
    text.join(", ")
}
