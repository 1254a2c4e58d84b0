// Kernels for AVX2 with FMA: Intel since 2013, AMD since 2015.

#define INFER_VECTORS "avx2.h"
#include "dispatch.h"

TARGET("avx2,fma,f16c")

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
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
}  // namespace

extern const IsaKernels avx2_kernels;
const IsaKernels avx2_kernels = {
    "avx2",
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
