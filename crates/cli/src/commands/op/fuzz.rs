//! Damaged input files of `longwall op`, for every kind.

use longwall_fuzzing::{Folder, checked, fuzz, mutated_safetensors};
use longwall_kernels::Cpu;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::*;

fn args(kind: &str, grad: bool, path: PathBuf) -> Args {
    Args {
        kind: kind.to_owned(),
        input: path.clone(),
        output: path.with_extension("out"),
        grad,
        sets: vec![],
        window: None,
        layer: 1,
        device: DeviceArg::Cpu,
        path: None,
        precision: PrecisionArg::F32,
    }
}

/// What `longwall op` does with its input file, up to the results.
fn operate(args: &Args) -> Result<Vec<(String, Floats)>> {
    let config = parse_kind(&args.kind, &args.sets)?;
    let mut file = InputFile::read(&args.input)?;
    let (shape, op) = read_op(args, &config, &mut file)?;
    file.finish(&expected(&config, &shape, args.grad))?;
    Ok(op.run::<Cpu>(Default::default()))
}

/// A file with every tensor that the kind takes, four of its channels in each head, and with documents.
fn seed(config: &AttentionConfig) -> Vec<u8> {
    let (batch, seq_len) = (1, 6);
    let layer = AttentionShape { layer: 1, layers: 2, ..AttentionShape::new(8, 2, 1, 4) };
    let shape = OpShape { layer, batch, seq_len };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = expected(config, &shape, true)
        .into_iter()
        .map(|(name, shape)| {
            let count = shape.iter().product::<usize>();
            let bytes = (0..count).flat_map(|at| (at as f32 * 0.7).sin().to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let starts: Vec<u8> = [0i32, 0, 0, 3, 3, 5].iter().flat_map(|at| at.to_le_bytes()).collect();
    let documents = TensorView::new(Dtype::I32, vec![batch, seq_len], &starts).unwrap();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize(views.chain([("document_starts", documents)]), None).unwrap()
}

#[test]
fn input_files() {
    let kinds = AttentionConfig::defaults();
    let seeds: Vec<Vec<u8>> = kinds.iter().map(seed).collect();
    for (kind, seed) in kinds.iter().zip(&seeds) {
        let folder = Folder::new();
        let path = folder.put("in.safetensors", seed);
        let outputs = operate(&args(kind.kind(), true, path)).unwrap();
        assert!(outputs.len() > 3, "o and the gradients of {}", kind.kind());
    }
    fuzz("input_files", mutated_safetensors(seeds), 64 << 20, |content| {
        let folder = Folder::new();
        let path = folder.put("in.safetensors", &content);
        // The kinds that take tensors of these names, and at least one.
        let fits = |kind: &&AttentionConfig| {
            let projections = kind.projections(&AttentionShape::new(8, 2, 1, 4));
            let named =
                |name: &str| content.windows(name.len()).any(|part| part == name.as_bytes());
            projections.iter().all(|projection| named(projection.name))
        };
        for kind in kinds.iter().filter(fits) {
            for grad in [true, false] {
                checked(operate(&args(kind.kind(), grad, path.clone())));
            }
        }
    });
}
