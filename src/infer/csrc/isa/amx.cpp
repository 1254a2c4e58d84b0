// Kernels for AMX: Intel since Sapphire Rapids.

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INFER_VECTORS "amx.h"
#include "cpu_checks.h"
#include "dispatch.h"

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")

#include "../attention_item.h"
#include "../attention_bytes_tiles.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_tiles.h"
#include "../linear_run.h"

END_TARGET

#include "kernel_table.h"

extern const linear::Kernels amx_block_kernels;

namespace {
bool may_use_tiles() {  // Linux gives the tiles' memory to processes that ask
#if defined(INFER_TILES)
  return true;
#elif defined(__linux__)
  unsigned a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned NEEDED = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tile, int8
  if ((d & NEEDED) != NEEDED) return false;
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
  return false;
#endif
}

bool runs_here() { return has_avx512_bf16() && may_use_tiles(); }

constexpr IsaKernels kernels() {
  IsaKernels made = kernels_with<attention::Tiles, attention::Bytes>("amx", runs_here);
  made.blocks = &amx_block_kernels;
  made.save_tiles = save_tiles;
  made.restore_tiles = restore_tiles;
  return made;
}
}  // namespace

extern const IsaKernels amx_kernels;
constexpr IsaKernels amx_kernels = kernels();
