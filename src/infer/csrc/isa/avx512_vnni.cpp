// Kernels for AVX-512 with VNNI: Intel since Cascade Lake and Ice Lake.

#define INFER_VECTORS "avx512_vnni.h"
#include "cpu_checks.h"
#include "dispatch.h"

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

#include "../attention_item.h"
#include "../attention_bytes_vectors.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_vectors.h"
#include "../linear_run.h"

END_TARGET

#include "kernel_table.h"

extern const linear::BlockProducts avx512_vnni_block_products;
constexpr linear::BlockProducts avx512_vnni_block_products = linear::OWN_PRODUCTS;

extern const IsaKernels avx512_vnni_kernels;
constexpr IsaKernels avx512_vnni_kernels = float32_kernels<attention::ByteVectors>("avx512_vnni", has_avx512_vnni);
