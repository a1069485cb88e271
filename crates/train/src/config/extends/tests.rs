use std::fs;

use super::*;
use crate::config::RunConfig;
use crate::schedule::ScheduleConfig;
use crate::testing::CONFIG;

/// Files in a folder of their own.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Folder(folder)
    }

    fn load(&self, name: &str, sets: &[&str]) -> Result<RunConfig, ConfigError> {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        RunConfig::load(&self.0.path().join(name), &sets)
    }

    /// The message of the error of `name`, with paths relative to the folder.
    fn error(&self, name: &str) -> String {
        let folder = format!("{}/", self.0.path().display());
        self.load(name, &[]).unwrap_err().to_string().replace(&folder, "")
    }
}

fn merged(base: &str, over: &str) -> String {
    let table = |text: &str| -> Table { toml::from_str(text).unwrap() };
    merge(table(base), table(over)).to_string()
}

#[test]
fn tables_merge_and_everything_else_replaces() {
    let base = "a = 1\nlist = [1, 2]\n[t]\nb = 2\n[t.u]\nc = 3\nd = 4";
    assert_eq!(
        merged(base, "list = [3]\n[t.u]\nd = 5\ne = 6"),
        "a = 1\nlist = [3]\n\n[t]\nb = 2\n\n[t.u]\nc = 3\nd = 5\ne = 6\n"
    );
    assert_eq!(merged("t = 1", "[t]\nb = 2"), "[t]\nb = 2\n");
}

#[test]
fn a_table_of_another_kind_replaces_and_one_of_the_same_merges() {
    let base = "[t]\nkind = \"a\"\nx = 1\ny = 2";
    assert_eq!(merged(base, "[t]\nkind = \"b\"\nz = 3"), "[t]\nkind = \"b\"\nz = 3\n");
    let same = "[t]\nkind = \"a\"\nx = 5\ny = 2\n";
    assert_eq!(merged(base, "[t]\nkind = \"a\"\nx = 5"), same);
    assert_eq!(merged(base, "[t]\nx = 5"), same);
}

#[test]
fn a_file_starts_from_its_base_and_the_bases_of_that() {
    let folder = Folder::new(&[
        ("shared/base.toml", &CONFIG.replace("seed = 3", "seed = 3\nname = \"base\"")),
        (
            "wsd.toml",
            "extends = \"shared/base.toml\"\ntrain.schedule = { kind = \"wsd\", decay = 10 }",
        ),
        (
            "more/fox.toml",
            "extends = \"../wsd.toml\"\n[model.attention]\nkind = \"fox\"\n[train]\nlr = 2e-3",
        ),
    ]);
    let base = folder.load("shared/base.toml", &[]).unwrap();
    let fox = folder.load("more/fox.toml", &["train.tokens=2M"]).unwrap();
    assert_eq!(base.run.name, "base");
    assert_eq!((fox.run.name.as_str(), fox.run.seed), ("fox", 3), "a name is not inherited");
    assert_eq!(fox.model.attention.as_ref().unwrap().kind(), "fox");
    assert_eq!((fox.train.lr, fox.train.tokens), (2e-3, 2_000_000), "--set comes last");
    assert!(matches!(fox.train.schedule, ScheduleConfig::Wsd { .. }));
    assert_eq!(fox.data, base.data);

    let resolved = fox.to_toml();
    assert!(!resolved.contains(EXTENDS), "{resolved}");
    assert_eq!(RunConfig::parse(&resolved, Path::new("config.toml"), &[]).unwrap(), fox);
}

#[test]
fn a_base_that_is_missing_or_no_path_is_named() {
    let folder = Folder::new(&[
        ("a.toml", "# A comment.\nextends = \"bse.toml\""),
        ("number.toml", "extends = 3"),
        ("broken.toml", "extends = \"bad.toml\""),
        ("bad.toml", "x = "),
    ]);
    insta::assert_snapshot!(folder.error("a.toml"), @r#"
    a.toml:2: extends is "bse.toml"; cannot read bse.toml: No such file or directory (os error 2)
      hint: the path is relative to the folder of the file that extends
    "#);
    insta::assert_snapshot!(folder.error("number.toml"), @r#"
    number.toml:1: extends is 3; expected the path of one configuration
      hint: write for example extends = "base.toml"
    "#);
    assert!(folder.error("broken.toml").starts_with("bad.toml is not valid TOML"));
}

#[test]
fn files_that_extend_each_other_are_refused() {
    let folder = Folder::new(&[
        ("a.toml", "extends = \"b.toml\""),
        ("b.toml", "extends = \"c.toml\""),
        ("c.toml", "extends = \"./b.toml\""),
        ("self.toml", "extends = \"self.toml\""),
    ]);
    insta::assert_snapshot!(folder.error("a.toml"), @r#"
    c.toml:1: extends is "./b.toml", and a file cannot extend itself: b.toml → c.toml → ./b.toml
      hint: move what the files share into one that extends none of them
    "#);
    assert!(folder.error("self.toml").contains("self.toml → self.toml"));
}

#[test]
fn an_error_names_the_file_and_the_line_of_its_key() {
    let child = "extends = \"base.toml\"\n[train]\ntokens = \"2M\"\n";
    let place = |base: &str, child: &str| {
        let folder = Folder::new(&[("base.toml", base), ("child.toml", child)]);
        let error = folder.error("child.toml");
        error.split_once(": ").unwrap().0.to_owned()
    };
    assert_eq!(place(&CONFIG.replace("lr = 1e-3", "lr = \"high\""), child), "base.toml:24");
    assert_eq!(place(CONFIG, &format!("{child}lr = \"high\"")), "child.toml:4");
    assert_eq!(place(CONFIG, &format!("{child}lrr = 1")), "child.toml:4");
    // A missing key: the child's table is the nearest place.
    assert_eq!(place(&CONFIG.replace("lr = 1e-3", ""), child), "child.toml:2");
}

#[test]
fn the_base_cannot_be_overridden() {
    let folder = Folder::new(&[("a.toml", CONFIG)]);
    let error = folder.load("a.toml", &["extends=b.toml"]).unwrap_err();
    insta::assert_snapshot!(error, @r#"
    --set extends=b.toml: a file says itself what it extends
      hint: write a file with extends = "…", or give the base with --config
    "#);
}

#[test]
fn a_key_of_a_base_can_be_removed_and_set_again() {
    let pattern = "[model]\npattern = [\"rope\", \"fox\"]";
    let folder = Folder::new(&[
        ("base.toml", CONFIG),
        ("middle.toml", "extends = \"base.toml\"\ntrain.lr = 2e-3"),
        (
            "hybrid.toml",
            &format!("extends = \"middle.toml\"\nremove = [\"model.attention\"]\n{pattern}"),
        ),
        (
            "back.toml",
            "extends = \"hybrid.toml\"\nremove = [\"model.pattern\"]\n[model.attention]\nkind = \"fox\"",
        ),
        ("without.toml", &format!("extends = \"middle.toml\"\n{pattern}")),
    ]);
    let hybrid = folder.load("hybrid.toml", &[]).unwrap();
    assert!(hybrid.model.attention.is_none() && hybrid.model.pattern.is_some());
    assert_eq!(hybrid.train.lr, 2e-3);
    let back = folder.load("back.toml", &[]).unwrap();
    assert_eq!(back.model.attention.unwrap().kind(), "fox");
    assert!(back.model.pattern.is_none());
    assert!(folder.error("without.toml").contains("model.pattern is set beside model.attention"));
}

#[test]
fn a_removal_that_removes_nothing_is_named() {
    let folder = Folder::new(&[
        ("base.toml", CONFIG),
        ("typo.toml", "extends = \"base.toml\"\nremove = [\"model.atention\"]"),
        ("text.toml", "extends = \"base.toml\"\nremove = \"model\""),
        ("alone.toml", &format!("remove = [\"model\"]\n{CONFIG}")),
    ]);
    insta::assert_snapshot!(folder.error("typo.toml"), @r"
    typo.toml:2: remove names model.atention, which no file that this one extends has
      hint: check the spelling, or leave it out
    ");
    insta::assert_snapshot!(folder.error("text.toml"), @r#"
    text.toml:2: remove is "model"; expected a list of dotted keys
      hint: write for example remove = ["model.attention"]
    "#);
    assert!(folder.error("alone.toml").contains("remove is no known key"));
}

#[test]
fn a_value_out_of_range_names_the_file_that_has_it() {
    let folder = Folder::new(&[
        ("base.toml", &CONFIG.replace("lr = 1e-3", "lr = -1.0\nclip = -2.0")),
        ("child.toml", "extends = \"base.toml\"\ntrain.clip = -3.0"),
    ]);
    let error = folder.error("child.toml");
    assert!(error.contains("\ntrain.lr (base.toml:24) is -1; allowed: "), "{error}");
    assert!(error.contains("\ntrain.clip is -3"), "{error}");
    let set = folder.load("child.toml", &["train.lr=-4"]).unwrap_err().to_string();
    assert!(set.contains("\ntrain.lr is -4; allowed: "), "{set}");
}
