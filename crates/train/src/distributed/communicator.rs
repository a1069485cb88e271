//! Collectives between GPUs by NCCL.
//!
//! NCCL's library is loaded when it is first used. The types and numbers declared here are those of its C
//! interface, which have been the same since version 2.10.
//!
//! Calls run on a [`SideStream`]. NCCL adds in an order that depends only on the ranks, their connections, and the sizes:
//! equal worlds give equal bits.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use burn::tensor::DType;
use libloading::Library;
use longwall_kernels::cuda::{CudaTensor, SideStream, contiguous, empty, unshare};

/// Names the library's file, before any other place is searched.
pub const PATH_VARIABLE: &str = "LONGWALL_NCCL";

/// The names that the dynamic loader is asked for, in this order.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Why collectives are not available, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    /// No library was found.
    #[error(
        "NCCL cannot be loaded; looked for {}\n  hint: install NCCL 2 (the package libnccl2, or nvidia-nccl-cu12 of pip), or set {PATH_VARIABLE} to the path of libnccl.so.2", .tried.join(", ")
    )]
    NoLibrary {
        /// Where it was looked for, and what the loader said of files that are there.
        tried: Vec<String>,
    },
    /// The library lacks a function.
    #[error(
        "{path} has no {function}: it is not NCCL, or too old\n  hint: install NCCL 2.18 or newer"
    )]
    NoFunction {
        /// The library.
        path: String,
        /// The function.
        function: &'static str,
    },
    /// The GPUs of the ranks cannot be connected.
    #[error("{call} of NCCL failed: {reason}\n  hint: {START_HINT}")]
    Start {
        /// The function.
        call: &'static str,
        /// NCCL's own words.
        reason: String,
    },
    /// A call failed.
    #[error(
        "{call} of NCCL failed: {reason}\n  hint: NCCL_DEBUG=INFO in the environment makes NCCL say more"
    )]
    Call {
        /// The function.
        call: &'static str,
        /// NCCL's own words.
        reason: String,
    },
}

impl NcclError {
    /// As an error of NCCL's start, if a call failed.
    fn at_start(self) -> Self {
        match self {
            NcclError::Call { call, reason } => NcclError::Start { call, reason },
            other => other,
        }
    }
}

/// What to look at when NCCL does not start.
pub(super) const START_HINT: &str = "each rank needs a GPU of its own (LOCAL_RANK, CUDA_VISIBLE_DEVICES); between \
     machines, NCCL_SOCKET_IFNAME names the network interface to use; NCCL_DEBUG=INFO makes NCCL say more";

type Comm = *mut c_void;
type Status = c_int;
/// `cudaStream_t`.
type Stream = *mut c_void;

/// `ncclUniqueId`: names a communicator; the ranks that know it can join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclSuccess`.
const SUCCESS: Status = 0;
/// `ncclSum`.
const SUM: c_int = 0;
/// `ncclUint8`.
const BYTES: c_int = 1;
/// `ncclFloat32`.
const F32: c_int = 7;

/// NCCL's functions.
struct Nccl {
    path: String,
    get_version: unsafe extern "C" fn(*mut c_int) -> Status,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    comm_init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Status,
    reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        c_int,
        Comm,
        Stream,
    ) -> Status,
    broadcast: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        Stream,
    ) -> Status,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> Status,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> Status,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    get_error_string: unsafe extern "C" fn(Status) -> *const c_char,
    get_last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    // Last, so that the functions do not outlive it.
    _library: Library,
}

impl Nccl {
    /// The library, loaded by the first call.
    fn get() -> Result<&'static Self, NcclError> {
        static NCCL: OnceLock<Result<Nccl, NcclError>> = OnceLock::new();
        NCCL.get_or_init(|| {
            let set = std::env::var_os(PATH_VARIABLE).filter(|path| !path.is_empty());
            Nccl::load(&candidates(set, &prefixes()))
        })
        .as_ref()
        .map_err(Clone::clone)
    }

    /// Loads the first library that there is.
    fn load(candidates: &[PathBuf]) -> Result<Self, NcclError> {
        let mut tried = vec![];
        for candidate in candidates {
            // SAFETY: NCCL's initialisers have no preconditions.
            match unsafe { Library::new(candidate) } {
                Ok(library) => return Nccl::of(library, candidate),
                Err(error) if candidate.is_file() => tried.push(error.to_string()),
                Err(_) => tried.push(candidate.display().to_string()),
            }
        }
        Err(NcclError::NoLibrary { tried })
    }

    fn of(library: Library, path: &Path) -> Result<Self, NcclError> {
        let path = path.display().to_string();
        // SAFETY: the types of the functions are those of nccl.h.
        unsafe {
            Ok(Nccl {
                get_version: function(&library, &path, "ncclGetVersion")?,
                get_unique_id: function(&library, &path, "ncclGetUniqueId")?,
                comm_init_rank: function(&library, &path, "ncclCommInitRank")?,
                reduce: function(&library, &path, "ncclReduce")?,
                broadcast: function(&library, &path, "ncclBroadcast")?,
                send: function(&library, &path, "ncclSend")?,
                receive: function(&library, &path, "ncclRecv")?,
                group_start: function(&library, &path, "ncclGroupStart")?,
                group_end: function(&library, &path, "ncclGroupEnd")?,
                get_error_string: function(&library, &path, "ncclGetErrorString")?,
                get_last_error: function(&library, &path, "ncclGetLastError")?,
                path,
                _library: library,
            })
        }
    }

    /// The error of a call, if it failed.
    fn check(&self, call: &'static str, status: Status) -> Result<(), NcclError> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: both return texts that live as long as the library, or null; the last error needs no
        // communicator.
        let [error, last] = unsafe {
            [(self.get_error_string)(status), (self.get_last_error)(null_mut())].map(|text| {
                let text = (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy());
                text.unwrap_or_default().trim().to_owned()
            })
        };
        let reason = if last.is_empty() { error } else { format!("{error} ({last})") };
        Err(NcclError::Call { call, reason })
    }
}

/// A function of the library.
///
/// # Safety
/// `F` must be the function's type.
unsafe fn function<F: Copy>(
    library: &Library,
    path: &str,
    name: &'static str,
) -> Result<F, NcclError> {
    // SAFETY: as the caller promises.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    let missing = |_| NcclError::NoFunction { path: path.to_owned(), function: name };
    Ok(*found.map_err(missing)?)
}

/// Where the library may be: only `set` if it is set, else what the dynamic loader finds, then the packages of Python
/// installations in `prefixes`.
fn candidates(set: Option<OsString>, prefixes: &[PathBuf]) -> Vec<PathBuf> {
    if let Some(path) = set {
        return vec![path.into()];
    }
    let names = NAMES.iter().map(PathBuf::from);
    names.chain(prefixes.iter().flat_map(|prefix| in_python(prefix))).collect()
}

/// Folders that may have `lib/python3.x`: of the active environment, of the Python that a shell would run, and of the
/// system.
fn prefixes() -> Vec<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty());
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].map(set).into_iter().flatten();
    let environments = environments.map(PathBuf::from);
    let path = set("PATH").unwrap_or_default();
    let has_python = |bin: &PathBuf| bin.join("python3").exists();
    let shell = std::env::split_paths(&path).find(has_python);
    let shell = shell.and_then(|bin| bin.parent().map(Path::to_owned));
    let own = set("HOME").map(|home| Path::new(&home).join(".local"));
    let system = ["/usr/local", "/usr"].map(PathBuf::from);
    let all = environments.chain(shell).chain(own).chain(system);
    all.fold(vec![], |mut all, prefix| {
        if !all.contains(&prefix) {
            all.push(prefix);
        }
        all
    })
}

/// The libraries that pip has installed in `prefix`.
fn in_python(prefix: &Path) -> Vec<PathBuf> {
    let versions = std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let is_python = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
    };
    let mut versions: Vec<PathBuf> = versions.map(|entry| entry.path()).filter(is_python).collect();
    versions.sort();
    let packages =
        |version: PathBuf| ["site-packages", "dist-packages"].map(|name| version.join(name));
    let library = |packages: PathBuf| packages.join("nvidia/nccl/lib").join(NAMES[0]);
    let libraries = versions.into_iter().rev().flat_map(packages).map(library);
    libraries.filter(|path| path.is_file()).collect()
}

/// NCCL's version and where it was found, for example `2.27.3 (libnccl.so.2)`.
///
/// # Errors
/// When it cannot be loaded.
pub fn version() -> Result<String, NcclError> {
    let nccl = Nccl::get()?;
    let mut number = 0;
    // SAFETY: writes one number.
    nccl.check("ncclGetVersion", unsafe { (nccl.get_version)(&mut number) })?;
    let [major, minor, patch] = [number / 10_000, number / 100 % 100, number % 100];
    Ok(format!("{major}.{minor}.{patch} ({})", nccl.path))
}

/// A new name for a communicator, which its ranks pass to [`Communicator::new`]. The process must live as long as the
/// communicator.
///
/// # Errors
/// When NCCL cannot be loaded, or finds no network interface.
pub fn unique_id() -> Result<UniqueId, NcclError> {
    let nccl = Nccl::get()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: writes the 128 bytes.
    let status = unsafe { (nccl.get_unique_id)(&mut id) };
    nccl.check("ncclGetUniqueId", status).map_err(NcclError::at_start)?;
    Ok(id)
}

/// One rank of a group of GPUs that call the same collectives in the same order.
pub struct Communicator {
    nccl: &'static Nccl,
    comm: Comm,
    rank: usize,
    stream: SideStream,
    /// What is being summed. Held during a group of calls.
    in_flight: Mutex<Vec<CudaTensor>>,
}

// SAFETY: NCCL allows calls from any thread, one at a time, which `in_flight` ensures; so does the stream.
unsafe impl Send for Communicator {}
// SAFETY: likewise.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins the communicator `id` of `world_size` ranks as `rank`, with GPU `gpu` of those that this process sees.
    /// Returns when all ranks have joined.
    ///
    /// # Errors
    /// When NCCL cannot be loaded, or cannot connect the ranks.
    ///
    /// # Panics
    /// When the driver fails.
    pub fn new(
        gpu: usize,
        rank: usize,
        world_size: usize,
        id: UniqueId,
    ) -> Result<Self, NcclError> {
        let nccl = Nccl::get()?;
        // NCCL takes the GPU of the current context, which is the stream's.
        let (stream, mut comm) = (SideStream::new(gpu), null_mut());
        // SAFETY: the pointer is to a local of the required type.
        unsafe {
            let (world_size, rank) = (world_size as c_int, rank as c_int);
            let joined = (nccl.comm_init_rank)(&mut comm, world_size, id, rank);
            nccl.check("ncclCommInitRank", joined).map_err(NcclError::at_start)?;
        }
        Ok(Communicator { nccl, comm, rank, stream, in_flight: Mutex::default() })
    }

    /// Sums each tensor over the ranks into the tensor of its owner.
    ///
    /// `tensors` are f32, with the rank that owns each; all ranks pass the same shapes and owners. Returns the sums of
    /// the tensors that this rank owns, and `None` for the others. Later work runs beside the sums and must not use them,
    /// until [`Communicator::finish_reduce`] or another exchange.
    ///
    /// # Errors
    /// When NCCL fails.
    pub fn reduce(
        &self,
        tensors: Vec<(CudaTensor, usize)>,
    ) -> Result<Vec<Option<CudaTensor>>, NcclError> {
        let of = |(tensor, owner): (CudaTensor, usize)| {
            assert_eq!(tensor.dtype, DType::F32, "the type of a sum");
            (prepared(tensor, owner == self.rank), owner)
        };
        let tensors: Vec<_> = tensors.into_iter().map(of).collect();
        let mut in_flight = self.in_flight();
        in_flight.extend(tensors.iter().map(|(tensor, _)| tensor.clone()));
        let issued = self.issue(tensors.iter().map(|(tensor, _)| tensor), |addresses| {
            tensors.iter().zip(addresses).try_for_each(|((tensor, owner), &at)| {
                let elements = tensor.meta.shape().num_elements();
                // SAFETY: the buffer has so many f32 numbers, and `in_flight` keeps it alive. A rank that is not the
                // owner only reads it.
                let status = unsafe {
                    (self.nccl.reduce)(
                        at as *const c_void,
                        at as *mut c_void,
                        elements,
                        F32,
                        SUM,
                        *owner as c_int,
                        self.comm,
                        self.stream.as_ptr(),
                    )
                };
                self.nccl.check("ncclReduce", status)
            })
        });
        if !in_flight.is_empty() {
            self.stream.run_beside();
        }
        issued?;
        let own = |(tensor, owner)| (owner == self.rank).then_some(tensor);
        Ok(tensors.into_iter().map(own).collect())
    }

    /// Lets later work wait for all sums.
    pub fn finish_reduce(&self) {
        let mut in_flight = self.in_flight();
        if !in_flight.is_empty() {
            self.stream.end();
            in_flight.clear();
        }
    }

    fn in_flight(&self) -> MutexGuard<'_, Vec<CudaTensor>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives every rank the owner's value of each tensor, of any type; all ranks pass the same shapes, types and owners.
    /// Buffers of the other ranks are overwritten, unless they are shared.
    ///
    /// # Errors
    /// When NCCL fails.
    pub fn broadcast(
        &self,
        tensors: Vec<(CudaTensor, usize)>,
    ) -> Result<Vec<CudaTensor>, NcclError> {
        let of = |(tensor, owner)| (prepared(tensor, owner != self.rank), owner);
        let tensors: Vec<_> = tensors.into_iter().map(of).collect();
        self.grouped(tensors.iter().map(|(tensor, _)| tensor), |addresses| {
            tensors.iter().zip(addresses).try_for_each(|((tensor, owner), &at)| {
                let bytes = tensor.meta.shape().num_elements() * tensor.dtype.size();
                // SAFETY: the buffer has so many bytes, and `tensors` keeps it alive. The owner only reads it.
                let status = unsafe {
                    (self.nccl.broadcast)(
                        at as *const c_void,
                        at as *mut c_void,
                        bytes,
                        BYTES,
                        *owner as c_int,
                        self.comm,
                        self.stream.as_ptr(),
                    )
                };
                self.nccl.check("ncclBroadcast", status)
            })
        })?;
        Ok(tensors.into_iter().map(|(tensor, _)| tensor).collect())
    }

    /// Sends the n-th of equal blocks of `x` to the n-th of `ranks`, one of which is this rank. Block n of the result
    /// is what the n-th of them sends here. All of these ranks pass the same shape and type.
    ///
    /// # Errors
    /// When NCCL fails.
    pub fn all_to_all(&self, x: &CudaTensor, ranks: Range<usize>) -> Result<CudaTensor, NcclError> {
        let x = contiguous(x);
        let y = empty(&x, x.meta.shape().as_slice(), x.dtype);
        let block = x.meta.shape().num_elements() / ranks.len() * x.dtype.size();
        let (nccl, comm, stream) = (self.nccl, self.comm, self.stream.as_ptr());
        self.grouped([&x, &y].into_iter(), |addresses| {
            for (n, rank) in ranks.enumerate() {
                let at = |address: u64| address + (n * block) as u64;
                let (sent, got) = (at(addresses[0]), at(addresses[1]));
                // SAFETY: both buffers have so many bytes for each rank, and `x` and `y` keep them alive.
                let status = unsafe {
                    (nccl.send)(sent as *const c_void, block, BYTES, rank as c_int, comm, stream)
                };
                nccl.check("ncclSend", status)?;
                // SAFETY: likewise.
                let status = unsafe {
                    (nccl.receive)(got as *mut c_void, block, BYTES, rank as c_int, comm, stream)
                };
                nccl.check("ncclRecv", status)?;
            }
            Ok(())
        })?;
        Ok(y)
    }

    /// Issues the `calls`, which get the addresses of the tensors, as one group, between the context's earlier and
    /// later work.
    fn grouped<'a>(
        &self,
        tensors: impl Iterator<Item = &'a CudaTensor>,
        calls: impl FnOnce(&[u64]) -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        let _one_at_a_time = self.in_flight();
        let issued = self.issue(tensors, calls);
        // Also after a failure: what was issued may still use the buffers.
        self.stream.end();
        issued
    }

    /// As [`Communicator::grouped`], but later work does not wait. The caller holds `in_flight`.
    fn issue<'a>(
        &self,
        tensors: impl Iterator<Item = &'a CudaTensor>,
        calls: impl FnOnce(&[u64]) -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        // Blocks until the work that writes these buffers is issued.
        let at = |x: &CudaTensor| {
            let resource = x.client.get_resource(x.handle.clone()).expect("the buffer exists");
            resource.resource().ptr
        };
        let mut tensors = tensors.peekable();
        let Some(&work) = tensors.peek() else { return Ok(()) };
        let addresses: Vec<u64> = tensors.map(at).collect();
        self.stream.begin(work);
        // SAFETY: takes nothing.
        let started = unsafe { (self.nccl.group_start)() };
        self.nccl.check("ncclGroupStart", started)?;
        let called = calls(&addresses);
        // SAFETY: ends the group started above, even if a call in it failed.
        let ended = unsafe { (self.nccl.group_end)() };
        called.and(self.nccl.check("ncclGroupEnd", ended))
    }
}

/// `tensor`, contiguous; if NCCL writes it, in a buffer that nothing else uses.
fn prepared(tensor: CudaTensor, is_written: bool) -> CudaTensor {
    let mut own = contiguous(&tensor);
    // Both may share the buffer, which would then be copied.
    drop(tensor);
    if is_written {
        unshare(&mut own);
    }
    own
}

// A communicator lives until its process ends: a rank whose peers are gone would wait for them in NCCL's destructor.

#[cfg(test)]
mod tests {
    use burn::tensor::{FloatDType, Int, Tensor};
    use longwall_kernels::Cuda;
    use longwall_kernels::backend::{primitive, tensor};

    use super::*;

    #[test]
    #[ignore = "needs a GPU and NCCL"]
    fn a_rank_alone_exchanges_with_itself() {
        let alone = Communicator::new(0, 0, 1, unique_id().unwrap()).unwrap();
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let numbers = Tensor::<Cuda, 1, Int>::arange(0..5 << 20, &Default::default());
            let x = numbers.remainder_scalar(251).float().cast(dtype).reshape([5, 1 << 20]);
            // A view that is not contiguous.
            let x = x.swap_dims(0, 1);
            let want = x.clone().into_data();
            let y = alone.all_to_all(&primitive(x), 0..1).unwrap();
            assert_eq!(tensor::<Cuda, 2>(y).into_data(), want);
        }
    }

    #[test]
    fn a_path_that_is_set_is_the_only_one() {
        let set = Some(OsString::from("/opt/nccl/libnccl.so.2"));
        assert_eq!(candidates(set, &[]), [Path::new("/opt/nccl/libnccl.so.2")]);
        assert_eq!(candidates(None, &[]), NAMES.map(PathBuf::from));
    }

    #[test]
    fn the_newest_python_with_the_package_comes_first() {
        let prefix = tempfile::tempdir().unwrap();
        let library = |python: &str| {
            prefix.path().join("lib").join(python).join("nvidia/nccl/lib/libnccl.so.2")
        };
        let found = ["python3.12/site-packages", "python3.11/dist-packages"].map(library);
        for path in &found {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, []).unwrap();
        }
        std::fs::create_dir_all(prefix.path().join("lib/python3.13/site-packages")).unwrap();
        assert_eq!(in_python(prefix.path()), found);
    }

    #[test]
    fn a_missing_library_is_an_error_that_says_where_it_was_looked_for() {
        let error = Nccl::load(&[PathBuf::from("/no/such/libnccl.so.2")]).err().unwrap();
        let text = error.to_string();
        assert!(
            text.starts_with("NCCL cannot be loaded; looked for /no/such/libnccl.so.2"),
            "{text}"
        );
        assert!(text.contains("LONGWALL_NCCL"), "{text}");
    }

    #[test]
    fn an_error_of_the_start_says_what_to_look_at() {
        let call = NcclError::Call { call: "ncclCommInitRank", reason: "invalid usage".into() };
        let text = call.at_start().to_string();
        assert!(
            text.starts_with("ncclCommInitRank of NCCL failed: invalid usage\n  hint: "),
            "{text}"
        );
        for remedy in ["LOCAL_RANK", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG=INFO"] {
            assert!(text.contains(remedy), "{text}");
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Nccl::load(&[file.path().to_owned()]).err().unwrap();
        assert!(matches!(error, NcclError::NoLibrary { .. }), "{error}");
    }

    /// Another library, which every process has.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_without_the_functions_is_refused() {
        let error = Nccl::load(&[PathBuf::from("libm.so.6")]).err().unwrap().to_string();
        assert!(error.contains("has no nccl"), "{error}");
    }
}
