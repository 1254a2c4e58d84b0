// Attention over a cache in int8 on vectors. `Products`: the way to multiply bfloat16.
//
// Of x86 bytes without a sign are multiplied by bytes with one: queries are 128 too large, and what that adds, 128
// times the sum of a key's numbers, is found beside the products. Elsewhere (HAS_SIGNED_PRODUCTS) both have signs, and
// so have both digits of P. Sums are exact, and so the same with all.
#pragma once

#include "attention_bytes.h"

namespace attention {
namespace {

template <class Products>
struct ByteVectors : WholeNumbers<Products> {
  using Shared = WholeNumbers<Products>;
  static constexpr int VECTORS = W < 8 ? 4 : 2;  // of keys or dims whose sums are in registers
  static constexpr int SPAN = VECTORS * W;
#if VECTOR_WIDTH == 16
  static constexpr int SCORED = 8, MIXED = 6;  // rows of such sums
#else
  static constexpr int SCORED = 4, MIXED = 2;
#endif
  // Vector v of a span of dims: its place in a line of values, of which each 16 dims have 4.
  static constexpr long line_place(int v) { return v * W / 16 * 256 + v * W % 16 * 4; }

  static void begin(int) {}
  static void pack_query(const char* from, int d, uint32_t* to) {
    with_head(d, (const uint16_t*)from, [=](auto head) ALWAYS_INLINE { head.put_query((char*)to); });
#ifndef HAS_SIGNED_PRODUCTS
    for (int i = 0; i < d / 4; ++i) to[i] ^= 0x80808080;
#endif
  }
  static void copy_values(const LayerCall& call, const Cells& cells, const char* heads, int key, uint32_t*,
                          uint32_t* digits) {
    Shared::read_scales(call, cells, cells.row(heads, key), key, *(Digits*)digits);
  }
  // Of some rows, with a span of keys. Here and in `some_mix`: a call of its own, so what is added up stays in
  // registers, whatever is asked for in between.
  template <int R>
  NOINLINE static void some_scores(const LayerCall& call, const uint32_t* queries, const char* const* strips,
                                   float* out) {
    const int words = Shared::key_words(call.D);
    vb sums[R][VECTORS];
    [[maybe_unused]] vb too_much[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      too_much[v] = no_bytes();
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][v] = no_bytes();
    }
    for (int line = 0; line < call.D / 4; ++line) {
      ByteOperand keys[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        keys[v] = load_bytes(strips[v * W / 16] + v * W % 16 * 4 + 64 * line);
#ifndef HAS_SIGNED_PRODUCTS
        add_products(too_much[v], all_bytes((char)128), keys[v]);
#endif
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vb four = four_bytes(queries + r * words + line);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) add_products(sums[r][v], four, keys[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const vf scales = bits(strips[v * W / 16] + v * W % 16 * 4 + call.D * 16);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        store(out + r * call.block + v * W, float_lanes(subtract_lanes(sums[r][v], too_much[v])) * scales);
    }
  }
  // Of some rows, for a span of dims from `dim` on.
  template <int R>
  NOINLINE static void some_mix(const LayerCall& call, const RowBlock& some, int row, int dim,
                                const char* const* strips, const Digits& digits, const float* alpha) {
    vb sums[R][VECTORS][2];  // columns; high and low digits
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < 2 * VECTORS; ++j) sums[r][j / 2][j % 2] = no_bytes();
    for (int at = 0; at < some.keys / 4; ++at) {  // 4 keys of a strip
      const char* from = strips[at / 4] + dim * 16 + at % 4 * 64;
      ByteOperand values[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) values[v] = load_bytes(from + line_place(v));
      const int place = at / 16 * 64 + (at % 4 * 4 + at / 4 % 4) * 4;
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int digit = 0; digit < 2; ++digit) {
          const vb four = four_bytes(digits.of[row + r][digit] + place);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) add_products(sums[r][v][digit], four, values[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        Shared::add_digits(some.state + (row + r) * call.state_words + dim + v * W, sums[r][v][0], sums[r][v][1],
                           set1(digits.units[row + r]), set1(alpha[row + r]));
  }
  static void scores(const LayerCall& call, const RowBlock& some, const Cells& cells, const char* heads, float* out,
                     Prefetcher& prefetcher) {
    const char* strips[BLOCK / STRIP];
    cells.point_strips(heads, some.keys, strips);
    for (int key = 0; key < some.keys; key += SPAN) {
      for (int row = 0; row < some.count; row += SCORED)
        scores_of(std::min(SCORED, some.count - row))(call, some.queries + row * Shared::key_words(call.D),
                                                      strips + key / STRIP, out + row * call.block + key);
      if (key % 32 == 0) prefetcher.step(call, 1);
    }
  }
  static void mix(const LayerCall& call, const RowBlock& some, const Buffers& at, const char* heads, const float* alpha,
                  Prefetcher& prefetcher) {
    const char* strips[BLOCK / STRIP];
    at.cells.point_strips(heads, some.keys, strips);
    for (int dim = 0; dim < call.D; dim += SPAN) {
      for (int row = 0; row < some.count; row += MIXED)
        mix_of(std::min(MIXED, some.count - row))(call, some, row, dim, strips, *(const Digits*)at.keys, alpha);
      if (dim % 32 == 0) prefetcher.step(call, 1);
    }
  }

 private:
  using Scores = void (*)(const LayerCall&, const uint32_t*, const char* const*, float*);
  using Mix = void (*)(const LayerCall&, const RowBlock&, int, int, const char* const*, const Digits&, const float*);
  static constexpr int few(int rows, int most) { return rows < most ? rows : most; }
  static Scores scores_of(int rows) {
    constexpr Scores KINDS[8] = {some_scores<1>,
                                 some_scores<2>,
                                 some_scores<3>,
                                 some_scores<4>,
                                 some_scores<few(5, SCORED)>,
                                 some_scores<few(6, SCORED)>,
                                 some_scores<few(7, SCORED)>,
                                 some_scores<few(8, SCORED)>};
    return KINDS[rows - 1];
  }
  static Mix mix_of(int rows) {
    constexpr Mix KINDS[6] = {some_mix<1>,
                              some_mix<2>,
                              some_mix<few(3, MIXED)>,
                              some_mix<few(4, MIXED)>,
                              some_mix<few(5, MIXED)>,
                              some_mix<few(6, MIXED)>};
    return KINDS[rows - 1];
  }
};

}  // namespace
}  // namespace attention
