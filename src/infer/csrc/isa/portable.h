// Vectors of 4 by the compiler alone. See vectors.h.
#pragma once

#include "../common.h"

#define VECTOR_WIDTH 4
#define FEW_FORMS 1  // of the products of blocks: nothing here is made for speed

namespace {

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vw __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
typedef int16_t vh __attribute__((vector_size(16)));
typedef uint16_t vuh __attribute__((vector_size(16)));
typedef int8_t vc __attribute__((vector_size(16)));
using vb = vw;
constexpr int ROWS = 2, COLS = 2;
constexpr int VECTOR_ROWS = 2, FEW_VECTOR_ROWS = 0;  // that are multiplied together

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
INLINE vf widen(const uint16_t* p) { return (vf)(vu{p[0], p[1], p[2], p[3]} << 16); }
// 128 bits of each of 4 rows → 4 vectors: word i of every row.
INLINE void columns(const char* const* rows, long at, vf out[4]) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) __builtin_memcpy((char*)&out[i] + 4 * j, rows[j] + at + 4 * i, 4);
}

// What has the same bits with every set needs one rounding here, too.
INLINE vf fused(vf a, vf b, vf c) {
  return vf{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
            __builtin_fmaf(a[3], b[3], c[3])};
}
INLINE vf nearest(vf x) {  // ties to even; adding 2²³ rounds, and what is as large is whole
  const vf magic = (vf)(((vu)x & 0x80000000) | (vu)set1(0x1p23f));
  return (vf)((vu)x & 0x7fffffff) < set1(0x1p23f) ? x + magic - magic : x;
}
INLINE vw whole(vf x) {  // 0 where a number does not fit
  const vf near = (vf)((vu)x & 0x7fffffff) < set1(0x1p31f) ? nearest(x) : set1(0.f);
  return __builtin_convertvector(near, vw);
}
INLINE vh narrow_words(vw low, vw high) {
  vh to;
  for (int i = 0; i < 8; ++i) {
    const int x = i < 4 ? low[i] : high[i - 4];
    to[i] = (int16_t)(x < INT16_MIN ? INT16_MIN : x > INT16_MAX ? INT16_MAX : x);
  }
  return to;
}
INLINE vc narrow_bytes(vh low, vh high) {
  vc to;
  for (int i = 0; i < 16; ++i) {
    const int x = i < 8 ? low[i] : high[i - 8];
    to[i] = (int8_t)(x < INT8_MIN ? INT8_MIN : x > INT8_MAX ? INT8_MAX : x);
  }
  return to;
}
// To each sum of 32 bits 4 products of bytes. Two fit 16 bits unless all their factors are -128, which none here is.
INLINE vb dot_bytes(vb sums, vb bytes, vb others) {
  const vh a = (vh)bytes, b = (vh)others;
  const vw two = (vw)((a << 8 >> 8) * (b << 8 >> 8) + (a >> 8) * (b >> 8));
  return sums + (two << 16 >> 16) + (two >> 16);
}
// Bytes of a table of 16. Not inline, because compilers take hours over so many places that are not constant.
[[maybe_unused]] __attribute__((noinline)) vb looked_up(const uint8_t* table, vb places) {
  uint8_t at[16];
  __builtin_memcpy(at, &places, sizeof at);
  for (uint8_t& each : at) each = table[each];
  vb found;
  __builtin_memcpy(&found, at, sizeof found);
  return found;
}
INLINE vf half_floats(const void* from) {  // 4 numbers in float16
  uint16_t some[4];
  __builtin_memcpy(some, from, sizeof some);
  const vu all = {some[0], some[1], some[2], some[3]}, sign = (all & 0x8000) << 16, own = all & 0x7fff;
  const vu normal = (own << 13) + (112u << 23), small = (vu)(__builtin_convertvector((vw)own, vf) * set1(0x1p-24f));
  const vu finite = own < 0x400 ? small : normal;
  return (vf)(sign | (own >= 0x7c00 ? own << 13 | 0x7f800000 : finite));
}

}  // namespace

#include "four_lanes.h"
