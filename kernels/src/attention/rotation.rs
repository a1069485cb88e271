//! Rotary position embeddings as the variants configure them.

use burn::tensor::{Int, Tensor};
use longwall_config::Problems;

use super::DocumentStarts;
use crate::backend::{OpBackend, primitive, tensor};
pub use crate::ops::rotary::Scaling;
use crate::ops::rotary::{Frequencies, RotaryEmbedding, rotary, rotary_both};

/// Rotates q and k as positions `first`, `first` + 1, …; returns them unchanged without a rotation.
pub fn rotate<B: OpBackend>(
    rotation: Option<Rotation>,
    qk: [Tensor<B, 4>; 2],
    first: usize,
) -> [Tensor<B, 4>; 2] {
    match rotation {
        Some(rotation) => rotation.apply_to_both(qk, first),
        None => qk,
    }
}

/// Rotary positions of q and k: the channel pairs (n, n + dims/2) rotate by t · θ^(−2n/dims), the
/// half-split pairing of GPT-NeoX and Llama.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotation {
    /// θ, above 1.
    pub theta: f64,
    /// Share of a head's channels that rotate, in (0, 1].
    pub fraction: f64,
    /// Scaling of the angles for long contexts.
    pub scaling: Scaling,
}

impl Rotation {
    /// A rotation of every channel, without scaling.
    pub fn new(theta: f64) -> Self {
        Rotation { theta, fraction: 1.0, scaling: Scaling::None {} }
    }

    /// The number of channels that rotate, even.
    pub fn dims(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.fraction / 2.0).round() as usize * 2
    }

    /// q or k `[batch, heads, seq_len, head_dim]`, rotated as positions `first`, `first` + 1, ….
    ///
    /// Scores depend only on distances, so packed documents need no positions of their own.
    pub fn apply<B: OpBackend>(&self, x: Tensor<B, 4>, first: usize) -> Tensor<B, 4> {
        let RotaryEmbedding { frequencies, rotary_dims, .. } = self.embedding(x.dims()[3], first);
        rotary(x, first, frequencies, rotary_dims)
    }

    /// [`Rotation::apply`] to q and k.
    pub fn apply_to_both<B: OpBackend>(
        &self,
        qk: [Tensor<B, 4>; 2],
        first: usize,
    ) -> [Tensor<B, 4>; 2] {
        let RotaryEmbedding { frequencies, rotary_dims, .. } =
            self.embedding(qk[0].dims()[3], first);
        rotary_both(qk, first, frequencies, rotary_dims)
    }

    /// The operation for heads of `head_dim` channels whose first row is at position `first`.
    pub(super) fn embedding(&self, head_dim: usize, first: usize) -> RotaryEmbedding {
        let frequencies = Frequencies { theta: self.theta, scaling: self.scaling };
        RotaryEmbedding::new(first, frequencies, self.dims(head_dim), head_dim)
    }

    /// q or k `[batch, heads, seq_len, head_dim]`, rotated as positions that restart from 0 in every
    /// document, for scores that depend on more than the distance.
    pub fn apply_in_documents<B: OpBackend>(
        &self,
        x: Tensor<B, 4>,
        documents: &DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        let Some(starts) = documents else { return self.apply(x, 0) };
        // In f32, as the angles are.
        let dtype = x.dtype();
        let x = tensor::<B, 4>(B::to_f32(primitive(x)));
        let ([batch, _, seq_len, head_dim], device) = (x.dims(), x.device());
        let half = self.dims(head_dim) / 2;
        // Rotating the first axis of every pair gives the cosine and sine of each position, times the amplitude.
        let axis = Tensor::cat(
            vec![
                Tensor::<B, 4>::ones([1, 1, seq_len, half], &device),
                Tensor::zeros([1, 1, seq_len, head_dim - half], &device),
            ],
            3,
        );
        let rows = self.apply(axis, 0).reshape([seq_len, head_dim]);
        let at = Tensor::<B, 1, Int>::arange(0..seq_len as i64, &device).cast(starts.dtype());
        let at = at.reshape([1, seq_len]).expand([batch, seq_len]) - starts.clone();
        let rows = rows.select(0, at.reshape([batch * seq_len]));
        let rows = rows.reshape([batch, 1, seq_len, head_dim]);
        let [cos, sin] = [0, half].map(|first| rows.clone().narrow(3, first, half));
        let [a, b] = [0, half].map(|first| x.clone().narrow(3, first, half));
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        let mut parts = vec![first, b * cos + a * sin];
        if 2 * half < head_dim {
            parts.push(x.narrow(3, 2 * half, head_dim - 2 * half));
        }
        Tensor::cat(parts, 3).cast(dtype)
    }

    /// Records every problem for heads of `head_dim` channels; `key` is the path of the variant's
    /// table, `without` the setting there that turns rotary positions off.
    pub fn validate(&self, key: &str, without: &str, head_dim: usize, problems: &mut Problems) {
        problems.check(
            self.theta > 1.0 && self.theta.is_finite(),
            format!("{key}.theta"),
            self.theta,
            "a number above 1",
            "set theta = 10000",
        );
        problems.check(
            self.fraction > 0.0 && self.fraction <= 1.0 && self.dims(head_dim) >= 2,
            format!("{key}.rotary_fraction"),
            self.fraction,
            "above 0, at most 1, and at least one pair of channels",
            format!("set rotary_fraction = 1.0, or {without}"),
        );
        problems.check(
            head_dim.is_multiple_of(2),
            "model.head_dim",
            head_dim,
            "an even number with rotary positions",
            format!("set {key}.{without}, or choose an even width / heads"),
        );
        self.scaling.validate(&format!("{key}.scaling"), problems);
    }
}

impl Scaling {
    /// Records every problem; `key` is the path of the scaling's table.
    fn validate(&self, key: &str, problems: &mut Problems) {
        let factor = match *self {
            Scaling::None {} => return,
            Scaling::Linear { factor } | Scaling::Ntk { factor } => factor,
            Scaling::Yarn { factor, .. } | Scaling::Llama3 { factor, .. } => factor,
        };
        problems.check(
            factor >= 1.0 && factor.is_finite(),
            format!("{key}.factor"),
            factor,
            "a number of at least 1",
            "set it to the wanted context length / the trained one",
        );
        let (original_len, slow, fast) = match *self {
            Scaling::Yarn { original_len, beta_slow, beta_fast, attention_factor, .. } => {
                problems.check(
                    attention_factor.is_none_or(|a| a > 0.0 && a.is_finite()),
                    format!("{key}.attention_factor"),
                    attention_factor.unwrap_or_default(),
                    "a number above 0",
                    "leave it out for 0.1 ln(factor) + 1",
                );
                (original_len, ("beta_slow", beta_slow, 1), ("beta_fast", beta_fast, 32))
            }
            Scaling::Llama3 { original_len, low_freq_factor, high_freq_factor, .. } => {
                let slow = ("low_freq_factor", low_freq_factor, 1);
                (original_len, slow, ("high_freq_factor", high_freq_factor, 4))
            }
            _ => return,
        };
        problems.check(
            original_len >= 1,
            format!("{key}.original_len"),
            original_len,
            "at least 1 token",
            "set it to the context length of training",
        );
        let ((slow_key, slow, usual_slow), (fast_key, fast, usual_fast)) = (slow, fast);
        problems.check(
            slow > 0.0 && slow.is_finite(),
            format!("{key}.{slow_key}"),
            slow,
            "a number above 0",
            format!("set {slow_key} = {usual_slow}"),
        );
        problems.check(
            fast > slow && fast.is_finite(),
            format!("{key}.{fast_key}"),
            fast,
            format!("a number above {slow_key}, {slow}"),
            format!("set {slow_key} = {usual_slow} and {fast_key} = {usual_fast}"),
        );
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::{Distribution, TensorData};
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::attention::conformance::YARN;

    /// Also with an amplitude, and with channels that do not rotate.
    #[test]
    fn positions_start_again_in_every_document() {
        let device = Default::default();
        let rotation = Rotation { fraction: 0.5, scaling: YARN, ..Rotation::new(100.0) };
        let x = Tensor::<Flex, 4>::random([2, 3, 7, 8], Distribution::Default, &device);
        let starts = TensorData::new(vec![0, 0, 0, 3, 3, 3, 3, 0, 1, 1, 1, 1, 1, 6], [2, 7]);
        let got = rotation.apply_in_documents(x.clone(), &Some(Tensor::from_data(starts, &device)));
        let part = |row, first, n| x.clone().narrow(0, row, 1).narrow(2, first, n);
        let join = |parts: &[(usize, usize, usize)]| {
            let parts = parts.iter().map(|&(row, first, n)| rotation.apply(part(row, first, n), 0));
            Tensor::cat(parts.collect(), 2)
        };
        let rows = vec![join(&[(0, 0, 3), (0, 3, 4)]), join(&[(1, 0, 1), (1, 1, 5), (1, 6, 1)])];
        let values = |x: Tensor<Flex, 4>| x.into_data().to_vec::<f32>().unwrap();
        for (got, want) in values(got).iter().zip(values(Tensor::cat(rows, 0))) {
            assert!((got - want).abs() < 1e-6, "{got} where {want} is right");
        }
    }

    #[test]
    fn scalings_are_read_with_their_defaults_and_written_as_they_are_read() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Table {
            scaling: Scaling,
        }
        let yarn = |beta_fast, attention_factor| Scaling::Yarn {
            factor: 4.0,
            original_len: 2048,
            beta_fast,
            beta_slow: 1.0,
            attention_factor,
        };
        let llama3 = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_len: 8192,
        };
        for (text, scaling) in [
            ("kind = \"linear\", factor = 2.0", Scaling::Linear { factor: 2.0 }),
            ("kind = \"yarn\", factor = 4, original_len = 2048", yarn(32.0, None)),
            (
                "kind = \"yarn\", factor = 4, original_len = 2048, beta_fast = 16, attention_factor = 1.5",
                yarn(16.0, Some(1.5)),
            ),
            (
                "kind = \"llama3\", factor = 8, low_freq_factor = 1, high_freq_factor = 4, original_len = 8192",
                llama3,
            ),
        ] {
            let table: Table = toml::from_str(&format!("scaling = {{ {text} }}")).unwrap();
            assert_eq!(table, Table { scaling });
            let written = toml::to_string(&table).unwrap();
            assert_eq!(toml::from_str::<Table>(&written).unwrap(), table, "{written}");
        }
    }

    #[test]
    fn every_problem_of_a_scaling_is_reported() {
        let problems = |scaling| {
            let mut problems = Problems::new();
            let rotation = Rotation { scaling, ..Rotation::new(100.0) };
            rotation.validate("a", "rope = false", 8, &mut problems);
            problems.as_slice().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(problems(YARN), [""; 0]);
        let factor = "a.scaling.factor is 0.5; allowed: a number of at least 1\n  \
                      hint: set it to the wanted context length / the trained one";
        assert_eq!(problems(Scaling::Linear { factor: 0.5 }), [factor]);
        let yarn = Scaling::Yarn {
            factor: 0.5,
            original_len: 0,
            beta_fast: f64::INFINITY,
            beta_slow: 0.0,
            attention_factor: Some(-1.0),
        };
        let original_len = "a.scaling.original_len is 0; allowed: at least 1 token\n  \
                            hint: set it to the context length of training";
        assert_eq!(
            problems(yarn),
            [
                factor,
                "a.scaling.attention_factor is -1; allowed: a number above 0\n  \
                 hint: leave it out for 0.1 ln(factor) + 1",
                original_len,
                "a.scaling.beta_slow is 0; allowed: a number above 0\n  hint: set beta_slow = 1",
                "a.scaling.beta_fast is inf; allowed: a number above beta_slow, 0\n  hint: set beta_slow = 1 and beta_fast = 32",
            ]
        );
        let llama3 = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 4.0,
            high_freq_factor: 4.0,
            original_len: 0,
        };
        assert_eq!(
            problems(llama3),
            [
                original_len,
                "a.scaling.high_freq_factor is 4; allowed: a number above low_freq_factor, 4\n  \
                 hint: set low_freq_factor = 1 and high_freq_factor = 4",
            ]
        );
    }
}
