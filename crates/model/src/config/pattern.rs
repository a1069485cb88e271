//! Which attention each layer has: the same kind in all layers, or a pattern of named kinds.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use longwall_config::{Problem, Problems};
use longwall_kernels::attention::{AttentionConfig, AttentionShape};
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{ModelConfig, ValueResidual};

/// The window of layers. In TOML: a number of tokens, or `"none"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// With w tokens, a token attends to itself and the w − 1 tokens before it.
    Tokens(usize),
    /// A token attends to all tokens before it.
    Unlimited,
}

impl Window {
    /// The window of `tokens` tokens; with `None`, an unlimited one.
    pub fn of(tokens: Option<usize>) -> Self {
        tokens.map_or(Window::Unlimited, Window::Tokens)
    }

    /// The limit in tokens, if there is one.
    pub fn tokens(self) -> Option<usize> {
        match self {
            Window::Tokens(tokens) => Some(tokens),
            Window::Unlimited => None,
        }
    }
}

impl Display for Window {
    /// For example `512`, or `none`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Window::Tokens(tokens) => write!(f, "{tokens}"),
            Window::Unlimited => f.write_str("none"),
        }
    }
}

impl Serialize for Window {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Window::Tokens(tokens) => serializer.serialize_u64(*tokens as u64),
            Window::Unlimited => serializer.serialize_str("none"),
        }
    }
}

impl<'de> Deserialize<'de> for Window {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokensOrNone;
        impl Visitor<'_> for TokensOrNone {
            type Value = Window;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of tokens, or \"none\"")
            }

            fn visit_u64<E: Error>(self, tokens: u64) -> Result<Window, E> {
                Ok(Window::Tokens(tokens as usize))
            }

            fn visit_i64<E: Error>(self, tokens: i64) -> Result<Window, E> {
                let unexpected = |_| E::invalid_value(Unexpected::Signed(tokens), &self);
                u64::try_from(tokens).map_err(unexpected).map(|n| Window::Tokens(n as usize))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Window, E> {
                match text {
                    "none" => Ok(Window::Unlimited),
                    _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
                }
            }
        }
        deserializer.deserialize_any(TokensOrNone)
    }
}

/// A table `[model.kinds.NAME]`: an attention table with a window of its own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NamedKind {
    /// The attention variant and its own keys.
    #[serde(flatten)]
    pub attention: AttentionConfig,
    /// The window of its layers; default `model.window`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
}

impl<'de> Deserialize<'de> for NamedKind {
    /// The attention variant rejects keys that it does not know; this adds `window` to the keys that its
    /// error lists.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Table {
            #[serde(flatten)]
            attention: AttentionConfig,
            window: Option<Window>,
        }
        let Table { attention, window } = Table::deserialize(deserializer).map_err(|error| {
            let text = error.to_string();
            let message = text.trim_end();
            match message.starts_with("unknown field") && message.ends_with('`') {
                true => D::Error::custom(format!("{message}, `window`")),
                false => error,
            }
        })?;
        Ok(NamedKind { attention, window })
    }
}

/// The layers of a model that have one kind of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct KindLayers<'a> {
    /// The kind's name in `model.pattern`; without a pattern, the value of `kind`.
    pub name: &'a str,
    /// The attention variant and its own keys.
    pub attention: &'a AttentionConfig,
    /// The window of these layers, in tokens.
    pub window: Option<usize>,
    /// Indices of the layers, from 0.
    pub layers: Vec<usize>,
}

impl Display for KindLayers<'_> {
    /// For example `local (rope) ×5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        if self.name != self.attention.kind() {
            write!(f, " ({})", self.attention.kind())?;
        }
        write!(f, " ×{}", self.layers.len())
    }
}

/// Adds the tables that `pattern` may omit: the name of a registered kind means that kind with its
/// defaults.
pub(super) fn add_registered_kinds(pattern: &[String], kinds: &mut BTreeMap<String, NamedKind>) {
    for attention in AttentionConfig::defaults() {
        let name = attention.kind().to_owned();
        if pattern.contains(&name) {
            kinds.entry(name).or_insert(NamedKind { attention, window: None });
        }
    }
}

impl ModelConfig {
    /// The attention variant of layer `layer`, from 0.
    ///
    /// # Panics
    /// When the configuration is invalid and gives the layer no attention.
    pub fn attention_of(&self, layer: usize) -> &AttentionConfig {
        self.kind_of(layer).unwrap_or_else(|| panic!("layer {layer} has no attention")).1
    }

    /// Name, attention variant and window of layer `layer`; `None` where the name has no table.
    fn kind_of(&self, layer: usize) -> Option<(&str, &AttentionConfig, Option<usize>)> {
        let Some(pattern) = &self.pattern else {
            let attention = self.attention.as_ref()?;
            return Some((attention.kind(), attention, self.window));
        };
        let name = pattern.get(layer % pattern.len().max(1))?;
        let NamedKind { attention, window } = self.kinds.get(name)?;
        Some((name, attention, window.map_or(self.window, Window::tokens)))
    }

    /// The window of layer `layer`, in tokens.
    pub(super) fn window_of(&self, layer: usize) -> Option<usize> {
        self.kind_of(layer).and_then(|(.., window)| window)
    }

    /// Whether a layer has the window `model.window`: its kind sets none of its own.
    pub fn has_layer_without_own_window(&self) -> bool {
        let own = |name| self.kinds.get(name).is_some_and(|kind| kind.window.is_some());
        self.pattern.as_ref().is_none_or(|pattern| !pattern.iter().all(own))
    }

    /// The same model with another window `model.window`, in tokens.
    pub fn with_window(&self, window: Option<usize>) -> Self {
        ModelConfig { window, ..self.clone() }
    }

    /// The layers of each kind, in the order in which the kinds first occur.
    pub fn layers_by_kind(&self) -> Vec<KindLayers<'_>> {
        let mut groups: Vec<KindLayers<'_>> = vec![];
        for layer in 0..self.layers {
            let Some((name, attention, window)) = self.kind_of(layer) else { continue };
            match groups.iter_mut().find(|group| group.name == name) {
                Some(group) => group.layers.push(layer),
                None => groups.push(KindLayers { name, attention, window, layers: vec![layer] }),
            }
        }
        groups
    }

    /// The attention in words: `rope`, or for a pattern `local (rope) ×5, global (rope) ×1`.
    pub fn attention_label(&self) -> String {
        let groups = self.layers_by_kind();
        match (&self.pattern, &groups[..]) {
            (None, [group]) => group.name.to_owned(),
            _ => groups.iter().map(KindLayers::to_string).collect::<Vec<_>>().join(", "),
        }
    }

    /// The same model with `attention` in every layer, and the window `model.window`.
    pub fn with_attention(&self, attention: AttentionConfig) -> Self {
        let (attention, kinds) = (Some(attention), BTreeMap::new());
        ModelConfig { attention, pattern: None, kinds, ..self.clone() }
    }

    /// Records what is wrong with the choice of kinds: `attention`, `pattern` and the tables' names.
    pub(super) fn validate_choice(&self, problems: &mut Problems) {
        match (&self.attention, &self.pattern) {
            (Some(_), Some(_)) => problems.check(
                false,
                "model.pattern",
                "set beside model.attention",
                "one of the two: one kind for all layers, or a pattern of kinds",
                "remove the table [model.attention], or model.pattern",
            ),
            (None, None) => problems.check(
                false,
                "model.attention",
                "missing",
                "a table with `kind`, or model.pattern with the kinds of the layers",
                "add for example [model.attention] with kind = \"rope\"",
            ),
            _ => {}
        }
        let pattern = self.pattern.as_deref().unwrap_or_default();
        problems.check(
            self.pattern.is_none() || !pattern.is_empty(),
            "model.pattern",
            "[]",
            "at least one name",
            "name the kinds of the first layers, for example pattern = [\"wall\", \"rope\"]",
        );
        self.validate_names(pattern, problems);
        for name in self.kinds.keys().filter(|name| !pattern.contains(name)) {
            let use_it = match &self.pattern {
                Some(_) => format!("put \"{name}\" into model.pattern"),
                None => format!("put model.pattern with \"{name}\" in place of model.attention"),
            };
            problems.check(
                false,
                format!("model.kinds.{name}"),
                "a table that no layer uses",
                "tables that model.pattern names",
                format!("{use_it}, or remove the table"),
            );
        }
    }

    /// Each name of the pattern must have a table, or be that of a registered kind.
    fn validate_names(&self, pattern: &[String], problems: &mut Problems) {
        let registered = AttentionConfig::KINDS.iter().map(|info| info.kind);
        let tables = self.kinds.keys().map(String::as_str);
        let mut known: Vec<&str> = tables.collect();
        known.extend(registered.filter(|kind| !self.kinds.contains_key(*kind)));
        for (at, name) in pattern.iter().enumerate() {
            problems.check(
                self.kinds.contains_key(name) || pattern[..at].contains(name),
                format!("model.pattern.{at}"),
                format!("\"{name}\""),
                format!("the name of a table under model.kinds or of a kind: {}", known.join(", ")),
                format!("add a table [model.kinds.{name}] with its `kind`, or use one of these"),
            );
        }
    }

    /// Records what is wrong with the kinds for layers of this model's sizes.
    pub(super) fn validate_kinds(&self, problems: &mut Problems) {
        let names = self.pattern.as_ref().map_or(0, Vec::len);
        problems.check(
            names <= self.layers,
            "model.pattern",
            format!("{names} names"),
            format!("at most model.layers, {}: every name has a layer", self.layers),
            format!("set model.layers to {names} or more, or shorten the pattern"),
        );
        let mut found = vec![];
        for group in self.layers_by_kind() {
            let shape = self.attention_shape(group.layers[0]);
            found.extend(self.kind_problems(&group, &shape));
        }
        if let (Some(attention), Some(_)) = (&self.attention, &self.pattern) {
            let shape = AttentionShape { window: self.window, ..self.attention_shape(0) };
            let mut own = Problems::new();
            attention.validate(&shape, &mut own);
            found.extend_from_slice(own.as_slice());
        }
        // Kinds share the keys of [model]: report a problem with one of these only once.
        for (at, p) in found.iter().enumerate() {
            problems.check(found[..at].contains(p), &p.key, &p.value, &p.allowed, &p.remedy);
        }
        self.validate_value_residual(problems);
    }

    /// The problems of one kind, under the keys where they can be fixed.
    fn kind_problems(&self, group: &KindLayers<'_>, shape: &AttentionShape) -> Vec<Problem> {
        let mut problems = Problems::new();
        group.attention.validate(shape, &mut problems);
        if self.pattern.is_none() {
            return problems.as_slice().to_vec();
        }
        let table = format!("model.kinds.{}", group.name);
        let own_window = self.kinds[group.name].window.is_some();
        let place = |text: &str| {
            let text = text.replace("model.attention", &table);
            if own_window { text.replace("model.window", &format!("{table}.window")) } else { text }
        };
        let of_table = |p: &Problem| {
            let [key, value, allowed] = [&p.key, &p.value, &p.allowed].map(|text| place(text));
            let mut remedy = place(&p.remedy);
            if p.key == "model.window" && !own_window {
                remedy += &format!(", or set {table}.window = \"none\"");
            }
            Problem { key, value, allowed, remedy }
        };
        problems.as_slice().iter().map(of_table).collect()
    }

    /// Later layers mix in the first layer's values, so all values must have the same size.
    fn validate_value_residual(&self, problems: &mut Problems) {
        if self.value_residual == ValueResidual::None {
            return;
        }
        let groups = self.layers_by_kind();
        let sizes = groups.iter().map(|group| {
            let shape = self.attention_shape(group.layers[0]);
            (group.name, group.attention.value_dim(&shape))
        });
        let sizes: Vec<_> = sizes.collect();
        let list = sizes.iter().map(|(name, size)| format!("{size} of {name}"));
        problems.check(
            sizes.windows(2).all(|pair| pair[0].1 == pair[1].1),
            "model.value_residual",
            format!("set, but values differ in channels ({})", list.collect::<Vec<_>>().join(", ")),
            "kinds with as many channels in each head's values",
            "set model.value_residual = \"none\", or choose other kinds",
        );
    }
}
