// Copies by the TMA: boxes of a tensor map, and plain bytes.
#include "internal.h"
#include "numbers.h"

// --- Boxes

// Elements that a box has along dimension d.
static unsigned box_count(const TensorMap& m, int d) { return (m.box[d] + m.steps[d] - 1) / m.steps[d]; }

// A row of a box: its elements along dimension 0.
struct BoxRow {
  char* smem;     // before the swizzle
  bool inside;    // in all dimensions but 0
  char* global;   // of coordinate 0
  int64_t first;  // coordinate of the first element
  unsigned count; // elements
};

template <class F> static void for_each_row(const TmaCopy& copy, F f) {
  const TensorMap& m = *copy.map;
  BoxRow row = {copy.smem, true, nullptr, copy.coords[0], box_count(m, 0)};
  unsigned counts[5] = {1, 1, 1, 1, 1}, at[5] = {};
  for (int d = 1; d < m.rank; d++) counts[d] = box_count(m, d);
  unsigned rows = counts[1] * counts[2] * counts[3] * counts[4];
  for (unsigned i = 0; i < rows; i++) {
    row.inside = true;
    row.global = m.base;
    for (int d = 1; d < m.rank; d++) {
      int64_t p = int64_t(copy.coords[d]) + int64_t(at[d]) * m.steps[d];
      row.inside &= p >= 0 && p < int64_t(m.dims[d]);
      row.global += p * int64_t(m.strides[d]);
    }
    f(row);
    row.smem += row.count * m.size;
    for (int d = 1; d < 5 && ++at[d] == counts[d]; d++) at[d] = 0;
  }
}

// The place of 16 bytes in shared memory. The swizzle is of addresses, and shared memory starts at a multiple
// of 1024.
static char* swizzled(char* smem, char* at, int mode) {
  uint64_t address = at - smem;
  unsigned bits = mode == 3 ? 7 : mode == 2 ? 3 : mode == 1 ? 1 : 0;
  return smem + (address ^ ((address >> 7 & bits) << 4));
}

static void add(const TensorMap& m, char* global, const char* smem) {
  enum { U32 = 2, S32 = 3, F32 = 7, BF16 = 9 };
  if (m.type == F32) *(float*)global += *(const float*)smem;
  else if (m.type == BF16)
    *(uint16_t*)global = emu_f32_to_bf16(emu_bf16(*(uint16_t*)global) + emu_bf16(*(const uint16_t*)smem));
  else if (m.type == U32 || m.type == S32) *(uint32_t*)global += *(const uint32_t*)smem;
  else emu_fail("cp.reduce.async.bulk.tensor of data type %d is not emulated", m.type);
}

static void copy_element(const TmaCopy& copy, char* smem, char* global, bool inside) {
  const TensorMap& m = *copy.map;
  if (copy.kind == CopyKind::Load) {
    if (inside) memcpy(smem, global, m.size);
    else memset(smem, m.fill ? 0xff : 0, m.size);
  } else if (inside && copy.kind == CopyKind::Store) {
    memcpy(global, smem, m.size);
  } else if (inside) {
    add(m, global, smem);
  }
}

// The swizzle moves pieces of 16 bytes.
static void copy_row(const TmaCopy& copy, const BoxRow& row) {
  const TensorMap& m = *copy.map;
  unsigned per_piece = 16 / m.size;
  for (unsigned first = 0; first < row.count; first += per_piece) {
    unsigned count = std::min(per_piece, row.count - first);
    char* smem = swizzled(emu_cur->smem, row.smem + first * m.size, m.swizzle);
    int64_t x = row.first + int64_t(first) * m.steps[0];
    char* global = row.global + x * m.size;
    bool whole = row.inside && x >= 0 && m.steps[0] == 1 && x + count <= int64_t(m.dims[0]);
    if (whole && copy.kind == CopyKind::Load) {
      memcpy(smem, global, count * m.size);
    } else if (whole && copy.kind == CopyKind::Store) {
      memcpy(global, smem, count * m.size);
    } else {
      for (unsigned i = 0; i < count; i++, x += m.steps[0])
        copy_element(copy, smem + i * m.size, row.global + x * m.size,
                     row.inside && x >= 0 && x < int64_t(m.dims[0]));
    }
  }
}

static void copy_bytes(const TmaCopy& copy) {
  if (copy.kind == CopyKind::Load) {
    memcpy(copy.smem, copy.global, copy.bytes);
  } else if (copy.kind == CopyKind::Store) {
    memcpy(copy.global, copy.smem, copy.bytes);
  } else {
    for (unsigned i = 0; i < copy.bytes / 4; i++) ((float*)copy.global)[i] += ((const float*)copy.smem)[i];
  }
}

void emu_run_copy(const TmaCopy& copy) {
  if (!copy.map) copy_bytes(copy);
  else for_each_row(copy, [&](const BoxRow& row) { copy_row(copy, row); });
}

// --- What kernels call

static TmaCopy box_copy(CopyKind kind, const void* map, const void* smem, int rank, const int* coords,
                        int line) {
  emu_cur->line = line;
  const TensorMap* m = emu_tensor_map(map);
  if (!m) emu_fail("the tensor map is not one of cuTensorMapEncodeTiled");
  if (m->rank != rank) emu_fail("a copy of rank %d with a tensor map of rank %d", rank, m->rank);
  if (((const char*)smem - emu_cur->smem) % 128)
    emu_fail("tensor copy at shared address %#lx, which is not a multiple of 128",
             emu_shared_address(emu_cur, smem));
  TmaCopy copy = {};
  copy.kind = kind;
  copy.map = m;
  copy.smem = (char*)smem;
  copy.thread = emu_cur->linear;
  copy.line = line;
  copy.bytes = m->size;
  for (int d = 0; d < rank; d++) {
    copy.coords[d] = coords[d];
    copy.bytes *= box_count(*m, d);
  }
  return copy;
}

static TmaCopy bulk_copy(CopyKind kind, const void* smem, const void* global, unsigned bytes, int line) {
  emu_cur->line = line;
  if (bytes % 16 || (uintptr_t)global % 16 || (uintptr_t)smem % 16)
    emu_fail("bulk copy of %u bytes between %p and shared address %#lx: multiples of 16 are needed", bytes,
             global, emu_shared_address(emu_cur, smem));
  TmaCopy copy = {};
  copy.kind = kind;
  copy.smem = (char*)smem;
  copy.global = (char*)global;
  copy.bytes = bytes;
  copy.thread = emu_cur->linear;
  copy.line = line;
  return copy;
}

extern "C" void emu_tma_load(void* smem, const void* map, int rank, const int* coords, uint64_t* mbar,
                             int line) {
  TmaCopy copy = box_copy(CopyKind::Load, map, smem, rank, coords, line);
  copy.mbar = mbar;
  emu_queue_load(copy);
}

extern "C" void emu_tma_store(const void* map, const void* smem, int rank, const int* coords, int adds,
                              int line) {
  emu_queue_store(box_copy(adds ? CopyKind::StoreAdd : CopyKind::Store, map, smem, rank, coords, line));
}

extern "C" void emu_bulk_load(void* smem, const void* global, unsigned bytes, uint64_t* mbar, int line) {
  TmaCopy copy = bulk_copy(CopyKind::Load, smem, global, bytes, line);
  copy.mbar = mbar;
  emu_queue_load(copy);
}

extern "C" void emu_bulk_store(void* global, const void* smem, unsigned bytes, int adds_f32, int line) {
  emu_queue_store(bulk_copy(adds_f32 ? CopyKind::StoreAdd : CopyKind::Store, smem, global, bytes, line));
}
