//! `--set key=value`: dotted overrides of a configuration.

use toml::{Table, Value};

use super::ConfigError;
use super::extends::{EXTENDS, REMOVE, dotted, remove};

/// One `--set`, split into its key and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// The text as it was given.
    pub text: String,
    /// The key's segments.
    pub path: Vec<String>,
    /// The value: TOML if it parses as TOML, else a string.
    pub value: Value,
}

impl Override {
    /// Parses `key=value`.
    ///
    /// # Errors
    /// When there is no `=`, or a segment of the key is empty.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let bad = |reason: &str| ConfigError::Override {
            text: text.to_owned(),
            reason: reason.to_owned(),
            remedy: "write key=value with a dotted key, for example --set train.lr=6e-4".to_owned(),
        };
        let (key, value) = text.split_once('=').ok_or_else(|| bad("it has no `=`"))?;
        let path: Vec<String> = key.split('.').map(|part| part.trim().to_owned()).collect();
        if path.iter().any(String::is_empty) {
            return Err(bad("a part of its key is empty"));
        }
        if path[0] == EXTENDS {
            return Err(ConfigError::Override {
                text: text.to_owned(),
                reason: "a file says itself what it extends".to_owned(),
                remedy: "write a file with extends = \"…\", or give the base with --config"
                    .to_owned(),
            });
        }
        Ok(Override { text: text.to_owned(), path, value: parse_value(value.trim()) })
    }

    /// Sets the value in `table`, creating missing tables on the way. `remove` takes away the keys that it lists.
    ///
    /// # Errors
    /// When a segment leads into something that is neither a table nor an array, or is no valid index
    /// of an array; when a key to remove is not there.
    pub fn apply(&self, table: &mut Table) -> Result<(), ConfigError> {
        if self.path == [REMOVE] {
            return self.remove_from(table);
        }
        let (last, parents) = self.path.split_last().expect("a parsed key has a segment");
        let Some((first, rest)) = parents.split_first() else {
            table.insert(last.clone(), self.value.clone());
            return Ok(());
        };
        let mut place = table.entry(first.clone()).or_insert_with(|| Value::Table(Table::new()));
        for (depth, segment) in rest.iter().enumerate() {
            place = self.child(place, depth + 1, segment)?;
        }
        *self.child(place, parents.len(), last)? = self.value.clone();
        Ok(())
    }

    /// Takes away the keys of `remove=[…]`.
    fn remove_from(&self, table: &mut Table) -> Result<(), ConfigError> {
        let bad = |reason: String, remedy: &str| {
            Err(ConfigError::Override {
                text: self.text.clone(),
                reason,
                remedy: remedy.to_owned(),
            })
        };
        let Some(keys) = dotted(&self.value) else {
            let remedy = "write for example remove=[\"model.attention\"]";
            return bad(
                format!("remove is {}; expected a list of dotted keys", self.value),
                remedy,
            );
        };
        for key in keys {
            if !remove(table, &key) {
                let reason = format!("the configuration has no {} to remove", key.join("."));
                return bad(reason, "check the spelling, or leave it out");
            }
        }
        Ok(())
    }

    /// The entry `segment` of `place`, which is at the first `depth` segments.
    fn child<'a>(
        &self,
        place: &'a mut Value,
        depth: usize,
        segment: &str,
    ) -> Result<&'a mut Value, ConfigError> {
        let parent = self.path[..depth].join(".");
        match place {
            Value::Table(table) => {
                Ok(table.entry(segment.to_owned()).or_insert_with(|| Value::Table(Table::new())))
            }
            Value::Array(array) => {
                let len = array.len();
                let index = segment.parse::<usize>().ok().filter(|&index| index < len);
                index.map(|index| &mut array[index]).ok_or_else(|| ConfigError::Override {
                    text: self.text.clone(),
                    reason: format!(
                        "{parent} is an array of {len}, and `{segment}` is no index into it"
                    ),
                    remedy: format!("use an index from 0 to {}", len.saturating_sub(1)),
                })
            }
            other => Err(ConfigError::Override {
                text: self.text.clone(),
                reason: format!("{parent} is {other}, which has no keys"),
                remedy: format!("set {parent} itself, or check the spelling of the key"),
            }),
        }
    }
}

/// `text` as a TOML value, else as a string.
fn parse_value(text: &str) -> Value {
    let parsed: Option<Table> = toml::from_str(&format!("value = {text}")).ok();
    parsed
        .filter(|table| table.len() == 1)
        .and_then(|mut table| table.remove("value"))
        .unwrap_or_else(|| Value::String(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(toml: &str, text: &str) -> Result<Table, String> {
        let mut table: Table = toml::from_str(toml).unwrap();
        Override::parse(text)
            .and_then(|set| set.apply(&mut table))
            .map(|()| table)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn values_are_toml_or_else_text() {
        assert_eq!(parse_value("6e-4"), Value::Float(6e-4));
        assert_eq!(parse_value("true"), Value::Boolean(true));
        assert_eq!(parse_value("10M"), Value::String("10M".into()));
        assert_eq!(parse_value("\"7\""), Value::String("7".into()));
        assert_eq!(parse_value(""), Value::String(String::new()));
        assert_eq!(parse_value("1\nother = 2"), Value::String("1\nother = 2".into()));
        assert!(parse_value("{ kind = \"fox\" }").is_table());
    }

    #[test]
    fn tables_are_made_and_arrays_are_indexed() {
        let table = set("", "train.schedule.kind=wsd").unwrap();
        assert_eq!(table["train"]["schedule"]["kind"].as_str(), Some("wsd"));
        let table = set("a = [{ w = 1 }, { w = 2 }]", "a.1.w=5").unwrap();
        assert_eq!(
            (table["a"][0]["w"].as_integer(), table["a"][1]["w"].as_integer()),
            (Some(1), Some(5))
        );
        let table = set("seeds = [1, 2]", "seeds.0=9").unwrap();
        assert_eq!(table["seeds"][0].as_integer(), Some(9));
        assert_eq!(set("a = 1", "a=2").unwrap()["a"].as_integer(), Some(2));
    }

    #[test]
    fn keys_are_removed() {
        let table = set(
            "[model]\nattention = { kind = \"rope\" }\nlayers = 2",
            "remove=['model.attention']",
        );
        assert_eq!(table.unwrap(), toml::from_str("model = { layers = 2 }").unwrap());
    }

    #[test]
    fn a_value_may_hold_an_equals_sign() {
        let table = set("", "train.sample.prompts=[\"x = y\"]").unwrap();
        assert_eq!(table["train"]["sample"]["prompts"][0].as_str(), Some("x = y"));
    }

    #[test]
    fn bad_overrides_say_why() {
        insta::assert_snapshot!(set("", "train.lr").unwrap_err(), @r"
        --set train.lr: it has no `=`
          hint: write key=value with a dotted key, for example --set train.lr=6e-4
        ");
        insta::assert_snapshot!(set("", "train..lr=1").unwrap_err(), @r"
        --set train..lr=1: a part of its key is empty
          hint: write key=value with a dotted key, for example --set train.lr=6e-4
        ");
        insta::assert_snapshot!(set("a = [1, 2]", "a.2=1").unwrap_err(), @r"
        --set a.2=1: a is an array of 2, and `2` is no index into it
          hint: use an index from 0 to 1
        ");
        insta::assert_snapshot!(set("a = 1", "remove=b.c").unwrap_err(), @r#"
        --set remove=b.c: remove is "b.c"; expected a list of dotted keys
          hint: write for example remove=["model.attention"]
        "#);
        insta::assert_snapshot!(set("a = 1", "remove=['b.c']").unwrap_err(), @r"
        --set remove=['b.c']: the configuration has no b.c to remove
          hint: check the spelling, or leave it out
        ");
        insta::assert_snapshot!(set("[train]\nlr = 1", "train.lr.peak=1").unwrap_err(), @r"
        --set train.lr.peak=1: train.lr is 1, which has no keys
          hint: set train.lr itself, or check the spelling of the key
        ");
    }
}
