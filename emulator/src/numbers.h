// Numbers of 8 and 16 bits.
#pragma once
#include "runtime.h"
#include <cstring>
#include <immintrin.h>

struct Fp8Tables {
  float e4m3[256], e5m2[256];
  Fp8Tables();
};
const Fp8Tables& emu_fp8_tables();

inline float emu_from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline float emu_bf16(uint16_t x) { return emu_from_bits(uint32_t(x) << 16); }

// Bytes of a number of an EmuType.
inline int emu_width(int type) { return type == EMU_TF32 ? 4 : type == EMU_BF16 || type == EMU_F16 ? 2 : 1; }

// Number i of a register.
inline float emu_element(uint32_t reg, int i, int type) {
  switch (type) {
  case EMU_BF16:
    return emu_bf16(reg >> (16 * i));
  case EMU_F16:
    return _cvtsh_ss(reg >> (16 * i));
  case EMU_TF32:
    return emu_from_bits(reg & 0xffffe000u);
  case EMU_E4M3:
    return emu_fp8_tables().e4m3[reg >> (8 * i) & 255];
  case EMU_E5M2:
    return emu_fp8_tables().e5m2[reg >> (8 * i) & 255];
  case EMU_S8:
    return int8_t(reg >> (8 * i));
  default:
    return uint8_t(reg >> (8 * i));
  }
}
