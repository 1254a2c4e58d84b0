// Kernels without any instruction set: the definition of what others must give, and what runs where nothing else
// does.

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

extern const IsaKernels portable_kernels;
constexpr IsaKernels portable_kernels = float32_kernels<attention::ByteVectors>("portable", runs_here);
