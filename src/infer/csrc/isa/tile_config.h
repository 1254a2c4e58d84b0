// The shape of the tile registers, as AMX reads it from memory.
#pragma once

#include <cstdint>

struct TileConfig {  // all zero: the tiles are not in use
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "the processor reads 64 bytes");
