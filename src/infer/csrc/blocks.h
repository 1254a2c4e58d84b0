// Weights in the blocks of GGUF files, as linear layers hold them: the file's own codes and scales in the order
// of panels, without another rounding.
//
// A weight is a · (u - offset) - b, where u is a number without a sign. Files have its code of 2 to 6 or 8 bits, which
// is u, or the place of u in a table:
//
//   Q8_0, Q5_0, Q4_0   a: float16 of each 32 inputs                          b: 0         offset 128, 16, 8
//   Q5_1, Q4_1         a: float16 of each 32 inputs                          b: likewise  offset 0
//   IQ4_NL             a: float16 of each 32 inputs; table of 8 bits         b: 0         offset 128
//   MXFP4              a: a power of two of each 32 inputs; table of 5 bits  b: 0         offset 16
//   Q4_K, Q5_K         a: float16 of 256 inputs × 6 bits of each 32          b: likewise  offset 0
//   Q2_K               a: float16 of 256 inputs × 4 bits of each 16          b: likewise  offset 0
//   Q6_K, Q3_K         a: float16 of 256 inputs × 8 bits (signed) of 16      b: 0         offset 32, 4
//   IQ4_XS             a: float16 of 256 inputs × 8 bits (signed) of 32      b: 0         offset 128, table of IQ4_NL
//   U4_N, U8_N         a: float16 of each N inputs                           b: a · z     offset 0, 128
//
// The last ones are no types of GGUF files: quantised safetensors have one scale and one whole number z that means 0
// (less the offset) for 32, 64 or 128 inputs. Here their blocks are a, z in a byte, a byte without meaning, and for
// each 32 inputs the codes of a block of Q4_0 or bytes.
//
// The layout: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has that of files. Here a panel of 32
// columns is a sequence of units of 64, 128 or 256 inputs. A unit begins with what its columns have once (a's and b's
// float16, 32 of each, or those of a of each N inputs and then the bytes z), then come its steps of 64 inputs:
//
//   multiples  of each 32 inputs (or 16) one for each column: float16, bytes or exponents; after those of a those of b,
//              or both in one byte
//   codes      lines of 16 columns × 4 inputs. Of 4 to 6 bits 16 lines with 4 of them: low halves of bytes are columns
//              0 … 15, high ones 16 … 31. Of 8 bits, two tiles of such lines, one for each half of the columns. Of 2
//              and 3 bits 8 lines with 2 of them, in each line two that follow: its bytes have both halves of the
//              columns of the first one, then those of the second
//   high bits  of 3 and 5 bits, for each 16 inputs a line whose bytes have bit 2 · t + h of line t and half h; of 6
//              bits, for each 16 inputs and half a line whose bytes have two bits at 2 · t of line t
#pragma once

#include "common.h"

namespace linear {

// A type of blocks, under its number in GGUF files if they have it.
enum class BlockType : int {
  NONE = -1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  IQ4_XS = 23,
  MXFP4 = 39,
  U4_32 = 256,  // from here on no file's
  U4_64,
  U4_128,
  U8_128
};

// What the inputs of a group share, beside what a unit of 256 inputs has once.
enum class Multiples {
  HALVES,     // float16; a unit has nothing once
  EXPONENTS,  // a byte with a sign, of 2; a unit has nothing once
  BYTES,      // a byte each of a, with a sign if there is no b, and of b
  NIBBLES,    // a byte: low half of a, high one of b
  ZEROS,      // nothing; a unit has float16 and a byte z for each block of the file
};

// What codes mean: numbers that are multiplied, each larger by the format's offset.
enum class Table { NONE, IQ4, E2M1 };

constexpr uint8_t TABLES[][16] = {
    {},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},  // IQ4_NL's, larger by 128
    {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},             // twice e2m1, larger by 16
};

struct BlockFormat {
  BlockType type;
  int bits;         // of a code in memory
  int offset_bits;  // the offset is 1 << offset_bits; none: -1
  int group;        // inputs that share a multiple
  Multiples multiples;
  bool has_minima;   // b is not 0
  long file_inputs;  // of a block in the file
  long file_bytes;   // of it
  Table table = Table::NONE;

  constexpr bool has_units() const { return multiples == Multiples::BYTES || multiples == Multiples::NIBBLES; }
  constexpr bool has_zeros() const { return multiples == Multiples::ZEROS; }
  constexpr long unit_steps() const { return has_units() ? 4 : has_zeros() && file_inputs > 32 ? 2 : 1; }
  constexpr long unit_blocks() const { return unit_steps() * 64 / file_inputs; }
  constexpr long head_bytes() const {  // of a unit
    if (has_zeros()) return ceil_div(unit_blocks() * 32 * 3, 64) * 64;
    return !has_units() ? 0 : has_minima ? 128 : 64;
  }
  constexpr long multiple_bytes() const {
    if (has_zeros()) return 0;
    const long one = 64 / group * 32 * (multiples == Multiples::HALVES ? 2 : 1);
    return one * (has_minima && multiples != Multiples::NIBBLES ? 2 : 1);
  }
  constexpr int low_bits() const { return bits == 8 ? 8 : bits < 4 ? 2 : 4; }  // of a code, that lie in lines of codes
  constexpr long code_bytes() const { return low_bits() * 256; }
  constexpr long step_bytes() const { return multiple_bytes() + code_bytes() + 256 * (bits - low_bits()); }
  constexpr long unit_bytes() const { return head_bytes() + unit_steps() * step_bytes(); }
  constexpr long steps_of(long K) const { return ceil_div(K, 64 * unit_steps()) * unit_steps(); }
  constexpr int number_bits() const {  // of what is multiplied
    return table == Table::IQ4 ? 8 : table == Table::E2M1 ? 5 : bits;
  }
  constexpr bool multiplies_as(
      const BlockFormat& other) const {  // once its codes are numbers, and its multiples floats
    return number_bits() == other.number_bits() && offset_bits == other.offset_bits && group == other.group &&
           has_minima == other.has_minima;
  }
};

constexpr BlockFormat BLOCK_FORMATS[] = {
    {BlockType::Q4_0, 4, 3, 32, Multiples::HALVES, false, 32, 18},
    {BlockType::Q4_1, 4, -1, 32, Multiples::HALVES, true, 32, 20},
    {BlockType::Q5_0, 5, 4, 32, Multiples::HALVES, false, 32, 22},
    {BlockType::Q5_1, 5, -1, 32, Multiples::HALVES, true, 32, 24},
    {BlockType::Q8_0, 8, 7, 32, Multiples::HALVES, false, 32, 34},
    {BlockType::Q2_K, 2, -1, 16, Multiples::NIBBLES, true, 256, 84},
    {BlockType::Q3_K, 3, 2, 16, Multiples::BYTES, false, 256, 110},
    {BlockType::Q4_K, 4, -1, 32, Multiples::BYTES, true, 256, 144},
    {BlockType::Q5_K, 5, -1, 32, Multiples::BYTES, true, 256, 176},
    {BlockType::Q6_K, 6, 5, 16, Multiples::BYTES, false, 256, 210},
    {BlockType::IQ4_NL, 4, 7, 32, Multiples::HALVES, false, 32, 18, Table::IQ4},
    {BlockType::IQ4_XS, 4, 7, 32, Multiples::BYTES, false, 256, 136, Table::IQ4},
    {BlockType::MXFP4, 4, 4, 32, Multiples::EXPONENTS, false, 32, 17, Table::E2M1},
    {BlockType::U4_32, 4, -1, 32, Multiples::ZEROS, true, 32, 20},
    {BlockType::U4_64, 4, -1, 32, Multiples::ZEROS, true, 64, 36},
    {BlockType::U4_128, 4, -1, 32, Multiples::ZEROS, true, 128, 68},
    {BlockType::U8_128, 8, 7, 32, Multiples::ZEROS, true, 128, 132},
};
constexpr int NUM_BLOCK_FORMATS = sizeof BLOCK_FORMATS / sizeof BLOCK_FORMATS[0];

constexpr int block_index(BlockType type) {  // in the table; NUM_BLOCK_FORMATS: it has no such type
  int index = 0;
  while (index < NUM_BLOCK_FORMATS && BLOCK_FORMATS[index].type != type) ++index;
  return index;
}

constexpr const BlockFormat* block_format(BlockType type) {
  const int index = block_index(type);
  return index < NUM_BLOCK_FORMATS ? &BLOCK_FORMATS[index] : nullptr;
}

struct BlockPanel {  // of a weight in blocks
  const BlockFormat* format;
  long offset;  // bytes from the weight's beginning
};

}  // namespace linear
