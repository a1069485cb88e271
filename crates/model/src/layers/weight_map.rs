//! The weights that a layer's queries give to the keys of one sequence, for pictures of attention.
//!
//! The weight of key j in query i is measured at the operation's output: its change when key j's value changes, with all
//! other values 0. Outputs that are weighted sums are linear in the values, so any change gives the same weight. Kinds
//! that normalise a head's outputs, x / √(mean x² + ε) and the like, are linear in the limit of small values, where only
//! ε counts: the change is made smaller until the result no longer depends on it. There, and for kinds that map a head's
//! outputs by a matrix, the weights are known up to one factor for the layer. Then
//!
//! - with one view, each head's largest weight is the one that a thorough probe reports;
//! - with two views, whose difference weighs the values, each query's weights are divided by the sum of their sizes.

use burn::tensor::{FloatDType, Tensor, TensorData};
use longwall_kernels::attention::probe::Probe;
use longwall_kernels::attention::weights::LARGEST_WEIGHT;
use longwall_kernels::attention::{AttentionConfig, AttentionShape, Inputs};
use longwall_kernels::backend::OpBackend;

/// What the numbers of a [`WeightMap`] are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapScale {
    /// Weights.
    Weights,
    /// Weights, in each query divided by the sum of their sizes.
    Shares,
}

/// The weights of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightMap {
    /// What the numbers are.
    pub scale: MapScale,
    /// `[heads][queries][keys]`, with the keys up to the query's own.
    pub heads: Vec<Vec<Vec<f32>>>,
}

/// A layer of a model, and its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerWeights {
    /// The layer's attention kind.
    pub kind: &'static str,
    /// `None` for kinds without weights of keys: those whose past is a state.
    pub map: Option<WeightMap>,
}

/// Tokens in a call of the operation: keys are measured in one call as sequences of a batch.
const TOKENS_AT_A_TIME: usize = 4096;
/// Each change of the values is this part of the one before.
const SMALLER: f32 = 1.0 / 16.0;
/// Two changes, one 1/16 of the other, agree if their weights differ by less than this part of the largest. The error of
/// an output norm falls with the square of the change: that of the smaller one is then about 4 · 10⁻⁵.
const AGREEMENT: f32 = 1e-2;
/// Changes to try, down to 16⁻²⁴.
const CHANGES: i32 = 25;

/// The weights of one sequence, `inputs` of batch 1; in f32, which on a GPU means the reference. `None` for kinds without
/// weights.
pub(super) fn weight_map<B: OpBackend>(
    variant: &AttentionConfig,
    shape: &AttentionShape,
    inputs: Inputs<B>,
) -> Option<WeightMap> {
    if !variant.thorough_metrics().contains(&LARGEST_WEIGHT) {
        return None;
    }
    let inputs = in_f32(inputs);
    let mut heads = Responses::new(variant, shape, &inputs).weights();
    let two_views = variant.views() == 2;
    if two_views {
        heads.iter_mut().flatten().for_each(|weights| {
            let total = sizes(weights).sum::<f32>();
            divide(weights, if total > 0.0 { total } else { 1.0 });
        });
    } else {
        for (head, largest) in heads.iter_mut().zip(largest_weights(variant, shape, inputs)) {
            let by_size = |a: &&f32, b: &&f32| a.abs().total_cmp(&b.abs());
            let found = head.iter().flatten().max_by(by_size).copied().unwrap_or(0.0);
            let factor = if found == 0.0 { 1.0 } else { found / largest };
            head.iter_mut().for_each(|weights| divide(weights, factor));
        }
    }
    let scale = if two_views { MapScale::Shares } else { MapScale::Weights };
    Some(WeightMap { scale, heads })
}

fn sizes(weights: &[f32]) -> impl Iterator<Item = f32> {
    weights.iter().map(|weight| weight.abs())
}

fn divide(weights: &mut [f32], by: f32) {
    weights.iter_mut().for_each(|weight| *weight /= by);
}

/// The largest weight of each head.
fn largest_weights<B: OpBackend>(
    variant: &AttentionConfig,
    shape: &AttentionShape,
    inputs: Inputs<B>,
) -> Vec<f32> {
    let mut probe = Probe::thorough();
    variant.observe(shape, inputs, None, &mut probe);
    let found = probe.observations().iter().find(|x| x.metric == LARGEST_WEIGHT);
    let heads = &found.expect("a kind with this metric reports it").heads[0];
    heads.iter().map(|largest| *largest as f32).collect()
}

/// Measures the operation's outputs for small values.
struct Responses<'a, B: OpBackend> {
    variant: &'a AttentionConfig,
    shape: &'a AttentionShape,
    inputs: &'a Inputs<B>,
    /// The output where all values are 0, `[1, heads, tokens, channels]`.
    at_0: Tensor<B, 4>,
    /// Plus and minus 1 in turn, `[1, 1, 1, channels]`: a norm that subtracts the mean over channels leaves them.
    signs: Tensor<B, 4>,
}

impl<'a, B: OpBackend> Responses<'a, B> {
    fn new(variant: &'a AttentionConfig, shape: &'a AttentionShape, inputs: &'a Inputs<B>) -> Self {
        let channels = inputs.v.dims()[3];
        let signs: Vec<f32> = (0..channels).map(|c| if c % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let signs = TensorData::new(signs, [1, 1, 1, channels]);
        let at_0 = variant.attend(shape, with_values(inputs, inputs.v.zeros_like()), None);
        let signs = Tensor::from_data(signs, &inputs.v.device());
        Responses { variant, shape, inputs, at_0, signs }
    }

    /// The weights up to a factor, `[heads][queries][keys]`.
    fn weights(&self) -> Vec<Vec<Vec<f32>>> {
        let tokens = self.inputs.v.dims()[2];
        let keys: Vec<usize> = (0..tokens).collect();
        let batch = (TOKENS_AT_A_TIME / tokens).max(1);
        let some: Vec<usize> = (0..tokens).step_by(tokens.div_ceil(batch)).collect();
        let change = self.small_change(&some);
        let rows = || (0..tokens).map(|query| Vec::with_capacity(query + 1)).collect();
        let mut heads: Vec<Vec<Vec<f32>>> = (0..self.shape.heads).map(|_| rows()).collect();
        for keys in keys.chunks(batch) {
            for (at, weight) in self.of_keys(keys, change).into_iter().enumerate() {
                let (query, head) = (at % tokens, at / tokens % self.shape.heads);
                if keys[at / tokens / self.shape.heads] <= query {
                    heads[head][query].push(weight);
                }
            }
        }
        heads
    }

    /// The largest change that gives these keys the weights that a smaller one gives.
    fn small_change(&self, keys: &[usize]) -> f32 {
        let mut weights = self.of_keys(keys, 1.0);
        for exponent in 1..CHANGES {
            let change = SMALLER.powi(exponent);
            let smaller = self.of_keys(keys, change);
            let most = |sizes: &mut dyn Iterator<Item = f32>| sizes.fold(0.0, f32::max);
            let largest = most(&mut smaller.iter().map(|x| x.abs()));
            let difference = most(&mut smaller.iter().zip(&weights).map(|(a, b)| (a - b).abs()));
            if difference <= AGREEMENT * largest {
                return change;
            }
            weights = smaller;
        }
        panic!("outputs of kind {} are not linear in small values", self.variant.kind())
    }

    /// The change of each query's output when one key's value changes from 0 to `change` times the signs, over `change`,
    /// `[keys, heads, queries]`: the mean over channels, with their signs.
    fn of_keys(&self, keys: &[usize], change: f32) -> Vec<f32> {
        let [_, kv_heads, tokens, _] = self.inputs.v.dims();
        let mut one = vec![0.0; keys.len() * tokens];
        for (at, key) in keys.iter().enumerate() {
            one[at * tokens + key] = change;
        }
        let one = TensorData::new(one, [keys.len(), 1, tokens, 1]);
        let one = Tensor::<B, 4>::from_data(one, &self.inputs.v.device());
        let values = (one * self.signs.clone()).repeat_dim(1, kv_heads);
        let o = self.variant.attend(self.shape, with_values(self.inputs, values), None);
        let changed = (o - self.at_0.clone()) * self.signs.clone();
        changed.mean_dim(3).into_data().iter::<f32>().map(|mean| mean / change).collect()
    }
}

/// The inputs of one sequence, repeated for each sequence of the values `v`.
fn with_values<B: OpBackend>(inputs: &Inputs<B>, v: Tensor<B, 4>) -> Inputs<B> {
    let batch = v.dims()[0];
    let Inputs { q, k, projections, parameters, .. } = inputs.clone();
    Inputs {
        q: q.repeat_dim(0, batch),
        k: k.repeat_dim(0, batch),
        v,
        projections: projections.into_iter().map(|x| x.repeat_dim(0, batch)).collect(),
        parameters,
    }
}

fn in_f32<B: OpBackend>(inputs: Inputs<B>) -> Inputs<B> {
    Inputs {
        q: inputs.q.cast(FloatDType::F32),
        k: inputs.k.cast(FloatDType::F32),
        v: inputs.v.cast(FloatDType::F32),
        projections: inputs.projections.into_iter().map(|x| x.cast(FloatDType::F32)).collect(),
        parameters: inputs.parameters,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use longwall_kernels::Cpu;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::super::norm::Input;
    use super::super::time::Preceding;
    use super::*;
    use crate::{LanguageModel, ModelConfig};

    const TOKENS: usize = 30;
    const CHANNELS: usize = 16;

    /// Pearson's correlation.
    fn correlation(x: &[f32], y: &[f32]) -> f32 {
        let off = |x: &[f32]| {
            let mean = x.iter().sum::<f32>() / x.len() as f32;
            x.iter().map(|x| x - mean).collect::<Vec<_>>()
        };
        let product = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
        let (x, y) = (off(x), off(y));
        product(&x, &y) / (product(&x, &x) * product(&y, &y)).sqrt()
    }

    /// Of every kind, at its initial parameters: a norm of the output may have shifted and scaled the sum.
    #[test]
    fn outputs_are_sums_of_values_with_these_weights() {
        for variant in AttentionConfig::defaults() {
            let table = format!(
                "layers = 1\nwidth = 64\nheads = 4\nkv_heads = 2\nhead_dim = {CHANNELS}\n\
                 qk_norm = true\nattention = {{ kind = \"{}\" }}",
                variant.kind()
            );
            let config: ModelConfig = toml::from_str(&table).expect("a valid table");
            let device = Default::default();
            let model = LanguageModel::<Cpu>::new(&config, 23, TOKENS, 0, &device);
            let mut rng = ChaCha8Rng::seed_from_u64(23);
            let x: Vec<f32> = (0..TOKENS * 64).map(|_| rng.random_range(-1.7..1.7)).collect();
            let x = Tensor::from_data(TensorData::new(x, [1, TOKENS, 64]), &device);
            let attention = &model.blocks[0].attention;
            let inputs = attention.inputs(&Input::of(x), &mut None, &mut Preceding::Nothing(&None));
            let shape = config.attention_shape(0);
            let Some(map) = weight_map(&variant, &shape, inputs.clone()) else { continue };
            let data = |x: Tensor<Cpu, 4>| x.into_data().iter::<f32>().collect::<Vec<_>>();
            let channels = inputs.v.dims()[3];
            let (v, o) = (data(inputs.v.clone()), data(variant.attend(&shape, inputs, None)));
            let mut compared = 0;
            for (head, rows) in map.heads.iter().enumerate() {
                for (query, weights) in rows.iter().enumerate() {
                    let value = |key: usize| &v[(head / 2 * TOKENS + key) * channels..][..channels];
                    let sum = |c| weights.iter().enumerate().map(|(j, a)| a * value(j)[c]).sum();
                    let sums: Vec<f32> = (0..channels).map(sum).collect();
                    if weights.iter().any(|weight| *weight != 0.0) {
                        let o = &o[(head * TOKENS + query) * channels..][..channels];
                        let found = correlation(&sums, o);
                        assert!(found > 0.999, "{}: {found}", variant.kind());
                        compared += 1;
                    }
                }
            }
            assert!(compared > 10, "{}: {compared} queries with a weight", variant.kind());
        }
    }
}
