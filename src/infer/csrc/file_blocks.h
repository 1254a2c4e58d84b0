// What blocks of GGUF files consist of: float16 in two bytes, and 32 codes of 4 or 5 bits.
#pragma once

#include "common.h"

namespace {

INLINE uint16_t read_half(const uint8_t* from) { return (uint16_t)(from[0] | from[1] << 8); }

INLINE float float_of(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (!exponent) return (sign ? -1.f : 1.f) * (float)fraction * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

INLINE uint16_t half_of(float x) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to 65,536 or more
  if (bits < 0x38800000) {  // below 2^-14: a whole number of 2^-24, which is what adding 1/2 rounds to
    float small;
    std::memcpy(&small, &bits, 4);
    small += 0.5f;
    std::memcpy(&bits, &small, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

// Half of a block. Compilers take loops over so few bytes apart, so vectors are written as such.
using Bytes = uint8_t __attribute__((vector_size(16)));
using Longs = uint64_t __attribute__((vector_size(16)));

struct Codes {
  Bytes low, high;
};

INLINE Codes nibbles(const uint8_t* from) {  // first all lower halves, then all upper ones
  Bytes both;
  std::memcpy(&both, from, sizeof both);
  return {both & 15, both >> 4};
}

INLINE Bytes fifth_bits(const uint8_t* from) {  // of 16 numbers, times 16
  const Longs repeated = {from[0] * 0x0101010101010101ull, from[1] * 0x0101010101010101ull};
  const Longs bit = {0x8040201008040201, 0x8040201008040201};
  return (Bytes)((Bytes)(repeated & bit) != 0) & 16;
}

INLINE Codes five_bits(const uint8_t* high, const uint8_t* low) {
  Codes codes = nibbles(low);
  return {codes.low | fifth_bits(high), codes.high | fifth_bits(high + 2)};
}

}  // namespace
