// Kernels for AVX2 with VNNI of 256 bits: Intel since 2021 (12th generation), AMD since 2024.

#define INFER_VECTORS "avx2_vnni.h"
#include "cpu_checks.h"
#include "dispatch.h"

#ifdef INFER_EVEX_VNNI
TARGET("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")
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

#include "kernel_table.h"

namespace {
bool runs_here() {
#ifdef INFER_EVEX_VNNI
  return has_avx512_vnni();
#else
  return has_avx_vnni();
#endif
}
}  // namespace

extern const IsaKernels avx2_vnni_kernels;
constexpr IsaKernels avx2_vnni_kernels = float32_kernels<attention::ByteVectors>("avx2_vnni", runs_here);
