// exp2, and the two products of attention in float32. attention_item.h includes it.
//
// Float32, Pairs, Strips, Tiles and Bytes are ways to multiply: how a block's K and V are packed, scores = Q·K, and
// out += P·V. Each sums in one fixed order.
#pragma once

#include "attention.h"
#include "isa/vectors.h"

namespace attention {
namespace {

INLINE void put_rounded(float* to, vf x) { store(to, x); }
INLINE void put_rounded(uint16_t* to, vf x) {  // to the nearest, ties to even
  typedef uint32_t vu __attribute__((vector_size(sizeof(vf))));
  typedef uint16_t vh __attribute__((vector_size(sizeof(vf) / 2)));
  const vu bits = (vu)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const vh half = __builtin_convertvector(x == x ? rounded : bits * 0 + 0x7fc0, vh);
  __builtin_memcpy(to, &half, sizeof half);
}

template <int N>
INLINE vf polynomial(vf x, const float (&c)[N]) {
  vf sum = set1(c[N - 1]);
#pragma GCC unroll 8
  for (int i = N - 2; i >= 0; --i) sum = fma(sum, x, set1(c[i]));
  return sum;
}

// 2^x for x <= 0 (or a rounding error above it); exactly 1 at 0, exactly 0 far below and at -inf.
// Relative error 1e-7, or 1e-4 for what is rounded to bfloat16.
template <bool EXACT>
INLINE vf exp2_vf(vf x) {
#if VECTOR_WIDTH == 16
  const vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // x - floor(x), and 0 for -inf
  if constexpr (EXACT)
    return _mm512_scalef_ps(
        polynomial(f, {1.f, 6.9315130e-1f, 2.4016445e-1f, 5.5799916e-2f, 9.0170279e-3f, 1.8671310e-3f}), x);
  return _mm512_scalef_ps(polynomial(f, {1.f, 6.9511682e-1f, 2.2764491e-1f, 7.7067064e-2f}), x);
#else
  // Adding 1.5 · 2^23 rounds, and leaves n + 127 in the low bits.
  const vf magic = set1(12582912.f + 127.f);
  x = vmax(set1(-127.f), x);
  const vf r = x + magic, f = x - (r - magic);
  const vf p =
      polynomial(f, {1.f, 6.9314718e-1f, 2.4022651e-1f, 5.5504109e-2f, 9.6181291e-3f, 1.3333558e-3f, 1.5403530e-4f});
  return p * (vf)((vi)r << 23);
#endif
}

// out[R][N] (= or +=) A[R][k] · B[k][N], one accumulator per element, summed in the order of k.
template <class M, int R, int C, bool ADD>
void tile_product(const uint32_t* a, long lda, int k, const uint32_t* b, long ldb, float* out, long ldo,
                  const float* alpha) {
  vf sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = ADD ? load(out + r * ldo + c * W) * set1(alpha[r]) : set1(0.f);
  for (int i = 0; i < k; ++i) {
    vf column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = bits(b + i * ldb + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf row = word(a + r * lda + i);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = M::mac(row, column[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(out + r * ldo + c * W, sum[r][c]);
}

template <class M, int R, bool ADD>
void rows_product(const uint32_t* a, long lda, int k, const uint32_t* b, long ldb, float* out, long ldo, int n,
                  const float* alpha) {
  int c = 0;
  for (; c + COLS * W <= n; c += COLS * W) tile_product<M, R, COLS, ADD>(a, lda, k, b + c, ldb, out + c, ldo, alpha);
  if (c < n) tile_product<M, R, 2, ADD>(a, lda, k, b + c, ldb, out + c, ldo, alpha);
}

template <class M, bool ADD>
INLINE void product(int rows, const uint32_t* a, long lda, int k, const uint32_t* b, long ldb, float* out, long ldo,
                    int n, const float* alpha) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * lda, out += ROWS * ldo) {
    rows_product<M, ROWS, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
    if (ADD) alpha += ROWS;
  }
  if (rows == 1) rows_product<M, 1, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
  if constexpr (ROWS > 2) {
    if (rows == 2) rows_product<M, 2, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
    if (rows == 3) rows_product<M, 3, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
  }
}

// Multiplies in float32; K and V of either dtype are widened when packed.
template <class T>
struct Float32 {
  using Storage = T;
  static constexpr bool EXACT = sizeof(T) == 4, BYTES = false, DIRECT = false, RAW_KEYS = false;
  static int key_words(int d) { return d; }
  static int prob_words(int keys) { return keys; }
  static int row_block_steps(const LayerCall&, int n) { return n / 16; }
  static bool takes_raw_keys(const LayerCall&, int) { return false; }
  static void begin(int) {}
  INLINE static vf mac(vf a, vf b, vf c) { return fma(a, b, c); }

  static void pack_query(const char* from, int d, uint32_t* to) {
    for (int i = 0; i < d; ++i) {
      if constexpr (sizeof(T) == 2)
        to[i] = (uint32_t)((const uint16_t*)from)[i] << 16;
      else
        to[i] = ((const uint32_t*)from)[i];
    }
  }
  static void pack_keys(const char* const* rows, int n, int d, uint32_t* to, long block) {
    for (int key = 0; key < n; key += W)
      for (int i = 0; i < d; i += 16 / (int)sizeof(T)) {
        vf words[4];
        columns(rows + key, i * sizeof(T), words);
        for (int w = 0; w < 4; ++w) {
          float* at = (float*)to + key;
          if constexpr (sizeof(T) == 2) {
            store(at + (i + 2 * w) * block, (vf)((vi)words[w] << 16));
            store(at + (i + 2 * w + 1) * block, (vf)((vi)words[w] & -65536));
          } else {
            store(at + (i + w) * block, words[w]);
          }
        }
      }
  }
  static void pack_values(const char* const* rows, int n, int d, int padded, uint32_t* to) {
    for (int key = 0; key < n; ++key) {
      float* at = (float*)to + (long)key * padded;
      int i = 0;
      if constexpr (sizeof(T) == 2) {
        for (; i + W <= d; i += W) store(at + i, widen((const uint16_t*)rows[key] + i));
        for (; i < d; ++i) ((uint32_t*)at)[i] = (uint32_t)((const uint16_t*)rows[key])[i] << 16;
      } else {
        for (; i < d; i += 4) __builtin_memcpy(at + i, rows[key] + 4L * i, 16);
      }
    }
  }
  INLINE static void put(uint32_t* to, int i, vf p0, vf p1, vf& sum) {
    store((float*)to + i, p0);
    store((float*)to + i + W, p1);
    sum = sum + p0;
    sum = sum + p1;
  }
  static void scores(int rows, const uint32_t* q, int d, const uint32_t* keys, long block, int n, float* out) {
    product<Float32, false>(rows, q, d, d, keys, block, out, block, n, nullptr);
  }
  static void mix(int rows, const uint32_t* probs, long block, int n, const uint32_t* values, int padded, float* out,
                  long ldo, const float* alpha) {
    product<Float32, true>(rows, probs, block, n, values, padded, out, ldo, padded, alpha);
  }
  static void natural_order(float*, int) {}
};

}  // namespace
}  // namespace attention
