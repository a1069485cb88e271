// Shared by the parts of the library.
#pragma once
#include "runtime.h"
#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

// The number in an environment variable, or `otherwise` if it is not set.
int emu_env(const char* name, int otherwise);

// A multiprocessor of an H200, and how many there are.
constexpr int SM_THREADS = 2048, SM_SMEM = 233472, SM_BLOCKS = 32, SM_COUNT = 132;
constexpr int MOST_SMEM = 232448; // of a block

// The source with neighbouring declarations of vector types and of local variables sorted (source_order.cpp).
std::string emu_stable_order(const std::string& source);

// --- Launches (scheduler.cpp)

struct KernelLaunch {
  const char* name;
  const char* source; // path of the rewritten source
  void (*run)(void** args);
  void** args;
  emu_uint3 grid, block;
  size_t smem;
};
// Runs all blocks. Returns false if the emulator has found an error, which it has printed.
bool emu_run_grid(const KernelLaunch& launch);
// Blocks of a kernel that a multiprocessor holds.
int emu_blocks_per_sm(int threads, size_t smem);

// --- Tensor maps and copies (tensor_map.cpp, tma.cpp, copies.cpp)

struct TensorMap {
  int type, size, rank, swizzle, fill; // size of an element in bytes; fill 1: NaN outside
  char* base;
  uint64_t dims[5], strides[5]; // strides in bytes; [0] is the element's
  uint32_t box[5], steps[5];
};
// The map in a kernel's argument; null if cuTensorMapEncodeTiled has not made it.
const TensorMap* emu_tensor_map(const void* opaque);

enum class CopyKind { Load, Store, StoreAdd };
struct TmaCopy {
  CopyKind kind;
  const TensorMap* map; // null: plain bytes
  char* smem;
  char* global; // if plain
  unsigned bytes;
  int coords[5];
  uint64_t* mbar; // of a load
  int thread, line;
};
void emu_run_copy(const TmaCopy& copy);
void emu_queue_load(const TmaCopy& copy);
void emu_queue_store(const TmaCopy& copy);

// --- Blocks (fiber.cpp, scheduler.cpp)

// Lanes that have arrived at a collective and wait for the others.
struct Collective {
  bool used = false;
  const char* what;
  int line;
  unsigned mask;
  EmuExec exec;
  uint64_t arrived[2];
};
struct Warp {
  unsigned alive = 0;
  Collective pending[8]; // of disjoint masks
};
struct NamedBarrier {
  int arrived = 0, threads = 0;
  unsigned any = 0, all = 1, count = 0;
  int line = 0;
};
using StoreGroup = std::vector<TmaCopy>;
struct ThreadStores {
  StoreGroup open;
  std::deque<StoreGroup> committed;
  bool written = false; // since the thread last waited until its stores were complete
};

struct EmuBlock {
  emu_uint3 idx;
  int threads, alive;
  char* smem_area = nullptr;
  char* smem = nullptr;
  char* stacks = nullptr;
  size_t stack_bytes = 0;
  std::vector<EmuFiber> fibers;
  std::vector<Warp> warps;
  std::vector<Collective> groups; // by warpgroup
  NamedBarrier bars[16];
  std::deque<TmaCopy> loads;
  std::vector<ThreadStores> stores; // by thread
};

inline long emu_shared_address(const EmuFiber* f, const void* at) {
  return (const char*)at - f->smem + EMU_SMEM_BASE;
}

extern const KernelLaunch* emu_launch; // the one that runs
extern bool emu_failed;                // it has an error
extern bool emu_scheduling;            // emu_cur is not on its own stack, but the scheduler acts for it
struct LaunchFailure {};               // what emu_fail throws then
size_t emu_stack_size();
std::string emu_where(const EmuFiber* f);
void emu_catch_faults();
// Switches to a fiber from the scheduler; and from the running fiber back, or to another ready lane of its
// warp.
void emu_resume(EmuFiber* f);
void emu_to_scheduler();
void emu_yield();
// Gives a fiber a fresh stack on which it starts with `entry`.
void emu_prepare_stack(EmuFiber* f, char* base, void (*entry)());

// The collectives and barriers that waited only for a thread that has now exited.
void emu_release_after_exit(EmuFiber* f);
bool emu_mbar_done(const EmuFiber* f);
std::string emu_mbar_text(const EmuFiber* f);
bool emu_spin_changed(const EmuFiber& f);
uint64_t emu_read_word(const void* at, int size);
bool emu_run_one_load(EmuBlock* b);
bool emu_complete_stores(EmuBlock* b);
void emu_check_stores_at_exit(EmuFiber* f);
