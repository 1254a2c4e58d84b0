// Attention over a cache in int8 on the tile registers (AMX).
#pragma once

#include "attention_bytes.h"
#include "attention_tiles.h"

namespace attention {
namespace {

struct Bytes : WholeNumbers<Tiles> {
  // Tiles 5 · 6 and 5 · 7 give scores in 1 and 3. Digits in 4 and 5, times 6 and 7: sums of high ones in
  // 0 and 2, of low ones in 1 and 3; of up to 8 rows both are rows of 4, and their sums of 0 and 2.
  static bool narrow(int rows) { return rows <= 8; }
  static void begin(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.colsb[i] = 64;
      const int own = narrow(rows) && i % 2 == 0 ? 2 * rows : rows;
      config.rows[i] = i > 5 || own > 16 ? 16 : own;
    }
    FENCE();
    _tile_loadconfig(&config);
  }
  static void pack_query(const char* from, int d, uint32_t* to) {
    with_head(d, (const uint16_t*)from, [=](auto head) { head.put_query((char*)to); });
  }
  // Values of 4 strips become a tile for each 16 dims, its lines in the order in which digits are packed:
  // first those of the strips' first 4 keys.
  static void copy_values(const LayerCall& call, const Cells& cells, const char* heads, int key, uint32_t* tiles,
                          uint32_t* digits) {
    const char* from = cells.row(heads, key);
    char* to = (char*)tiles + key / 64 * 64 * call.D + key % 64 / 16 * 64;
    for (int i = 0; i < call.D; i += 16, from += 256, to += 1024)
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) store((float*)(to + line * 256), bits(from + line * 64));
    read_scales(call, cells, cells.row(heads, key), key, *(Digits*)digits);
  }
  static void scores(const LayerCall& call, const RowBlock& some, const Cells& cells, const char* heads, float* out,
                     Prefetcher& prefetcher) {
    // All products first: what waits for a tile's sums waits for everything before them.
    alignas(64) int32_t sums[BLOCK / 16][16][16];
    FENCE();
    for (int key = 0; key < some.keys; key += 32) {
      const char *one = cells.row(heads, key), *other = cells.row(heads, key + 16);
      _tile_zero(1);
      _tile_zero(3);
      for (int d = 0; d < call.D; d += 64) {
        _tile_loadd(5, (const char*)some.queries + d, call.D + 64);
        _tile_loadd(6, one + d * 16, 64);
        _tile_dpbssd(1, 5, 6);
        _tile_loadd(7, other + d * 16, 64);
        _tile_dpbssd(3, 5, 7);
      }
      _tile_stored(1, sums[key / 16], 64);
      _tile_stored(3, sums[key / 16 + 1], 64);
      prefetcher.step(call, 1);
    }
    FENCE();
    for (int key = 0; key < some.keys; key += 16) {
      const vf scales = bits(cells.row(heads, key) + call.D * 16);
      for (int r = 0; r < some.count; ++r)
        store(out + r * call.block + key, _mm512_cvtepi32_ps(_mm512_load_si512(sums[key / 16][r])) * scales);
    }
  }
  template <bool NARROW>
  static void some_mix(const LayerCall& call, const RowBlock& some, const Digits& digits, const char* tiles,
                       const float* alpha, Prefetcher& prefetcher) {
    constexpr int PAIRS = 4;  // of columns, whose sums are kept
    alignas(64) int32_t sums[PAIRS][4][16][16];
    for (int first = 0; first < call.D; first += 32 * PAIRS) {
      const int pairs = std::min(PAIRS, (call.D - first) / 32);
      FENCE();
      for (int i = 0; i < pairs; ++i) {
        _tile_zero(0);
        _tile_zero(2);
        if (!NARROW) {
          _tile_zero(1);
          _tile_zero(3);
        }
        for (int key = 0; key < some.keys; key += 64) {
          const char* from = tiles + key * call.D + (first + i * 32) * 64;
          _tile_loadd(4, digits.of[0][0] + key, NARROW ? BLOCK : 2 * BLOCK);
          _tile_loadd(6, from, 64);
          _tile_dpbusd(0, 4, 6);
          _tile_loadd(7, from + 1024, 64);
          _tile_dpbusd(2, 4, 7);
          if (NARROW) continue;
          _tile_loadd(5, digits.of[0][1] + key, 2 * BLOCK);
          _tile_dpbusd(1, 5, 6);
          _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(0, sums[i][0], 64);
        _tile_stored(2, sums[i][2], 64);
        if (!NARROW) {
          _tile_stored(1, sums[i][1], 64);
          _tile_stored(3, sums[i][3], 64);
        }
        prefetcher.step(call, 1);
      }
      FENCE();
      for (int r = 0; r < some.count; ++r) {
        float* to = some.state + r * call.state_words + first;
        const vf unit_here = set1(digits.units[r]), before = set1(alpha[r]);
        for (int i = 0; i < 2 * pairs; ++i, to += 16) {
          const auto& pair = sums[i / 2];
          const int32_t* high = NARROW ? pair[i % 2 * 2][2 * r] : pair[i % 2 * 2][r];
          const int32_t* low = NARROW ? high + 16 : pair[i % 2 * 2 + 1][r];
          add_digits(to, _mm512_load_si512(high), _mm512_load_si512(low), unit_here, before);
        }
      }
    }
  }
  static void mix(const LayerCall& call, const RowBlock& some, const Buffers& at, const char*, const float* alpha,
                  Prefetcher& prefetcher) {
    const Digits& digits = *(const Digits*)at.keys;
    const char* tiles = (const char*)at.values;
    if (narrow(some.rows))
      some_mix<true>(call, some, digits, tiles, alpha, prefetcher);
    else
      some_mix<false>(call, some, digits, tiles, alpha, prefetcher);
  }
};

}  // namespace
}  // namespace attention
