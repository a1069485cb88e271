//! The rotary keys of a kind's table, for kinds whose `Config` holds a [`Rotary`] beside its own keys.
//!
//! The table holds the keys of both, and any other key is an error. serde's `flatten` does not support
//! `deny_unknown_fields`, which names the allowed keys in its error. So the macro `with_rotary_keys`
//! reads the rotary keys itself and leaves the others to the derived code.

use std::sync::OnceLock;

use longwall_config::Problems;
use serde::de::{DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};
use serde::{Serialize, forward_to_deserialize_any};

use super::AttentionShape;
use super::rotation::{Rotation, Scaling};

/// The rotary positions of q and k.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rotary {
    /// Rotate q and k.
    pub rope: bool,
    /// Base of the rotary angles, above 1; default 10,000.
    pub theta: f64,
    /// Change of the angles for long contexts; default none.
    pub scaling: Scaling,
}

/// The keys of [`Rotary`].
const ROTARY_KEYS: [&str; 3] = ["rope", "theta", "scaling"];

impl Rotary {
    /// The defaults, with rotation on or off.
    pub fn new(rope: bool) -> Self {
        Rotary { rope, theta: 10_000.0, scaling: Scaling::None {} }
    }

    /// The rotation; `None` when it is off.
    pub fn rotation(&self) -> Option<Rotation> {
        let Rotary { rope, theta, scaling } = *self;
        rope.then_some(Rotation { scaling, ..Rotation::new(theta) })
    }

    /// Records every problem for a layer of this shape; `key` is the path of the kind's table.
    pub fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        if let Some(rotation) = self.rotation() {
            rotation.validate(key, "rope = false", shape.head_dim, problems);
        }
    }

    /// Replaces the values that a table gives.
    pub(super) fn with(self, given: Given) -> Self {
        Rotary {
            rope: given.rope.unwrap_or(self.rope),
            theta: given.theta.unwrap_or(self.theta),
            scaling: given.scaling.unwrap_or(self.scaling),
        }
    }
}

/// Implements serde's traits for a `Config` that derives both with `#[serde(remote = "Self")]` and
/// has the field `#[serde(flatten, skip_deserializing)] rotary: Rotary`.
macro_rules! with_rotary_keys {
    ($config:ty) => {
        impl serde::Serialize for $config {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                <$config>::serialize(self, serializer)
            }
        }

        impl<'de> serde::Deserialize<'de> for $config {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                static KEYS: std::sync::OnceLock<Vec<&'static str>> = std::sync::OnceLock::new();
                let mut given = crate::attention::rotary::Given::default();
                let own = crate::attention::rotary::OwnKeys::new(deserializer, &KEYS, &mut given);
                let mut config = <$config>::deserialize(own)?;
                config.rotary = config.rotary.with(given);
                Ok(config)
            }
        }
    };
}
pub(super) use with_rotary_keys;

/// The rotary values that a table gives.
#[derive(Default)]
pub(super) struct Given {
    rope: Option<bool>,
    theta: Option<f64>,
    scaling: Option<Scaling>,
}

/// A deserializer that moves the rotary keys of a table to `given` and passes on the kind's own.
pub(super) struct OwnKeys<'a, T> {
    inner: T,
    /// All allowed keys of the table, once the kind's own are known.
    keys: &'static OnceLock<Vec<&'static str>>,
    given: &'a mut Given,
}

impl<'a, T> OwnKeys<'a, T> {
    pub fn new(inner: T, keys: &'static OnceLock<Vec<&'static str>>, given: &'a mut Given) -> Self {
        OwnKeys { inner, keys, given }
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for OwnKeys<'_, D> {
    type Error = D::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let keys = self.keys.get_or_init(|| [fields, &ROTARY_KEYS[..]].concat());
        let visitor = OwnKeys { inner: visitor, keys: self.keys, given: self.given };
        self.inner.deserialize_struct(name, keys, visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, D::Error> {
        Err(Error::custom("rotary keys stand in a table"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for OwnKeys<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(OwnKeys { inner: map, keys: self.keys, given: self.given })
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for OwnKeys<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        let keys = self.keys.get().expect("known before the first entry");
        while let Some(key) = self.inner.next_key::<String>()? {
            match key.as_str() {
                "rope" => self.given.rope = Some(self.inner.next_value()?),
                "theta" => self.given.theta = Some(self.inner.next_value()?),
                "scaling" => self.given.scaling = Some(self.inner.next_value()?),
                own if keys.contains(&own) => {
                    return seed.deserialize(own.into_deserializer()).map(Some);
                }
                other => return Err(Error::unknown_field(other, keys)),
            }
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.inner.next_value_seed(seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{AttentionConfig, stick_breaking, tra};
    use longwall_config::keys_of;

    fn read(text: &str) -> Result<AttentionConfig, String> {
        toml::from_str(text).map_err(|error: toml::de::Error| error.message().to_owned())
    }

    #[test]
    fn rotary_keys_stand_beside_a_kinds_own() {
        let text = "kind = \"tra\"\ntheta = 500\np = 3\nscaling = { kind = \"ntk\", factor = 2.0 }";
        let rotary =
            Rotary { theta: 500.0, scaling: Scaling::Ntk { factor: 2.0 }, ..Rotary::new(true) };
        let config = tra::Config { p: 3, rotary, ..tra::Config::default() };
        assert_eq!(read(text), Ok(AttentionConfig::Tra(config)));
        let keys = ["p", "kappa", "beta", "learn_beta", "norm_eps", "rope", "theta", "scaling"];
        assert_eq!(keys_of::<tra::Config>(), keys);
    }

    #[test]
    fn keys_that_are_left_out_have_the_kinds_defaults() {
        let config = |rope| stick_breaking::Config { rotary: Rotary::new(rope) };
        assert_eq!(
            read("kind = \"stick_breaking\""),
            Ok(AttentionConfig::StickBreaking(config(false)))
        );
        let rotates = read("kind = \"stick_breaking\"\nrope = true");
        assert_eq!(rotates, Ok(AttentionConfig::StickBreaking(config(true))));
    }

    #[test]
    fn unknown_keys_and_wrong_types_are_refused() {
        assert_eq!(
            read("kind = \"tra\"\nthetta = 3"),
            Err("unknown field `thetta`, expected one of `p`, `kappa`, `beta`, `learn_beta`, \
                 `norm_eps`, `rope`, `theta`, `scaling`"
                .to_owned())
        );
        let error = read("kind = \"entmax\"\ntheta = \"high\"").unwrap_err();
        assert!(error.contains("expected f64"), "{error}");
    }

    #[test]
    fn tables_are_written_as_they_are_read() {
        for config in AttentionConfig::defaults() {
            let text = toml::to_string(&config).unwrap();
            assert_eq!(read(&text), Ok(config), "{text}");
        }
        let text = toml::to_string(&AttentionConfig::Tra(tra::Config::default())).unwrap();
        let keys: Vec<_> = text.lines().filter_map(|line| line.split_once(" = ")).collect();
        let (kind, own) = (("kind", "\"tra\""), [("p", "2"), ("kappa", "1.0"), ("beta", "1.0")]);
        assert_eq!(keys[0], kind);
        assert_eq!(keys[1..4], own);
        assert!(keys.contains(&("rope", "true")), "{text}");
    }
}
