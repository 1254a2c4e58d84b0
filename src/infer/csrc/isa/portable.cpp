// Kernels without any instruction set: the definition of what others must give, and what runs where nothing else
// does.

#include "dispatch.h"

#include "../attention_item.h"
#include "../draw_row.h"
#include "../rotary_heads.h"

namespace {
bool runs_here() { return true; }
}  // namespace

extern const IsaKernels portable_kernels;
const IsaKernels portable_kernels = {
    "portable",
    runs_here,
    attention::run_item<attention::Float32<float>>,
    attention::run_item<attention::Float32<uint16_t>>,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    sampling::draw,
    rotary::rotate_heads,
    nullptr,
    nullptr,
};
