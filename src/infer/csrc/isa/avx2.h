// Vectors of AVX2 with FMA. See vectors.h.
#pragma once

#include "../common.h"

#define VECTOR_WIDTH 8

namespace {

using vf = __m256;
constexpr int ROWS = 4, COLS = 2;
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf set1(float x) { return _mm256_set1_ps(x); }
INLINE vf bits(const void* words) { return _mm256_loadu_ps((const float*)words); }
INLINE float hmax(vf a) {
  float most = a[0];
  for (int i = 1; i < 8; ++i) most = a[i] > most ? a[i] : most;
  return most;
}
INLINE float hsum(vf a) { return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])); }
INLINE vf widen(const uint16_t* p) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
INLINE vf low_words(vf a, vf b) { return _mm256_unpacklo_ps(a, b); }
INLINE vf high_words(vf a, vf b) { return _mm256_unpackhi_ps(a, b); }
INLINE vf low_pairs(vf a, vf b) { return (vf)_mm256_unpacklo_pd((__m256d)a, (__m256d)b); }
INLINE vf high_pairs(vf a, vf b) { return (vf)_mm256_unpackhi_pd((__m256d)a, (__m256d)b); }
INLINE vf fourths(const char* const* rows, long at) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float*)(rows[0] + at))),
                              _mm_loadu_ps((const float*)(rows[4] + at)), 1);
}

// ---- 16 lanes: two vectors ---------------------------------------------------------------------

struct F16 {
  __m256 lo, hi;
};
struct I16 {
  __m256i lo, hi;
};
INLINE F16 operator+(F16 a, F16 b) { return {a.lo + b.lo, a.hi + b.hi}; }
INLINE F16 operator-(F16 a, F16 b) { return {a.lo - b.lo, a.hi - b.hi}; }
INLINE F16 operator*(F16 a, F16 b) { return {a.lo * b.lo, a.hi * b.hi}; }
INLINE F16 fma(F16 a, F16 b, F16 c) { return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)}; }
INLINE F16 negated_fma(F16 a, F16 b, F16 c) {  // c - a · b
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}

INLINE F16 from_lanes(vf x) { return {x, _mm256_setzero_ps()}; }  // 16 lanes that have the same sum
INLINE vf to_lanes(F16 x) { return x.lo + x.hi; }
INLINE F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store16(float* p, F16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline F16 load16(const float* p, long n) {
  if (n >= 16) return load16(p);
  float some[16] = {};
  for (long i = 0; i < n; ++i) some[i] = p[i];
  return load16(some);
}
inline void store16(float* p, F16 x, long n) {
  if (n >= 16) return store16(p, x);
  float all[16];
  store16(all, x);
  for (long i = 0; i < n; ++i) p[i] = all[i];
}
inline F16 widen16(const uint16_t* from, long n) {
  if (n >= 16) return {widen(from), widen(from + 8)};
  uint16_t some[16] = {};
  for (long i = 0; i < n; ++i) some[i] = from[i];
  return {widen(some), widen(some + 8)};
}
// Bits whose upper halves are bfloat16, as vcvtneps2bf16 rounds it: to nearest even, denormal numbers to zero, NaN to
// a quiet one.
INLINE __m256i narrowed(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i is_denormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  const __m256i zero = _mm256_and_si256(bits, _mm256_set1_epi32((int)0x80000000));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_blendv_epi8(nearest, zero, is_denormal), quiet, is_nan);
}
INLINE void narrow16(uint16_t* to, F16 x, long n) {
  const __m256i mixed =
      _mm256_packus_epi32(_mm256_srli_epi32(narrowed(x.lo), 16), _mm256_srli_epi32(narrowed(x.hi), 16));
  const __m256i halves = _mm256_permute4x64_epi64(mixed, 0xd8);
  if (n >= 16) return _mm256_storeu_si256((__m256i*)to, halves);
  uint16_t all[16];
  _mm256_storeu_si256((__m256i*)all, halves);
  for (long i = 0; i < n; ++i) to[i] = all[i];
}
INLINE F16 rounded16(F16 x) {  // to bfloat16
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(narrowed(x.lo), upper)),
          _mm256_castsi256_ps(_mm256_and_si256(narrowed(x.hi), upper))};
}
INLINE F16 least16(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
INLINE F16 most16(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
INLINE F16 nearest16(F16 x) { return {_mm256_round_ps(x.lo, 8), _mm256_round_ps(x.hi, 8)}; }
INLINE __m256 scaled_by_power(__m256 x, __m256 whole) {  // whole: 127 at most, or NaN; 0 below -126, also of NaN
  const __m256 some = _mm256_max_ps(whole, _mm256_set1_ps(-126.f));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(some), _mm256_set1_epi32(127));
  const __m256 scaled = x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(whole, _mm256_set1_ps(-126.f), _CMP_NLT_UQ));
}
INLINE F16 times_power_of_2(F16 x, F16 whole) {
  return {scaled_by_power(x.lo, whole.lo), scaled_by_power(x.hi, whole.hi)};
}
INLINE F16 inverse16(F16 x) { return {set1(1.f) / x.lo, set1(1.f) / x.hi}; }
INLINE float sum16(F16 x) {  // in the order of _mm512_reduce_add_ps
  const __m256 eight = x.hi + x.lo;
  const __m128 four = _mm256_extractf128_ps(eight, 1) + _mm256_castps256_ps128(eight);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE float greatest16(F16 x) { return hmax(vmax(x.lo, x.hi)); }

INLINE I16 zeros16() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I16 splat16(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I16 load16(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
INLINE void store16(int32_t* p, I16 x) {
  _mm256_storeu_si256((__m256i*)p, x.lo);
  _mm256_storeu_si256((__m256i*)(p + 8), x.hi);
}
INLINE I16 add16(I16 a, I16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
INLINE I16 greater_magnitude(I16 a, I16 b) { return {_mm256_max_epu32(a.lo, b.lo), _mm256_max_epu32(a.hi, b.hi)}; }
INLINE uint32_t greatest_magnitude(I16 x) {
  const __m256i eight = _mm256_max_epu32(x.lo, x.hi);
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
  return (uint32_t)_mm_cvtsi128_si32(four);
}
INLINE I16 magnitude(F16 x) {  // as whole numbers: NaN is larger than everything
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.lo), mask), _mm256_and_si256(_mm256_castps_si256(x.hi), mask)};
}
INLINE F16 floats16(I16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
INLINE I16 whole16(F16 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
INLINE __m256i words16(I16 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8); }
// 16 bytes, cut off at the ends of their range.
INLINE void put_bytes16(void* to, I16 x) {
  const __m256i words = words16(x);
  _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// Of 32 numbers in a row: those with even indices, and those with odd ones.
struct Halves {
  F16 even, odd;
  INLINE Halves times(F16 by) const { return {even * by, odd * by}; }
  INLINE Halves times(const float* by) const { return {even * load16(by), odd * load16(by + 16)}; }
};
INLINE void copy32(void* to, const uint16_t* x, long count) {  // numbers of 16 bits
  if (count >= 32) {
    __builtin_memcpy(to, x, 64);
    return;
  }
  __builtin_memset(to, 0, 64);
  if (count > 0) __builtin_memcpy(to, x, (size_t)count * 2);
}
INLINE Halves read_halves(const uint16_t* x, long count) {
  uint16_t some[32];
  if (count < 32) copy32(some, x, count), x = some;
  const __m256i one = _mm256_loadu_si256((const __m256i*)x), two = _mm256_loadu_si256((const __m256i*)(x + 16));
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(one, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(two, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(one, upper)), _mm256_castsi256_ps(_mm256_and_si256(two, upper))}};
}
INLINE __m256i whole_words(__m256 even, __m256 odd) {  // 16 of 16 bits, in order
  return _mm256_blend_epi16(_mm256_cvtps_epi32(even), _mm256_slli_epi32(_mm256_cvtps_epi32(odd), 16), 0xaa);
}
// 64 bytes in order, with their signs flipped by `flip`.
INLINE void put_bytes64(char* to, Halves first, Halves second, char flip) {
  const __m256i sign = _mm256_set1_epi8(flip);
  const Halves both[2] = {first, second};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i one = whole_words(both[i].even.lo, both[i].odd.lo),
                  two = whole_words(both[i].even.hi, both[i].odd.hi);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(one, two), 0xd8);
    _mm256_storeu_si256((__m256i*)(to + i * 32), _mm256_xor_si256(bytes, sign));
  }
}
INLINE void put_words16(void* to, F16 x) { _mm256_storeu_si256((__m256i*)to, words16(whole16(x))); }
// The sums of 16 bytes with a sign, of 64 in all.
INLINE void sums_of_16(const char* from, int32_t* to) {
  for (int i = 0; i < 4; ++i) {
    const __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const __m128i*)(from + i * 16)), _mm_set1_epi8((char)0x80));
    const __m128i two = _mm_sad_epu8(bytes, _mm_setzero_si128());
    to[i] = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_unpackhi_epi64(two, two))) - 16 * 128;
  }
}

// Sums and differences of lanes 1, 2, 4 or 8 apart; the upper lane of two has the difference.
INLINE __m256 with_sign_bits(__m256 x, int lanes) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i own = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(lanes), bit), bit);
  return _mm256_xor_ps(x, _mm256_castsi256_ps(_mm256_and_si256(own, _mm256_set1_epi32((int)0x80000000))));
}
INLINE F16 butterfly1(F16 x) {
  return {_mm256_permute_ps(x.lo, 0xb1) + with_sign_bits(x.lo, 0xaa),
          _mm256_permute_ps(x.hi, 0xb1) + with_sign_bits(x.hi, 0xaa)};
}
INLINE F16 butterfly2(F16 x) {
  return {_mm256_permute_ps(x.lo, 0x4e) + with_sign_bits(x.lo, 0xcc),
          _mm256_permute_ps(x.hi, 0x4e) + with_sign_bits(x.hi, 0xcc)};
}
INLINE F16 butterfly4(F16 x) {
  return {_mm256_permute2f128_ps(x.lo, x.lo, 1) + with_sign_bits(x.lo, 0xf0),
          _mm256_permute2f128_ps(x.hi, x.hi, 1) + with_sign_bits(x.hi, 0xf0)};
}
INLINE F16 butterfly8(F16 x) { return {x.lo + x.hi, x.lo - x.hi}; }
INLINE bool has_nan(F16 x) {
  return _mm256_movemask_ps(
      _mm256_or_ps(_mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q), _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q)));
}
INLINE F16 where_not_zero(F16 p, F16 x) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_and_ps(_mm256_cmp_ps(p.lo, zero, _CMP_NEQ_UQ), x.lo),
          _mm256_and_ps(_mm256_cmp_ps(p.hi, zero, _CMP_NEQ_UQ), x.hi)};
}
// A byte of every lane → byte `which` of every four of 64 bytes.
INLINE void put_every_fourth(char* to, int which, I16 x) {
  const __m256i mask = _mm256_sll_epi32(_mm256_set1_epi32(255), _mm_cvtsi32_si128(which * 8));
  const __m256i parts[2] = {x.lo, x.hi};
  for (int i = 0; i < 2; ++i) {
    const __m256i moved = _mm256_sll_epi32(parts[i], _mm_cvtsi32_si128(which * 8));
    __m256i* at = (__m256i*)(to + i * 32);
    _mm256_storeu_si256(at, _mm256_blendv_epi8(_mm256_loadu_si256(at), moved, mask));
  }
}
// Numbers below 2¹⁵ of 4 · 16 keys as two digits of 8 bits: 4 keys of each of the four, then the next 4 of each.
INLINE void put_digits(uint8_t* high, uint8_t* low, I16 one, I16 two, I16 three, I16 four) {
  const __m256i a[2] = {_mm256_packs_epi32(one.lo, two.lo), _mm256_packs_epi32(one.hi, two.hi)};
  const __m256i b[2] = {_mm256_packs_epi32(three.lo, four.lo), _mm256_packs_epi32(three.hi, four.hi)};
  const __m256i mask = _mm256_set1_epi16(255);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    _mm256_storeu_si256((__m256i*)(high + i * 32),
                        _mm256_packus_epi16(_mm256_srli_epi16(a[i], 8), _mm256_srli_epi16(b[i], 8)));
    _mm256_storeu_si256((__m256i*)(low + i * 32),
                        _mm256_packus_epi16(_mm256_and_si256(a[i], mask), _mm256_and_si256(b[i], mask)));
  }
}

// ---- Bytes of weights, keys and values ---------------------------------------------------------

using vb = __m256i;
// Rows that are multiplied together by 2 vectors of columns, and by 4: sums and what meets fill 16 registers.
constexpr int VECTOR_ROWS = 6, FEW_VECTOR_ROWS = 2;
INLINE vb load_bytes(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
INLINE vb four_bytes(const void* from) {  // in every lane
  int four;
  __builtin_memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}
INLINE vf lower_half(vf pairs) { return (vf)_mm256_slli_epi32((__m256i)pairs, 16); }
INLINE vf upper_half(vf pairs) { return (vf)_mm256_and_si256((__m256i)pairs, _mm256_set1_epi32((int)0xffff0000)); }
INLINE vb even_words(vb bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }
INLINE vb odd_words(vb bytes) { return _mm256_srai_epi16(bytes, 8); }
INLINE vb pair_products(vb words, vb others) { return _mm256_madd_epi16(words, others); }
INLINE vb pairs_of_bytes(vb unsigned_bytes, vb bytes) { return _mm256_maddubs_epi16(unsigned_bytes, bytes); }
INLINE vb add_lanes(vb a, vb b) { return _mm256_add_epi32(a, b); }
INLINE vb add_words(vb a, vb b) { return _mm256_add_epi16(a, b); }
INLINE vb low_nibbles(vb bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
INLINE vb high_nibbles(vb bytes) { return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15)); }
INLINE vb words_left(vb words, int by) { return _mm256_slli_epi16(words, by); }
INLINE vb words_right(vb words, int by) { return _mm256_srli_epi16(words, by); }
INLINE vb lanes_left(vb lanes, int by) { return _mm256_slli_epi32(lanes, by); }
INLINE vf half_floats(const void* from) {  // W numbers in float16
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
INLINE vb looked_up(const uint8_t* table, vb places) {  // bytes of a table of 16
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), places);
}
INLINE vb halved_lanes(vb lanes) { return _mm256_srai_epi32(lanes, 1); }  // rounded down
INLINE vb times_256(vb lanes) { return _mm256_slli_epi32(lanes, 8); }
INLINE vb subtract_lanes(vb a, vb b) { return _mm256_sub_epi32(a, b); }
INLINE vf float_lanes(vb a) { return _mm256_cvtepi32_ps(a); }
INLINE vb all_bytes(char x) { return _mm256_set1_epi8(x); }
INLINE vb no_bytes() { return _mm256_setzero_si256(); }
INLINE vb lanes_of(int x) { return _mm256_set1_epi32(x); }
INLINE vb word_ones() { return _mm256_set1_epi16(1); }
INLINE vb widen_bytes(const char* from) {  // W of them
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
INLINE void store_bytes(void* to, vb x) { _mm256_storeu_si256((__m256i*)to, x); }
[[maybe_unused]] INLINE vb magnitudes_of(vb bytes) { return _mm256_abs_epi8(bytes); }  // without a sign: of -128, 128
// `bytes`, none of them -128, with the signs of others.
[[maybe_unused]] INLINE vb with_signs(vb bytes, vb of) { return _mm256_sign_epi8(bytes, of); }

#ifdef HAS_BYTE_PRODUCTS
INLINE vb dot_bytes(vb sums, vb unsigned_bytes, vb bytes) {
#ifdef INFER_EVEX_VNNI
  return _mm256_dpbusd_epi32(sums, unsigned_bytes, bytes);
#else
  return _mm256_dpbusd_avx_epi32(sums, unsigned_bytes, bytes);
#endif
}
INLINE void add_products(vb& sums, vb unsigned_bytes, vb bytes) { sums = dot_bytes(sums, unsigned_bytes, bytes); }
using ByteOperand = vb;
#else
struct ByteOperand {  // bytes with a sign as numbers of 16 bits
  vb even, odd;
  ByteOperand() = default;
  INLINE ByteOperand(vb bytes) : even(even_words(bytes)), odd(odd_words(bytes)) {}
};
// To each sum of 32 bits 4 products of bytes, the first without a sign.
INLINE void add_products(vb& sums, vb unsigned_bytes, const ByteOperand& bytes) {
  const vb even = _mm256_and_si256(unsigned_bytes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(unsigned_bytes, 8);
  sums = add_lanes(sums, add_lanes(pair_products(even, bytes.even), pair_products(odd, bytes.odd)));
}
// As one: compilers begin with the products of a whole line, and keep sums in memory for them. IN_ORDER is not
// enough: of 12 sums four stay there.
INLINE void add_pair_products(vb& sums, vb words, vb others) {
  vb pairs;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sums), "=&v"(pairs) : "v"(words), "v"(others));
}
#endif

}  // namespace

#include "transpose.h"
