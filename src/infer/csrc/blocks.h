// Weights in the blocks of GGUF files, as linear layers hold them: the file's own codes and scales in the order
// of panels, without another rounding.
//
// A weight is a · (u - offset) - b, where u is a code without a sign of 4, 5, 6 or 8 bits:
//
//   Q8_0, Q5_0, Q4_0   a: float16 of each 32 inputs                          b: 0         offset 128, 16, 8
//   Q5_1, Q4_1         a: float16 of each 32 inputs                          b: likewise  offset 0
//   Q4_K, Q5_K         a: float16 of 256 inputs × 6 bits of each 32          b: likewise  offset 0
//   Q6_K               a: float16 of 256 inputs × 8 bits (signed) of 16      b: 0         offset 32
//
// The layout: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has that of files. Here a panel of 32
// columns is a sequence of units of 64 or 256 inputs. A unit begins with what its columns have once (a's and b's
// float16, 32 of each), then come its steps of 64 inputs:
//
//   multiples  of each 32 inputs (Q6_K: 16) one for each column: float16, or bytes; after those of a those of b
//   codes      16 lines of 16 columns × 4 inputs: low halves of bytes are columns 0 … 15, high ones 16 … 31. Of 8
//              bits, two tiles of such lines, one for each half of the columns
//   high bits  of 5 bits, for each 16 inputs a line whose bytes have bit 2 · t + h of line t and half h; of 6 bits,
//              for each 16 inputs and half a line whose bytes have two bits at 2 · t of line t
#pragma once

#include "common.h"

namespace linear {

// A type of blocks, under its number in GGUF files.
enum class BlockType : int {
  NONE = -1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14
};

struct BlockFormat {
  BlockType type;
  int bits;          // of a code
  int offset_bits;   // the offset is 1 << offset_bits; none: -1
  int group;         // inputs that share a multiple
  bool has_halves;   // multiples are float16, and a unit has nothing once
  bool has_minima;   // b is not 0
  long file_inputs;  // of a block in the file
  long file_bytes;   // of it

  constexpr long unit_steps() const { return has_halves ? 1 : 4; }
  constexpr long head_bytes() const { return has_halves ? 0 : has_minima ? 128 : 64; }  // of a unit
  constexpr long multiple_bytes() const { return 64 / group * 32 * (has_halves ? 2 : 1) * (has_minima ? 2 : 1); }
  constexpr long code_bytes() const { return bits == 8 ? 2048 : 1024; }
  constexpr long step_bytes() const { return multiple_bytes() + code_bytes() + (bits == 8 ? 0 : 256 * (bits - 4)); }
  constexpr long unit_bytes() const { return head_bytes() + unit_steps() * step_bytes(); }
  constexpr long steps_of(long K) const { return ceil_div(K, 64 * unit_steps()) * unit_steps(); }
};

constexpr BlockFormat BLOCK_FORMATS[] = {
    {BlockType::Q4_0, 4, 3, 32, true, false, 32, 18},    {BlockType::Q4_1, 4, -1, 32, true, true, 32, 20},
    {BlockType::Q5_0, 5, 4, 32, true, false, 32, 22},    {BlockType::Q5_1, 5, -1, 32, true, true, 32, 24},
    {BlockType::Q8_0, 8, 7, 32, true, false, 32, 34},    {BlockType::Q4_K, 4, -1, 32, false, true, 256, 144},
    {BlockType::Q5_K, 5, -1, 32, false, true, 256, 176}, {BlockType::Q6_K, 6, 5, 16, false, false, 256, 210},
};

constexpr const BlockFormat* block_format(BlockType type) {
  for (const BlockFormat& format : BLOCK_FORMATS)
    if (format.type == type) return &format;
  return nullptr;
}

struct BlockPanel {  // of a weight in blocks
  const BlockFormat* format;
  long offset;  // bytes from the weight's beginning
};

}  // namespace linear
