//! Token shards in llm.c's format, made by `longwall prepare` or other programs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::{OpenContext, Source, SourceData, check_paths};
use crate::corpus::discover::expand;
use crate::shard::{MANIFEST_FILE, Manifest, Shard, TokenStream, check_blocks, check_listed};
use crate::{DataConfig, DataError, Split, Tokenizer};

/// The keys of `kind = "shards"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Files, folders and patterns. Of a folder, the files without `_val_` in their names.
    pub train: Vec<PathBuf>,
    /// Files, folders and patterns. Of a folder, the files with `_val_` in their names.
    #[serde(default)]
    pub validation: Vec<PathBuf>,
}

impl Source for Config {
    fn validate(&self, key: &str, _data: &DataConfig, problems: &mut Problems) {
        check_paths(problems, key, "train", &self.train);
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let paths = match context.split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        };
        let files = find(paths, context.split)?;
        let shards: Vec<Shard> =
            files.iter().map(|path| Shard::open(path)).collect::<Result<_, _>>()?;
        let folders: Vec<&Path> =
            paths.iter().filter(|path| path.is_dir()).map(PathBuf::as_path).collect();
        check(&shards, &folders, context)?;
        Ok(SourceData::Stream(TokenStream::new(shards)))
    }
}

/// Checks shards against the manifest beside them or, without one, against the vocabulary. A folder
/// that the user names, and the folders in it, must hold all shards of the split that their
/// manifests list.
fn check(
    shards: &[Shard],
    named_folders: &[&Path],
    context: &OpenContext<'_>,
) -> Result<(), DataError> {
    let mut by_folder: BTreeMap<&Path, Vec<&Shard>> = BTreeMap::new();
    for shard in shards {
        let folder = shard.path().parent().unwrap_or(Path::new(""));
        by_folder.entry(folder).or_default().push(shard);
    }
    let mut listed = Vec::new();
    for (folder, shards) in by_folder {
        match Manifest::read(folder)? {
            Some(manifest) => listed.push((folder, manifest, shards)),
            None => {
                shards.iter().try_for_each(|shard| shard.check_vocabulary(context.tokenizer))?
            }
        }
    }
    let mut blocks = Vec::new();
    for (folder, manifest, shards) in &listed {
        check_tokenizer(folder, manifest, context.tokenizer)?;
        if named_folders.iter().any(|named| folder.starts_with(named)) {
            check_complete(folder, manifest, context.split)?;
        }
        let shards = shards.iter().copied();
        blocks.extend(check_listed(folder, manifest, shards, context.tokenizer)?);
    }
    check_blocks(blocks)
}

/// Checks that a folder has all shards of the split that its manifest lists.
fn check_complete(folder: &Path, manifest: &Manifest, split: Split) -> Result<(), DataError> {
    let summary = match split {
        Split::Train => &manifest.train,
        Split::Validation => &manifest.validation,
    };
    let paths = summary.shards.iter().map(|shard| folder.join(&shard.file));
    match paths.into_iter().find(|path| !path.exists()) {
        None => Ok(()),
        Some(path) => Err(DataError::Missing {
            what: "shard",
            path,
            hint: format!(
                "{MANIFEST_FILE} lists it: copy it again, or prepare the text again; to train without it, name the other shards themselves"
            ),
        }),
    }
}

fn check_tokenizer(
    folder: &Path,
    manifest: &Manifest,
    tokenizer: &Tokenizer,
) -> Result<(), DataError> {
    let ours = tokenizer.fingerprint();
    if manifest.tokenizer.fingerprint == ours {
        return Ok(());
    }
    let short = |fingerprint: &str| fingerprint.chars().take(16).collect();
    Err(DataError::OtherTokenizer {
        path: folder.join(MANIFEST_FILE),
        theirs: manifest.tokenizer.name.clone(),
        their_fingerprint: short(&manifest.tokenizer.fingerprint),
        ours: tokenizer.name().into(),
        our_fingerprint: short(&ours),
    })
}

/// The shards of `split` that `paths` match. A file that the user names is always taken; in folders
/// and patterns, `_val_` in a file's name decides.
fn find(paths: &[PathBuf], split: Split) -> Result<Vec<PathBuf>, DataError> {
    let found = expand(paths, "shard")?;
    let place =
        || paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    let chosen: Vec<PathBuf> = found
        .into_iter()
        .filter(|file| {
            file.named
                || (is_shard(&file.path)
                    && is_validation(&file.path) == (split == Split::Validation))
        })
        .map(|file| file.path)
        .collect();
    if chosen.is_empty() && !paths.is_empty() {
        let (what, hint) = match split {
            Split::Train => (
                "training shard",
                "training shards end in .bin and have no _val_ in their names; name a file to use it in any case",
            ),
            Split::Validation => (
                "validation shard",
                "validation shards end in .bin and have _val_ in their names; name a file to use it in any case",
            ),
        };
        return Err(DataError::NothingFound { what, place: place(), hint: hint.into() });
    }
    Ok(chosen)
}

fn is_shard(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "bin")
}

fn is_validation(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains("_val_"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::testing::{Example, config, documents, message, open, shard};
    use crate::sources::text;
    use crate::{Loader, NoProgress, PrepareOptions, TokenizerConfig, prepare};
    use std::sync::Arc;

    impl Example for Config {
        fn example(folder: &Path) -> Self {
            let train = shard(folder, "x_train", &documents(&[70; 100]));
            let validation = shard(folder, "x_val", &documents(&[90; 70]));
            Config { train: vec![train], validation: vec![validation] }
        }
    }

    fn train(path: &Path) -> Config {
        Config { train: vec![path.into()], validation: vec![] }
    }

    #[test]
    fn folders_give_each_split_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("shards");
        std::fs::create_dir(&folder).unwrap();
        shard(&folder, "x_train", &[1; 100]);
        shard(&folder, "x_val", &[2; 100]);
        std::fs::write(folder.join("README.md"), "about").unwrap();
        let source = Config { train: vec![folder.clone()], validation: vec![folder] };
        let config = config(&dir, 16, vec![source.into()]);
        let first = |split| open(&config, 0, split).unwrap().batch(0, 1).inputs[0];
        assert_eq!((first(Split::Train), first(Split::Validation)), (1, 2));
    }

    #[test]
    fn missing_shards_are_refused_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let missing = config(&dir, 16, vec![train(&dir.path().join("none.bin")).into()]);
        insta::assert_snapshot!(message(&dir, &missing, Split::Train), @r"
        shard DIR/none.bin does not exist
          hint: check the spelling; relative paths start at the folder the command runs in
        ");
        shard(dir.path(), "x_val", &[1; 100]);
        let folder = config(&dir, 16, vec![train(dir.path()).into()]);
        insta::assert_snapshot!(message(&dir, &folder, Split::Train), @r"
        no training shard found in DIR
          hint: training shards end in .bin and have no _val_ in their names; name a file to use it in any case
        ");
    }

    #[test]
    fn shards_of_another_tokenizer_are_refused_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let mut too_great = vec![1; 100];
        too_great[40] = 300;
        let path = shard(dir.path(), "x_train", &too_great);
        let unlisted = config(&dir, 16, vec![train(&path).into()]);
        insta::assert_snapshot!(message(&dir, &unlisted, Split::Train), @r"
        DIR/x_train_000001.bin holds token 300 at position 40; the tokenizer bytes has tokens 0 to 256
          hint: set [tokenizer] to the one the shard was made with, or prepare the text again with this one
        ");

        let file = dir.path().join("a.txt");
        std::fs::write(&file, "some words ".repeat(100)).unwrap();
        let corpus = Arc::new(text::Config::new(vec![file]));
        let mut options = PrepareOptions::new(corpus, dir.path().join("gpt2"), "x");
        options.validation_fraction = 0.0;
        let gpt2 = Tokenizer::load(&TokenizerConfig::Gpt2).unwrap();
        prepare(&options, &gpt2, &NoProgress).unwrap();
        let listed = config(&dir, 16, vec![train(&options.out).into()]);
        insta::assert_snapshot!(message(&dir, &listed, Split::Train), @r"
        the shards in DIR/gpt2/manifest.json were made with the tokenizer gpt2 (fingerprint e587dc115a73802b); this run uses bytes (fingerprint 0b0b1bc8348c9b9c)
          hint: set [tokenizer] to gpt2, or prepare the text again with bytes
        ");
        Loader::open(&listed, &gpt2, 0, Split::Train, &NoProgress).unwrap();
    }
}
