// Kernels for AVX2 with FMA: Intel since 2013, AMD since 2015.

#define INFER_VECTORS "avx2.h"
#include "cpu_checks.h"
#include "dispatch.h"

TARGET("avx2,fma,f16c")

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

END_TARGET

#include "kernel_table.h"

extern const IsaKernels avx2_kernels;
constexpr IsaKernels avx2_kernels = float32_kernels<attention::ByteVectors>("avx2", has_avx2);
