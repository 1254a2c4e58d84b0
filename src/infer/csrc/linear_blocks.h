// Products of rows and weights in blocks (blocks.h) on vectors, for linear layers. linear_vectors.h includes it.
//
// The lanes of a vector are columns, as in all products here. The codes of some lines are multiplied by a row's
// numbers and summed in whole numbers until the multiple of the weights changes, 32 or 16 inputs later.
//
//   VNNI   four products in one instruction, into sums that begin at minus the offset times the row's sum; products
//          with signs on both sides (NEON) take codes of 8 bits without their offset
//   else   products in pairs of 16 bits: of 4 bits 8 lines fit (8 · 2 · 15 · 127 < 2¹⁵), of 5 bits 4, of 6 bits 2;
//          of 8 bits, without the offset, magnitudes times numbers that take over their signs
#pragma once

#include "linear_finish.h"
#include "linear_pack.h"

namespace linear {
namespace {

#if VECTOR_WIDTH == 16
constexpr int BLOCK_ROWS[] = {8, 6, 4, 3, 2, 1}, KEPT_ROWS = 4;
#else
constexpr int BLOCK_ROWS[] = {4, 3, 2, 1}, KEPT_ROWS = 1;  // KEPT_ROWS: whose float sums stay in registers
#endif

// The numbers of some rows times a layer in blocks. Each 32 are quantised by themselves.
template <bool NORM>
void pack_some_block_rows(const Call& c, long first) {
  const Layer& layer = c.layer;
  const long group = first / SIDE, rows = std::clamp(c.M - first, 0L, PACK_ROWS), in_group = c.rows_in(group);
  for (long r = 0; r < rows; ++r) {
    const long row = first + r, place = row % SIDE;
    const uint16_t* x = c.x + row * c.x_stride;
    const float factor = NORM ? row_factor<false, NORM>(c, row) : 1.f;
    for (long step = 0; step < layer.steps; ++step) {
      char* to = c.tiles(group, step) + place * 64;
      RowGroup* found = c.row_groups + (group * SIDE * layer.steps + step * in_group + place) * 2;
      Halves part[2];
      float scale[2];
      for (int i = 0; i < 2; ++i) {
        const long k = step * 64 + i * 32;
        part[i] = read_halves(x + k, layer.K - k);
        if (NORM) part[i] = part[i].times(layer.norm + k);
        const Scale own(greater_magnitude(magnitude(part[i].even), magnitude(part[i].odd)));
        part[i] = part[i].times(splat(own.inverse));
        scale[i] = own.scale * factor;
      }
      put_bytes64(to, part[0], part[1], 0);
      int32_t sums[4];
      sums_of_16(to, sums);
      for (int i = 0; i < 2; ++i) {
        const int32_t *own = sums + i * 2, sum = own[0] + own[1];
        found[i] = {scale[i], -(scale[i] * (float)sum), {-own[0], -own[1]}};
      }
    }
  }
}

void pack_block_rows(const Call& c, long item) {
  (c.layer.norm ? pack_some_block_rows<true> : pack_some_block_rows<false>)(c, item * PACK_ROWS);
}

struct BlockRows {  // a part of a group of rows, from a step on
  const char* bytes;
  long step_bytes;
  const RowGroup* groups;  // of the first row; two each, row after row
  long step_groups;
};

struct Ahead {  // two streams of lines to ask for
  PrefetchStream one, two;

  template <int R>
  INLINE void quarter() {  // of a step
    quarter_of<R>(one);
    quarter_of<R>(two);
  }
  template <int R>
  INLINE static void quarter_of(PrefetchStream& stream) {
    const char* end = stream.next + stream.lines * 16;
    for (const char* line = stream.next; line < end; line += 64) ask<R>(line);
    stream.next = end;
  }
};

template <BlockType TYPE>
struct Blocks {
  static constexpr BlockFormat F = *block_format(TYPE);
  static constexpr int GROUPS = 64 / F.group, LINES = F.group / 4;
#ifdef HAS_SIGNED_PRODUCTS
  static constexpr bool HAS_SIGNS = F.bits == 8;  // codes are multiplied without their offset
#else
  static constexpr bool HAS_SIGNS = false;
#endif
  static constexpr bool HAS_OFFSET = F.offset_bits >= 0 && !HAS_SIGNS;
#ifndef HAS_BYTE_PRODUCTS
  static constexpr int WORD_LINES = F.bits == 8 ? 1 : 1 << (7 - F.bits);  // whose sums fit 16 bits
#endif

  // The codes of line `line` of a step, one vector of each half of the columns.
  static INLINE void codes_of(const char* codes, int line, vb (&to)[2]) {
    if constexpr (F.bits == 8) {
      to[0] = load_bytes(codes + line * 64), to[1] = load_bytes(codes + 1024 + line * 64);
    } else {
      const vb both = load_bytes(codes + line * 64);
      to[0] = low_nibbles(both), to[1] = high_nibbles(both);
    }
    const char* high = codes + 1024;
    const int bit = line % 4 * 2, sixteen = line / 4;
    if constexpr (F.bits == 5) {
      const vb bits = load_bytes(high + sixteen * 64);
      to[0] = to[0] | (moved(bits, 4 - bit) & all_bytes(16));
      to[1] = to[1] | (moved(bits, 3 - bit) & all_bytes(16));
    }
    if constexpr (F.bits == 6)
      for (int half = 0; half < 2; ++half) {
        const vb bits = load_bytes(high + (sixteen * 2 + half) * 64);
        to[half] = to[half] | (moved(bits, 4 - bit) & all_bytes(48));
      }
  }
  static INLINE vb moved(vb bits, int by) { return by > 0 ? words_left(bits, by) : words_right(bits, -by); }

  // What all sums of a row begin with, for a group of inputs.
  static INLINE vb start(const RowGroup* row, int group) {
    const RowGroup& own = row[group * F.group / 32];
    if constexpr (F.group == 16) return times_offset(lanes_of(own.negated[group % 2]));
    return times_offset(lanes_of(own.negated[0] + own.negated[1]));
  }
  static INLINE vb times_offset(vb lanes) { return lanes_left(lanes, F.offset_bits); }

  // The products of a group's lines and R rows' numbers in whole numbers.
  template <int R>
  static INLINE void add_up(const char* codes, const char* a, const RowGroup* rows, int group, vb (&sum)[R][2],
                            Ahead& ahead) {
#ifdef HAS_BYTE_PRODUCTS
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = HAS_OFFSET ? start(rows + r * 2, group) : no_bytes();
#else
    const vb ones = word_ones();
    vb words[R][2];
#endif
#pragma GCC unroll 8
    for (int i = 0; i < LINES; ++i) {
      const int line = group * LINES + i;
      if (i % 4 == 0) ahead.quarter<R>();
      vb some[2];
      codes_of(codes, line, some);
      for (int v = 0; HAS_SIGNS && v < 2; ++v) some[v] = some[v] ^ all_bytes((char)0x80);
#ifndef HAS_BYTE_PRODUCTS
      vb most[2];
      for (int v = 0; v < 2; ++v) {
        if constexpr (F.bits == 8) some[v] = some[v] ^ all_bytes((char)0x80);
        most[v] = F.bits == 8 ? magnitudes_of(some[v]) : some[v];
      }
#endif
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vb x = four_bytes(a + r * 64 + line * 4);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
#ifdef HAS_BYTE_PRODUCTS
          add_products(sum[r][v], some[v], x);
#else
          const vb pairs = pairs_of_bytes(most[v], F.bits == 8 ? with_signs(x, some[v]) : x);
          words[r][v] = i % WORD_LINES ? add_words(words[r][v], pairs) : pairs;
          if (i % WORD_LINES == WORD_LINES - 1) {
            const vb four = pair_products(words[r][v], ones);
            sum[r][v] = i < WORD_LINES ? four : add_lanes(sum[r][v], four);
          }
#endif
        }
      }
    }
#ifndef HAS_BYTE_PRODUCTS
    if constexpr (HAS_OFFSET && F.bits < 8) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vb more = start(rows + r * 2, group);
        for (int v = 0; v < 2; ++v) sum[r][v] = add_lanes(sum[r][v], more);
      }
    }
#endif
  }

  // sums (= or +=) R rows × 2 vectors over some steps, which begin with a unit. `b`, `sums`: of the pass.
  template <int R>
  static void multiply(BlockRows rows, const char* b, long column, long steps, float* sums, bool first, Ahead ahead) {
    constexpr bool KEEP = R <= KEPT_ROWS;
    vf kept[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        kept[r][v] = first ? set1(0.f) : load(sums + r * 16 + v * 256);
        if (!KEEP && first) store(sums + r * 16 + v * 256, kept[r][v]);
      }
    for (; steps > 0; steps -= F.unit_steps()) {
      const char *unit = b, *step = b + F.head_bytes();
      b += F.unit_bytes();
      for (int i = 0; i < F.unit_steps(); ++i, step += F.step_bytes()) {
#pragma GCC unroll 4
        for (int group = 0; group < GROUPS; ++group) {
          vb sum[R][2];
          add_up<R>(step + F.multiple_bytes() + column * 4, rows.bytes, rows.groups, group, sum, ahead);
          vf by[2], minimum[2];
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) {
            const long at = column + v * 16;
            if constexpr (F.has_halves) {
              by[v] = half_floats(step + (group * 32 + at) * 2);
            } else {
              by[v] = half_floats(unit + at * 2) * float_lanes(widen_bytes(step + group * 32 + at));
              if constexpr (F.has_minima)
                minimum[v] =
                    half_floats(unit + 64 + at * 2) * float_lanes(widen_bytes(step + (GROUPS + group) * 32 + at));
            }
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const RowGroup& own = rows.groups[r * 2 + group * F.group / 32];
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
              float* at = sums + r * 16 + v * 256;
              vf total = KEEP ? kept[r][v] : load(at);
              total = fused(float_lanes(sum[r][v]) * set1(own.scale), by[v], total);
              if constexpr (F.has_minima) total = fused(minimum[v], set1(own.negated_sum), total);
              if (KEEP)
                kept[r][v] = total;
              else
                store(at, total);
            }
          }
        }
        rows.bytes += rows.step_bytes, rows.groups += rows.step_groups;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; KEEP && r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) store(sums + r * 16 + v * 256, kept[r][v]);
  }
};

using MultiplyBlocks = decltype(&Blocks<BlockType::Q8_0>::multiply<1>);

template <BlockType TYPE>
MultiplyBlocks blocks_of_rows(int rows) {
  constexpr int MOST = BLOCK_ROWS[0];
  switch (rows) {
    case 1: return Blocks<TYPE>::template multiply<1>;
    case 2: return Blocks<TYPE>::template multiply<2>;
    case 3: return Blocks<TYPE>::template multiply<3>;
    case 4: return Blocks<TYPE>::template multiply<4>;
    case 6: return Blocks<TYPE>::template multiply<(MOST < 6 ? MOST : 6)>;
    default: return Blocks<TYPE>::template multiply<MOST>;
  }
}

MultiplyBlocks product_of_blocks(BlockType type, int rows) {
  switch (type) {
    case BlockType::Q4_0: return blocks_of_rows<BlockType::Q4_0>(rows);
    case BlockType::Q4_K: return blocks_of_rows<BlockType::Q4_K>(rows);
    case BlockType::Q5_K: return blocks_of_rows<BlockType::Q5_K>(rows);
    case BlockType::Q6_K: return blocks_of_rows<BlockType::Q6_K>(rows);
    default: return blocks_of_rows<BlockType::Q8_0>(rows);
  }
}

// The most rows that are multiplied together, of those that are left of a tile's 16.
int block_rows(long left) {
  for (const int rows : BLOCK_ROWS)
    if (rows <= left) return rows;
  return 1;
}

constexpr int PASSES_OF_BLOCKS = 16 / W;  // a vector of each half of a panel in each

// A group × some steps of a panel in blocks, which lie at `b`.
void multiply_blocks(const Call& c, long group, const char* b, long panel, long k, long steps, float* sums,
                     PrefetchStream one, PrefetchStream two) {
  const Layer& layer = c.layer;
  const BlockType type = layer.panel_blocks[panel].format->type;
  const long rows = c.rows_in(group);
  long parts = 0;
  for (long row = 0; row < rows; ++parts) row += block_rows(std::min(rows, row / 16 * 16 + 16) - row);
  one.lines = ceil_div(one.lines, parts * PASSES_OF_BLOCKS), two.lines = ceil_div(two.lines, parts * PASSES_OF_BLOCKS);
  for (long pass = 0; pass < PASSES_OF_BLOCKS; ++pass)
    for (long row = 0; row < rows;) {
      const int count = block_rows(std::min(rows, row / 16 * 16 + 16) - row);
      const BlockRows some{c.tiles(group, k) + row * 64, c.step_bytes(group),
                           c.row_groups + (group * SIDE * layer.steps + k * rows + row) * 2, rows * 2};
      product_of_blocks(type, count)(some, b, pass * W, steps, place(sums, row, 0) + pass * W, k == 0, {one, two});
      row += count;
      one.next += steps * one.lines * 64, two.next += steps * two.lines * 64;
    }
}

}  // namespace
}  // namespace linear
