//! Matrix products of linear layers, forward and backward.

use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::{DeviceKind, OnDevice};
use longwall_kernels::ops::linear::Linear;
use serde::Serialize;

use crate::ceiling::Ceiling;
use crate::error::BenchError;
use crate::inputs::{copies, copies_on, copy, random};
use crate::memory::Need;
use crate::progress::Progress;
use crate::report::{Measured, Report};
use crate::setup::{self, Setup, shape_text};
use crate::timed_pass::{TimedPass, Work};
use crate::timing::Clock;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tokens, outputs and inputs of a linear layer. If empty: the layers of GPT-2 124M at 65,536
    /// tokens on CUDA, and a small model's on the CPU.
    pub shapes: Vec<[usize; 3]>,
    /// Device, precision and samples.
    pub common: setup::Options,
}

/// The layers of a GPT-2-like model: name, tokens, outputs, inputs.
fn layers(tokens: usize, width: usize, vocab: usize) -> Vec<(&'static str, [usize; 3])> {
    vec![
        ("qkv", [tokens, 3 * width, width]),
        ("projection", [tokens, width, width]),
        ("mlp up", [tokens, 4 * width, width]),
        ("mlp down", [tokens, width, 4 * width]),
        ("vocabulary", [tokens, vocab, width]),
    ]
}

/// The measurement of one layer.
#[derive(Debug, Serialize)]
pub struct Case {
    layer: &'static str,
    /// Tokens, outputs, inputs.
    shape: [usize; 3],
    passes: [TimedPass; 3],
}

impl Measured for Case {
    const COLUMNS: &'static [&'static str] = &["layer", "shape"];

    fn labels(&self) -> Vec<String> {
        vec![self.layer.to_owned(), format!("{:?}", self.shape)]
    }

    fn passes(&self) -> &[TimedPass] {
        &self.passes
    }
}

/// Times the products of each layer.
///
/// # Errors
/// When the device does not exist, or cannot hold a layer.
pub fn run(options: &Options, progress: &dyn Progress) -> Result<Report<Case>, BenchError> {
    let setup = options.common.open()?;
    let shapes = if options.shapes.is_empty() {
        setup.choose(layers(65_536, 768, 50_304), layers(1024, 256, 4096))
    } else {
        options.shapes.iter().map(|shape| ("linear", *shape)).collect()
    };
    for (_, shape) in &shapes {
        let asked = format!("--shape {}", shape_text(shape));
        setup.check(&asked, &need(*shape), "choose a smaller --shape")?;
    }
    let (ceiling, results) = setup.compute.run(Job { setup: &setup, shapes, progress });
    Ok(Report::new(&setup, ceiling, results))
}

/// Memory for the copies of x, W and dy, and for a pass's result; with the number of copies on the CPU,
/// where the total matters.
fn need(shape: [usize; 3]) -> Need {
    let [m, n, k] = shape.map(|size| size as u128);
    let matrices = [m * k, n * k, m * n];
    let largest = matrices.into_iter().max().expect("three matrices");
    let read = matrices.iter().sum::<u128>() - largest;
    let copies = copies_on(DeviceKind::Cpu, u64::try_from(4 * read).unwrap_or(u64::MAX));
    Need::of(std::iter::repeat_n(matrices, copies).flatten().chain([largest]))
}

/// The work on the device.
struct Job<'a> {
    setup: &'a Setup,
    shapes: Vec<(&'static str, [usize; 3])>,
    progress: &'a dyn Progress,
}

impl OnDevice for Job<'_> {
    type Output = (Ceiling, Vec<Case>);

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        B::seed(&device, 0);
        let ceiling = Ceiling::of_flops::<B>(self.setup, &device);
        let clock = self.setup.clock::<B>(&device);
        self.progress.start(self.shapes.len(), "");
        let mut cases = vec![];
        for &(layer, shape) in &self.shapes {
            self.progress.measuring(&format!("{layer} {shape:?}"));
            B::memory_cleanup(&device);
            let passes = self.passes(shape, &ceiling, &clock, &device);
            cases.push(Case { layer, shape, passes });
            self.progress.done();
        }
        self.progress.finish();
        (ceiling, cases)
    }
}

impl Job<'_> {
    /// y = x Wᵀ, dx = dy W and dW = dyᵀ x, as a layer computes them.
    fn passes<B: OpBackend>(
        &self,
        [m, n, k]: [usize; 3],
        ceiling: &Ceiling,
        clock: &Clock<B>,
        device: &B::Device,
    ) -> [TimedPass; 3] {
        let dtype = self.setup.dtype();
        let deviation = 1.0 / (k as f64).sqrt();
        let x = random::<B>(&[1, m, k], 1.0, dtype, device);
        let weight = random::<B>(&[n, k], deviation, dtype, device);
        // Also normal. Drawn as a product, because it may have more elements than one random draw allows.
        let dy = B::run::<Linear, 2>(&Linear, [x.clone(), weight.clone()], vec![]);
        // One of the passes reads only the two smallest matrices.
        let elements = [m * k, n * k, m * n];
        let read = elements.iter().sum::<usize>() - elements.iter().max().expect("three");
        let copies = copies::<B>((read * dtype.size()) as u64);
        let mut sets = vec![(x, weight, dy)];
        for _ in 1..copies {
            let (x, weight, dy) = &sets[0];
            sets.push((copy::<B>(x), copy::<B>(weight), copy::<B>(dy)));
        }
        let forward = clock.time(|at| {
            let (x, weight, _) = &sets[at % copies];
            B::run::<Linear, 2>(&Linear, [x.clone(), weight.clone()], vec![]);
        });
        let backward = |needs: [bool; 2]| {
            let save = |(x, weight, dy): &(_, _, _)| {
                let inputs = [Clone::clone(x), Clone::clone(weight)];
                let forward = B::forward::<Linear, 2>(&Linear, &inputs, &[], needs);
                (
                    forward.expect("every device has a kernel for linear layers").saved,
                    Clone::clone(dy),
                )
            };
            let saved: Vec<(Vec<_>, _)> = sets.iter().map(save).collect();
            clock.time(|at| {
                let (saved, dy) = saved[at % copies].clone();
                B::backward::<Linear, 2>(&Linear, saved, &[], dy, needs, &mut [None, None]);
            })
        };
        let (dx, dw) = (backward([true, false]), backward([false, true]));
        let flops = Work::Flops(2.0 * m as f64 * n as f64 * k as f64);
        [("forward", forward), ("dx", dx), ("dw", dw)]
            .map(|(pass, time)| TimedPass::new(pass, time, flops, ceiling))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_three_matrices_and_a_result_are_held() {
        let [m, n, k] = [5000, 4000, 3000];
        let large = [m * k, n * k, m * n, m * n]; // Over 64 MB are read.
        assert_eq!(need([5000, 4000, 3000]), Need::of(large));
        let [x, weight, dy] = [1 << 20, 1 << 10, 1 << 20];
        let one = [x, weight, dy]; // 4 MB and a little are read.
        assert_eq!(
            need([1 << 15, 1 << 5, 1 << 5]),
            Need::of([one; 16].concat().into_iter().chain([x]))
        );
    }
}
