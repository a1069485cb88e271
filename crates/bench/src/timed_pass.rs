//! A timed pass: its time, its work and its rate.

use serde::Serialize;

use crate::ceiling::Ceiling;
use crate::timing::Spread;

/// Work of one call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Floating-point operations.
    Flops(f64),
    /// Bytes read or written.
    Bytes(f64),
}

/// One timed pass.
#[derive(Debug, Serialize)]
pub struct TimedPass {
    /// `forward`, `forward_backward`, …
    pub pass: &'static str,
    /// Per call.
    pub milliseconds: Spread,
    /// Per call.
    #[serde(flatten)]
    pub work: Work,
    /// FLOPs or bytes per second, from the median time.
    pub per_second: f64,
    /// The rate as a share of the measured ceiling.
    pub ceiling_share: f64,
}

impl TimedPass {
    /// A pass that did `work` in `milliseconds`.
    pub(crate) fn new(
        pass: &'static str,
        milliseconds: Spread,
        work: Work,
        ceiling: &Ceiling,
    ) -> Self {
        let (amount, most) = match work {
            Work::Flops(flops) => (flops, ceiling.flops_per_second),
            Work::Bytes(bytes) => (bytes, ceiling.bytes_per_second),
        };
        let per_second = amount / (milliseconds.median / 1e3);
        let ceiling_share = per_second / most.expect("the ceiling of this work is measured");
        TimedPass { pass, milliseconds, work, per_second, ceiling_share }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_share_of_its_own_ceiling() {
        let ceiling = Ceiling { flops_per_second: Some(1e12), bytes_per_second: Some(4e9) };
        let two = Spread { median: 2.0, min: 1.0, max: 3.0 };
        let pass = TimedPass::new("forward", two, Work::Flops(1e9), &ceiling);
        assert_eq!((pass.per_second, pass.ceiling_share), (5e11, 0.5));
        let pass = TimedPass::new("forward", two, Work::Bytes(2e6), &ceiling);
        assert_eq!((pass.per_second, pass.ceiling_share), (1e9, 0.25));
        let json = serde_json::to_value(&pass).unwrap();
        assert_eq!(json["bytes"], 2e6);
        assert_eq!(json["milliseconds"]["min"], 1.0);
    }
}
