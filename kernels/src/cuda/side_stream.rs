//! A stream for a library's calls.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cudarc::driver::sys as cu;

use super::CudaTensor;
use crate::tile::asm::{emit, name_of};

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
    mark: Mark,
}

/// Streams that run beside their context.
static BESIDE: AtomicUsize = AtomicUsize::new(0);

/// A number in a GPU's memory, which rises with each wait. It is not in cubecl's memory: the driver does not wait for
/// numbers in memory from `cuMemAllocAsync`.
struct Mark {
    address: cu::CUdeviceptr,
    last: AtomicU32,
}

/// Writes `value` at `address`, once all work before is done. `work` is any buffer of that work.
#[cube(launch_unchecked)]
#[expect(unused_variables, reason = "a kernel has at least one buffer")]
fn write(work: &Array<u32>, address: u64, value: u32) {
    let mut place = Array::<u64>::new(1usize);
    let mut number = Array::<u32>::new(1usize);
    place[0] = address;
    number[0] = value;
    store(&place, &number);
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn store(place: &Array<u64>, number: &Array<u32>) {
    intrinsic!(|scope| {
        let (place, number) = (name_of(&place.expand), name_of(&number.expand));
        let text = format!(
            "asm volatile(\"st.release.sys.global.u32 [%0], %1;\\n\" : : \"l\"({place}[0]), \"r\"({number}[0]) : \
             \"memory\");"
        );
        emit(scope, "mark", &text);
    })
}

impl Mark {
    /// A number that is 0, in the memory of the current context.
    fn new() -> Self {
        let mut address = 0;
        // SAFETY: writes one address, then 4 bytes there, on the default stream; returns once they are written.
        unsafe {
            check("cuMemAlloc", cu::cuMemAlloc_v2(&mut address, 4));
            check("cuMemsetD32", cu::cuMemsetD32_v2(address, 0, 1));
            check("cuStreamSynchronize", cu::cuStreamSynchronize(null_mut()));
        }
        Mark { address, last: AtomicU32::new(0) }
    }

    /// Lets `stream` wait for all work issued to cubecl's stream before, of which `work` is a buffer. One thread at a
    /// time.
    fn wait(&self, work: &CudaTensor, stream: cu::CUstream) {
        let next = self.last.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        // SAFETY: the kernel writes 4 bytes at the address, and does not use the buffer.
        unsafe {
            let (count, dim) = (CubeCount::new_single(), CubeDim::new_single());
            let buffer = ArrayArg::from_raw_parts(work.handle.clone(), 1);
            write::launch_unchecked::<CudaRuntime>(
                &work.client,
                count,
                dim,
                buffer,
                self.address,
                next,
            );
        }
        // Blocks until the kernel is issued: a stream that waits for one that is not yet in a queue could block it for
        // ever.
        work.client.get_resource(work.handle.clone()).expect("the buffer exists");
        let from = cu::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the number is in the memory of the stream's GPU, and lives as long as the stream.
        let waits = unsafe { cu::cuStreamWaitValue32_v2(stream, self.address, next, from) };
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
        let (runs_beside, mark) = (AtomicBool::new(false), Mark::new());
        SideStream { context, stream, before, after, runs_beside, mark }
    }

    /// The stream, a `CUstream`.
    pub fn as_ptr(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Makes the context current, and lets the stream wait for all work issued to it before; while another stream runs
    /// beside, for that of cubecl's stream, of which `work` is any buffer. Buffers of other threads must have been taken
    /// by `get_resource` on this one before, as it takes those that the stream will use.
    pub fn begin(&self, work: &CudaTensor) {
        // SAFETY: the context lives as long as the process.
        check("cuCtxSetCurrent", unsafe { cu::cuCtxSetCurrent(self.context) });
        let own = usize::from(self.runs_beside.load(Ordering::Relaxed));
        if BESIDE.load(Ordering::Relaxed) > own {
            self.mark.wait(work, self.stream);
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
    pub fn run_beside(&self) {
        if !self.runs_beside.swap(true, Ordering::Relaxed) {
            BESIDE.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lets all later work of the context wait for the stream.
    pub fn end(&self) {
        // SAFETY: as in `begin`.
        unsafe {
            check("cuCtxSetCurrent", cu::cuCtxSetCurrent(self.context));
            check("cuEventRecord", cu::cuEventRecord(self.after, self.stream));
            check("cuCtxWaitEvent", cu::cuCtxWaitEvent(self.context, self.after));
        }
        if self.runs_beside.swap(false, Ordering::Relaxed) {
            BESIDE.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use burn::tensor::Tensor;

    use super::*;
    use crate::Cuda;
    use crate::backend::primitive;
    use crate::ops::linear::linear;

    /// Elements of a tensor that takes a kernel about 0.1 ms.
    const MANY: usize = 1 << 26;

    /// Products wait for the work that writes their inputs, but not for a stream that runs beside; later work waits for
    /// that stream after its end.
    #[test]
    #[ignore = "needs a GPU"]
    fn products_go_on_beside_a_stream_that_waits() {
        let device = Default::default();
        let weight = Tensor::<Cuda, 2>::ones([32, 64], &device);
        let large = Tensor::<Cuda, 1>::zeros([MANY], &device);
        // The product's input is written last by work that takes longer than a launch.
        let product = |value: u32| {
            let x = (0..8).fold(large.clone(), |x, _| x + f64::from(value) / 8.0);
            let x = x.slice(MANY - 256 * 64..MANY).reshape([1, 256, 64]);
            linear(x, weight.clone(), None).sum().into_scalar()
        };
        let want = |value: u32| (value * 256 * 64 * 32) as f32;
        assert_eq!(product(1), want(1));
        let (waits, releases, gate) = (SideStream::new(0), SideStream::new(0), Mark::new());
        let target = Tensor::<Cuda, 1>::zeros([MANY], &device);
        let written = primitive(target.clone());
        let resource = written.client.get_resource(written.handle.clone()).unwrap();
        let at = resource.resource().ptr;
        // Loading a kernel may wait for all streams, so `write` is loaded first.
        Mark::new().wait(&written, releases.stream);

        waits.begin(&written);
        waits.run_beside();
        let from = cu::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the number is in the memory of the stream's GPU, and lives as long as the process.
        let waiting = unsafe { cu::cuStreamWaitValue32_v2(waits.stream, gate.address, 1, from) };
        check("cuStreamWaitValue32", waiting);
        for _ in 0..8 {
            // SAFETY: `target` has so many numbers.
            let set = unsafe { cu::cuMemsetD32Async(at, 1f32.to_bits(), MANY, waits.stream) };
            check("cuMemsetD32Async", set);
        }
        thread::scope(|scope| {
            let (tell, told) = channel::<()>();
            let address = gate.address;
            // Opens the gate when it is told to, or when a product waits for the stream.
            let opener = scope.spawn(move || {
                let releases = releases;
                let in_time = told.recv_timeout(Duration::from_secs(60)).is_ok();
                // SAFETY: as above.
                unsafe {
                    check("cuCtxSetCurrent", cu::cuCtxSetCurrent(releases.context));
                    let written = cu::cuStreamWriteValue32_v2(releases.stream, address, 1, 0);
                    check("cuStreamWriteValue32", written);
                }
                in_time
            });
            for value in 2..5 {
                assert_eq!(product(value), want(value));
            }
            tell.send(()).unwrap();
            assert!(opener.join().unwrap(), "a product waited for the stream");
        });
        waits.end();
        let last = target.slice(MANY - 4..MANY).into_data().to_vec::<f32>().unwrap();
        assert_eq!(last, [1.0; 4]);
    }
}
