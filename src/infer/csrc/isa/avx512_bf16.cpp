// Kernels for AVX-512 with BF16 and VNNI: AMD since Zen 4, Intel Cooper Lake. Blocks are bytes, whose products are
// those of avx512_vnni.cpp.

#define INFER_VECTORS "avx512_bf16.h"
#include "cpu_checks.h"
#include "dispatch.h"

#include "../block_products.h"

extern const linear::BlockProducts avx512_vnni_block_products;
#define BLOCK_PRODUCTS avx512_vnni_block_products

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../attention_strips.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

END_TARGET

#include "kernel_table.h"

namespace {
constexpr IsaKernels kernels() {
  using attention::Pairs, attention::Strips;
  IsaKernels made = kernels_with<Pairs, attention::ByteVectors<Pairs>>("avx512_bf16", has_avx512_bf16);
  made.strips = attention::run_item<Strips>;
  made.write_strip = Strips::write;
  return made;
}
}  // namespace

extern const IsaKernels avx512_bf16_kernels;
constexpr IsaKernels avx512_bf16_kernels = kernels();
