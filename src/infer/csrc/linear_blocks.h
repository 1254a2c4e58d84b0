// Products of rows and weights in blocks (blocks.h) on vectors, for linear layers. linear_vectors.h includes it.
//
// The lanes of a vector are columns, as in all products here. The codes of some lines are multiplied by a row's
// numbers and summed in whole numbers until the multiple of the weights changes, 32 or 16 inputs later.
//
//   VNNI   four products in one instruction, into sums that begin at minus the offset times the row's sum; products
//          with signs on both sides (NEON) take codes of 8 bits without their offset
//   else   products in pairs of 16 bits: of 4 bits 8 lines fit (8 · 2 · 15 · 127 < 2¹⁵), of 5 bits 4, of 6 bits 2;
//          of 8 bits, without the offset, magnitudes times numbers that take over their signs
//
// A new type of blocks is a row of BLOCK_FORMATS and a reader of its file's blocks (file_readers.h).
#pragma once

#include <iterator>

#include "block_products.h"
#include "linear_finish.h"
#include "linear_pack.h"

namespace linear {
namespace {

constexpr int PANEL_PAIRS = 16 / W;  // pairs of vectors, one of each half of a panel

// KEPT_ROWS: whose float sums stay in registers. WHOLE_ROWS: that take a panel in one pass, so that it is read as it
// lies in memory.
#if VECTOR_WIDTH == 16
constexpr int BLOCK_ROWS[] = {8, 6, 4, 3, 2, 1}, KEPT_ROWS = 4, WHOLE_ROWS = 2;
#elif defined(FEW_FORMS)
constexpr int BLOCK_ROWS[] = {4, 1}, KEPT_ROWS = 1, WHOLE_ROWS = 0;
#else
constexpr int BLOCK_ROWS[] = {4, 3, 2, 1}, KEPT_ROWS = 1, WHOLE_ROWS = 2;
#endif

constexpr int pairs_of_pass(int rows) { return rows <= WHOLE_ROWS ? PANEL_PAIRS : 1; }

// The numbers of some rows times a layer in blocks. Each 32 are quantised by themselves.
template <bool NORM>
void pack_some_block_rows(const Call& c, long first) {
  const Layer& layer = c.layer;
  const long group = first / SIDE, rows = std::clamp(c.M - first, 0L, PACK_ROWS), in_group = c.rows_in(group);
  for (long r = 0; r < rows; ++r) {
    const long row = first + r, place = row % SIDE;
    const uint16_t* x = c.x + row * c.x_stride;
    const float factor = NORM ? row_factor<NORM>(c, row) : 1.f;
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

// UNPACKED: the weight's steps are as `unpack` leaves them.
template <BlockType TYPE, bool UNPACKED = false>
struct Blocks {
  static constexpr BlockFormat F = *block_format(TYPE);
  static constexpr int GROUPS = 64 / F.group, LINES = F.group / 4, BITS = F.number_bits();
  static constexpr long UNPACKED_BYTES = 2 * TILE + GROUPS * (F.has_minima ? 2 : 1) * SIDE * 4;  // of a step
  static constexpr long UNIT_STEPS = UNPACKED ? 1 : F.unit_steps(), HEAD_BYTES = UNPACKED ? 0 : F.head_bytes();
  static constexpr long STEP_BYTES = UNPACKED ? UNPACKED_BYTES : F.step_bytes();
  // Where the codes of columns from `at` on are in a step. Unpacked ones lie as they are read: 16 lines of a vector.
  static constexpr long codes_at(long at) { return UNPACKED ? at * 2 * 16 * 4 : F.multiple_bytes() + at * 4; }
  static_assert(UNPACKED_BYTES <= MOST_UNPACKED);
#ifdef HAS_SIGNED_PRODUCTS
  static constexpr bool HAS_SIGNS = BITS == 8;  // codes are multiplied without their offset
#else
  static constexpr bool HAS_SIGNS = false;
#endif
  static constexpr bool HAS_OFFSET = F.offset_bits >= 0 && !HAS_SIGNS;
#ifndef HAS_BYTE_PRODUCTS
  static constexpr int WORD_LINES = BITS == 8 ? 1 : std::min(1 << (7 - BITS), LINES);  // whose sums fit 16 bits
#endif

  // The codes of line `line` of a step, one vector of each half of the columns.
  static INLINE void codes_of(const char* codes, int line, vb (&to)[2]) {
    if constexpr (UNPACKED) {
      to[0] = load_bytes(codes + line * 4 * W), to[1] = load_bytes(codes + (line + 16) * 4 * W);
      return;
    } else if constexpr (F.bits == 8) {
      to[0] = load_bytes(codes + line * 64), to[1] = load_bytes(codes + TILE + line * 64);
    } else if constexpr (F.low_bits() == 4) {
      const vb both = load_bytes(codes + line * 64);
      to[0] = low_nibbles(both), to[1] = high_nibbles(both);
    } else {
      const vb both = load_bytes(codes + line / 2 * 64);
      for (int half = 0; half < 2; ++half) to[half] = words_right(both, line % 2 * 4 + half * 2) & all_bytes(3);
    }
    constexpr int LOW = F.low_bits();
    const char* high = codes + F.code_bytes();
    const int bit = line % 4 * 2, sixteen = line / 4;
    if constexpr (F.bits - LOW == 1) {
      const vb bits = load_bytes(high + sixteen * 64);
      for (int half = 0; half < 2; ++half) to[half] = to[half] | (moved(bits, LOW - half - bit) & all_bytes(1 << LOW));
    }
    if constexpr (F.bits - LOW == 2)
      for (int half = 0; half < 2; ++half) {
        const vb bits = load_bytes(high + (sixteen * 2 + half) * 64);
        to[half] = to[half] | (moved(bits, LOW - bit) & all_bytes(3 << LOW));
      }
    if constexpr (F.table != Table::NONE)
      for (int half = 0; half < 2; ++half) to[half] = looked_up(TABLES[(int)F.table], to[half]);
  }
  // a and b of W columns from `at` on, for a group of inputs. `i`: the step's index in its unit.
  static INLINE void factors_of(const char* unit, const char* step, int i, int group, long at, vf& a, vf& b) {
    const char *of_group = step + group * SIDE + at, *of_minima = of_group + GROUPS * SIDE;
    if constexpr (UNPACKED) {
      const float* from = (const float*)(step + 2 * TILE) + group * SIDE + at;
      a = load(from);
      if constexpr (F.has_minima) b = load(from + GROUPS * SIDE);
    } else if constexpr (F.multiples == Multiples::HALVES) {
      a = half_floats(step + (group * SIDE + at) * 2);
      if constexpr (F.has_minima) b = half_floats(step + ((GROUPS + group) * SIDE + at) * 2);
    } else if constexpr (F.multiples == Multiples::EXPONENTS) {
      a = powers_of_2(widen_bytes(of_group));
    } else if constexpr (F.has_zeros()) {
      const long own = (i * 2 + group) * 32 / F.file_inputs * SIDE + at;
      a = half_floats(unit + own * 2);
      b = a * float_lanes(widen_bytes(unit + F.unit_blocks() * SIDE * 2 + own));
    } else if constexpr (F.multiples == Multiples::NIBBLES) {
      const vb both = widen_bytes(of_group);
      a = half_floats(unit + at * 2) * float_lanes(both & lanes_of(15));
      b = half_floats(unit + 64 + at * 2) * float_lanes(words_right(both, 4) & lanes_of(15));
    } else {
      a = half_floats(unit + at * 2) * float_lanes(widen_bytes(of_group));
      if constexpr (F.has_minima) b = half_floats(unit + 64 + at * 2) * float_lanes(widen_bytes(of_minima));
    }
  }
  // 2 to whole numbers of a byte, in two factors, since some are beyond what a normal float holds.
  static INLINE vf powers_of_2(vb exponents) {
    const vb half = halved_lanes(exponents), other = subtract_lanes(exponents, half), one = lanes_of(127);
    return (vf)lanes_left(add_lanes(half, one), 23) * (vf)lanes_left(add_lanes(other, one), 23);
  }
  static INLINE vb moved(vb bits, int by) { return by > 0 ? words_left(bits, by) : words_right(bits, -by); }

  // What all sums of a row begin with, for a group of inputs.
  static INLINE vb start(const RowGroup* row, int group) {
    const RowGroup& own = row[group * F.group / 32];
    if constexpr (F.group == 16) return times_offset(lanes_of(own.negated[group % 2]));
    return times_offset(lanes_of(own.negated[0] + own.negated[1]));
  }
  // Minus the sum of what a row has in a group of inputs.
  static INLINE float negated_sum(const RowGroup& row, int group) {
    return F.group == 16 ? row.scale * (float)row.negated[group % 2] : row.negated_sum;
  }
  static INLINE vb times_offset(vb lanes) { return lanes_left(lanes, F.offset_bits); }

  // The products of a group's lines and R rows' numbers in whole numbers.
#ifdef HAS_BYTE_PRODUCTS
  template <int R>
  static INLINE void add_up(const char* codes, const char* a, const RowGroup* rows, int group, vb (&sum)[R][2],
                            Ahead& ahead) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = HAS_OFFSET ? start(rows + r * 2, group) : no_bytes();
#pragma GCC unroll 8
    for (int i = 0; i < LINES; ++i) {
      const int line = group * LINES + i;
      if (i % 4 == 0) ahead.quarter();
      vb some[2];
      codes_of(codes, line, some);
      for (int v = 0; HAS_SIGNS && v < 2; ++v) some[v] = some[v] ^ all_bytes((char)0x80);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vb x = four_bytes(a + r * 64 + line * 4);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) add_products(sum[r][v], some[v], x);
      }
    }
  }
#else
  template <int R>
  static INLINE void add_up(const char* codes, const char* a, const RowGroup* rows, int group, vb (&sum)[R][2],
                            Ahead& ahead) {
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i += WORD_LINES) {
      const int line = group * LINES + i;
      if constexpr (WORD_LINES <= 2)
        add_few_lines<R>(codes, a, line, sum, ahead, i == 0);
      else
        add_words_of_lines<R>(codes, a, line, sum, ahead, i == 0);
    }
    if constexpr (HAS_OFFSET && BITS < 8) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vb more = start(rows + r * 2, group);
        for (int v = 0; v < 2; ++v) sum[r][v] = add_lanes(sum[r][v], more);
      }
    }
  }

  // WORD_LINES lines at once: sums of 16 bits live for two instructions only.
  template <int R>
  static INLINE void add_few_lines(const char* codes, const char* a, int line, vb (&sum)[R][2], Ahead& ahead,
                                   bool first) {
    const vb ones = word_ones();
    vb some[WORD_LINES][2], most[WORD_LINES][2];
#pragma GCC unroll 2
    for (int j = 0; j < WORD_LINES; ++j) {
      if ((line + j) % 4 == 0) ahead.quarter();
      codes_of(codes, line + j, some[j]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        if constexpr (BITS == 8) some[j][v] = some[j][v] ^ all_bytes((char)0x80);
        most[j][v] = BITS == 8 ? magnitudes_of(some[j][v]) : some[j][v];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        vb words{};
#pragma GCC unroll 2
        for (int j = 0; j < WORD_LINES; ++j) {
          const vb x = four_bytes(a + r * 64 + (line + j) * 4);
          const vb pairs = pairs_of_bytes(most[j][v], BITS == 8 ? with_signs(x, some[j][v]) : x);
          words = j ? add_words(words, pairs) : pairs;
        }
        const vb four = pair_products(words, ones);
        sum[r][v] = first ? four : add_lanes(sum[r][v], four);
        IN_ORDER(sum[r][v]);
      }
  }

  // WORD_LINES lines, one after the other, with sums of 16 bits of all rows.
  template <int R>
  static INLINE void add_words_of_lines(const char* codes, const char* a, int line, vb (&sum)[R][2], Ahead& ahead,
                                        bool first) {
    vb words[R][2];
#pragma GCC unroll 8
    for (int j = 0; j < WORD_LINES; ++j) {
      if ((line + j) % 4 == 0) ahead.quarter();
      vb some[2];
      codes_of(codes, line + j, some);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vb x = four_bytes(a + r * 64 + (line + j) * 4);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const vb pairs = pairs_of_bytes(some[v], x);
          words[r][v] = j ? add_words(words[r][v], pairs) : pairs;
          IN_ORDER(words[r][v]);
        }
      }
    }
    const vb ones = word_ones();
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const vb four = pair_products(words[r][v], ones);
        sum[r][v] = first ? four : add_lanes(sum[r][v], four);
      }
  }
#endif

  // Some steps, which begin with a unit, as bytes of codes in two tiles, and a and b of each group as floats.
  static void unpack(const char* from, long steps, char* to) {
    for (; steps > 0; steps -= UNIT_STEPS) {
      const char *unit = from, *step = from + HEAD_BYTES;
      from += HEAD_BYTES + UNIT_STEPS * STEP_BYTES;
      for (int i = 0; i < UNIT_STEPS; ++i, step += STEP_BYTES, to += UNPACKED_BYTES)
        for (long column = 0; column < 16; column += W) {
          float* factors = (float*)(to + 2 * TILE) + column;
#pragma GCC unroll 16
          for (int line = 0; line < 16; ++line) {
            vb some[2];
            codes_of(step + codes_at(column), line, some);
            for (int v = 0; v < 2; ++v) store_bytes(to + column * 128 + (v * 16 + line) * 4 * W, some[v]);
          }
          for (int group = 0; group < GROUPS; ++group)
            for (int v = 0; v < 2; ++v) {
              vf a, b;
              factors_of(unit, step, i, group, column + v * 16, a, b);
              store(factors + group * SIDE + v * 16, a);
              if constexpr (F.has_minima) store(factors + (GROUPS + group) * SIDE + v * 16, b);
            }
        }
    }
  }

  // sums (= or +=) R rows × P pairs of vectors over some steps, which begin with a unit. `sums`: of the first pair.
  template <int R, int P>
  static void multiply(BlockRows rows, const char* b, long column, long steps, float* sums, bool first, Ahead ahead) {
    constexpr bool KEEP = R <= KEPT_ROWS;
    const auto place = [&](int r, int p, int v) { return sums + r * 16 + p * W + v * 256; };
    vf kept[R][P][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          kept[r][p][v] = first ? set1(0.f) : load(place(r, p, v));
          if (!KEEP && first) store(place(r, p, v), kept[r][p][v]);
        }
    Ahead nothing{{b, 0}, {b, 0}};
    for (; steps > 0; steps -= UNIT_STEPS) {
      const char *unit = b, *step = b + HEAD_BYTES;
      b += HEAD_BYTES + UNIT_STEPS * STEP_BYTES;
      for (int i = 0; i < UNIT_STEPS; ++i, step += STEP_BYTES) {
#pragma GCC unroll 4
        for (int group = 0; group < GROUPS; ++group)
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) {
            const long at = column + p * W;
            vb sum[R][2];
            add_up<R>(step + codes_at(at), rows.bytes, rows.groups, group, sum, p ? nothing : ahead);
            vf by[2], minimum[2];
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) factors_of(unit, step, i, group, at + v * 16, by[v], minimum[v]);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              const RowGroup& own = rows.groups[r * 2 + group * F.group / 32];
#pragma GCC unroll 2
              for (int v = 0; v < 2; ++v) {
                vf total = KEEP ? kept[r][p][v] : load(place(r, p, v));
                total = fused(float_lanes(sum[r][v]) * set1(own.scale), by[v], total);
                if constexpr (F.has_minima) total = fused(minimum[v], set1(negated_sum(own, group)), total);
                if (KEEP)
                  kept[r][p][v] = total;
                else
                  store(place(r, p, v), total);
              }
            }
          }
        rows.bytes += rows.step_bytes, rows.groups += rows.step_groups;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; KEEP && r < R; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) store(place(r, p, v), kept[r][p][v]);
  }
};

// The first format whose products of what is unpacked are those of the format `index`.
constexpr int unpacked_as(int index) {
  int first = 0;
  while (!BLOCK_FORMATS[first].multiplies_as(BLOCK_FORMATS[index])) ++first;
  return first;
}

using EveryFormat = std::make_index_sequence<NUM_BLOCK_FORMATS>;

#ifndef BLOCK_PRODUCTS  // Else they are those that it names, of another set.
template <class Own, size_t... INDEX>
MultiplyBlocks product_of_rows(int rows, std::index_sequence<INDEX...>) {
  MultiplyBlocks found = nullptr;
  ((rows == BLOCK_ROWS[INDEX]
        ? void(found = Own::template multiply<BLOCK_ROWS[INDEX], pairs_of_pass(BLOCK_ROWS[INDEX])>)
        : void()),
   ...);
  return found;
}
template <BlockType TYPE, bool UNPACKED>
MultiplyBlocks blocks_of_rows(int rows) {
  return product_of_rows<Blocks<TYPE, UNPACKED>>(rows, std::make_index_sequence<std::size(BLOCK_ROWS)>{});
}

template <bool UNPACKED, size_t... INDEX>
MultiplyBlocks product_of_blocks(BlockType type, int rows, std::index_sequence<INDEX...>) {
  constexpr decltype(&blocks_of_rows<BlockType::Q8_0, UNPACKED>) PRODUCTS[] = {
      blocks_of_rows<BLOCK_FORMATS[UNPACKED ? unpacked_as(INDEX) : INDEX].type, UNPACKED>...};
  return PRODUCTS[block_index(type)](rows);
}

template <size_t... INDEX>
void unpack_steps(BlockType type, const char* from, long steps, char* to, std::index_sequence<INDEX...>) {
  constexpr decltype(&Blocks<BlockType::Q8_0>::unpack) UNPACKERS[] = {Blocks<BLOCK_FORMATS[INDEX].type>::unpack...};
  UNPACKERS[block_index(type)](from, steps, to);
}

MultiplyBlocks own_product(BlockType type, int rows, bool unpacked) {
  return unpacked ? product_of_blocks<true>(type, rows, EveryFormat{})
                  : product_of_blocks<false>(type, rows, EveryFormat{});
}
void unpack_own(BlockType type, const char* from, long steps, char* to) {
  unpack_steps(type, from, steps, to, EveryFormat{});
}
constexpr BlockProducts OWN_PRODUCTS{own_product, unpack_own};
#define BLOCK_PRODUCTS OWN_PRODUCTS
#endif

// Whether a panel is unpacked before its rows are multiplied, which pays if they are many. Bytes are as they were.
bool is_unpacked(const Call& c, long panel) {
  return c.M > 2 * BLOCK_ROWS[0] && c.layer.panel_blocks && c.layer.panel_blocks[panel].format->bits < 8;
}

// Some steps of a panel in blocks, unpacked; returns `to`.
const char* unpack_blocks(const Layer& layer, long panel, long first, long steps, char* to) {
  BLOCK_PRODUCTS.unpack(layer.panel_blocks[panel].format->type, layer.tiles(panel, first), steps, to);
  return to;
}

#ifdef HAS_BLOCK_TILES  // linear_block_tiles.h
int rows_on_tiles(const Call& c, const BlockFormat& format, long left);
void multiply_on_tiles(BlockType type, BlockRows rows, int count, const char* b, long steps, float* sums, bool first,
                       Ahead ahead);
#else
int rows_on_tiles(const Call&, const BlockFormat&, long) { return 0; }
void multiply_on_tiles(BlockType, BlockRows, int, const char*, long, float*, bool, Ahead) {}
#endif

// The most rows that are multiplied together, of those of a group that are left from `row` on. More than BLOCK_ROWS
// has are for tiles.
int block_rows(const Call& c, const BlockFormat& format, long row, long left) {
  if (const int rows = rows_on_tiles(c, format, left)) return rows;
  left = std::min(left, 16 - row % 16);
  for (const int rows : BLOCK_ROWS)
    if (rows <= left) return rows;
  return 1;
}

// A group × some steps of a panel in blocks, which lie at `b`, unpacked or not.
void multiply_blocks(const Call& c, long group, const char* b, long panel, long k, long steps, float* sums,
                     PrefetchStream one, PrefetchStream two) {
  const Layer& layer = c.layer;
  const BlockFormat& format = *layer.panel_blocks[panel].format;
  const BlockType type = format.type;
  const bool unpacked = is_unpacked(c, panel);
  const long rows = c.rows_in(group);
  const auto count_from = [&](long row) { return block_rows(c, format, row, rows - row); };
  long parts = 0;
  for (long row = 0; row < rows; row += count_from(row)) parts += PANEL_PAIRS / pairs_of_pass(count_from(row));
  one.lines = ceil_div(one.lines, parts), two.lines = ceil_div(two.lines, parts);
  for (long pair = 0; pair < PANEL_PAIRS; ++pair)
    for (long row = 0; row < rows; row += count_from(row)) {
      const int count = count_from(row);
      if (pair && pairs_of_pass(count) > 1) continue;
      const BlockRows some{c.tiles(group, k) + row * 64, c.step_bytes(group),
                           c.row_groups + (group * SIDE * layer.steps + k * rows + row) * 2, rows * 2};
      if (count > BLOCK_ROWS[0])
        multiply_on_tiles(type, some, count, b, steps, place(sums, row, 0), k == 0, {one, two});
      else
        BLOCK_PRODUCTS.product(type, count, unpacked)(some, b, pair * W, steps, place(sums, row, 0) + pair * W, k == 0,
                                                      {one, two});
      one.next += steps * one.lines * 64, two.next += steps * two.lines * 64;
    }
}

}  // namespace
}  // namespace linear
