// Head norms and rotary embedding of heads in bfloat16, in vectors of 16 numbers that the compiler makes of what
// the instruction set has. Sums are made in 16 fixed lanes, so every set gives the same bits, and tokens are
// batch-invariant. An isa/*.cpp includes it.
#pragma once

#include "rotary.h"

namespace rotary {
namespace {

constexpr int LANES = 16;
constexpr long HEADS = 32;  // whose norms are found together

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINE Floats widened(Words bits) { return (Floats)(bits << 16); }

// To nearest even. NaN stays NaN: every one here was made of bfloat16s or by the processor, so the
// lower half of its bits is 0 and nothing is carried into the sign.
INLINE Words narrowed(Floats x) {
  const Words bits = (Words)x;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// `n` or 16 elements; the others of 16 are left as they are.
template <typename T>
INLINE void copy(void* to, const void* from, long n) {
  if (n >= LANES)
    std::memcpy(to, from, LANES * sizeof(T));  // a size that is known is a register
  else
    std::memcpy(to, from, n * sizeof(T));
}

INLINE Floats load(const uint16_t* from, long n) {
  Halves bits{};
  copy<uint16_t>(&bits, from, n);
  return widened(__builtin_convertvector(bits, Words));
}

INLINE Floats load(const float* from, long n) {
  Floats x{};
  copy<float>(&x, from, n);
  return x;
}

INLINE void store(uint16_t* to, Floats x, long n) {
  const Halves bits = __builtin_convertvector(narrowed(x), Halves);
  copy<uint16_t>(to, &bits, n);
}

// What brings a head to the norm's length. Its own pass over a token's heads: no head waits for
// another one's square root.
INLINE float norm_factor(const Rotation& r, const uint16_t* x) {
  Floats sums{};
  for (long i = 0; i < r.dim; i += LANES) {
    const Floats some = load(x + i, r.dim - i);
    sums += some * some;
  }
  alignas(64) float lanes[LANES];
  std::memcpy(lanes, &sums, sizeof lanes);
  const float* l = lanes;
  const auto four = [l](int i) { return (l[i] + l[i + 8]) + (l[i + 4] + l[i + 12]); };
  const float sum = (four(0) + four(2)) + (four(1) + four(3));
  return 1.f / std::sqrt(sum / r.dim + r.eps);
}

// The norm's result is bfloat16 in the models' own code; so it is here.
INLINE Floats normed(Floats x, float factor, Floats norm) { return widened(narrowed(x * factor * norm)); }

// What is left of numbers in bfloat16 behind a product.
INLINE Floats times(Floats x, Floats factor) { return widened(narrowed(x)) * factor; }

INLINE void rotate(const Rotation& r, const uint16_t* from, uint16_t* to, long token, const float* norm, float factor,
                   bool grows) {
  const long half = r.dim / 2;
  for (long i = 0; i < half; i += LANES) {
    const long n = half - i;
    Floats first = load(from + i, n), second = load(from + half + i, n);
    if (norm) {
      first = normed(first, factor, load(norm + i, n));
      second = normed(second, factor, load(norm + half + i, n));
    }
    if (r.cos) {
      const Floats cos = load(r.cos + token * half + i, n), sin = load(r.sin + token * half + i, n);
      const Floats turned = first * cos - second * sin;
      second = second * cos + first * sin;
      first = turned;
    }
    if (grows && r.factor)
      first = times(first, load(r.factor + i, n)), second = times(second, load(r.factor + half + i, n));
    if (grows && r.growth)
      first = times(first, Floats{} + r.growth[token]), second = times(second, Floats{} + r.growth[token]);
    store(to + i, first, n);
    store(to + half + i, second, n);
  }
}

void rotate_heads(const Rotation& r, const uint16_t* from, uint16_t* to, long heads, long token, int which) {
  const float* norm = r.norms[which];
  const bool grows = which == 0 && (r.factor || r.growth);
  for (; heads > 0; heads -= HEADS, from += HEADS * r.dim, to += HEADS * r.dim) {
    const long count = heads < HEADS ? heads : HEADS;
    float factors[HEADS];
    for (long head = 0; norm && head < count; ++head) factors[head] = norm_factor(r, from + head * r.dim);
    for (long head = 0; head < count; ++head)
      rotate(r, from + head * r.dim, to + head * r.dim, token, norm, factors[head], grows);
  }
}

}  // namespace
}  // namespace rotary
