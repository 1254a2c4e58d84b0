// Kernels for AVX-512 (F, BW, DQ, VL): Intel Skylake-X.

#define INFER_VECTORS "avx512.h"
#include "cpu_checks.h"
#include "dispatch.h"

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

END_TARGET

#include "kernel_table.h"

extern const IsaKernels avx512_kernels;
constexpr IsaKernels avx512_kernels = float32_kernels<attention::ByteVectors>("avx512", has_avx512);
