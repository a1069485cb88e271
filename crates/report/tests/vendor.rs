//! The vendored files are those that were published.

use std::path::Path;

use sha2::{Digest, Sha256};

#[test]
fn vendored_files_have_their_checksums() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("vendor/uplot");
    let sums = std::fs::read_to_string(folder.join("SHA256SUMS")).unwrap();
    let listed: Vec<(&str, &str)> = sums.lines().map(|l| l.split_once("  ").unwrap()).collect();
    let names: Vec<&str> = listed.iter().map(|(_, name)| *name).collect();
    assert_eq!(names, ["uPlot.iife.min.js", "uPlot.min.css", "LICENSE"]);
    for (sum, name) in listed {
        let bytes = std::fs::read(folder.join(name)).unwrap();
        let found: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(found, sum, "{name} is not the published file");
    }
}
