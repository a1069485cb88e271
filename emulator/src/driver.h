// Shared by the functions of the driver's interface. All of them are synchronous: one lock, and no streams.
#pragma once
#include "internal.h"
#include <mutex>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum {
  CUDA_OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  NOT_FOUND = 500,
  LAUNCH_FAILED = 719,
  NOT_SUPPORTED = 801
};
#define CUDA_API extern "C" __attribute__((visibility("default"))) CUresult

extern std::recursive_mutex emu_driver_lock;
typedef std::lock_guard<std::recursive_mutex> Guard;
// An error in a kernel makes every later call fail, as on a GPU.
extern bool emu_sticky_error;
bool emu_verbose();
constexpr size_t DEVICE_BYTES = size_t(141) << 30;
