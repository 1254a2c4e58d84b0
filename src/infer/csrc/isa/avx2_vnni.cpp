// Kernels for AVX2 with VNNI of 256 bits: Intel since 2021 (12th generation), AMD since 2024.

#define INFER_VECTORS "avx2_vnni.h"
#include "dispatch.h"

#ifdef INFER_EVEX_VNNI
TARGET("avx2,fma,avx512f,avx512vl,avx512vnni")
#else
TARGET("avx2,fma,f16c,avxvnni")
#endif

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
#ifdef INFER_EVEX_VNNI
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
  // CPUID.7.1.EAX bit 4, for which compilers have names only since late.
  unsigned a = 7, b, c = 1, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (a >> 4 & 1);
#endif
}
}  // namespace

extern const IsaKernels avx2_vnni_kernels;
const IsaKernels avx2_vnni_kernels = {
    "avx2_vnni",
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
