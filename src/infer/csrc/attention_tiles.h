// Attention's products on the tile registers (AMX).
#pragma once

#include "attention_pairs.h"

namespace attention {
namespace {

// The same layouts through the tile some, for decode and prefill alike (its order of summation is
// not that of vdpbf16ps). Tiles 0–3 collect, 4 holds rows of A, 5 a piece of B.
struct Tiles : Pairs {
  static constexpr bool RAW_KEYS = true;
  // Keys of a cell's head that are the rows of a tile as they lie there need no packing; it is the
  // queries, few, that are turned. Products and sums are the same ones in the same order.
  static bool takes_raw_keys(const LayerCall& call, int rows) {
    return rows <= ROW_BLOCK && call.D % 32 == 0 && call.page_size % 16 == 0;
  }

  static void begin(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.colsb[i] = i > 5 && rows < 16 ? 4 * rows : 64;
      config.rows[i] = i < 5 && rows < 16 ? rows : 16;
    }
    FENCE();
    _tile_loadconfig(&config);
  }
  // `heads`: the head in the cache's first cell; `turned`: room for a block's scores, key by key.
  static void raw_scores(const LayerCall& call, int rows, const uint32_t* queries, const char* heads,
                         const Cells& cells, int n, float* turned, float* out, Prefetcher& prefetcher) {
    FENCE();
    for (int key = 0; key < cells.count && key < n; key += 16) {
      _tile_zero(6);
      for (int i = 0; i < call.D / 2; i += 16) {
        _tile_loadd(5, heads + cells.at[key] + 4 * i, cells.cell_bytes);
        _tile_loadd(7, queries + i * rows, 4 * rows);
        _tile_dpbf16ps(6, 5, 7);
      }
      _tile_stored(6, turned + key * rows, 4 * rows);
      prefetcher.step(call, 1);
    }
    FENCE();
    const __m512i at = multiples_to_15(rows);
    for (int r = 0; r < rows; ++r)
      for (int key = 0; key < n; key += 16)
        store(out + r * call.block + key, _mm512_i32gather_ps(at, turned + key * rows + r, 4));
  }
  template <int C, bool ADD>
  INLINE static void tiles(const uint32_t* a, long lda, int k, const uint32_t* b, long ldb, float* out, long ldo) {
    FENCE();  // the intrinsics do not tell the compiler that they read memory
    if constexpr (ADD) {
      _tile_loadd(0, out, ldo * 4);
      _tile_loadd(1, out + 16, ldo * 4);
      if constexpr (C == 4) {
        _tile_loadd(2, out + 32, ldo * 4);
        _tile_loadd(3, out + 48, ldo * 4);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (C == 4) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    for (int i = 0; i < k; i += 16) {
      const uint32_t* from = b + i * ldb;
      _tile_loadd(4, a + i, lda * 4);
      _tile_loadd(5, from, ldb * 4);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, from + 16, ldb * 4);
      _tile_dpbf16ps(1, 4, 5);
      if constexpr (C == 4) {
        _tile_loadd(5, from + 32, ldb * 4);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, from + 48, ldb * 4);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, out, ldo * 4);
    _tile_stored(1, out + 16, ldo * 4);
    if constexpr (C == 4) {
      _tile_stored(2, out + 32, ldo * 4);
      _tile_stored(3, out + 48, ldo * 4);
    }
    FENCE();
  }
  template <bool ADD>
  static void all(const uint32_t* a, long lda, int k, const uint32_t* b, long ldb, float* out, long ldo, int n) {
    int c = 0;
    for (; c + 64 <= n; c += 64) tiles<4, ADD>(a, lda, k, b + c, ldb, out + c, ldo);
    if (c < n) tiles<2, ADD>(a, lda, k, b + c, ldb, out + c, ldo);
  }
  static void scores(int, const uint32_t* q, int d, const uint32_t* keys, long block, int n, float* out) {
    all<false>(q, key_words(d), key_words(d), keys, block, out, block, n);
  }
  static void mix(int rows, const uint32_t* probs, long block, int n, const uint32_t* values, int padded, float* out,
                  long ldo, const float* alpha) {
    for (int r = 0; r < rows; ++r)
      if (alpha[r] != 1.f)
        for (int i = 0; i < padded; i += W) store(out + r * ldo + i, load(out + r * ldo + i) * set1(alpha[r]));
    all<true>(probs, block, n / 2, values, padded, out, ldo, padded);
  }
};

}  // namespace
}  // namespace attention
