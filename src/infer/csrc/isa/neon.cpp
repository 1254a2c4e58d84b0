// Kernels for NEON: all 64-bit ARM.

#define INFER_VECTORS "neon.h"
#include "dispatch.h"

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

#include "kernel_table.h"

namespace {
bool runs_here() { return true; }
}  // namespace

extern const IsaKernels neon_kernels;
constexpr IsaKernels neon_kernels = float32_kernels<attention::ByteVectors>("neon", runs_here);
