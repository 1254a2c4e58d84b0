// From a product's sums to y, for linear layers: the scales, the bias, the gate, the residual, the rounding.
// An isa/*.cpp includes it.
#pragma once

#include "isa/vectors.h"
#include "linear.h"

namespace linear {
namespace {

INLINE F16 exponential(F16 x) {  // 2¹²⁶ at most
  const F16 scaled = least16(splat(126.f), x * splat(1.44269504f));
  const F16 whole = nearest16(scaled), r = scaled - whole;  // in [-½, ½]: 2^r by its series
  F16 p = splat(1.3333558e-3f);
  for (const float c : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) p = fma(p, r, splat(c));
  return times_power_of_2(p, whole);
}

// silu(x) = x / (1 + exp(-x)); gelu by tanh is the same function of another argument.
INLINE F16 activated(Gate gate, F16 x) {
  F16 z = x;
  if (gate == GELU) z = splat(1.59576912f) * fma(x * x * x, splat(0.044715f), x);
  return x * inverse16(splat(1.f) + exponential(splat(0.f) - z));
}

// Sums of a group × some panels, which lie `stride` apart → y. Row by row, so that lines of y are written whole:
// rows are often a multiple of 4 KB apart, and of lines that are half written the caches keep few. EDGE: the
// last panel has columns that y has not. Everything is in locals: a store could change it anywhere else.
template <bool WHOLE, bool EDGE>
void finish_rows(const Call& c, const float* sums, long stride, long group, long begin, long end) {
  const Layer& layer = c.layer;
  const Gate gate = layer.gate;
  const bool float_out = layer.float_out;
  const long width = layer.width, N = layer.N, side = gate ? 16 : SIDE, to_other = gate ? width : 16;
  const long first = group * SIDE, rows = c.rows_in(group);
  const float *bias = layer.bias, *scales = layer.scales;
  const uint16_t* residual = c.residual;
  char* y = c.y;
  const auto put = [=](long at, long lanes, F16 value) {
    if (residual) value = value + widen16(residual + at, lanes);
    if (float_out)
      store16((float*)y + at, value, lanes);
    else
      narrow16((uint16_t*)y + at, value, lanes);
  };
  const auto scaled = [=](const float* from, const float* own, F16 scale) {
    return floats16(load16((const int32_t*)from)) * (load16(own) * scale);
  };
  for (long r = 0; r < rows; ++r) {
    const float* from = sums + r / 16 * 512 + r % 16 * 16;
    const F16 scale = splat(WHOLE ? c.row_scales[first + r] : 1.f);
    for (long panel = begin; panel < end; ++panel, from += stride) {
      const long column = panel * side, other = column + to_other, at = (first + r) * width + column;
      const long lanes = EDGE ? width - column : 16, others = EDGE ? (gate ? N : width) - other : 16;
      F16 one, two;
      if constexpr (WHOLE) {
        const float* own = scales + panel * SIDE;
        one = scaled(from, own, scale), two = scaled(from + 256, own + 16, scale);
      } else {
        one = load16(from), two = load16(from + 256);
      }
      if (bias) {
        one = one + load16(bias + column, lanes);
        two = two + load16(bias + other, others);
      }
      if (gate) {
        put(at, lanes, activated(gate, one) * two);
      } else {
        put(at, lanes, one);
        put(at + 16, others, two);
      }
    }
  }
}

void finish(const Call& c, const float* sums, long stride, long group, long begin, long end) {
  constexpr decltype(&finish_rows<false, false>) KINDS[2][2] = {{finish_rows<false, false>, finish_rows<false, true>},
                                                                {finish_rows<true, false>, finish_rows<true, true>}};
  const Layer& layer = c.layer;
  const bool edge = end * (layer.gate ? 16 : SIDE) > layer.width;
  KINDS[layer.whole()][edge](c, sums, stride, group, begin, end);
}

}  // namespace
}  // namespace linear
