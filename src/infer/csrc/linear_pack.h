// Packing of weights and of rows for linear layers, in vectors of 16 lanes: the same bytes with every
// instruction set. An isa/*.cpp includes it.
#pragma once

#include "block_fit.h"
#include "isa/vectors.h"
#include "linear.h"

namespace linear {
namespace {

constexpr uint32_t INFINITE = 0x7f800000;
constexpr float TOP = 127.f;

struct Scale {  // of numbers that become whole ones
  float scale, inverse;
  INLINE explicit Scale(I16 magnitudes) {  // the largest becomes 127
    const uint32_t bits = greatest_magnitude(magnitudes);
    float largest;
    std::memcpy(&largest, &bits, 4);
    // What is not finite stays so: its numbers are lost, its scale makes NaN of them.
    scale = bits < INFINITE ? largest / TOP : std::nanf("");
    inverse = bits && bits < INFINITE ? TOP / largest : 0.f;
  }
};

// 64 numbers times the matrix of Hadamard in Sylvester's order: sums and differences of numbers 1, 2, 4, 8, 16 and 32
// apart. A number that is much larger than the others spreads over all 64.
INLINE void rotate(Halves& first, Halves& second) {
  F16 x[4] = {first.even + first.odd, first.even - first.odd, second.even + second.odd, second.even - second.odd};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = butterfly8(butterfly4(butterfly2(butterfly1(x[i]))));
  first = {x[0] + x[2], x[1] + x[3]}, second = {x[0] - x[2], x[1] - x[3]};
}
constexpr float ROTATED_TWICE = 64.f;  // times what a product of two rotated rows is too large

// The 64 numbers of a step, which lie as halves of 32; then as they become whole ones.
INLINE void read_step(const Layer& layer, const uint16_t* x, long step, Halves (&part)[2]) {
  for (long i = 0, k = step * 64; i < 2; ++i, k += 32) part[i] = read_halves(x + k, layer.K - k);
}
template <bool NORM>
INLINE void prepare_step(const Layer& layer, long step, Halves (&part)[2]) {
  for (long i = 0; NORM && i < 2; ++i) part[i] = part[i].times(layer.norm + step * 64 + i * 32);
  if (layer.rotated) rotate(part[0], part[1]);
}
INLINE void store_step(float* to, const Halves& first, const Halves& second) {
  store16(to, first.even), store16(to + 16, first.odd), store16(to + 32, second.even), store16(to + 48, second.odd);
}
INLINE Halves load_halves(const float* from) { return {load16(from), load16(from + 16)}; }
INLINE I16 greatest_of(I16 most, const Halves& x) {
  return greater_magnitude(most, greater_magnitude(magnitude(x.even), magnitude(x.odd)));
}

// A step of a row of W, in bfloat16 or in what `prepare_step` has made of it, as one line of a tile, 64 bytes.
INLINE void put_line(const Layer& layer, const uint16_t* row, const float* numbers, long step, float inverse,
                     char* line) {
  if (!layer.whole()) return copy32(line, row + step * 32, layer.K - step * 32);
  Halves part[2] = {load_halves(numbers + step * 64), load_halves(numbers + step * 64 + 32)};
  for (Halves& own : part) own = own.times(splat(inverse));
  put_bytes64(line, part[0], part[1], 0);
}

// The same of a row that is in int8 already.
INLINE void copy_line(const Layer& layer, const int8_t* row, long step, char* line) {
  const long left = std::min(64L, layer.K - step * 64);
  std::memset(line, 0, 64);
  std::memcpy(line, row + step * 64, (size_t)left);
}

// The columns of half a panel that come from a source, and their scales.
struct HalfPanel {
  uint32_t lanes = 0;
  long first = 0;  // the source's row of lane 0
  float inverses[16] = {};
  std::vector<float> numbers;  // [16, steps · 64], of int8
};

HalfPanel scale_half(const Packing& p, long panel, int half) {
  const Layer& layer = p.layer;
  const long column = layer.gate ? half * layer.width + panel * 16 : panel * SIDE + half * 16;
  const long column_end = layer.gate ? (half + 1) * layer.width : layer.N;
  HalfPanel found;
  found.first = column - p.column;
  if (layer.whole() && !p.whole) found.numbers.resize((size_t)(16 * layer.steps * 64));
  for (int i = 0; i < 16; ++i) {
    if (found.first + i < 0 || found.first + i >= p.rows || column + i >= column_end) continue;
    found.lanes |= 1u << i;
    if (!layer.whole()) continue;
    if (p.whole) {
      layer.scales[panel * SIDE + half * 16 + i] = p.scales[found.first + i];
      continue;
    }
    const uint16_t* row = p.source + (found.first + i) * p.stride;
    float* numbers = found.numbers.data() + i * layer.steps * 64;
    I16 most = zeros16();
    for (long step = 0; step < layer.steps; ++step) {
      Halves part[2];
      read_step(layer, row, step, part);
      prepare_step<false>(layer, step, part);
      store_step(numbers + step * 64, part[0], part[1]);
      most = greatest_of(greatest_of(most, part[0]), part[1]);
    }
    const Scale scale(most);
    layer.scales[panel * SIDE + half * 16 + i] = scale.scale / (layer.rotated ? ROTATED_TWICE : 1.f);
    found.inverses[i] = scale.inverse;
  }
  return found;
}

// One panel's tiles, as far as they come from this source: the others' columns stay untouched.
void pack_panel(const Packing& p, long panel) {
  const Layer& layer = p.layer;
  for (int half = 0; half < 2; ++half) {
    const HalfPanel own = scale_half(p, panel, half);
    for (long step = 0; own.lanes && step < layer.steps; ++step) {
      // Whole lines first: gathering straight from rows that lie 4 KB apart would thrash the L1.
      alignas(64) uint32_t square[16][16];
      for (int i = 0; i < 16; ++i) {
        if (!(own.lanes >> i & 1)) continue;
        const long row = (own.first + i) * p.stride;
        if (p.whole)
          copy_line(layer, p.whole + row, step, (char*)square[i]);
        else
          put_line(layer, p.source + row, own.numbers.data() + i * layer.steps * 64, step, own.inverses[i],
                   (char*)square[i]);
      }
      uint32_t* to = (uint32_t*)(layer.tiles(panel, step) + half * TILE);
      const bool all = own.lanes == 0xffff;
      for (int part = 0; all && part < 16; ++part, to += 16)
        for (int i = 0; i < 16; ++i) to[i] = square[i][part];
      for (int part = 0; !all && part < 16; ++part, to += 16)
        for (int i = 0; i < 16; ++i)
          if (own.lanes >> i & 1) to[i] = square[i][part];
    }
  }
}

// Unsigned bytes are 128 too large, and a column's sum begins at what that will have added.
void begin_sums(const Layer& layer, long panel) {
  int32_t sums[SIDE] = {};
  for (long step = 0; step < layer.steps; ++step) {
    const char* from = layer.tiles(panel, step);
    for (int i = 0; i < 2 * TILE; ++i) sums[i / TILE * 16 + i % 64 / 4] += (signed char)from[i];
  }
  for (int i = 0; i < SIDE; ++i) layer.starts[panel * SIDE + i] = -128 * sums[i];
}

void pack_weight(void* data) {
  Packing& p = *(Packing*)data;
  int node = own_node();
  for (long panel; (panel = p.panels.take(node)) >= 0;) {
    pack_panel(p, panel);
    if (p.layer.starts) begin_sums(p.layer, panel);
  }
}

INLINE void add_squares(Halves& squares, const Halves& part) {
  squares = {fma(part.even, part.even, squares.even), fma(part.odd, part.odd, squares.odd)};
}
INLINE float factor_of(const Layer& layer, const Halves& squares) {
  return 1.f / std::sqrt(sum16(squares.even + squares.odd) / (float)layer.K + layer.eps);
}

// What makes a row's norm one.
template <bool NORM>
INLINE float row_factor(const Call& c, long row) {
  const Layer& layer = c.layer;
  const uint16_t* x = c.x + row * c.x_stride;
  Halves squares{splat(0.f), splat(0.f)};
  for (long k = 0; NORM && k < layer.K; k += 32) add_squares(squares, read_halves(x + k, layer.K - k));
  return NORM ? factor_of(layer, squares) : 1.f;
}

// A row of n(x) as it becomes whole numbers → `to`, and what makes them of it. The factor that makes the row's norm
// one is a part of the row's scale only.
template <bool NORM>
INLINE float read_row(const Call& c, long row, float* to) {
  const Layer& layer = c.layer;
  const uint16_t* x = c.x + row * c.x_stride;
  Halves squares{splat(0.f), splat(0.f)};
  I16 most = zeros16();
  for (long step = 0; step < layer.steps; ++step, to += 64) {
    Halves part[2];
    read_step(layer, x, step, part);
    for (long i = 0; NORM && i < 2; ++i) add_squares(squares, part[i]);
    prepare_step<NORM>(layer, step, part);
    store_step(to, part[0], part[1]);
    most = greatest_of(greatest_of(most, part[0]), part[1]);
  }
  const Scale scale(most);
  c.row_scales[row] = NORM ? scale.scale * factor_of(layer, squares) : scale.scale;
  return scale.inverse;
}

// Some rows of n(x) → their places; for tiles, rows behind the end are zeros.
template <RowFormat FORMAT, bool NORM>
void pack_some_rows(const Call& c, long first) {
  constexpr bool WHOLE = FORMAT >= RowFormat::BYTES;
  static thread_local ThreadMemory memory;
  const Layer& layer = c.layer;
  const long K = layer.K, group = first / SIDE, row_bytes = c.row_bytes(), numbers = layer.steps * 64;
  const long rows = std::clamp(c.M - first, 0L, PACK_ROWS);
  float* read = WHOLE ? (float*)memory.reserve((size_t)(PACK_ROWS * numbers) * sizeof(float)) : nullptr;
  F16 by[PACK_ROWS];
  for (long r = 0; r < rows && (WHOLE || NORM); ++r)
    by[r] = splat(WHOLE ? read_row<NORM>(c, first + r, read + r * numbers) : row_factor<NORM>(c, first + r));
  for (long step = 0; step < layer.steps; ++step) {
    char* to = c.tiles(group, step) + first % SIDE * row_bytes;
    for (long r = 0; r < rows; ++r, to += row_bytes) {
      const long k = step * 32, left = K - k;  // of bfloat16
      const uint16_t* x = c.x + (first + r) * c.x_stride + k;
      const auto normed = [&] { return read_halves(x, left).times(layer.norm + k).times(by[r]); };
      const auto half = [&](int i) { return load_halves(read + r * numbers + step * 64 + i * 32).times(by[r]); };
      if constexpr (FORMAT == RowFormat::BYTES || FORMAT == RowFormat::UNSIGNED_BYTES) {
        put_bytes64(to, half(0), half(1), FORMAT == RowFormat::BYTES ? 0 : (char)0x80);
      } else if constexpr (FORMAT == RowFormat::WORDS) {
        for (int i = 0; i < 2; ++i) {
          const Halves own = half(i);
          put_words16(to + i * 32, own.even);
          put_words16(to + 64 + i * 32, own.odd);
        }
      } else if constexpr (FORMAT == RowFormat::FLOATS) {
        const Halves own = NORM ? normed() : read_halves(x, left);
        store16((float*)to, NORM ? rounded16(own.even) : own.even);
        store16((float*)to + 16, NORM ? rounded16(own.odd) : own.odd);
      } else {
#ifdef HAS_BFLOAT16
        if constexpr (NORM)
          put_rounded32(to, normed());
        else
          copy32(to, x, left);
#endif
      }
    }
    // With one group the tiles have no more rows than there are.
    for (long r = rows; r < PACK_ROWS && layer.kernels->tiles && c.groups > 1; ++r, to += 64) std::memset(to, 0, 64);
  }
}

void pack_rows(const Call& c, long item) {
  using F = RowFormat;
  constexpr decltype(&pack_some_rows<F::FLOATS, false>) KINDS[][2] = {
      {pack_some_rows<F::PAIRS, false>, pack_some_rows<F::PAIRS, true>},
      {pack_some_rows<F::FLOATS, false>, pack_some_rows<F::FLOATS, true>},
      {pack_some_rows<F::BYTES, false>, pack_some_rows<F::BYTES, true>},
      {pack_some_rows<F::UNSIGNED_BYTES, false>, pack_some_rows<F::UNSIGNED_BYTES, true>},
      {pack_some_rows<F::WORDS, false>, pack_some_rows<F::WORDS, true>}};
  KINDS[(int)c.format][c.layer.norm != nullptr](c, item * PACK_ROWS);
}

}  // namespace
}  // namespace linear
