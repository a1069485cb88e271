//! Which attention kinds can start from each other's weights: one line per kind.

use longwall_kernels::attention::rope::Position;
use longwall_kernels::attention::rotation::{Rotation, Scaling};
use longwall_kernels::attention::wall::GateSource;
use longwall_kernels::attention::{AttentionConfig, fox, rope, wall};

/// How far a gate that starts open may move a score over a row of the training length.
const OPEN: f64 = 1e-3;

/// Softmax attention that a layer computes while some of its own weights have the values `gates`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SoftmaxForm {
    /// The rotation of q and k, if they rotate.
    pub rotation: Option<Rotation>,
    /// Whether a learned logit per head is in the softmax's denominator.
    pub sinks: bool,
    /// Names of the layer's own weights and the value of all their elements; empty if the layer computes softmax
    /// attention whatever its weights are.
    pub gates: Vec<(&'static str, f32)>,
}

/// A kind in which softmax or another function of a row of scores q·k weighs the values: its q, k, v and output
/// projections mean the same as in the other kinds here.
struct ScoreKind {
    /// The value of `kind`.
    kind: &'static str,
    /// The softmax attention that it can compute in rows of a length, if any.
    softmax_form: fn(&AttentionConfig, usize) -> Option<SoftmaxForm>,
}

const SCORE_KINDS: &[ScoreKind] = &[
    ScoreKind { kind: "rope", softmax_form: |config, _| of_rope(config) },
    ScoreKind { kind: "fox", softmax_form: of_fox },
    ScoreKind { kind: "wall", softmax_form: of_wall },
    ScoreKind { kind: "path", softmax_form: never },
    ScoreKind { kind: "power", softmax_form: never },
    ScoreKind { kind: "tra", softmax_form: never },
    ScoreKind { kind: "rela", softmax_form: never },
    ScoreKind { kind: "dex", softmax_form: never },
    ScoreKind { kind: "lssar", softmax_form: never },
    ScoreKind { kind: "entmax", softmax_form: never },
    ScoreKind { kind: "stick_breaking", softmax_form: never },
];

/// Whether a layer of `config` can take the q, k, v and output projections of one of `source`.
pub(super) fn takes_projections(config: &AttentionConfig, source: &AttentionConfig) -> bool {
    config.kind() == source.kind() || (find(config).is_some() && find(source).is_some())
}

/// As [`ScoreKind::softmax_form`], for rows of `seq_len` tokens.
pub(super) fn softmax_form(config: &AttentionConfig, seq_len: usize) -> Option<SoftmaxForm> {
    find(config).and_then(|kind| (kind.softmax_form)(config, seq_len))
}

fn find(config: &AttentionConfig) -> Option<&'static ScoreKind> {
    SCORE_KINDS.iter().find(|known| known.kind == config.kind())
}

fn never(_: &AttentionConfig, _: usize) -> Option<SoftmaxForm> {
    None
}

/// The bias b of a gate σ(b) that is open: over `seq_len` tokens its logarithm adds up to −[`OPEN`],
/// seq_len · ln σ(b) ≈ −seq_len · e^(−b).
fn open_bias(seq_len: usize) -> f32 {
    (seq_len as f64 / OPEN).ln() as f32
}

/// The rotation of every channel with `rope`.
fn rotation(rope: bool, theta: f64, scaling: Scaling) -> Option<Rotation> {
    rope.then_some(Rotation { scaling, ..Rotation::new(theta) })
}

fn of_rope(config: &AttentionConfig) -> Option<SoftmaxForm> {
    let AttentionConfig::Rope(config) = config else { return None };
    let plain = rope::Config {
        position: config.position,
        theta: config.theta,
        scaling: config.scaling,
        sinks: config.sinks,
        ..rope::Config::default()
    };
    let rotation = match config.position {
        Position::Rope => rotation(true, config.theta, config.scaling),
        Position::None => None,
        Position::Alibi => return None,
    };
    (*config == plain).then(|| SoftmaxForm { rotation, sinks: config.sinks, gates: vec![] })
}

fn of_fox(config: &AttentionConfig, seq_len: usize) -> Option<SoftmaxForm> {
    let AttentionConfig::Fox(config) = config else { return None };
    let fox::Config { rope, theta, scaling, sinks, prune: _, bias_init: _ } = *config;
    let gates = vec![("forget_gate.weight", 0.0), ("forget_gate.bias", open_bias(seq_len))];
    Some(SoftmaxForm { rotation: rotation(rope, theta, scaling), sinks, gates })
}

fn of_wall(config: &AttentionConfig, seq_len: usize) -> Option<SoftmaxForm> {
    let AttentionConfig::Wall(config) = config else { return None };
    let wall::Config { rope, theta, scaling, sinks, gate_source, forget_gate, .. } = *config;
    let [weight, bias] = match gate_source {
        GateSource::Hidden => ["gate.weight", "gate.bias"],
        GateSource::Key => ["key_gate_weight", "key_gate_bias"],
    };
    let mut gates = vec![(weight, 0.0), (bias, open_bias(seq_len))];
    if forget_gate {
        gates.extend([("forget_gate.weight", 0.0), ("forget_gate.bias", open_bias(seq_len))]);
    }
    Some(SoftmaxForm { rotation: rotation(rope, theta, scaling), sinks, gates })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_registered_once_and_exist() {
        let names: Vec<_> = AttentionConfig::KINDS.iter().map(|known| known.kind).collect();
        for (at, ScoreKind { kind, .. }) in SCORE_KINDS.iter().enumerate() {
            assert!(names.contains(kind), "{kind}");
            assert!(SCORE_KINDS[..at].iter().all(|other| other.kind != *kind), "{kind}");
        }
    }

    #[test]
    fn open_gates_move_a_score_by_a_thousandth_at_most() {
        for seq_len in [16, 1024, 1 << 17] {
            let log_gate = -(1.0 + (-f64::from(open_bias(seq_len))).exp()).ln();
            assert!(seq_len as f64 * log_gate >= -OPEN * 1.001, "{seq_len}");
        }
    }

    #[test]
    fn every_weight_that_opens_a_gate_belongs_to_its_kind() {
        let shape = longwall_kernels::attention::AttentionShape::new(16, 4, 2, 4);
        let forgetting = wall::Config { forget_gate: true, ..wall::Config::default() };
        let forgetting = AttentionConfig::Wall(forgetting);
        for config in AttentionConfig::defaults().into_iter().chain([forgetting]) {
            let Some(form) = softmax_form(&config, 64) else { continue };
            let projections = config.projections(&shape).into_iter().map(|p| p.name);
            let own: Vec<_> =
                projections.chain(config.parameters(&shape).into_iter().map(|p| p.name)).collect();
            for (name, _) in form.gates {
                assert!(own.contains(&name.split('.').next().unwrap()), "{name}");
            }
        }
    }
}
