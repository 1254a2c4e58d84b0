// The instruction sets of this library, and the kernels that each has.
#pragma once

#include "../attention.h"
#include "../draw.h"
#include "../linear.h"
#include "../rotary.h"
#include "tile_config.h"

struct IsaKernels {
  const char* name;
  bool (*runs_here)();
  // Attention over caches in float32, in bfloat16, in int8, and in bfloat16 in strips; null: none.
  attention::RunItem float32, bfloat16, int8, strips;
  attention::WriteCell write_int8, write_strip;  // of the caches in strips
  const linear::Kernels *linear, *blocks;        // blocks: of weights in blocks; null: none
  sampling::DrawToken draw;
  sampling::FindTop find_top;
  rotary::RotateHeads rotate_heads;
  // Of the tile registers, which other libraries use too; null: not in use.
  void (*save_tiles)(TileConfig*);
  void (*restore_tiles)(const TileConfig*);
};

// An instruction set by its name if it runs here and the limit allows it; else null.
const IsaKernels* usable_isa(const char* name);

// The best of those that are usable: for kernels that give the same bits with all of them.
const IsaKernels& best_isa();
