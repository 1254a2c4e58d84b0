// Vectors of NEON, and of its products of bytes (dotprod) and of bfloat16 where a kernel asks for them. See
// vectors.h.
#pragma once

#include "../common.h"

#define VECTOR_WIDTH 4

namespace {

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vw __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
typedef int16_t vh __attribute__((vector_size(16)));
typedef uint16_t vuh __attribute__((vector_size(16)));
typedef int8_t vc __attribute__((vector_size(16)));
using vb = vw;
constexpr int ROWS = 4, COLS = 4;
// Rows that are multiplied together: their sums with 4 vectors and what meets in 32 registers.
constexpr int VECTOR_ROWS = 6, FEW_VECTOR_ROWS = 0;

INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf vmax(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf set1(float x) { return vf{x, x, x, x}; }
INLINE vf bits(const void* words) {
  vf v;
  __builtin_memcpy(&v, words, sizeof v);
  return v;
}
INLINE float hmax(vf a) { return vmaxvq_f32((float32x4_t)a); }
INLINE float hsum(vf a) { return (a[0] + a[1]) + (a[2] + a[3]); }
INLINE vf widen(const uint16_t* p) { return (vf)vshll_n_u16(vld1_u16(p), 16); }
INLINE vf low_words(vf a, vf b) { return (vf)vzip1q_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf high_words(vf a, vf b) { return (vf)vzip2q_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf low_pairs(vf a, vf b) { return (vf)vzip1q_f64((float64x2_t)a, (float64x2_t)b); }
INLINE vf high_pairs(vf a, vf b) { return (vf)vzip2q_f64((float64x2_t)a, (float64x2_t)b); }
INLINE vf fourths(const char* const* rows, long at) { return bits(rows[0] + at); }

INLINE vf fused(vf a, vf b, vf c) { return fma(a, b, c); }
INLINE vf nearest(vf x) { return (vf)vrndnq_f32((float32x4_t)x); }
INLINE vw whole(vf x) { return (vw)vcvtnq_s32_f32((float32x4_t)x); }
INLINE vh narrow_words(vw low, vw high) {
  return (vh)vcombine_s16(vqmovn_s32((int32x4_t)low), vqmovn_s32((int32x4_t)high));
}
INLINE vc narrow_bytes(vh low, vh high) {
  return (vc)vcombine_s8(vqmovn_s16((int16x8_t)low), vqmovn_s16((int16x8_t)high));
}
// To each sum of 32 bits 4 products of bytes.
INLINE vb dot_bytes(vb sums, vb bytes, vb others) {
  const int8x16_t a = (int8x16_t)bytes, b = (int8x16_t)others;
#ifdef HAS_DOT_PRODUCTS
  return (vb)vdotq_s32((int32x4_t)sums, a, b);
#else
  // Two fit 16 bits unless all their factors are -128, which none here is.
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return (vb)vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));
#endif
}
INLINE vb looked_up(const uint8_t* table, vb places) {  // bytes of a table of 16
  return (vb)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
}
INLINE vf half_floats(const void* from) {  // 4 numbers in float16
  float16x4_t some;
  __builtin_memcpy(&some, from, sizeof some);
  return (vf)vcvt_f32_f16(some);
}

}  // namespace

#include "four_lanes.h"
#include "transpose.h"
