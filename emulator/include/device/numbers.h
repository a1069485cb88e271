// Numbers of 16 and 8 bits, and pairs of them. Operations round once, from f32.
#pragma once

static inline float emu_bf16_to_f32(uint16_t x) {
  uint32_t u = uint32_t(x) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t emu_to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  uint32_t r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : r;
}
struct __half;
struct __nv_bfloat16 {
  uint16_t __x;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) : __x(emu_to_bf16(f)) {}
  __nv_bfloat16(double f) : __x(emu_to_bf16(float(f))) {}
  template <class T, class = std::enable_if_t<std::is_integral<T>::value>> __nv_bfloat16(T i)
      : __x(emu_to_bf16(float(i))) {}
  explicit __nv_bfloat16(__half h);
  operator float() const { return emu_bf16_to_f32(__x); }
};
struct __half {
  uint16_t __x;
  __half() = default;
  __half(float f) : __x(_cvtss_sh(f, 0)) {}
  __half(double f) : __x(_cvtss_sh(float(f), 0)) {}
  template <class T, class = std::enable_if_t<std::is_integral<T>::value>> __half(T i)
      : __x(_cvtss_sh(float(i), 0)) {}
  explicit __half(__nv_bfloat16 b) : __half(float(b)) {}
  operator float() const { return _cvtsh_ss(__x); }
};
inline __nv_bfloat16::__nv_bfloat16(__half h) : __nv_bfloat16(float(h)) {}
typedef __half half;
typedef __nv_bfloat16 nv_bfloat16;
struct __align__(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __align__(4) __half2 {
  __half x, y;
};
typedef __nv_bfloat162 nv_bfloat162;
typedef __half2 half2;
#define EMU_HALF_OPERATORS(T)                                                                                \
  static inline T operator+(T a, T b) { return T(float(a) + float(b)); }                                     \
  static inline T operator-(T a, T b) { return T(float(a) - float(b)); }                                     \
  static inline T operator*(T a, T b) { return T(float(a) * float(b)); }                                     \
  static inline T operator/(T a, T b) { return T(float(a) / float(b)); }                                     \
  static inline T& operator+=(T& a, T b) { return a = a + b; }                                               \
  static inline T& operator-=(T& a, T b) { return a = a - b; }                                               \
  static inline T& operator*=(T& a, T b) { return a = a * b; }                                               \
  static inline T& operator/=(T& a, T b) { return a = a / b; }                                               \
  static inline T operator-(T a) {                                                                           \
    a.__x ^= 0x8000;                                                                                         \
    return a;                                                                                                \
  }                                                                                                          \
  static inline T operator+(T a) { return a; }                                                               \
  static inline bool operator==(T a, T b) { return float(a) == float(b); }                                   \
  static inline bool operator!=(T a, T b) { return float(a) != float(b); }                                   \
  static inline bool operator<(T a, T b) { return float(a) < float(b); }                                     \
  static inline bool operator>(T a, T b) { return float(a) > float(b); }                                     \
  static inline bool operator<=(T a, T b) { return float(a) <= float(b); }                                   \
  static inline bool operator>=(T a, T b) { return float(a) >= float(b); }                                   \
  static inline T hexp(T a) { return T(expf(a)); }                                                           \
  static inline T hlog(T a) { return T(logf(a)); }                                                           \
  static inline T hsin(T a) { return T(sinf(a)); }                                                           \
  static inline T hcos(T a) { return T(cosf(a)); }                                                           \
  static inline T hsqrt(T a) { return T(sqrtf(a)); }                                                         \
  static inline T hrsqrt(T a) { return T(1.f / sqrtf(a)); }                                                  \
  static inline T hrcp(T a) { return T(1.f / float(a)); }                                                    \
  static inline T hfloor(T a) { return T(floorf(a)); }                                                       \
  static inline T hceil(T a) { return T(ceilf(a)); }                                                         \
  static inline T htrunc(T a) { return T(truncf(a)); }                                                       \
  static inline T hrint(T a) { return T(rintf(a)); }                                                         \
  static inline T htanh(T a) { return T(tanhf(a)); }                                                         \
  static inline T hexp2(T a) { return T(exp2f(a)); }                                                         \
  static inline T hlog2(T a) { return T(log2f(a)); }                                                         \
  static inline T __habs(T a) {                                                                              \
    a.__x &= 0x7fff;                                                                                         \
    return a;                                                                                                \
  }                                                                                                          \
  static inline T __hneg(T a) { return -a; }                                                                 \
  static inline T abs(T a) { return __habs(a); }                                                             \
  static inline bool __hisnan(T a) { return float(a) != float(a); }                                          \
  static inline int __hisinf(T a) { return isinf(float(a)); }                                                \
  static inline T __hmax(T a, T b) { return T(fmaxf(a, b)); }                                                \
  static inline T __hmin(T a, T b) { return T(fminf(a, b)); }                                                \
  static inline T __hfma(T a, T b, T c) { return T(fmaf(a, b, c)); }
EMU_HALF_OPERATORS(__nv_bfloat16)
EMU_HALF_OPERATORS(__half)
#define EMU_PAIR(T, P)                                                                                       \
  static inline P operator+(P a, P b) { return {a.x + b.x, a.y + b.y}; }                                     \
  static inline P operator-(P a, P b) { return {a.x - b.x, a.y - b.y}; }                                     \
  static inline P operator*(P a, P b) { return {a.x * b.x, a.y * b.y}; }                                     \
  static inline P operator/(P a, P b) { return {a.x / b.x, a.y / b.y}; }                                     \
  static inline P& operator+=(P& a, P b) { return a = a + b; }                                               \
  static inline P& operator*=(P& a, P b) { return a = a * b; }                                               \
  static inline P operator-(P a) { return {-a.x, -a.y}; }                                                    \
  static inline P h2exp(P a) { return {hexp(a.x), hexp(a.y)}; }                                              \
  static inline P h2log(P a) { return {hlog(a.x), hlog(a.y)}; }                                              \
  static inline P h2sin(P a) { return {hsin(a.x), hsin(a.y)}; }                                              \
  static inline P h2cos(P a) { return {hcos(a.x), hcos(a.y)}; }                                              \
  static inline P h2sqrt(P a) { return {hsqrt(a.x), hsqrt(a.y)}; }                                           \
  static inline P h2rsqrt(P a) { return {hrsqrt(a.x), hrsqrt(a.y)}; }                                        \
  static inline P h2rcp(P a) { return {hrcp(a.x), hrcp(a.y)}; }                                              \
  static inline P h2floor(P a) { return {hfloor(a.x), hfloor(a.y)}; }                                        \
  static inline P h2ceil(P a) { return {hceil(a.x), hceil(a.y)}; }                                           \
  static inline P h2trunc(P a) { return {htrunc(a.x), htrunc(a.y)}; }                                        \
  static inline P h2rint(P a) { return {hrint(a.x), hrint(a.y)}; }                                           \
  static inline P h2tanh(P a) { return {htanh(a.x), htanh(a.y)}; }                                           \
  static inline P __hmax2(P a, P b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                         \
  static inline P __hmin2(P a, P b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                         \
  static inline P __habs2(P a) { return {__habs(a.x), __habs(a.y)}; }                                        \
  static inline P __hneg2(P a) { return -a; }                                                                \
  static inline P __hfma2(P a, P b, P c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
EMU_PAIR(__nv_bfloat16, __nv_bfloat162)
EMU_PAIR(__half, __half2)
static inline float __bfloat162float(__nv_bfloat16 x) { return x; }
static inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline float __half2float(__half x) { return x; }
static inline __half __float2half(float x) { return x; }
static inline float2 __bfloat1622float2(__nv_bfloat162 p) { return {float(p.x), float(p.y)}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 p) { return {p.x, p.y}; }
static inline float2 __half22float2(__half2 p) { return {float(p.x), float(p.y)}; }
static inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }

// --- Numbers of 8 bits

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
struct __half_raw {
  unsigned short x;
  operator __half() const {
    __half h;
    h.__x = x;
    return h;
  }
};
static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t s,
                                                       __nv_fp8_interpretation_t k) {
  if (s == __NV_NOSAT) { // overflow: NaN for e4m3, infinity for e5m2
    float a = fabsf(x), top = k == __NV_E4M3 ? 464.f : 61440.f;
    if (a > top || (a == top && k == __NV_E5M2))
      return (signbit(x) ? 0x80 : 0) | (k == __NV_E4M3 ? 0x7f : 0x7c);
  }
  return k == __NV_E4M3 ? emu_f32_to_e4m3(x) : emu_f32_to_e5m2(x);
}
static inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 p, __nv_saturation_t s,
                                                            __nv_fp8_interpretation_t k) {
  return __nv_cvt_float_to_fp8(p.x, s, k) | __nv_cvt_float_to_fp8(p.y, s, k) << 8;
}
static inline __half __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t k) {
  return __half(k == __NV_E4M3 ? emu_e4m3_to_f32(x) : emu_e5m2_to_f32(x));
}
