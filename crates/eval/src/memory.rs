//! The memory that a model's calls need at least, and the memory that is free.

use std::fs;
use std::path::Path;

use longwall_model::config::MlpKind;
use longwall_model::{ModelConfig, Precision, cost};

/// A lower bound of the memory that calls of a model need, besides its weights.
#[derive(Clone, Debug)]
pub struct CallMemory {
    config: ModelConfig,
    bytes_per_element: u64,
}

impl CallMemory {
    /// For a model of this configuration and number format.
    pub fn new(config: &ModelConfig, precision: Precision) -> Self {
        let bytes_per_element = if precision == Precision::Bf16 { 2 } else { 4 };
        CallMemory { config: config.clone(), bytes_per_element }
    }

    /// The least bytes for `rows` sequences of `tokens` tokens, read in one forward pass.
    ///
    /// Per token it counts the residual stream, `width`, and the largest tensors that stand beside it in a
    /// block: the MLP's hidden layer, or q, k and v. A call that generates also keeps the decoding state
    /// of every layer: keys and values, or a recurrent state. Scores, norms and copies come on top.
    pub fn least(&self, rows: usize, tokens: usize, generates: bool) -> u64 {
        let config = &self.config;
        let hidden = config.mlp_hidden() * if config.mlp == MlpKind::Swiglu { 2 } else { 1 };
        let heads = |layer| {
            let shape = config.attention_shape(layer);
            (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        };
        let widest = (0..config.layers).map(heads).max().unwrap_or(0).max(hidden);
        let activations = (tokens as u64).saturating_mul((config.width + widest) as u64);
        let state = if generates { cost::state_elements(config, tokens) } else { 0 };
        let row = activations.saturating_add(state).saturating_mul(self.bytes_per_element);
        row.saturating_mul(rows as u64)
    }
}

/// The memory in bytes that this process can still take: what the system has available, or what is left
/// of the limits of its control groups, if that is less. None where neither can be read.
///
/// A group's page cache that was not used lately counts as free: the system reclaims it.
pub fn available_memory() -> Option<u64> {
    available_below(Path::new("/"))
}

/// [`available_memory`] with the files of `/proc` and `/sys` below `root`.
fn available_below(root: &Path) -> Option<u64> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok();
    let kibibytes = meminfo.and_then(|text| field(&text, "MemAvailable:"));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    // Version 2: one line, `0::/path`. In a container the path may be that outside it, and only the
    // root group can be read.
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("");
    let folders = Path::new(group).ancestors().map(|path| root.join("sys/fs/cgroup").join(path));
    kibibytes.map(|k| k * 1024).into_iter().chain(folders.filter_map(|f| left_in_group(&f))).min()
}

/// What is left of a control group's limit; none without a limit.
fn left_in_group(folder: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    // `max` for no limit is no number.
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    let cache = read("memory.stat").and_then(|text| field(&text, "inactive_file")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// The number after `name` in a text of one field a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut words = text.lines().map(str::split_whitespace);
    words.find_map(|mut line| (line.next() == Some(name)).then(|| line.next()?.parse().ok())?)
}

/// Bytes as GiB, or MiB below one GiB.
pub(crate) fn show_bytes(bytes: u64) -> String {
    let mebibytes = bytes as f64 / f64::from(1 << 20);
    if mebibytes < 1024.0 {
        format!("{mebibytes:.1} MiB")
    } else {
        format!("{:.1} GiB", mebibytes / 1024.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root folder with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:  8000 kB\nMemFree:  1000 kB\nMemAvailable:  4000 kB\n");

    fn available(files: &[(&str, &str)]) -> Option<u64> {
        available_below(root(files).path())
    }

    #[test]
    fn without_limits_the_system_says_what_is_available() {
        assert_eq!(available(&[MEMINFO]), Some(4000 * 1024));
        let unlimited = [
            MEMINFO,
            ("proc/self/cgroup", "0::/user\n"),
            ("sys/fs/cgroup/user/memory.max", "max\n"),
            ("sys/fs/cgroup/user/memory.current", "5\n"),
        ];
        assert_eq!(available(&unlimited), Some(4000 * 1024));
        assert_eq!(available(&[]), None);
    }

    #[test]
    fn the_tightest_limit_on_the_way_to_the_root_counts() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "1:cpu:/elsewhere\n0::/user/job\n"),
            ("sys/fs/cgroup/user/job/memory.max", "3000000\n"),
            ("sys/fs/cgroup/user/job/memory.current", "1000000\n"),
            ("sys/fs/cgroup/user/memory.max", "2500000\n"),
            ("sys/fs/cgroup/user/memory.current", "1400000\n"),
            ("sys/fs/cgroup/user/memory.stat", "anon 7\ninactive_file 400000\nactive_file 9\n"),
        ];
        assert_eq!(available(&files), Some(1_500_000));
    }

    #[test]
    fn a_container_that_cannot_see_its_own_group_reads_the_root_group() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/not/to/be/seen\n"),
            ("sys/fs/cgroup/memory.max", "1000000\n"),
            ("sys/fs/cgroup/memory.current", "2000000\n"),
        ];
        assert_eq!(available(&files), Some(0));
    }

    #[test]
    fn this_machine_has_memory() {
        if cfg!(target_os = "linux") {
            assert!(available_memory().unwrap() > 1 << 20);
        }
    }

    #[test]
    fn the_bound_of_a_call_by_hand() {
        let mut config: ModelConfig =
            toml::from_str("layers = 2\nwidth = 64\nheads = 4\nattention = { kind = \"rope\" }")
                .unwrap();
        config.mlp = MlpKind::Swiglu;
        let hidden = 2 * config.mlp_hidden() as u64;
        let scored = CallMemory::new(&config, Precision::F32).least(3, 1000, false);
        assert_eq!(scored, 3 * 1000 * (64 + hidden) * 4);
        // Keys and values of two layers.
        let generated = CallMemory::new(&config, Precision::Bf16).least(3, 1000, true);
        assert_eq!(generated, 3 * 1000 * (64 + hidden + 2 * 2 * 64) * 2);
        let endless =
            CallMemory::new(&config, Precision::F32).least(usize::MAX, usize::MAX / 2, false);
        assert_eq!(endless, u64::MAX);
    }

    #[test]
    fn sizes_are_readable() {
        assert_eq!(show_bytes(3 << 19), "1.5 MiB");
        assert_eq!(show_bytes(5 << 30), "5.0 GiB");
    }
}
