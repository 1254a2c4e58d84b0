// AVX-512 with VNNI: sums of four products of bytes in one instruction. See vectors.h.
#pragma once
#define HAS_BYTE_PRODUCTS 1
#include "avx512.h"
