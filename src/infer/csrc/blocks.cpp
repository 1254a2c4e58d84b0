// Weights in the blocks of GGUF files: from a file's rows to panels, and from panels to numbers. blocks.h has both
// layouts.

#include "blocks.h"

#include "file_blocks.h"
#include "isa/dispatch.h"
#include "linear.h"

namespace {

using namespace linear;

constexpr long MOST_INPUTS = 256;  // of a block

struct Block {  // of one row, whatever its type: 32 or 256 inputs
  uint8_t codes[MOST_INPUTS];
  uint16_t scale, minimum;  // float16
  uint8_t multiples[16], minima[8];
};

// 12 bytes of 6-bit numbers: 8 multiples and 8 minima.
void read_six_bits(const uint8_t* from, Block& to) {
  for (int i = 0; i < 4; ++i) {
    to.multiples[i] = from[i] & 63;
    to.minima[i] = from[i + 4] & 63;
    to.multiples[i + 4] = (uint8_t)((from[i + 8] & 15) | (from[i] >> 6) << 4);
    to.minima[i + 4] = (uint8_t)((from[i + 8] >> 4) | (from[i + 4] >> 6) << 4);
  }
}

void put(Block& to, uint16_t scale, uint16_t minimum, const Codes& codes) {
  to.scale = scale, to.minimum = minimum;
  std::memcpy(to.codes, &codes, sizeof codes);
}

// A minimum is subtracted here and added in files.
constexpr uint16_t SIGN = 0x8000;

void read_q4_0(const uint8_t* from, Block& to) { put(to, read_half(from), 0, nibbles(from + 2)); }

void read_q4_1(const uint8_t* from, Block& to) {
  put(to, read_half(from), read_half(from + 2) ^ SIGN, nibbles(from + 4));
}

void read_q5_0(const uint8_t* from, Block& to) { put(to, read_half(from), 0, five_bits(from + 2, from + 6)); }

void read_q5_1(const uint8_t* from, Block& to) {
  put(to, read_half(from), read_half(from + 2) ^ SIGN, five_bits(from + 4, from + 8));
}

void read_q8_0(const uint8_t* from, Block& to) {
  to.scale = read_half(from);
  for (int i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 0x80;
}

void read_q4_k(const uint8_t* from, Block& to) {
  to.scale = read_half(from), to.minimum = read_half(from + 2);
  read_six_bits(from + 4, to);
  const uint8_t* low = from + 16;
  for (int part = 0; part < 4; ++part)
    for (int i = 0; i < 32; ++i) {
      to.codes[part * 64 + i] = low[part * 32 + i] & 15;
      to.codes[part * 64 + 32 + i] = low[part * 32 + i] >> 4;
    }
}

void read_q5_k(const uint8_t* from, Block& to) {
  to.scale = read_half(from), to.minimum = read_half(from + 2);
  read_six_bits(from + 4, to);
  const uint8_t *high = from + 16, *low = from + 48;
  for (int part = 0; part < 4; ++part)
    for (int i = 0; i < 32; ++i) {
      to.codes[part * 64 + i] = (uint8_t)((low[part * 32 + i] & 15) | (high[i] >> 2 * part & 1) << 4);
      to.codes[part * 64 + 32 + i] = (uint8_t)(low[part * 32 + i] >> 4 | (high[i] >> (2 * part + 1) & 1) << 4);
    }
}

void read_q6_k(const uint8_t* from, Block& to) {
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

void read_block(BlockType type, const uint8_t* from, Block& to) {
  switch (type) {
    case BlockType::Q4_0: return read_q4_0(from, to);
    case BlockType::Q4_1: return read_q4_1(from, to);
    case BlockType::Q5_0: return read_q5_0(from, to);
    case BlockType::Q5_1: return read_q5_1(from, to);
    case BlockType::Q8_0: return read_q8_0(from, to);
    case BlockType::Q4_K: return read_q4_k(from, to);
    case BlockType::Q5_K: return read_q5_k(from, to);
    case BlockType::Q6_K: return read_q6_k(from, to);
    case BlockType::NONE: return;
  }
}

uint16_t narrowed(float x) {  // to bfloat16, to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct BlockPacking {  // rows of a file that become columns from `column` on
  const Layer& layer;
  BlockType type;
  const uint8_t* source;
  long rows, stride, column;
  long first, end;  // panels
  std::atomic<long> next{0};
};

// Where a column's bytes lie in a step.
struct Place {
  int half, lane;

  long index() const { return half * 16 + lane; }
};

// Codes of a column, four for each of its lines [line, end) of a step.
void put_codes(const BlockFormat& format, uint8_t* to, Place place, const uint8_t* codes, long line, long end) {
  const auto add = [](uint8_t* at, uint32_t four) {
    uint32_t before;
    std::memcpy(&before, at, 4);
    before |= four;
    std::memcpy(at, &before, 4);
  };
  to += place.lane * 4;
  for (; line < end; ++line, codes += 4) {
    uint32_t four;
    std::memcpy(&four, codes, 4);
    if (format.bits == 8) {
      add(to + place.half * 1024 + line * 64, four);
      continue;
    }
    add(to + line * 64, (four & 0x0f0f0f0f) << 4 * place.half);
    const uint32_t high = four >> 4 & 0x0f0f0f0f;
    const long bit = line % 4 * 2, sixteen = line / 4;
    if (format.bits == 5) add(to + 1024 + sixteen * 64, high << (bit + place.half));
    if (format.bits == 6) add(to + 1024 + (sixteen * 2 + place.half) * 64, high << bit);
  }
}

// A block of 256 inputs: a unit of one column. The memory was zeros.
void put_column(const BlockFormat& format, char* unit, Place place, const Block& block) {
  uint8_t* at = (uint8_t*)unit;
  const long column = place.index();
  if (!format.has_halves) std::memcpy(at + column * 2, &block.scale, 2);
  if (!format.has_halves && format.has_minima) std::memcpy(at + 64 + column * 2, &block.minimum, 2);
  at += format.head_bytes();
  const int groups = 64 / format.group;
  for (long from = 0; from < 256; from += 64, at += format.step_bytes()) {
    for (int i = 0; i < groups && !format.has_halves; ++i) {
      at[i * 32 + column] = block.multiples[from / format.group + i];
      if (format.has_minima) at[(groups + i) * 32 + column] = block.minima[from / format.group + i];
    }
    put_codes(format, at + format.multiple_bytes(), place, block.codes + from, 0, 16);
  }
}

// A block of 32 inputs: the half of a step that belongs to `input`. `more` is added to its codes.
void put_half_step(const BlockFormat& format, char* step, Place place, Block& block, long input, int more) {
  const long group = input / 32 % 2;
  std::memcpy(step + (group * 32 + place.index()) * 2, &block.scale, 2);
  if (format.has_minima) std::memcpy(step + ((2 + group) * 32 + place.index()) * 2, &block.minimum, 2);
  for (int i = 0; i < 32; ++i) block.codes[i] = (uint8_t)(block.codes[i] + more);
  put_codes(format, (uint8_t*)step + format.multiple_bytes(), place, block.codes, group * 8, group * 8 + 8);
}

void pack_block_panel(const BlockPacking& p, long panel) {
  const Layer& layer = p.layer;
  const BlockFormat &format = *layer.panel_blocks[panel].format, &source = *block_format(p.type);
  char* to = layer.weight + layer.panel_blocks[panel].offset;
  const int more = format.offset_bits < 0 ? 0 : (1 << format.offset_bits) - (1 << source.offset_bits);
  Block block{};
  for (int half = 0; half < 2; ++half)
    for (int lane = 0; lane < 16; ++lane) {
      const long column = layer.gate ? half * layer.width + panel * 16 + lane : panel * SIDE + half * 16 + lane;
      const long column_end = layer.gate ? (half + 1) * layer.width : layer.N, row = column - p.column;
      if (row < 0 || row >= p.rows || column >= column_end) continue;
      const uint8_t* from = p.source + row * p.stride;
      const Place place{half, lane};
      for (long k = 0; k < layer.K; k += source.file_inputs, from += source.file_bytes) {
        read_block(p.type, from, block);
        if (format.has_halves)
          put_half_step(format, to + k / 64 * format.unit_bytes(), place, block, k, more);
        else
          put_column(format, to + k / 256 * format.unit_bytes(), place, block);
      }
    }
}

void pack_block_panels(void* data) {
  BlockPacking& p = *(BlockPacking*)data;
  for (long panel; (panel = p.first + p.next.fetch_add(1)) < p.end;) pack_block_panel(p, panel);
}

// The numbers of one column [K].
void read_column(const Layer& layer, long column, uint16_t* to) {
  const BlockPanel& panel = layer.panel_blocks[column / SIDE];
  const BlockFormat& format = *panel.format;
  const int half = (int)(column % SIDE / 16), lane = (int)(column % 16), index = (int)(column % SIDE);
  const int groups = 64 / format.group, offset = format.offset_bits < 0 ? 0 : 1 << format.offset_bits;
  const uint8_t* weight = (const uint8_t*)layer.weight + panel.offset;
  for (long k = 0; k < layer.K; k += 64) {
    const long step = k / 64;
    const uint8_t* unit = weight + step / format.unit_steps() * format.unit_bytes();
    const uint8_t* at = unit + format.head_bytes() + step % format.unit_steps() * format.step_bytes();
    const uint8_t *codes = at + format.multiple_bytes(), *high = codes + 1024;
    for (int i = 0; i < 64 && k + i < layer.K; ++i) {
      const int group = i / format.group, line = i / 4 % 4, sixteen = i / 16;
      const long byte = i / 4 * 64 + lane * 4 + i % 4, above = lane * 4 + i % 4;
      int code = format.bits == 8 ? codes[half * 1024 + byte] : codes[byte] >> 4 * half & 15;
      if (format.bits == 5) code |= (high[sixteen * 64 + above] >> (2 * line + half) & 1) << 4;
      if (format.bits == 6) code |= (high[(sixteen * 2 + half) * 64 + above] >> 2 * line & 3) << 4;
      float a, b = 0.f;
      if (format.has_halves) {
        a = float_of(read_half(at + (group * 32 + index) * 2));
        if (format.has_minima) b = float_of(read_half(at + ((groups + group) * 32 + index) * 2));
      } else {
        const uint8_t multiple = at[group * 32 + index];
        a = float_of(read_half(unit + index * 2)) * (float)(format.has_minima ? multiple : (int8_t)multiple);
        if (format.has_minima)
          b = float_of(read_half(unit + 64 + index * 2)) * (float)at[(groups + group) * 32 + index];
      }
      to[k + i] = narrowed(a * (float)(code - offset) - b);
    }
  }
}

struct Fitting {  // rows of bfloat16 that become rows of a file
  BlockType type;
  const uint16_t* source;
  long stride, rows, K, row_bytes;
  uint8_t* to;
  std::atomic<long> next{0};
};

void fit_rows(void* data) {
  Fitting& f = *(Fitting*)data;
  const auto fit_row = best_isa().linear->fit_row;
  for (long row; (row = f.next.fetch_add(1)) < f.rows;)
    fit_row(f.type, f.source + row * f.stride, f.K, f.to + row * f.row_bytes);
}

struct Reading {
  const Layer& layer;
  const int64_t* columns;
  long count;
  uint16_t* to;
  std::atomic<long> next{0};
};

void read_columns(void* data) {
  Reading& r = *(Reading*)data;
  for (long i; (i = r.next.fetch_add(1)) < r.count;) read_column(r.layer, r.columns[i], r.to + i * r.layer.K);
}

}  // namespace

extern "C" {

long infer_blocks_panel_bytes(int type, long K) {
  const BlockFormat* format = block_format((BlockType)type);
  return format ? format->steps_of(K) / format->unit_steps() * format->unit_bytes() : 0;
}

void infer_linear_pack_blocks(void* handle, const uint8_t* source, int type, long rows, long stride, long column,
                              int threads) {
  const Layer& layer = *(Layer*)handle;
  const long first = column / SIDE, end = ceil_div(column + rows, SIDE);
  BlockPacking packing{
      layer, (BlockType)type, source, rows, stride, column, layer.gate ? 0 : first, layer.gate ? layer.panels : end};
  run_threads(pack_block_panels, &packing, threads);
}

void infer_fit_blocks(int type, const uint16_t* source, long stride, long rows, long K, uint8_t* to, int threads) {
  const BlockFormat& format = *block_format((BlockType)type);
  Fitting fitting{(BlockType)type, source, stride, rows, K, ceil_div(K, format.file_inputs) * format.file_bytes, to};
  run_threads(fit_rows, &fitting, threads);
}

void infer_linear_columns(void* handle, const int64_t* columns, long count, uint16_t* to, int threads) {
  const Layer& layer = *(Layer*)handle;
  Reading reading{layer, columns, count, to};
  run_threads(read_columns, &reading, count < 8 ? 1 : threads);
}

}  // extern "C"
