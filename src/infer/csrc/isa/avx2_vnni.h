// AVX2 with VNNI of 256 bits (AVX-VNNI). Tests define INFER_EVEX_VNNI to run the same instructions in the
// encoding of AVX-512, on a CPU that has only that. See vectors.h.
#pragma once
#define HAS_BYTE_PRODUCTS 1
#include "avx2.h"
