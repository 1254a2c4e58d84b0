// The vector functions of the instruction set that a file is compiled for; without one, of none.
//
// Kernels are written over these names. A file of an instruction set (isa/*.cpp) names its header in
// INFER_VECTORS and includes the kernels within TARGET, so each of them exists once for each set, with
// internal linkage. All headers give the same functions:
//
//   vf         W floats. fma, vmax, set1, bits (a load of any 4-byte words), load, store, hmax, hsum, widen.
//   F16, I16   16 floats or whole numbers of 32 bits, in one vector or several. Sums and maxima over lanes are
//              made in one order everywhere, so what is built of these has the same bits with every set.
//   vb         4 · W bytes (linear layers only).
#pragma once

#include "../common.h"

#ifndef INFER_VECTORS
#define INFER_VECTORS "portable.h"
#endif
#include INFER_VECTORS

namespace {

constexpr int W = sizeof(vf) / 4;
typedef int32_t vi __attribute__((vector_size(sizeof(vf))));

INLINE vf load(const float* p) { return bits(p); }
INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }

#if VECTOR_WIDTH > 4
INLINE vf fused(vf a, vf b, vf c) {
  return fma(a, b, c);
}  // with one rounding, as `fma` has everywhere but in portable
#endif

INLINE vf word(const void* from) {  // one in every lane
  float word;
  __builtin_memcpy(&word, from, 4);
  return set1(word);
}

}  // namespace
