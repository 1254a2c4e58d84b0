// A token of each row of logits, drawn: temperature, top-p and min-p, as runner/sampler.py says it.
//
// A row of a vocabulary stays in its core's cache from the logits to the token; its result depends on
// that row alone, sums are made in one order, and every copy of draw_isa.h gives the same bits.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "cpu.h"

namespace {

constexpr int LANES = 16;
constexpr long BLOCK = 1024;  // whose sum is kept, to look into one of them only

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
constexpr Words INDEX = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Wish {  // as sampler.py packs it
  double temperature, top_p, min_p;
  uint64_t row, seed, position;
};

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

namespace portable {
#include "draw_isa.h"
}
#ifdef X86
TARGET("avx2")
namespace avx2 {
#include "draw_isa.h"
}
END_TARGET
TARGET("avx2,avx512f,avx512dq")
namespace avx512 {
#include "draw_isa.h"
}
END_TARGET
#endif

decltype(&portable::draw) fastest() {
#ifdef X86
  if (may_use(Level::AVX512) && has_avx512()) return avx512::draw;
  if (may_use(Level::AVX2) && __builtin_cpu_supports("avx2")) return avx2::draw;
#endif
  return portable::draw;
}

struct Drawing {
  const float *rows, *tops;
  long stride, n, num_tops;
  const Wish* wishes;
  long count;
  int64_t* tokens;
  std::atomic<long> next{0};
};

void draw_rows(void* data) {
  const auto draw = fastest();
  static thread_local Memory memory;
  Drawing& d = *(Drawing*)data;
  float* weights = (float*)memory.reserve(4 * d.n + 8 * ceil_div(d.n, BLOCK));
  for (long i; (i = d.next++) < d.count;) {
    const Wish& wish = d.wishes[i];
    const float* tops = d.tops + wish.row * d.num_tops;
    const float top = *std::max_element(tops, tops + d.num_tops);
    // Where nothing is allowed nothing can be drawn; the caller says so.
    d.tokens[i] = top == -INFINITY ? 0
                                   : draw(d.rows + wish.row * d.stride, d.n, top, wish, weights, (double*)(weights + d.n));
  }
}

}  // namespace

extern "C" {

// rows [R, n] of logits without NaN, n a multiple of 16; tops [R, num_tops]: the largest of each row is
// among them; wishes, tokens [count]: which rows, and how.
void infer_draw(const float* rows, const float* tops, long stride, long n, long num_tops, const Wish* wishes,
                long count, int64_t* tokens, void* parallel, int threads) {
  Drawing drawing{rows, tops, stride, n, num_tops, wishes, count, tokens};
  run_threads((Parallel)parallel, draw_rows, &drawing, (int)std::min<long>(threads, count));
}

}  // extern "C"
