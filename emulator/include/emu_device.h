// What CUDA's headers and compiler give a kernel, for g++. tools/kernel/rewrite.py includes it first in each
// kernel's source.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utility>
#include <type_traits>
#include <immintrin.h>
#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
// The last parameter of each function that can wait or fail: the line that calls it.
#define EMU_LINE int line = __builtin_LINE()

#define threadIdx (emu_cur->thread_idx)
#define blockIdx (emu_cur->block_idx)
#define blockDim emu_block_dim
#define gridDim emu_grid_dim
static const int warpSize = 32;

typedef unsigned char uchar;
typedef unsigned short ushort;
#define EMU_VECTORS(T, N)                                                                                    \
  struct __align__(2 * sizeof(T)) N##2 { T x, y; };                                                          \
  struct __align__(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N##4 { T x, y, z, w; };                          \
  static inline N##2 make_##N##2(T x, T y) { return {x, y}; }                                                \
  static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)
EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(long, long)
EMU_VECTORS(unsigned long, ulong)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
typedef emu_uint3 dim3;
typedef emu_uint3 uint3;
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
struct float3 {
  float x, y, z;
};
struct int3 {
  int x, y, z;
};

template <class T, class S> static inline T emu_bits(S x) {
  static_assert(sizeof(T) == sizeof(S), "");
  T t;
  memcpy(&t, &x, sizeof t);
  return t;
}

template <class T> static inline T emu_from_word(uint64_t word) {
  T t;
  memcpy(&t, &word, sizeof t);
  return t;
}

#include "device/numbers.h"
#include "device/functions.h"
#include "device/memory.h"
#include "device/warps.h"
#include "device/libcu.h"

// --- Launches: a kernel with the addresses of its arguments

template <class... A, size_t... I>
static inline void emu_call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*(std::remove_const_t<A>*)args[I]...);
}
template <class... A> static inline void emu_call(void (*kernel)(A...), void** args) {
  emu_call(kernel, args, std::index_sequence_for<A...>());
}
