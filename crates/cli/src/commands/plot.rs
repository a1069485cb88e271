//! `longwall plot RUN…`.

mod bench;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use clap::{ArgGroup, ValueEnum};
use longwall_eval::{Curve, XAxis, plot_losses, plot_scalar};
use longwall_train::metrics::{self, Record};
use longwall_train::scalars;

use crate::output::outln;

/// The horizontal axis.
#[derive(Clone, Copy, ValueEnum)]
pub enum Axis {
    /// Optimiser steps
    Steps,
    /// Training tokens
    Tokens,
    /// FLOPs of training
    Flops,
    /// Seconds of training
    Seconds,
}

/// Arguments of `longwall plot`.
#[derive(clap::Args)]
#[command(group(ArgGroup::new("drawn").required(true).args(["runs", "bench"])))]
pub struct Args {
    /// Folders of runs
    runs: Vec<PathBuf>,

    /// Draw reports of `longwall bench kernels --json` over the length instead: a line per kind and size
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["x", "smooth", "max_loss"])]
    bench: Vec<PathBuf>,

    /// The picture, .svg or .png; by default loss.svg in the first run's folder, or with --y the scalar's name, such as
    /// train_grad_norm.svg; with --bench beside the first report
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// The horizontal axis
    #[arg(long, default_value = "tokens")]
    x: Axis,

    /// Draw another scalar than the losses, by its column in `longwall log export --csv`: `train/grad_norm`,
    /// `gradient_noise/scale`; with --bench a pass (`forward`, or by default `forward_backward`), or a metric of the
    /// report's `probe`, such as the fraction of weights that are not zero
    #[arg(long, value_name = "SCALAR")]
    y: Option<String>,

    /// Smoothing of the training loss, or of the scalar: weight of the past, 0 to below 1
    #[arg(long, default_value_t = 0.9, value_name = "WEIGHT")]
    smooth: f64,

    /// Leave out values above this, so that the ends of the curves fill the plot
    #[arg(long, value_name = "LOSS")]
    max_loss: Option<f64>,
}

/// Draws the curves and prints the file's name.
pub fn run(args: Args) -> Result<()> {
    if !args.bench.is_empty() {
        let out = bench::draw(&args.bench, args.y.as_deref(), args.out)?;
        return outln!("{}", out.display());
    }
    if !(0.0..1.0).contains(&args.smooth) {
        bail!("--smooth is {}; allowed: 0 to below 1\n  hint: 0.9 is the default", args.smooth);
    }
    if let Some(limit) = args.max_loss.filter(|limit| !(limit.is_finite() && *limit > 0.0)) {
        bail!("--max-loss is {limit}; allowed: above 0\n  hint: leave it out to see every loss");
    }
    let name = args.y.as_ref().map_or("loss".to_owned(), |tag| tag.replace('/', "_"));
    let out = args.out.unwrap_or_else(|| args.runs[0].join(format!("{name}.svg")));
    match &args.y {
        None => draw(&args.runs, &out, args.x, args.smooth, args.max_loss)?,
        Some(tag) => draw_scalar(&args.runs, tag, &out, args.x, args.smooth, args.max_loss)?,
    }
    outln!("{}", out.display())
}

/// The loss of one run over tokens, at the default smoothing, as `loss.svg` in its folder.
pub fn draw_run(run: &Path) -> Result<PathBuf> {
    let out = run.join("loss.svg");
    draw(&[run.to_owned()], &out, Axis::Tokens, 0.9, None)?;
    Ok(out)
}

fn draw(
    runs: &[PathBuf],
    out: &Path,
    axis: Axis,
    smooth: f64,
    max_loss: Option<f64>,
) -> Result<()> {
    let curves = runs.iter().map(|run| curve(run, axis)).collect::<Result<Vec<_>>>()?;
    Ok(plot_losses(&curves, axis.into(), out, smooth, max_loss)?)
}

impl From<Axis> for XAxis {
    fn from(axis: Axis) -> Self {
        match axis {
            Axis::Steps => XAxis::Steps,
            Axis::Tokens => XAxis::Tokens,
            Axis::Flops => XAxis::Flops,
            Axis::Seconds => XAxis::Seconds,
        }
    }
}

fn draw_scalar(
    runs: &[PathBuf],
    tag: &str,
    out: &Path,
    axis: Axis,
    smooth: f64,
    most: Option<f64>,
) -> Result<()> {
    let curves: Vec<_> =
        runs.iter().map(|run| scalar(run, tag, axis)).collect::<Result<Vec<_>>>()?;
    Ok(plot_scalar(&curves, tag, axis.into(), out, smooth, most)?)
}

/// The scalar `tag` of a run, by its name. An error if no step has it.
fn scalar(run: &Path, tag: &str, axis: Axis) -> Result<(String, Vec<(f64, f64)>)> {
    let records = metrics::read(&run.join("metrics.jsonl"))?;
    let all = scalars::by_step(&records);
    let known: Vec<&str> = all.iter().map(|(tag, _)| tag.as_str()).collect();
    let Some((_, points)) = all.iter().find(|(name, _)| name == tag) else {
        bail!(
            "{} has no scalar {tag}; it has: {}\n  hint: name one of these; gradient_noise needs train.noise_scale, \
             layers need train.norms",
            run.display(),
            known.join(", ")
        );
    };
    // Not every record has FLOPs and seconds: those of its step do.
    let steps = records.iter().filter_map(|record| match record {
        Record::Step(r) => Some((r.step, (r.tokens, r.flops, r.seconds))),
        _ => None,
    });
    let steps: HashMap<u64, (u64, Option<f64>, f64)> = steps.collect();
    let place = |(step, value): &(u64, f64)| {
        let (tokens, flops, seconds) = *steps.get(step)?;
        let x = match axis {
            Axis::Steps => Ok(*step as f64),
            Axis::Tokens => Ok(tokens as f64),
            Axis::Flops => flops.ok_or_else(|| no_flops(run)),
            Axis::Seconds => Ok(seconds),
        };
        Some(x.map(|x| (x, *value)))
    };
    Ok((name_of(run), points.iter().filter_map(place).collect::<Result<_>>()?))
}

fn name_of(run: &Path) -> String {
    run.file_name().map_or_else(|| run.display().to_string(), |name| name.to_string_lossy().into())
}

/// The losses of a run. An error if it has no finished step.
pub fn curve(run: &Path, axis: Axis) -> Result<Curve> {
    let mut curve = Curve { name: name_of(run), train: vec![], validation: vec![] };
    let at = |step: u64, tokens: u64, flops: Option<f64>, seconds: f64| match axis {
        Axis::Steps => Ok(step as f64),
        Axis::Tokens => Ok(tokens as f64),
        Axis::Flops => flops.ok_or_else(|| no_flops(run)),
        Axis::Seconds => Ok(seconds),
    };
    for record in metrics::read(&run.join("metrics.jsonl"))? {
        match record {
            Record::Step(r) => {
                if let Some(loss) = r.loss.filter(|_| !r.skipped) {
                    let x = at(r.step, r.tokens, r.flops, r.seconds)?;
                    curve.train.push((x, f64::from(loss)));
                }
            }
            Record::Validation(r) => {
                let x = at(r.step, r.tokens, r.flops, r.seconds)?;
                curve.validation.push((x, r.validation_loss));
            }
            Record::Norms(_) | Record::Noise(_) => {}
        }
    }
    if curve.train.is_empty() {
        bail!(
            "{} has no finished step in metrics.jsonl\n  hint: give the folder of a run that has trained",
            run.display()
        );
    }
    Ok(curve)
}

fn no_flops(run: &Path) -> anyhow::Error {
    anyhow!(
        "{} has no FLOPs in metrics.jsonl: an earlier version of Longwall wrote it\n  hint: plot it with --x tokens",
        run.display()
    )
}
