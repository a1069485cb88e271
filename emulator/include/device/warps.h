// What the threads of a warp or block do together.
#pragma once

// --- Shuffles

struct EmuShuffle {
  uint64_t in, out;
  int from;
};
static inline void emu_exec_shuffle(EmuFiber** lanes) {
  for (int i = 0; i < 32; i++) {
    if (!lanes[i]) continue;
    EmuShuffle* s = (EmuShuffle*)lanes[i]->arg;
    EmuFiber* other = lanes[s->from & 31];
    s->out = other ? ((EmuShuffle*)other->arg)->in : 0xdeadbeefdeadbeefull; // undefined on a GPU
  }
}
template <class T> static inline T emu_shuffle(unsigned mask, T x, int from, int line) {
  uint64_t words[(sizeof(T) + 7) / 8] = {};
  memcpy(words, &x, sizeof x);
  for (auto& word : words) {
    EmuShuffle s = {word, 0, from};
    emu_warp_collective(emu_what_shuffle, mask, emu_exec_shuffle, &s, line);
    word = s.out;
  }
  T out;
  memcpy(&out, words, sizeof out);
  return out;
}
template <class T> static inline T __shfl_sync(unsigned mask, T x, int from, int width = 32, EMU_LINE) {
  int lane = emu_cur->lane;
  return emu_shuffle(mask, x, (lane & ~(width - 1)) | (from & (width - 1)), line);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32, EMU_LINE) {
  int lane = emu_cur->lane, from = lane ^ bits;
  return emu_shuffle(mask, x, from >= (lane & ~(width - 1)) + width ? lane : from, line);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, EMU_LINE) {
  int lane = emu_cur->lane, from = lane - int(by);
  return emu_shuffle(mask, x, from < (lane & ~(width - 1)) ? lane : from, line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32, EMU_LINE) {
  int lane = emu_cur->lane, from = lane + int(by);
  return emu_shuffle(mask, x, from >= (lane & ~(width - 1)) + width ? lane : from, line);
}

// --- Votes

struct EmuVote {
  bool in;
  unsigned ballot, present; // masks of lanes
};
static inline void emu_exec_vote(EmuFiber** lanes) {
  unsigned ballot = 0, present = 0;
  for (int i = 0; i < 32; i++) {
    if (!lanes[i]) continue;
    present |= 1u << i;
    ballot |= unsigned(((EmuVote*)lanes[i]->arg)->in) << i;
  }
  for (int i = 0; i < 32; i++) {
    if (!lanes[i]) continue;
    EmuVote* vote = (EmuVote*)lanes[i]->arg;
    vote->ballot = ballot;
    vote->present = present;
  }
}
static inline EmuVote emu_vote(unsigned mask, bool x, int line) {
  EmuVote v = {x, 0, 0};
  emu_warp_collective(emu_what_vote, mask, emu_exec_vote, &v, line);
  return v;
}
static inline unsigned __ballot_sync(unsigned mask, int x, EMU_LINE) {
  return emu_vote(mask, x, line).ballot;
}
static inline int __any_sync(unsigned mask, int x, EMU_LINE) { return emu_vote(mask, x, line).ballot != 0; }
static inline int __all_sync(unsigned mask, int x, EMU_LINE) {
  EmuVote v = emu_vote(mask, x, line);
  return v.ballot == v.present;
}
static inline unsigned __activemask() { return 1u << emu_cur->lane; }
static inline void __syncwarp(unsigned mask = ~0u, EMU_LINE) {
  emu_warp_collective(emu_what_syncwarp, mask, nullptr, nullptr, line);
}

// --- Reductions

struct EmuReduce {
  unsigned in, out;
};
template <unsigned (*COMBINE)(unsigned, unsigned)> static inline void emu_exec_reduce(EmuFiber** lanes) {
  unsigned all = 0;
  bool first = true;
  for (int i = 0; i < 32; i++) {
    if (!lanes[i]) continue;
    unsigned x = ((EmuReduce*)lanes[i]->arg)->in;
    all = first ? x : COMBINE(all, x);
    first = false;
  }
  for (int i = 0; i < 32; i++)
    if (lanes[i]) ((EmuReduce*)lanes[i]->arg)->out = all;
}
template <unsigned (*COMBINE)(unsigned, unsigned)>
static inline unsigned emu_reduce(const char* what, unsigned mask, unsigned x, int line) {
  EmuReduce r = {x, 0};
  emu_warp_collective(what, mask, emu_exec_reduce<COMBINE>, &r, line);
  return r.out;
}
#define EMU_REDUCTION(NAME, EXPRESSION)                                                                      \
  static inline unsigned emu_combine##NAME(unsigned a, unsigned b) { return EXPRESSION; }                    \
  static inline unsigned NAME(unsigned mask, unsigned x, EMU_LINE) {                                         \
    static const char what[] = #NAME;                                                                        \
    return emu_reduce<emu_combine##NAME>(what, mask, x, line);                                               \
  }
EMU_REDUCTION(__reduce_add_sync, a + b)
EMU_REDUCTION(__reduce_or_sync, (a) | (b))
EMU_REDUCTION(__reduce_and_sync, (a) & (b))
EMU_REDUCTION(__reduce_max_sync, a > b ? a : b)
EMU_REDUCTION(__reduce_min_sync, a < b ? a : b)

// --- Blocks

static inline void __syncthreads(EMU_LINE) { emu_bar_sync(0, 0, 0, line); }
static inline int __syncthreads_and(int x, EMU_LINE) { return emu_bar_sync(0, 0, x != 0, line).all; }
static inline int __syncthreads_or(int x, EMU_LINE) { return emu_bar_sync(0, 0, x != 0, line).any != 0; }
static inline int __syncthreads_count(int x, EMU_LINE) { return emu_bar_sync(0, 0, x != 0, line).count; }
