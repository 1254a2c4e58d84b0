// Drawing tokens: what the driver (draw.cpp) and the kernels of each instruction set (draw_row.h) share.
#pragma once

#include "common.h"

namespace sampling {

constexpr long BLOCK = 1024;  // numbers whose sum is kept, to look into one of them only

// From `row` [n], whose largest is `top`; `weights` [n] and `sums` [n / BLOCK, rounded up] are room to work in.
using DrawToken = int64_t (*)(const float* row, long n, float top, const DrawRow& wanted, float* weights, double* sums);

// The largest number of a row [n], and of each of its blocks into `tops` [n / BLOCK, rounded up]; NaN if there is one.
using FindTop = float (*)(const float* row, long n, double* tops);

}  // namespace sampling
