// Which instruction sets are in this library, run on this CPU, and may be used.
//
// setup.py defines INFER_<NAME> for each file isa/*.cpp that the compiler could compile. INFER_ISA limits all
// kernels from the start, infer_set_isa since then.

#include "dispatch.h"

#ifndef INFER_ABI_DIGEST
#define INFER_ABI_DIGEST "unknown"
#endif

extern const IsaKernels amx_kernels, avx512_bf16_kernels, avx512_vnni_kernels, avx512_kernels, avx2_vnni_kernels,
    avx2_kernels, neon_i8mm_bf16_kernels, neon_dotprod_kernels, neon_kernels, portable_kernels;

namespace {

const IsaKernels* const ISAS[] = {
// best first
#ifdef INFER_AMX
    &amx_kernels,
#endif
#ifdef INFER_AVX512_BF16
    &avx512_bf16_kernels,
#endif
#ifdef INFER_AVX512_VNNI
    &avx512_vnni_kernels,
#endif
#ifdef INFER_AVX512
    &avx512_kernels,
#endif
#ifdef INFER_AVX2_VNNI
    &avx2_vnni_kernels,
#endif
#ifdef INFER_AVX2
    &avx2_kernels,
#endif
#ifdef INFER_NEON_I8MM_BF16
    &neon_i8mm_bf16_kernels,
#endif
#ifdef INFER_NEON_DOTPROD
    &neon_dotprod_kernels,
#endif
#ifdef INFER_NEON
    &neon_kernels,
#endif
    &portable_kernels,
};
constexpr int NUM_ISAS = sizeof ISAS / sizeof *ISAS;

struct Limit {
  int first;               // of those that may be used
  const IsaKernels* best;  // of those that run here
};

int index_of(const char* name) {  // a name that is none (Python refuses it) limits nothing
  for (int i = 0; name && i < NUM_ISAS; ++i)
    if (!std::strcmp(ISAS[i]->name, name)) return i;
  return 0;
}

const IsaKernels* best_from(int first) {
  while (!ISAS[first]->runs_here()) ++first;  // the portable ones do
  return ISAS[first];
}

std::atomic<int> first_usable{index_of(std::getenv("INFER_ISA"))};
std::atomic<const IsaKernels*> best{best_from(first_usable)};

}  // namespace

const IsaKernels& best_isa() { return *best.load(std::memory_order_relaxed); }

const IsaKernels* usable_isa(const char* name) {
  for (int i = first_usable; i < NUM_ISAS; ++i)
    if (!std::strcmp(ISAS[i]->name, name)) return ISAS[i]->runs_here() ? ISAS[i] : nullptr;
  return nullptr;
}

extern "C" {

const char* infer_abi_digest(void) { return INFER_ABI_DIGEST; }

void infer_set_isa(const char* name) {
  first_usable = index_of(name);
  best = best_from(first_usable);
}

int infer_instruction_sets(char* names, int size) {
  names[0] = 0;
  for (const IsaKernels* isa : ISAS)
    if (isa->runs_here() && (int)(std::strlen(names) + std::strlen(isa->name)) + 2 < size)
      std::strcat(std::strcat(names, isa->name), " ");
#ifdef X86
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0;
#else
  return 0;
#endif
}

}  // extern "C"
