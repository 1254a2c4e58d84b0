// The kernels of an instruction set as one record. An isa/*.cpp includes it behind its kernels.
#pragma once

#include "dispatch.h"

namespace {

// `Bfloat16`, `Int8`: the ways in which attention multiplies what is in caches of these.
template <class Bfloat16, class Int8>
constexpr IsaKernels kernels_with(const char* name, bool (*runs_here)()) {
  IsaKernels made{};
  made.name = name;
  made.runs_here = runs_here;
  made.float32 = attention::run_item<attention::Float32<float>>;
  made.bfloat16 = attention::run_item<Bfloat16>;
  made.int8 = attention::run_item<Int8>;
  made.write_int8 = attention::write_bytes;
  made.linear = made.blocks = &linear::KERNELS;
  made.draw = sampling::draw;
  made.find_top = sampling::find_top;
  made.rotate_heads = rotary::rotate_heads;
  return made;
}

// Of sets that multiply bfloat16 as float32; `Bytes`: the way over bytes, which has that for the rest.
template <template <class> class Bytes>
constexpr IsaKernels float32_kernels(const char* name, bool (*runs_here)()) {
  using Widened = attention::Float32<uint16_t>;
  return kernels_with<Widened, Bytes<Widened>>(name, runs_here);
}

}  // namespace
