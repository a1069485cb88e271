//! Errors when loading a configuration, with their place in the file.

use std::fmt::Write;
use std::path::PathBuf;

use longwall_config::{Problems, culprit};
use longwall_kernels::attention::AttentionConfig;
use serde_path_to_error::Segment;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::extends::Layer;
use super::kind::kind_with_value;
use super::overrides::Override;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}\n  hint: check the path; configs/ holds ready-made ones", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{} is not valid TOML\n{message}\n  hint: correct the file at that place; configs/ holds ready-made ones", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The parser's message, with the line and a caret.
        message: String,
    },
    /// A `--set` cannot be applied.
    #[error("--set {text}: {reason}\n  hint: {remedy}")]
    Override {
        /// The text given.
        text: String,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// A key is unknown, missing, or has a value of the wrong type.
    #[error("{place}: {problem}\n  hint: {hint}")]
    Key {
        /// `file:line`, or the `--set` it comes from.
        place: String,
        /// Key, value and what is allowed.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// Every key is known and of the right type, but values are out of range.
    #[error("{}: {problems}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// All that is wrong.
        problems: Problems,
    },
}

/// Builds the error of a table that does not fit the configuration's types.
///
/// `retry` deserialises a changed copy of `table` and returns its error's message: serde buffers
/// tagged tables and loses the path below them, so the culprit is found by leaving out one key after
/// another.
pub(super) fn key_error(
    layers: &[Layer],
    table: &Table,
    sets: &[Override],
    error: &serde_path_to_error::Error<toml::de::Error>,
    retry: impl Fn(Table) -> Option<String>,
) -> ConfigError {
    let message = error.inner().message().to_owned();
    let mut key: Vec<String> = error.path().iter().filter_map(segment_name).collect();
    if let Some(field) = quoted_after(&message, "unknown field `") {
        if key.last() != Some(&field) {
            key.push(field);
        }
    } else if !message.starts_with("missing field `") {
        narrow(&mut key, table, &message, &retry);
    }
    if let Some(error) = of_other_kind(&key, sets, &message) {
        return error;
    }
    if expects_table(&message) && value_at(table, &key).is_some_and(|value| !value.is_table()) {
        return no_table(layers, table, sets, &key, retry);
    }
    let (problem, hint) = describe(&key, value_at(table, &key), &message);
    ConfigError::Key { place: place(layers, sets, &key), problem, hint }
}

/// Whether serde's message says that a value should be a table with known keys.
pub(super) fn expects_table(message: &str) -> bool {
    let expected = message.rsplit_once("expected ").map_or("", |(_, expected)| expected);
    ["internally tagged enum ", "struct "].iter().any(|prefix| expected.starts_with(prefix))
}

/// The error of `key`, whose value is no table but should be one.
pub(super) fn no_table(
    layers: &[Layer],
    table: &Table,
    sets: &[Override],
    key: &[String],
    retry: impl Fn(Table) -> Option<String>,
) -> ConfigError {
    // The message about a table of an unknown kind lists the kinds; of a table without kinds, the keys.
    let mut whole = table.clone();
    if let Some(value) = value_at_mut(&mut whole, key) {
        *value = Value::Table(Table::from_iter([("kind".to_owned(), "".into())]));
    }
    let message = retry(whole).unwrap_or_default();
    let (name, names) = (key.join("."), quoted_list(&message));
    let (list, value) = (names.join(", "), value_at(table, key).expect("the key is in the table"));
    let (allowed, form) = match names.first() {
        Some(first) if message.starts_with("unknown variant `") => {
            let kind = value.as_str().and_then(|text| nearest(text, &names)).unwrap_or(first);
            let form = format!("{{ kind = \"{kind}\" }}");
            (format!("a table such as {form}, with kind one of {list}"), form)
        }
        Some(first) => (format!("a table with the keys {list}"), format!("{{ {first} = … }}")),
        None => ("a table".to_owned(), "{ … }".to_owned()),
    };
    ConfigError::Key {
        place: place(layers, sets, key),
        problem: format!("{name} is {value}; allowed: {allowed}"),
        hint: format!("write {name} = {form}"),
    }
}

/// The first key whose value is an array in `given` and became a table in `read`: serde reads a struct also from an
/// array of its values.
pub(super) fn array_read_as_table(given: &Value, read: &Value) -> Option<Vec<String>> {
    let inner = |segment: &str, given: &Value, read: &Value| {
        let mut key = array_read_as_table(given, read)?;
        key.insert(0, segment.to_owned());
        Some(key)
    };
    match (given, read) {
        (Value::Array(_), Value::Table(_)) => Some(vec![]),
        (Value::Table(given), Value::Table(read)) => {
            given.iter().find_map(|(name, value)| inner(name, value, read.get(name)?))
        }
        (Value::Array(given), Value::Array(read)) => {
            let mut pairs = given.iter().zip(read).enumerate();
            pairs.find_map(|(index, (given, read))| inner(&index.to_string(), given, read))
        }
        _ => None,
    }
}

/// The error of a key that is unknown because an override changes the `kind` of its table alone.
fn of_other_kind(key: &[String], sets: &[Override], message: &str) -> Option<ConfigError> {
    quoted_after(message, "unknown field `")?;
    let (_, table) = key.split_last()?;
    let sets_kind = |set: &&Override| {
        set.path.split_last().is_some_and(|(last, parents)| last == "kind" && parents == table)
    };
    let set = sets.iter().rev().find(sets_kind)?;
    let (name, table, kind) = (key.join("."), table.join("."), &set.value);
    Some(ConfigError::Key {
        place: format!("--set {}", set.text),
        problem: format!(
            "{name} belongs to the kind that the file has; allowed with this one: {}",
            quoted_list(message).join(", ")
        ),
        hint: format!("set the whole table: --set '{table}={{ kind = {kind} }}'"),
    })
}

/// `problems`, with the file and the line of those whose value is in one of the files that the first extends, and
/// not overridden.
pub(super) fn with_places(problems: &Problems, layers: &[Layer], sets: &[Override]) -> Problems {
    let mut placed = Problems::new();
    for p in problems.as_slice() {
        let key: Vec<String> = p.key.split('.').map(str::to_owned).collect();
        let is_set = sets.iter().any(|set| key.starts_with(&set.path));
        let written = |layer: &Layer| {
            deepest(layer, &key).filter(|(depth, _)| *depth == key.len()).map(|(_, line)| line)
        };
        let found = layers.iter().enumerate().find_map(|(at, layer)| Some((at, written(layer)?)));
        let name = match found {
            Some((at, line)) if at > 0 && !is_set => {
                format!("{} ({}:{line})", p.key, layers[at].path.display())
            }
            _ => p.key.clone(),
        };
        placed.check(false, name, &p.value, &p.allowed, &p.remedy);
    }
    placed
}

fn segment_name(segment: &Segment) -> Option<String> {
    match segment {
        Segment::Seq { index } => Some(index.to_string()),
        Segment::Map { key } => Some(key.clone()),
        Segment::Enum { .. } | Segment::Unknown => None,
    }
}

/// Extends `key` down to the entry without which the message changes.
fn narrow(
    key: &mut Vec<String>,
    table: &Table,
    message: &str,
    retry: &impl Fn(Table) -> Option<String>,
) {
    while let Some(Value::Table(inner)) = value_at(table, key) {
        let error_of = |changed: Table| {
            let mut whole = table.clone();
            if let Some(place) = value_at_mut(&mut whole, key) {
                *place = Value::Table(changed);
            }
            retry(whole)
        };
        match culprit(inner, "kind", message, error_of) {
            Some(name) => key.push(name.to_owned()),
            None => return,
        }
    }
}

/// The value at `key`.
fn value_at<'a>(table: &'a Table, key: &[String]) -> Option<&'a Value> {
    let (first, rest) = key.split_first()?;
    rest.iter().try_fold(table.get(first)?, |value, segment| match value {
        Value::Table(table) => table.get(segment),
        Value::Array(array) => array.get(segment.parse::<usize>().ok()?),
        _ => None,
    })
}

fn value_at_mut<'a>(table: &'a mut Table, key: &[String]) -> Option<&'a mut Value> {
    let (first, rest) = key.split_first()?;
    rest.iter().try_fold(table.get_mut(first)?, |value, segment| match value {
        Value::Table(table) => table.get_mut(segment),
        Value::Array(array) => array.get_mut(segment.parse::<usize>().ok()?),
        _ => None,
    })
}

/// Turns serde's message about `key` into a problem and a hint.
fn describe(key: &[String], value: Option<&Value>, message: &str) -> (String, String) {
    let name = if key.is_empty() { "the file".to_owned() } else { key.join(".") };
    let allowed = quoted_list(message);
    let allowed_text = allowed.join(", ");
    if let Some(field) = quoted_after(message, "unknown field `") {
        let hint = match nearest(&field, &allowed) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("remove {name}, or use one of the keys above"),
        };
        return (format!("{name} is no known key; allowed here: {allowed_text}"), hint);
    }
    if let Some(variant) = quoted_after(message, "unknown variant `") {
        let is_kind =
            AttentionConfig::KINDS.iter().any(|known| allowed.contains(&known.kind.into()));
        let value = is_kind.then(|| kind_with_value(&variant)).flatten();
        let hint = match (value, nearest(&variant, &allowed)) {
            (Some(value), _) => format!("write {value}"),
            (None, Some(near)) => format!("did you mean \"{near}\"?"),
            (None, None) => "use one of the values above".to_owned(),
        };
        return (format!("{name} is \"{variant}\"; allowed: {allowed_text}"), hint);
    }
    if let Some(field) = quoted_after(message, "missing field `") {
        let full = if key.is_empty() { field.clone() } else { format!("{name}.{field}") };
        let hint = if key.is_empty() {
            format!("add a table [{field}]; the files in configs/ show one")
        } else {
            format!("add `{field} = …` under [{name}]")
        };
        return (format!("{full} is missing"), hint);
    }
    let mut problem = match value {
        Some(value) => format!("{name} is {value}"),
        None => name.clone(),
    };
    let expected = message.rsplit_once("expected ").map(|(_, expected)| expected);
    let reason = match expected {
        Some(expected) if message.starts_with("invalid") => {
            format!("expected {}", in_words(expected))
        }
        _ => message.to_owned(),
    };
    let _ = write!(problem, "; {reason}");
    let hint = match (value, expected) {
        (Some(value), Some("a string")) => format!("put it in quotes: {name} = \"{value}\""),
        _ => format!("change the value of {name}"),
    };
    (problem, hint)
}

/// What serde calls a type, in words.
fn in_words(expected: &str) -> &str {
    match expected {
        "f32" | "f64" => "a number",
        "usize" | "u64" | "u32" | "u16" | "u8" => "a whole number, 0 or more",
        "a boolean" => "true or false",
        "a sequence" => "an array [...]",
        "a map" => "a table",
        "string only" => "a string",
        other => other,
    }
}

/// The text after `prefix` up to the next backquote, when `message` starts with it.
fn quoted_after(message: &str, prefix: &str) -> Option<String> {
    let rest = message.strip_prefix(prefix)?;
    rest.split_once('`').map(|(field, _)| field.to_owned())
}

/// The names in backquotes after "expected".
fn quoted_list(message: &str) -> Vec<String> {
    let list = message.split_once("expected ").map_or("", |(_, list)| list);
    list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The allowed name most similar to `name`, if any is similar enough.
pub(super) fn nearest<'a>(name: &str, allowed: &'a [String]) -> Option<&'a str> {
    // Comparing takes time and memory in proportion to the length; no key is as long as this.
    if name.len() > 100 {
        return None;
    }
    // `learning_rate` for `lr`.
    let initials: String = name.split('_').filter_map(|word| word.chars().next()).collect();
    let score = |other: &str| {
        let alike = strsim::normalized_damerau_levenshtein(name, other);
        let is_part = other.len() > 2 && (name.contains(other) || other.contains(name));
        if is_part || other == initials { alike.max(0.6) } else { alike }
    };
    let best = allowed.iter().max_by(|a, b| score(a).total_cmp(&score(b)))?;
    (score(best) >= 0.5).then_some(best)
}

/// Where `key` was set: the `--set`, else the file and the line of the deepest part of it that any of the
/// files has. The first of `layers` overrides the others.
fn place(layers: &[Layer], sets: &[Override], key: &[String]) -> String {
    let sets_key = |set: &&Override| key.starts_with(&set.path) || set.path.starts_with(key);
    if !key.is_empty()
        && let Some(set) = sets.iter().rev().find(sets_key)
    {
        return format!("--set {}", set.text);
    }
    let found = |layer| deepest(layer, key).map(|(depth, line)| (layer, depth, line));
    // The last of several maxima is the first of the layers.
    match layers.iter().rev().filter_map(found).max_by_key(|(_, depth, _)| *depth) {
        Some((layer, _, line)) => format!("{}:{line}", layer.path.display()),
        None => layers[0].path.display().to_string(),
    }
}

/// How many segments of `key` a file has, and the line, from 1, of the last of them.
fn deepest(layer: &Layer, key: &[String]) -> Option<(usize, usize)> {
    let root = DeTable::parse(&layer.source).ok()?;
    let mut at = None;
    let mut place = Descent::Table(root.get_ref());
    for (depth, segment) in key.iter().enumerate() {
        let (start, value) = match place {
            Descent::Table(table) => {
                match table.iter().find(|(name, _)| name.get_ref().as_ref() == segment) {
                    Some((name, value)) => (name.span().start, value.get_ref()),
                    None => break,
                }
            }
            Descent::Value(DeValue::Array(array)) => {
                match segment.parse::<usize>().ok().and_then(|index| array.get(index)) {
                    Some(value) => (value.span().start, value.get_ref()),
                    None => break,
                }
            }
            Descent::Value(_) => break,
        };
        at = Some((depth + 1, start));
        place = match value {
            DeValue::Table(table) => Descent::Table(table),
            other => Descent::Value(other),
        };
    }
    at.map(|(depth, start)| (depth, layer.source[..start].matches('\n').count() + 1))
}

/// `file:line` of the top-level `key` of a file.
pub(super) fn place_in(layer: &Layer, key: &str) -> String {
    place(std::slice::from_ref(layer), &[], &[key.to_owned()])
}

enum Descent<'a, 'i> {
    Table(&'a DeTable<'i>),
    Value(&'a DeValue<'i>),
}
