//! What the ranks of a run have opened, to be compared.

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_model::LanguageModel;

use super::data::Data;
use crate::checkpoint::Checkpoint;
use crate::distributed::Facts;
use crate::run_folder::Origin;

/// Tokenizer, data, checkpoint, source and starting weights in short texts.
pub(super) fn opened<B: OpBackend>(
    Data { tokenizer, loader, .. }: &Data,
    checkpoint: Option<&Checkpoint>,
    origin: Option<&Origin>,
    model: &LanguageModel<Autodiff<B>>,
) -> Facts {
    let mut facts = vec![(
        "the tokenizer".to_owned(),
        format!("{} ({})", tokenizer.name(), short(&tokenizer.fingerprint())),
    )];
    for source in loader.sources() {
        let tokens = source.tokens.map_or("generated".to_owned(), |n| format!("{n} tokens"));
        facts.push((source.name.clone(), format!("{tokens} ({})", short(&source.fingerprint))));
    }
    if let Some(Checkpoint { state, .. }) = checkpoint {
        let bytes = serde_json::to_vec(state).expect("a state has a JSON form");
        let (step, crc) = (state.step, crc32c::crc32c(&bytes));
        facts.push(("the checkpoint's state".to_owned(), format!("step {step} ({crc:08x})")));
    }
    if let Some(Origin { step, weights, crc32c, .. }) = origin {
        let crc = crc32c.map(|crc| format!(" ({crc:08x})")).unwrap_or_default();
        let value = format!("{weights} of step {step}{crc}");
        facts.push(("the weights that the run starts from".to_owned(), value));
    }
    facts.push(("the digest of the starting weights".to_owned(), digest(&model.valid())));
    facts
}

/// The first digits of a fingerprint.
fn short(fingerprint: &str) -> String {
    fingerprint.chars().take(16).collect()
}

/// A checksum of all parameters, as the device holds them.
fn digest<B: OpBackend>(model: &LanguageModel<B>) -> String {
    struct Crc(u32);
    impl<B: OpBackend> ModuleVisitor<B> for Crc {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0 = crc32c::crc32c_append(self.0, param.val().into_data().as_bytes());
        }
    }
    let mut crc = Crc(0);
    model.visit(&mut crc);
    format!("{:08x}", crc.0)
}
