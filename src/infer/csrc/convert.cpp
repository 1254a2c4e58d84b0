// Blocks of GGUF files made blocks of Q8_0, or numbers.
//
// Types whose numbers Q8_0 holds exactly keep them. Others are rounded to it: in each 32 numbers to whole multiples of
// a 127th of the largest one. A conversion is one pass over memory.

#include "file_readers.h"
#include "threads.h"

namespace {

using namespace linear;

constexpr int INPUTS = 32, HELD_BYTES = 34;  // of a block of Q8_0: a float16 and 32 whole numbers
constexpr long BLOCKS_AT_ONCE = 1024;

// The types that have a way of their own to Q8_0, by their numbers in GGUF files; and numbers.
enum Type { F32 = 0, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, IQ4_NL = 20 };

constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

using Floats = float __attribute__((vector_size(64)));

INLINE void write_block(const uint8_t* half, const Codes& codes, uint8_t* to) {
  std::memcpy(to, half, 2);
  std::memcpy(to + 2, &codes, sizeof codes);
}

// Numbers [32] to a block of Q8_0. The largest magnitude is found among the bits, in which a NaN is the largest.
INLINE void round_block(const float* numbers, uint8_t* to) {
  int32_t bits[INPUTS], most = 0;
  std::memcpy(bits, numbers, sizeof bits);
  for (int i = 0; i < INPUTS; ++i) most = std::max(most, bits[i] & 0x7fffffff);
  float largest;
  std::memcpy(&largest, &most, 4);
  const float scale = largest / 127.f, inverse = scale == 0.f ? 0.f : 1.f / scale;
  const uint16_t half = half_of(scale);
  std::memcpy(to, &half, 2);
  // At 1.5 * 2^23 a float has no fraction, so a sum is rounded to nearest even and its lowest byte is the whole number.
  float sums[INPUTS];
  for (int i = 0; i < INPUTS; ++i) sums[i] = numbers[i] * inverse + 12582912.f;
  std::memcpy(bits, sums, sizeof bits);
  for (int i = 0; i < INPUTS; ++i) to[2 + i] = (uint8_t)bits[i];
}

INLINE void scale_and_round(const Codes& codes, const uint8_t* halves, uint8_t* to) {
  const float scale = float_of(read_half(halves)), minimum = float_of(read_half(halves + 2));
  const Floats scaled[2] = {__builtin_convertvector(codes.low, Floats) * scale + minimum,
                            __builtin_convertvector(codes.high, Floats) * scale + minimum};
  float numbers[INPUTS];
  std::memcpy(numbers, scaled, sizeof numbers);
  round_block(numbers, to);
}

INLINE void convert_block(Type type, const uint8_t* from, uint8_t* to) {
  Codes codes{};
  float numbers[INPUTS];
  switch (type) {
    case Q4_1: return scale_and_round(nibbles(from + 4), from, to);
    case Q5_1: return scale_and_round(five_bits(from + 4, from + 8), from, to);
    case Q4_0: codes = nibbles(from + 2); return write_block(from, {codes.low - 8, codes.high - 8}, to);
    case Q5_0: codes = five_bits(from + 2, from + 6); return write_block(from, {codes.low - 16, codes.high - 16}, to);
    case IQ4_NL:
      codes = nibbles(from + 2);
      for (int i = 0; i < 16; ++i)
        codes.low[i] = (uint8_t)IQ4[codes.low[i]], codes.high[i] = (uint8_t)IQ4[codes.high[i]];
      return write_block(from, codes, to);
    default: std::memcpy(numbers, from, sizeof numbers); return round_block(numbers, to);
  }
}

struct Conversion {
  Type type;
  const BlockFormat* format;  // null: of numbers
  const uint8_t* source;
  uint8_t* to;
  bool to_numbers;
  long blocks, block_bytes, found_bytes;  // found_bytes: of what a block becomes
  std::atomic<long> next{0};
};

template <Type type>
EVERY_ISA void convert_blocks(const uint8_t* from, uint8_t* to, long count, long block_bytes) {
  for (long i = 0; i < count; ++i, from += block_bytes) convert_block(type, from, to + i * HELD_BYTES);
}

// By way of the blocks' numbers.
EVERY_ISA void decode_blocks(const Conversion& c, const uint8_t* from, uint8_t* to, long count) {
  const BlockFormat& format = *c.format;
  float numbers[MOST_INPUTS];
  Block block{};
  for (long i = 0; i < count; ++i, from += format.file_bytes, to += c.found_bytes) {
    read_block(format.type, from, block);
    numbers_of(format, block, numbers);
    if (c.to_numbers)
      std::memcpy(to, numbers, (size_t)c.found_bytes);
    else
      for (long k = 0; k < format.file_inputs; k += INPUTS) round_block(numbers + k, to + k / INPUTS * HELD_BYTES);
  }
}

void convert_part(const Conversion& c, long first, long count) {
  const uint8_t* from = c.source + first * c.block_bytes;
  uint8_t* to = c.to + first * c.found_bytes;
  if (c.to_numbers) return decode_blocks(c, from, to, count);
  switch (c.type) {
    case F32: return convert_blocks<F32>(from, to, count, c.block_bytes);
    case Q4_0: return convert_blocks<Q4_0>(from, to, count, c.block_bytes);
    case Q4_1: return convert_blocks<Q4_1>(from, to, count, c.block_bytes);
    case Q5_0: return convert_blocks<Q5_0>(from, to, count, c.block_bytes);
    case Q5_1: return convert_blocks<Q5_1>(from, to, count, c.block_bytes);
    case IQ4_NL: return convert_blocks<IQ4_NL>(from, to, count, c.block_bytes);
    default: return decode_blocks(c, from, to, count);
  }
}

void convert_parts(void* data) {
  Conversion& c = *(Conversion*)data;
  for (long first; (first = c.next.fetch_add(BLOCKS_AT_ONCE)) < c.blocks;)
    convert_part(c, first, std::min(BLOCKS_AT_ONCE, c.blocks - first));
}

}  // namespace

extern "C" {

int infer_blocks_convert(const uint8_t* source, int type, uint8_t* to, int wanted, long blocks, int threads) {
  const BlockFormat* format = block_format((BlockType)type);
  const bool to_numbers = wanted == F32;
  if ((!format && (type != F32 || to_numbers)) || (wanted != Q8_0 && !to_numbers)) return 0;
  const long inputs = format ? format->file_inputs : INPUTS, number_bytes = inputs * (long)sizeof(float);
  const long block_bytes = format ? format->file_bytes : number_bytes;
  const long found_bytes = to_numbers ? number_bytes : inputs / INPUTS * HELD_BYTES;
  Conversion conversion{(Type)type, format, source, to, to_numbers, blocks, block_bytes, found_bytes};
  if (blocks > 0) run_threads(convert_parts, &conversion, blocks * inputs < 4 * BLOCKS_AT_ONCE * INPUTS ? 1 : threads);
  return 1;
}

}  // extern "C"
