//! Plain lines, for logs and pipes.

use std::io::Write;
use std::time::{Duration, Instant};

use super::{Console, Ending, RunInfo, StepView, format};
use crate::metrics::ValidationRecord;

/// Time between two lines of steps; `metrics.jsonl` has every step.
const PAUSE: Duration = Duration::from_secs(10);

/// Writes a line for the first and the last step, for every skipped step, and otherwise every ten
/// seconds.
#[derive(Debug)]
pub struct LineConsole<W> {
    out: W,
    last: Option<Instant>,
}

impl<W: Write> LineConsole<W> {
    /// Writes lines to `out`.
    pub fn new(out: W) -> Self {
        LineConsole { out, last: None }
    }

    /// Ignores errors: a console that cannot be written to (a closed pipe) must not end the run.
    fn line(&mut self, text: &str) {
        let _ = writeln!(self.out, "{text}");
    }
}

impl<W: Write> Console for LineConsole<W> {
    fn begin(&mut self, info: &RunInfo) {
        self.line(&format::begin(info));
    }

    fn step(&mut self, view: &StepView) {
        if let Some(line) = format::skip(view) {
            self.line(&line);
        }
        let is_last = view.record.step == view.total_steps;
        if is_last || self.last.is_none_or(|last| last.elapsed() >= PAUSE) {
            self.last = Some(Instant::now());
            let line =
                format!("step {}/{} | {}", view.record.step, view.total_steps, format::step(view));
            self.line(&line);
        }
    }

    fn validation(&mut self, record: &ValidationRecord, best: bool) {
        self.line(&format::validation(record, best));
    }

    fn sample(&mut self, step: u64, prompt: &str, text: &str) {
        self.line(&format::sample(step, prompt, text));
    }

    fn note(&mut self, text: &str) {
        self.line(text);
    }

    fn end(&mut self, ending: &Ending) {
        self.line(&format::end(ending));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::SkipReason;
    use crate::metrics::StepRecord;
    use crate::optimiser::Assigned;
    use crate::testing::timeline;
    use crate::timeline::{OpenStage, Stage};

    fn view(step: u64, loss: f32) -> StepView {
        let finite = loss.is_finite();
        StepView {
            record: StepRecord {
                step,
                tokens: step * 4096,
                flops: None,
                loss: finite.then_some(loss),
                z_loss: None,
                grad_norm: Some(0.8125),
                lr: 6e-4,
                batch_tokens: None,
                seq_len: None,
                window: None,
                tokens_per_second: 5120.0,
                mfu: finite.then_some(0.415),
                seconds: 1.0,
                skipped: !finite,
            },
            total_steps: 4,
            smoothed_loss: 2.5,
            seconds_left: 192.0,
            memory_bytes: Some(1_210_000_000),
            skip: (!finite).then_some(SkipReason::LossNotFinite(loss)),
        }
    }

    #[test]
    fn a_run_in_plain_lines() {
        let mut console = LineConsole::new(Vec::new());
        let stage = Stage { seq_len: 512, ..timeline(4096, 16_384).stages()[0] };
        console.begin(&RunInfo {
            run_dir: "runs/small".into(),
            device: "the CPU (2 threads)".into(),
            parameters: 1_234_567,
            data_tokens: 8_000_000,
            total_steps: 4,
            first_step: 1,
            stages: vec![OpenStage { stage, micro_batch: 4 }],
            peak_flops: Some(1.5e11),
            compiles: true,
            optimiser: vec![
                Assigned {
                    group: None,
                    method: "muon",
                    lr: 1.0,
                    weight_decay: 0.1,
                    tensors: 14,
                    parameters: 1_030_000,
                    state: 0,
                    names: vec!["blocks.*.mlp.up.weight".into(), "blocks.*.mlp.down.weight".into()],
                },
                Assigned {
                    group: Some(0),
                    method: "adamw",
                    lr: 0.5,
                    weight_decay: 0.0,
                    tensors: 1,
                    parameters: 204_567,
                    state: 0,
                    names: vec!["embedding".into()],
                },
            ],
            lr: 6e-4,
        });
        console.step(&view(2, 2.25));
        console.step(&view(3, f32::NAN));
        console.step(&view(4, 2.125));
        let record = ValidationRecord {
            step: 4,
            tokens: 16_384,
            flops: None,
            validation_loss: 2.0,
            perplexity: 2f64.exp(),
            bits_per_byte: 2.885,
            loss_by_position: vec![],
            best_context_loss: None,
            probe: [("pruned_fraction".to_owned(), 0.715)].into(),
            ema_validation_loss: None,
            seconds: 2.0,
        };
        console.validation(&record, true);
        console.sample(4, "fn main", "() {\n");
        console.note("checkpoint runs/small/checkpoints/step-4");
        let ending = Ending {
            step: 4,
            total_steps: 4,
            skipped: 1,
            seconds: 80.0,
            validation: Some(record),
            run_dir: "runs/small".into(),
        };
        console.end(&ending);
        console.end(&Ending { step: 3, validation: None, ..ending });
        insta::assert_snapshot!(String::from_utf8(console.out).unwrap(), @r"
        1.23M parameters on the CPU (2 threads); 8.00M training tokens
        4 steps of 4096 tokens: 2 x 4 rows of 512; run folder runs/small
        muon, peak lr 6.00e-4, decay 1.00e-1: 1.03M parameters in 14 tensors: blocks.*.mlp.up.weight, blocks.*.mlp.down.weight
        adamw, peak lr 3.00e-4, decay 0.00e0, train.groups.0: 205k parameters in 1 tensor: embedding
        MFU is against a peak of 150.0 GFLOP/s
        resumed after step 1
        the first step takes longer: it compiles the device's kernels
        step 2/4 | loss 2.2500 (2.5000) | norm 0.812 | lr 6.00e-4 | 5.12k tok/s | mfu 41.5 % | left 3m12s | 1.21 GB
        step 3 skipped: the loss is NaN
        step 4/4 | loss 2.1250 (2.5000) | norm 0.812 | lr 6.00e-4 | 5.12k tok/s | mfu 41.5 % | left 3m12s | 1.21 GB
        step 4: validation loss 2.0000, perplexity 7.39, 2.8850 bits per byte, pruned_fraction 0.715 (best)
        step 4: sample: fn main() {\n
        checkpoint runs/small/checkpoints/step-4
        finished 4 steps in 1m20s; 1 step skipped; validation loss 2.0000, 2.8850 bits per byte
        stopped after step 3 of 4 (1m20s); continue with: longwall train --resume runs/small; 1 step skipped
        ");
    }
}
