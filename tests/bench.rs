//! `longwall bench`: measurements that need no data and leave nothing behind.

use std::fs;

use crate::support::Workspace;

#[test]
fn training_is_timed_without_data_and_without_a_run_folder() {
    let w = Workspace::new();
    fs::remove_dir_all(w.path("corpus")).unwrap();
    let args = ["bench", "train", "--config", "tiny.toml", "--steps", "4", "--warmup", "2"];
    let json = w.succeed(&[&args[..], &["--json"]].concat());
    let results: serde_json::Value = serde_json::from_str(&json).unwrap();
    for (key, expected) in [("steps", 4), ("warmup", 2), ("batch_tokens", 128), ("micro_batch", 2)]
    {
        assert_eq!(results[key], expected, "{key}");
    }
    assert_eq!(results["precision"], "f32");
    let number = |path: &str| {
        let value = results.pointer(path).and_then(serde_json::Value::as_f64);
        value.unwrap_or_else(|| panic!("{path} is no number in {json}"))
    };
    let [min, median, max] =
        ["min", "median", "max"].map(|of| number(&format!("/tokens_per_second/{of}")));
    assert!(0.0 < min && min <= median && median <= max, "{json}");
    assert!(number("/step_milliseconds/median") > 0.0 && number("/mfu") > 0.0);
    assert!(number("/peak_memory_bytes") > 1e6);
    assert!((number("/first_loss") - 257f64.ln()).abs() < 0.5, "{json}");

    let table = w.succeed(&args);
    for line in ["device", "precision       f32", "tokens/s", "ms per step", "peak memory", "loss"]
    {
        assert!(table.lines().any(|found| found.starts_with(line)), "{line} is not in\n{table}");
    }
    assert_eq!(w.list("."), ["tiny.toml"], "something was left behind");
}

#[test]
fn a_benchmark_of_no_steps_is_a_mistake_in_its_use() {
    let w = Workspace::new();
    let output = w.run(&["bench", "train", "--config", "tiny.toml", "--steps", "0"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("allowed: a whole number from 1 to 1000000"), "{error}");
}

#[test]
fn a_benchmark_without_a_configuration_names_the_path() {
    let w = Workspace::new();
    let error = w.fail(&["bench", "train", "--config", "absent.toml"]);
    assert!(error.starts_with("error: cannot read the configuration absent.toml"), "{error}");
}

#[test]
fn generation_is_timed() {
    let w = Workspace::new();
    let args = ["bench", "generate", "--config", "tiny.toml", "--batch", "2", "--prompt-tokens"];
    let args = [&args[..], &["5", "--tokens", "3", "--top-k", "9", "--samples", "2"]].concat();
    let json = w.succeed(&[&args[..], &["--json"]].concat());
    let results: serde_json::Value = serde_json::from_str(&json).unwrap();
    for (key, expected) in [("batch", 2), ("prompt_tokens", 5), ("tokens", 3), ("samples", 2)] {
        assert_eq!(results[key], expected, "{key}");
    }
    for name in ["prefill_milliseconds", "step_milliseconds", "tokens_per_second"] {
        let [min, median, max] = ["min", "median", "max"].map(|of| results[name][of].as_f64());
        assert!(Some(0.0) < min && min <= median && median <= max, "{name} in {json}");
    }
    let table = w.succeed(&args);
    for line in [
        "batch               2 prompts of 5 tokens, each continued by 3",
        "sampling            temperature 0.8, top-k 9",
        "prefill, ms",
        "step, ms",
        "tokens/s",
    ] {
        assert!(table.lines().any(|found| found.starts_with(line)), "{line} is not in\n{table}");
    }
    let top_k = w.fail(&["bench", "generate", "--config", "tiny.toml", "--top-k", "0"]);
    assert!(top_k.contains("--top-k is 0; allowed: 1 or more"), "{top_k}");
}

/// Runs a benchmark of operations with `--json`, checks what all have in common and returns its
/// results.
fn results(w: &Workspace, args: &[&str]) -> Vec<serde_json::Value> {
    let common = ["--device", "cpu", "--samples", "2", "--json"];
    let json = w.succeed(&[&["bench"], args, &common].concat());
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&report["precision"], &report["samples"]), (&"f32".into(), &2.into()), "{json}");
    let results = report["results"].as_array().unwrap().clone();
    for pass in results.iter().flat_map(|result| result["passes"].as_array().unwrap()) {
        let number = |path: &str| pass.pointer(path).unwrap().as_f64().unwrap();
        let [min, median, max] =
            ["min", "median", "max"].map(|of| number(&format!("/milliseconds/{of}")));
        assert!(0.0 < min && min <= median && median <= max, "{pass}");
        let (work, ceiling) = match pass.get("flops") {
            Some(flops) => (flops, &report["ceiling"]["flops_per_second"]),
            None => (&pass["bytes"], &report["ceiling"]["bytes_per_second"]),
        };
        let per_second = work.as_f64().unwrap() / median * 1e3;
        assert!((number("/per_second") / per_second - 1.0).abs() < 1e-9, "{pass}");
        let share = per_second / ceiling.as_f64().unwrap();
        assert!((number("/ceiling_share") / share - 1.0).abs() < 1e-9, "{pass}");
    }
    assert_eq!(w.list("."), ["corpus", "tiny.toml"], "something was left behind");
    results
}

fn passes(result: &serde_json::Value) -> Vec<&str> {
    let passes = result["passes"].as_array().unwrap();
    passes.iter().map(|pass| pass["pass"].as_str().unwrap()).collect()
}

#[test]
fn attention_kinds_are_timed_at_each_shape() {
    let w = Workspace::new();
    let args = ["kernels", "--kind", "rope,tra", "--shape", "1,2,32,16", "--shape", "2,4,16,8"];
    let found = results(&w, &[&args[..], &["--kv-heads", "2", "--document-len", "5"]].concat());
    let [rope, tra] = [("rope", "kernel"), ("tra", "reference")];
    for (result, ((kind, path), shape)) in found.iter().zip([
        (rope, [1, 2, 32, 16]),
        (tra, [1, 2, 32, 16]),
        (rope, [2, 4, 16, 8]),
        (tra, [2, 4, 16, 8]),
    ]) {
        let [batch, heads, seq_len, head_dim] = shape;
        assert_eq!((&result["kind"], &result["path"]), (&kind.into(), &path.into()));
        assert_eq!((&result["shape"], &result["kv_heads"]), (&shape.to_vec().into(), &2.into()));
        assert_eq!(passes(result), ["forward", "forward_backward"]);
        let flops = f64::from(2 * batch * heads * seq_len * seq_len * head_dim);
        assert_eq!(result["passes"][0]["flops"], flops);
        assert_eq!(result["passes"][1]["flops"], 3.5 * flops);
    }
    assert_eq!(found.len(), 4);
}

#[test]
fn reports_of_attention_kinds_are_drawn_over_the_length() {
    let w = Workspace::new();
    let report = |kinds: &str, shapes: &[&str]| {
        let shapes = shapes.iter().flat_map(|shape| ["--shape", shape]);
        let args = ["bench", "kernels", "--device", "cpu", "--samples", "2", "--json", "--kind"];
        w.succeed(&args.into_iter().chain([kinds]).chain(shapes).collect::<Vec<_>>())
    };
    w.write("a.json", &report("rope,tra", &["2,2,16,16", "1,2,64,16"]));
    w.write("b.json", &report("rope", &["1,2,32,8"]));
    let out = w.succeed(&["plot", "--bench", "a.json", "--y", "forward"]);
    assert_eq!(out.trim(), "a-forward.svg");
    let svg = w.read("a-forward.svg");
    for label in ["rope", "tra", "milliseconds per row", "seq_len (tokens)", "\n64\n"] {
        assert!(svg.contains(label), "{label}: {svg}");
    }
    assert!(!svg.contains("2 heads of"), "all have the same heads: {svg}");
    w.succeed(&["plot", "--bench", "a.json", "b.json", "--out", "both.svg"]);
    let svg = w.read("both.svg");
    for label in ["rope, 2 heads of 16", "tra, 2 heads of 16", "rope, 2 heads of 8"] {
        assert!(svg.contains(label), "{label}: {svg}");
    }
    w.succeed(&["plot", "--bench", "a.json", "--y", "nonzero_fraction", "--out", "sparsity.png"]);
    assert_eq!(&std::fs::read(w.path("sparsity.png")).unwrap()[1..4], b"PNG");
    // Fractions that differ more than tenfold, and less.
    let fractions = |low: f64| {
        let case = |tokens: usize, fraction: f64| {
            serde_json::json!({
                "kind": "tra", "settings": [], "shape": [1, 2, tokens, 16], "kv_heads": 2, "window": null,
                "document_len": null, "passes": [], "probe": { "nonzero_fraction": fraction },
            })
        };
        let results = [case(16, 0.3), case(64, low)];
        let report = serde_json::json!({ "device": "cpu", "precision": "f32", "results": results });
        w.write("c.json", &report.to_string());
        w.succeed(&["plot", "--bench", "c.json", "--y", "nonzero_fraction", "--out", "c.svg"]);
        w.read("c.svg")
    };
    assert!(fractions(0.01).contains("\n0.125\n"), "powers of two");
    assert!(!fractions(0.1).contains("\n0.125\n"), "evenly");
    let error = w.fail(&["plot", "--bench", "a.json", "--y", "speed"]);
    assert!(error.contains("no result has speed; they have: "), "{error}");
    assert!(error.contains("forward, forward_backward"), "{error}");
    w.write("other.json", "{}");
    let error = w.fail(&["plot", "--bench", "other.json"]);
    assert!(error.contains("other.json is not a report of attention kinds"), "{error}");
}

#[test]
fn every_kind_can_be_timed_and_decoded() {
    let w = Workspace::new();
    let variants: serde_json::Value =
        serde_json::from_str(&w.succeed(&["variants", "--json"])).unwrap();
    let kinds: Vec<_> = variants.as_array().unwrap().iter().map(|v| &v["kind"]).collect();
    let names: Vec<_> = kinds.iter().map(|kind| kind.as_str().unwrap()).collect();
    let names = names.join(",");
    let timed = results(&w, &["kernels", "--kind", &names, "--shape", "1,2,8,16"]);
    let sizes = ["--heads", "2", "--head-dim", "16", "--context", "8,20"];
    let decoded = results(&w, &[&["decode", "--kind", &names][..], &sizes].concat());
    assert_eq!(timed.iter().map(|result| &result["kind"]).collect::<Vec<_>>(), kinds);
    assert_eq!(decoded.len(), 2 * kinds.len());
    for result in &decoded {
        assert_eq!(passes(result), ["step"]);
        assert!(result["passes"][0]["bytes"].as_f64().unwrap() > 0.0, "{result}");
    }
}

#[test]
fn decoding_counts_the_bytes_of_its_cache() {
    let w = Workspace::new();
    let sizes = ["--batch", "3", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"];
    let kind = ["decode", "--kind", "rope", "--set", "position=\"none\"", "--context", "40"];
    let found = results(&w, &[&kind[..], &sizes].concat());
    let keys_and_values = 3 * 2 * 40 * 8 * 2;
    assert_eq!(found[0]["passes"][0]["bytes"], f64::from(4 * keys_and_values));
    // The context, half of a sample's steps, and no more.
    let held = found[0]["held_elements"].as_f64().unwrap();
    let one = f64::from(keys_and_values) / 40.0;
    assert!((40.0 * one..=51.0 * one).contains(&held), "{held}");
    assert_eq!(found[0]["settings"][0], "position=\"none\"");
    assert_eq!(found[0]["context"], 40);
}

#[test]
fn every_operation_is_timed() {
    let w = Workspace::new();
    let sizes = ["--batch", "2", "--seq-len", "8", "--width", "64", "--vocab-size", "50"];
    let found = results(&w, &[&["ops"][..], &sizes].concat());
    let (mut names, mut elsewhere) = (vec![], vec![]);
    for result in &found {
        let op = result["op"].as_str().unwrap();
        names.push(op);
        match op {
            "adamw" => assert_eq!(passes(result), ["step"]),
            _ => assert_eq!(passes(result), ["forward", "forward_backward"], "{op}"),
        }
        if result["passes"][0].get("flops").is_some() {
            elsewhere.push(op);
        }
    }
    assert_eq!(names.len(), 13, "{names:?}");
    assert_eq!(elsewhere, ["linear", "gelu_mlp", "linear_cross_entropy"]);
    let of = |op: &str| &found[names.iter().position(|name| *name == op).unwrap()]["passes"];
    // x and y, then x, dy and dx; four f32 tensors read and three written.
    let n = 4.0 * f64::from(2 * 8 * 64);
    assert_eq!(
        (&of("layer_norm")[0]["bytes"], &of("layer_norm")[1]["bytes"]),
        (&(2.0 * n).into(), &(5.0 * n).into())
    );
    assert_eq!(of("adamw")[0]["bytes"], 7.0 * 4.0 * f64::from(50 * 64));
    assert_eq!(of("linear")[1]["flops"], 3.0 * 2.0 * f64::from(2 * 8 * 64 * 3 * 64));
    let one = results(&w, &["ops", "--op", "rotary,swiglu", "--batch", "1", "--seq-len", "4"]);
    assert_eq!(
        one.iter().map(|x| x["op"].as_str().unwrap()).collect::<Vec<_>>(),
        ["rotary", "swiglu"]
    );
}

#[test]
fn products_of_linear_layers_are_timed_in_three_passes() {
    let w = Workspace::new();
    let found = results(&w, &["gemm", "--shape", "24,16,8", "--shape", "5,3,2"]);
    assert_eq!(found.len(), 2);
    assert_eq!(
        (passes(&found[0]), &found[0]["layer"]),
        (vec!["forward", "dx", "dw"], &"linear".into())
    );
    for pass in 0..3 {
        assert_eq!(found[0]["passes"][pass]["flops"], f64::from(2 * 24 * 16 * 8));
    }
}

#[test]
fn a_benchmark_prints_a_table() {
    let w = Workspace::new();
    let table = w.succeed(&["bench", "gemm", "--shape", "24,16,8", "--device", "cpu"]);
    let lines: Vec<_> = table.lines().collect();
    for (line, start) in lines.iter().zip([
        "device     cpu",
        "precision  f32",
        "ceiling    ",
        "samples    10",
        "layer   shape        pass ",
        "linear  [24, 16, 8]  forward ",
        "linear  [24, 16, 8]  dx ",
        "linear  [24, 16, 8]  dw ",
    ]) {
        assert!(line.starts_with(start), "{line:?} does not start with {start:?} in\n{table}");
    }
    assert_eq!(lines.len(), 8, "{table}");
}

#[test]
fn bf16_of_a_benchmark_on_the_cpu() {
    let w = Workspace::new();
    let args = ["bench", "kernels", "--device", "cpu", "--precision", "bf16"];
    insta::assert_snapshot!(w.fail(&args));
}

#[test]
fn unknown_kind_of_a_benchmark() {
    let w = Workspace::new();
    let error = w.fail(&["bench", "kernels", "--device", "cpu", "--kind", "rope,foxx"]);
    assert!(
        error.contains("--kind is foxx, no known attention kind; allowed: rope, fox"),
        "{error}"
    );
}

#[test]
fn key_that_not_every_kind_of_a_benchmark_has() {
    let w = Workspace::new();
    let kinds = ["--kind", "rope,linear", "--set", "softcap=30"];
    insta::assert_snapshot!(
        w.fail(&[&["bench", "decode", "--device", "cpu"], &kinds[..]].concat())
    );
}

#[test]
fn options_of_a_benchmark_that_a_kind_does_not_allow() {
    let w = Workspace::new();
    let kind = ["--kind", "linear", "--shape", "1,2,8,16", "--window", "4"];
    insta::assert_snapshot!(
        w.fail(&[&["bench", "kernels", "--device", "cpu"], &kind[..]].concat())
    );
}

#[test]
fn key_heads_of_a_benchmark_that_do_not_divide() {
    let w = Workspace::new();
    let shape = ["--shape", "1,4,8,16", "--kv-heads", "3"];
    let args = [&["bench", "kernels", "--device", "cpu", "--kind", "rope"], &shape[..]].concat();
    insta::assert_snapshot!(w.fail(&args));
    let args = ["bench", "decode", "--device", "cpu", "--heads", "4", "--kv-heads", "3"];
    insta::assert_snapshot!("key_heads_of_decoding_that_do_not_divide", w.fail(&args));
}

#[test]
fn width_of_a_benchmark_without_whole_heads() {
    let w = Workspace::new();
    let args = ["bench", "ops", "--device", "cpu", "--width", "100"];
    insta::assert_snapshot!(w.fail(&args));
}

#[test]
fn sizes_of_a_benchmark_out_of_range() {
    let w = Workspace::new();
    let sizes = ["--batch", "65536", "--seq-len", "65536"];
    insta::assert_snapshot!(w.fail(&[&["bench", "ops", "--device", "cpu"], &sizes[..]].concat()));
}

#[test]
fn settings_of_a_benchmark_that_its_shape_does_not_allow() {
    let w = Workspace::new();
    let cpu = ["bench", "kernels", "--device", "cpu", "--kind", "rope", "--shape", "1,2,16,15"];
    insta::assert_snapshot!(w.fail(&[&cpu[..], &["--set", "theta=0"]].concat()));
    w.succeed(&[&cpu[..], &["--set", "position=\"none\"", "--samples", "1"]].concat());
}

#[test]
fn context_of_a_benchmark_beyond_the_memory() {
    let w = Workspace::new();
    let sizes = ["--batch", "1000", "--heads", "64", "--head-dim", "64", "--context", "16M"];
    let error =
        w.fail(&[&["bench", "decode", "--device", "cpu", "--kind", "rope"], &sizes[..]].concat());
    let start = "error: --kind rope --batch 1000 --heads 64 --head-dim 64 --context 16000000 needs 798770.4 \
                 GB of memory; allowed on this machine: up to ";
    let end =
        " GB, which are available\n  hint: choose a smaller --batch, or a shorter --context\n";
    assert!(error.starts_with(start) && error.ends_with(end), "{error}");
}

#[test]
fn elements_of_a_benchmark_beyond_32_bits() {
    let w = Workspace::new();
    for (args, elements) in [
        ("gemm --shape 1048576,4096,4096", 1u64 << 32),
        ("kernels --kind rope --shape 65536,65536,1,2", 1 << 33),
        ("kernels --kind tda --set rope=false --shape 1,1,2147483648,1", 1 << 32),
        ("ops --op gelu_mlp --width 1048576", 1 << 42),
        (
            "decode --kind rope --batch 65536 --heads 64 --head-dim 64 --context 1k",
            (1 << 28) * 1000,
        ),
    ] {
        let args: Vec<_> = args.split(' ').chain(["--device", "cpu"]).collect();
        let error = w.fail(&[&["bench"], &args[..]].concat());
        let told = format!(
            "makes a tensor of {elements} elements; allowed: up to 4294967295\n  hint: choose "
        );
        assert!(error.contains(&told), "{args:?}: {error}");
    }
}

#[test]
fn mistakes_in_the_use_of_a_benchmark() {
    let w = Workspace::new();
    for (args, told) in [
        (
            &["kernels", "--shape", "1,2,3"][..],
            "`1,2,3` is no shape; allowed: batch, heads, seq_len",
        ),
        (&["gemm", "--shape", "0,2,3"], "`0,2,3` is no shape; allowed: tokens, outputs and inputs"),
        (&["decode", "--context", "0"], "`0` is out of range; allowed: from 1 to 16777216 tokens"),
        (&["decode", "--heads", "x"], "allowed: a whole number from 1 to 65536"),
        (
            &["generate", "--config", "x", "--tokens", "1"],
            "allowed: a whole number from 2 to 16777216",
        ),
        (&["ops", "--op", "gelo"], "possible values: layer_norm, rms_norm, rotary"),
        (&["ops", "--samples", "0"], "allowed: a whole number from 1 to 10000"),
    ] {
        let output = w.run(&[&["bench"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(told), "{error}");
    }
}
