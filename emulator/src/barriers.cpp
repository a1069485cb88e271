// What threads wait for: collectives of warps and warpgroups, named barriers, mbarriers, words that another
// changes.
#include "internal.h"
#include <cstdio>

// --- Collectives

extern "C" {
extern const char emu_what_shuffle[] = "shuffle", emu_what_vote[] = "vote";
extern const char emu_what_syncwarp[] = "__syncwarp", emu_what_elect[] = "elect";
}

// Runs a collective if the lanes in need0 (0 to 63) and need1 (64 to 127) have arrived, and wakes them.
static void run_if_complete(EmuBlock* b, Collective& c, int first, int lanes, uint64_t need0,
                            uint64_t need1) {
  if (c.arrived[0] != need0 || c.arrived[1] != need1) return;
  EmuFiber* all[128];
  for (int i = 0; i < lanes; i++)
    all[i] = c.arrived[i / 64] >> (i % 64) & 1 ? &b->fibers[first + i] : nullptr;
  c.used = false;
  if (c.exec) c.exec(all);
  for (int i = 0; i < lanes; i++)
    if (all[i]) all[i]->state = EMU_READY;
}

static void begin(Collective& c, const char* what, unsigned mask, EmuExec exec, int line) {
  c.used = true;
  c.what = what;
  c.mask = mask;
  c.exec = exec;
  c.line = line;
  c.arrived[0] = c.arrived[1] = 0;
}

// The pending collective of these lanes, or a free place.
static Collective& find_collective(Warp& w, const char* what, unsigned mask, EmuExec exec, int line) {
  for (auto& c : w.pending) {
    if (!c.used || !(c.mask & mask)) continue;
    if (c.mask != mask || c.what != what)
      emu_fail("%s with mask %08x, while other lanes of the warp wait at %s with mask %08x, line %d", what,
               mask, c.what, c.mask, c.line);
    return c;
  }
  for (auto& c : w.pending)
    if (!c.used) {
      begin(c, what, mask, exec, line);
      return c;
    }
  emu_fail("%s: too many pending collectives in a warp", what);
}

extern "C" void emu_warp_collective(const char* what, unsigned mask, EmuExec exec, void* arg, int line) {
  EmuFiber* f = emu_cur;
  f->line = line, f->what = what, f->arg = arg;
  if (!(mask >> f->lane & 1))
    emu_fail("%s: the mask %08x leaves out the calling lane %d", what, mask, f->lane);
  Warp& w = f->block->warps[f->warp];
  Collective& c = find_collective(w, what, mask, exec, line);
  c.arrived[0] |= 1ull << f->lane;
  f->state = EMU_BLOCKED;
  run_if_complete(f->block, c, f->warp * 32, 32, mask & w.alive, 0);
  if (f->state != EMU_READY) emu_yield(); // READY: this was the last lane to arrive
}

extern "C" void emu_group_collective(const char* what, EmuExec exec, void* arg, int line) {
  EmuFiber* f = emu_cur;
  f->line = line, f->what = what, f->arg = arg;
  EmuBlock* b = f->block;
  int group = f->linear / 128, at = f->linear % 128;
  if ((group + 1) * 128 > b->threads) emu_fail("%s: warpgroup %d has fewer than 128 threads", what, group);
  Collective& c = b->groups[group];
  if (!c.used) begin(c, what, ~0u, exec, line);
  if (c.what != what || c.line != line)
    emu_fail("%s, while other threads of the warpgroup are at %s, line %d", what, c.what, c.line);
  c.arrived[at / 64] |= 1ull << (at % 64);
  f->state = EMU_BLOCKED;
  run_if_complete(b, c, group * 128, 128, ~0ull, ~0ull);
  if (f->state != EMU_READY) emu_yield(); // READY: this was the last lane to arrive
}

// --- Named barriers

static void release_bar(EmuBlock* b, int id) {
  NamedBarrier& bar = b->bars[id];
  for (auto& f : b->fibers) {
    if (f.state != EMU_BLOCKED || f.barrier != id) continue;
    *(EmuBarResult*)f.arg = {bar.any, bar.all, bar.count};
    f.barrier = -1;
    f.state = EMU_READY;
  }
  bar = NamedBarrier();
}

static NamedBarrier& arrive_at_bar(int id, int threads, int line) {
  EmuFiber* f = emu_cur;
  EmuBlock* b = f->block;
  f->line = line;
  if (id < 0 || id > 15) emu_fail("barrier %d: only 0 to 15 exist", id);
  if (threads % 32 || threads > ((b->threads + 31) & ~31))
    emu_fail("barrier %d of %d threads in a block of %d", id, threads, b->threads);
  NamedBarrier& bar = b->bars[id];
  if (bar.arrived && bar.threads != threads)
    emu_fail("barrier %d: %d threads, but others said %d (line %d)", id, threads, bar.threads, bar.line);
  bar.threads = threads;
  bar.line = line;
  bar.arrived++;
  return bar;
}

extern "C" EmuBarResult emu_bar_sync(int id, int threads, unsigned value, int line) {
  EmuFiber* f = emu_cur;
  NamedBarrier& bar = arrive_at_bar(id, threads, line);
  bar.any |= value;
  bar.all &= value != 0;
  bar.count += value != 0;
  EmuBarResult result;
  f->what = "barrier", f->arg = &result, f->barrier = id, f->state = EMU_BLOCKED;
  if (bar.arrived == (threads ? threads : f->block->alive)) release_bar(f->block, id);
  else emu_yield();
  return result;
}

extern "C" void emu_bar_arrive(int id, int threads, int line) {
  NamedBarrier& bar = arrive_at_bar(id, threads, line);
  if (bar.arrived == threads) release_bar(emu_cur->block, id);
}

void emu_release_after_exit(EmuFiber* f) {
  EmuBlock* b = f->block;
  Warp& w = b->warps[f->warp];
  for (auto& c : w.pending)
    if (c.used) run_if_complete(b, c, f->warp * 32, 32, c.mask & w.alive, 0);
  for (int id = 0; id < 16; id++) {
    NamedBarrier& bar = b->bars[id];
    if (bar.arrived && bar.threads == 0 && bar.arrived == b->alive) release_bar(b, id);
  }
}

// --- mbarriers: a word of shared memory that holds
//     pending arrivals (bits 0 to 19), expected ones (20 to 39), the phase (40), the bytes on their way (41
//     to 61, signed), and 2 in bits 62 and 63, which tells an initialised word from others.

struct Mbar {
  unsigned pending, expected, phase;
  int tx;
};

static Mbar decode(uint64_t v) {
  return {unsigned(v & 0xfffff), unsigned(v >> 20 & 0xfffff), unsigned(v >> 40 & 1),
          int(int64_t(v << 2) >> 43)};
}
static uint64_t encode(const Mbar& m) {
  return 2ull << 62 | (uint64_t(m.tx) & 0x1fffff) << 41 | uint64_t(m.phase) << 40 |
         uint64_t(m.expected) << 20 | m.pending;
}
static Mbar read_mbar(const uint64_t* b) {
  if (*b >> 62 != 2)
    emu_fail("the mbarrier at shared address %#lx is not initialised (%016lx)",
             emu_shared_address(emu_cur, b), (unsigned long)*b);
  return decode(*b);
}

// Stores the state, and completes the phase if nothing is pending.
static void update(uint64_t* at, Mbar m) {
  if (m.pending == 0 && m.tx == 0) {
    EmuBlock* b = emu_cur->block;
    for (auto& f : b->fibers)
      if (f.state == EMU_MBAR && f.mbar == at && f.parity != int(m.phase))
        emu_fail(
            "mbarrier overrun: the barrier at shared address %#lx completes the phase of parity %u while "
            "thread %d has not yet left its wait for parity %d (line %d)",
            emu_shared_address(emu_cur, at), m.phase, f.linear, f.parity, f.line);
    m.phase ^= 1;
    m.pending = m.expected;
  }
  *at = encode(m);
}

extern "C" void emu_mbar_init(uint64_t* b, unsigned count) {
  if (count == 0 || count > 0xfffff) emu_fail("mbarrier initialised with %u arrivals", count);
  if ((uintptr_t)b % 8) emu_fail("mbarrier at an unaligned address");
  *b = encode({count, count, 0, 0});
}

extern "C" void emu_mbar_inval(uint64_t* b) { *b = ~0ull; }

extern "C" uint64_t emu_mbar_arrive(uint64_t* b, unsigned count, int line) {
  emu_cur->line = line;
  Mbar m = read_mbar(b);
  if (m.pending < count)
    emu_fail("mbarrier overrun: %u arrivals where %u are pending (of %u, phase %u)", count, m.pending,
             m.expected, m.phase);
  m.pending -= count;
  update(b, m);
  return m.phase;
}

extern "C" void emu_mbar_expect_tx(uint64_t* b, unsigned bytes, int line) {
  emu_cur->line = line;
  Mbar m = read_mbar(b);
  m.tx += bytes;
  if (m.tx >= 1 << 20) emu_fail("mbarrier: %d bytes expected, more than 2^20 - 1", m.tx);
  *b = encode(m);
}

extern "C" void emu_mbar_complete_tx(uint64_t* b, unsigned bytes) {
  Mbar m = read_mbar(b);
  m.tx -= bytes;
  if (m.tx <= -(1 << 20)) emu_fail("mbarrier: transaction count %d", m.tx);
  update(b, m);
}

bool emu_mbar_done(const EmuFiber* f) { return int(decode(*f->mbar).phase) != f->parity; }

std::string emu_mbar_text(const EmuFiber* f) {
  Mbar m = decode(*f->mbar);
  char text[200];
  snprintf(text, sizeof text,
           " at shared address %#lx, parity %d (phase %u, %u of %u pending, %d bytes outstanding)",
           emu_shared_address(f, f->mbar), f->parity, m.phase, m.pending, m.expected, m.tx);
  return text;
}

extern "C" int emu_mbar_test(uint64_t* b, unsigned parity, int line) {
  emu_cur->line = line;
  return read_mbar(b).phase != (parity & 1);
}

extern "C" void emu_mbar_wait(uint64_t* b, unsigned parity, int line) {
  EmuFiber* f = emu_cur;
  f->line = line, f->what = "mbarrier";
  if (parity > 1) emu_fail("mbarrier wait for parity %u", parity);
  if (read_mbar(b).phase != parity) return;
  f->mbar = b, f->parity = parity, f->state = EMU_MBAR;
  emu_yield();
}

// --- Words that another thread changes

uint64_t emu_read_word(const void* at, int size) {
  uint64_t v = 0;
  memcpy(&v, at, size);
  return v;
}

bool emu_spin_changed(const EmuFiber& f) { return emu_read_word(f.spin_addr, f.spin_size) != f.spin_value; }

extern "C" uint64_t emu_load_acquire(const void* at, int size, int line) {
  EmuFiber* f = emu_cur;
  f->line = line, f->what = "load in a loop";
  uint64_t v = emu_read_word(at, size);
  if (f->spin_addr == at && f->spin_value == v) {
    f->spin_size = size;
    f->state = EMU_SPIN;
    emu_yield();
    v = emu_read_word(at, size);
  }
  f->spin_addr = at;
  f->spin_value = v;
  return v;
}
