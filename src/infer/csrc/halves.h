// float16 as files have it, in two bytes.
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

}  // namespace
