//! What happens between steps: validation, samples, checkpoints, the end.

use std::path::PathBuf;

use burn::module::{AutodiffModule, Module};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::Allocation;
use longwall_model::LanguageModel;

use super::setup::Run;
use crate::carried::Carried;
use crate::checkpoint::{Best, Snapshot, StageMicroBatch, State, WeightsSelector, about_to_write};
use crate::config::{Every, eval_weights};
use crate::console::Console;
use crate::distributed::{Collective, CollectiveError, any_of_ranks, of_first};
use crate::error::TrainError;
use crate::evaluation::Evaluator;
use crate::grad_accumulation::BatchGradients;
use crate::gradients::Gradients;
use crate::guard::SkipReason;
use crate::metrics::{self, NoiseRecord, NormsRecord, Record, ValidationRecord};
use crate::noise_scale::{MicroBatchNorm, NoiseSample};
use crate::optimiser::{LayerNorm, LayerSquares, Saved, Update, UpdateNorms};
use crate::run_folder::{self, Finished};
use crate::validation::ValidationScores;

impl<B: OpBackend> Run<'_, B> {
    /// Ends the run if too many steps in a row were skipped.
    pub fn check_skips(&self, skip: Option<SkipReason>) -> Result<(), TrainError> {
        match skip {
            Some(reason) if self.guard.must_stop() => Err(TrainError::TooManySkips {
                step: self.progress.step,
                in_a_row: self.guard.state().in_a_row,
                reason: reason.to_string(),
            }),
            _ => Ok(()),
        }
    }

    /// Keeps what a step's rows hand over to the next one's. After a skipped step, which may have left numbers that are not
    /// finite, rows go on from nothing.
    pub fn carry(&mut self, carried: Option<Carried<B>>, skip: Option<SkipReason>) {
        self.carried = match skip {
            None => carried,
            Some(_) => carried.map(|carried| carried.emptied()),
        };
    }

    /// Updates the weights and their average, of all ranks, and records the update's norms when they are due.
    pub fn update(
        mut self,
        gradients: Gradients<B>,
        lr: f64,
        grad_scale: f32,
    ) -> Result<Self, TrainError> {
        let step = self.progress.step + 1;
        self.progress.updates += 1;
        let update = Update { lr, number: self.progress.updates, grad_scale };
        let due = self.timeline.is_due(self.config.train.norms.every, step);
        let mut norms = due.then(UpdateNorms::new);
        self.model = self.optimiser.step_measured(self.model, gradients, update, norms.as_mut());
        self.model = self.optimiser.share(self.model, self.collective)?;
        if let Some(decay) = self.config.train.ema.0 {
            self.optimiser.update_average(&self.model, decay);
        }
        if let Some(norms) = norms {
            let tokens = self.timeline.tokens(step);
            let squares = squares_of_ranks(norms.squares(), self.collective)?;
            self.recorder.norms(NormsRecord {
                step,
                tokens,
                layers: LayerNorm::of_squares(squares),
            })?;
        }
        Ok(self)
    }

    /// Records the gradient noise scale, if the step measured it.
    pub fn record_noise(
        &mut self,
        pass: &BatchGradients<B>,
        grad_norm: f32,
    ) -> Result<(), TrainError> {
        if !pass.is_measured() {
            return Ok(());
        }
        let norms = MicroBatchNorm::of_ranks(&pass.micro_batch_norms(), self.collective)?;
        let sample = NoiseSample::of(&norms, grad_norm.into());
        let Some(sample) = sample else { return Ok(()) };
        self.progress.noise.push(sample, self.config.train.noise_scale.decay);
        let step = self.progress.step + 1;
        self.recorder.noise(NoiseRecord {
            step,
            tokens: self.timeline.tokens(step),
            noise_scale: self.progress.noise.scale(),
            noise_trace: sample.noise_trace,
            gradient_square: sample.gradient_square,
        })
    }

    /// Validation, samples, a checkpoint and evaluations, when they are due.
    pub fn after_step(
        &mut self,
        console: &mut dyn Console,
        evaluator: &mut dyn Evaluator<B>,
    ) -> Result<(), TrainError> {
        let step = self.progress.step;
        let config = &self.config.train;
        let due = |every: Every| self.timeline.is_due(every, step);
        let validate = due(config.validate.every) || step == self.timeline.total_steps();
        let (sample, mut save) = (due(config.sample.every), due(config.checkpoint.every));
        let save_best = config.checkpoint.best;
        note_checkpoint(self.checkpoints.poll()?, console);
        let is_best = validate && self.validate(console)?;
        if sample && self.world().is_first() {
            self.sample(console)?;
        }
        save |= is_best && save_best;
        if save {
            self.save_checkpoint(console)?;
        }
        if sample || save {
            // The other ranks' next step, whose time is limited, waits for rank 0.
            self.collective.barrier()?;
        }
        self.evaluate(console, evaluator)
    }

    /// Validates, if validation is on. Returns whether the loss is the lowest so far.
    pub fn validate(&mut self, console: &mut dyn Console) -> Result<bool, TrainError> {
        let config = &self.config.train;
        if !config.validate.every.is_on() {
            return Ok(false);
        }
        let validator = self.validator.as_ref();
        let run = |model: &LanguageModel<B>| {
            let scores = validator.map(|x| x.run(model, &self.device, self.collective));
            Ok::<_, TrainError>(scores.transpose()?.flatten())
        };
        let scores = run(&self.model.valid())?;
        let average = match config.ema.0 {
            Some(_) => {
                let model = self.model.valid();
                run(&self.optimiser.shared_average(model, self.collective)?)?
            }
            None => None,
        };
        let is_best = match scores {
            Some(scores) => self.record_validation(scores, average, console)?,
            None => false,
        };
        // All ranks write the checkpoint of the best step.
        Ok(of_first(self.collective, u64::from(is_best))? == 1)
    }

    /// Records a validation, and that of the average if there is one. Returns whether the loss is the lowest so far.
    fn record_validation(
        &mut self,
        scores: ValidationScores,
        average: Option<ValidationScores>,
        console: &mut dyn Console,
    ) -> Result<bool, TrainError> {
        let step = self.progress.step;
        let is_best = self.progress.best.is_none_or(|best| scores.loss < best.validation_loss)
            && scores.loss.is_finite();
        if is_best {
            self.progress.best = Some(Best { step, validation_loss: scores.loss });
        }
        let record = ValidationRecord {
            step,
            tokens: self.tokens(),
            flops: Some(self.recorder.flops(step)),
            validation_loss: scores.loss,
            perplexity: scores.loss.exp(),
            bits_per_byte: scores.bits_per_byte,
            loss_by_position: scores.loss_by_position,
            best_context_loss: scores.best_context_loss,
            probe: scores.probe,
            ema_validation_loss: average.map(|scores| scores.loss),
            seconds: self.recorder.seconds(),
        };
        self.recorder.validation(&record, is_best, console)?;
        self.progress.validation = Some(record);
        Ok(is_best)
    }

    /// Runs the evaluations that are due after this step and have no results yet. One that fails ends the run,
    /// after a checkpoint.
    pub fn evaluate(
        &mut self,
        console: &mut dyn Console,
        evaluator: &mut dyn Evaluator<B>,
    ) -> Result<(), TrainError> {
        let step = self.progress.step;
        let due = self.config.train.evaluations_due(step, &self.timeline);
        let (mut failed, mut any_failed) = (None, false);
        for at in due {
            let model = match eval_weights(&self.config.train.evaluate[at].eval) {
                WeightsSelector::Model => self.model.valid(),
                WeightsSelector::Ema => {
                    self.optimiser.shared_average(self.model.valid(), self.collective)?
                }
            };
            match in_pages::<B, _>(&self.device, || evaluator.evaluate(at, step, &model)) {
                Ok(Some(evaluated)) => self.recorder.evaluation(step, &evaluated, console)?,
                Ok(None) => {}
                Err(source) => failed = Some(TrainError::Evaluation { at, step, source }),
            }
            any_failed = any_of_ranks(self.collective, failed.is_some())?;
            if any_failed {
                break;
            }
        }
        if !any_failed {
            return Ok(());
        }
        self.save_checkpoint(console)?;
        self.wait_for_checkpoint(console)?;
        // The end of another rank would end rank 0 while it writes.
        self.collective.barrier()?;
        Err(failed.unwrap_or_else(|| self.first_failed("an evaluation")))
    }

    /// The error of another rank when something fails on rank 0, which says why.
    fn first_failed(&self, what: &str) -> TrainError {
        let (host, reason) = ("see its output".to_owned(), format!("failed: {what}"));
        CollectiveError::Lost { rank: 0, host, reason }.into()
    }

    /// Samples a continuation of each prompt.
    pub fn sample(&mut self, console: &mut dyn Console) -> Result<(), TrainError> {
        let Some(sampler) = &self.sampler else { return Ok(()) };
        let step = self.progress.step;
        let samples = in_pages::<B, _>(&self.device, || {
            sampler.run(&self.model.valid(), step, &self.device)
        })?;
        self.recorder.samples(step, &samples, console)
    }

    /// Starts to write a checkpoint of this step, if there is none.
    pub fn save_checkpoint(&mut self, console: &mut dyn Console) -> Result<(), TrainError> {
        let step = self.progress.step;
        if self.progress.saved == Some(step) {
            return Ok(());
        }
        let saved = self.optimiser.saved(&self.model.valid(), self.collective)?;
        let carried = match &self.carried {
            Some(carried) => carried.of_ranks(self.collective)?,
            None => None,
        };
        self.progress.saved = Some(step);
        // Rank 0 writes what all ranks have.
        let Some(Saved { weights, optimizer, ema }) = saved else { return Ok(()) };
        // Also while the checkpoint before is written.
        let _write = about_to_write();
        let (config, state) = (self.config.clone(), self.state()?);
        let snapshot = Snapshot { weights, optimizer, ema, carried, config, state };
        let before = self.checkpoints.start(snapshot)?;
        note_checkpoint(before, console);
        Ok(())
    }

    /// Waits until the checkpoint under way is written.
    pub fn wait_for_checkpoint(&mut self, console: &mut dyn Console) -> Result<(), TrainError> {
        note_checkpoint(self.checkpoints.wait()?, console);
        Ok(())
    }

    /// Where the run stands, for a checkpoint.
    fn state(&mut self) -> Result<State, TrainError> {
        let (metrics_bytes, samples_bytes) = self.recorder.sync()?;
        let step = self.progress.step;
        Ok(State {
            step,
            tokens: self.tokens(),
            updates: self.progress.updates,
            seed: self.config.run.seed,
            cursor: self.loader.cursor(self.next_row()),
            guard: self.guard.state().clone(),
            noise: self.progress.noise,
            loss: self.progress.loss,
            best: self.progress.best,
            validation: self.progress.validation.clone(),
            metrics_bytes,
            samples_bytes,
            seconds: self.recorder.seconds(),
            micro_batch: self.stage().micro_batch,
            micro_batches: match &self.stages[..] {
                [_] => vec![],
                stages => stages.iter().map(StageMicroBatch::of).collect(),
            },
            tokenizer: self.tokenizer.clone(),
            model: self.config.model_after(step),
        })
    }

    /// Writes `finished.json`, the marker of a finished run with its results, unless it exists.
    pub fn finish(&self) -> Result<(), TrainError> {
        let folder = self.folder.as_ref().expect("rank 0 has the run's folder");
        if run_folder::finished(folder.path())?.is_some() {
            return Ok(());
        }
        let tokens_per_second = median_throughput(&metrics::read(&folder.metrics())?);
        folder.finish(&Finished {
            step: self.progress.step,
            tokens: self.tokens(),
            loss: self.progress.loss,
            validation: self.progress.validation.clone(),
            skipped: self.guard.state().skipped,
            tokens_per_second,
            seconds: self.recorder.seconds(),
            parameters: self.model.num_params() as u64,
            device: self.device_name.clone(),
        })?;
        Ok(())
    }
}

fn note_checkpoint(written: Option<PathBuf>, console: &mut dyn Console) {
    if let Some(path) = written {
        console.note(&format!("checkpoint {}", path.display()));
    }
}

/// The squares of all ranks' parameters by layer.
fn squares_of_ranks<B: OpBackend>(
    own: LayerSquares,
    collective: &dyn Collective<B>,
) -> Result<LayerSquares, CollectiveError> {
    // JSON has no NaN.
    let bits: Vec<(String, [u64; 3])> =
        own.into_iter().map(|(layer, squares)| (layer, squares.map(f64::to_bits))).collect();
    let message = serde_json::to_vec(&bits).expect("names and numbers have a JSON form");
    let mut layers = LayerSquares::new();
    for message in collective.all_gather(message)? {
        let theirs: Vec<(String, [u64; 3])> =
            serde_json::from_slice(&message).expect("another rank's names and numbers");
        for (layer, squares) in theirs {
            let sums = layers.entry(layer).or_default();
            let squares = squares.map(f64::from_bits);
            sums.iter_mut().zip(squares).for_each(|(sum, square)| *sum += square);
        }
    }
    Ok(layers)
}

/// Median of the steps' throughput; 0 when there are none.
fn median_throughput(records: &[Record]) -> f64 {
    let mut rates: Vec<f64> = records
        .iter()
        .filter_map(|record| match record {
            Record::Step(step) => Some(step.tokens_per_second),
            Record::Validation(_) | Record::Norms(_) | Record::Noise(_) => None,
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

/// Runs `work`, whose tensors have many sizes, between training steps.
fn in_pages<B: OpBackend, R>(device: &B::Device, work: impl FnOnce() -> R) -> R {
    B::set_allocation(device, Allocation::Pages);
    let result = work();
    B::set_allocation(device, Allocation::Exact);
    result
}
