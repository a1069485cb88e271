//! How much memory is left, and how a GPU's is allocated.

use std::fs;
use std::path::Path;

use cubecl::MemoryAllocationMode;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::Runtime;
use cudarc::driver::result;

/// How a GPU's tensors get their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// As parts of large pages, up to a quarter of the memory each: where sizes vary, as in generation. The default.
    Pages,
    /// Each of exactly its size, kept for the next tensor of that size: where few sizes repeat, as in training steps,
    /// which then take up to a third less memory.
    Exact,
}

/// As [`OpBackend::set_allocation`](crate::backend::OpBackend::set_allocation).
pub fn set_allocation(device: &CudaDevice, allocation: Allocation) {
    let client = CudaRuntime::client(device);
    client.memory_cleanup();
    let mode = match allocation {
        Allocation::Pages => MemoryAllocationMode::Auto,
        Allocation::Exact => MemoryAllocationMode::Persistent,
    };
    // SAFETY: the mode is that of this thread's stream, and its tensors go back to the memory that they came from.
    unsafe { client.allocation_mode(mode) };
}

/// Bytes of GPU memory that this process can still take: what the driver has left, and what is cached for
/// later tensors. `None` if the driver does not report it.
pub fn of_gpu(device: &CudaDevice) -> Option<u64> {
    let usage = CudaRuntime::client(device).memory_usage().ok()?;
    let gpu = result::device::get(device.index as i32).ok()?;
    // SAFETY: the client above keeps the GPU's primary context alive; it is released as often as retained.
    let free = unsafe {
        let context = result::primary_ctx::retain(gpu).ok()?;
        let asked = result::ctx::set_current(context).and_then(|()| result::mem_get_info());
        result::primary_ctx::release(gpu).ok()?;
        asked.ok()?.0 as u64
    };
    Some(free + usage.bytes_reserved.saturating_sub(usage.bytes_in_use))
}

/// Bytes of main memory that this process can still take: what the system reports as available, or less if
/// a control group limits the process (as containers and job schedulers do). `None` where the system does
/// not report it.
pub fn of_machine() -> Option<u64> {
    available_in(Path::new("/"))
}

/// As [`of_machine`], of the system whose `/proc` and `/sys` are in `root`.
fn available_in(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let left = left_in_groups(root).into_iter().chain(left_in_first_version(root)).min();
    Some(left.map_or(1024 * kilobytes, |left| left.min(1024 * kilobytes)))
}

/// What each control group (version 2) that holds this process leaves of its limit.
fn left_in_groups(root: &Path) -> Vec<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let Some(own) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return vec![];
    };
    // In a container the path may be one of the host, which the container does not see.
    let top = root.join("sys/fs/cgroup");
    let own = top.join(own);
    let groups = own.ancestors().take_while(|path| path.starts_with(&top));
    groups
        .filter_map(|group| left(group, "memory.max", "memory.current", "inactive_file"))
        .collect()
}

/// What version 1 of control groups leaves of its limit.
fn left_in_first_version(root: &Path) -> Option<u64> {
    let group = root.join("sys/fs/cgroup/memory");
    left(&group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
}

/// The limit of a group less what is used, not counting cached files, which the system drops first.
fn left(group: &Path, limit: &str, used: &str, cached: &str) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let statistics = read("memory.stat").unwrap_or_default();
    let cached = statistics.lines().find_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        (name == cached).then(|| bytes.trim().parse::<u64>().ok())?
    });
    let used = number(used)?.saturating_sub(cached.unwrap_or(0));
    Some(number(limit)?.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A system's files, by path.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:   8000 kB\n");

    #[test]
    fn without_limits_it_is_what_the_system_reports() {
        assert_eq!(available_in(system(&[MEMINFO]).path()), Some(8_192_000));
        assert_eq!(available_in(system(&[]).path()), None);
        let unlimited = [
            MEMINFO,
            ("proc/self/cgroup", "0::/job\n"),
            ("sys/fs/cgroup/job/memory.max", "max\n"),
            ("sys/fs/cgroup/job/memory.current", "100\n"),
        ];
        assert_eq!(available_in(system(&unlimited).path()), Some(8_192_000));
    }

    #[test]
    fn the_tightest_group_limits_it() {
        let limited = [
            MEMINFO,
            ("proc/self/cgroup", "0::/all/job\n"),
            ("sys/fs/cgroup/all/memory.max", "7000000\n"),
            ("sys/fs/cgroup/all/memory.current", "1000000\n"),
            ("sys/fs/cgroup/all/job/memory.max", "5000000\n"),
            ("sys/fs/cgroup/all/job/memory.current", "3000000\n"),
            ("sys/fs/cgroup/all/job/memory.stat", "anon 2500000\ninactive_file 400000\n"),
        ];
        assert_eq!(available_in(system(&limited).path()), Some(2_400_000));
        let first_version = [
            MEMINFO,
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "6000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1500000\n"),
        ];
        assert_eq!(available_in(system(&first_version).path()), Some(4_500_000));
    }

    #[test]
    fn this_machine_reports_its_memory() {
        if cfg!(target_os = "linux") {
            assert!(of_machine().is_some_and(|bytes| bytes > 1 << 20));
        }
    }
}
