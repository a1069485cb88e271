//! A stream for a library's calls.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys as cu;

/// A stream of a GPU for work that cubecl does not issue.
///
/// cubecl's stream is private, so such work runs between two events: the stream waits for all work issued to the
/// context before, and later work in the context waits for the stream. Buffers can therefore be reused as soon as the
/// work is issued. It lives as long as its process.
pub struct SideStream {
    context: cu::CUcontext,
    stream: cu::CUstream,
    before: cu::CUevent,
    after: cu::CUevent,
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
        SideStream { context, stream, before, after }
    }

    /// The stream, a `CUstream`.
    pub fn as_ptr(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Makes the context current, and lets the stream wait for all work issued to it before.
    pub fn begin(&self) {
        // SAFETY: context, stream and event were made together, and live as long as the process.
        unsafe {
            check("cuCtxSetCurrent", cu::cuCtxSetCurrent(self.context));
            check("cuCtxRecordEvent", cu::cuCtxRecordEvent(self.context, self.before));
            check("cuStreamWaitEvent", cu::cuStreamWaitEvent(self.stream, self.before, 0));
        }
    }

    /// Lets all later work of the context wait for the stream.
    pub fn end(&self) {
        // SAFETY: as in `begin`.
        unsafe {
            check("cuEventRecord", cu::cuEventRecord(self.after, self.stream));
            check("cuCtxWaitEvent", cu::cuCtxWaitEvent(self.context, self.after));
        }
    }
}
