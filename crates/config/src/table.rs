//! TOML tables: two structs in one table, a struct's keys, and the key that causes an error.

use serde::de::value::Error as NoValue;
use serde::de::{DeserializeOwned, Deserializer, Error, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use toml::Table;

/// Deserialises two structs whose keys share one table. `#[serde(flatten)]` does the same, but
/// accepts keys that neither struct has.
///
/// # Errors
/// A key that neither struct has, reported with the keys of both, and the structs' own errors.
pub fn side_by_side<'de, A, B, D>(deserializer: D) -> Result<(A, B), D::Error>
where
    A: DeserializeOwned,
    B: DeserializeOwned,
    D: Deserializer<'de>,
{
    let (a_keys, b_keys) = (keys_of::<A>(), keys_of::<B>());
    let (mut a, mut b) = (Table::new(), Table::new());
    for (key, value) in Table::deserialize(deserializer)? {
        if a_keys.contains(&key.as_str()) {
            a.insert(key, value);
        } else if b_keys.contains(&key.as_str()) {
            b.insert(key, value);
        } else {
            let allowed = [a_keys, b_keys].concat().join("`, `");
            let message = format!("unknown field `{key}`, expected one of `{allowed}`");
            return Err(D::Error::custom(message));
        }
    }
    let fail = |error: toml::de::Error| D::Error::custom(error.message());
    Ok((a.try_into().map_err(fail)?, b.try_into().map_err(fail)?))
}

/// The keys of the struct `T` as serde knows them, in the order of its fields; none if `T` is not a
/// struct.
pub fn keys_of<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut keys: &[&str] = &[];
    // The attempt always fails, but records the names it asks for.
    let _ = T::deserialize(FieldNames(&mut keys));
    keys
}

/// A deserializer without values that records the field names a struct asks for.
struct FieldNames<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = NoValue;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, NoValue> {
        Err(NoValue::custom("only the names are wanted"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, NoValue> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// The key of `table` that serde's error `message` is about: the first key whose removal changes the
/// message. Serde buffers tables with a tag, such as `kind`, and so loses the place of an error inside
/// them.
///
/// `error_of` deserialises a copy of `table` and returns the message of its error, if any. No table can
/// be read without the key `tag`, so the tag is tried last.
pub fn culprit<'t>(
    table: &'t Table,
    tag: &str,
    message: &str,
    error_of: impl Fn(Table) -> Option<String>,
) -> Option<&'t str> {
    let mut keys: Vec<&str> = table.keys().map(String::as_str).collect();
    keys.sort_by_key(|key| *key == tag);
    keys.into_iter().find(|key| {
        let mut without = table.clone();
        without.remove(*key);
        error_of(without).as_deref() != Some(message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Size {
        width: usize,
        #[serde(default)]
        height: usize,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Name {
        name: String,
    }

    fn read(text: &str) -> Result<(Size, Name), toml::de::Error> {
        side_by_side(toml::de::Deserializer::parse(text).unwrap())
    }

    #[test]
    fn both_structs_are_read_from_one_table() {
        let (size, name) = read("name = \"a\"\nwidth = 3").unwrap();
        assert_eq!((size, name.name), (Size { width: 3, height: 0 }, "a".into()));
        assert_eq!(keys_of::<Size>(), ["width", "height"]);
        assert!(keys_of::<String>().is_empty());
    }

    #[test]
    fn a_key_of_neither_is_refused_with_the_keys_of_both() {
        let error = read("name = \"a\"\nwidth = 3\ndepth = 1").unwrap_err();
        let expected = "unknown field `depth`, expected one of `width`, `height`, `name`";
        assert_eq!(error.message(), expected);
        assert_eq!(read("width = 3").unwrap_err().message(), "missing field `name`");
    }

    #[test]
    fn the_culprit_is_the_key_without_which_the_message_changes() {
        #[derive(Debug, Deserialize)]
        #[serde(tag = "kind")]
        enum Shape {
            Box { width: usize, height: usize },
        }
        let error_of = |table: Table| {
            let shape: Result<Shape, toml::de::Error> = table.try_into();
            shape.map(|Shape::Box { width, height }| width * height).err()
        };
        let message = |table: Table| error_of(table).map(|error| error.message().to_owned());
        let culprit_of = |text: &str| {
            let table: Table = toml::from_str(text).unwrap();
            let found = message(table.clone()).unwrap();
            culprit(&table, "kind", &found, message).map(str::to_owned)
        };
        let found = culprit_of("height = -1\nkind = \"Box\"\nwidth = 2");
        assert_eq!(found.as_deref(), Some("height"));
        let found = culprit_of("height = 1\nkind = \"Bix\"\nwidth = 2");
        assert_eq!(found.as_deref(), Some("kind"));
    }
}
