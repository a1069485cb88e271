//! The results of a benchmark, as JSON or as a table.

use std::fmt::{self, Display};

use longwall_model::Precision;
use serde::Serialize;

use crate::ceiling::Ceiling;
use crate::setup::Setup;
use crate::timed_pass::{TimedPass, Work};

/// The results of one benchmark. It serialises as JSON and displays as a table.
#[derive(Serialize)]
pub struct Report<R> {
    device: String,
    precision: Precision,
    samples: usize,
    ceiling: Ceiling,
    results: Vec<R>,
}

/// One row of a benchmark's results.
pub trait Measured: Serialize {
    /// Titles of the columns that identify it.
    const COLUMNS: &'static [&'static str];

    /// The text in these columns.
    fn labels(&self) -> Vec<String>;

    /// The timed passes.
    fn passes(&self) -> &[TimedPass];

    /// A remark at the end of the last pass.
    fn remark(&self) -> String {
        String::new()
    }
}

impl<R: Measured> Report<R> {
    /// The report of a run with these settings.
    pub(crate) fn new(setup: &Setup, ceiling: Ceiling, results: Vec<R>) -> Self {
        let Setup { compute, samples } = setup;
        let (device, precision) = (compute.device.to_string(), compute.precision);
        Report { device, precision, samples: *samples, ceiling, results }
    }

    fn table(&self) -> Vec<String> {
        let head = ["pass", "ms", "min", "max", "rate", "of ceiling"];
        let head = R::COLUMNS.iter().chain(&head).map(|text| (*text).to_owned());
        let mut rows: Vec<Vec<String>> = vec![head.chain([String::new()]).collect()];
        for result in &self.results {
            let passes = result.passes();
            for (at, pass) in passes.iter().enumerate() {
                let remark = if at + 1 == passes.len() { result.remark() } else { String::new() };
                let cells = result.labels().into_iter().chain(cells(pass)).chain([remark]);
                rows.push(cells.collect());
            }
        }
        aligned(&rows, R::COLUMNS.len() + 1)
    }
}

impl<R: Measured> Display for Report<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "device     {}", self.device)?;
        writeln!(f, "precision  {}", self.precision)?;
        let ceilings = [
            self.ceiling.flops_per_second.map(|most| rate(most, "FLOP/s")),
            self.ceiling.bytes_per_second.map(|most| rate(most, "B/s")),
        ];
        let ceilings: Vec<_> = ceilings.into_iter().flatten().collect();
        writeln!(f, "ceiling    {}, measured", ceilings.join(" and "))?;
        writeln!(f, "samples    {}", self.samples)?;
        f.write_str(&self.table().join("\n"))
    }
}

/// A pass as cells of a table.
fn cells(pass: &TimedPass) -> [String; 6] {
    let unit = match pass.work {
        Work::Flops(_) => "FLOP/s",
        Work::Bytes(_) => "B/s",
    };
    let time = &pass.milliseconds;
    let name = pass.pass.replace('_', " + ");
    let share = format!("{:.1} %", pass.ceiling_share * 100.0);
    [name, milliseconds(time.median), milliseconds(time.min), milliseconds(time.max)]
        .into_iter()
        .chain([rate(pass.per_second, unit), share])
        .collect::<Vec<_>>()
        .try_into()
        .expect("six cells")
}

/// About four digits.
fn milliseconds(ms: f64) -> String {
    match ms {
        ..1.0 => format!("{ms:.4}"),
        ..10.0 => format!("{ms:.3}"),
        ..100.0 => format!("{ms:.2}"),
        _ => format!("{ms:.1}"),
    }
}

/// A rate with a decimal prefix: `775.2 TFLOP/s`.
fn rate(per_second: f64, unit: &str) -> String {
    let (scale, prefix) = if per_second >= 1e12 { (1e12, "T") } else { (1e9, "G") };
    let scaled = per_second / scale;
    let digits = if scaled < 10.0 { 2 } else { 1 };
    format!("{scaled:.digits$} {prefix}{unit}")
}

/// Rows with aligned columns: the first `texts` and the last to the left, numbers to the right.
fn aligned(rows: &[Vec<String>], texts: usize) -> Vec<String> {
    let columns = rows[0].len();
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, &width))| {
            if at < texts || at + 1 == columns {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing::Spread;
    use longwall_kernels::device::Device;
    use longwall_train::device::Compute;

    #[derive(Serialize)]
    struct One(Vec<TimedPass>);

    impl Measured for One {
        const COLUMNS: &'static [&'static str] = &["op"];

        fn labels(&self) -> Vec<String> {
            vec!["gelu".to_owned()]
        }

        fn passes(&self) -> &[TimedPass] {
            &self.0
        }

        fn remark(&self) -> String {
            "3 GB".to_owned()
        }
    }

    #[test]
    fn a_table_has_a_line_a_pass() {
        let compute = Compute { device: Device::Cpu, precision: Precision::F32 };
        let setup = Setup { compute, samples: 2 };
        let ceiling = Ceiling { flops_per_second: Some(2e12), bytes_per_second: Some(1e12) };
        let time = |median| Spread { median, min: 0.5, max: 120.25 };
        let passes = vec![
            TimedPass::new("forward", time(10.0), Work::Flops(5e9), &ceiling),
            TimedPass::new("forward_backward", time(2.0), Work::Bytes(2.4e9), &ceiling),
        ];
        let report = Report::new(&setup, ceiling, vec![One(passes)]);
        assert_eq!(
            report.table(),
            [
                "op    pass                   ms     min    max           rate  of ceiling",
                "gelu  forward             10.00  0.5000  120.2  500.0 GFLOP/s      25.0 %",
                "gelu  forward + backward  2.000  0.5000  120.2      1.20 TB/s     120.0 %  3 GB",
            ]
        );
    }
}
