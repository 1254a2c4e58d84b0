// Kernels for AVX-512 with BF16 and VNNI: AMD since Zen 4, Intel Cooper Lake.

#define INFER_VECTORS "avx512_bf16.h"
#include "dispatch.h"

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../attention_strips.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

END_TARGET

namespace {
bool runs_here() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
}  // namespace

extern const IsaKernels avx512_bf16_kernels;
const IsaKernels avx512_bf16_kernels = {
    "avx512_bf16",
    runs_here,
    attention::run_item<attention::Float32<float>>,
    attention::run_item<attention::Pairs>,
    attention::run_item<attention::ByteVectors<attention::Pairs>>,
    attention::run_item<attention::Strips>,
    attention::write_bytes,
    attention::Strips::write,
    &linear::KERNELS,
    sampling::draw,
    rotary::rotate_heads,
    nullptr,
    nullptr,
};
