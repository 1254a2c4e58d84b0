// Kernels for NEON with products of matrices of bytes and of bfloat16: Neoverse V1 and N2, Apple M2, and what came later.

#define INFER_VECTORS "neon_i8mm_bf16.h"
#include "arm_checks.h"
#include "dispatch.h"

TARGET("arch=armv8.2-a+dotprod+i8mm+bf16")

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

END_TARGET

#include "kernel_table.h"

extern const IsaKernels neon_i8mm_bf16_kernels;
constexpr IsaKernels neon_i8mm_bf16_kernels = float32_kernels<attention::ByteVectors>("neon_i8mm_bf16", has_i8mm_bf16);
