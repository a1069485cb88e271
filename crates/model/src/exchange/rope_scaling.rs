//! Rotary positions as `transformers` describes them: `rope_parameters`, and `rope_scaling` before its version 5.

use longwall_kernels::attention::rotation::Scaling;
use serde_json::{Value, json};

use super::values::Reader;

/// What a description may be.
const ALLOWED: &str = "none, or rope_type \"default\", \"linear\", \"yarn\" (without truncate = false) or \"llama3\", with its numbers";

/// θ and the scaling of the angles, from wherever transformers reads them. Other scalings are refused.
///
/// - `seq_len`: `max_position_embeddings`
pub(super) fn read(read: &mut Reader<'_>, seq_len: usize) -> (f64, Scaling) {
    let mut theta = read.number("rope_theta", 10_000.0);
    let mut scaling = Scaling::None {};
    let trained = read.optional_size("original_max_position_embeddings");
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(parameters) = read.get(key) else { continue };
        let found = scaling_of(parameters, trained, seq_len);
        read.refuse_unless(found.is_some(), key, &parameters.to_string(), ALLOWED);
        scaling = found.unwrap_or(scaling);
        theta = parameters.get("rope_theta").and_then(Value::as_f64).unwrap_or(theta);
    }
    (theta, scaling)
}

/// The scaling that `parameters` describe, if it exists here.
fn scaling_of(parameters: &Value, trained: Option<usize>, seq_len: usize) -> Option<Scaling> {
    let get = |key: &str| parameters.get(key).filter(|value| !value.is_null());
    let number = |key: &str| get(key).and_then(Value::as_f64);
    if get("partial_rotary_factor").is_some_and(|share| share.as_f64() != Some(1.0)) {
        return None;
    }
    let original_len = match (trained, get("original_max_position_embeddings")) {
        (Some(len), _) => len,
        (None, Some(len)) => usize::try_from(len.as_u64()?).ok()?,
        (None, None) => seq_len,
    };
    let kind = get("rope_type").or(get("type")).map_or(Some("default"), Value::as_str)?;
    Some(match kind {
        "default" => Scaling::None {},
        "linear" => Scaling::Linear { factor: number("factor")? },
        "yarn" if get("truncate").is_none_or(|value| value == true) => {
            let factor = match get("factor") {
                Some(factor) => factor.as_f64()?,
                None => seq_len as f64 / original_len as f64,
            };
            // 0 counts as missing, too.
            let given = |key| number(key).filter(|&x| x != 0.0);
            let amplitude = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
            let both = given("mscale").zip(given("mscale_all_dim"));
            let ratio = both.map(|(mscale, all)| amplitude(mscale) / amplitude(all));
            Scaling::Yarn {
                factor,
                original_len,
                beta_fast: given("beta_fast").unwrap_or(32.0),
                beta_slow: given("beta_slow").unwrap_or(1.0),
                attention_factor: number("attention_factor").or(ratio),
            }
        }
        "llama3" => Scaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_len,
        },
        _ => return None,
    })
}

/// `rope_parameters` for heads of `head_dim` channels that all rotate.
pub(super) fn parameters(theta: f64, scaling: Scaling, head_dim: usize) -> Value {
    match scaling {
        Scaling::None {} => json!({ "rope_type": "default", "rope_theta": theta }),
        Scaling::Linear { factor } => {
            json!({ "rope_type": "linear", "rope_theta": theta, "factor": factor })
        }
        // A larger θ and nothing else.
        Scaling::Ntk { factor } => {
            let d = head_dim as f64;
            let theta = theta * factor.powf(d / (d - 2.0).max(1.0));
            json!({ "rope_type": "default", "rope_theta": theta })
        }
        Scaling::Yarn { factor, original_len, beta_fast, beta_slow, attention_factor } => {
            let mut parameters = json!({
                "rope_type": "yarn",
                "rope_theta": theta,
                "factor": factor,
                "original_max_position_embeddings": original_len,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
            });
            if let Some(attention_factor) = attention_factor {
                parameters["attention_factor"] = attention_factor.into();
            }
            parameters
        }
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => json!({
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_len,
        }),
    }
}

#[cfg(test)]
mod tests {
    use longwall_config::Problems;

    use super::*;

    const YARN: Scaling = Scaling::Yarn {
        factor: 4.0,
        original_len: 2048,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };

    fn read_config(config: &Value) -> ((f64, Scaling), Problems) {
        let mut problems = Problems::new();
        let found = read(&mut Reader::new(config, &mut problems), 8192);
        (found, problems)
    }

    #[test]
    fn what_is_written_is_read_again() {
        let Scaling::Yarn { factor, original_len, beta_slow, .. } = YARN else { unreachable!() };
        let own = Scaling::Yarn {
            factor,
            original_len,
            beta_slow,
            beta_fast: 16.0,
            attention_factor: Some(1.5),
        };
        let llama3 = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_len: 8192,
        };
        for scaling in [Scaling::None {}, Scaling::Linear { factor: 2.0 }, YARN, own, llama3] {
            let written = parameters(500.0, scaling, 64);
            for key in ["rope_parameters", "rope_scaling"] {
                let (found, problems) = read_config(&json!({ key: written }));
                assert_eq!((found, problems), ((500.0, scaling), Problems::new()));
            }
        }
        let base = parameters(100.0, Scaling::Ntk { factor: 2.0 }, 4)["rope_theta"].as_f64();
        assert_eq!(base, Some(400.0));
    }

    /// Files of earlier versions have `rope_scaling` and may leave out what has a default.
    #[test]
    fn defaults_are_those_of_transformers() {
        let older = json!({
            "rope_theta": 700.0,
            "rope_scaling": { "type": "linear", "factor": 2.0 },
        });
        assert_eq!(read_config(&older).0, (700.0, Scaling::Linear { factor: 2.0 }));
        let yarn = |more: Value| {
            let mut parameters =
                json!({ "rope_type": "yarn", "original_max_position_embeddings": 2048 });
            parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            read_config(&json!({ "rope_scaling": parameters })).0.1
        };
        // 8192 / 2048.
        assert_eq!(yarn(json!({ "factor": null, "beta_fast": 0 })), YARN);
        let Scaling::Yarn { attention_factor, .. } =
            yarn(json!({ "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5 }))
        else {
            panic!("no yarn")
        };
        let ratio = (0.1 * 4f64.ln() + 1.0) / (0.05 * 4f64.ln() + 1.0);
        assert!((attention_factor.unwrap() - ratio).abs() < 1e-12);
    }

    #[test]
    fn what_has_no_counterpart_is_refused() {
        for parameters in [
            json!({ "rope_type": "dynamic", "factor": 2.0 }),
            json!({ "rope_type": "longrope", "factor": 2.0 }),
            json!({ "rope_type": "linear" }),
            json!({ "rope_type": "yarn", "factor": 2.0, "truncate": false }),
            json!({ "rope_type": "llama3", "factor": 8.0 }),
            json!({ "rope_type": "default", "partial_rotary_factor": 0.5 }),
        ] {
            let problems = read_config(&json!({ "rope_parameters": parameters })).1;
            assert_eq!(problems.as_slice().len(), 1, "{parameters}");
            assert_eq!(problems.as_slice()[0].key, "rope_parameters");
        }
    }
}
