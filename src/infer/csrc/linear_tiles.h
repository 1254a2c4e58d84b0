// Products of linear layers on the tile registers. isa/amx.cpp includes it.
#pragma once

#include "linear_finish.h"
#include "linear_pack.h"

namespace linear {
namespace {

struct PrefetchStream {  // lines that are asked for in each step
  const char* next;
  long lines;
};

RowFormat row_format(const Layer& layer, long) { return layer.whole() ? RowFormat::BYTES : RowFormat::PAIRS; }

void pack_these_rows(const Call& c, long item) { pack_rows(c, item); }

void pack_weight(void* packing);
void compute(void* call);
const Kernels KERNELS{true, false, SLICE, ITEM_PANELS, 0, pack_weight, compute, row_format, fit_row};

class ProductState {  // the shape of the tiles
 public:
  explicit ProductState(const Call& c) {
    TileConfig config;
    save_tiles(&before_);
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      const bool is_second = i == 2 || i == 3 || i == 5;  // of a group's two tiles of rows
      const long rows = std::clamp(is_second ? c.M - 16 : c.M, 1L, 16L);
      config.rows[i] = (uint8_t)(c.groups > 1 || i > 5 ? 16 : rows);
      config.colsb[i] = 64;
    }
    FENCE();
    _tile_loadconfig(&config);
  }
  ~ProductState() { restore_tiles(&before_); }  // others on this thread (oneDNN) may count on their shape

 private:
  TileConfig before_;
};

// sums (= or +=) a group × a panel over some steps; meanwhile prefetches lines from `next` on, with
// TURN from step `turn` on from `elsewhere` on.
template <int BITS, int ROWS, bool FIRST, bool TURN>
void multiply(const char* a, const char* b, long steps, float* sums, const char* next, long lines, long turn = 0,
              const char* elsewhere = nullptr) {
#define PRODUCT(to, from, by)   \
  if (BITS < 16)                \
    _tile_dpbssd(to, from, by); \
  else                          \
    _tile_dpbf16ps(to, from, by)
  FENCE();
  if (FIRST) {
    _tile_zero(0);
    _tile_zero(1);
    if (ROWS == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    if (ROWS == 2) {
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    }
  }
  for (long step = 0; step < steps; ++step) {
    if (TURN && step == turn) next = elsewhere;
    for (long i = 0; i < lines; ++i) _mm_prefetch(next + i * 64, _MM_HINT_T1);
    next += lines * 64;
    if (!FIRST && BITS == 16)  // the sums that come after these
      for (int i = 0; i < 4; ++i) _mm_prefetch((const char*)sums + 4096 + step * 256 + i * 64, _MM_HINT_T0);
    _tile_loadd(6, b, 64);
    _tile_stream_loadd(4, a, 64);
    PRODUCT(0, 4, 6);
    _tile_loadd(7, b + TILE, 64);
    PRODUCT(1, 4, 7);
    if (ROWS == 2) {
      _tile_stream_loadd(5, a + TILE, 64);
      PRODUCT(2, 5, 6);
      PRODUCT(3, 5, 7);
    }
    a += ROWS * TILE;
    b += 2 * TILE;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (ROWS == 2) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
  FENCE();
#undef PRODUCT
}

const char* unpacked_panel(const Call& c, long panel, long k, long, char*) { return c.layer.tiles(panel, k); }

void multiply_panel(const Call& c, long group, const char* b, long, long k, long steps, float* sums, PrefetchStream one,
                    PrefetchStream) {
  constexpr decltype(&multiply<16, 1, true, false>) KINDS[2][2][2] = {
      {{multiply<16, 1, false, false>, multiply<16, 1, true, false>},
       {multiply<16, 2, false, false>, multiply<16, 2, true, false>}},
      {{multiply<8, 1, false, false>, multiply<8, 1, true, false>},
       {multiply<8, 2, false, false>, multiply<8, 2, true, false>}}};
  KINDS[c.layer.whole()][c.tiles_in(group) - 1][k == 0](c.tiles(group, k), b, steps, sums, one.next, one.lines, 0,
                                                        nullptr);
}

// One group: W is read once from end to end, each panel's sums stay in the tiles. The prefetch goes
// on to the panels that this thread takes next; those behind `end` may be another's.
void sweep(const Call& c, long begin, long end, const char* following, float* sums, char*) {
  constexpr decltype(&multiply<16, 1, true, true>) KINDS[2][2] = {
      {multiply<16, 1, true, true>, multiply<16, 2, true, true>},
      {multiply<8, 1, true, true>, multiply<8, 2, true, true>}};
  const Layer& layer = c.layer;
  const auto product = KINDS[layer.whole()][c.tiles_in(0) - 1];
  const char* last = layer.tiles(end, 0);
  const long lines = 2 * TILE / 64;
  for (long panel = begin; panel < end; ++panel) {
    const char* b = layer.tiles(panel, 0);
    const bool behind = b + LEAD_BYTES > last;
    product(c.packed, b, layer.steps, sums, behind ? following + (b + LEAD_BYTES - last) : b + LEAD_BYTES, lines,
            behind ? -1 : (last - b - LEAD_BYTES) / (lines * 64), following);
    finish(c, sums, 0, 0, panel, panel + 1);
  }
}

}  // namespace
}  // namespace linear
