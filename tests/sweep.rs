//! A sweep from its file to its table.

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
