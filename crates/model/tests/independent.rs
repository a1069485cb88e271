//! One training step against an independent f64 computation: the loss, and the gradient of every
//! parameter by central differences.

use std::collections::HashMap;

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_model::config::{NormPosition, ValueResidual};
use longwall_model::weights::named_tensors;
use longwall_model::{LanguageModel, MlpKind, ModelConfig, NormKind};

use crate::configs::{SEQ_LEN, VOCAB, configs, configs_and_kinds};

type Ad = Autodiff<Flex>;

const TOKENS: [[usize; SEQ_LEN]; 2] = [[1, 5, 3, 9, 9, 0, 2], [4, 4, 10, 7, 1, 6, 8]];
const TARGETS: [[usize; SEQ_LEN]; 2] = [[5, 3, 9, 9, 0, 2, 10], [4, 10, 7, 1, 6, 8, 0]];
const WEIGHTS: [[f32; SEQ_LEN]; 2] = [[0.1; SEQ_LEN], [0.05, 0.0, 0.2, 0.1, 0.1, 0.0, 0.3]];
const Z_LOSS: f32 = 0.05;
/// The second row packs two documents.
const STARTS: [[usize; SEQ_LEN]; 2] = [[0; SEQ_LEN], [0, 0, 0, 3, 3, 3, 3]];

/// The parameters in f64, by name.
type Parameters = HashMap<String, Vec<f64>>;

/// One row of activations: `[time][channel]`.
type Row = Vec<Vec<f64>>;

/// An independent implementation of the model from its definition, for one row of tokens.
struct Oracle<'a> {
    config: &'a ModelConfig,
    parameters: &'a Parameters,
    starts: &'a [usize],
}

impl Oracle<'_> {
    fn get(&self, name: &str) -> &[f64] {
        self.parameters.get(name).unwrap_or_else(|| panic!("no parameter {name}"))
    }

    fn linear(&self, name: &str, x: &Row) -> Row {
        let weight = self.get(&format!("{name}.weight"));
        let bias = self.parameters.get(&format!("{name}.bias"));
        let inputs = x[0].len();
        let output = |x: &Vec<f64>| {
            let dot = |w: &[f64]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
            let rows = weight.chunks(inputs).enumerate();
            rows.map(|(o, w)| dot(w) + bias.map_or(0.0, |b| b[o])).collect()
        };
        x.iter().map(output).collect()
    }

    fn rms_norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.get(&format!("{name}.weight"));
        let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(x, w)| x / (square + 1e-5).sqrt() * w).collect()
    }

    fn norm(&self, name: &str, x: &Row) -> Row {
        if self.config.norm == NormKind::RmsNorm {
            return x.iter().map(|x| self.rms_norm(name, x)).collect();
        }
        let weight = self.get(&format!("{name}.weight"));
        let bias = self.parameters.get(&format!("{name}.bias"));
        let row = |x: &Vec<f64>| {
            let n = x.len() as f64;
            let mean = x.iter().sum::<f64>() / n;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            let scaled =
                x.iter().zip(weight).map(|(x, w)| (x - mean) / (variance + 1e-5).sqrt() * w);
            scaled.enumerate().map(|(i, y)| y + bias.map_or(0.0, |b| b[i])).collect()
        };
        x.iter().map(row).collect()
    }

    /// The token shift `name.shift`, if there is one.
    fn shift(&self, name: &str, x: &Row) -> Row {
        let Some(mu) = self.parameters.get(&format!("{name}.shift")) else { return x.clone() };
        let value = |t: usize, c: usize| {
            let before = if t > self.starts[t] { x[t - 1][c] } else { 0.0 };
            x[t][c] + mu[c] * (before - x[t][c])
        };
        (0..x.len()).map(|t| (0..x[0].len()).map(|c| value(t, c)).collect()).collect()
    }

    /// The first layer's values mixed into those of a later one.
    fn mix_values(&self, layer: &str, x: &Row, v: Vec<Row>, first: &[Row]) -> Vec<Row> {
        let d = v[0][0].len();
        let gate = self.config.value_residual == ValueResidual::Gated;
        let nu = gate.then(|| {
            let x = self.shift(&format!("{layer}.v"), x);
            let inner = self.linear(&format!("{layer}.value_gate.inner"), &x);
            self.linear(&format!("{layer}.value_gate"), &inner)
        });
        let value = |h: usize, t: usize, c: usize| match &nu {
            Some(nu) => {
                let nu = 1.0 / (1.0 + (-nu[t][h * d + c]).exp());
                v[h][t][c] + nu * (first[h][t][c] - v[h][t][c])
            }
            None => {
                let mix = self.get(&format!("{layer}.value_mix"));
                mix[0] * first[h][t][c] + mix[1] * v[h][t][c]
            }
        };
        let row = |h, t| (0..d).map(|c| value(h, t, c)).collect();
        (0..v.len()).map(|h| (0..x.len()).map(|t| row(h, t)).collect()).collect()
    }

    /// Projection, short convolution, heads `[head][time][channel]`, norm, rotation.
    fn heads(&self, name: &str, d: usize, x: &Row, norm: Option<&str>) -> Vec<Row> {
        let layer = name.rsplit_once('.').unwrap().0;
        let mut y = self.linear(name, &self.shift(name, x));
        if self.config.short_conv {
            y = self.short_conv(self.get(&format!("{name}.conv")), &y);
        }
        let head = |h: usize| -> Row {
            let channels = |y: &Vec<f64>| y[h * d..(h + 1) * d].to_vec();
            let rows = y.iter().map(channels);
            match norm {
                Some(norm) if self.config.qk_norm => {
                    rows.map(|r| self.rms_norm(&format!("{layer}.{norm}"), &r)).collect()
                }
                _ => rows.collect(),
            }
        };
        (0..y[0].len() / d).map(head).collect()
    }

    fn short_conv(&self, taps: &[f64], x: &Row) -> Row {
        let value = |t: usize, c: usize| {
            let sum: f64 = (0..4)
                .filter(|back| t >= self.starts[t] + back)
                .map(|back| taps[c * 4 + 3 - back] * x[t - back][c])
                .sum();
            sum / (1.0 + (-sum).exp())
        };
        (0..x.len()).map(|t| (0..x[0].len()).map(|c| value(t, c)).collect()).collect()
    }

    fn rotate(&self, x: &mut [f64], t: usize) {
        let half = x.len() / 2;
        for n in 0..half {
            let angle = t as f64 * 10_000f64.powf(-(n as f64) / half as f64);
            let (a, b) = (x[n], x[n + half]);
            x[n] = a * angle.cos() - b * angle.sin();
            x[n + half] = b * angle.cos() + a * angle.sin();
        }
    }

    fn attention(&self, layer: usize, name: &str, x: &Row, first_values: &mut Vec<Row>) -> Row {
        let shape = self.config.attention_shape(layer);
        let variant = self.config.attention_of(layer);
        let d = shape.head_dim;
        let mut q = self.heads(&format!("{name}.q"), d, x, Some("q_norm"));
        let mut k = self.heads(&format!("{name}.k"), d, x, Some("k_norm"));
        let mut v = self.heads(&format!("{name}.v"), d, x, None);
        if first_values.is_empty() {
            *first_values = v.clone();
        } else if self.config.value_residual != ValueResidual::None {
            v = self.mix_values(name, x, v, first_values);
        }
        let text = toml::to_string(variant).unwrap();
        if text.contains("position = \"rope\"") {
            for heads in [&mut q, &mut k] {
                heads.iter_mut().for_each(|h| {
                    h.iter_mut().enumerate().for_each(|(t, x)| self.rotate(x, t));
                });
            }
        }
        let gate = format!("{name}.forget_gate");
        let forget = (variant.kind() == "fox").then(|| self.linear(&gate, &self.shift(&gate, x)));
        let log_decay =
            |t: usize, h: usize| forget.as_ref().map_or(0.0, |f| -(-f[t][h]).exp().ln_1p());
        let mut joined: Row = vec![vec![]; x.len()];
        for h in 0..shape.heads {
            let kv = h / (shape.heads / shape.kv_heads);
            for (i, joined) in joined.iter_mut().enumerate() {
                let window = shape.window.map_or(0, |w| (i + 1).saturating_sub(w));
                let keys = self.starts[i].max(window)..i + 1;
                let score = |j: usize| {
                    let dot: f64 = q[h][i].iter().zip(&k[kv][j]).map(|(q, k)| q * k).sum();
                    let decay: f64 = (j + 1..=i).map(|s| log_decay(s, h)).sum();
                    (dot / (shape.head_dim as f64).sqrt() + decay).exp()
                };
                let total: f64 = keys.clone().map(score).sum();
                for n in 0..shape.head_dim {
                    joined.push(keys.clone().map(|j| score(j) * v[kv][j][n]).sum::<f64>() / total);
                }
            }
        }
        if self.config.output_gate {
            let gate = format!("{name}.output_gate");
            let gate = self.linear(&gate, &self.shift(&gate, x));
            for (o, g) in joined.iter_mut().flatten().zip(gate.iter().flatten()) {
                *o /= 1.0 + (-g).exp();
            }
        }
        self.linear(&format!("{name}.output"), &joined)
    }

    fn mlp(&self, name: &str, x: &Row) -> Row {
        let x = &self.shift(name, x);
        let mut hidden = self.linear(&format!("{name}.up"), x);
        match self.config.mlp {
            MlpKind::Gelu => hidden.iter_mut().flatten().for_each(|x| {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (*x + 0.044715 * x.powi(3));
                *x = 0.5 * *x * (1.0 + inner.tanh());
            }),
            MlpKind::ReluSquared => {
                hidden.iter_mut().flatten().for_each(|x| *x = x.max(0.0).powi(2));
            }
            MlpKind::Swiglu => {
                let gate = self.linear(&format!("{name}.gate"), x);
                for (x, g) in hidden.iter_mut().flatten().zip(gate.iter().flatten()) {
                    *x *= g / (1.0 + (-g).exp());
                }
            }
        }
        self.linear(&format!("{name}.down"), &hidden)
    }

    /// The residual stream after one part of a block.
    fn add(&self, name: &str, x: Row, f: impl FnOnce(&str, &Row) -> Row) -> Row {
        let norm = |x: &Row| self.norm(&format!("{name}_norm"), x);
        match self.config.norm_position {
            NormPosition::Pre => sum(f(name, &norm(&x)), &x),
            NormPosition::Sandwich => {
                let y = f(name, &norm(&x));
                sum(self.norm(&format!("{name}_out_norm"), &y), &x)
            }
            NormPosition::Post => norm(&sum(f(name, &x), &x)),
        }
    }

    /// Σ weight · (cross-entropy + z-loss) of the row.
    fn loss(&self, tokens: &[usize], targets: &[usize], weights: &[f32]) -> f64 {
        let width = self.config.width;
        let embedding = self.get("embedding");
        let mut x: Row = tokens.iter().map(|&t| embedding[t * width..][..width].to_vec()).collect();
        if let Some(positions) = self.parameters.get("positions") {
            for (t, x) in x.iter_mut().enumerate() {
                let at = (t - self.starts[t]) * width;
                x.iter_mut().zip(&positions[at..]).for_each(|(x, p)| *x += p);
            }
        }
        if self.config.embedding_norm {
            x = self.norm("embedding_norm", &x);
        }
        let mut first_values = vec![];
        for layer in 0..self.config.layers {
            let name = format!("blocks.{layer}");
            x = self.add(&format!("{name}.attention"), x, |name, x| {
                self.attention(layer, name, x, &mut first_values)
            });
            x = self.add(&format!("{name}.mlp"), x, |name, x| self.mlp(name, x));
        }
        let x = self.norm("norm", &x);
        let head = self.parameters.get("head").map_or(embedding, Vec::as_slice);
        let mut loss = 0.0;
        for ((x, &target), &weight) in x.iter().zip(targets).zip(weights) {
            let cap = |z: f64| self.config.logit_softcap.map_or(z, |cap| cap * (z / cap).tanh());
            let logit = |w: &[f64]| cap(w.iter().zip(x).map(|(w, x)| w * x).sum());
            let logits: Vec<f64> = head.chunks(width).map(logit).collect();
            let total: f64 = logits.iter().map(|z| z.exp()).sum();
            let z_loss = f64::from(Z_LOSS) * total.ln().powi(2);
            loss += f64::from(weight) * (total.ln() - logits[target] + z_loss);
        }
        loss
    }
}

fn sum(mut x: Row, y: &Row) -> Row {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += y);
    x
}

fn oracle_loss(config: &ModelConfig, parameters: &Parameters) -> f64 {
    let row = |r: usize| {
        let oracle = Oracle { config, parameters, starts: &STARTS[r] };
        oracle.loss(&TOKENS[r], &TARGETS[r], &WEIGHTS[r])
    };
    row(0) + row(1)
}

fn ints(rows: &[[usize; SEQ_LEN]; 2]) -> Tensor<Ad, 2, Int> {
    let data: Vec<i32> = rows.iter().flatten().map(|&x| x as i32).collect();
    Tensor::from_data(TensorData::new(data, [2, SEQ_LEN]), &Default::default())
}

/// Gradients by parameter name.
struct Gradients<'a> {
    path: Vec<String>,
    grads: &'a <Ad as burn::tensor::backend::AutodiffBackend>::Gradients,
    found: HashMap<String, Vec<f64>>,
}

impl ModuleVisitor<Ad> for Gradients<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Ad, D>>) {
        let name = self.path.join(".");
        let grad = param.val().grad(self.grads).unwrap_or_else(|| panic!("{name} has no gradient"));
        self.found.insert(name, grad.into_data().iter::<f64>().collect());
    }
}

#[test]
fn loss_and_all_gradients_equal_an_independent_f64_computation() {
    for config in configs() {
        let device = <Ad as burn::tensor::backend::BackendTypes>::Device::default();
        let model = LanguageModel::<Ad>::new(&config, VOCAB, SEQ_LEN, 3, &device);
        // With the initial weights most paths are nearly linear; larger weights exercise them.
        let model = model.map(&mut Enlarge);
        let weights = Tensor::<Ad, 2>::from_floats(WEIGHTS, &device);
        let loss =
            model.loss(ints(&TOKENS), ints(&TARGETS), weights, Some(ints(&STARTS)), Z_LOSS).total;
        let got = loss.clone().into_data().iter::<f64>().next().unwrap();
        let mut parameters: Parameters = named_tensors(&model)
            .into_iter()
            .map(|(name, _, data)| (name, data.into_iter().map(f64::from).collect()))
            .collect();
        let want = oracle_loss(&config, &parameters);
        assert!((got - want).abs() < 2e-6 * want, "loss {got} for {want}");

        let grads = loss.backward();
        let mut found = Gradients { path: vec![], grads: &grads, found: HashMap::new() };
        model.visit(&mut found);
        let names: Vec<String> = parameters.keys().cloned().collect();
        for name in names {
            let got = &found.found[&name];
            let scale = got.iter().fold(0.0f64, |a, g| a.max(g.abs()));
            for at in 0..got.len() {
                let x = parameters[&name][at];
                let mut loss = |x: f64| {
                    parameters.get_mut(&name).unwrap()[at] = x;
                    oracle_loss(&config, &parameters)
                };
                let want = (loss(x + 1e-5) - loss(x - 1e-5)) / 2e-5;
                loss(x);
                let error = (got[at] - want).abs();
                assert!(error < 1e-5 * scale.max(1e-2), "{name}[{at}]: {} for {want}", got[at]);
            }
        }
    }
}

/// Every parameter of every attention kind affects the loss.
#[test]
fn all_gradients_exist_and_are_finite() {
    for config in configs_and_kinds() {
        let device = Default::default();
        let model = LanguageModel::<Ad>::new(&config, VOCAB, SEQ_LEN, 3, &device);
        let model = model.map(&mut Enlarge).map(&mut Shift);
        let weights = Tensor::<Ad, 2>::from_floats(WEIGHTS, &device);
        let loss =
            model.loss(ints(&TOKENS), ints(&TARGETS), weights, Some(ints(&STARTS)), Z_LOSS).total;
        let grads = loss.backward();
        let mut found = Gradients { path: vec![], grads: &grads, found: HashMap::new() };
        model.visit(&mut found);
        for (name, grad) in &found.found {
            assert!(grad.iter().all(|g| g.is_finite()), "{name} of {config:?}: {grad:?}");
            assert!(grad.iter().any(|g| *g != 0.0), "{name} of {config:?} has no effect");
        }
    }
}

/// Multiplies matrices by 15: weights near 0.3.
struct Enlarge;

impl<B: Backend> burn::module::ModuleMapper<B> for Enlarge {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|x| if D == 2 { (x * 15.0).detach().require_grad() } else { x })
    }
}

/// Adds 0.1 to vectors: some start at 0, and whatever they multiply would have no gradient.
struct Shift;

impl<B: Backend> burn::module::ModuleMapper<B> for Shift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|x| if D == 1 { (x + 0.1).detach().require_grad() } else { x })
    }
}
