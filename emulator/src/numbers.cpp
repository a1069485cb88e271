// Numbers of 8 and 16 bits.
#include "numbers.h"
#include <cmath>

extern "C" uint16_t emu_f32_to_bf16(float x) {
  if (x != x) return 0x7fff;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; // nearest, ties to even
}

static float fp8_value(uint8_t x, int mantissa_bits, int bias) {
  int one = 1 << mantissa_bits, m = x & (one - 1), e = (x & 0x7f) >> mantissa_bits;
  float v = e ? std::ldexp(1.f + float(m) / one, e - bias) : std::ldexp(float(m) / one, 1 - bias);
  return x & 0x80 ? -v : v;
}

Fp8Tables::Fp8Tables() {
  for (int i = 0; i < 256; i++) {
    int size = i & 0x7f;
    e4m3[i] = size == 0x7f ? NAN : fp8_value(i, 3, 7);
    e5m2[i] = size > 0x7c ? NAN : size == 0x7c ? (i & 0x80 ? -INFINITY : INFINITY) : fp8_value(i, 2, 15);
  }
}

const Fp8Tables& emu_fp8_tables() {
  static Fp8Tables tables;
  return tables;
}

// Nearest, ties to even; above the largest finite value `most`, that value. A table rises with the bits.
static uint8_t to_fp8(float x, const float* table, uint8_t most) {
  if (x != x) return 0x7f;
  uint8_t sign = std::signbit(x) ? 0x80 : 0;
  float a = std::fabs(x);
  if (a >= table[most]) return sign | most;
  int low = 0, high = most;
  while (high - low > 1) {
    int mid = (low + high) / 2;
    (table[mid] <= a ? low : high) = mid;
  }
  double down = double(a) - table[low], up = double(table[high]) - a;
  int even = low & 1 ? high : low;
  return sign | (down < up ? low : down > up ? high : even);
}

extern "C" {
float emu_e4m3_to_f32(uint8_t x) { return emu_fp8_tables().e4m3[x]; }
float emu_e5m2_to_f32(uint8_t x) { return emu_fp8_tables().e5m2[x]; }
uint8_t emu_f32_to_e4m3(float x) { return to_fp8(x, emu_fp8_tables().e4m3, 0x7e); }
uint8_t emu_f32_to_e5m2(float x) { return to_fp8(x, emu_fp8_tables().e5m2, 0x7b); }
}
