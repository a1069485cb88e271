//! Numbers as people read them, and the lines that both consoles show.

use longwall_model::config::Window;

use super::{Ending, RunInfo, StepView};
use crate::metrics::ValidationRecord;
use crate::optimiser::Assigned;
use crate::timeline::OpenStage;

/// A count with three digits and a suffix: `950`, `5.12k`, `124M`.
pub fn count(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "B", "T"])
}

/// A size in bytes: `512 B`, `1.21 GB`.
pub fn bytes(value: u64) -> String {
    scaled(value as f64, 1000.0, &[" B", " kB", " MB", " GB", " TB"])
}

fn scaled(mut value: f64, base: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // 999.5 and up would be rounded to 1000.
    while value >= base - 0.5 && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 && value.fract() == 0.0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}{}", units[unit])
}

/// A time in its two largest units: `42s`, `3m12s`, `2h05m`, `1d04h`.
pub fn duration(seconds: f64) -> String {
    let total = seconds.max(0.0).round() as u64;
    let (days, hours) = (total / 86_400, total / 3600 % 24);
    let (minutes, seconds) = (total / 60 % 60, total % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{seconds:02}s"),
        (0, _, _) => format!("{hours}h{minutes:02}m"),
        _ => format!("{days}d{hours:02}h"),
    }
}

/// The lines shown when a run begins.
/// Which parameters have an update. `lr` is the peak learning rate.
fn update(assigned: &Assigned, lr: f64) -> String {
    let Assigned { group, method, lr: factor, weight_decay, tensors, parameters, names, .. } =
        assigned;
    let group = group.map(|at| format!(", train.groups.{at}")).unwrap_or_default();
    format!(
        "{method}, peak lr {:.2e}, decay {weight_decay:.2e}{group}: {} parameters in {tensors} {}: {}",
        factor * lr,
        count(*parameters as f64),
        if *tensors == 1 { "tensor" } else { "tensors" },
        names.join(", "),
    )
}

pub(super) fn begin(info: &RunInfo) -> String {
    let mut text = format!(
        "{} parameters on {}; {} training tokens\n{} steps",
        count(info.parameters as f64),
        info.device,
        count(info.data_tokens as f64),
        info.total_steps,
    );
    let run_dir = info.run_dir.display();
    match &info.stages[..] {
        [open] => text += &format!(" of {}; run folder {run_dir}", batches(open)),
        stages => {
            text += &format!("; run folder {run_dir}");
            let has_windows = stages.iter().any(|open| open.stage.window != stages[0].stage.window);
            for open in stages {
                let first = open.stage.first_step + 1;
                text += &format!("\nfrom step {first}: {}", batches(open));
                if has_windows {
                    text += &format!(", window {}", Window::of(open.stage.window));
                }
            }
        }
    }
    for assigned in &info.optimiser {
        text += &format!("\n{}", update(assigned, info.lr));
    }
    if let Some(peak) = info.peak_flops {
        text += &format!("\nMFU is against a peak of {:.1} GFLOP/s", peak / 1e9);
    }
    if info.first_step > 0 {
        text += &format!("\nresumed after step {}", info.first_step);
    }
    if info.compiles {
        text += "\nthe first step takes longer: it compiles the device's kernels";
    }
    text
}

/// The batches of a stage: tokens, micro-batches, their rows and the tokens of a row.
fn batches(OpenStage { stage, micro_batch }: &OpenStage) -> String {
    let passes = stage.rows().div_ceil((*micro_batch).max(1));
    format!("{} tokens: {passes} x {micro_batch} rows of {}", stage.batch_tokens, stage.seq_len)
}

/// The numbers of a step, without the step itself.
pub fn step(view: &StepView) -> String {
    let record = &view.record;
    let number = |value: Option<f32>, decimals: usize| {
        value.map_or_else(|| "nan".to_owned(), |value| format!("{value:.decimals$}"))
    };
    let mut parts = vec![
        format!("loss {} ({:.4})", number(record.loss, 4), view.smoothed_loss),
        format!("norm {}", number(record.grad_norm, 3)),
        format!("lr {:.2e}", record.lr),
        format!("{} tok/s", count(record.tokens_per_second)),
    ];
    if let Some(mfu) = record.mfu {
        parts.push(format!("mfu {:.1} %", mfu * 100.0));
    }
    parts.push(format!("left {}", duration(view.seconds_left)));
    if let Some(memory) = view.memory_bytes {
        parts.push(bytes(memory));
    }
    parts.join(" | ")
}

/// The line of a skipped step.
pub(super) fn skip(view: &StepView) -> Option<String> {
    view.skip.as_ref().map(|reason| format!("step {} skipped: {reason}", view.record.step))
}

/// The line of a validation.
pub(super) fn validation(record: &ValidationRecord, best: bool) -> String {
    let mut text = format!(
        "step {}: validation loss {:.4}, perplexity {:.2}, {:.4} bits per byte",
        record.step, record.validation_loss, record.perplexity, record.bits_per_byte
    );
    if let Some(loss) = record.ema_validation_loss {
        text += &format!(", {loss:.4} with averaged weights");
    }
    for (metric, mean) in &record.probe {
        text += &format!(", {metric} {mean:.3}");
    }
    if best {
        text += " (best)";
    }
    text
}

/// A sample as one line, truncated.
pub(super) fn sample(step: u64, prompt: &str, text: &str) -> String {
    const SHOWN: usize = 160;
    let whole = format!("{prompt}{text}");
    let line = whole.escape_debug().collect::<String>().replace("\\'", "'").replace("\\\"", "\"");
    let cut: String = line.chars().take(SHOWN).collect();
    let more = if cut.len() < line.len() { "…" } else { "" };
    format!("step {step}: sample: {cut}{more}")
}

/// The line at the end.
pub(super) fn end(ending: &Ending) -> String {
    let time = duration(ending.seconds);
    let mut text = if ending.step >= ending.total_steps {
        format!("finished {} steps in {time}", ending.step)
    } else {
        let run = longwall_config::shell_quoted(&ending.run_dir);
        format!(
            "stopped after step {} of {} ({time}); continue with: longwall train --resume {run}",
            ending.step, ending.total_steps
        )
    };
    if ending.skipped > 0 {
        let plural = if ending.skipped == 1 { "step" } else { "steps" };
        text += &format!("; {} {plural} skipped", ending.skipped);
    }
    if let Some(record) = &ending.validation {
        text += &format!(
            "; validation loss {:.4}, {:.4} bits per byte",
            record.validation_loss, record.bits_per_byte
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_sizes_have_three_digits() {
        let shown: Vec<String> =
            [0.0, 7.0, 950.0, 999.4, 999.6, 5120.0, 51_200.0, 999_600.0, 124_439_808.0]
                .map(count)
                .into();
        assert_eq!(shown, ["0", "7", "950", "999", "1.00k", "5.12k", "51.2k", "1.00M", "124M"]);
        assert_eq!([bytes(512), bytes(1_210_000_000)], ["512 B", "1.21 GB"]);
    }

    #[test]
    fn durations_have_two_units() {
        let shown = [0.4, 42.0, 192.0, 3599.6, 7500.0, 100_800.0].map(duration);
        assert_eq!(shown, ["0s", "42s", "3m12s", "1h00m", "2h05m", "1d04h"]);
    }

    #[test]
    fn a_sample_stays_on_one_line() {
        assert_eq!(sample(5, "It's", "\n\"so\""), "step 5: sample: It's\\n\"so\"");
        assert!(sample(5, "", &"é".repeat(500)).ends_with("é…"));
    }
}
