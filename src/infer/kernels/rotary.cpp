// Head norms and rotary embedding in place, on the q and k parts of a fused projection in bfloat16.
//
// In vectors of 16 numbers; which copy of rotary_isa.h runs is chosen when it is first called. Sums
// are made in 16 fixed lanes, so every copy gives the same bits, and a token's result is the same in
// any company.

#include <atomic>
#include <cmath>
#include <cstring>

#include "cpu.h"

namespace {

constexpr int LANES = 16;
constexpr long ITEM = 8;    // tokens
constexpr long HEADS = 32;  // whose norms are found together

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct Rotation {
  uint16_t* x;                // [tokens, heads · dim], rows `stride` apart
  const float *cos, *sin;     // [tokens, dim / 2]
  const float *norms[2];      // of q and k, [dim]; null: none
  long tokens, stride, dim, heads, q_heads;
  float eps;
  std::atomic<long> next{0};
};

namespace portable {
#include "rotary_isa.h"
}
#ifdef X86
TARGET("avx2")
namespace avx2 {
#include "rotary_isa.h"
}
END_TARGET
TARGET("avx2,avx512f,avx512bw")
namespace avx512 {
#include "rotary_isa.h"
}
END_TARGET
#endif

using Turn = void (*)(Rotation*);

Turn fastest() {
#ifdef X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
    return avx512::turn_tokens;
  if (__builtin_cpu_supports("avx2")) return avx2::turn_tokens;
#endif
  return portable::turn_tokens;
}

void body(void* data) {
  static const Turn turn_tokens = fastest();
  turn_tokens((Rotation*)data);
}

}  // namespace

extern "C" {

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
