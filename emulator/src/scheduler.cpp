// Runs the blocks of a grid: one after the other, or several in turns if they wait for one another.
#include "internal.h"
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sys/mman.h>
#include <tuple>

// --- Blocks

static std::vector<EmuBlock*> spare; // kept with their stacks and shared memory
constexpr size_t MOST_SPARE = 300;

// The memory mapped for a block's shared memory, which starts after a margin and is followed by pages without
// access.
constexpr size_t SMEM_AREA = 512 * 1024, SMEM_MARGIN = 64 * 1024, PAGE = 4096;

static char* map_memory(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    perror("EMU ERROR: no memory for a block");
    abort();
  }
  return (char*)at;
}

static EmuBlock* take_block() {
  if (spare.empty()) return new EmuBlock();
  EmuBlock* b = spare.back();
  spare.pop_back();
  return b;
}

static void trim_spare_blocks() {
  for (; spare.size() > MOST_SPARE; spare.pop_back()) {
    EmuBlock* b = spare.back();
    munmap(b->stacks, b->stack_bytes);
    munmap(b->smem_area, SMEM_AREA);
    delete b;
  }
}

static void prepare_memory(EmuBlock* b, int threads, size_t smem_bytes) {
  size_t need = size_t(threads) * emu_stack_size();
  if (b->stack_bytes < need) {
    if (b->stacks) munmap(b->stacks, b->stack_bytes);
    b->stacks = map_memory(need);
    b->stack_bytes = need;
  }
  if (!b->smem_area) b->smem_area = map_memory(SMEM_AREA);
  b->smem = b->smem_area + SMEM_MARGIN;
  size_t end = (SMEM_MARGIN + smem_bytes + PAGE - 1) / PAGE * PAGE;
  mprotect(b->smem_area, end, PROT_READ | PROT_WRITE);
  mprotect(b->smem_area + end, SMEM_AREA - end, PROT_NONE);
  memset(b->smem, 0xff, smem_bytes);
}

static void thread_main();

static void prepare_fiber(EmuBlock* b, int thread) {
  EmuFiber& f = b->fibers[thread];
  unsigned t = thread;
  emu_uint3 d = emu_block_dim;
  f = EmuFiber();
  f.thread_idx = {t % d.x, t / d.x % d.y, t / (d.x * d.y)};
  f.block_idx = b->idx;
  f.smem = b->smem;
  f.linear = thread;
  f.lane = thread % 32;
  f.warp = thread / 32;
  f.state = EMU_READY;
  f.block = b;
  f.what = "start";
  f.barrier = -1;
  b->warps[f.warp].alive |= 1u << f.lane;
  emu_prepare_stack(&f, b->stacks + size_t(thread) * emu_stack_size(), thread_main);
}

static EmuBlock* start_block(unsigned index, int threads, size_t smem_bytes) {
  EmuBlock* b = take_block();
  prepare_memory(b, threads, smem_bytes);
  emu_uint3 g = emu_grid_dim;
  b->idx = {index % g.x, index / g.x % g.y, index / (g.x * g.y)};
  b->threads = b->alive = threads;
  b->fibers.resize(threads);
  b->warps.assign((threads + 31) / 32, Warp());
  b->groups.assign((threads + 127) / 128, Collective());
  for (auto& bar : b->bars) bar = NamedBarrier();
  b->loads.clear();
  b->stores.assign(threads, ThreadStores());
  for (int t = 0; t < threads; t++) prepare_fiber(b, t);
  return b;
}

// The first function of a fiber: the kernel, then what its exit changes for the others.
static void thread_main() {
  emu_launch->run(emu_launch->args);
  EmuFiber* f = emu_cur;
  EmuBlock* b = f->block;
  emu_check_stores_at_exit(f);
  if (*(uint64_t*)(b->stacks + size_t(f->linear) * emu_stack_size()) != 0)
    emu_fail("stack overflow: set EMU_STACK_KB (now %zu)", emu_stack_size() / 1024);
  f->state = EMU_DONE;
  b->warps[f->warp].alive &= ~(1u << f->lane);
  b->alive--;
  emu_release_after_exit(f);
  emu_to_scheduler();
  abort(); // never resumed
}

// --- Turns

static bool can_run(const EmuFiber& f) {
  return f.state == EMU_READY || (f.state == EMU_MBAR && emu_mbar_done(&f)) ||
         (f.state == EMU_SPIN && emu_spin_changed(f));
}

// Runs a thread until it waits. Whether that was progress: a loop that was let go and waits again for the
// same word is none.
static bool run_thread(EmuFiber& f) {
  f.state = EMU_READY;
  bool let_go = f.let_go;
  const void* word = f.spin_addr;
  uint64_t value = f.spin_value;
  f.let_go = false;
  emu_resume(&f);
  return !(let_go && f.state == EMU_SPIN && f.spin_addr == word && f.spin_value == value);
}

// Runs the threads of a warp until all wait. Whether any ran.
static bool run_warp(EmuBlock* b, int warp) {
  int end = std::min(warp * 32 + 32, b->threads);
  for (bool any = false;; any = true) {
    bool ran = false;
    for (int i = warp * 32; i < end && !emu_failed; i++)
      if (can_run(b->fibers[i])) ran |= run_thread(b->fibers[i]);
    if (!ran || emu_failed) return any;
  }
}

// Runs a block until all its threads wait and no copy is on its way. Whether anything ran.
static bool run_block(EmuBlock* b) {
  static bool backwards = getenv("EMU_ORDER") && !strcmp(getenv("EMU_ORDER"), "reverse");
  int warps = b->warps.size();
  for (bool any = false;; any = true) {
    bool ran = false;
    for (int i = 0; i < warps && !emu_failed; i++) ran |= run_warp(b, backwards ? warps - 1 - i : i);
    if (!ran && b->alive && !emu_failed) ran = emu_run_one_load(b) || emu_complete_stores(b);
    if (!ran || emu_failed) return any;
  }
}

// --- Deadlocks

// Threads that wait at the same place for the same thing have one line.
static void report_block(EmuBlock* b) {
  using Key = std::tuple<int, int, int, const void*, std::string>;
  std::map<Key, std::vector<EmuFiber*>> groups;
  for (auto& f : b->fibers) {
    if (f.state == EMU_DONE) continue;
    const void* at = f.state == EMU_MBAR ? f.mbar : f.state == EMU_SPIN ? f.spin_addr : nullptr;
    int which = f.state == EMU_MBAR ? f.parity : f.barrier;
    groups[{f.state, f.line, which, at, f.what}].push_back(&f);
  }
  fprintf(stderr, "  block (%u,%u,%u): %d of %d threads alive\n", b->idx.x, b->idx.y, b->idx.z, b->alive,
          b->threads);
  for (auto& group : groups) {
    const std::vector<EmuFiber*>& threads = group.second;
    const EmuFiber* f = threads.front();
    fprintf(stderr, "    %zu threads from %d to %d: line %d, %s", threads.size(), f->linear,
            threads.back()->linear, f->line, f->what);
    if (f->state == EMU_MBAR) {
      fputs(emu_mbar_text(f).c_str(), stderr);
    } else if (f->state == EMU_SPIN) {
      fprintf(stderr, " of %p, which holds %lu", f->spin_addr,
              (unsigned long)emu_read_word(f->spin_addr, f->spin_size));
    } else if (f->barrier >= 0) {
      const NamedBarrier& bar = b->bars[f->barrier];
      fprintf(stderr, " %d: %d of %d threads have arrived", f->barrier, bar.arrived,
              bar.threads ? bar.threads : b->alive);
    }
    fprintf(stderr, "\n");
  }
}

static void report_deadlock(const std::vector<EmuBlock*>& resident) {
  constexpr size_t MOST_SHOWN = 8;
  fprintf(stderr, "EMU ERROR: deadlock in %s, source %s\n", emu_launch->name, emu_launch->source);
  for (size_t i = 0; i < std::min(resident.size(), MOST_SHOWN); i++) report_block(resident[i]);
}

// Two equal loads of a word may look like a loop that is none. Whether there was such a thread.
static bool let_loops_go(const std::vector<EmuBlock*>& resident) {
  bool any = false;
  for (auto* b : resident)
    for (auto& f : b->fibers)
      if (f.state == EMU_SPIN) {
        f.state = EMU_READY;
        f.let_go = any = true;
      }
  return any;
}

// --- Grids

int emu_blocks_per_sm(int threads, size_t smem) {
  return std::min({SM_BLOCKS, SM_THREADS / std::max(threads, 1), int(SM_SMEM / (smem + 1024))});
}

// Gives each resident block a turn and removes those that are done. Whether anything ran.
static bool run_turns(std::vector<EmuBlock*>& resident) {
  bool progress = false;
  for (size_t i = 0; i < resident.size() && !emu_failed;) {
    EmuBlock* b = resident[i];
    progress |= run_block(b);
    if (emu_failed || b->alive) {
      i++;
      continue;
    }
    if (!b->loads.empty()) {
      fprintf(stderr, "EMU ERROR: %s: a block ends before its loads have arrived\n", emu_launch->name);
      emu_failed = true;
    }
    spare.push_back(b);
    resident.erase(resident.begin() + i);
    progress = true;
  }
  return progress;
}

static void run_blocks(const KernelLaunch& launch, std::vector<EmuBlock*>& resident) {
  constexpr int MOST_LET_GO = 20; // in a row, without progress
  int threads = launch.block.x * launch.block.y * launch.block.z, stuck = 0;
  unsigned long total = (unsigned long)launch.grid.x * launch.grid.y * launch.grid.z, next = 0;
  size_t fitting = SM_COUNT * std::max(1, emu_blocks_per_sm(threads, launch.smem));
  size_t most = std::min<size_t>(fitting, emu_env("EMU_MAX_RESIDENT", 264));
  size_t wanted = std::min<size_t>(most, emu_env("EMU_RESIDENT", 1));
  auto start_next = [&] { resident.push_back(start_block(next++, threads, launch.smem)); };
  while (!emu_failed && (next < total || !resident.empty())) {
    while (next < total && resident.size() < wanted) start_next();
    if (run_turns(resident)) {
      stuck = 0;
    } else if (next < total && resident.size() < most) {
      start_next(); // all wait, perhaps for a block that has not started
    } else if (stuck++ >= MOST_LET_GO || !let_loops_go(resident)) {
      report_deadlock(resident);
      emu_failed = true;
    }
  }
}

bool emu_run_grid(const KernelLaunch& launch) {
  emu_catch_faults();
  emu_launch = &launch;
  emu_failed = false;
  emu_grid_dim = launch.grid;
  emu_block_dim = launch.block;
  std::vector<EmuBlock*> resident;
  run_blocks(launch, resident);
  spare.insert(spare.end(), resident.begin(), resident.end());
  trim_spare_blocks();
  emu_cur = nullptr;
  emu_launch = nullptr;
  return !emu_failed;
}
