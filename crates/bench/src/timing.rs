//! Timing of calls.

use std::time::Instant;

use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use serde::Serialize;

/// Shortest time of a sample, in seconds, unless one call takes longer.
const SAMPLE: f64 = 0.020;

/// A quantity over several samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The minimum.
    pub min: f64,
    /// The maximum.
    pub max: f64,
}

impl Spread {
    /// The spread of at least one value.
    pub(crate) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len() - 1;
        let median = (sorted[last / 2] + sorted[last.div_ceil(2)]) / 2.0;
        Spread { median, min: sorted[0], max: sorted[last] }
    }
}

/// Times calls on a device.
#[derive(Clone)]
pub struct Clock<B: OpBackend> {
    samples: usize,
    /// Most calls in a sample.
    most_calls: usize,
    /// Reading it back after some arithmetic synchronises with the device.
    probe: Tensor<B, 1>,
}

impl<B: OpBackend> Clock<B> {
    /// A clock that takes `samples` samples.
    pub fn new(samples: usize, device: &B::Device) -> Self {
        Clock { samples, most_calls: 1 << 16, probe: Tensor::ones([1], device) }
    }

    /// Limits samples to this many calls, however short they are.
    pub fn with_max_calls(self, calls: usize) -> Self {
        Clock { most_calls: self.most_calls.min(calls), ..self }
    }

    /// Synchronises with the device.
    pub fn wait(&self) {
        let _ = (self.probe.clone() + 1.0).into_data();
    }

    /// Milliseconds of one call. `call` gets the number of calls before it.
    pub fn time(&self, call: impl FnMut(usize)) -> Spread {
        self.time_after(|_| (), call)
    }

    /// As [`Clock::time`], but before each sample calls `prepare` with the sample's number of calls,
    /// untimed.
    pub fn time_after(
        &self,
        mut prepare: impl FnMut(usize),
        mut call: impl FnMut(usize),
    ) -> Spread {
        let mut done = 0;
        let mut seconds = |calls: usize| {
            prepare(calls);
            self.wait();
            let started = Instant::now();
            for _ in 0..calls {
                call(done);
                done += 1;
            }
            self.wait();
            started.elapsed().as_secs_f64()
        };
        seconds(1); // Compiles kernels and allocates memory.
        let mut calls = 1;
        let mut last = seconds(calls);
        while last < SAMPLE && calls < self.most_calls {
            calls = more_calls(calls, last).min(self.most_calls);
            last = seconds(calls);
        }
        Spread::of((0..self.samples).map(|_| seconds(calls) * 1e3 / calls as f64))
    }
}

/// How many calls should take a sample's time, given that `calls` took only `seconds`.
fn more_calls(calls: usize, seconds: f64) -> usize {
    let wanted = (1.1 * SAMPLE / seconds * calls as f64).ceil() as usize;
    // A first measurement may be far off.
    wanted.clamp(calls + 1, 10 * calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_that_of_the_middle() {
        let spread = Spread::of([3.0, 1.0, 2.0].into_iter());
        assert_eq!((spread.median, spread.min, spread.max), (2.0, 1.0, 3.0));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0].into_iter()).median, 2.5);
        assert_eq!(Spread::of([7.0].into_iter()).median, 7.0);
    }

    #[test]
    fn samples_grow_until_they_are_long_enough() {
        assert_eq!(more_calls(1, 0.012), 2);
        assert_eq!(more_calls(10, 0.0041), 54);
        assert_eq!(more_calls(10, 1e-9), 100);
        assert_eq!(more_calls(10, 0.01999), 12);
    }

    #[test]
    fn samples_stop_growing_at_the_most_calls() {
        let clock = Clock::<longwall_kernels::Cpu>::new(2, &Default::default()).with_max_calls(7);
        let mut sizes = vec![];
        clock.time_after(|calls| sizes.push(calls), |_| ());
        assert!(sizes.ends_with(&[7, 7, 7]) && sizes.iter().all(|calls| *calls <= 7), "{sizes:?}");
    }

    #[test]
    fn a_call_is_counted_once_and_prepared_for() {
        let clock = Clock::<longwall_kernels::Cpu>::new(3, &Default::default());
        let (mut calls, mut prepared, mut samples) = (vec![], 0, 0);
        let spread = clock.time_after(
            |n| {
                prepared += n;
                samples += 1;
            },
            |at| {
                calls.push(at);
                std::thread::sleep(std::time::Duration::from_millis(6));
            },
        );
        assert!((6.0..60.0).contains(&spread.min), "{spread:?}");
        assert!(spread.min <= spread.median && spread.median <= spread.max);
        assert_eq!(calls, (0..prepared).collect::<Vec<_>>());
        assert!(samples >= 5, "a warm-up, a trial and three samples, but {samples}");
    }
}
