// Products of linear layers on vectors: some rows × 2 or 4 vectors of columns, whose sums stay in registers over
// some steps of K. An isa/*.cpp includes it.
//
// A line of a tile is 16 columns × 4 bytes of inputs. For each line 4 bytes' worth of a row's inputs are spread
// over a vector and multiplied by it:
//
//   bfloat16   as pairs (BF16); else both numbers of a lane are widened and multiplied in float32, one by one
//   int8       four products in one instruction (VNNI; NEON's take bytes with signs on both sides), or eight for each of
//              2 rows and 2 columns (i8mm); else as numbers of 16 bits, in pairs, whose sums of 32
//              bits are exact. Few rows of AVX2 and AVX-512 are multiplied as bytes: without signs, which move to the
//              row's numbers, so two products fit 16 bits (2 · 128 · 127 < 2¹⁵), as 255 · 127 would not.
//
// All ways of int8 have the same sums.
#pragma once

#include "block_products.h"
#include "linear_finish.h"
#include "linear_pack.h"

namespace linear {
namespace {

constexpr int WHOLE_PANEL = SIDE / W;       // vectors
constexpr int SOME = W < 8 ? 4 : 2;         // vectors of a pass: 16 columns or 32
constexpr int PASSES = WHOLE_PANEL / SOME;  // over a panel, of rows that are not few

INLINE float* place(float* sums, long row, int half) {  // as tiles leave them
  return sums + (row >> 4) * 512 + half * 256 + (row & 15) * 16;
}
// Vector v of a pass: its bytes in a line, and its sums in a row.
constexpr long line_place(int v) { return v * W / 16 * TILE + v * W % 16 * 4; }
INLINE float* sum_place(float* sums, long row, int v) { return place(sums, row, v * W / 16) + v * W % 16; }

template <int C>  // whether C vectors of columns have more than a line of the cache for 4 bytes' worth of inputs
constexpr bool TWO_LINES = C > 16 / W;
template <int R>  // One or two rows wait for memory alone, and ask it into the L1 cache.
INLINE void ask(const char* line) {
  __builtin_prefetch(line, 0, R > 2 ? 2 : 3);
}

}  // namespace
}  // namespace linear

#include "linear_blocks.h"

namespace linear {
namespace {

template <int R, int C, bool FIRST>
INLINE void begin(vb (&sum)[R][C], float* sums, long row, const int32_t* start) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < C; ++v)
      sum[r][v] = !FIRST  ? load_bytes(sum_place(sums, row + r, v))
                  : start ? load_bytes(start + v * W / 16 * 16 + v * W % 16)
                          : no_bytes();
}
template <int R, int C>
INLINE void end(const vb (&sum)[R][C], float* sums, long row) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < C; ++v) store_bytes(sum_place(sums, row + r, v), sum[r][v]);
}

// Each `Product`: sums (= start or +=) R rows × C vectors over some steps; meanwhile prefetches two streams,
// evenly: bursts cost a sixth at 8 rows. `a`: the first row's bytes of the first step; the next step's lie
// `a_step` behind.

#ifdef HAS_BYTE_PRODUCTS
template <bool WHOLE>
INLINE vb add_line(vb sum, vb x, vb line) {
  if constexpr (WHOLE) return dot_bytes(sum, x, line);
#ifdef HAS_BFLOAT16
  else
    return (vb)dot_pairs((vf)sum, x, line);
#else
  else
    return sum;
#endif
}

// A line's products and their sums by one instruction: int8, or bfloat16 in pairs.
template <bool WHOLE>
struct Direct {
  template <int R, int C, bool FIRST>
  static void multiply(const char* a, long a_step, const char* b, long steps, float* sums, long row,
                       const int32_t* start, PrefetchStream one, PrefetchStream two) {
    vb sum[R][C];
    begin<R, C, FIRST>(sum, sums, row, start);
    for (long step = 0; step < steps; ++step, a += a_step, b += 2 * TILE) {
      if (!FIRST && step < R)  // the next group's sums
        for (int half = 0; half < 2; ++half) __builtin_prefetch(place(sums, row + step, half) + SUMS, 0, 3);
#pragma GCC unroll 2
      for (long i = 0; i < 64; i += 4, one.next += one.lines * 4, two.next += two.lines * 4) {
        ask<R>(one.next);
        ask<R>(two.next);
        vb line[C];
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) line[v] = load_bytes(b + line_place(v) + i * 16);
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          const vb x = four_bytes(a + r * 64 + i);
#pragma GCC unroll 4
          for (int v = 0; v < C; ++v) sum[r][v] = add_line<WHOLE>(sum[r][v], x, line[v]);
        }
      }
    }
    end<R, C>(sum, sums, row);
  }
};
#endif

#ifdef HAS_MATRIX_PRODUCTS
// int8 by products of matrices: 2 rows × 2 columns, of 8 inputs.
struct Matrices {
  template <int R, int C, bool FIRST>
  static void multiply(const char* a, long a_step, const char* b, long steps, float* sums, long row,
                       const int32_t* start, PrefetchStream one, PrefetchStream two) {
    if constexpr (R == 1) return Direct<true>::multiply<1, C, FIRST>(a, a_step, b, steps, sums, row, start, one, two);
    constexpr int PAIRS = (R + 1) / 2;
    vf sum[PAIRS][C][2];  // two columns each
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) {
        const vf first = FIRST ? set1(0.f) : load(sum_place(sums, row + 2 * p, v));
        const vf second = FIRST || 2 * p + 1 == R ? set1(0.f) : load(sum_place(sums, row + 2 * p + 1, v));
        sum[p][v][0] = low_pairs(first, second), sum[p][v][1] = high_pairs(first, second);
      }
    for (long step = 0; step < steps; ++step, a += a_step, b += 2 * TILE)
      for (long i = 0; i < 64; i += 8, one.next += one.lines * 8, two.next += two.lines * 8) {
        ask<R>(one.next);
        ask<R>(two.next);
        vb x[PAIRS];
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; ++p)
          x[p] = two_rows(a + 2 * p * 64 + i, a + (2 * p + 1 == R ? 2 * p : 2 * p + 1) * 64 + i);
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) {
          const vf line = bits(b + line_place(v) + i * 16), next = bits(b + line_place(v) + (i + 4) * 16);
          const vb low = (vb)low_words(line, next), high = (vb)high_words(line, next);
#pragma GCC unroll 4
          for (int p = 0; p < PAIRS; ++p) {
            sum[p][v][0] = (vf)matrix_products((vb)sum[p][v][0], x[p], low);
            sum[p][v][1] = (vf)matrix_products((vb)sum[p][v][1], x[p], high);
          }
        }
      }
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) {
        store(sum_place(sums, row + 2 * p, v), low_pairs(sum[p][v][0], sum[p][v][1]));
        if (2 * p + 1 < R) store(sum_place(sums, row + 2 * p + 1, v), high_pairs(sum[p][v][0], sum[p][v][1]));
      }
  }
};
#endif

// bfloat16 by float32's arithmetic; rows are FLOATS.
struct Widened {
  template <int R, int C, bool FIRST>
  static void multiply(const char* a, long a_step, const char* b, long steps, float* sums, long row, const int32_t*,
                       PrefetchStream one, PrefetchStream two) {
    vf sum[R][C];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) sum[r][v] = FIRST ? set1(0.f) : load(sum_place(sums, row + r, v));
    for (long step = 0; step < steps; ++step, a += a_step, b += 2 * TILE) {
#pragma GCC unroll 2
      for (long i = 0; i < 64; i += 4, one.next += one.lines * 4, two.next += two.lines * 4) {
        ask<R>(one.next);
        if (TWO_LINES<C>) ask<R>(two.next);
        vf some[C];
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) some[v] = lower_half(bits(b + line_place(v) + i * 16));
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          const vf x = word(a + r * 128 + i);
#pragma GCC unroll 4
          for (int v = 0; v < C; ++v) sum[r][v] = fma(x, some[v], sum[r][v]);
        }
        FENCE();  // read again: 16 registers hold no more than the sums and what is multiplied
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) some[v] = upper_half(bits(b + line_place(v) + i * 16));
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          const vf x = word(a + r * 128 + 64 + i);
#pragma GCC unroll 4
          for (int v = 0; v < C; ++v) sum[r][v] = fma(x, some[v], sum[r][v]);
        }
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) store(sum_place(sums, row + r, v), sum[r][v]);
  }
};

#ifndef HAS_BYTE_PRODUCTS
// int8 as numbers of 16 bits; rows are WORDS.
struct Words {
  template <int R, int C, bool FIRST>
  static void multiply(const char* a, long a_step, const char* b, long steps, float* sums, long row, const int32_t*,
                       PrefetchStream one, PrefetchStream two) {
    vb sum[R][C];
    begin<R, C, FIRST>(sum, sums, row, nullptr);
    for (long step = 0; step < steps; ++step, a += a_step, b += 2 * TILE) {
#pragma GCC unroll 2
      for (long i = 0; i < 64; i += 4, one.next += one.lines * 4, two.next += two.lines * 4) {
        ask<R>(one.next);
        if (TWO_LINES<C>) ask<R>(two.next);
        vb words[C];
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) words[v] = even_words(load_bytes(b + line_place(v) + i * 16));
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          const vb x = four_bytes(a + r * 128 + i);
#pragma GCC unroll 4
          for (int v = 0; v < C; ++v) add_pair_products(sum[r][v], x, words[v]);
        }
        FENCE();  // read again, as in Widened
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) words[v] = odd_words(load_bytes(b + line_place(v) + i * 16));
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          const vb x = four_bytes(a + r * 128 + 64 + i);
#pragma GCC unroll 4
          for (int v = 0; v < C; ++v) add_pair_products(sum[r][v], x, words[v]);
        }
      }
    }
    end<R, C>(sum, sums, row);
  }
};

#if VECTOR_WIDTH > 4
// int8 as bytes without signs; rows are BYTES.
struct Magnitudes {
  template <int R, int C, bool FIRST>
  static void multiply(const char* a, long a_step, const char* b, long steps, float* sums, long row, const int32_t*,
                       PrefetchStream one, PrefetchStream two) {
    vb sum[R][C];
    begin<R, C, FIRST>(sum, sums, row, nullptr);
    const vb ones = word_ones();
    for (long step = 0; step < steps; ++step, a += a_step, b += 2 * TILE) {
#pragma GCC unroll 2
      for (long i = 0; i < 64; i += 4, one.next += one.lines * 4, two.next += two.lines * 4) {
        ask<R>(one.next);
        ask<R>(two.next);
        vb x[R];
#pragma GCC unroll 3
        for (int r = 0; r < R; ++r) x[r] = four_bytes(a + r * 64 + i);
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) {
          const vb line = load_bytes(b + line_place(v) + i * 16), most = magnitudes_of(line);
#pragma GCC unroll 3
          for (int r = 0; r < R; ++r)
            sum[r][v] = add_lanes(sum[r][v], pair_products(pairs_of_bytes(most, with_signs(x[r], line)), ones));
        }
      }
    }
    end<R, C>(sum, sums, row);
  }
};
#endif
#endif

using Multiply = decltype(&Widened::multiply<1, SOME, false>);

// The product for some number of rows; `few`: of a whole panel.
#define FOR_SO_MANY(rows, CALL) \
  switch (rows) {               \
    case 1: CALL(1);            \
    case 2: CALL(2);            \
    case 3: CALL(3);            \
    case 4: CALL(4);            \
    case 5: CALL(5);            \
    case 6: CALL(6);            \
    case 7: CALL(7);            \
    case 8: CALL(8);            \
    case 9: CALL(9);            \
    case 10: CALL(10);          \
    case 11: CALL(11);          \
    case 12: CALL(12);          \
    case 13: CALL(13);          \
    default: CALL(14);          \
  }
static_assert(FEW_VECTOR_ROWS <= 2, "of_few_rows knows no more");
constexpr int limited(int rows) { return rows < VECTOR_ROWS ? rows : VECTOR_ROWS; }

template <class Product, bool FIRST>
Multiply of_rows(long rows) {
#define CALL(R) return Product::template multiply<limited(R), SOME, FIRST>
  FOR_SO_MANY(rows, CALL)
#undef CALL
}
#undef FOR_SO_MANY

template <class Product, bool FIRST>
[[maybe_unused]] Multiply of_few_rows(long rows) {
  return rows == 1 ? Product::template multiply<1, WHOLE_PANEL, FIRST>
                   : Product::template multiply<2, WHOLE_PANEL, FIRST>;
}
bool is_few(long rows) { return FEW_VECTOR_ROWS && rows <= FEW_VECTOR_ROWS; }

template <bool FIRST>
Multiply product_for(const Layer& layer, bool few, long rows) {
  (void)few;
#if defined(HAS_MATRIX_PRODUCTS)
  using Whole = Matrices;
#elif defined(HAS_BYTE_PRODUCTS)
  using Whole = Direct<true>;
#else
  using Whole = Words;
#if VECTOR_WIDTH > 4
  if (layer.whole() && few) return of_few_rows<Magnitudes, FIRST>(rows);
#endif
#endif
#ifdef HAS_BFLOAT16
  using Floats = Direct<false>;
#else
  using Floats = Widened;
#endif
#if VECTOR_WIDTH == 8
  if (few) return layer.whole() ? of_few_rows<Whole, FIRST>(rows) : of_few_rows<Floats, FIRST>(rows);
#endif
  return layer.whole() ? of_rows<Whole, FIRST>(rows) : of_rows<Floats, FIRST>(rows);
}

RowFormat row_format(const Layer& layer, long M) {
  (void)M;
#if defined(HAS_SIGNED_PRODUCTS)
  if (layer.panel_blocks || layer.whole()) return RowFormat::BYTES;
#elif defined(HAS_BYTE_PRODUCTS)
  if (layer.panel_blocks) return RowFormat::BYTES;
  if (layer.whole()) return RowFormat::UNSIGNED_BYTES;
#else
  if (layer.panel_blocks || (layer.whole() && is_few(M))) return RowFormat::BYTES;
  if (layer.whole()) return RowFormat::WORDS;
#endif
#ifdef HAS_BFLOAT16
  return RowFormat::PAIRS;
#else
  return RowFormat::FLOATS;
#endif
}

#if defined(HAS_BYTE_PRODUCTS) && !defined(HAS_SIGNED_PRODUCTS)
constexpr bool HAS_STARTS = true;
#else
constexpr bool HAS_STARTS = false;
#endif

void pack_these_rows(const Call& c, long item) { (c.layer.panel_blocks ? pack_block_rows : pack_rows)(c, item); }

void pack_weight(void* packing);
void compute(void* call);
// Vectors are slower than tiles, so sums come and go less often, and all fits half the L2. Rows that are widened
// take twice the room. With 8 lanes a pass over a slice and its rows fit the L1 cache: at 1,024 rows
// bfloat16 gains 8 %, int8 1 %.
#ifdef HAS_BLOCK_TILES
constexpr long BLOCK_STEPS = SLICE / 2;  // of what is unpacked, so that they stay in the L1 cache
#else
constexpr long BLOCK_STEPS = W == 16 ? 2 * SLICE : W == 8 ? SLICE / 2 : SLICE;
#endif
constexpr Kernels KERNELS{false,       HAS_STARTS, BLOCK_STEPS, ITEM_PANELS / 4, VECTOR_ROWS,
                          pack_weight, compute,    row_format,  fit_row};

// Some steps of a panel as `multiply_panel` wants them; `to`: memory for them.
const char* unpacked_panel(const Call& c, long panel, long k, long steps, char* to) {
  if (is_unpacked(c, panel)) return unpack_blocks(c.layer, panel, k, steps, to);
  return c.layer.tiles(panel, k);
}

// A group × some steps of a panel, which lie at `b`; the streams' lines are for all of the group's rows.
void multiply_panel(const Call& c, long group, const char* b, long panel, long k, long steps, float* sums,
                    PrefetchStream one, PrefetchStream two) {
  const Layer& layer = c.layer;
  if (layer.panel_blocks) return multiply_blocks(c, group, b, panel, k, steps, sums, one, two);
  const long rows = c.rows_in(group), row_bytes = c.row_bytes();
  const bool few = is_few(rows) && c.format != RowFormat::WORDS;
  const long parts = few ? 1 : ceil_div(rows, VECTOR_ROWS), passes = few ? 1 : PASSES;
  const int32_t* start = layer.starts ? layer.starts + panel * SIDE : nullptr;
  one.lines = ceil_div(one.lines, parts * passes), two.lines = ceil_div(two.lines, parts * passes);
  for (long pass = 0; pass < passes; ++pass)
    for (long part = 0; part < parts; ++part) {
      const long row = rows * part / parts, count = rows * (part + 1) / parts - row;
      const char* a = c.tiles(group, k) + row * row_bytes;
      (k ? product_for<false> : product_for<true>)(layer, few, count)(a, c.step_bytes(group), b + pass * TILE, steps,
                                                                      sums + pass * 256, row,
                                                                      start ? start + pass * 16 : nullptr, one, two);
      one.next += steps * one.lines * 64, two.next += steps * two.lines * 64;
    }
}

// One group: a slice of the panel stays in the cache while the rows pass by, some at a time. Rows that all fit
// the registers need no slices, whose ends cost 4 % at one row; the last panel has them so that the prefetch
// turns in time.
void sweep(const Call& c, long begin, long end, const char* following, float* sums, char* unpacked) {
  const Layer& layer = c.layer;
  const bool fits = PASSES == 1 ? c.M <= VECTOR_ROWS : is_few(c.M);
  const char* last = layer.start_of(end);
  for (long panel = begin; panel < end; ++panel) {
    const long slice = fits && panel + 1 < end ? layer.steps : SLICE;
    for (long k = 0; k < layer.steps; k += slice) {
      const long steps = std::min(slice, layer.steps - k);
      const char *b = unpacked_panel(c, panel, k, steps, unpacked), *next = layer.tiles(panel, k) + LEAD_BYTES;
      if (next >= last) next = following + (next - last);
      const long lines = layer.lines(panel);
      // Blocks ask for all lines of a stream, others for every other one.
      multiply_panel(c, 0, b, panel, k, steps, sums, {next, lines}, {next + 64, layer.panel_blocks ? 0 : lines});
    }
    finish(c, sums, 0, 0, panel, panel + 1);
  }
}

#ifndef HAS_BLOCK_TILES
class ProductState {
 public:
#ifdef HAS_BFLOAT16
  explicit ProductState(const Call&) : flush_(false) {}
#else
  explicit ProductState(const Call& c) : flush_(c.layer.bits == 16) {}  // as vdpbf16ps has it
#endif

 private:
  const FlushDenormals flush_;
};
#endif

}  // namespace
}  // namespace linear
