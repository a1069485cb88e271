//! The on-disk cache of compiled CUDA kernels.
//!
//! The runtime's own cache identifies a kernel by its name and its settings, not by its source. So each
//! build of this program has its own folder, for one GPU architecture and one compiler version.

use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cubecl::config::CubeClRuntimeConfig;
use cubecl::config::RuntimeConfig;
use cubecl::config::cache::CacheConfig;

use super::Device;

/// The prefix of a folder's name.
const PREFIX: &str = "kernels-";

/// A file in each folder on which its users hold a shared lock.
const LOCK: &str = "lock";

/// The cache of compiled kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelCache {
    /// No kernels are compiled: the CPU.
    Unneeded,
    /// A new, empty folder.
    New(PathBuf),
    /// A folder of an earlier run.
    Found(PathBuf),
    /// No cache, for this reason: every run compiles.
    Nowhere(String),
}

impl KernelCache {
    /// Whether every kernel must be compiled.
    pub fn is_empty(&self) -> bool {
        matches!(self, KernelCache::New(_) | KernelCache::Nowhere(_))
    }
}

/// Caches the kernels that `device` compiles in the user's cache folder (`$XDG_CACHE_HOME/longwall` or
/// `~/.cache/longwall`) and removes those of builds that do not run. Only the first call of a process has an effect;
/// it must precede the first tensor on the GPU.
pub fn keep_kernels(device: &Device) -> KernelCache {
    static CACHE: OnceLock<(KernelCache, Option<File>)> = OnceLock::new();
    let Device::Cuda(device) = device else { return KernelCache::Unneeded };
    let open = || {
        let base = base().ok_or("neither XDG_CACHE_HOME nor HOME is set")?;
        let build = build().map_err(|error| format!("the program cannot be read: {error}"))?;
        let target = target(device.index).ok_or("the driver does not name the architecture")?;
        let (cache, lock) = open(&base, &build, &target)
            .map_err(|error| format!("{} cannot be written: {error}", base.display()))?;
        if let KernelCache::New(path) | KernelCache::Found(path) = &cache {
            configure(path)?;
        }
        Ok((cache, Some(lock)))
    };
    let nowhere = |why| (KernelCache::Nowhere(why), None);
    CACHE.get_or_init(|| open().unwrap_or_else(nowhere)).0.clone()
}

/// Configures the runtime's cache, unless the user's own configuration names one.
fn configure(path: &Path) -> Result<(), String> {
    if CubeClRuntimeConfig::storage().lock().is_some() {
        return Err("the runtime was started before".to_owned());
    }
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache.get_or_insert_with(|| CacheConfig::File(path.to_owned()));
    CubeClRuntimeConfig::set(config);
    Ok(())
}

/// The user's cache folder for this program.
fn base() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(|| set("HOME").map(|home| Path::new(&home).join(".cache")))?;
    Some(cache.join("longwall"))
}

/// A hash of the running program's file.
fn build() -> io::Result<String> {
    // The link leads to the running file even if it has been replaced.
    let link = Path::new("/proc/self/exe");
    let path = if link.exists() { link.to_owned() } else { std::env::current_exe()? };
    let mut file = fs::File::open(path)?;
    let mut hasher = std::hash::DefaultHasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(format!("{:016x}", hasher.finish())),
            read => hasher.write(&buffer[..read]),
        }
    }
}

/// The GPU's architecture and the compiler's version, for example `sm90-nvrtc12.9`.
fn target(index: usize) -> Option<String> {
    use cudarc::driver::sys::CUdevice_attribute as Attribute;
    let device = cudarc::driver::result::device::get(index as i32).ok()?;
    // SAFETY: the driver is up, and the device comes from it.
    let attribute =
        |which| unsafe { cudarc::driver::result::device::get_attribute(device, which).ok() };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let mut version = [0, 0];
    let [compiler_major, compiler_minor] = &mut version;
    // SAFETY: writes two numbers.
    unsafe { cudarc::nvrtc::sys::nvrtcVersion(compiler_major, compiler_minor) }.result().ok()?;
    Some(format!("sm{major}{minor}-nvrtc{}.{}", version[0], version[1]))
}

/// Finds or creates the folder of `build` and `target` in `base`, with the lock that keeps it; creating it removes those
/// of other builds that nobody holds.
fn open(base: &Path, build: &str, target: &str) -> io::Result<(KernelCache, File)> {
    let own = format!("{PREFIX}{build}-");
    let path = base.join(format!("{own}{target}"));
    let found = path.is_dir();
    fs::create_dir_all(&path)?;
    // The runtime aborts the program if it cannot write: this fails before.
    let lock = File::create(path.join(LOCK))?;
    // Without locks, a file system keeps the folders of all builds.
    let _ = lock.lock_shared();
    if found {
        return Ok((KernelCache::Found(path), lock));
    }
    for entry in fs::read_dir(base)?.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(PREFIX) && !name.starts_with(&own) && !is_held(&entry.path()) {
            // A folder that cannot be removed only takes space.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok((KernelCache::New(path), lock))
}

/// Whether a process holds a folder's lock.
fn is_held(folder: &Path) -> bool {
    File::open(folder.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed after the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("longwall-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_new_build_removes_the_folders_of_builds_that_do_not_run_and_nothing_else() {
        let base = Folder::new("kernel-cache");
        let open = |build, target| open(&base.0, build, target).unwrap();
        let is_there = |name: &str| base.0.join(name).is_dir();
        assert!(matches!(open("aaaa", "sm90"), (KernelCache::New(_), _)));
        let (found, running) = open("aaaa", "sm90");
        assert!(matches!(found, KernelCache::Found(_)));
        assert!(matches!(open("aaaa", "sm80"), (KernelCache::New(_), _)));
        fs::create_dir(base.0.join("other")).unwrap();
        assert!(matches!(open("bbbb", "sm90"), (KernelCache::New(_), _)));
        assert!(is_there("kernels-bbbb-sm90") && is_there("other"));
        assert!(is_there("kernels-aaaa-sm90"), "its build runs");
        assert!(!is_there("kernels-aaaa-sm80"));
        drop(running);
        let _ = open("cccc", "sm90");
        assert!(!is_there("kernels-aaaa-sm90"));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_and_no_panic() {
        let base = Folder::new("kernel-cache-file");
        let file = base.0.join("file");
        fs::write(&file, []).unwrap();
        assert!(open(&file, "aaaa", "sm90").is_err());
    }

    #[test]
    fn the_build_is_the_same_at_every_call() {
        assert_eq!(build().unwrap(), build().unwrap());
        assert_eq!(build().unwrap().len(), 16);
    }

    #[test]
    fn the_cpu_keeps_no_kernels() {
        assert_eq!(keep_kernels(&Device::Cpu), KernelCache::Unneeded);
    }
}
