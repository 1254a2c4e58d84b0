// Head norms and rotary embedding, on heads of q or k in bfloat16.
//
// In vectors of 16 numbers; which copy of rotary_isa.h runs is chosen when it is first called. Sums
// are made in 16 fixed lanes, so every copy gives the same bits, and a token's result is the same in
// any company.

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

decltype(&turn_heads) fastest() {
#ifdef X86
  if (has_avx512()) return avx512::turn_heads;
  if (__builtin_cpu_supports("avx2")) return avx2::turn_heads;
#endif
  return portable::turn_heads;
}

}  // namespace

void turn_heads(const Rotation& rotation, const uint16_t* from, uint16_t* to, long heads, long token,
                int which) {
  static const auto turn = fastest();
  turn(rotation, from, to, heads, token, which);
}
