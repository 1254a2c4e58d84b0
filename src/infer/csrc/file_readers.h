// A block of a GGUF file, of any type that kernels read: its codes and multiples, and its numbers.
#pragma once

#include "blocks.h"
#include "file_blocks.h"

namespace linear {
namespace {

constexpr long MOST_INPUTS = 256;  // of a block

struct Block {  // of one row, whatever its type: 32 or 256 inputs
  uint8_t codes[MOST_INPUTS];
  uint16_t scale, minimum;  // float16; scale: or an exponent of 2, larger by 128; minimum: or the byte z
  uint8_t multiples[16], minima[8];
};

// 12 bytes of 6-bit numbers: 8 multiples and 8 minima.
inline void read_six_bits(const uint8_t* from, Block& to) {
  for (int i = 0; i < 4; ++i) {
    to.multiples[i] = from[i] & 63;
    to.minima[i] = from[i + 4] & 63;
    to.multiples[i + 4] = (uint8_t)((from[i + 8] & 15) | (from[i] >> 6) << 4);
    to.minima[i + 4] = (uint8_t)((from[i + 8] >> 4) | (from[i + 4] >> 6) << 4);
  }
}

inline void put(Block& to, uint16_t scale, uint16_t minimum, const Codes& codes) {
  to.scale = scale, to.minimum = minimum;
  std::memcpy(to.codes, &codes, sizeof codes);
}

// A minimum is subtracted here and added in files.
constexpr uint16_t SIGN = 0x8000;

inline void read_q4_0(const uint8_t* from, Block& to) { put(to, read_half(from), 0, nibbles(from + 2)); }

inline void read_q4_1(const uint8_t* from, Block& to) {
  put(to, read_half(from), read_half(from + 2) ^ SIGN, nibbles(from + 4));
}

inline void read_q5_0(const uint8_t* from, Block& to) { put(to, read_half(from), 0, five_bits(from + 2, from + 6)); }

inline void read_q5_1(const uint8_t* from, Block& to) {
  put(to, read_half(from), read_half(from + 2) ^ SIGN, five_bits(from + 4, from + 8));
}

inline void read_q8_0(const uint8_t* from, Block& to) {
  to.scale = read_half(from);
  for (int i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 0x80;
}

inline void read_iq4_nl(const uint8_t* from, Block& to) { put(to, read_half(from), 0, nibbles(from + 2)); }

inline void read_mxfp4(const uint8_t* from, Block& to) { put(to, from[0], 0, nibbles(from + 1)); }

inline void read_zeroed(long inputs, int bits, const uint8_t* from, Block& to) {
  to.scale = read_half(from), to.minimum = from[2], from += 4;
  for (long i = 0; i < inputs; i += 32, from += bits * 4) {
    if (bits == 8) {
      std::memcpy(to.codes + i, from, 32);
      continue;
    }
    const Codes codes = nibbles(from);
    std::memcpy(to.codes + i, &codes, sizeof codes);
  }
}

inline void read_iq4_xs(const uint8_t* from, Block& to) {
  to.scale = read_half(from);
  const uint16_t high = read_half(from + 2);
  for (int i = 0; i < 8; ++i) {
    const int low = from[4 + i / 2] >> 4 * (i % 2) & 15;
    to.multiples[i] = (uint8_t)((low | (high >> 2 * i & 3) << 4) - 32);
    const Codes codes = nibbles(from + 8 + i * 16);
    std::memcpy(to.codes + i * 32, &codes, sizeof codes);
  }
}

// Two bits of each of 128 numbers: 32 bytes have those of 32 numbers in a row at bit 0, of the next 32 at bit 2, …
inline void read_two_bits(const uint8_t* from, uint8_t* to) {
  for (int part = 0; part < 4; ++part)
    for (int i = 0; i < 32; ++i) to[part * 32 + i] = from[i] >> 2 * part & 3;
}

inline void read_q2_k(const uint8_t* from, Block& to) {
  std::memcpy(to.multiples, from, 16);  // and minima, in the high halves
  for (int half = 0; half < 2; ++half) read_two_bits(from + 16 + half * 32, to.codes + half * 128);
  to.scale = read_half(from + 80), to.minimum = read_half(from + 82);
}

inline void read_q3_k(const uint8_t* from, Block& to) {
  const uint8_t *high = from, *scales = from + 96;
  for (int half = 0; half < 2; ++half) read_two_bits(from + 32 + half * 32, to.codes + half * 128);
  for (int part = 0; part < 8; ++part)
    for (int i = 0; i < 32; ++i) to.codes[part * 32 + i] |= (uint8_t)((high[i] >> part & 1) << 2);
  for (int i = 0; i < 16; ++i) {
    const int four = scales[i % 8] >> (i < 8 ? 0 : 4) & 15, two = scales[8 + i % 4] >> 2 * (i / 4) & 3;
    to.multiples[i] = (uint8_t)((four | two << 4) - 32);
  }
  to.scale = read_half(from + 108);
}

inline void read_q4_k(const uint8_t* from, Block& to) {
  to.scale = read_half(from), to.minimum = read_half(from + 2);
  read_six_bits(from + 4, to);
  const uint8_t* low = from + 16;
  for (int part = 0; part < 4; ++part)
    for (int i = 0; i < 32; ++i) {
      to.codes[part * 64 + i] = low[part * 32 + i] & 15;
      to.codes[part * 64 + 32 + i] = low[part * 32 + i] >> 4;
    }
}

inline void read_q5_k(const uint8_t* from, Block& to) {
  to.scale = read_half(from), to.minimum = read_half(from + 2);
  read_six_bits(from + 4, to);
  const uint8_t *high = from + 16, *low = from + 48;
  for (int part = 0; part < 4; ++part)
    for (int i = 0; i < 32; ++i) {
      to.codes[part * 64 + i] = (uint8_t)((low[part * 32 + i] & 15) | (high[i] >> 2 * part & 1) << 4);
      to.codes[part * 64 + 32 + i] = (uint8_t)(low[part * 32 + i] >> 4 | (high[i] >> (2 * part + 1) & 1) << 4);
    }
}

inline void read_q6_k(const uint8_t* from, Block& to) {
  for (int part = 0; part < 2; ++part) {
    const uint8_t *low = from + part * 64, *high = from + 128 + part * 32;
    uint8_t* codes = to.codes + part * 128;
    for (int i = 0; i < 32; ++i) {
      codes[i] = (uint8_t)((low[i] & 15) | (high[i] & 3) << 4);
      codes[i + 32] = (uint8_t)((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      codes[i + 64] = (uint8_t)(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      codes[i + 96] = (uint8_t)(low[i + 32] >> 4 | (high[i] >> 6) << 4);
    }
  }
  std::memcpy(to.multiples, from + 192, 16);
  to.scale = read_half(from + 208);
}

inline void read_block(BlockType type, const uint8_t* from, Block& to) {
  switch (type) {
    case BlockType::Q4_0: return read_q4_0(from, to);
    case BlockType::Q4_1: return read_q4_1(from, to);
    case BlockType::Q5_0: return read_q5_0(from, to);
    case BlockType::Q5_1: return read_q5_1(from, to);
    case BlockType::Q8_0: return read_q8_0(from, to);
    case BlockType::Q2_K: return read_q2_k(from, to);
    case BlockType::Q3_K: return read_q3_k(from, to);
    case BlockType::Q4_K: return read_q4_k(from, to);
    case BlockType::Q5_K: return read_q5_k(from, to);
    case BlockType::Q6_K: return read_q6_k(from, to);
    case BlockType::IQ4_NL: return read_iq4_nl(from, to);
    case BlockType::IQ4_XS: return read_iq4_xs(from, to);
    case BlockType::MXFP4: return read_mxfp4(from, to);
    case BlockType::U4_32: return read_zeroed(32, 4, from, to);
    case BlockType::U4_64: return read_zeroed(64, 4, from, to);
    case BlockType::U4_128: return read_zeroed(128, 4, from, to);
    case BlockType::U8_128: return read_zeroed(128, 8, from, to);
    case BlockType::NONE: return;
  }
}

// The numbers of a block as files define them, [file_inputs].
inline void numbers_of(const BlockFormat& format, const Block& block, float* to) {
  const int offset = format.offset_bits < 0 ? 0 : 1 << format.offset_bits;
  const float scale = float_of(block.scale), minimum = format.has_minima ? float_of(block.minimum) : 0.f;
  for (long first = 0; first < format.file_inputs; first += format.group, to += format.group) {
    const uint8_t multiple = block.multiples[first / format.group];
    float a = scale, b = minimum;
    switch (format.multiples) {
      case Multiples::HALVES: break;
      case Multiples::EXPONENTS: a = std::ldexp(1.f, block.scale - 128); break;
      case Multiples::ZEROS: b = scale * (float)(int8_t)block.minimum; break;
      case Multiples::NIBBLES: a = scale * (float)(multiple & 15), b = minimum * (float)(multiple >> 4); break;
      case Multiples::BYTES:
        a = scale * (float)(format.has_minima ? multiple : (int8_t)multiple);
        b = format.has_minima ? minimum * (float)block.minima[first / format.group] : 0.f;
        break;
    }
    for (int i = 0; i < format.group; ++i) {
      const int code = block.codes[first + i];
      const int number = format.table == Table::NONE ? code : TABLES[(int)format.table][code];
      to[i] = a * (float)(number - offset) - b;
    }
  }
}

}  // namespace
}  // namespace linear
