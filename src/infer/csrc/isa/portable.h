// Vectors of 4 by the compiler alone. See vectors.h.
#pragma once

#include "../common.h"

#define VECTOR_WIDTH 4

namespace {

typedef float vf __attribute__((vector_size(16)));
constexpr int ROWS = 2, COLS = 2;
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }  // built without contraction
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf set1(float x) { return vf{x, x, x, x}; }
INLINE vf bits(const void* words) {
  vf v;
  __builtin_memcpy(&v, words, sizeof v);
  return v;
}
INLINE float hmax(vf a) {
  const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
INLINE float hsum(vf a) { return (a[0] + a[1]) + (a[2] + a[3]); }
INLINE vf widen(const uint16_t* p) {
  typedef uint32_t vu __attribute__((vector_size(16)));
  return (vf)(vu{p[0], p[1], p[2], p[3]} << 16);
}
// 128 bits of each of 4 rows → 4 vectors: word i of every row.
INLINE void columns(const char* const* rows, long at, vf out[4]) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) __builtin_memcpy((char*)&out[i] + 4 * j, rows[j] + at + 4 * i, 4);
}

}  // namespace
