// The driver's memory: allocations of the host, between pages without access, and copies.
#include "driver.h"
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sys/mman.h>

// --- Allocations

struct Allocation {
  char* area; // with a page without access before and after
  size_t area_bytes, bytes;
};
static std::map<CUdeviceptr, Allocation> allocations;
static size_t used;
constexpr size_t PAGE = 4096;

static CUresult allocate(CUdeviceptr* out, size_t bytes) {
  Guard guard(emu_driver_lock);
  if (bytes == 0) return INVALID_VALUE;
  if (used + bytes > DEVICE_BYTES) return OUT_OF_MEMORY;
  size_t room = (bytes + PAGE - 1) / PAGE * PAGE, area_bytes = room + 2 * PAGE;
  constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* area = (char*)mmap(nullptr, area_bytes, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
  if (area == MAP_FAILED) return OUT_OF_MEMORY;
  mprotect(area, PAGE, PROT_NONE);
  mprotect(area + PAGE + room, PAGE, PROT_NONE);
  char* at = area + PAGE;
  static bool end_at_page = emu_env("EMU_GUARD", 0);
  if (end_at_page) at += (room - bytes) & ~size_t(15); // keeps an alignment of 16
  static size_t most_filled = size_t(emu_env("EMU_POISON_MB", 256)) << 20;
  if (bytes <= most_filled) memset(at, 0xff, bytes);
  allocations[(CUdeviceptr)at] = {area, area_bytes, bytes};
  used += bytes;
  if (emu_verbose()) fprintf(stderr, "emu: %zu bytes at %p\n", bytes, at);
  *out = (CUdeviceptr)at;
  return CUDA_OK;
}

static CUresult release(CUdeviceptr at) {
  Guard guard(emu_driver_lock);
  auto found = allocations.find(at);
  if (found == allocations.end()) return at ? INVALID_VALUE : CUDA_OK;
  munmap(found->second.area, found->second.area_bytes);
  used -= found->second.bytes;
  allocations.erase(found);
  return CUDA_OK;
}

CUDA_API cuMemAlloc_v2(CUdeviceptr* p, size_t n) { return allocate(p, n); }
CUDA_API cuMemAllocAsync(CUdeviceptr* p, size_t n, void*) { return allocate(p, n); }
CUDA_API cuMemAllocFromPoolAsync(CUdeviceptr* p, size_t n, void*, void*) { return allocate(p, n); }
CUDA_API cuMemFree_v2(CUdeviceptr p) { return release(p); }
CUDA_API cuMemFreeAsync(CUdeviceptr p, void*) { return release(p); }
CUDA_API cuMemAllocHost_v2(void** p, size_t n) {
  *p = aligned_alloc(PAGE, n / PAGE * PAGE + PAGE);
  return *p ? CUDA_OK : OUT_OF_MEMORY;
}
CUDA_API cuMemHostAlloc(void** p, size_t n, unsigned) { return cuMemAllocHost_v2(p, n); }
CUDA_API cuMemFreeHost(void* p) {
  free(p);
  return CUDA_OK;
}
CUDA_API cuMemGetInfo_v2(size_t* available, size_t* total) {
  Guard guard(emu_driver_lock);
  *available = DEVICE_BYTES - used;
  *total = DEVICE_BYTES;
  return CUDA_OK;
}

// --- Pools, which only have to exist

CUDA_API cuDeviceGetDefaultMemPool(void** pool, int) {
  *pool = (void*)16; // any address but null
  return CUDA_OK;
}
CUDA_API cuDeviceGetMemPool(void** pool, int device) { return cuDeviceGetDefaultMemPool(pool, device); }
CUDA_API cuDeviceSetMemPool(int, void*) { return CUDA_OK; }
CUDA_API cuMemPoolSetAttribute(void*, int, void*) { return CUDA_OK; }
CUDA_API cuMemPoolGetAttribute(void*, int, void* value) {
  *(uint64_t*)value = 0;
  return CUDA_OK;
}
CUDA_API cuMemPoolTrimTo(void*, size_t) { return CUDA_OK; }

// --- Copies. Those to the host report an earlier error in a kernel.

static CUresult copy(void* to, const void* from, size_t n) {
  Guard guard(emu_driver_lock);
  memmove(to, from, n);
  return CUDA_OK;
}
CUDA_API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t n) { return copy((void*)to, from, n); }
CUDA_API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t n, void*) {
  return copy((void*)to, from, n);
}
CUDA_API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) {
  return copy((void*)to, (void*)from, n);
}
CUDA_API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, void*) {
  return cuMemcpyDtoD_v2(to, from, n);
}
CUDA_API cuMemcpyPeerAsync(CUdeviceptr to, void*, CUdeviceptr from, void*, size_t n, void*) {
  return cuMemcpyDtoD_v2(to, from, n);
}
CUDA_API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, void*) {
  return cuMemcpyDtoD_v2(to, from, n);
}
CUDA_API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t n) {
  copy(to, (void*)from, n);
  return emu_sticky_error ? LAUNCH_FAILED : CUDA_OK;
}
CUDA_API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t n, void*) {
  return cuMemcpyDtoH_v2(to, from, n);
}

// CUDA_MEMCPY2D
enum { HOST_MEMORY = 1 };
struct Copy2D {
  struct Side {
    size_t x, y;
    int type;
    char* host;
    char* device;
    void* array;
    size_t pitch;
  } from, to;
  size_t width, height;
};
static char* start_of(const Copy2D::Side& s) {
  return (s.type == HOST_MEMORY ? s.host : s.device) + s.y * s.pitch + s.x;
}
CUDA_API cuMemcpy2D_v2(const Copy2D* c) {
  Guard guard(emu_driver_lock);
  const char* from = start_of(c->from);
  char* to = start_of(c->to);
  size_t from_pitch = c->from.pitch ? c->from.pitch : c->width;
  size_t to_pitch = c->to.pitch ? c->to.pitch : c->width;
  for (size_t y = 0; y < c->height; y++) memcpy(to + y * to_pitch, from + y * from_pitch, c->width);
  return emu_sticky_error && c->to.type == HOST_MEMORY ? LAUNCH_FAILED : CUDA_OK;
}
CUDA_API cuMemcpy2DAsync_v2(const Copy2D* c, void*) { return cuMemcpy2D_v2(c); }

CUDA_API cuMemsetD8_v2(CUdeviceptr at, unsigned char value, size_t n) {
  Guard guard(emu_driver_lock);
  memset((void*)at, value, n);
  return CUDA_OK;
}
CUDA_API cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t n, void*) {
  return cuMemsetD8_v2(at, value, n);
}
CUDA_API cuMemsetD32_v2(CUdeviceptr at, unsigned value, size_t n) {
  Guard guard(emu_driver_lock);
  std::fill_n((unsigned*)at, n, value);
  return CUDA_OK;
}
CUDA_API cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t n, void*) {
  return cuMemsetD32_v2(at, value, n);
}
