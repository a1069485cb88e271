// Barriers and copies of libcu++, and cooperative groups.
#pragma once

namespace cuda {
enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };
template <thread_scope S> struct barrier {
  uint64_t state;
  struct arrival_token {
    uint64_t phase;
  };
  arrival_token arrive(unsigned n = 1, EMU_LINE) { return {emu_mbar_arrive(&state, n, line)}; }
  void wait(arrival_token&& t, EMU_LINE) { emu_mbar_wait(&state, t.phase, line); }
  void wait_parity(bool parity, EMU_LINE) { emu_mbar_wait(&state, parity, line); }
  void arrive_and_wait(EMU_LINE) { wait(arrive(1, line), line); }
};
template <thread_scope S> static inline void init(barrier<S>* b, unsigned n) { emu_mbar_init(&b->state, n); }
template <class G, class T, class U, thread_scope S>
static inline void memcpy_async(const G& group, T* to, const U* from, size_t bytes, barrier<S>&) {
  if (group.thread_rank() == 0) memcpy((void*)to, (const void*)from, bytes);
}
template <class T, class U, thread_scope S>
static inline void memcpy_async(T* to, const U* from, size_t bytes, barrier<S>&) {
  memcpy((void*)to, (const void*)from, bytes);
}
namespace device {
template <thread_scope S> static inline unsigned long long* barrier_native_handle(barrier<S>& b) {
  return (unsigned long long*)&b.state;
}
template <thread_scope S> static inline typename barrier<S>::arrival_token
barrier_arrive_tx(barrier<S>& b, unsigned n, unsigned tx, EMU_LINE) {
  emu_mbar_expect_tx(&b.state, tx, line);
  return b.arrive(n, line);
}
template <thread_scope S> static inline void barrier_expect_tx(barrier<S>& b, unsigned tx, EMU_LINE) {
  emu_mbar_expect_tx(&b.state, tx, line);
}
template <class T, class U, thread_scope S>
static inline void memcpy_async_tx(T* to, const U* from, size_t bytes, barrier<S>& b, EMU_LINE) {
  emu_bulk_load((void*)to, (const void*)from, bytes, &b.state, line);
}
namespace experimental {
static inline void fence_proxy_async_shared_cta() {}
static inline void cp_async_bulk_commit_group() { emu_bulk_commit(); }
template <int N> static inline void cp_async_bulk_wait_group(EMU_LINE) { emu_bulk_wait(N, 0, line); }
template <int N> static inline void cp_async_bulk_wait_group_read(EMU_LINE) { emu_bulk_wait(N, 1, line); }
#define EMU_TENSOR_COPY(N, PARAMETERS, ...)                                                                  \
  template <class M> static inline void cp_async_bulk_tensor_##N##d_global_to_shared(                        \
      void* to, const M* map, EMU_UNPACK PARAMETERS, barrier<thread_scope_block>& b, EMU_LINE) {             \
    int c[] = {__VA_ARGS__};                                                                                 \
    emu_tma_load(to, map, N, c, &b.state, line);                                                             \
  }                                                                                                          \
  template <class M> static inline void cp_async_bulk_tensor_##N##d_shared_to_global(                        \
      const M* map, EMU_UNPACK PARAMETERS, const void* from, EMU_LINE) {                                     \
    int c[] = {__VA_ARGS__};                                                                                 \
    emu_tma_store(map, from, N, c, 0, line);                                                                 \
  }
#define EMU_UNPACK(...) __VA_ARGS__
EMU_TENSOR_COPY(1, (int c0), c0)
EMU_TENSOR_COPY(2, (int c0, int c1), c0, c1)
EMU_TENSOR_COPY(3, (int c0, int c1, int c2), c0, c1, c2)
EMU_TENSOR_COPY(4, (int c0, int c1, int c2, int c3), c0, c1, c2, c3)
EMU_TENSOR_COPY(5, (int c0, int c1, int c2, int c3, int c4), c0, c1, c2, c3, c4)
} // namespace experimental
} // namespace device
} // namespace cuda
namespace cooperative_groups {
struct thread_block {
  unsigned thread_rank() const { return emu_cur->linear; }
  unsigned size() const { return emu_block_dim.x * emu_block_dim.y * emu_block_dim.z; }
  void sync(EMU_LINE) const { emu_bar_sync(0, 0, 0, line); }
};
static inline thread_block this_thread_block() { return {}; }
struct cluster_group {
  unsigned block_rank() const { return 0; }
  dim3 block_index() const { return {0, 0, 0}; }
  void sync() const {}
};
static inline cluster_group this_cluster() { return {}; }
} // namespace cooperative_groups
