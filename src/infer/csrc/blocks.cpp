// Weights in the blocks of GGUF files: from a file's rows to panels, and from panels to numbers, also of bfloat16.
// blocks.h has both layouts of blocks.

#include "blocks.h"

#include "file_readers.h"
#include "isa/dispatch.h"
#include "linear.h"

namespace {

using namespace linear;

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
  SourcePanels panels{layer, column, rows};
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
    const long bit = line % 4 * 2, sixteen = line / 4;
    uint8_t* above = to + format.code_bytes();
    const uint32_t high = four >> format.low_bits() & 0x0f0f0f0f;
    switch (format.low_bits()) {
      case 8: add(to + place.half * 1024 + line * 64, four); break;
      case 4: add(to + line * 64, (four & 0x0f0f0f0f) << 4 * place.half); break;
      default: add(to + line / 2 * 64, (four & 0x03030303) << (line % 2 * 4 + place.half * 2)); break;
    }
    if (format.bits - format.low_bits() == 1) add(above + sixteen * 64, high << (bit + place.half));
    if (format.bits - format.low_bits() == 2) add(above + (sixteen * 2 + place.half) * 64, high << bit);
  }
}

// A block of 256 inputs: a unit of one column. The memory was zeros.
void put_column(const BlockFormat& format, char* unit, Place place, const Block& block) {
  uint8_t* at = (uint8_t*)unit;
  const long column = place.index();
  std::memcpy(at + column * 2, &block.scale, 2);
  if (format.has_minima) std::memcpy(at + 64 + column * 2, &block.minimum, 2);
  at += format.head_bytes();
  const int groups = 64 / format.group;
  for (long from = 0; from < 256; from += 64, at += format.step_bytes()) {
    for (int i = 0; i < groups; ++i) {
      at[i * 32 + column] = block.multiples[from / format.group + i];
      if (format.has_minima && format.multiples == Multiples::BYTES)
        at[(groups + i) * 32 + column] = block.minima[from / format.group + i];
    }
    put_codes(format, at + format.multiple_bytes(), place, block.codes + from, 0, 16);
  }
}

// A block of 32 inputs: the half of a step that belongs to `input`.
void put_half_step(const BlockFormat& format, char* step, Place place, const Block& block, long input) {
  const long group = input / 32 % 2;
  if (format.multiples == Multiples::EXPONENTS)
    step[group * 32 + place.index()] = (char)(block.scale ^ 0x80);
  else
    std::memcpy(step + (group * 32 + place.index()) * 2, &block.scale, 2);
  if (format.has_minima) std::memcpy(step + ((2 + group) * 32 + place.index()) * 2, &block.minimum, 2);
  put_codes(format, (uint8_t*)step + format.multiple_bytes(), place, block.codes, group * 8, group * 8 + 8);
}

// A block of a type with zero points: a part of a unit that begins at `input`.
void put_part(const BlockFormat& format, char* unit, Place place, const Block& block, long input) {
  const long first = input % (format.unit_steps() * 64), own = first / format.file_inputs;
  std::memcpy(unit + (own * 32 + place.index()) * 2, &block.scale, 2);
  unit[(format.unit_blocks() * 2 + own) * 32 + place.index()] = (char)block.minimum;
  for (long i = 0; i < format.file_inputs; i += 32) {
    const long k = first + i, line = k / 32 % 2 * 8;
    uint8_t* step = (uint8_t*)unit + format.head_bytes() + k / 64 * format.step_bytes();
    put_codes(format, step, place, block.codes + i, line, line + 8);
  }
}

// The codes of a block as those of another type, which holds the same numbers.
void recode(const BlockFormat& from, const BlockFormat& to, Block& block) {
  const int more = to.offset_bits < 0 ? 0 : (1 << to.offset_bits) - (1 << from.offset_bits);
  for (long i = 0; i < from.file_inputs && from.type != to.type; ++i) {
    const uint8_t code = block.codes[i];
    block.codes[i] = (uint8_t)((from.table == to.table ? code : TABLES[(int)from.table][code]) + more);
  }
}

void pack_block_panel(const BlockPacking& p, long panel) {
  const Layer& layer = p.layer;
  const BlockFormat &format = *layer.panel_blocks[panel].format, &source = *block_format(p.type);
  char* to = layer.weight + layer.panel_blocks[panel].offset;
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
        recode(source, format, block);
        if (format.has_units())
          put_column(format, to + k / 256 * format.unit_bytes(), place, block);
        else if (format.has_zeros())
          put_part(format, to + k / 64 / format.unit_steps() * format.unit_bytes(), place, block, k);
        else
          put_half_step(format, to + k / 64 * format.unit_bytes(), place, block, k);
      }
    }
}

void pack_block_panels(void* data) {
  BlockPacking& p = *(BlockPacking*)data;
  int node = own_node();
  for (long panel; (panel = p.panels.take(node)) >= 0;) pack_block_panel(p, panel);
}

// The code of an input of a step, in a column.
int code_of(const BlockFormat& format, const uint8_t* codes, Place place, int input) {
  const int line = input / 4, bit = line % 4 * 2, sixteen = line / 4;
  codes += place.lane * 4 + input % 4;
  const uint8_t* high = codes + format.code_bytes();
  int code = 0;
  switch (format.low_bits()) {
    case 8: code = codes[place.half * 1024 + line * 64]; break;
    case 4: code = codes[line * 64] >> 4 * place.half & 15; break;
    default: code = codes[line / 2 * 64] >> (line % 2 * 4 + place.half * 2) & 3; break;
  }
  if (format.bits - format.low_bits() == 1) code |= (high[sixteen * 64] >> (bit + place.half) & 1) << format.low_bits();
  if (format.bits - format.low_bits() == 2)
    code |= (high[(sixteen * 2 + place.half) * 64] >> bit & 3) << format.low_bits();
  return format.table == Table::NONE ? code : TABLES[(int)format.table][code];
}

struct Factors {  // a and b
  float of_code, minimum;
};

// Those of a group of a step, in a column. `input`: the first one of the group.
Factors factors_of(const BlockFormat& format, const uint8_t* unit, const uint8_t* step, long input, long column) {
  const int groups = 64 / format.group, group = (int)(input % 64 / format.group);
  const long at = group * 32 + column, minimum_at = (groups + group) * 32 + column;
  const float once = format.has_units() ? float_of(read_half(unit + column * 2)) : 0.f;
  const float minimum_once =
      format.has_units() && format.has_minima ? float_of(read_half(unit + 64 + column * 2)) : 0.f;
  switch (format.multiples) {
    case Multiples::HALVES:
      return {float_of(read_half(step + at * 2)), format.has_minima ? float_of(read_half(step + minimum_at * 2)) : 0.f};
    case Multiples::EXPONENTS: return {std::ldexp(1.f, (int8_t)step[at]), 0.f};
    case Multiples::NIBBLES: return {once * (float)(step[at] & 15), minimum_once * (float)(step[at] >> 4)};
    case Multiples::ZEROS: {
      const long own = input % (format.unit_steps() * 64) / format.file_inputs;
      const float scale = float_of(read_half(unit + (own * 32 + column) * 2));
      return {scale, scale * (float)(int8_t)unit[(format.unit_blocks() * 2 + own) * 32 + column]};
    }
    case Multiples::BYTES: break;
  }
  if (format.has_minima) return {once * (float)step[at], minimum_once * (float)step[minimum_at]};
  return {once * (float)(int8_t)step[at], 0.f};
}

// The numbers of one column [K] of a layer in bfloat16.
void copy_column(const Layer& layer, long column, uint16_t* to) {
  const long half = column % SIDE / 16, lane = column % 16;
  for (long step = 0, k = 0; step < layer.steps; ++step) {
    const uint16_t* lines = (const uint16_t*)(layer.tiles(column / SIDE, step) + half * TILE) + lane * 2;
    for (int line = 0; line < 16 && k < layer.K; ++line, lines += 32, k += 2) {
      to[k] = lines[0];
      if (k + 1 < layer.K) to[k + 1] = lines[1];
    }
  }
}

// The numbers of one column [K] of a layer in blocks.
void read_column(const Layer& layer, long column, uint16_t* to) {
  const BlockPanel& panel = layer.panel_blocks[column / SIDE];
  const BlockFormat& format = *panel.format;
  const Place place{(int)(column % SIDE / 16), (int)(column % 16)};
  const int offset = format.offset_bits < 0 ? 0 : 1 << format.offset_bits;
  const uint8_t* weight = (const uint8_t*)layer.weight + panel.offset;
  for (long k = 0; k < layer.K; k += 64) {
    const long step = k / 64;
    const uint8_t* unit = weight + step / format.unit_steps() * format.unit_bytes();
    const uint8_t* at = unit + format.head_bytes() + step % format.unit_steps() * format.step_bytes();
    for (int i = 0; i < 64 && k + i < layer.K; i += format.group) {
      const Factors factors = factors_of(format, unit, at, k + i, place.index());
      for (int j = i; j < i + format.group && k + j < layer.K; ++j) {
        const int number = code_of(format, at + format.multiple_bytes(), place, j) - offset;
        to[k + j] = narrowed(factors.of_code * (float)number - factors.minimum);
      }
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
  const auto read = r.layer.panel_blocks ? read_column : copy_column;
  for (long i; (i = r.next.fetch_add(1)) < r.count;) read(r.layer, r.columns[i], r.to + i * r.layer.K);
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
  BlockPacking packing{layer, (BlockType)type, source, rows, stride, column};
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
