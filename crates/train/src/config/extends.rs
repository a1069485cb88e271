//! `extends = "base.toml"`: a run configuration that starts from another file and changes some keys.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::ConfigError;
use super::error::place_in;

/// The key that names the base, relative to the folder of the file that has it.
pub(super) const EXTENDS: &str = "extends";

/// The dotted keys that a file does not take from what it extends.
pub(super) const REMOVE: &str = "remove";

/// One of the files that a configuration is read from.
pub(super) struct Layer {
    pub path: PathBuf,
    pub source: String,
}

/// The file `path` with the text `source`, merged over the files that it extends: the whole table without
/// `extends` and `remove`, and the files, from `path` itself to the last base.
///
/// # Errors
/// When a file cannot be read or is no TOML, when a file extends itself through others, or removes a key that none
/// of its bases has.
pub(super) fn read(source: &str, path: &Path) -> Result<(Table, Vec<Layer>), ConfigError> {
    let mut layers = vec![Layer { path: path.to_owned(), source: source.to_owned() }];
    let mut table = parse(&layers[0])?;
    let mut removed: Vec<Removed> = Vec::new();
    while let Some(base) = table.remove(EXTENDS) {
        if let Some(keys) = table.remove(REMOVE) {
            let from = layers.last().expect("the file itself is a layer");
            removed.extend(removed_keys(&keys, from)?);
        }
        let layer = open(&base, &layers)?;
        let mut base = parse(&layer)?;
        layers.push(layer);
        // A name belongs to one file: two runs in one folder would be a mistake.
        if let Some(Value::Table(run)) = base.get_mut("run") {
            run.remove("name");
        }
        for Removed { key, found, .. } in &mut removed {
            *found |= remove(&mut base, key);
        }
        table = merge(base, table);
    }
    match removed.into_iter().find(|removed| !removed.found) {
        None => Ok((table, layers)),
        Some(Removed { key, place, .. }) => Err(ConfigError::Key {
            place,
            problem: format!(
                "remove names {}, which no file that this one extends has",
                key.join(".")
            ),
            hint: "check the spelling, or leave it out".to_owned(),
        }),
    }
}

/// A key that a file does not take from its bases.
struct Removed {
    key: Vec<String>,
    /// Whether a base has it.
    found: bool,
    /// Where it is named.
    place: String,
}

/// The keys of `remove = [...]` in a file.
fn removed_keys(keys: &Value, from: &Layer) -> Result<Vec<Removed>, ConfigError> {
    let place = place_in(from, REMOVE);
    let Some(keys) = dotted(keys) else {
        return Err(ConfigError::Key {
            place,
            problem: format!("remove is {keys}; expected a list of dotted keys"),
            hint: "write for example remove = [\"model.attention\"]".to_owned(),
        });
    };
    let removed = |key| Removed { key, found: false, place: place.clone() };
    Ok(keys.into_iter().map(removed).collect())
}

/// The segments of each dotted key of a list; `None` if it is no such list, or empty.
pub(super) fn dotted(keys: &Value) -> Option<Vec<Vec<String>>> {
    let segments = |key: &Value| Some(key.as_str()?.split('.').map(str::to_owned).collect());
    keys.as_array().filter(|keys| !keys.is_empty())?.iter().map(segments).collect()
}

/// Removes `key` from `table`; returns whether it was there.
pub(super) fn remove(table: &mut Table, key: &[String]) -> bool {
    match key {
        [] => false,
        [last] => table.remove(last).is_some(),
        [first, rest @ ..] => match table.get_mut(first) {
            Some(Value::Table(inner)) => remove(inner, rest),
            _ => false,
        },
    }
}

/// The TOML of a file.
pub(super) fn parse(layer: &Layer) -> Result<Table, ConfigError> {
    toml::from_str(&layer.source).map_err(|error| ConfigError::Syntax {
        path: layer.path.clone(),
        message: error.to_string().trim_end().to_owned(),
    })
}

/// The file that the last of `layers` names with `extends = base`.
fn open(base: &Value, layers: &[Layer]) -> Result<Layer, ConfigError> {
    let from = layers.last().expect("the file itself is a layer");
    let bad = |problem: String, hint: &str| ConfigError::Key {
        place: place_in(from, EXTENDS),
        problem,
        hint: hint.to_owned(),
    };
    let Value::String(name) = base else {
        return Err(bad(
            format!("extends is {base}; expected the path of one configuration"),
            "write for example extends = \"base.toml\"",
        ));
    };
    let path = from.path.parent().unwrap_or(Path::new("")).join(name);
    let same = |layer: &Layer| real(&layer.path) == real(&path);
    if let Some(first) = layers.iter().position(same) {
        let chain = layers[first..].iter().map(|layer| layer.path.display().to_string());
        let chain = chain.chain([path.display().to_string()]).collect::<Vec<_>>().join(" → ");
        return Err(bad(
            format!("extends is \"{name}\", and a file cannot extend itself: {chain}"),
            "move what the files share into one that extends none of them",
        ));
    }
    let source = std::fs::read_to_string(&path).map_err(|error| {
        let problem = format!("extends is \"{name}\"; cannot read {}: {error}", path.display());
        bad(problem, "the path is relative to the folder of the file that extends")
    })?;
    Ok(Layer { path, source })
}

/// The path without links, if the file exists.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// `over` merged over `base`: tables key by key, down to the values. A table whose `kind` changes replaces
/// the base's, because its keys belong to its kind; so does everything that is no table.
fn merge(mut base: Table, over: Table) -> Table {
    for (key, value) in over {
        let merged = match (base.remove(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) if !changes_kind(&old, &new) => {
                Value::Table(merge(old, new))
            }
            (_, value) => value,
        };
        base.insert(key, merged);
    }
    base
}

fn changes_kind(old: &Table, new: &Table) -> bool {
    matches!((old.get("kind"), new.get("kind")), (Some(old), Some(new)) if old != new)
}

#[cfg(test)]
mod tests;
