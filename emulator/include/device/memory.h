// Loads, atomics, addresses, and the operands of rewritten PTX.
#pragma once

// --- Loads with a hint

template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }

// --- Atomics: only one thread runs at a time

template <class T> static inline T atomicAdd(T* p, std::common_type_t<T> v, EMU_LINE) {
  if constexpr (std::is_integral<T>::value) {
    if (v == 0) return emu_from_word<T>(emu_load_acquire(p, sizeof(T), line)); // a load, perhaps in a loop
  }
  T old = *p;
  *p = old + v;
  return old;
}
static inline float2 atomicAdd(float2* p, float2 v) {
  float2 old = *p;
  *p = {old.x + v.x, old.y + v.y};
  return old;
}
static inline float4 atomicAdd(float4* p, float4 v) {
  float4 old = *p;
  *p = {old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w};
  return old;
}
#define EMU_ATOMIC(NAME, EXPRESSION)                                                                         \
  template <class T> static inline T NAME(T* p, std::common_type_t<T> v) {                                   \
    T old = *p;                                                                                              \
    *p = EXPRESSION;                                                                                         \
    return old;                                                                                              \
  }
EMU_ATOMIC(atomicSub, old - v)
EMU_ATOMIC(atomicExch, v)
EMU_ATOMIC(atomicAnd, (old) & (v))
EMU_ATOMIC(atomicOr, old | v)
EMU_ATOMIC(atomicXor, old ^ v)
EMU_ATOMIC(atomicMax, old > v ? old : v)
EMU_ATOMIC(atomicMin, old < v ? old : v)
template <class T> static inline T atomicCAS(T* p, std::common_type_t<T> compare, std::common_type_t<T> v) {
  T old = *p;
  if (!memcmp(&old, &compare, sizeof old)) *p = v;
  return old;
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

// --- Addresses

static inline size_t __cvta_generic_to_shared(const void* p) {
  return (const char*)p - emu_cur->smem + EMU_SMEM_BASE;
}
static inline void* __cvta_shared_to_generic(size_t a) { return emu_cur->smem + a - EMU_SMEM_BASE; }
static inline size_t __cvta_generic_to_global(const void* p) { return (size_t)p; }
static inline char* emu_shared(uint32_t a) { return emu_cur->smem + a - EMU_SMEM_BASE; }

// --- Operands of PTX: as bits of 64, 32 or 16, and an output's assignment

template <class T> static inline uint64_t emu_word(T x) {
  if constexpr (std::is_floating_point<T>::value) {
    uint64_t word = 0;
    memcpy(&word, &x, sizeof x);
    return word;
  } else {
    return (uint64_t)x;
  }
}
template <class T> static inline uint32_t emu_word32(T x) {
  if constexpr (std::is_integral<T>::value) {
    return (uint32_t)x;
  } else {
    static_assert(sizeof(T) == 4, "an operand of 32 bits");
    return emu_bits<uint32_t>(x);
  }
}
template <class T> static inline uint16_t emu_word16(T x) {
  if constexpr (std::is_integral<T>::value) return x;
  else return emu_bits<uint16_t>(x);
}
template <class T, class S> static inline void emu_set(T& to, S v) {
  if constexpr (std::is_integral<T>::value && std::is_integral<S>::value) {
    to = T(v);
  } else if constexpr (std::is_same<T, S>::value) {
    to = v;
  } else {
    static_assert(sizeof(T) == sizeof(S), "an output of another size");
    memcpy(&to, &v, sizeof v);
  }
}
static inline float emu_ftz(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }
static inline float emu_saturate(float x) { return x >= 0.f ? (x <= 1.f ? x : 1.f) : 0.f; }
static inline uint32_t emu_mul_bf16x2(uint32_t a, uint32_t b) {
  float low = emu_bits<float>(a << 16) * emu_bits<float>(b << 16);
  float high = emu_bits<float>(a & 0xffff0000u) * emu_bits<float>(b & 0xffff0000u);
  return uint32_t(emu_to_bf16(high)) << 16 | emu_to_bf16(low);
}
static inline uint32_t emu_saturate_s32(long long x) {
  return uint32_t(x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x);
}
