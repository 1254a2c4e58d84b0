// NEON with products of bytes (dotprod). See vectors.h.
#pragma once
#define HAS_DOT_PRODUCTS 1
#include "neon.h"
