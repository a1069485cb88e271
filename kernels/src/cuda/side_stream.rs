//! A stream for a library's calls.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cudarc::driver::sys as cu;

/// A stream of a GPU for work that cubecl does not issue.
///
/// cubecl's stream is private, so such work runs between two events: the stream waits for all work issued to the
/// context before, and later work in the context waits for the stream. Unless it [runs
/// beside](SideStream::run_beside), buffers can therefore be reused as soon as the work is issued. It lives as long as
/// its process.
///
/// While the work of some stream runs beside the context's, an event of the context would include it. The others then
/// wait for a number that a kernel writes on cubecl's stream.
pub struct SideStream {
    context: cu::CUcontext,
    stream: cu::CUstream,
    before: cu::CUevent,
    after: cu::CUevent,
    runs_beside: AtomicBool,
    mark: Mutex<Option<Mark>>,
}

/// Streams that run beside their context.
static BESIDE: AtomicUsize = AtomicUsize::new(0);

/// A number in a GPU's memory, which rises with each wait.
struct Mark {
    number: Handle,
    address: u64,
    last: u32,
}

/// Writes `value` once all work before is done.
#[cube(launch_unchecked)]
fn write(number: &mut Array<u32>, value: u32) {
    number[0] = value;
}

impl Mark {
    fn new(client: &ComputeClient<CudaRuntime>) -> Self {
        let number = client.create_from_slice(&0u32.to_le_bytes());
        // Returns when the 0 is there.
        client.read_one(number.clone()).expect("the number is read");
        let address = Mark::address(client, &number);
        Mark { number, address, last: 0 }
    }

    /// Blocks until the work that writes the number is issued.
    fn address(client: &ComputeClient<CudaRuntime>, number: &Handle) -> u64 {
        client.get_resource(number.clone()).expect("the buffer exists").resource().ptr
    }

    /// Lets `stream` wait for all work issued to cubecl's stream before.
    fn wait(&mut self, client: &ComputeClient<CudaRuntime>, stream: cu::CUstream) {
        self.last = self.last.wrapping_add(1);
        // SAFETY: the buffer has one number.
        unsafe {
            let number = ArrayArg::from_raw_parts(self.number.clone(), 1);
            let (count, dim) = (CubeCount::new_single(), CubeDim::new_single());
            write::launch_unchecked::<CudaRuntime>(client, count, dim, number, self.last);
        }
        // The stream must not wait for a kernel that would be queued behind it.
        Mark::address(client, &self.number);
        let from = cu::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the number is in the memory of the stream's GPU, and lives as long as the stream.
        let waits = unsafe { cu::cuStreamWaitValue32_v2(stream, self.address, self.last, from) };
        check("cuStreamWaitValue32", waits);
    }
}

// SAFETY: the pointers are CUDA's own objects, usable from any thread.
unsafe impl Send for SideStream {}

/// Panics unless a call of the driver succeeded.
pub fn check(call: &str, result: cu::CUresult) {
    assert_eq!(result, cu::CUresult::CUDA_SUCCESS, "{call}");
}

impl SideStream {
    /// A stream of GPU `gpu` of those that this process sees, whose context becomes this thread's current one.
    ///
    /// # Panics
    /// When the driver fails.
    pub fn new(gpu: usize) -> Self {
        let (mut device, mut context, mut stream) = (0, null_mut(), null_mut());
        let (mut before, mut after) = (null_mut(), null_mut());
        let gpu = i32::try_from(gpu).expect("GPUs below 2^31");
        // SAFETY: every pointer is to a local of the required type; the context, the device's primary one, which
        // cubecl also uses, is never released.
        unsafe {
            check("cuInit", cu::cuInit(0));
            check("cuDeviceGet", cu::cuDeviceGet(&mut device, gpu));
            check("cuDevicePrimaryCtxRetain", cu::cuDevicePrimaryCtxRetain(&mut context, device));
            check("cuCtxSetCurrent", cu::cuCtxSetCurrent(context));
            let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            check("cuStreamCreate", cu::cuStreamCreate(&mut stream, flags));
            let flags = cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            check("cuEventCreate", cu::cuEventCreate(&mut before, flags));
            check("cuEventCreate", cu::cuEventCreate(&mut after, flags));
        }
        let (runs_beside, mark) = (AtomicBool::new(false), Mutex::new(None));
        SideStream { context, stream, before, after, runs_beside, mark }
    }

    /// The stream, a `CUstream`.
    pub fn as_ptr(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Makes the context current, and lets the stream wait for all work issued to it before, except what runs beside.
    /// `client` is the GPU's.
    pub fn begin(&self, client: &ComputeClient<CudaRuntime>) {
        // SAFETY: the context lives as long as the process.
        check("cuCtxSetCurrent", unsafe { cu::cuCtxSetCurrent(self.context) });
        if BESIDE.load(Ordering::Relaxed) > 0 {
            let mut mark = self.mark.lock().unwrap_or_else(PoisonError::into_inner);
            mark.get_or_insert_with(|| Mark::new(client)).wait(client, self.stream);
            return;
        }
        // SAFETY: context, stream and event were made together, and live as long as the process.
        unsafe {
            check("cuCtxRecordEvent", cu::cuCtxRecordEvent(self.context, self.before));
            check("cuStreamWaitEvent", cu::cuStreamWaitEvent(self.stream, self.before, 0));
        }
    }

    /// Lets later work of the context, and of other side streams, run beside this stream's until [`SideStream::end`].
    /// Buffers that this stream uses must be kept until then.
    ///
    /// Nothing uses it yet: the driver refuses to wait for a number in memory from `cuMemAllocAsync`, as cubecl's is
    /// (`cuStreamWaitValue32` returns `CUDA_ERROR_INVALID_VALUE`), so [`SideStream::begin`] would panic.
    pub fn run_beside(&self) {
        if !self.runs_beside.swap(true, Ordering::Relaxed) {
            BESIDE.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lets all later work of the context wait for the stream.
    pub fn end(&self) {
        // SAFETY: as in `begin`.
        unsafe {
            check("cuEventRecord", cu::cuEventRecord(self.after, self.stream));
            check("cuCtxWaitEvent", cu::cuCtxWaitEvent(self.context, self.after));
        }
        if self.runs_beside.swap(false, Ordering::Relaxed) {
            BESIDE.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
