// The driver's modules and launches. A module's image is the text "emu:" and the path of a shared object,
// which the emulator's NVRTC has made.
#include "driver.h"
#include <chrono>
#include <cstdio>
#include <dlfcn.h>

struct Module {
  void* handle;
  std::string path;
};
struct Function {
  std::string name, source;
  void (*run)(void**);
  int smem = 0; // most dynamic shared memory, if it opted in to more than the default
};

// --- Modules

CUDA_API cuModuleLoadData(Module** out, const void* image) {
  Guard guard(emu_driver_lock);
  if (strncmp((const char*)image, "emu:", 4)) {
    fprintf(stderr, "EMU ERROR: a module that the emulator's NVRTC has not made\n");
    return INVALID_IMAGE;
  }
  std::string path = (const char*)image + 4;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    fprintf(stderr, "EMU ERROR: %s\n", dlerror());
    return INVALID_IMAGE;
  }
  *out = new Module{handle, path};
  return CUDA_OK;
}
CUDA_API cuModuleLoadDataEx(Module** out, const void* image, unsigned, void*, void*) {
  return cuModuleLoadData(out, image);
}
CUDA_API cuModuleUnload(Module* m) {
  delete m; // the shared object stays: functions may still be in use
  return CUDA_OK;
}
CUDA_API cuModuleGetFunction(Function** out, Module* m, const char* name) {
  void* run = dlsym(m->handle, (std::string("emu_launch_") + name).c_str());
  if (!run) {
    fprintf(stderr, "EMU ERROR: no kernel %s in %s\n", name, m->path.c_str());
    return NOT_FOUND;
  }
  std::string source = m->path.substr(0, m->path.rfind('.')) + ".cpp";
  *out = new Function{name, source, (void (*)(void**))run};
  return CUDA_OK;
}

// --- Functions

CUDA_API cuFuncSetAttribute(Function* f, int which, int value) {
  constexpr int MOST_DYNAMIC_SMEM = 8;
  if (which != MOST_DYNAMIC_SMEM) return CUDA_OK;
  if (value > MOST_SMEM) return INVALID_VALUE;
  f->smem = value;
  return CUDA_OK;
}
CUDA_API cuFuncGetAttribute(int* value, int which, Function*) {
  constexpr int MOST_THREADS = 0, REGISTERS = 4;
  *value = which == MOST_THREADS ? 1024 : which == REGISTERS ? 128 : 0;
  return CUDA_OK;
}
CUDA_API cuFuncSetCacheConfig(Function*, int) { return CUDA_OK; }
CUDA_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function*, int threads, size_t smem) {
  *blocks = emu_blocks_per_sm(threads, smem);
  return CUDA_OK;
}
CUDA_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Function* f, int threads,
                                                              size_t smem, unsigned) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, smem);
}

// --- Launches

static bool valid(const Function* f, emu_uint3 grid, emu_uint3 block, unsigned smem) {
  constexpr unsigned DEFAULT_SMEM = 49152, MOST_YZ = 65535;
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return false;
  if (block.x * block.y * block.z > 1024 || grid.y > MOST_YZ || grid.z > MOST_YZ) return false;
  return smem <= DEFAULT_SMEM || int(smem) <= f->smem;
}

static CUresult launch(Function* f, emu_uint3 grid, emu_uint3 block, unsigned smem, void** args) {
  Guard guard(emu_driver_lock);
  if (emu_sticky_error) return LAUNCH_FAILED;
  if (!valid(f, grid, block, smem)) return INVALID_VALUE;
  auto start = std::chrono::steady_clock::now();
  bool fine = emu_run_grid({f->name.c_str(), f->source.c_str(), f->run, args, grid, block, smem});
  std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
  if (emu_verbose())
    fprintf(stderr, "emu: %8.1f ms  %u,%u,%u x %u,%u,%u  %u bytes  %s\n", ms.count(), grid.x, grid.y, grid.z,
            block.x, block.y, block.z, smem, f->name.c_str());
  if (fine) return CUDA_OK;
  emu_sticky_error = !emu_env("EMU_GO_ON", 0);
  return LAUNCH_FAILED;
}

CUDA_API cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned smem, void*, void** args, void**) {
  return launch(f, {gx, gy, gz}, {bx, by, bz}, smem, args);
}
CUDA_API cuLaunchCooperativeKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned smem, void*, void** args) {
  return launch(f, {gx, gy, gz}, {bx, by, bz}, smem, args);
}

// CUlaunchConfig
struct LaunchAttribute {
  int id;
  char padding[4];
  char value[64];
};
struct LaunchConfig {
  emu_uint3 grid, block;
  unsigned smem;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
CUDA_API cuLaunchKernelEx(const LaunchConfig* c, Function* f, void** args, void**) {
  constexpr int CLUSTER = 4;
  for (unsigned i = 0; i < c->count; i++) {
    const unsigned* size = (const unsigned*)c->attributes[i].value;
    if (c->attributes[i].id != CLUSTER || size[0] * size[1] * size[2] == 1) continue;
    fprintf(stderr, "EMU ERROR: clusters are not emulated\n");
    return NOT_SUPPORTED;
  }
  return launch(f, c->grid, c->block, c->smem, args);
}
