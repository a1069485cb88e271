//! An attention kind given by a command's options; its problems are reported in terms of these options.

use longwall_config::{Problem, Problems};
use longwall_kernels::attention::{AttentionConfig, AttentionShape};
use toml::{Table, Value};

use super::error::{array_read_as_table, expects_table, nearest};
use super::{ConfigError, Override};

/// Why options do not give an attention kind.
#[derive(Debug, thiserror::Error)]
pub enum KindError {
    /// No kind has this name.
    #[error("--kind is {kind}, no known attention kind; allowed: {known}\n  hint: {hint}")]
    Unknown {
        /// The name given.
        kind: String,
        /// All names.
        known: String,
        /// What to do.
        hint: String,
    },
    /// A `--set` is not `key=value`.
    #[error(transparent)]
    Override(#[from] ConfigError),
    /// A `--set` names `kind`.
    #[error(
        "--set {text} sets the kind; allowed: the keys of kind {kind}, which are: {keys}\n  hint: choose the kind with --kind"
    )]
    SetsKind {
        /// The option's value.
        text: String,
        /// The kind.
        kind: String,
        /// Its keys.
        keys: String,
    },
    /// A key is unknown, or its value has a wrong type.
    #[error(
        "--set {sets}: {reason}; the keys of kind {kind} are: {keys}\n  hint: `longwall variants` lists the keys of each kind with their defaults"
    )]
    Keys {
        /// The values of all `--set`.
        sets: String,
        /// The parser's reason.
        reason: String,
        /// The kind.
        kind: String,
        /// Its keys.
        keys: String,
    },
    /// The settings do not fit the layer.
    #[error("--kind {kind} does not go with these {given}:{problems}")]
    Unfit {
        /// The kind.
        kind: &'static str,
        /// Where the layer's sizes come from.
        given: &'static str,
        /// All problems, each on its own lines.
        problems: String,
    },
}

/// The configuration of a kind with some of its keys set by `--set key=value`.
///
/// # Errors
/// When the kind or a key is unknown, or a value has a wrong type.
pub fn parse_kind(kind: &str, sets: &[String]) -> Result<AttentionConfig, KindError> {
    let known = AttentionConfig::KINDS.iter().find(|known| known.kind == kind);
    let Some(known) = known else {
        let kinds: Vec<_> =
            AttentionConfig::KINDS.iter().map(|known| known.kind.to_owned()).collect();
        let hint = match (kind_with_value(kind), nearest(kind, &kinds)) {
            (Some(value), _) => format!("that is {value}: give the second with --set"),
            (None, Some(near)) => format!("did you mean {near}?"),
            (None, None) => "`longwall variants` describes them".to_owned(),
        };
        return Err(KindError::Unknown { kind: kind.to_owned(), known: kinds.join(", "), hint });
    };
    let keys = (known.keys)().join(", ");
    let keys = if keys.is_empty() { "none".to_owned() } else { keys };
    let kind = kind.to_owned();
    let mut table = Table::new();
    table.insert("kind".to_owned(), kind.clone().into());
    for text in sets {
        let set = Override::parse(text)?;
        if set.path[0] == "kind" {
            return Err(KindError::SetsKind { text: text.clone(), kind, keys });
        }
        set.apply(&mut table)?;
    }
    read_kind(table).map_err(|reason| {
        let sets = sets.join(" --set ");
        KindError::Keys { sets, reason, kind, keys }
    })
}

/// The configuration in `table`, or what is wrong with it.
fn read_kind(table: Table) -> Result<AttentionConfig, String> {
    let no_table = "expected a table with `kind`".to_owned();
    let given = Value::Table(table);
    let config = given.clone().try_into().map_err(|error: toml::de::Error| {
        if expects_table(error.message()) { no_table.clone() } else { error.message().to_owned() }
    })?;
    let read = Value::try_from(&config).expect("a configuration has a TOML form");
    match array_read_as_table(&given, &read) {
        Some(key) => Err(format!("{}: {no_table}", key.join("."))),
        None => Ok(config),
    }
}

/// The kind that has `name` as a value of one of its keys, such as `alibi`: `kind = "rope", position =
/// "alibi"`.
pub(super) fn kind_with_value(name: &str) -> Option<String> {
    AttentionConfig::KINDS.iter().find_map(|known| {
        (known.keys)().iter().find_map(|key| {
            let entries = [("kind", known.kind), (key, name)];
            let table: Table =
                entries.map(|(key, value)| (key.to_owned(), value.into())).into_iter().collect();
            let fits = table.try_into::<AttentionConfig>().is_ok();
            fits.then(|| format!("kind = \"{}\", {key} = \"{name}\"", known.kind))
        })
    })
}

/// What a command calls the sizes of a layer.
#[derive(Clone, Copy)]
pub struct SizeNames {
    /// Where they come from: `options`, for example.
    pub given: &'static str,
    /// Channels of a head.
    pub head_dim: &'static str,
    /// Width of the layer's input.
    pub width: &'static str,
}

/// Checks that the settings fit the layer, whose sizes the command calls `names`.
///
/// # Errors
/// All problems at once, if they do not.
pub fn check_kind(
    config: &AttentionConfig,
    layer: &AttentionShape,
    names: SizeNames,
) -> Result<(), KindError> {
    let mut problems = Problems::new();
    config.validate(layer, &mut problems);
    if problems.as_slice().is_empty() {
        return Ok(());
    }
    let problems = in_options(&problems, names);
    Err(KindError::Unfit { kind: config.kind(), given: names.given, problems })
}

/// The problems one below another, with options instead of a configuration's keys.
fn in_options(problems: &Problems, sizes: SizeNames) -> String {
    let plain = |text: &str| {
        text.replace("model.window", "--window")
            .replace("model.head_dim", sizes.head_dim)
            .replace("model.width", sizes.width)
            .replace("width / heads", sizes.head_dim)
    };
    let one = |Problem { key, value, allowed, remedy }: &Problem| {
        let problem = Problem {
            key: plain(&key.replace("model.attention.", "--set ")),
            value: value.clone(),
            allowed: plain(&allowed.replace("model.attention.", "")),
            remedy: plain(&settings(&remedy.replace("model.attention.", ""))),
        };
        format!("\n{problem}")
    };
    problems.as_slice().iter().map(one).collect()
}

/// `text` with each `key = value` (or `set key = value`) written as a shell option.
fn settings(text: &str) -> String {
    let (mut done, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once(" = ") {
        let (words, key) = before.rsplit_once(' ').map_or(("", before), |(w, key)| (w, key));
        let words = words.strip_suffix("set").unwrap_or(words).trim_end();
        let string = after.strip_prefix('"').and_then(|text| text.find('"'));
        let length = match string {
            Some(quote) => quote + 2,
            None => after.find([' ', ',', ';']).unwrap_or(after.len()),
        };
        let (value, next) = after.split_at(length);
        done += words;
        done += if words.is_empty() && done.is_empty() { "" } else { " " };
        done += &match (key, string) {
            ("kind", _) => format!("--kind {}", value.trim_matches('"')),
            (_, Some(_)) => format!("--set '{key}={value}'"),
            (_, None) => format!("--set {key}={value}"),
        };
        rest = next;
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_become_options() {
        for (text, options) in [
            ("set theta = 10000", "--set theta=10000"),
            ("leave it out", "leave it out"),
            ("set a = 7.0; 6 to 8 are open", "--set a=7.0; 6 to 8 are open"),
            (
                "leave it out, or set form = \"x y\" to rest",
                "leave it out, or --set 'form=\"x y\"' to rest",
            ),
            (
                "set p = 2, form = \"attention\", or more heads",
                "--set p=2, --set 'form=\"attention\"', or more heads",
            ),
            (
                "set rotary_fraction = 1.0, or rope = false",
                "--set rotary_fraction=1.0, or --set rope=false",
            ),
            ("at least 2 with kind = \"fox\"", "at least 2 with --kind fox"),
        ] {
            assert_eq!(settings(text), options);
        }
    }
}
