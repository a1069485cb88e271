// When asynchronous copies happen. A load is done as late as possible: when the threads of its block cannot
// go on otherwise. A store is done when its thread waits for it, and a thread that waits until its stores are
// complete, rather than read, goes on as late as possible. A kernel that does not wait then computes with
// wrong values, and one that relies on the order of its threads may fail.
#include "internal.h"

static bool late() {
  static bool value = emu_env("EMU_LATE", 1);
  return value;
}

static void run_load(const TmaCopy& copy) {
  emu_run_copy(copy);
  emu_mbar_complete_tx(copy.mbar, copy.bytes);
}

void emu_queue_load(const TmaCopy& copy) {
  memset(copy.smem, 0xff, copy.bytes); // NaN until it arrives
  if (late()) emu_cur->block->loads.push_back(copy);
  else run_load(copy);
}

bool emu_run_one_load(EmuBlock* b) {
  if (b->loads.empty()) return false;
  TmaCopy copy = b->loads.front();
  b->loads.pop_front();
  EmuFiber* f = &b->fibers[copy.thread];
  int line = f->line;
  emu_cur = f; // for messages and shared addresses
  f->line = copy.line;
  emu_scheduling = true;
  try {
    run_load(copy);
  } catch (const LaunchFailure&) {
  }
  emu_scheduling = false;
  f->line = line;
  emu_cur = nullptr;
  return true;
}

void emu_queue_store(const TmaCopy& copy) {
  if (late()) emu_cur->block->stores[emu_cur->linear].open.push_back(copy);
  else emu_run_copy(copy);
}

extern "C" void emu_bulk_commit() {
  ThreadStores& stores = emu_cur->block->stores[emu_cur->linear];
  stores.committed.push_back(std::move(stores.open));
  stores.open.clear();
}

extern "C" void emu_bulk_wait(int pending, int read, int line) {
  EmuFiber* f = emu_cur;
  f->line = line;
  ThreadStores& stores = f->block->stores[f->linear];
  for (auto& groups = stores.committed; int(groups.size()) > pending; groups.pop_front()) {
    for (auto& store : groups.front()) emu_run_copy(store);
    stores.written = true;
  }
  if (read || !stores.written) return;
  stores.written = false;
  if (!late()) return;
  f->state = EMU_STORES;
  f->what = "the completion of bulk stores";
  emu_yield();
}

// Lets one thread go on that waits for its stores. Whether there was one.
bool emu_complete_stores(EmuBlock* b) {
  for (auto& f : b->fibers) {
    if (f.state != EMU_STORES) continue;
    f.state = EMU_READY;
    return true;
  }
  return false;
}

// The hardware completes stores after the thread's end, but shared memory may be gone by then.
void emu_check_stores_at_exit(EmuFiber* f) {
  const ThreadStores& stores = f->block->stores[f->linear];
  if (!stores.open.empty()) emu_fail("a bulk store was not committed before the thread's end");
  for (auto& group : stores.committed)
    if (!group.empty())
      emu_fail(
          "the thread exits before its bulk stores have read shared memory (no cp.async.bulk.wait_group)");
}
