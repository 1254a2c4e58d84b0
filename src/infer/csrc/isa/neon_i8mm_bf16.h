// NEON with products of bytes and of bfloat16 (bf16), and of matrices of bytes (i8mm). See vectors.h.
#pragma once
#define HAS_BFLOAT16 1
#define HAS_MATRIX_PRODUCTS 1
#include "neon_dotprod.h"

namespace {

// 32 bfloat16 in order.
INLINE void put_rounded32(void* to, Halves x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const vu pairs = narrowed(x.even.of[i]) >> 16 | (narrowed(x.odd.of[i]) & 0xffff0000);
    __builtin_memcpy((char*)to + i * 16, &pairs, sizeof pairs);
  }
}
// To each sum 2 products of bfloat16.
INLINE vf dot_pairs(vf sums, vb pairs, vb others) {
  return (vf)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)pairs, (bfloat16x8_t)others);
}

// To each sum 8 products of bytes, of matrices: 2 rows of 8 inputs × 2 columns → 2 rows of 2 sums.
INLINE vb matrix_products(vb sums, vb rows, vb columns) {
  return (vb)vmmlaq_s32((int32x4_t)sums, (int8x16_t)rows, (int8x16_t)columns);
}
INLINE vb two_rows(const char* first, const char* second) {  // 8 bytes of each
  return (vb)vcombine_s8(vld1_s8((const int8_t*)first), vld1_s8((const int8_t*)second));
}

}  // namespace
