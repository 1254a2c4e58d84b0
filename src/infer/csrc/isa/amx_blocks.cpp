// Linear layers in blocks for AMX: few rows on vectors, whose products are those of avx512_vnni.cpp, many on the tile
// registers. A file of its own beside amx.cpp, since layers in bfloat16 and int8 have other products under the same
// names.

#define INFER_VECTORS "amx.h"
#define HAS_BLOCK_TILES 1
#include "dispatch.h"

#include "../block_products.h"

extern const linear::BlockProducts avx512_vnni_block_products;
#define BLOCK_PRODUCTS avx512_vnni_block_products

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")

#include "../linear_block_tiles.h"
#include "../linear_run.h"

END_TARGET

extern const linear::Kernels amx_block_kernels;
constexpr linear::Kernels amx_block_kernels = linear::KERNELS;
