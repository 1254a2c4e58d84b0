// Vectors of AVX-512 (F, BW, DQ, VL), and of VNNI and BF16 where a kernel asks for them. See vectors.h.
#pragma once

#include "../common.h"

#define VECTOR_WIDTH 16

namespace {

using vf = __m512;
constexpr int ROWS = 4, COLS = 4;
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vf bits(const void* words) { return _mm512_loadu_ps(words); }
INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a); }
INLINE float hsum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE vf widen(const uint16_t* p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
// Of two vectors, in every 128 bits: the lower or upper words and pairs of words, in turns.
INLINE vf low_words(vf a, vf b) { return _mm512_unpacklo_ps(a, b); }
INLINE vf high_words(vf a, vf b) { return _mm512_unpackhi_ps(a, b); }
INLINE vf low_pairs(vf a, vf b) { return (vf)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); }
INLINE vf high_pairs(vf a, vf b) { return (vf)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); }
// 128 bits of every fourth row.
INLINE vf fourths(const char* const* rows, long at) {
#define ROW(i) _mm_loadu_ps((const float*)(rows[i] + at))
  vf a = _mm512_castps128_ps512(ROW(0));
  a = _mm512_insertf32x4(a, ROW(4), 1);
  a = _mm512_insertf32x4(a, ROW(8), 2);
  return _mm512_insertf32x4(a, ROW(12), 3);
#undef ROW
}

// ---- Attention ---------------------------------------------------------------------------------

// 16 vectors → the greatest lane of each.
[[maybe_unused]] INLINE vf greatest_lanes(const vf rows[16]) {
  vf two[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    two[i] = vmax(low_words(rows[2 * i], rows[2 * i + 1]), high_words(rows[2 * i], rows[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    four[i] = vmax(low_pairs(two[2 * i], two[2 * i + 1]), high_pairs(two[2 * i], two[2 * i + 1]));
  const vf a = vmax(_mm512_shuffle_f32x4(four[0], four[1], 0x44), _mm512_shuffle_f32x4(four[0], four[1], 0xee));
  const vf b = vmax(_mm512_shuffle_f32x4(four[2], four[3], 0x44), _mm512_shuffle_f32x4(four[2], four[3], 0xee));
  return vmax(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

[[maybe_unused]] INLINE __m512i multiples_to_15(int of) {  // 0, of, 2 · of, …
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(of));
}

#ifdef HAS_BYTE_PRODUCTS
// To each sum of 32 bits 4 products of bytes, the first without a sign. In place, where the intrinsic leads
// compilers to copy and spill sums that begin anew within a loop.
[[maybe_unused]] INLINE void add_products(__m512i& sums, __m512i unsigned_bytes, __m512i bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(bytes));
}
#endif

// ---- 16 lanes ----------------------------------------------------------------------------------

using F16 = __m512;
using I16 = __m512i;
INLINE __mmask16 first_of_16(long n) { return (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }
INLINE __mmask32 first_of_32(long n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

INLINE F16 from_lanes(vf x) { return x; }  // 16 lanes that have the same sum
INLINE vf to_lanes(F16 x) { return x; }
INLINE F16 splat(float x) { return _mm512_set1_ps(x); }
INLINE F16 load16(const float* p) { return _mm512_loadu_ps(p); }
INLINE F16 load16(const float* p, long n) { return _mm512_maskz_loadu_ps(first_of_16(n), p); }
INLINE void store16(float* p, F16 x) { _mm512_storeu_ps(p, x); }
INLINE void store16(float* p, F16 x, long n) { _mm512_mask_storeu_ps(p, first_of_16(n), x); }
INLINE F16 widen16(const uint16_t* from, long n) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_of_16(n), from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE F16 least16(F16 a, F16 b) { return _mm512_min_ps(a, b); }
INLINE F16 most16(F16 a, F16 b) { return _mm512_max_ps(a, b); }
INLINE F16 negated_fma(F16 a, F16 b, F16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a · b
INLINE F16 nearest16(F16 x) { return _mm512_roundscale_ps(x, 8); }
INLINE F16 times_power_of_2(F16 x, F16 whole) { return _mm512_scalef_ps(x, whole); }
// A third of a division's time: an estimate of 14 bits, and one step of Newton's.
INLINE F16 inverse16(F16 x) {
  const F16 estimate = _mm512_rcp14_ps(x), error = negated_fma(x, estimate, splat(1.f));
  return fma(error, estimate, estimate);
}
INLINE float sum16(F16 x) { return _mm512_reduce_add_ps(x); }
INLINE float greatest16(F16 x) { return _mm512_reduce_max_ps(x); }

INLINE I16 zeros16() { return _mm512_setzero_si512(); }
INLINE I16 splat16(int x) { return _mm512_set1_epi32(x); }
INLINE I16 load16(const int32_t* p) { return _mm512_loadu_si512(p); }
INLINE void store16(int32_t* p, I16 x) { _mm512_storeu_si512(p, x); }
INLINE I16 add16(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
INLINE I16 greater_magnitude(I16 a, I16 b) { return _mm512_max_epu32(a, b); }
INLINE uint32_t greatest_magnitude(I16 x) { return _mm512_reduce_max_epu32(x); }
INLINE I16 magnitude(F16 x) {  // as whole numbers: NaN is larger than everything
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}
INLINE F16 floats16(I16 x) { return _mm512_cvtepi32_ps(x); }
INLINE I16 whole16(F16 x) { return _mm512_cvtps_epi32(x); }
// 16 bytes, cut off at the ends of their range.
INLINE void put_bytes16(void* to, I16 x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(x)); }

// Of 32 numbers in a row: those with even indices, and those with odd ones.
struct Halves {
  F16 even, odd;
  INLINE Halves times(F16 by) const { return {even * by, odd * by}; }
  INLINE Halves times(const float* by) const { return {even * load16(by), odd * load16(by + 16)}; }
};
INLINE Halves read_halves(const uint16_t* x, long count) {
  const __m512i both = _mm512_maskz_loadu_epi16(first_of_32(count), x);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)))};
}
INLINE void copy32(void* to, const uint16_t* x, long count) {  // numbers of 16 bits
  _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(first_of_32(count), x));
}
INLINE __m512i whole_words(Halves x) {  // 32 of 16 bits, in order
  const __m512i odd = _mm512_slli_epi32(_mm512_cvtps_epi32(x.odd), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_cvtps_epi32(x.even), odd);
}
// 64 bytes in order, with their signs flipped by `flip`.
INLINE void put_bytes64(char* to, Halves first, Halves second, char flip) {
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  const __m512i bytes = _mm512_packs_epi16(whole_words(first), whole_words(second));
  _mm512_storeu_si512(to, _mm512_xor_si512(_mm512_set1_epi8(flip), _mm512_permutexvar_epi64(order, bytes)));
}
INLINE void put_words16(void* to, F16 x) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
// The sums of 16 bytes with a sign, of 64 in all.
INLINE void sums_of_16(const char* from, int32_t* to) {
  for (int i = 0; i < 4; ++i) {
    const __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const __m128i*)(from + i * 16)), _mm_set1_epi8((char)0x80));
    const __m128i two = _mm_sad_epu8(bytes, _mm_setzero_si128());
    to[i] = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_unpackhi_epi64(two, two))) - 16 * 128;
  }
}

// Sums and differences of lanes 1, 2, 4 or 8 apart; the upper lane of two has the difference.
INLINE F16 butterfly1(F16 x) {
  return fma(x, _mm512_mask_mov_ps(splat(1.f), 0xaaaa, splat(-1.f)), _mm512_permute_ps(x, 0xb1));
}
INLINE F16 butterfly2(F16 x) {
  return fma(x, _mm512_mask_mov_ps(splat(1.f), 0xcccc, splat(-1.f)), _mm512_permute_ps(x, 0x4e));
}
INLINE F16 butterfly4(F16 x) {
  return fma(x, _mm512_mask_mov_ps(splat(1.f), 0xf0f0, splat(-1.f)), _mm512_shuffle_f32x4(x, x, 0xb1));
}
INLINE F16 butterfly8(F16 x) {
  return fma(x, _mm512_mask_mov_ps(splat(1.f), 0xff00, splat(-1.f)), _mm512_shuffle_f32x4(x, x, 0x4e));
}
INLINE bool has_nan(F16 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
INLINE F16 where_not_zero(F16 p, F16 x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(p, splat(0.f), _CMP_NEQ_UQ), x);
}
// A byte of every lane → byte `which` of every four of 64 bytes.
INLINE void put_every_fourth(char* to, int which, I16 x) {
  const __m512i moved = _mm512_sllv_epi32(x, _mm512_set1_epi32(which * 8));
  _mm512_mask_storeu_epi8(to, 0x1111111111111111ull << which, moved);
}
// Numbers below 2¹⁵ of 4 · 16 keys as two digits of 8 bits: 4 keys of each of the four, then the next 4 of each.
INLINE void put_digits(uint8_t* high, uint8_t* low, I16 one, I16 two, I16 three, I16 four) {
  const __m512i a = _mm512_packs_epi32(one, two), b = _mm512_packs_epi32(three, four), mask = _mm512_set1_epi16(255);
  _mm512_storeu_si512(high, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
  _mm512_storeu_si512(low, _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask)));
}

// ---- Bytes of weights, keys and values ----------------------------------------------------------

using vb = __m512i;
#ifndef HAS_BFLOAT16
// Bits whose upper halves are bfloat16, as vcvtneps2bf16 rounds it: to nearest even, denormal numbers to zero, NaN to
// a quiet one.
INLINE __m512i narrowed(F16 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i half = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_denormal = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  half = _mm512_mask_and_epi32(half, is_denormal, bits, _mm512_set1_epi32((int)0x80000000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(half, is_nan, bits, _mm512_set1_epi32(0x400000));
}
INLINE void narrow16(uint16_t* to, F16 x, long n) {
  _mm256_mask_storeu_epi16(to, first_of_16(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(narrowed(x), 16)));
}
INLINE F16 rounded16(F16 x) {  // to bfloat16
  return _mm512_castsi512_ps(_mm512_and_si512(narrowed(x), _mm512_set1_epi32((int)0xffff0000)));
}
#endif
#ifdef HAS_BFLOAT16
constexpr int VECTOR_ROWS = 14;  // that are multiplied together: their sums and what meets in 32 registers
#else
constexpr int VECTOR_ROWS = 12;
#endif
#ifdef HAS_BYTE_PRODUCTS
constexpr int FEW_VECTOR_ROWS = 0;
INLINE vb dot_bytes(vb sums, vb unsigned_bytes, vb bytes) { return _mm512_dpbusd_epi32(sums, unsigned_bytes, bytes); }
#else
constexpr int FEW_VECTOR_ROWS = 2;
#endif
INLINE vb load_bytes(const void* from) { return _mm512_loadu_si512(from); }
INLINE vb four_bytes(const void* from) {  // in every lane
  int four;
  __builtin_memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}
INLINE vf lower_half(vf pairs) { return (vf)_mm512_slli_epi32((__m512i)pairs, 16); }
INLINE vf upper_half(vf pairs) { return (vf)_mm512_and_si512((__m512i)pairs, _mm512_set1_epi32((int)0xffff0000)); }
INLINE vb even_words(vb bytes) { return _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8); }
INLINE vb odd_words(vb bytes) { return _mm512_srai_epi16(bytes, 8); }
INLINE vb pair_products(vb words, vb others) { return _mm512_madd_epi16(words, others); }
INLINE vb pairs_of_bytes(vb unsigned_bytes, vb bytes) { return _mm512_maddubs_epi16(unsigned_bytes, bytes); }
INLINE vb add_lanes(vb a, vb b) { return _mm512_add_epi32(a, b); }
INLINE vb add_words(vb a, vb b) { return _mm512_add_epi16(a, b); }
INLINE vb low_nibbles(vb bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
INLINE vb high_nibbles(vb bytes) { return _mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15)); }
INLINE vb words_left(vb words, int by) { return _mm512_slli_epi16(words, (unsigned)by); }
INLINE vb words_right(vb words, int by) { return _mm512_srli_epi16(words, (unsigned)by); }
INLINE vb lanes_left(vb lanes, int by) { return _mm512_slli_epi32(lanes, (unsigned)by); }
INLINE vf half_floats(const void* from) {  // W numbers in float16
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
[[maybe_unused]] INLINE vb magnitudes_of(vb bytes) { return _mm512_abs_epi8(bytes); }  // without a sign: of -128, 128
// Bytes with the signs of others.
[[maybe_unused]] INLINE vb with_signs(vb bytes, vb of) {
  return _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(of), _mm512_setzero_si512(), bytes);
}
INLINE vb looked_up(const uint8_t* table, vb places) {  // bytes of a table of 16
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), places);
}
INLINE vb halved_lanes(vb lanes) { return _mm512_srai_epi32(lanes, 1); }  // rounded down
INLINE vb times_256(vb lanes) { return _mm512_slli_epi32(lanes, 8); }
INLINE vb subtract_lanes(vb a, vb b) { return _mm512_sub_epi32(a, b); }
INLINE vf float_lanes(vb a) { return _mm512_cvtepi32_ps(a); }
INLINE vb all_bytes(char x) { return _mm512_set1_epi8(x); }
INLINE vb no_bytes() { return _mm512_setzero_si512(); }
INLINE vb lanes_of(int x) { return _mm512_set1_epi32(x); }
INLINE vb word_ones() { return _mm512_set1_epi16(1); }
INLINE vb widen_bytes(const char* from) {  // W of them
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
}
INLINE void store_bytes(void* to, vb x) { _mm512_storeu_si512(to, x); }

#ifdef HAS_BYTE_PRODUCTS
using ByteOperand = vb;
#else
struct ByteOperand {  // bytes with a sign as numbers of 16 bits
  vb even, odd;
  ByteOperand() = default;
  INLINE ByteOperand(vb bytes) : even(even_words(bytes)), odd(odd_words(bytes)) {}
};
// To each sum of 32 bits 4 products of bytes, the first without a sign.
INLINE void add_products(vb& sums, vb unsigned_bytes, const ByteOperand& bytes) {
  const vb even = _mm512_and_si512(unsigned_bytes, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(unsigned_bytes, 8);
  sums = add_lanes(sums, add_lanes(pair_products(even, bytes.even), pair_products(odd, bytes.odd)));
}
INLINE void add_pair_products(vb& sums, vb words, vb others) { sums = add_lanes(sums, pair_products(words, others)); }
#endif

}  // namespace

#include "transpose.h"
