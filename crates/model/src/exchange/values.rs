//! Values of a config.json.

use longwall_config::Problems;
use serde_json::Value;

/// Reads a config.json, and records what is wrong with it.
pub(super) struct Reader<'a> {
    config: &'a Value,
    problems: &'a mut Problems,
}

impl<'a> Reader<'a> {
    pub fn new(config: &'a Value, problems: &'a mut Problems) -> Self {
        Reader { config, problems }
    }

    /// The value of `key`; `null` counts as missing.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.config.get(key).filter(|value| !value.is_null())
    }

    /// A whole number above 0, which must be there.
    pub fn size(&mut self, key: &str) -> usize {
        let value = self.get(key);
        let size = value.and_then(Value::as_u64).filter(|&size| (1..=1 << 40).contains(&size));
        self.problems.check(
            size.is_some(),
            key,
            value.map_or("missing".to_owned(), Value::to_string),
            "a whole number above 0",
            "take the config.json that the weights came with",
        );
        size.unwrap_or(1) as usize
    }

    /// As [`Reader::size`], if the key is there.
    pub fn optional_size(&mut self, key: &str) -> Option<usize> {
        self.get(key)?;
        Some(self.size(key))
    }

    pub fn flag(&mut self, key: &str, default: bool) -> bool {
        let value = self.get(key);
        let flag = value.map_or(Some(default), Value::as_bool);
        self.problems.check(
            flag.is_some(),
            key,
            value.map_or(String::new(), Value::to_string),
            "true or false",
            "take the config.json that the weights came with",
        );
        flag.unwrap_or(default)
    }

    pub fn number(&self, key: &str, default: f64) -> f64 {
        self.get(key).and_then(Value::as_f64).unwrap_or(default)
    }

    /// Records a problem unless `fits` holds for the value of `key`, or for `default` without one.
    pub fn expect(
        &mut self,
        key: &str,
        default: Value,
        allowed: &str,
        fits: impl Fn(&Value) -> bool,
    ) {
        let value = self.get(key).cloned().unwrap_or(default);
        self.refuse_unless(fits(&value), key, &value.to_string(), allowed);
    }

    /// Records a value of `key` that has no counterpart here.
    pub fn refuse_unless(&mut self, ok: bool, key: &str, value: &str, allowed: &str) {
        let remedy = "no model here computes that: import another model";
        self.problems.check(ok, key, value, allowed, remedy);
    }
}

/// Whether a number is the ε of the norms here.
pub(super) fn is_norm_eps(value: &Value) -> bool {
    let eps = f64::from(crate::layers::NORM_EPS);
    value.as_f64().is_some_and(|found| (found - eps).abs() < 1e-3 * eps)
}
