// AVX-512 with BF16 and VNNI: what rounds to bfloat16 and multiplies pairs of it. See vectors.h.
#pragma once
#define HAS_BFLOAT16 1
#include "avx512_vnni.h"

namespace {

INLINE void narrow16(uint16_t* to, F16 x, long n) {
  _mm256_mask_storeu_epi16(to, first_of_16(n), (__m256i)_mm512_cvtneps_pbh(x));
}

INLINE F16 rounded16(F16 x) {  // to bfloat16
  return (F16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16);
}

[[maybe_unused]] INLINE void put_rounded32(void* to, Halves x) {  // 32 bfloat16 in order
  const __m512i sixteen = multiples_to_15(0x10001), pairs = _mm512_add_epi32(sixteen, _mm512_set1_epi32(16 << 16));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(x.odd, x.even)));
}

// To each sum 2 products of bfloat16.
[[maybe_unused]] INLINE vf dot_pairs(vf sums, vb pairs, vb others) {
  return _mm512_dpbf16_ps(sums, (__m512bh)pairs, (__m512bh)others);
}

}  // namespace
