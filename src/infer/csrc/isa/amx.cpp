// Kernels for AMX: Intel since Sapphire Rapids.

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INFER_VECTORS "amx.h"
#include "dispatch.h"

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")

#include "../attention_item.h"
#include "../attention_bytes_tiles.h"
#include "../draw_row.h"
#include "../rotary_heads.h"
#include "../linear_tiles.h"
#include "../linear_run.h"

END_TARGET

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

bool runs_here() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && may_use_tiles();
}
}  // namespace

extern const IsaKernels amx_kernels;
const IsaKernels amx_kernels = {
    "amx",
    runs_here,
    attention::run_item<attention::Float32<float>>,
    attention::run_item<attention::Tiles>,
    attention::run_item<attention::Bytes>,
    nullptr,
    attention::write_bytes,
    nullptr,
    &linear::KERNELS,
    sampling::draw,
    rotary::rotate_heads,
    save_tiles,
    restore_tiles,
};
