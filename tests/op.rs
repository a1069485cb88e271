//! `longwall op` and `longwall variants`.

use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::support::Workspace;

/// A tensor of a safetensors file: name, type, shape, bytes.
type Raw = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn floats(name: &'static str, shape: &[usize], f: impl Fn(usize) -> f32) -> Raw {
    let data = (0..shape.iter().product()).flat_map(|at| f(at).to_le_bytes()).collect();
    (name, Dtype::F32, shape.to_vec(), data)
}

fn write(path: &Path, tensors: &[Raw]) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn read(path: &Path, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor(name).unwrap().data().to_vec();
    data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// fox on two heads that share one key head, four tokens, two channels.
fn fox() -> Vec<Raw> {
    let wave = |scale: f32| move |at: usize| (at as f32 * scale).sin();
    vec![
        floats("q", &[1, 2, 4, 2], wave(0.7)),
        floats("k", &[1, 1, 4, 2], wave(1.3)),
        floats("v", &[1, 1, 4, 2], wave(2.1)),
        floats("forget_gate", &[1, 4, 2], wave(0.3)),
        floats("grad_o", &[1, 2, 4, 2], |at| if at == 7 { 1.0 } else { 0.0 }),
    ]
}

const FOX: [&str; 8] =
    ["op", "--kind", "fox", "--input", "in.safetensors", "--output", "out.safetensors", "--grad"];

#[test]
fn an_operation_runs_on_a_file_and_its_paths_agree() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    let out = w.succeed(&FOX);
    let names = "o [1, 2, 4, 2], grad_q [1, 2, 4, 2], grad_k [1, 1, 4, 2], grad_v [1, 1, 4, 2], \
                 grad_forget_gate [1, 4, 2]";
    assert_eq!(out.trim(), format!("out.safetensors: {names}"));
    let kernel = read(&w.path("out.safetensors"), "o");
    // The first token sees itself alone.
    let v = read(&w.path("in.safetensors"), "v");
    assert_eq!(kernel[..2], v[..2]);
    // By hand, head 0 at the second token.
    let at = |name: &str, n: usize| f64::from(read(&w.path("in.safetensors"), name)[n]);
    let dot =
        |j: usize| (at("q", 2) * at("k", 2 * j) + at("q", 3) * at("k", 2 * j + 1)) / 2f64.sqrt();
    let decay = -(-at("forget_gate", 2)).exp().ln_1p();
    let (first, second) = ((dot(0) + decay).exp(), dot(1).exp());
    let want = (first * at("v", 0) + second * at("v", 2)) / (first + second);
    assert!((f64::from(kernel[2]) - want).abs() < 1e-6, "{} for {want}", kernel[2]);
    // The upstream gradient is that of the last token of head 0 alone.
    let gradient = read(&w.path("out.safetensors"), "grad_q");
    assert!(gradient[6] != 0.0 && gradient[..6].iter().chain(&gradient[8..]).all(|x| *x == 0.0));

    let reference: Vec<&str> = FOX.into_iter().chain(["--path", "reference"]).collect();
    w.succeed(&reference);
    for (kernel, reference) in kernel.iter().zip(read(&w.path("out.safetensors"), "o")) {
        assert!((kernel - reference).abs() < 1e-6);
    }
}

#[test]
fn packed_documents_are_kept_apart() {
    let w = Workspace::new();
    let starts: Vec<u8> = [0i64, 0, 2, 2].into_iter().flat_map(i64::to_le_bytes).collect();
    let mut tensors = fox();
    tensors.push(("document_starts", Dtype::I64, vec![1, 4], starts));
    write(&w.path("in.safetensors"), &tensors);
    w.succeed(&FOX);
    let (o, v) = (read(&w.path("out.safetensors"), "o"), read(&w.path("in.safetensors"), "v"));
    assert_eq!(o[4..6], v[4..6], "the third token starts a document");
}

#[test]
fn missing_tensor_of_an_operation() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox()[..3]);
    insta::assert_snapshot!(w.fail(&FOX));
}

#[test]
fn wrong_shape_of_an_operations_tensor() {
    let w = Workspace::new();
    let mut tensors = fox();
    tensors[3] = floats("forget_gate", &[1, 4, 1], |_| 0.0);
    write(&w.path("in.safetensors"), &tensors);
    insta::assert_snapshot!(w.fail(&FOX));
}

#[test]
fn tensor_that_an_operation_ignores() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    insta::assert_snapshot!(w.fail(&FOX[..7]));
    assert!(!w.path("out.safetensors").exists());
}

#[test]
fn unknown_kind_of_operation() {
    let w = Workspace::new();
    let output = w.fail(&["op", "--kind", "foxx", "--input", "a", "--output", "b"]);
    assert!(
        output.contains("--kind is foxx, no known attention kind; allowed: rope, fox"),
        "{output}"
    );
}

#[test]
fn unknown_key_of_an_operation() {
    let w = Workspace::new();
    let args: Vec<&str> = FOX.into_iter().chain(["--set", "thetta=3"]).collect();
    insta::assert_snapshot!(w.fail(&args));
}

/// The documentation's table is the registry's.
#[test]
fn documented_variants_are_those_registered() {
    let made = Workspace::new().succeed(&["variants", "--markdown"]);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/variants.md");
    let kept = std::fs::read_to_string(path).unwrap();
    assert!(
        made == kept,
        "docs/variants.md is old: longwall variants --markdown > docs/variants.md"
    );
}

/// Every kind's tensors are documented by name.
#[test]
fn documented_op_files_name_every_tensor() {
    use longwall_kernels::attention::{AttentionConfig, AttentionShape};
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/op-files.md");
    let text = std::fs::read_to_string(path).unwrap();
    let shape = AttentionShape::new(32, 4, 2, 8);
    for config in AttentionConfig::defaults() {
        let kind = config.kind();
        let section = text.split(&format!("\n### {kind}\n")).nth(1);
        let section = section.unwrap_or_else(|| panic!("no section on {kind}"));
        let section = section.split("\n### ").next().unwrap();
        let projections = config.projections(&shape).into_iter().map(|p| p.name);
        for name in projections.chain(config.parameters(&shape).into_iter().map(|p| p.name)) {
            assert!(section.contains(&format!("`{name}`")), "{kind}: {name} is not documented");
        }
    }
}
