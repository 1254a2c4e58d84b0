// Products of many rows and weights in blocks on the tile registers. isa/amx_blocks.cpp includes it.
//
// A tile has 16 rows of the 32 inputs that share a multiple, so it is half full. Their whole numbers are multiplied by
// the multiples on vectors, in the order of `Blocks::multiply`: the sums have the same bits. Of 16 inputs that share a
// multiple there would be twice as many of them, which makes tiles slower than vectors.
#pragma once

#include "linear_vectors.h"

namespace linear {
namespace {

constexpr int TILE_ROWS = 16, FEWEST_TILE_ROWS = 9;  // rows of a product; fewer are faster on vectors
constexpr long FEWEST_ROWS = 24;                     // of a call, likewise

static_assert(FEWEST_TILE_ROWS > BLOCK_ROWS[0], "by their number they are told from those on vectors");

constexpr bool suits_tiles(const BlockFormat& format) { return format.group == 32; }

// Of the rows of a group that are left, how many go to tiles at once; 0: they go to vectors.
int rows_on_tiles(const Call& c, const BlockFormat& format, long left) {
  if (c.M < FEWEST_ROWS || !suits_tiles(format) || left < FEWEST_TILE_ROWS) return 0;
  return (int)(left > TILE_ROWS && left < TILE_ROWS + FEWEST_TILE_ROWS ? TILE_ROWS : left);
}

class ProductState {  // the shape of the tiles: 0 … 3 sums, 4 rows, 5 codes
 public:
  explicit ProductState(const Call& c) : in_use_(c.M >= FEWEST_ROWS) {
    if (!in_use_) return;
    save_tiles(&before_);
    TileConfig config;
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.rows[i] = TILE_ROWS, config.colsb[i] = 64;
    config.colsb[4] = 32, config.rows[5] = 8;
    FENCE();
    _tile_loadconfig(&config);
  }
  ~ProductState() {
    if (in_use_) restore_tiles(&before_);
  }

 private:
  const bool in_use_;
  TileConfig before_;
};

template <BlockType TYPE, bool UNPACKED>
struct BlockTiles {
  using Own = Blocks<TYPE, UNPACKED>;
  static constexpr BlockFormat F = Own::F;
  static constexpr int GROUPS = Own::GROUPS;

  // A step's whole numbers of T · 16 rows × a panel → `found`, [T, groups, halves of the panel, 16 rows, 16].
  template <int T>
  static INLINE void add_up(const char* a, const char* codes, int32_t* found) {
    static_assert(W == 16, "codes lie as tiles do");
#define PRODUCT(sums, t)                                \
  _tile_loadd(4, a + (t) * TILE + group * F.group, 64); \
  _tile_zero(sums);                                     \
  _tile_dpbsud(sums, 4, 5)
    for (int group = 0; group < GROUPS; ++group) {
      const char* b = codes + group * F.group * 16;
      int32_t *one = found + group * 512, *two = one + GROUPS * 512;
      _tile_loadd(5, b, 64);
      PRODUCT(0, 0);
      if (T > 1) {
        PRODUCT(1, 1);
      }
      _tile_loadd(5, b + TILE, 64);
      PRODUCT(2, 0);
      if (T > 1) {
        PRODUCT(3, 1);
        _tile_stored(1, two, 64);
        _tile_stored(3, two + 256, 64);
      }
      _tile_stored(0, one, 64);
      _tile_stored(2, one + 256, 64);
    }
#undef PRODUCT
  }

  // What a step's whole numbers add to the sums of some rows.
  static INLINE void scale(const RowGroup* groups, int count, const char* unit, const char* step, int i,
                           const int32_t* found, float* sums, bool first) {
    vf by[GROUPS][2], minimum[GROUPS][2];
#pragma GCC unroll 4
    for (int group = 0; group < GROUPS; ++group)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) Own::factors_of(unit, step, i, group, v * 16, by[group][v], minimum[group][v]);
    for (int r = 0; r < count; ++r, groups += 2, found += 16, sums += 16) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        vf total = first ? set1(0.f) : load(sums + v * 256);
#pragma GCC unroll 4
        for (int group = 0; group < GROUPS; ++group) {
          const RowGroup& own = groups[group * F.group / 32];
          vb sum = load_bytes(found + (group * 2 + v) * 256);
          if constexpr (Own::HAS_OFFSET) sum = add_lanes(sum, Own::start(groups, group));
          total = fused(float_lanes(sum) * set1(own.scale), by[group][v], total);
          if constexpr (F.has_minima) total = fused(minimum[group][v], set1(Own::negated_sum(own, group)), total);
        }
        store(sums + v * 256, total);
      }
    }
  }

  // sums (= or +=) up to T · 16 rows × a panel over some steps, which begin with a unit. The tiles are a step ahead of
  // the vectors: what a tile has stored cannot be loaded at once.
  template <int T>
  static void multiply(BlockRows rows, int count, const char* b, long steps, float* sums, bool first, Ahead ahead) {
    constexpr long UNIT_BYTES = Own::HEAD_BYTES + Own::UNIT_STEPS * Own::STEP_BYTES;
    const auto unit_of = [=](long n) { return b + n / Own::UNIT_STEPS * UNIT_BYTES; };
    const auto step_of = [=](long n) { return unit_of(n) + Own::HEAD_BYTES + n % Own::UNIT_STEPS * Own::STEP_BYTES; };
    alignas(64) int32_t found[2][T * GROUPS * 2 * 256];
    FENCE();
    add_up<T>(rows.bytes, step_of(0) + Own::codes_at(0), found[0]);
    for (long n = 0; n < steps; ++n) {
      rows.bytes += rows.step_bytes;
      if (n + 1 < steps) add_up<T>(rows.bytes, step_of(n + 1) + Own::codes_at(0), found[(n + 1) % 2]);
      for (int quarter = 0; quarter < 4; ++quarter) ahead.quarter();
      for (int t = 0; t < T; ++t)
        scale(rows.groups + t * TILE_ROWS * 2, std::min(count - t * TILE_ROWS, TILE_ROWS), unit_of(n), step_of(n),
              (int)(n % Own::UNIT_STEPS), found[n % 2] + t * GROUPS * 512, sums + t * 512, first && !n);
      rows.groups += rows.step_groups;
    }
    FENCE();
  }
  static constexpr decltype(&multiply<1>) OF_TILES[] = {multiply<1>, multiply<2>};
};

// Whether a format's codes are tiles as they lie in memory.
constexpr bool is_packed_as_read(size_t index) { return BLOCK_FORMATS[index].bits == 8; }

using MultiplyBlockTiles = decltype(&BlockTiles<BlockType::Q8_0, false>::multiply<1>);

// Formats that do not suit tiles have an entry, which is not used.
constexpr BlockType on_tiles_as(size_t index) {
  if (!suits_tiles(BLOCK_FORMATS[index])) return BlockType::Q8_0;
  return BLOCK_FORMATS[is_packed_as_read(index) ? index : (size_t)unpacked_as((int)index)].type;
}

template <size_t... INDEX>
MultiplyBlockTiles product_on_tiles(BlockType type, int rows, std::index_sequence<INDEX...>) {
  constexpr const MultiplyBlockTiles* PRODUCTS[] = {
      BlockTiles<on_tiles_as(INDEX), !is_packed_as_read(INDEX)>::OF_TILES...};
  return PRODUCTS[block_index(type)][rows > TILE_ROWS];
}

void multiply_on_tiles(BlockType type, BlockRows rows, int count, const char* b, long steps, float* sums, bool first,
                       Ahead ahead) {
  product_on_tiles(type, count, EveryFormat{})(rows, count, b, steps, sums, first, ahead);
}

}  // namespace
}  // namespace linear
