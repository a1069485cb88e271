//! The peak rate that model FLOPs utilisation is relative to.
//!
//! A CPU cannot reach a published peak: its cores, its clock and other processes limit it. Relative to the
//! highest rate measured on the machine, utilisation shows how much of a training step is spent outside
//! matrix products. A measurement beside other processes is too low, so the highest one is kept.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use longwall_data::files;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::linear::linear;

/// Side of the square matrices.
const SIZE: usize = 1024;
/// How long to measure.
const BUDGET: Duration = Duration::from_millis(200);
/// Up to this share of the processors' time, other processes do not matter.
const IDLE: f64 = 0.1;

/// The peak FLOP/s of this machine's CPU: the higher of what is measured now and what was measured before,
/// which a file in the user's cache folder keeps. Logs which it is. Takes about 0.2 s.
pub fn of_this_machine<B: OpBackend>(device: &B::Device) -> f64 {
    let busy = OtherProcesses::watch();
    let measured = measure::<B>(device);
    let idle = busy.is_some_and(|busy| busy.share() <= IDLE);
    let path = cache_file();
    let machine = format!("{}, {} threads", processor(), rayon::current_num_threads());
    let kept = path.as_deref().and_then(|path| read(path).get(&machine).copied());
    let gflops = |rate: f64| rate / 1e9;
    match (kept, path) {
        (Some(kept), Some(path)) if kept >= measured => {
            let path = path.display();
            tracing::info!("MFU is relative to {:.0} GFLOP/s, kept in {path}", gflops(kept));
            kept
        }
        (kept, Some(path)) if idle || kept.is_some() => {
            tracing::info!("MFU is relative to {:.0} GFLOP/s, measured now", gflops(measured));
            if let Err(error) = keep(&path, machine, measured) {
                tracing::warn!("cannot keep it in {}: {error}", path.display());
            }
            measured
        }
        _ => {
            tracing::info!(
                "MFU is relative to {:.0} GFLOP/s, measured now beside other processes: it may be too high",
                gflops(measured)
            );
            measured
        }
    }
}

/// Where measured rates are kept.
fn cache_file() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(cache.join("longwall/peak_flops.json"))
}

/// FLOP/s by machine; empty if there is no such file, or it is damaged.
fn read(path: &Path) -> BTreeMap<String, f64> {
    let bytes = fs::read(path).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn keep(path: &Path, machine: String, rate: f64) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    let mut rates = read(path);
    rates.insert(machine, rate);
    files::write_atomically(path, &serde_json::to_vec_pretty(&rates)?)
}

/// The processor's name.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.to_owned())
}

/// The FLOP/s of the fastest of several products of two 1024 × 1024 matrices on the device, through
/// the operation that the model's linear layers use.
pub fn measure<B: OpBackend>(device: &B::Device) -> f64 {
    let x = Tensor::<B, 3>::ones([1, SIZE, SIZE], device);
    let weight = Tensor::<B, 2>::ones([SIZE, SIZE], device);
    let product = || {
        let started = Instant::now();
        let y = linear(x.clone(), weight.clone(), None);
        // Reading one element synchronises with the device.
        let _ = y.slice([0..1, 0..1, 0..1]).into_data();
        started.elapsed()
    };
    product();
    let begin = Instant::now();
    let mut best = product();
    while begin.elapsed() < BUDGET {
        best = best.min(product());
    }
    2.0 * (SIZE as f64).powi(3) / best.as_secs_f64()
}

/// Watches how much of the processors' time other processes take, in the system's ticks.
struct OtherProcesses {
    /// Ticks of all processors, of which busy, and those of this process.
    start: [u64; 3],
}

impl OtherProcesses {
    fn watch() -> Option<Self> {
        Some(OtherProcesses { start: Self::ticks()? })
    }

    fn ticks() -> Option<[u64; 3]> {
        let all = fs::read_to_string("/proc/stat").ok()?;
        let own = fs::read_to_string("/proc/self/stat").ok()?;
        let (total, busy) = ticks_of_all(&all)?;
        Some([total, busy, ticks_of_process(&own)?])
    }

    /// The share of the time since the start, 0 to 1; 1 if unknown.
    fn share(&self) -> f64 {
        let Some(now) = Self::ticks() else { return 1.0 };
        let [total, busy, own] = [0, 1, 2].map(|at| now[at].saturating_sub(self.start[at]));
        if total == 0 { 1.0 } else { busy.saturating_sub(own) as f64 / total as f64 }
    }
}

/// All ticks and busy ones, from `/proc/stat`: its first line counts user, nice, system, idle, iowait, irq,
/// softirq and steal.
fn ticks_of_all(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_whitespace().take(8).filter_map(|n| n.parse().ok()).collect();
    let idle = ticks.get(3)? + ticks.get(4)?;
    let total: u64 = ticks.iter().sum();
    Some((total, total - idle))
}

/// Ticks of a process, from `/proc/PID/stat`: fields 14 and 15, user and system. The second field is a name
/// in parentheses, which may contain spaces.
fn ticks_of_process(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_reaches_between_one_and_a_million_gigaflops() {
        let peak = measure::<longwall_kernels::Cpu>(&Default::default());
        assert!((1e9..1e15).contains(&peak), "{peak}");
    }

    #[test]
    fn rates_are_kept_by_machine() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("longwall/peak_flops.json");
        assert!(read(&path).is_empty());
        keep(&path, "one, 2 threads".into(), 2e11).unwrap();
        keep(&path, "two, 2 threads".into(), 3e11).unwrap();
        keep(&path, "one, 2 threads".into(), 4e11).unwrap();
        let expected = [("one, 2 threads".to_owned(), 4e11), ("two, 2 threads".to_owned(), 3e11)];
        assert_eq!(read(&path), BTreeMap::from(expected));
        fs::write(&path, "{").unwrap();
        assert!(read(&path).is_empty());
    }

    #[test]
    fn ticks_are_read() {
        let stat = "cpu  10 1 5 100 20 2 3 4 7 8\ncpu0 1 2 3 4\n";
        assert_eq!(ticks_of_all(stat), Some((145, 25)));
        let own = "42 (a (name) with) S 1 1 1 0 -1 4194304 100 0 0 0 33 9 0 0 20 0";
        assert_eq!(ticks_of_process(own), Some(42));
        if cfg!(target_os = "linux") {
            let share = OtherProcesses::watch().unwrap().share();
            assert!((0.0..=1.0).contains(&share), "{share}");
        }
    }
}
