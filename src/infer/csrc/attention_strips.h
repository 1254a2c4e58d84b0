// Attention's products by pairs of bfloat16 over a cache in strips (AVX-512-BF16).
#pragma once

#include "attention_pairs.h"

namespace attention {
namespace {

// The same sums in the same order, from cells that lie as the products want them, in strips of 16. Of a
// strip's head: keys are a line for each 2 dims, of all 16 keys; values 2 keys of 16 dims to a line, first
// all dims of the first 2 keys. So nothing is packed, and a thread reads its cells in order.
struct Strips : Pairs {
  static constexpr bool DIRECT = true;
  static int row_block_steps(const LayerCall& call, int n) { return n * call.D / 64; }  // of 256 bytes

  static void write(const uint16_t* k, const uint16_t* v, char* keys, char* values, int lane, int d) {
    values += lane / 2 * d * 4;
    const __mmask32 own = lane % 2 ? 0xaaaaaaaa : 0x55555555;
    for (long i = 0; i < d / 2; ++i) __builtin_memcpy(keys + i * 64 + lane * 4, k + 2 * i, 4);
    for (long i = 0; i < d; i += 16) {
      const __m512i dims = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v + i)));
      _mm512_mask_storeu_epi16(values + i * 4, own, _mm512_or_si512(dims, _mm512_slli_epi32(dims, 16)));
    }
  }
  static void copy_values(const LayerCall&, const Cells&, const char*, int, uint32_t*, uint32_t*) {}

  template <int R, int C>
  static void some_scores(const LayerCall& call, const uint32_t* q, const char* const* strips, float* out,
                          Prefetcher* prefetcher) {
    const long words = key_words(call.D);  // of a query, which may end with zeros
    vf sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = set1(0.f);
    for (long i = 0; i < call.D / 2; i += 4) {
#pragma GCC unroll 4
      for (long w = i; w < i + 4; ++w) {
        vf keys[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) keys[c] = bits(strips[c] + w * 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const vf row = word(q + r * words + w);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sum[r][c] = mac(row, keys[c], sum[r][c]);
        }
      }
      if (prefetcher) prefetcher->step(call, C);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) store(out + r * call.block + c * W, sum[r][c]);
  }
  template <int C>
  INLINE static void row_block_scores(const LayerCall& call, const RowBlock& some, const char* const* strips,
                                      float* out, Prefetcher* prefetcher) {
    constexpr decltype(&some_scores<1, C>) KINDS[] = {some_scores<1, C>, some_scores<2, C>, some_scores<3, C>,
                                                      some_scores<4, C>};
    for (int r = 0; r < some.count; r += ROWS)
      KINDS[std::min(ROWS, some.count - r) - 1](call, some.queries + r * key_words(call.D), strips,
                                                out + r * call.block, prefetcher);
  }
  static void scores(const LayerCall& call, const RowBlock& some, const Cells& cells, const char* heads, float* out,
                     Prefetcher& prefetcher) {
    const char* strips[BLOCK / STRIP];
    cells.point_strips(heads, some.keys, strips);
    Prefetcher* often = some.count > ROWS ? nullptr : &prefetcher;
    if (some.keys == 64)
      row_block_scores<4>(call, some, strips, out, often);
    else
      row_block_scores<2>(call, some, strips, out, often);
    if (!often) prefetcher.step(call, row_block_steps(call, some.keys) / 2);
  }

  // Some rows × C · 16 dims. `count`: cells that are there; what lies behind them may be anything.
  template <int R, int C>
  static void some_mix(const LayerCall& call, const uint32_t* probs, const char* const* strips, int count, long dim,
                       float* out, const float* alpha, Prefetcher* prefetcher) {
    vf sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = load(out + r * call.state_words + dim + c * W) * set1(alpha[r]);
    const auto add = [&](const char* from, const uint32_t* weights, bool half) ALWAYS_INLINE {
      vf values[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        values[c] = bits(from + c * 64);
        if (half) values[c] = (vf)_mm512_and_si512((__m512i)values[c], _mm512_set1_epi32(0xffff));
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vf row = word(weights + r * call.block);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sum[r][c] = mac(row, values[c], sum[r][c]);
      }
    };
    const long stride = call.D * 4L;
    for (int key = 0; key < count; key += STRIP) {
      const char* from = strips[key / STRIP] + dim * 4;
      const int here = std::min(STRIP, count - key);
      for (int i = 0; i < here / 2; ++i, from += stride, ++probs) add(from, probs, false);
      if (here % 2) add(from, probs, true);
      if (prefetcher) prefetcher->step(call, 2 * C);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) store(out + r * call.state_words + dim + c * W, sum[r][c]);
  }
  template <int C>
  INLINE static long row_block_mix(const LayerCall& call, const RowBlock& some, const Buffers& at,
                                   const char* const* strips, long dim, const float* alpha, Prefetcher* prefetcher) {
    constexpr decltype(&some_mix<1, C>) KINDS[] = {some_mix<1, C>, some_mix<2, C>, some_mix<3, C>, some_mix<4, C>};
    const int count = std::min(some.keys, at.cells.count);
    for (; dim + C * W <= call.D; dim += C * W)
      for (int r = 0; r < some.count; r += ROWS)
        KINDS[std::min(ROWS, some.count - r) - 1](call, (const uint32_t*)at.scores + r * call.block, strips, count, dim,
                                                  some.state + r * call.state_words, alpha + r, prefetcher);
    return dim;
  }
  static void mix(const LayerCall& call, const RowBlock& some, const Buffers& at, const char* heads, const float* alpha,
                  Prefetcher& prefetcher) {
    const char* strips[BLOCK / STRIP];
    at.cells.point_strips(heads, some.keys, strips);
    Prefetcher* often = some.count > ROWS ? nullptr : &prefetcher;
    row_block_mix<1>(call, some, at, strips, row_block_mix<4>(call, some, at, strips, 0, alpha, often), alpha, often);
    if (!often) prefetcher.step(call, row_block_steps(call, some.keys) / 2);
  }
  static void natural_order(float*, int) {}
};

}  // namespace
}  // namespace attention
