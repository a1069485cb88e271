//! One axis of a sweep: a list of values, several keys varied together, or random draws.

use std::collections::BTreeMap;

use longwall_config::Problems;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::config::overrides;

/// One axis of a sweep. It has one of `values`, `zip` and `draw`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Axis {
    /// Its name in tables and conditions. Default: `key`, else `variant`.
    pub name: Option<String>,
    /// The dotted key that `values` are for. Without one, every value is a table of overrides, as in `set`.
    pub key: Option<String>,
    /// The values of `key`, or tables of overrides.
    pub values: Vec<Value>,
    /// Values of several dotted keys, in lists of equal lengths: point n has the n-th of each.
    pub zip: Table,
    /// What random points draw for each dotted key.
    pub draw: BTreeMap<String, Draw>,
    /// Number of random points.
    pub count: Option<usize>,
    /// Seed of the random points. Default 0.
    pub seed: u64,
    /// Names of the points in run names and tables. Default: the value itself, or its `kind`; of several keys, the
    /// values joined by `+`.
    pub names: Vec<String>,
    /// Names of earlier axes, each with names of its points: the axis applies only to combinations of these, and
    /// changes nothing in others.
    pub when: BTreeMap<String, Vec<String>>,
}

/// The distribution of one key of a random point.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Draw {
    /// The least value; a whole number if `to` is one.
    pub from: Option<Value>,
    /// The greatest value.
    pub to: Option<Value>,
    /// Whether the value or its logarithm is uniform.
    pub scale: Scale,
    /// Values of equal probability, in place of `from` and `to`.
    pub values: Vec<Value>,
}

/// What is uniform.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// The value.
    #[default]
    Linear,
    /// Its logarithm.
    Log,
}

/// One point of an axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Its name.
    pub label: String,
    /// Its overrides, `key=value`.
    pub(super) sets: Vec<String>,
}

/// How often a random point is drawn again, for each point wanted, when it equals an earlier one.
const ATTEMPTS: usize = 100;

impl Draw {
    /// `from`, `to`, and whether both are whole numbers.
    fn range(&self) -> Option<(f64, f64, bool)> {
        let number = |value: &Value| value.as_float().or(value.as_integer().map(|n| n as f64));
        let (from, to) = (self.from.as_ref()?, self.to.as_ref()?);
        Some((number(from)?, number(to)?, from.is_integer() && to.is_integer()))
    }

    fn sample(&self, rng: &mut ChaCha8Rng) -> Value {
        if !self.values.is_empty() {
            return self.values[rng.random_range(0..self.values.len())].clone();
        }
        let (from, to, whole) = self.range().expect("a valid draw has values or a range");
        if whole && self.scale == Scale::Linear {
            return Value::Integer(rng.random_range(from as i64..=to as i64));
        }
        let share: f64 = rng.random();
        let value = match self.scale {
            Scale::Linear => from + share * (to - from),
            Scale::Log => (from.ln() + share * (to.ln() - from.ln())).exp(),
        };
        if whole { Value::Integer(value.round() as i64) } else { Value::Float(four_digits(value)) }
    }

    fn validate(&self, key: &str, problems: &mut Problems) {
        let range = self.range().filter(|(from, to, _)| from < to && (to - from).is_finite());
        let least = if self.scale == Scale::Log { 0.0 } else { f64::NEG_INFINITY };
        let shown = |value: &Option<Value>| value.as_ref().map_or("unset".into(), Value::to_string);
        let given = self.from.is_some() || self.to.is_some();
        problems.check(
            given == self.values.is_empty() && (!given || range.is_some_and(|r| r.0 > least)),
            key,
            format!(
                "from {} to {}, with {} values",
                shown(&self.from),
                shown(&self.to),
                self.values.len()
            ),
            "numbers from < to, above 0 with scale = \"log\"; or a list of values",
            "write for example { from = 1e-4, to = 1e-2, scale = \"log\" }, or { values = [2, 4] }",
        );
    }
}

/// `value` with four significant digits, so that names of runs are short and exact.
fn four_digits(value: f64) -> f64 {
    format!("{value:.3e}").parse().expect("a number in its own format")
}

impl Axis {
    /// The axis's name in tables and conditions.
    pub fn title(&self) -> &str {
        self.name.as_deref().or(self.key.as_deref()).unwrap_or("variant")
    }

    /// The points, in order; fewer than `count` if there are not so many different ones.
    pub fn points(&self) -> Vec<Point> {
        let points = if !self.draw.is_empty() {
            self.drawn()
        } else if !self.zip.is_empty() {
            self.zipped()
        } else {
            self.values.iter().map(|value| self.of_value(value)).collect()
        };
        let named = |(at, point): (usize, Point)| match self.names.get(at) {
            Some(name) => Point { label: name.clone(), ..point },
            None => point,
        };
        points.into_iter().enumerate().map(named).collect()
    }

    fn of_value(&self, value: &Value) -> Point {
        let sets = match (&self.key, value) {
            (Some(key), value) => vec![format!("{key}={value}")],
            (None, Value::Table(table)) => overrides(table),
            (None, _) => Vec::new(),
        };
        let is_keyless_table = self.key.is_none() && value.is_table();
        let label = if is_keyless_table { value.to_string() } else { label(value) };
        Point { label, sets }
    }

    fn zipped(&self) -> Vec<Point> {
        let lists: Vec<(&String, &[Value])> =
            self.zip.iter().map(|(key, list)| (key, list_of(list))).collect();
        let length = lists.iter().map(|(_, list)| list.len()).min().unwrap_or(0);
        (0..length).map(|at| together(lists.iter().map(|(key, list)| (*key, &list[at])))).collect()
    }

    fn drawn(&self) -> Vec<Point> {
        let count = self.count.unwrap_or(0);
        let mut rngs: Vec<ChaCha8Rng> = self.draw.keys().map(|key| self.rng(key)).collect();
        let mut points: Vec<Point> = Vec::new();
        for _ in 0..count.saturating_mul(ATTEMPTS) {
            if points.len() == count {
                break;
            }
            let values: Vec<Value> =
                self.draw.values().zip(&mut rngs).map(|(draw, rng)| draw.sample(rng)).collect();
            let point = together(self.draw.keys().zip(&values));
            if !points.contains(&point) {
                points.push(point);
            }
        }
        points
    }

    /// The random numbers of a key: another key changes nothing about them.
    fn rng(&self, key: &str) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(u64::from(crc32c::crc32c(key.as_bytes())));
        rng
    }

    /// Whether the axis applies where the earlier axes, by name, have points of these names.
    pub(super) fn applies(&self, earlier: &[(&str, Option<&str>)]) -> bool {
        matches(&self.when, earlier)
    }

    /// Records what is wrong with axis `at`; `earlier` are the axes before it.
    pub(super) fn validate(&self, at: usize, earlier: &[Axis], problems: &mut Problems) {
        let key = format!("axes.{at}");
        let forms = [!self.values.is_empty(), !self.zip.is_empty(), !self.draw.is_empty()];
        let forms = forms.into_iter().filter(|given| *given).count();
        problems.check(
            forms == 1,
            format!("{key}.values"),
            if forms == 0 { "[]" } else { "given beside zip or draw" },
            "one of values, zip and draw, not empty",
            "add values, or remove the axis",
        );
        if forms != 1 {
            return;
        }
        self.validate_keys(&key, problems);
        self.validate_forms(&key, problems);
        let points = self.points();
        self.validate_names(&key, &points, problems);
        problems.check(
            earlier.iter().all(|other| other.title() != self.title()),
            format!("{key}.name"),
            self.title(),
            "a different name for every axis",
            "give the axes names of their own: name = \"…\"",
        );
        check_condition(&format!("{key}.when"), &self.when, earlier, problems);
    }

    fn validate_keys(&self, key: &str, problems: &mut Problems) {
        problems.check(
            self.key.is_none() || !self.values.is_empty(),
            format!("{key}.key"),
            self.title(),
            "only with values: zip and draw name their keys themselves",
            "leave key out; name = \"…\" names the axis",
        );
        let reserved = ["run", "run.name", "run.out_dir", "run.seed"];
        let keys = self.key.iter().chain(self.zip.keys()).chain(self.draw.keys());
        for taken in keys.filter(|key| reserved.contains(&key.as_str())) {
            problems.check(
                false,
                format!("{key}.key"),
                taken,
                "any key but the run's name, folder and seed, which the sweep sets",
                "give seeds in `seeds`",
            );
        }
        problems.check(
            self.key.is_some() || self.values.iter().all(Value::is_table),
            format!("{key}.key"),
            "missing",
            "a dotted key, unless every value is a table of overrides",
            "add key = \"train.lr\", or write values = [{ \"train.lr\" = 1e-3 }]",
        );
    }

    fn validate_forms(&self, key: &str, problems: &mut Problems) {
        let lengths: Vec<usize> = self.zip.values().map(|list| list_of(list).len()).collect();
        problems.check(
            lengths.iter().all(|&length| length > 0 && length == lengths[0]),
            format!("{key}.zip"),
            format!("lists of {lengths:?} values"),
            "lists of equal lengths, at least 1",
            "write for example zip = { \"model.width\" = [128, 256], \"train.lr\" = [1e-3, 6e-4] }",
        );
        problems.check(
            self.draw.is_empty() != self.count.is_some() && self.count != Some(0),
            format!("{key}.count"),
            self.count.map_or("missing".to_owned(), |count| count.to_string()),
            "with draw: the number of random points, at least 1; else not set",
            "set count = 10 beside draw, or remove it",
        );
        let before = problems.as_slice().len();
        for (name, draw) in &self.draw {
            draw.validate(&format!("{key}.draw.\"{name}\""), problems);
        }
        if problems.as_slice().len() > before {
            return;
        }
        let (found, count) = (self.drawn_count(), self.count.unwrap_or(0));
        problems.check(
            found == count,
            format!("{key}.count"),
            count,
            format!("as many different points as draw has; {found} were found"),
            "lower count, or widen the ranges",
        );
    }

    fn drawn_count(&self) -> usize {
        if self.draw.is_empty() { self.count.unwrap_or(0) } else { self.drawn().len() }
    }

    fn validate_names(&self, key: &str, points: &[Point], problems: &mut Problems) {
        let fits = self.names.is_empty() || self.names.len() == points.len();
        problems.check(
            fits,
            format!("{key}.names"),
            format!("{} names", self.names.len()),
            format!("as many as there are values ({})", points.len()),
            "name every value, or leave names out",
        );
        let twice = points
            .iter()
            .enumerate()
            .find(|(at, point)| points[..*at].iter().any(|other| other.label == point.label));
        problems.check(
            !fits || twice.is_none(),
            format!("{key}.names"),
            twice.map_or("", |(_, point)| &point.label),
            "a different name for every value",
            "give names = [...] that differ",
        );
    }
}

/// Whether each axis that `condition` names has one of the listed points.
pub(super) fn matches(
    condition: &BTreeMap<String, Vec<String>>,
    points: &[(&str, Option<&str>)],
) -> bool {
    condition.iter().all(|(axis, names)| {
        let point = points.iter().find(|(title, _)| title == axis).and_then(|(_, point)| *point);
        point.is_some_and(|point| names.iter().any(|name| name == point))
    })
}

/// Records the axes and the points of a condition that do not exist among `axes`.
pub(super) fn check_condition(
    key: &str,
    condition: &BTreeMap<String, Vec<String>>,
    axes: &[Axis],
    problems: &mut Problems,
) {
    let quoted = |names: Vec<String>| names.join(", ");
    for (title, names) in condition {
        let Some(axis) = axes.iter().find(|axis| axis.title() == title) else {
            let known = quoted(axes.iter().map(|axis| axis.title().to_owned()).collect());
            let known =
                if known.is_empty() { "there is no earlier axis".to_owned() } else { known };
            problems.check(
                false,
                key,
                format!("\"{title}\""),
                format!("the name of an earlier axis: {known}"),
                "use its name or its key, or change the order of the axes",
            );
            continue;
        };
        let labels: Vec<String> = axis.points().into_iter().map(|point| point.label).collect();
        for name in names.iter().filter(|name| !labels.contains(name)) {
            problems.check(
                false,
                format!("{key}.\"{title}\""),
                format!("\"{name}\""),
                format!("names of its values: {}", quoted(labels.clone())),
                "use the names that --dry-run shows",
            );
        }
    }
}

/// The point that sets several keys.
fn together<'a>(entries: impl Iterator<Item = (&'a String, &'a Value)>) -> Point {
    let (labels, sets): (Vec<String>, Vec<String>) =
        entries.map(|(key, value)| (label(value), format!("{key}={value}"))).unzip();
    Point { label: labels.join("+"), sets }
}

/// The name of a value: text as it is, a table's kind, else the TOML.
fn label(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Table(table) => match table.get("kind") {
            Some(Value::String(kind)) => kind.clone(),
            _ => value.to_string(),
        },
        other => other.to_string(),
    }
}

fn list_of(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
