// Attention's products by pairs of bfloat16 (AVX-512-BF16).
#pragma once

#include "attention_products.h"

namespace attention {
namespace {

// Multiplies pairs of bfloat16 (also P, like the keys' neighbour), sums in float32.
struct Pairs {
  using Storage = uint16_t;
  static constexpr bool EXACT = false, BYTES = false, DIRECT = false, RAW_KEYS = false;
  static int key_words(int d) { return (d + 31) / 32 * 16; }
  static int prob_words(int keys) { return keys / 2; }
  static int row_block_steps(const LayerCall&, int n) { return n / 16; }
  static bool takes_raw_keys(const LayerCall&, int) { return false; }
  static void begin(int) {}
  INLINE static vf mac(vf a, vf b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

  static void pack_query(const char* from, int d, uint32_t* to) {
    if (d % 32) __builtin_memset(to, 0, 4 * key_words(d));
    __builtin_memcpy(to, from, 2 * d);
  }
  static void pack_keys(const char* const* rows, int n, int d, uint32_t* to, long block) {
    for (int key = 0; key < n; key += W)
      for (int i = 0; i < d; i += 8) {
        vf words[4];
        columns(rows + key, 2 * i, words);
        for (int w = 0; w < 4; ++w) store((float*)to + (i / 2 + w) * block + key, words[w]);
      }
    for (int i = d / 2; i < key_words(d); ++i) __builtin_memset(to + i * block, 0, 4 * n);
  }
  // The two halves of 32 values come out shuffled; natural_order() undoes it once per row.
  static void pack_values(const char* const* rows, int n, int d, int padded, uint32_t* to) {
    for (int key = 0; key < n; key += 2) {
      uint32_t* at = to + (long)(key / 2) * padded;
      for (int i = 0; i < d; i += 32) {
        const __mmask32 mask = d - i >= 32 ? ~0u : (1u << (d - i)) - 1;
        const __m512i a = _mm512_maskz_loadu_epi16(mask, rows[key] + 2 * i);
        const __m512i b = _mm512_maskz_loadu_epi16(mask, rows[key + 1] + 2 * i);
        _mm512_storeu_si512(at + i, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(at + i + 16, _mm512_unpackhi_epi16(a, b));
      }
    }
  }
  INLINE static void put(uint32_t* to, int i, vf p0, vf p1, vf& sum) {
    const __m512bh p = _mm512_cvtne2ps_pbh(p1, p0);
    __builtin_memcpy(to + i / 2, &p, sizeof p);
    sum = sum + (vf)_mm512_slli_epi32((__m512i)p, 16);  // of what is multiplied
    sum = sum + (vf)_mm512_and_si512((__m512i)p, _mm512_set1_epi32(-65536));
  }
  static void scores(int rows, const uint32_t* q, int d, const uint32_t* keys, long block, int n, float* out) {
    product<Pairs, false>(rows, q, key_words(d), d / 2, keys, block, out, block, n, nullptr);
  }
  static void mix(int rows, const uint32_t* probs, long block, int n, const uint32_t* values, int padded, float* out,
                  long ldo, const float* alpha) {
    product<Pairs, true>(rows, probs, block, n / 2, values, padded, out, ldo, padded, alpha);
  }
  static void natural_order(float* row, int padded) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int i = 0; i < padded; i += 32) {
      const vf a = load(row + i), b = load(row + i + 16);
      store(row + i, _mm512_permutex2var_ps(a, low, b));
      store(row + i + 16, _mm512_permutex2var_ps(a, high, b));
    }
  }
};

}  // namespace
}  // namespace attention
