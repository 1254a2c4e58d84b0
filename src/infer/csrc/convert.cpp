// Blocks of GGUF files in types that no kernel reads, made blocks of those that kernels read.
//
// Types whose numbers Q8_0 or Q6_K holds exactly keep them. Others are rounded to Q8_0: in each 32 numbers to whole
// multiples of a 127th of the largest one. A conversion is one pass over memory.

#include "file_blocks.h"
#include "threads.h"

namespace {

constexpr int INPUTS = 32, HELD_BYTES = 34;  // of a block of Q8_0: a float16 and 32 whole numbers
constexpr int MANY_INPUTS = 256, Q3_K_BYTES = 110, Q6_K_BYTES = 210;
constexpr long BLOCKS_AT_ONCE = 1024;

// The types by their numbers in GGUF files.
enum Type { F32 = 0, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q3_K = 11, Q6_K = 14, IQ4_NL = 20 };

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

// Both types have a factor for 256 numbers and a multiple for each 16; those of Q3_K are smaller.
INLINE void convert_q3_k(const uint8_t* from, uint8_t* to) {
  const uint8_t *high = from, *low = from + 32, *scales = from + 96;
  uint8_t codes[MANY_INPUTS];  // those of Q3_K are 4 larger than the numbers, those of Q6_K are 32 larger
  for (int half = 0; half < 2; ++half)
    for (int part = 0; part < 4; ++part)
      for (int i = 0; i < 32; ++i)
        codes[half * 128 + part * 32 + i] =
            (uint8_t)(28 + (low[half * 32 + i] >> 2 * part & 3) + ((high[i] >> (half * 4 + part) & 1) << 2));
  for (int half = 0; half < 2; ++half) {
    const uint8_t* part = codes + half * 128;
    for (int i = 0; i < 64; ++i) to[half * 64 + i] = (uint8_t)((part[i] & 15) | (part[64 + i] & 15) << 4);
    for (int i = 0; i < 32; ++i)
      to[128 + half * 32 + i] =
          (uint8_t)(part[i] >> 4 | (part[32 + i] >> 4) << 2 | (part[64 + i] >> 4) << 4 | (part[96 + i] >> 4) << 6);
  }
  for (int i = 0; i < 16; ++i) {
    const int four = scales[i % 8] >> (i < 8 ? 0 : 4) & 15, two = scales[8 + i % 4] >> 2 * (i / 4) & 3;
    to[192 + i] = (uint8_t)((four | two << 4) - 32);
  }
  std::memcpy(to + 208, from + 108, 2);
}

struct Conversion {
  Type type;
  const uint8_t* source;
  uint8_t* to;
  long blocks, block_bytes;
  std::atomic<long> next{0};
};

template <Type type>
EVERY_ISA void convert_blocks(const uint8_t* from, uint8_t* to, long count, long block_bytes) {
  for (long i = 0; i < count; ++i, from += block_bytes) {
    if (type == Q3_K)
      convert_q3_k(from, to + i * Q6_K_BYTES);
    else
      convert_block(type, from, to + i * HELD_BYTES);
  }
}

void convert_part(const Conversion& c, long first, long count) {
  const uint8_t* from = c.source + first * c.block_bytes;
  uint8_t* to = c.to + first * (c.type == Q3_K ? Q6_K_BYTES : HELD_BYTES);
  switch (c.type) {
    case Q4_0: return convert_blocks<Q4_0>(from, to, count, c.block_bytes);
    case Q4_1: return convert_blocks<Q4_1>(from, to, count, c.block_bytes);
    case Q5_0: return convert_blocks<Q5_0>(from, to, count, c.block_bytes);
    case Q5_1: return convert_blocks<Q5_1>(from, to, count, c.block_bytes);
    case IQ4_NL: return convert_blocks<IQ4_NL>(from, to, count, c.block_bytes);
    case Q3_K: return convert_blocks<Q3_K>(from, to, count, c.block_bytes);
    default: return convert_blocks<F32>(from, to, count, c.block_bytes);
  }
}

void convert_parts(void* data) {
  Conversion& c = *(Conversion*)data;
  for (long first; (first = c.next.fetch_add(BLOCKS_AT_ONCE)) < c.blocks;)
    convert_part(c, first, std::min(BLOCKS_AT_ONCE, c.blocks - first));
}

// The bytes of a block of `type`, if it can be made `wanted`; else 0.
long block_bytes_of(int type, int wanted) {
  if (wanted == Q6_K) return type == Q3_K ? Q3_K_BYTES : 0;
  if (wanted != Q8_0) return 0;
  switch (type) {
    case F32: return INPUTS * sizeof(float);
    case Q4_0:
    case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    default: return 0;
  }
}

}  // namespace

extern "C" {

int infer_blocks_convert(const uint8_t* source, int type, uint8_t* to, int wanted, long blocks, int threads) {
  const long block_bytes = block_bytes_of(type, wanted);
  if (block_bytes && blocks > 0) {
    Conversion conversion{(Type)type, source, to, blocks, block_bytes};
    run_threads(convert_parts, &conversion, blocks < 4 * BLOCKS_AT_ONCE ? 1 : threads);
  }
  return block_bytes != 0;
}

}  // extern "C"
