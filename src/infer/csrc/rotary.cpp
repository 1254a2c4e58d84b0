// Head norms and rotary embedding, on heads of q or k in bfloat16.
//
// In vectors of 16 numbers; which copy of rotary_isa.h runs is chosen when it is first called. Sums
// are made in 16 fixed lanes, so every copy gives the same bits, and a token's result is the same in
// any company.

#include <algorithm>

#include "rotary.h"

#include <cmath>
#include <cstring>

#include "cpu.h"

namespace {

constexpr int LANES = 16;
constexpr long HEADS = 32;  // whose norms are found together

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

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

decltype(&turn_heads) fastest(Level limit) {
#ifdef X86
  if (limit >= Level::AVX512 && has_avx512()) return avx512::turn_heads;
  if (limit >= Level::AVX2 && __builtin_cpu_supports("avx2")) return avx2::turn_heads;
#endif
  return portable::turn_heads;
}

}  // namespace

void turn_heads(const Rotation& rotation, const uint16_t* from, uint16_t* to, long heads, long token,
                int which) {
  // Found once: this is called for each token of each layer.
  static const decltype(&turn_heads) COPIES[] = {fastest(Level::PORTABLE), fastest(Level::AVX2), fastest(Level::AVX512)};
  const auto turn = COPIES[std::min<int>((int)isa_limit.load(std::memory_order_relaxed), 2)];
  turn(rotation, from, to, heads, token, which);
}
