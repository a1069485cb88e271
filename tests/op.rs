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

/// Inputs of fox: two heads that share one key head, four tokens, two channels.
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

fn fox_and<const N: usize>(more: [&'static str; N]) -> Vec<&'static str> {
    FOX.into_iter().chain(more).collect()
}

#[test]
fn an_operation_runs_on_a_file_and_its_paths_agree() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    let out = w.succeed(&FOX);
    let names = "o [1, 2, 4, 2], grad_q [1, 2, 4, 2], grad_k [1, 1, 4, 2], grad_v [1, 1, 4, 2], \
                 grad_forget_gate [1, 4, 2]";
    assert_eq!(out.trim(), format!("out.safetensors: {names}"));
    let kernel = read(&w.path("out.safetensors"), "o");
    // The first token sees only itself.
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
    // The upstream gradient is zero except at the last token of head 0.
    let gradient = read(&w.path("out.safetensors"), "grad_q");
    assert!(gradient[6] != 0.0 && gradient[..6].iter().chain(&gradient[8..]).all(|x| *x == 0.0));

    w.succeed(&fox_and(["--path", "reference"]));
    for (kernel, reference) in kernel.iter().zip(read(&w.path("out.safetensors"), "o")) {
        assert!((kernel - reference).abs() < 1e-6);
    }
}

/// Mamba-2 with two heads of values, which share a head of queries and keys, and a norm.
#[test]
fn a_head_of_keys_serves_several_heads_of_values() {
    let w = Workspace::new();
    let wave = |scale: f32| move |at: usize| (at as f32 * scale + 0.5).sin();
    let tensors = vec![
        floats("q", &[1, 1, 4, 3], wave(0.7)),
        floats("k", &[1, 1, 4, 3], wave(1.3)),
        // Large beside the 1e-5 that the norm adds to the mean square.
        floats("v", &[1, 2, 4, 2], |at| 10.0 * (at as f32 * 2.1 + 0.5).sin()),
        floats("step", &[1, 4, 2], wave(0.3)),
        floats("gate", &[1, 4, 4], wave(0.9)),
        floats("decay_rate", &[2], |_| 0.1),
        floats("step_bias", &[2], |_| 0.2),
        floats("skip", &[2], |_| 1.0),
        floats("norm", &[4], |_| 2.0),
    ];
    write(&w.path("in.safetensors"), &tensors);
    let args =
        ["op", "--kind", "mamba2", "--input", "in.safetensors", "--output", "out.safetensors"];
    let args = [&args[..], &["--set", "value_dim=2"]].concat();
    assert_eq!(w.succeed(&args).trim(), "out.safetensors: o [1, 2, 4, 2]");
    let o = read(&w.path("out.safetensors"), "o");
    for t in 0..4 {
        let of_token = [2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t].map(|at| o[at] * o[at]);
        let square = of_token.iter().sum::<f32>() / 4.0;
        assert!((square - 4.0).abs() < 0.01, "a mean square of {square} at token {t}");
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
    insta::assert_snapshot!(w.fail(&fox_and(["--set", "thetta=3"])));
}

#[test]
fn kind_of_an_operation_set_twice() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    insta::assert_snapshot!(w.fail(&fox_and(["--set", "kind=rope"])));
}

#[test]
fn kernel_path_of_a_kind_without_one() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox()[..3]);
    let args = FOX.map(|arg: &'static str| if arg == "fox" { "lssar" } else { arg });
    let more = ["--device", "cpu", "--path", "kernel"];
    let args: Vec<&str> = args[..7].iter().copied().chain(more).collect();
    insta::assert_snapshot!(w.fail(&args));
}

#[test]
fn bf16_of_an_operation_on_the_cpu() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    insta::assert_snapshot!(w.fail(&fox_and(["--device", "cpu", "--precision", "bf16"])));
    assert!(!w.path("out.safetensors").exists());
}

#[test]
fn wrong_type_of_an_operations_tensor() {
    let w = Workspace::new();
    let mut tensors = fox();
    tensors[3] = ("forget_gate", Dtype::F64, vec![1, 4, 2], vec![0; 64]);
    write(&w.path("in.safetensors"), &tensors);
    insta::assert_snapshot!(w.fail(&FOX));
}

#[test]
fn missing_input_of_an_operation() {
    let w = Workspace::new();
    insta::assert_snapshot!(w.fail(&FOX));
}

#[test]
fn truncated_input_of_an_operation() {
    let w = Workspace::new();
    let path = w.path("in.safetensors");
    write(&path, &fox());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(bytes.len() - 4);
    std::fs::write(&path, bytes).unwrap();
    insta::assert_snapshot!(w.fail(&FOX));
}

#[test]
fn element_of_an_operations_tensor_that_is_not_finite() {
    let w = Workspace::new();
    let mut tensors = fox();
    tensors[3] = floats("forget_gate", &[1, 4, 2], |at| if at == 5 { f32::NAN } else { 0.0 });
    write(&w.path("in.safetensors"), &tensors);
    insta::assert_snapshot!(w.fail(&FOX));
}

#[test]
fn document_starts_that_are_none() {
    let w = Workspace::new();
    let starts: Vec<u8> = [0i32, 0, 1, 1].into_iter().flat_map(i32::to_le_bytes).collect();
    let mut tensors = fox();
    tensors.push(("document_starts", Dtype::I32, vec![1, 4], starts));
    write(&w.path("in.safetensors"), &tensors);
    insta::assert_snapshot!(w.fail(&FOX));
}

#[test]
fn heads_of_an_operation_that_do_not_divide() {
    let w = Workspace::new();
    let mut tensors = fox();
    tensors[0] = floats("q", &[1, 3, 4, 2], |_| 0.0);
    tensors[1] = floats("k", &[1, 2, 4, 2], |_| 0.0);
    write(&w.path("in.safetensors"), &tensors);
    insta::assert_snapshot!(w.fail(&FOX));
}

#[test]
fn window_of_an_operation_out_of_range() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    insta::assert_snapshot!(w.fail(&fox_and(["--window", "0"])));
}

#[test]
fn key_of_an_operation_out_of_range() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    insta::assert_snapshot!(w.fail(&fox_and(["--set", "rope=true", "--set", "theta=0"])));
}

#[test]
fn missing_output_folder_of_an_operation() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    let args = FOX.map(|arg: &'static str| match arg {
        "out.safetensors" => "absent/out.safetensors",
        _ => arg,
    });
    insta::assert_snapshot!(w.fail(&args));
}

#[test]
fn output_of_an_operation_onto_its_input() {
    let w = Workspace::new();
    let path = w.path("in.safetensors");
    write(&path, &fox());
    let before = std::fs::read(&path).unwrap();
    let args = FOX.map(|arg: &'static str| match arg {
        "out.safetensors" => "./in.safetensors",
        _ => arg,
    });
    insta::assert_snapshot!(w.fail(&args));
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

/// docs/variants.md is up to date with the registry.
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
    let others = [
        "kind = \"rope\"\nssmax = true\nsinks = true",
        "kind = \"fox\"\nsinks = true",
        "kind = \"wall\"\ngate_source = \"key\"\nsinks = true\nforget_gate = true",
        "kind = \"path\"\nforget_gate = true",
    ];
    let others = others.map(|table| toml::from_str::<AttentionConfig>(table).unwrap());
    let mut names = vec![];
    for config in AttentionConfig::defaults().into_iter().chain(others) {
        let kind = config.kind();
        let section = text.split(&format!("\n### {kind}\n")).nth(1);
        let section = section.unwrap_or_else(|| panic!("no section on {kind}"));
        let section = section.split("\n### ").next().unwrap();
        let projections = config.projections(&shape).into_iter().map(|p| p.name);
        for name in projections.chain(config.parameters(&shape).into_iter().map(|p| p.name)) {
            assert!(section.contains(&format!("`{name}`")), "{kind}: {name} is not documented");
            names.push((kind, name));
        }
    }
    for optional in [
        ("rope", "ssmax_scale"),
        ("rope", "sinks"),
        ("fox", "sinks"),
        ("wall", "sinks"),
        ("wall", "forget_gate"),
        ("wall", "key_gate_weight"),
        ("wall", "key_gate_bias"),
        ("path", "forget_gate"),
    ] {
        assert!(names.contains(&optional), "{optional:?} is not among {names:?}");
    }
}

#[test]
fn a_layer_beyond_every_model_is_refused() {
    let w = Workspace::new();
    write(&w.path("in.safetensors"), &fox());
    let error = w.fail(&fox_and(["--layer", "18446744073709551615"]));
    assert!(
        error.contains("--layer is 18446744073709551615; allowed: 0 to 1023\n  hint: "),
        "{error}"
    );
}
