//! The on-disk cache of compiled CUDA kernels.
//!
//! The runtime's own cache identifies a kernel by its name and its settings, not by its source. So each
//! build of this program has its own folder, for one GPU architecture and one compiler version.

use std::fs;
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
/// `~/.cache/longwall`) and removes those of other builds. Only the first call of a process has an effect;
/// it must precede the first tensor on the GPU.
pub fn keep_kernels(device: &Device) -> KernelCache {
    static CACHE: OnceLock<KernelCache> = OnceLock::new();
    let Device::Cuda(device) = device else { return KernelCache::Unneeded };
    let open = || {
        let base = base().ok_or("neither XDG_CACHE_HOME nor HOME is set")?;
        let build = build().map_err(|error| format!("the program cannot be read: {error}"))?;
        let target = target(device.index).ok_or("the driver does not name the architecture")?;
        let cache = open(&base, &build, &target)
            .map_err(|error| format!("{} cannot be written: {error}", base.display()))?;
        if let KernelCache::New(path) | KernelCache::Found(path) = &cache {
            configure(path)?;
        }
        Ok(cache)
    };
    CACHE.get_or_init(|| open().unwrap_or_else(KernelCache::Nowhere)).clone()
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

/// Finds or creates the folder of `build` and `target` in `base`; creating it removes those of other builds.
fn open(base: &Path, build: &str, target: &str) -> io::Result<KernelCache> {
    let own = format!("{PREFIX}{build}-");
    let path = base.join(format!("{own}{target}"));
    let found = path.is_dir();
    fs::create_dir_all(&path)?;
    // The runtime aborts the program if it cannot write, so test that first.
    let probe = path.join(format!("probe-{}", std::process::id()));
    fs::write(&probe, [])?;
    fs::remove_file(&probe)?;
    if found {
        return Ok(KernelCache::Found(path));
    }
    for entry in fs::read_dir(base)?.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(PREFIX) && !name.starts_with(&own) {
            // A folder that cannot be removed only takes space.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(KernelCache::New(path))
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
    fn a_new_build_removes_the_folders_of_others_and_nothing_else() {
        let base = Folder::new("kernel-cache");
        let open = |build, target| open(&base.0, build, target).unwrap();
        assert!(matches!(open("aaaa", "sm90"), KernelCache::New(_)));
        assert!(matches!(open("aaaa", "sm90"), KernelCache::Found(_)));
        assert!(matches!(open("aaaa", "sm80"), KernelCache::New(_)));
        fs::create_dir(base.0.join("other")).unwrap();
        let KernelCache::New(path) = open("bbbb", "sm90") else {
            panic!("a new build, an old folder")
        };
        assert!(path.is_dir() && base.0.join("other").is_dir());
        assert!(!base.0.join("kernels-aaaa-sm90").exists());
        assert!(!base.0.join("kernels-aaaa-sm80").exists());
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
