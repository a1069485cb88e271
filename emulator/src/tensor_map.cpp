// cuTensorMapEncodeTiled, with the rules that the driver checks. The opaque bytes of a map hold a mark and an
// index.
#include "driver.h"
#include <cstdio>

static std::vector<TensorMap*> maps;
static const uint64_t MARK = 0x70616d20756d65ull; // "emu map"

const TensorMap* emu_tensor_map(const void* opaque) {
  const uint64_t* words = (const uint64_t*)opaque;
  return words[0] == MARK && words[1] < maps.size() ? maps[words[1]] : nullptr;
}

// Bytes of an element, by CUtensorMapDataType.
static const int TYPE_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
constexpr int TYPES = sizeof TYPE_BYTES / sizeof *TYPE_BYTES;

// What is wrong with dimension d; null if nothing.
static const char* wrong_dimension(const TensorMap& m, int d) {
  if (d && (m.strides[d] % 16 || m.strides[d] >= 1ull << 40))
    return "a stride is not a multiple of 16, or too large";
  if (!m.dims[d] || m.dims[d] > 1ull << 32) return "a dimension is 0 or above 2^32";
  if (!m.box[d] || m.box[d] > 256) return "a side of the box is 0 or above 256";
  if (!m.steps[d] || m.steps[d] > 8) return "an element stride is 0 or above 8";
  return nullptr;
}

static const char* wrong_box(const TensorMap& m) {
  if (m.swizzle > 3) return "this swizzle is not emulated";
  unsigned inner = m.box[0] * m.size;
  if (inner % 16) return "the box's inner bytes are not a multiple of 16";
  if (m.swizzle && inner > 16u << m.swizzle) return "the box's inner bytes exceed the swizzle";
  return nullptr;
}

static CUresult refuse(const char* why) {
  fprintf(stderr, "EMU ERROR: cuTensorMapEncodeTiled: %s\n", why);
  return INVALID_VALUE;
}

// Equal maps have one index.
static size_t index_of(const TensorMap& m) {
  for (size_t i = 0; i < maps.size(); i++)
    if (!memcmp(maps[i], &m, sizeof m)) return i;
  maps.push_back(new TensorMap(m));
  return maps.size() - 1;
}

CUDA_API cuTensorMapEncodeTiled(uint64_t* out, int type, unsigned rank, void* base, const uint64_t* dims,
                                const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                                int interleave, int swizzle, int, int fill) {
  Guard guard(emu_driver_lock);
  if (rank < 1 || rank > 5 || type < 0 || type >= TYPES) return refuse("rank or type");
  if (interleave) return refuse("interleaved layouts are not emulated");
  if ((uintptr_t)base % 16) return refuse("the address is not a multiple of 16");
  TensorMap m;
  memset(&m, 0, sizeof m); // with the padding, because maps are compared by bytes
  m.type = type;
  m.size = TYPE_BYTES[type];
  m.rank = rank;
  m.swizzle = swizzle;
  m.fill = fill;
  m.base = (char*)base;
  for (unsigned d = 0; d < 5; d++) {
    bool there = d < rank;
    m.dims[d] = there ? dims[d] : 1;
    m.box[d] = there ? box[d] : 1;
    m.steps[d] = there ? steps[d] : 1;
    m.strides[d] = !there ? 0 : d ? strides[d - 1] : m.size;
    if (const char* why = there ? wrong_dimension(m, d) : nullptr) return refuse(why);
  }
  if (const char* why = wrong_box(m)) return refuse(why);
  memset(out, 0, 128);
  out[0] = MARK;
  out[1] = index_of(m);
  return CUDA_OK;
}

static CUresult no_im2col() {
  fprintf(stderr, "EMU ERROR: im2col tensor maps are not emulated\n");
  return NOT_SUPPORTED;
}
CUDA_API cuTensorMapEncodeIm2col() { return no_im2col(); }
CUDA_API cuTensorMapEncodeIm2colWide() { return no_im2col(); }
