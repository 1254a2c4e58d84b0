// A token drawn from one row of logits, in vectors of 16 numbers that the compiler makes of what the instruction
// set has. It does so badly for comparisons, hence masks are the signs of differences: floats that are not
// negative order as their bits do. Every set gives the same bits. An isa/*.cpp includes it.
#pragma once

#include "draw.h"

namespace sampling {
namespace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
constexpr Words INDEX = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline int bits_of(float x) {
  int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline double total(const double* sums, long n) {
  double all = 0;
  for (long b = 0; b < ceil_div(n, BLOCK); ++b) all += sums[b];
  return all;
}

// The first index at which the running sum is above the target, which then says how far above the sum
// before it; where rounding lets there be none, the last index with a weight.
template <class T>
inline long invert(const T* weights, long n, double& target) {
  long last = 0;
  double before = 0, sum = 0;
  for (long i = 0; i < n && sum <= target; ++i)
    if (weights[i] > 0) {
      last = i;
      before = sum;
      sum += weights[i];
    }
  target -= before;
  return last;
}

inline long pick(const float* weights, long n, const double* sums, double point) {
  double target = point * total(sums, n);
  const long begin = invert(sums, ceil_div(n, BLOCK), target) * BLOCK;
  return begin + invert(weights + begin, std::min(BLOCK, n - begin), target);
}

INLINE Words below(Words a, Words b) { return (a - b) >> 31; }
INLINE Floats where(Words mask, Floats x) { return (Floats)(mask & (Words)x); }

// 2^x for x <= 0, relative error 1e-7; exactly 1 at 0, and 0 where a result would be less than 2^-125.
INLINE Floats exp2(Floats x) {
  constexpr float MAGIC = 12582912.f;  // 1.5 · 2^23: adding it rounds, and leaves a whole number in the low bits
  const Floats rounded = x + MAGIC, f = x - (rounded - MAGIC);
  Floats p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  const Words near = below((Words)x & 0x7fffffff, Words{} + bits_of(125.f));
  return where(near, (Floats)((Words)p + ((Words)rounded << 23)));
}

// Puts weight(i, numbers i … i + 15) into `to`, and the sum of each block into `sums`.
template <class Weight>
INLINE void pass(const float* from, float* to, long n, double* sums, Weight weight) {
  for (long begin = 0; begin < n; begin += BLOCK) {
    Floats lanes{};
    for (long i = begin; i < std::min(begin + BLOCK, n); i += LANES) {
      Floats x;
      std::memcpy(&x, from + i, sizeof x);
      x = weight((int)i, x);
      std::memcpy(to + i, &x, sizeof x);
      lanes += x;
    }
    double sum = 0;
    for (int i = 0; i < LANES; ++i) sum += lanes[i];
    *sums++ = (float)sum;  // no finer than the weights: what they sum to, up to their rounding
  }
}

// The largest of n numbers, and of their magnitudes as bits, which tell NaN from a number.
inline float largest(const float* x, long n, int& magnitude) {
  constexpr int WIDE = 64;  // loops of this length become vectors
  float most[WIDE];
  int bits[WIDE];
  for (int lane = 0; lane < WIDE; ++lane) most[lane] = -INFINITY, bits[lane] = 0;
  const auto take = [&](const float* from, int lane) {
    most[lane] = most[lane] < from[lane] ? from[lane] : most[lane];
    const int found = bits_of(from[lane]) & 0x7fffffff;
    bits[lane] = bits[lane] < found ? found : bits[lane];
  };
  long i = 0;
  for (; i + WIDE <= n; i += WIDE)
    for (int lane = 0; lane < WIDE; ++lane) take(x + i, lane);
  for (int lane = 0; lane < n - i; ++lane) take(x + i, lane);
  magnitude = std::max(magnitude, *std::max_element(bits, bits + WIDE));
  return *std::max_element(most, most + WIDE);
}

inline float find_top(const float* row, long n, double* tops) {
  float top = -INFINITY;
  int magnitude = 0;
  for (long begin = 0; begin < n; begin += BLOCK, ++tops) {
    const float most = largest(row + begin, std::min(BLOCK, n - begin), magnitude);
    *tops = most;
    top = std::max(top, most);
  }
  return magnitude > bits_of(INFINITY) ? NAN : top;
}

inline int64_t draw(const float* row, long n, float top, const DrawRow& wanted, float* weights, double* sums) {
  const float factor = 1.44269504f / (float)wanted.temperature;
  pass(row, weights, n, sums, [=](int, Floats x) { return exp2((x - top) * factor); });
  const double limit = wanted.top_p * total(sums, n);
  if (wanted.min_p > 0) {
    const int least = bits_of((float)wanted.min_p);
    pass(weights, weights, n, sums, [=](int, Floats w) { return where(below(Words{} + (least - 1), (Words)w), w); });
  }
  uint64_t state = splitmix64(splitmix64(wanted.seed) + wanted.position);
  for (;;) {
    const int token = (int)pick(weights, n, sums, (double)(state >> 11) * 0x1p-53);
    if (wanted.top_p >= 1) return token;
    const int weight = bits_of(weights[token]);
    pass(weights, weights, n, sums, [=](int i, Floats w) {    // what does not go before the token is out
      const Words lower = below(INDEX + i, Words{} + token);  // -1 or 0; of equals the lower go before
      return where(below(lower + weight, (Words)w), w);
    });
    // The loop ends for any numbers: each turn leaves fewer tokens, and where none is left, or a NaN, it is over.
    const double rest = total(sums, n);
    if (!(rest > 0 && rest >= limit)) return token;
    state = splitmix64(state);
  }
}

}  // namespace
}  // namespace sampling
