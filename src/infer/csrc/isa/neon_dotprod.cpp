// Kernels for NEON with products of bytes: Neoverse N1, Cortex-A75, Apple A11, and what came later.

#define INFER_VECTORS "neon_dotprod.h"
#include "arm_checks.h"
#include "dispatch.h"

TARGET("arch=armv8.2-a+dotprod")

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

END_TARGET

#include "kernel_table.h"

extern const IsaKernels neon_dotprod_kernels;
constexpr IsaKernels neon_dotprod_kernels = float32_kernels<attention::ByteVectors>("neon_dotprod", has_dot_products);
