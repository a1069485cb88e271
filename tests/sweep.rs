//! A sweep from its file to its table.

use std::collections::BTreeSet;
use std::path::Path;

use longwall_train::sweep::SweepConfig;

use crate::support::{Workspace, sweep};

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn a_sweep_compares_and_does_nothing_twice() {
    let w = Workspace::new();
    w.write("compare.toml", &sweep("0, 1", 640));
    let list = w.succeed(&["sweep", "compare.toml", "--dry-run"]);
    assert!(list.matches("fox").count() >= 2 && list.matches("rope").count() >= 2, "{list}");
    assert!(!w.path("runs").exists());

    let output = w.run(&["sweep", "compare.toml"]);
    let (table, log) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{log}");
    // The run under way shows its steps and the time left.
    assert!(log.contains("[1/4] rope-seed0 step "), "{log}");
    assert!(log.contains("/5 | loss ") && log.contains(" | sweep "), "{log}");
    assert!(table.contains("rope") && table.contains("fox") && table.contains('±'), "{table}");
    let csv = w.read("runs/compare/results.csv");
    assert_eq!(csv.lines().count(), 5, "{csv}");
    assert!(csv.contains("extrapolate.loss@16.low"), "{csv}");
    for picture in ["loss", "validation_loss", "extrapolate.loss@16", "extrapolate.loss@32"] {
        for extension in ["svg", "png"] {
            let name = format!("runs/compare/{picture}.{extension}");
            assert!(w.path(&name).is_file() && table.contains(&name), "{name}: {table}");
        }
    }
    let losses = w.read("runs/compare/loss.svg");
    assert!(losses.contains("rope: training") && losses.contains("fox: validation"));

    // Finished runs are not repeated: the run folders keep their files.
    let stamp = |w: &Workspace| {
        let runs = w.list("runs/compare");
        let run =
            runs.iter().find(|name| w.path(&format!("runs/compare/{name}")).is_dir()).unwrap();
        let path = w.path(&format!("runs/compare/{run}/metrics.jsonl"));
        path.metadata().unwrap().modified().unwrap()
    };
    let before = stamp(&w);
    assert_eq!(w.succeed(&["sweep", "compare.toml"]), table);
    assert_eq!(stamp(&w), before);
}

#[test]
fn the_runs_of_a_sweep_are_estimated_and_done_one_by_one() {
    let w = Workspace::new();
    w.write("compare.toml", &sweep("0", 640));
    let list = w.succeed(&["sweep", "compare.toml", "--dry-run"]);
    assert!(list.contains("\n1 fox-seed0: ") && list.contains(" GB\n"), "{list}");
    assert!(list.contains("40 % of the machine's peak"), "{list}");
    assert_eq!(w.succeed(&["sweep", "compare.toml", "--slurm", "job.sh"]), "job.sh\n");
    let script = w.read("job.sh");
    assert!(script.contains("#SBATCH --array=0-1\n"), "{script}");
    let bash = std::process::Command::new("bash").args(["-n"]).arg(w.path("job.sh")).status();
    assert!(bash.unwrap().success(), "{script}");

    assert_eq!(w.succeed(&["sweep", "compare.toml", "--only", "1"]), "fox-seed0: finished\n");
    assert!(w.path("runs/compare/fox-seed0/eval/extrapolate/results.json").is_file());
    assert!(!w.path("runs/compare/results.csv").exists());
    let list = w.succeed(&["sweep", "compare.toml", "--dry-run"]);
    assert!(
        list.contains(", finished\n") && list.contains("of the runs that are finished"),
        "{list}"
    );
    w.succeed(&["sweep", "compare.toml", "--slurm", "job.sh"]);
    assert!(w.read("job.sh").contains("#SBATCH --array=0\n"));
    let beyond = w.fail(&["sweep", "compare.toml", "--only", "2"]);
    assert!(beyond.contains("--only is 2; allowed: 0 to 1"), "{beyond}");
    w.succeed(&["sweep", "compare.toml"]);
    assert_eq!(w.read("runs/compare/results.jsonl").lines().count(), 2);
}

/// A sweep for a GPU is written and listed where there is none.
#[test]
fn a_dry_run_without_the_device_lists_the_runs() {
    if longwall_kernels::device::cuda().is_ok() {
        return;
    }
    let w = Workspace::new();
    let on_gpu = "set = { \"run.device\" = \"cuda\",";
    w.write("compare.toml", &sweep("0", 640).replace("set = {", on_gpu));
    let listed = w.succeed(&["sweep", "compare.toml", "--dry-run"]);
    assert!(listed.contains("rope-seed0") && listed.contains("fox-seed0"), "{listed}");
    assert!(listed.contains("not estimated, as this is not the machine for it"), "{listed}");
}

/// Every ablation has a small twin of the same axes, all of whose runs finish on a CPU.
#[test]
fn the_twins_of_the_ablations_run_on_a_cpu() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let names = |folder: &str| -> BTreeSet<String> {
        let entries = std::fs::read_dir(configs.join(folder)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".toml")).collect()
    };
    let mut ablations = names("sweeps");
    assert!(ablations.remove("rope_vs_fox.toml"), "it is made for a CPU");
    assert_eq!(names("sweeps/cpu"), ablations);

    let w = Workspace::new();
    for name in ["quickstart", "mqar", "word_problem"] {
        let text = std::fs::read_to_string(configs.join(format!("{name}.toml"))).unwrap();
        let tiny = "kind = \"text\"\npaths = [\"corpus\"]";
        let text = text.replace("kind = \"cargo-sources\"\nmax_bytes = \"32M\"", tiny);
        w.write(&format!("{name}.toml"), &text);
    }
    let axes = |path: &Path| -> Vec<String> {
        let sweep = SweepConfig::load(path).unwrap();
        sweep.axes.iter().map(|axis| axis.title().to_owned()).collect()
    };
    for name in ablations {
        let twin = configs.join("sweeps/cpu").join(&name);
        assert_eq!(axes(&twin), axes(&configs.join("sweeps").join(&name)), "{name}");
        let text = std::fs::read_to_string(&twin).unwrap().replace("base = \"../../", "base = \"");
        w.write(&name, &text);
        w.succeed(&["sweep", &name]);
        let folder = format!("runs/{}_cpu", name.trim_end_matches(".toml"));
        let results = w.read(&format!("{folder}/results.jsonl"));
        assert!(results.lines().count() > 2, "{name}: {results}");
        for line in results.lines() {
            assert!(line.contains("\"status\":\"finished\""), "{name}: {line}");
        }
    }
}
