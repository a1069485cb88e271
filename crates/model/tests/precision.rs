//! Models in bf16 on the CPU, where operations that mix number types panic; on a GPU they would give
//! wrong numbers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::{DType, Int, Tensor, TensorData};
use longwall_kernels::Cpu;
use longwall_model::{LanguageModel, ModelConfig, Precision};

use crate::configs::{SEQ_LEN, VOCAB, configs_and_kinds};

type Model<B> = LanguageModel<B>;
type Graph = Autodiff<Cpu>;

fn tokens<B: burn::tensor::backend::Backend>(shift: usize) -> Tensor<B, 2, Int> {
    let token = |at: usize| (((at + shift) * (at + shift) + at / SEQ_LEN) % VOCAB) as i32;
    let data = TensorData::new((0..2 * SEQ_LEN).map(token).collect(), [2, SEQ_LEN]);
    Tensor::from_data(data, &Default::default())
}

fn documents() -> Tensor<Graph, 2, Int> {
    let start = |at: usize| if at % SEQ_LEN < 3 { 0 } else { 3 };
    let data = TensorData::new((0..2 * SEQ_LEN).map(start).collect::<Vec<i32>>(), [2, SEQ_LEN]);
    Tensor::from_data(data, &Default::default())
}

/// The loss, the norm of its gradient by the embedding, and the logits of the last token, decoded one
/// token at a time.
fn results(model: &Model<Graph>, documents: Option<Tensor<Graph, 2, Int>>) -> (f32, f32, Vec<f32>) {
    let weights = Tensor::ones([2, SEQ_LEN], &Default::default()) / (2 * SEQ_LEN) as f32;
    let loss = model.loss(tokens(0), tokens(1), weights, documents, 0.0).total;
    let gradients = loss.backward();
    let dw = model.embedding.val().grad(&gradients).expect("a gradient of the embedding");
    let norm = dw.cast(DType::F32).powf_scalar(2.0).sum().sqrt().into_scalar();

    let model = model.valid();
    let (mut state, rows) = (model.init_state(), tokens::<Cpu>(0));
    let logits = (0..SEQ_LEN).map(|at| model.extend(rows.clone().narrow(1, at, 1), &mut state));
    let logits = logits.last().expect("at least one token").into_data();
    let loss = loss.inner().cast(DType::F32).into_scalar();
    (loss, norm, logits.iter::<f32>().collect())
}

/// What is wrong with the model of `config` in bf16, if anything.
fn problem(config: &ModelConfig) -> Option<String> {
    let exact = Model::<Graph>::new(config, VOCAB, SEQ_LEN, 0, &Default::default());
    let rounded = Precision::Bf16.convert(exact.clone());
    for documents in [None, Some(documents())] {
        let (loss, norm, logits) = results(&exact, documents.clone());
        let run = || results(&rounded, documents);
        let (loss16, norm16, logits16) = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(results) => results,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                return Some(format!("it stops: {}", text.unwrap_or_default()));
            }
        };
        // Rounding to 8 bits in a few layers.
        let near = |a: f32, b: f32, scale: f32| (a - b).abs() <= 0.05 * scale;
        let size = logits.iter().fold(0.1, |size: f32, z| size.max(z.abs()));
        // Thresholds and small denominators make gradients rougher.
        let same_size = (0.7..1.4).contains(&(norm16 / norm));
        if !near(loss, loss16, loss) || !same_size {
            return Some(format!("loss {loss} and {loss16}, gradient {norm} and {norm16}"));
        }
        if let Some((z, z16)) =
            logits.iter().zip(&logits16).find(|(z, z16)| !near(**z, **z16, size))
        {
            return Some(format!("a logit is {z} and {z16}"));
        }
    }
    None
}

#[test]
fn every_option_and_every_kind_computes_in_bf16_what_it_does_in_f32() {
    let problems: Vec<String> = configs_and_kinds()
        .filter_map(|config| Some((problem(&config)?, config)))
        .map(|(problem, config)| format!("{problem}\n  {config:?}"))
        .collect();
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}
