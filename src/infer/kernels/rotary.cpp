// Head norms and rotary embedding in place, on the q and k parts of a fused projection in bfloat16.
//
// Portable loops that the compiler turns into vectors; the copies for wider instruction sets are
// chosen when the library is loaded. Sums are made in 16 fixed lanes, so every copy gives the same
// bits, and a token's result is the same in any company.

#include <atomic>
#include <cmath>
#include <cstring>

#include "cpu.h"

#if defined(X86) && defined(__linux__) && defined(__GNUC__)
#define EVERY_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_ISA
#endif

namespace {

constexpr int LANES = 16, MOST_DIM = 512;
constexpr long ITEM = 8;  // tokens

struct Rotation {
  uint16_t* x;                // [tokens, heads · dim], rows `stride` apart
  const float *cos, *sin;     // [tokens, dim / 2]
  const float *norms[2];      // of q and k, [dim]; null: none
  long tokens, stride, dim, heads, q_heads;
  float eps;
  std::atomic<long> next{0};
};

INLINE float widen(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

INLINE uint16_t narrow(float x) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

INLINE void turn(const Rotation& r, uint16_t* x, long token, const float* norm) {
  const long half = r.dim / 2;
  const float *cos = r.cos + token * half, *sin = r.sin + token * half;
  float wide[MOST_DIM];
  for (long i = 0; i < r.dim; ++i) wide[i] = widen(x[i]);
  if (norm) {
    float lanes[LANES] = {};
    long i = 0;
    for (; i + LANES <= r.dim; i += LANES)
      for (int j = 0; j < LANES; ++j) lanes[j] += wide[i + j] * wide[i + j];
    for (; i < r.dim; ++i) lanes[i % LANES] += wide[i] * wide[i];
    float sum = 0;
    for (int j = 0; j < LANES; ++j) sum += lanes[j];
    const float factor = 1.f / std::sqrt(sum / r.dim + r.eps);
    // The norm's result is bfloat16 in the models' own code; so it is here.
    for (long j = 0; j < r.dim; ++j) wide[j] = widen(narrow(wide[j] * factor * norm[j]));
  }
  for (long i = 0; i < half; ++i) {
    const float first = wide[i], second = wide[i + half];
    x[i] = narrow(first * cos[i] - second * sin[i]);
    x[i + half] = narrow(second * cos[i] + first * sin[i]);
  }
}

EVERY_ISA void turn_tokens(Rotation* r) {
  for (long begin; (begin = r->next.fetch_add(ITEM)) < r->tokens;)
    for (long token = begin; token < begin + ITEM && token < r->tokens; ++token)
      for (long head = 0; head < r->heads; ++head)
        turn(*r, r->x + token * r->stride + head * r->dim, token, r->norms[head >= r->q_heads]);
}

void body(void* data) { turn_tokens((Rotation*)data); }

}  // namespace

extern "C" {

int infer_rotate_most_dim() { return MOST_DIM; }

// x [tokens, heads · dim] bfloat16, rows `stride` elements apart, in place; `heads` counts those of
// q, then those of k; q_norm and k_norm [dim] may be null.
void infer_rotate(uint16_t* x, long tokens, long stride, long dim, long heads, long q_heads,
                  const float* cos, const float* sin, const float* q_norm, const float* k_norm,
                  float eps, void* parallel, int threads) {
  Rotation rotation{x, cos, sin, {q_norm, k_norm}, tokens, stride, dim, heads, q_heads, eps, {}};
  const bool tiny = tokens * heads * dim < 1 << 16;  // less work than waking a thread
  run_threads((Parallel)parallel, body, &rotation, tiny ? 1 : threads);
}

}  // extern "C"
