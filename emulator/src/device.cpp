// The driver's device, context, streams, events and errors: those of one H200.
#include "driver.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>

std::recursive_mutex emu_driver_lock;
bool emu_sticky_error;
bool emu_verbose() {
  static bool value = emu_env("EMU_VERBOSE", 0);
  return value;
}

// --- Device

CUDA_API cuInit(unsigned) { return CUDA_OK; }
CUDA_API cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_OK;
}
CUDA_API cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_OK;
}
CUDA_API cuDeviceGet(int* device, int index) {
  if (index) return INVALID_DEVICE;
  *device = 0;
  return CUDA_OK;
}
CUDA_API cuDeviceGetName(char* name, int bytes, int) {
  snprintf(name, bytes, "NVIDIA H200");
  return CUDA_OK;
}
CUDA_API cuDeviceGetUuid_v2(char* uuid, int) {
  memcpy(uuid, "emulated-device", 16);
  return CUDA_OK;
}
CUDA_API cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
CUDA_API cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = DEVICE_BYTES;
  return CUDA_OK;
}

// Of CUdevice_attribute.
static int attribute(int which) {
  switch (which) {
  case 1:
    return 1024; // threads of a block
  case 2:
    return 1024; // along x
  case 3:
    return 1024; // along y
  case 4:
    return 64; // along z
  case 5:
    return 2147483647; // blocks along x
  case 6:
    return 65535; // along y
  case 7:
    return 65535; // along z
  case 8:
    return 49152; // shared memory of a block without opting in
  case 9:
    return 65536; // constant memory
  case 10:
    return 32; // threads of a warp
  case 12:
    return 65536; // registers of a block
  case 13:
    return 1980000; // clock in kHz
  case 16:
    return SM_COUNT;
  case 31:
    return 1; // concurrent kernels
  case 36:
    return 3201000; // memory's clock in kHz
  case 37:
    return 6144; // bits of the memory's bus
  case 38:
    return 62914560; // level 2 cache
  case 39:
    return SM_THREADS;
  case 40:
    return 1; // asynchronous engines
  case 41:
    return 1; // unified addresses
  case 75:
    return 9; // compute capability: major
  case 76:
    return 0; // minor
  case 79:
    return 1; // priorities of streams
  case 81:
    return SM_SMEM;
  case 82:
    return 65536; // registers of a multiprocessor
  case 83:
    return 1; // managed memory
  case 90:
    return 1; // compute preemption
  case 95:
    return 1; // cooperative launch
  case 97:
    return MOST_SMEM;
  case 99:
    return 1; // host memory can be registered
  case 106:
    return SM_BLOCKS;
  case 111:
    return 1024; // shared memory that the driver reserves in a block
  case 115:
    return 1; // memory pools
  case 120:
    return 1; // clusters
  default:
    return 0;
  }
}
CUDA_API cuDeviceGetAttribute(int* value, int which, int) {
  *value = attribute(which);
  return CUDA_OK;
}

// --- Context

static thread_local void* context;
CUDA_API cuDevicePrimaryCtxRetain(void** c, int) {
  *c = (void*)32; // any address but null
  return CUDA_OK;
}
CUDA_API cuDevicePrimaryCtxRelease_v2(int) { return CUDA_OK; }
CUDA_API cuCtxSetCurrent(void* c) {
  context = c;
  return CUDA_OK;
}
CUDA_API cuCtxGetCurrent(void** c) {
  *c = context;
  return CUDA_OK;
}
CUDA_API cuCtxPushCurrent_v2(void* c) { return cuCtxSetCurrent(c); }
CUDA_API cuCtxPopCurrent_v2(void** c) { return c ? cuCtxGetCurrent(c) : CUDA_OK; }
CUDA_API cuCtxGetDevice(int* device) {
  *device = 0;
  return CUDA_OK;
}
CUDA_API cuCtxSynchronize() { return emu_sticky_error ? LAUNCH_FAILED : CUDA_OK; }
CUDA_API cuCtxSetFlags(unsigned) { return CUDA_OK; }
CUDA_API cuCtxWaitEvent(void*, void*) { return CUDA_OK; }
CUDA_API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return CUDA_OK;
}

// --- Streams

CUDA_API cuStreamCreate(void** stream, unsigned) {
  *stream = malloc(16); // an address of its own
  return CUDA_OK;
}
CUDA_API cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  return cuStreamCreate(stream, flags);
}
CUDA_API cuStreamDestroy_v2(void* stream) {
  free(stream);
  return CUDA_OK;
}
CUDA_API cuStreamSynchronize(void*) { return CUDA_OK; }
CUDA_API cuStreamQuery(void*) { return CUDA_OK; }
CUDA_API cuStreamWaitEvent(void*, void*, unsigned) { return CUDA_OK; }
CUDA_API cuStreamIsCapturing(void*, int* status) {
  *status = 0;
  return CUDA_OK;
}
CUDA_API cuLaunchHostFunc(void*, void (*f)(void*), void* data) {
  f(data);
  return CUDA_OK;
}

// --- Events

struct Event {
  std::chrono::steady_clock::time_point at;
};
CUDA_API cuEventRecord(Event* e, void*) {
  e->at = std::chrono::steady_clock::now();
  return CUDA_OK;
}
CUDA_API cuCtxRecordEvent(void*, Event* e) { return e ? cuEventRecord(e, nullptr) : CUDA_OK; }
CUDA_API cuEventCreate(Event** e, unsigned) {
  *e = new Event();
  return cuEventRecord(*e, nullptr);
}
CUDA_API cuEventDestroy_v2(Event* e) {
  delete e;
  return CUDA_OK;
}
CUDA_API cuEventSynchronize(Event*) { return CUDA_OK; }
CUDA_API cuEventQuery(Event*) { return CUDA_OK; }
CUDA_API cuEventElapsedTime_v2(float* ms, Event* from, Event* to) {
  *ms = std::chrono::duration<float, std::milli>(to->at - from->at).count();
  return CUDA_OK;
}
CUDA_API cuEventElapsedTime(float* ms, Event* from, Event* to) { return cuEventElapsedTime_v2(ms, from, to); }

// --- Errors

CUDA_API cuGetErrorName(int error, const char** text) {
  *text = error == LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
          : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error                  ? "CUDA_ERROR"
                                   : "CUDA_SUCCESS";
  return CUDA_OK;
}
CUDA_API cuGetErrorString(int error, const char** text) {
  *text = error == LAUNCH_FAILED ? "the emulator has found an error in a kernel"
          : error                ? "error of the emulator"
                                 : "no error";
  return CUDA_OK;
}
