// What layers.cpp needs of rows.cpp beside abi.h.
#pragma once

#include "common.h"

// Numbers [n] of bfloat16 of which none is larger than `limit` afterwards; NaN stays NaN.
void clip_numbers(uint16_t* x, long n, float limit);
