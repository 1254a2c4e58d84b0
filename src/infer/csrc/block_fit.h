// Rows of weights → blocks of GGUF files of 4 bits, Q4_K and Q4_1. An isa/*.cpp includes it.
//
// 32 numbers y become a · n + m with n in 0 … 15. Rounding between the smallest and the largest number is a poor
// choice of a and m: a few large numbers take the steps of all others. So the fit begins at several ranges, which
// cut off more or less of each end; it rounds, then finds the a and m with the least squared error for these n, and
// again. The best of all is taken. 16 groups of 32 are fitted together, each in a lane of its own, by additions,
// products and divisions that are rounded one by one, so all instruction sets find the same blocks.
#pragma once

#include "blocks.h"
#include "file_blocks.h"
#include "isa/vectors.h"
#include "linear.h"

namespace linear {
namespace {

constexpr int FIT_LANES = 16, FIT_NUMBERS = 32, FIT_ROUNDS = 3, HIGHEST = 15;
constexpr float FIT_CUTS[] = {0.f, .04f, .08f, .14f};  // of a range, at either end
constexpr long SUPER_GROUPS = 8;                       // of a block of Q4_K
constexpr float HIGHEST_MULTIPLE = 63.f;

using FitLanes = float[FIT_LANES];

INLINE F16 rounded_codes(F16 x) { return nearest16(least16(most16(x, splat(0.f)), splat((float)HIGHEST))); }

INLINE float inverse_or_zero(float x) { return x > 0.f ? 1.f / x : 0.f; }

// Groups of numbers, and what fits them. `below_zero`: m is not above 0.
struct Fit {
  alignas(64) FitLanes numbers[FIT_NUMBERS];
  alignas(64) FitLanes scale, minimum, least, sum, squares;

  void find(bool below_zero) {
    alignas(64) FitLanes low, high;
    for (int l = 0; l < FIT_LANES; ++l) scale[l] = minimum[l] = 0.f, least[l] = INFINITY;
    F16 lowest = below_zero ? splat(0.f) : load16(numbers[0]), highest = load16(numbers[0]);
    F16 total = splat(0.f), total_squares = splat(0.f);
    for (const FitLanes& each : numbers) {
      const F16 y = load16(each);
      lowest = least16(lowest, y), highest = most16(highest, y);
      total = total + y, total_squares = total_squares + y * y;
    }
    store16(low, lowest), store16(high, highest), store16(sum, total), store16(squares, total_squares);
    for (const float below : FIT_CUTS)
      for (const float above : FIT_CUTS) {
        alignas(64) FitLanes a, m;
        for (int l = 0; l < FIT_LANES; ++l) {
          const float range = high[l] - low[l];
          a[l] = range * ((1.f - below - above) / (float)HIGHEST), m[l] = low[l] + range * below;
        }
        for (int round = 0; round < FIT_ROUNDS; ++round) improve(a, m, below_zero);
      }
    // What is not finite has no range. It must not become a number.
    for (int l = 0; l < FIT_LANES; ++l)
      if (!(squares[l] < INFINITY)) scale[l] = minimum[l] = NAN;
  }

 private:
  void improve(FitLanes& a, FitLanes& m, bool below_zero) {
    alignas(64) FitLanes codes, code_squares, products, inverse;
    for (int l = 0; l < FIT_LANES; ++l) inverse[l] = inverse_or_zero(a[l]);
    F16 of_codes = splat(0.f), of_squares = splat(0.f), of_products = splat(0.f);
    const F16 from = load16(m), by = load16(inverse);
    for (const FitLanes& each : numbers) {
      const F16 y = load16(each), n = rounded_codes((y - from) * by);
      of_codes = of_codes + n, of_squares = of_squares + n * n, of_products = of_products + n * y;
    }
    store16(codes, of_codes), store16(code_squares, of_squares), store16(products, of_products);
    constexpr float EACH = 1.f / (float)FIT_NUMBERS;
    for (int l = 0; l < FIT_LANES; ++l) {
      const float variance = code_squares[l] - codes[l] * codes[l] * EACH;
      a[l] = variance > 0.f ? (products[l] - codes[l] * sum[l] * EACH) / variance : a[l];
      m[l] = (sum[l] - a[l] * codes[l]) * EACH;
      if (below_zero && m[l] > 0.f) {
        a[l] = code_squares[l] > 0.f ? products[l] / code_squares[l] : a[l];
        m[l] = 0.f;
      }
      const float error = squares[l] - a[l] * products[l] - m[l] * sum[l];
      const bool better = error < least[l];
      least[l] = better ? error : least[l];
      scale[l] = better ? a[l] : scale[l];
      minimum[l] = better ? m[l] : minimum[l];
    }
  }
};

// The squared error of a lane's numbers as a · n - b.
INLINE void error_of(const Fit& fit, const FitLanes& a, const FitLanes& b, FitLanes& error) {
  alignas(64) FitLanes inverse;
  for (int l = 0; l < FIT_LANES; ++l) inverse[l] = inverse_or_zero(a[l]);
  const F16 scale = load16(a), minimum = load16(b), by = load16(inverse);
  F16 total = splat(0.f);
  for (const FitLanes& each : fit.numbers) {
    const F16 y = load16(each), off = scale * rounded_codes((y + minimum) * by) - minimum - y;
    total = total + off * off;
  }
  store16(error, total);
}

using FitCodes = uint8_t[FIT_LANES][FIT_NUMBERS];

// The codes of a lane's numbers as a · n - b.
void codes_of(const Fit& fit, const FitLanes& a, const FitLanes& b, FitCodes& codes) {
  alignas(64) FitLanes inverse, rounded;
  for (int l = 0; l < FIT_LANES; ++l) inverse[l] = inverse_or_zero(a[l]);
  const F16 minimum = load16(b), by = load16(inverse);
  for (int i = 0; i < FIT_NUMBERS; ++i) {
    store16(rounded, rounded_codes((load16(fit.numbers[i]) + minimum) * by));
    for (int l = 0; l < FIT_LANES; ++l) codes[l][i] = (uint8_t)rounded[l];
  }
}

// Numbers of `count` groups of a row from `first` on; all others are 0.
void read_groups(Fit& fit, const uint16_t* row, long K, long first, long count) {
  for (int l = 0; l < FIT_LANES; ++l)
    for (int i = 0; i < FIT_NUMBERS; ++i) {
      const long k = (first + l) * FIT_NUMBERS + i;
      const uint32_t bits = l < count && k < K ? (uint32_t)row[k] << 16 : 0;
      std::memcpy(&fit.numbers[i][l], &bits, 4);
    }
}

// `count` blocks of Q4_1, one of each lane.
void write_q4_1(const Fit& fit, uint8_t* to, long count) {
  alignas(64) FitLanes scales, minima;
  uint16_t halves[FIT_LANES][2];
  for (int l = 0; l < FIT_LANES; ++l) {
    halves[l][0] = half_of(fit.scale[l]), halves[l][1] = half_of(fit.minimum[l]);
    scales[l] = float_of(halves[l][0]), minima[l] = -float_of(halves[l][1]);
  }
  FitCodes codes;
  codes_of(fit, scales, minima, codes);
  for (int l = 0; l < count; ++l, to += block_format(BlockType::Q4_1)->file_bytes) {
    std::memcpy(to, halves[l], 4);
    for (int i = 0; i < 16; ++i) to[4 + i] = (uint8_t)(codes[l][i] | codes[l][16 + i] << 4);
  }
}

// Of each lane's multiples and those one apart, those with the least error. `unit`: a lane's block's two.
void choose_multiples(const Fit& fit, const FitLanes& unit, const FitLanes& minimum_unit, FitLanes& scales,
                      FitLanes& minima) {
  alignas(64) FitLanes best_scales, best_minima, least, a, b, error;
  const auto moved = [](float x, int by) { return std::min(std::max(x + (float)by, 0.f), HIGHEST_MULTIPLE); };
  for (float& each : least) each = INFINITY;
  for (const int more : {0, -1, 1})
    for (const int lower : {0, -1, 1}) {
      for (int l = 0; l < FIT_LANES; ++l)
        a[l] = moved(scales[l], more) * unit[l], b[l] = moved(minima[l], lower) * minimum_unit[l];
      error_of(fit, a, b, error);
      for (int l = 0; l < FIT_LANES; ++l) {
        if (!(error[l] < least[l])) continue;
        least[l] = error[l], best_scales[l] = moved(scales[l], more), best_minima[l] = moved(minima[l], lower);
      }
    }
  for (int l = 0; l < FIT_LANES; ++l) {
    const bool found = least[l] < INFINITY;
    scales[l] = found ? best_scales[l] : 0.f, minima[l] = found ? best_minima[l] : 0.f;
  }
}

// Blocks of Q4_K: lanes 0 … 7, and 8 … 15 if there are so many groups.
void write_q4_k(const Fit& fit, uint8_t* to, long count) {
  alignas(64) FitLanes unit, minimum_unit, scales, minima;
  uint16_t halves[FIT_LANES][2];
  for (int l = 0; l < FIT_LANES; ++l) {
    const int first = l / (int)SUPER_GROUPS * (int)SUPER_GROUPS;
    float most = 0.f, most_minimum = 0.f;
    for (int i = first; i < first + SUPER_GROUPS; ++i) {
      most = fit.scale[i] > most || fit.scale[i] != fit.scale[i] ? fit.scale[i] : most;
      most_minimum = -fit.minimum[i] > most_minimum ? -fit.minimum[i] : most_minimum;
    }
    halves[l][0] = half_of(most / HIGHEST_MULTIPLE), halves[l][1] = half_of(most_minimum / HIGHEST_MULTIPLE);
    unit[l] = float_of(halves[l][0]), minimum_unit[l] = float_of(halves[l][1]);
    const auto nearest = [](float x, float of) {
      return of > 0.f ? std::min(std::nearbyint(std::max(x / of, 0.f)), HIGHEST_MULTIPLE) : 0.f;
    };
    scales[l] = nearest(fit.scale[l], unit[l]), minima[l] = nearest(-fit.minimum[l], minimum_unit[l]);
  }
  choose_multiples(fit, unit, minimum_unit, scales, minima);
  alignas(64) FitLanes each_scale, each_minimum;
  for (int l = 0; l < FIT_LANES; ++l)
    each_scale[l] = scales[l] * unit[l], each_minimum[l] = minima[l] * minimum_unit[l];
  FitCodes codes;
  codes_of(fit, each_scale, each_minimum, codes);
  for (long block = 0; block * SUPER_GROUPS < count; ++block, to += block_format(BlockType::Q4_K)->file_bytes) {
    const int first = (int)(block * SUPER_GROUPS);
    std::memcpy(to, halves[first], 4);
    uint8_t *packed = to + 4, a[SUPER_GROUPS], b[SUPER_GROUPS];
    for (int i = 0; i < SUPER_GROUPS; ++i) a[i] = (uint8_t)scales[first + i], b[i] = (uint8_t)minima[first + i];
    for (int i = 0; i < 4; ++i) {
      packed[i] = (uint8_t)(a[i] | (a[i + 4] >> 4) << 6), packed[i + 4] = (uint8_t)(b[i] | (b[i + 4] >> 4) << 6);
      packed[i + 8] = (uint8_t)((a[i + 4] & 15) | (b[i + 4] & 15) << 4);
    }
    for (int pair = 0; pair < SUPER_GROUPS / 2; ++pair)
      for (int i = 0; i < FIT_NUMBERS; ++i)
        to[16 + pair * FIT_NUMBERS + i] = (uint8_t)(codes[first + 2 * pair][i] | codes[first + 2 * pair + 1][i] << 4);
  }
}

void fit_row(BlockType type, const uint16_t* row, long K, uint8_t* to) {
  const BlockFormat& format = *block_format(type);
  const bool is_k = type == BlockType::Q4_K;
  const long groups = ceil_div(K, FIT_NUMBERS);
  Fit fit;
  for (long first = 0; first < groups; first += FIT_LANES) {
    const long count = std::min<long>(FIT_LANES, groups - first);
    read_groups(fit, row, K, first, count);
    fit.find(is_k);
    (is_k ? write_q4_k : write_q4_1)(fit, to + first * FIT_NUMBERS / format.file_inputs * format.file_bytes, count);
  }
}

}  // namespace
}  // namespace linear
