// AVX-512 with BF16, and the tile registers. Tests name a header in INFER_TILES that stands for them in
// software. See vectors.h.
#pragma once

#include "avx512_bf16.h"
#include "tile_config.h"

namespace {

#ifdef INFER_TILES
#include INFER_TILES
#endif

inline void save_tiles(TileConfig* config) {
  FENCE();
  _tile_storeconfig(config);
  FENCE();
}
inline void restore_tiles(const TileConfig* config) {
  FENCE();
  if (config->palette)
    _tile_loadconfig(config);
  else
    _tile_release();
  FENCE();
}

}  // namespace
