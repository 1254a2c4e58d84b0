// Kernels for AVX-512 (F, BW, DQ, VL): Intel Skylake-X.

#define INFER_VECTORS "avx512.h"
#include "dispatch.h"

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

END_TARGET

namespace {
bool runs_here() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
}  // namespace

extern const IsaKernels avx512_kernels;
const IsaKernels avx512_kernels = {
    "avx512",
    runs_here,
    attention::run_item<attention::Float32<float>>,
    attention::run_item<attention::Float32<uint16_t>>,
    attention::run_item<attention::ByteVectors<attention::Float32<uint16_t>>>,
    nullptr,
    attention::write_bytes,
    nullptr,
    &linear::KERNELS,
    sampling::draw,
    rotary::rotate_heads,
    nullptr,
    nullptr,
};
