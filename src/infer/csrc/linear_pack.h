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
INLINE float best_multiple(const float* numbers, const Scale& column) {
  F16 x[4];
  I16 most = zeros16();
  for (int i = 0; i < 4; ++i) {
    x[i] = load16(numbers + i * 16);
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
  for (Halves& own : part) {
    if (layer.bits == 8)
      own = own.times(splat(inverse));
    else
      own = {quantized4(own.even, inverse) + splat(8.f), quantized4(own.odd, inverse) + splat(8.f)};
  }
  put_bytes64(line, part[0], part[1], 0);
}

// The columns of half a panel that come from a source, and their scales.
struct HalfPanel {
  uint32_t lanes = 0;
  long first = 0;               // the source's row of lane 0
  std::vector<float> inverses;  // [steps, 16]
  std::vector<float> numbers;   // [16, steps · 64], of int8 and int4
};

HalfPanel scale_half(const Packing& p, long panel, int half) {
  const Layer& layer = p.layer;
  const long column = layer.gate ? half * layer.width + panel * 16 : panel * SIDE + half * 16;
  const long column_end = layer.gate ? (half + 1) * layer.width : layer.N;
  HalfPanel found;
  found.first = column - p.column;
  found.inverses.resize((size_t)(16 * layer.steps));
  if (layer.whole()) found.numbers.resize((size_t)(16 * layer.steps * 64));
  for (int i = 0; i < 16; ++i) {
    if (found.first + i < 0 || found.first + i >= p.rows || column + i >= column_end) continue;
    found.lanes |= 1u << i;
    if (!layer.whole()) continue;
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
    const Scale scale(most, layer.bits == 8 ? 127.f : TOP4);
    layer.scales[panel * SIDE + half * 16 + i] = scale.scale / (layer.rotated ? ROTATED_TWICE : 1.f);
    for (long step = 0; step < layer.steps; ++step) {
      float multiple = 1.f;
      if (layer.bits == 4) {
        multiple = best_multiple(numbers + step * 64, scale);
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
          put_line(layer, p.source + (own.first + i) * p.stride, own.numbers.data() + i * layer.steps * 64, step,
                   own.inverses[(size_t)(step * 16 + i)], (char*)square[i]);
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
        if (c.nibbles()) c.eights[(first + r) * layer.steps + step] = -8 * sum_of_bytes64(to);
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
