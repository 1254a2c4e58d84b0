// Norms, activations and sums of rows of bfloat16 that are not part of a linear layer.
//
// Each number is computed in float32 and rounded once. Sums are made in 16 fixed lanes, and nothing is contracted, so
// every instruction set gives the same bits, and rows are batch-invariant.

#include "rows.h"

#include "threads.h"

namespace {

constexpr int LANES = 16;
constexpr long MANY = 1 << 15;  // numbers that are worth a second thread
constexpr long PART = 1 << 12;  // numbers that a thread activates at a time

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINE Floats splat(float x) { return Floats{} + x; }

INLINE Floats load(const uint16_t* from, long n) {
  Halves bits{};
  std::memcpy(&bits, from, n >= LANES ? sizeof bits : n * sizeof *from);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

INLINE Floats load(const float* from, long n) {
  Floats x{};
  std::memcpy(&x, from, n >= LANES ? sizeof x : n * sizeof *from);
  return x;
}

// To nearest even; NaN becomes NaN.
INLINE void store(uint16_t* to, Floats x, long n) {
  const Words bits = (Words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Halves half = __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0, Halves);
  std::memcpy(to, &half, n >= LANES ? sizeof half : n * sizeof *to);
}

INLINE float sum_of(Floats x) {
  float sum = 0;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) sum += x[i];
  return sum;
}

// Numbers behind the end count as `mean`.
INLINE Floats centred(const uint16_t* x, long n, float mean) {
  Floats some = load(x, n) - mean;
  for (long i = n; i < LANES; ++i) some[i] = 0;
  return some;
}

struct Norming {
  const RowNorm* norm;
  const uint16_t *x, *residual;
  float scale;
  uint16_t* y;
  long x_stride, y_stride, M, n, rows;  // rows: that a thread takes at a time
  std::atomic<long> next{0};
};

EVERY_ISA void norm_row(const RowNorm* norm, const uint16_t* x, const uint16_t* residual, float scale, uint16_t* y,
                        long n) {
  float mean = 0, factor = 1;
  if (norm) {
    Floats sums{};
    for (long i = 0; norm->is_centred && i < n; i += LANES) sums += load(x + i, n - i);
    mean = sum_of(sums) / (float)n;
    sums = Floats{};
    for (long i = 0; i < n; i += LANES) {
      const Floats some = centred(x + i, n - i, mean);
      sums += some * some;
    }
    factor = 1.f / std::sqrt(sum_of(sums) / (float)n + (float)norm->eps);
  }
  for (long i = 0; i < n; i += LANES) {
    Floats some = load(x + i, n - i);
    if (norm) some = (some - mean) * factor;
    if (norm && norm->weight) some *= load(norm->weight + i, n - i);
    if (norm && norm->bias) some += load(norm->bias + i, n - i);
    if (residual) some = load(residual + i, n - i) + some * scale;
    store(y + i, some, n - i);
  }
}

void norm_rows(void* data) {
  Norming& w = *(Norming*)data;
  for (long row; (row = w.next.fetch_add(w.rows)) < w.M;)
    for (long i = row; i < std::min(row + w.rows, w.M); ++i)
      norm_row(w.norm, w.x + i * w.x_stride, w.residual ? w.residual + i * w.n : nullptr, w.scale, w.y + i * w.y_stride,
               w.n);
}

// e^x, from 2^-126 to 2^126 times a number near 1.
INLINE Floats exponential(Floats x) {
  const Floats most = splat(126.f);
  Floats scaled = x * 1.44269504f;
  scaled = scaled > most ? most : scaled < -most ? -most : scaled;
  const Floats shifted = scaled + 12582912.f, whole = shifted - 12582912.f;  // at 1.5 · 2^23 a float has no fraction
  const Floats r = scaled - whole;                                           // in [-½, ½]: 2^r by its series
  Floats p = splat(1.3333558e-3f);
  for (const float c : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) p = p * r + c;
  return p * (Floats)(((Whole)shifted - 0x4b400000 + 127) << 23);
}

INLINE Floats sigmoid(Floats x) { return 1.f / (1.f + exponential(-x)); }

// 1 + erf(x / √2), which is that of -x without cancellation below 0: Hastings 1955, within 3e-7.
INLINE Floats one_and_erf(Floats x) {
  const Floats size = x < 0.f ? -x : x, t = 1.f / (1.f + size * (0.3275911f * 0.70710678f));
  Floats p = splat(1.061405429f);
  for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = p * t + c;
  const Floats rest = p * t * exponential(-0.5f * x * x);
  return x < 0.f ? rest : 2.f - rest;
}

struct Activating {
  int kind;
  float positive, negative;
  uint16_t* x;
  long n;
  std::atomic<long> next{0};
};

INLINE Floats activated(const Activating& w, Floats x) {
  const Floats none{};
  switch (w.kind) {
    case 0: return x * sigmoid(x);
    case 1: return x * sigmoid(1.59576912f * (x + 0.044715f * (x * x * x)));
    case 2: return 0.5f * x * one_and_erf(x);
    case 3: return x < none ? none : x;
    case 4: return x < none ? none : x * x;
    default: {
      const Floats least = splat(-1e-6f), below = x > least ? least : x;
      const Floats above = w.positive * x * x;
      return 0.5f * x + (x > none ? above : (exponential(below) - 1.f - x) * w.negative);
    }
  }
}

EVERY_ISA void activate_part(const Activating& w, long first, long end) {
  for (long i = first; i < end; i += LANES) store(w.x + i, activated(w, load(w.x + i, end - i)), end - i);
}

void activate(void* data) {
  Activating& w = *(Activating*)data;
  for (long first; (first = w.next.fetch_add(PART)) < w.n;) activate_part(w, first, std::min(first + PART, w.n));
}

EVERY_ISA void clip_part(uint16_t* x, long n, float limit) {
  const Floats most = splat(limit);
  for (long i = 0; i < n; i += LANES) {
    const Floats some = load(x + i, n - i);
    store(x + i, some > most ? most : some < -most ? -most : some, n - i);
  }
}

}  // namespace

void clip_numbers(uint16_t* x, long n, float limit) { clip_part(x, n, limit); }

extern "C" {

void infer_norm_rows(const RowNorm* norm, const uint16_t* x, long x_stride, const uint16_t* residual, float scale,
                     uint16_t* y, long y_stride, long M, long n, int threads) {
  Norming norming{norm, x, residual, scale, y, x_stride, y_stride, M, n, std::max(1L, PART / n)};
  run_threads(norm_rows, &norming, M * n < MANY ? 1 : threads);
}

void infer_activate(int activation, float positive, float negative, uint16_t* x, long n, int threads) {
  Activating activating{activation, positive, negative, x, n};
  run_threads(activate, &activating, n < MANY ? 1 : threads);
}

}  // extern "C"
