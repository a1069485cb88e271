// What compiled kernels call in the emulator: the interface between include/emu_device.h and the library.
#pragma once
#include <cstddef>
#include <cstdint>

// Shared addresses start here, so that 0 is none.
constexpr unsigned EMU_SMEM_BASE = 1024;

struct emu_uint3 {
  unsigned x, y, z;
};

// READY: can run. BLOCKED: waits for other threads, which wake it. MBAR: waits for a phase of an mbarrier.
// SPIN: loads the same word again and again. DONE: has left the kernel.
enum EmuState : int { EMU_READY, EMU_BLOCKED, EMU_MBAR, EMU_SPIN, EMU_STORES, EMU_DONE };

struct EmuBlock;

// A thread of a block.
struct EmuFiber {
  emu_uint3 thread_idx;
  emu_uint3 block_idx;
  char* smem; // dynamic shared memory of the block
  int line;   // of the last statement that can wait
  int lane;
  int warp;
  int linear; // index in the block
  int state;
  void* sp; // stack pointer while another fiber runs
  EmuBlock* block;
  const char* what; // the statement that it waits at
  void* arg;        // of the collective, or the barrier's result
  int barrier;      // named barrier that it waits at, or -1
  uint64_t* mbar;
  int parity;            // of the phase of mbar that it waits for
  const void* spin_addr; // last word loaded by emu_load_acquire, with its size and value
  int spin_size;
  uint64_t spin_value;
  bool let_go; // resumed from SPIN although the word has not changed
};

extern "C" {
extern EmuFiber* emu_cur; // the running thread
extern emu_uint3 emu_block_dim, emu_grid_dim;

// Prints the error with the thread's place, and ends the launch.
[[noreturn]] void emu_fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A collective of a warp or warpgroup: the last of its lanes to arrive runs `exec` on all of them. A lane
// that has exited is null. `what` is compared by address.
typedef void (*EmuExec)(EmuFiber** lanes);
void emu_warp_collective(const char* what, unsigned mask, EmuExec exec, void* arg, int line);
void emu_group_collective(const char* what, EmuExec exec, void* arg, int line);
extern const char emu_what_shuffle[], emu_what_vote[], emu_what_syncwarp[], emu_what_elect[];

// bar.sync and bar.red: `value` of all threads by "or", by "and", and how many were not 0.
// With `threads` 0, all threads of the block that have not exited take part.
struct EmuBarResult {
  unsigned any, all, count;
};
EmuBarResult emu_bar_sync(int id, int threads, unsigned value, int line);
void emu_bar_arrive(int id, int threads, int line);

void emu_mbar_init(uint64_t* b, unsigned count);
void emu_mbar_inval(uint64_t* b);
uint64_t emu_mbar_arrive(uint64_t* b, unsigned count, int line); // returns the phase before
void emu_mbar_expect_tx(uint64_t* b, unsigned bytes, int line);
void emu_mbar_complete_tx(uint64_t* b, unsigned bytes);
void emu_mbar_wait(uint64_t* b, unsigned parity, int line);
int emu_mbar_test(uint64_t* b, unsigned parity, int line);

// A load that may stand in a loop until another thread changes the word: if it loads the same value from the
// same place again, the thread waits until the word changes.
uint64_t emu_load_acquire(const void* at, int size, int line);

void emu_tma_load(void* smem, const void* map, int rank, const int* coords, uint64_t* mbar, int line);
void emu_tma_store(const void* map, const void* smem, int rank, const int* coords, int adds, int line);
void emu_bulk_load(void* smem, const void* global, unsigned bytes, uint64_t* mbar, int line);
void emu_bulk_store(void* global, const void* smem, unsigned bytes, int adds_f32, int line);
void emu_bulk_commit();
void emu_bulk_wait(int pending, int read, int line);

// `count` matrices of 8 x 8 numbers of 16 bits; `at` is the lane's row.
struct EmuMatrix {
  void* at;
  uint32_t* r[4];
};
void emu_ldmatrix(EmuMatrix* m, int count, int trans, int line);
void emu_stmatrix(EmuMatrix* m, int count, int trans, int line);

enum EmuType { EMU_BF16, EMU_F16, EMU_TF32, EMU_E4M3, EMU_E5M2, EMU_S8, EMU_U8 };

// mma.sync.m16n8k: the lane's registers.
struct EmuMma {
  int k, type_a, type_b;
  const uint32_t* a[4];
  const uint32_t* b[2];
  const float* c[4];
  float* d[4];
};
void emu_mma(EmuMma* m, int line);

// wgmma.mma_async.m64n: products of one accumulator, one after the other.
struct EmuWgmmaStep {
  uint64_t a_desc, b_desc;
  uint32_t a[4]; // if A is in registers
  int adds;      // 0: starts from zero
};
struct EmuWgmma {
  int n, type_a, type_b, a_in_registers, trans_a, trans_b, neg_a, neg_b, steps;
  float** d; // n / 2 elements
  const EmuWgmmaStep* step;
};
void emu_wgmma(EmuWgmma* m, int line);

uint16_t emu_f32_to_bf16(float x);
float emu_e4m3_to_f32(uint8_t x);
uint8_t emu_f32_to_e4m3(float x);
float emu_e5m2_to_f32(uint8_t x);
uint8_t emu_f32_to_e5m2(float x);
}
