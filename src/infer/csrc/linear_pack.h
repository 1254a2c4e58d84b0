// Packing of weights and of rows for linear layers, in vectors of 16 lanes: the same bytes with every
// instruction set. An isa/*.cpp includes it.
#pragma once

#include "isa/vectors.h"
#include "linear.h"

namespace linear {
namespace {

constexpr uint32_t INFINITE = 0x7f800000;

struct Scale {  // of numbers that become whole ones
  float scale, inverse;
  INLINE explicit Scale(I16 magnitudes, float top = 127.f) {  // `top`: what the largest becomes
    const uint32_t bits = greatest_magnitude(magnitudes);
    float largest;
    std::memcpy(&largest, &bits, 4);
    // What is not finite stays so: its numbers are lost, its scale makes NaN of them.
    scale = bits < INFINITE ? largest / top : std::nanf("");
    inverse = bits && bits < INFINITE ? top / largest : 0.f;
  }
};

constexpr float MOST_MULTIPLE = 16.f, TOP4 = 7.5f * MOST_MULTIPLE;

INLINE F16 quantized4(F16 x, float inverse) {  // whole numbers, -8 … 7
  return least16(most16(nearest16(x * splat(inverse)), splat(-8.f)), splat(7.f));
}

// Of the multiple of a column's scale that takes in the largest of 64 weights, and those below it,
// which cut that one off and divide the others more finely: the one with the least squared error.
INLINE float best_multiple(const uint16_t* row, long count, const Scale& column) {
  F16 x[4];
  I16 most = zeros16();
  for (int i = 0; i < 4; ++i) {
    x[i] = widen16(row + i * 16, count - i * 16);
    most = greater_magnitude(most, magnitude(x[i]));
  }
  const uint32_t bits = greatest_magnitude(most);
  float largest;
  std::memcpy(&largest, &bits, 4);
  largest = largest * column.inverse / 7.5f;
  // 8 may have become 8.000001; also if NaN.
  largest = largest > 1.f ? std::min(std::ceil(largest - 1e-5f), MOST_MULTIPLE) : 1.f;
  float best = largest, least = INFINITY;
  for (float multiple = largest; multiple >= 1.f && multiple > largest - 4.f; --multiple) {
    F16 sum = splat(0.f);
    for (int i = 0; i < 4; ++i) {
      const F16 whole = quantized4(x[i], column.inverse / multiple);
      const F16 error = negated_fma(whole, splat(column.scale * multiple), x[i]);
      sum = fma(error, error, sum);
    }
    const float error = sum16(sum);
    if (error < least) least = error, best = multiple;
  }
  return best;
}

// Some steps of a panel in int8; returns `to`.
[[maybe_unused]] const char* unpack_some(const Layer& layer, long panel, long first, long steps, char* to) {
  for (long step = 0; step < steps; ++step)
    unpack_nibbles(layer.tiles(panel, first + step), layer.multiples(panel, first + step), to + step * 2 * TILE);
  return to;
}

// Numbers [first, …) of a row of W as one line of a tile, 64 bytes.
INLINE void put_line(const Layer& layer, const uint16_t* row, long step, float inverse, char* line) {
  if (!layer.whole()) return copy32(line, row + step * 32, layer.K - step * 32);
  for (int i = 0; i < 4; ++i) {
    const long first = step * 64 + i * 16;
    const F16 x = widen16(row + first, layer.K - first);
    put_bytes16(line + i * 16, whole16(layer.bits == 8 ? x * splat(inverse) : quantized4(x, inverse) + splat(8.f)));
  }
}

// The columns of half a panel that come from a source, and their scales.
struct HalfPanel {
  uint32_t lanes = 0;
  long first = 0;               // the source's row of lane 0
  std::vector<float> inverses;  // [steps, 16]
};

HalfPanel scale_half(const Packing& p, long panel, int half) {
  const Layer& layer = p.layer;
  const long column = layer.gate ? half * layer.width + panel * 16 : panel * SIDE + half * 16;
  const long column_end = layer.gate ? (half + 1) * layer.width : layer.N;
  HalfPanel found;
  found.first = column - p.column;
  found.inverses.resize((size_t)(16 * layer.steps));
  for (int i = 0; i < 16; ++i) {
    if (found.first + i < 0 || found.first + i >= p.rows || column + i >= column_end) continue;
    found.lanes |= 1u << i;
    if (!layer.whole()) continue;
    const uint16_t* row = p.source + (found.first + i) * p.stride;
    I16 most = zeros16();
    for (long k = 0; k < layer.K; k += 16) most = greater_magnitude(most, magnitude(widen16(row + k, layer.K - k)));
    const Scale scale(most, layer.bits == 8 ? 127.f : TOP4);
    layer.scales[panel * SIDE + half * 16 + i] = scale.scale;
    for (long step = 0; step < layer.steps; ++step) {
      float multiple = 1.f;
      if (layer.bits == 4) {
        multiple = best_multiple(row + step * 64, layer.K - step * 64, scale);
        layer.multiples(panel, step)[half * 16 + i] = (char)multiple;
      }
      found.inverses[(size_t)(step * 16 + i)] = scale.inverse / multiple;
    }
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
      for (int i = 0; i < 16; ++i)
        if (own.lanes >> i & 1)
          put_line(layer, p.source + (own.first + i) * p.stride, step, own.inverses[(size_t)(step * 16 + i)],
                   (char*)square[i]);
      uint32_t* to = (uint32_t*)(layer.tiles(panel, step) + (layer.bits == 4 ? 0 : half * TILE));
      const bool all = own.lanes == 0xffff && layer.bits >= 8;
      for (int part = 0; all && part < 16; ++part, to += 16)
        for (int i = 0; i < 16; ++i) to[i] = square[i][part];
      for (int part = 0; !all && part < 16; ++part, to += 16)
        for (int i = 0; i < 16; ++i) {
          if (!(own.lanes >> i & 1)) continue;
          const uint32_t four = square[i][part];
          if (layer.bits < 8)
            to[i] = half ? (four << 4) | (to[i] & 0x0f0f0f0f) : four | (to[i] & 0xf0f0f0f0);
          else
            to[i] = four;
        }
    }
  }
}

// Unsigned bytes are 128 too large, and a column's sum begins at what that will have added.
void begin_sums(const Layer& layer, long panel) {
  int32_t sums[SIDE] = {};
  alignas(64) char unpacked[2 * TILE];
  for (long step = 0; step < layer.steps; ++step) {
    const char* from = layer.tiles(panel, step);
    if (layer.bits == 4) unpack_nibbles(from, layer.multiples(panel, step), unpacked), from = unpacked;
    for (int i = 0; i < 2 * TILE; ++i) sums[i / TILE * 16 + i % 64 / 4] += (signed char)from[i];
  }
  for (int i = 0; i < SIDE; ++i) layer.starts[panel * SIDE + i] = -128 * sums[i];
}

void pack_weight(void* data) {
  Packing& p = *(Packing*)data;
  for (long panel; (panel = p.first + p.next.fetch_add(1)) < p.end;) {
    pack_panel(p, panel);
    if (p.layer.starts) begin_sums(p.layer, panel);
  }
}

// What makes whole numbers of a row of n(x), or what makes its norm one.
template <bool WHOLE, bool NORM>
INLINE float row_factor(const Call& c, long row) {
  const Layer& layer = c.layer;
  const uint16_t* x = c.x + row * c.x_stride;
  Halves squares{splat(0.f), splat(0.f)};
  I16 most[2] = {zeros16(), zeros16()};
  for (long k = 0; k < layer.K; k += 32) {
    Halves part = read_halves(x + k, layer.K - k);
    if (NORM) {
      squares.even = fma(part.even, part.even, squares.even);
      squares.odd = fma(part.odd, part.odd, squares.odd);
    }
    if (!WHOLE) continue;
    if (NORM) part = part.times(layer.norm + k);
    most[0] = greater_magnitude(most[0], magnitude(part.even));
    most[1] = greater_magnitude(most[1], magnitude(part.odd));
  }
  float factor = 1.f;
  if (NORM) factor = 1.f / std::sqrt(sum16(squares.even + squares.odd) / (float)layer.K + layer.eps);
  if (!WHOLE) return factor;
  const Scale scale(greater_magnitude(most[0], most[1]));
  c.row_scales[row] = scale.scale * factor;
  return scale.inverse;
}

// Some rows of n(x) → their places; for tiles, rows behind the end are zeros. In int8 the factor that makes a
// row's norm one is a part of the row's scale only.
template <RowFormat FORMAT, bool NORM>
void pack_some_rows(const Call& c, long first) {
  constexpr bool WHOLE = FORMAT >= RowFormat::BYTES;
  const Layer& layer = c.layer;
  const long K = layer.K, group = first / SIDE, row_bytes = c.row_bytes();
  const long rows = std::clamp(c.M - first, 0L, PACK_ROWS);
  F16 by[PACK_ROWS];
  for (long r = 0; r < rows && (WHOLE || NORM); ++r) by[r] = splat(row_factor<WHOLE, NORM>(c, first + r));
  for (long step = 0; step < layer.steps; ++step) {
    char* to = c.tiles(group, step) + first % SIDE * row_bytes;
    for (long r = 0; r < rows; ++r, to += row_bytes) {
      const long k = step * (WHOLE ? 64 : 32), left = K - k;
      const uint16_t* x = c.x + (first + r) * c.x_stride + k;
      const auto part = [&](long from) {
        const Halves own = read_halves(x + from, left - from);
        return (NORM ? own.times(layer.norm + k + from) : own).times(by[r]);
      };
      if constexpr (FORMAT == RowFormat::BYTES || FORMAT == RowFormat::UNSIGNED_BYTES) {
        put_bytes64(to, part(0), part(32), FORMAT == RowFormat::BYTES ? 0 : (char)0x80);
        if (c.nibbles()) c.eights[(first + r) * layer.steps + step] = -8 * sum_of_bytes64(to);
      } else if constexpr (FORMAT == RowFormat::WORDS) {
        for (int half = 0; half < 2; ++half) {
          const Halves own = part(half * 32);
          put_words16(to + half * 32, own.even);
          put_words16(to + 64 + half * 32, own.odd);
        }
      } else if constexpr (FORMAT == RowFormat::FLOATS) {
        const Halves own = NORM ? part(0) : read_halves(x, left);
        store16((float*)to, NORM ? rounded16(own.even) : own.even);
        store16((float*)to + 16, NORM ? rounded16(own.odd) : own.odd);
      } else {
#ifdef HAS_BFLOAT16
        if constexpr (NORM)
          put_rounded32(to, part(0));
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
