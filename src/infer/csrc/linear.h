// Linear layers: what the driver (linear.cpp) and the kernels of each instruction set share.
//
// y = g(n(x) Wᵀ + b) + r in bfloat16, with weights in bfloat16, int8 or blocks. n: RMSNorm or nothing; g: two
// columns become one, as the gate of an MLP wants it, or nothing; r: a residual or nothing.
//
// Shape letters: M rows, N columns of the product, K inputs; x [M, K], W [N, K], b [N].
//
// Rows are batch-invariant, bit for bit: every sum runs over all of K in ascending order in
// float32 (exactly, in int32, if W is int8), in whichever thread and cache block it is computed. A block of K that
// does not fit the cache stores its sums and goes on from them, which is exact, perhaps in another thread
// (linear_cut.h); no sum is made of two that began apart. Rows do not meet in a product, so rows of zeros that
// fill the last tile change nothing, and zeros that fill up K add zeros at its end.
//
// int8: each row of W has one scale, each row of n(x) one that is found when it is packed; largest
// magnitude = 127. As sums are exact, all instruction sets give the same bits, but for a gate's exponential.
//
// A rotated layer multiplies each 64 numbers of a row, of W and of n(x), by the same orthogonal matrix first, so the
// products stay what they are. A few inputs of real models are tens of times larger than the others, which then have
// few steps of the row's scale; rotated ones are of one size.
//
// Blocks of GGUF files (blocks.h), in which int4 is held, too (block_fit.h): each 32 numbers of a row of n(x) have a
// scale of their own. The sum of 32 (16) products of whole numbers is exact in int32; it is multiplied by the row's
// scale and the weight's and added in float32, in the order of K, with one rounding of each. So all instruction sets
// give the same bits.
//
// W is packed once, in one layout for all instruction sets. A panel is 32 columns; in it, for every 64 bytes of
// inputs (a step), two tiles of 16 columns, in each 16 lines of 16 columns × 4 bytes: a panel is read in one
// sweep. With a gate, one tile holds columns of the first half of W, the other theirs of
// the second. x is packed at every call, rows in groups of 32, a group's rows of a step together, because rows
// read at x's own stride would fall into few sets of the cache.
#pragma once

#include "blocks.h"
#include "linear_cut.h"

namespace linear {

constexpr int SIDE = 32;                // rows of a group, columns of a panel: two tiles each
constexpr long TILE = 1024;             // bytes: 16 lines of 64
constexpr long SUMS = SIDE * SIDE;      // sums of a group × a panel, 4 bytes each
constexpr long SLICE = 16;              // steps: 32 KB of a panel
constexpr long BLOCK_GROUPS = 8;        // groups of an item: with a slice 256 KB of x, in the L2
constexpr long ITEM_PANELS = 16;        // panels of an item, at most
constexpr long MOST_ROWS = 1024;        // rows that are packed at a time: bounds the memory
constexpr long PACK_ROWS = 4;           // rows that a thread packs at a time; divides 16
constexpr long LEAD_BYTES = 32 * TILE;  // how far a sweep over panels prefetches

// Bytes of a step that is unpacked: its codes, and the factors of blocks.
constexpr long MOST_UNPACKED = 2 * TILE + 1024;

enum Gate { NONE, SILU, GELU };

// How a row's numbers of one step lie, from its first byte on.
enum class RowFormat {
  PAIRS,           // 32 bfloat16
  FLOATS,          // 32 numbers widened to float32: 16 with even indices, 16 with odd ones
  BYTES,           // 64 of int8
  UNSIGNED_BYTES,  // 64 of int8, each 128 larger
  WORDS,           // 64 of int8 widened to int16: 32 with even indices, 32 with odd ones
};

struct Layer;

struct Kernels {    // of an instruction set
  bool tiles;       // in use; else vectors
  bool has_starts;  // int8 rows are UNSIGNED_BYTES, so that sums begin at what that adds
  // An item of several groups: steps of a block of K, and panels. A slice of a panel stays in a near cache.
  long block_steps, block_panels;
  long few_rows;  // that are multiplied together
  void (*pack_weight)(void* packing);
  void (*compute)(void* call);
  RowFormat (*row_format)(const Layer& layer, long M);
  void (*fit_row)(BlockType type, const uint16_t* row, long K, uint8_t* to);  // to blocks of 4 bits
};

struct Layer {  // what does not change between calls
  char* weight;
  long N, K, steps, panels, width;  // width: columns of y
  int bits;
  bool float_out, rotated;
  Gate gate;
  const Kernels* kernels;
  float eps;
  float *norm, *bias, *scales;  // [K padded], [N], [N padded]; null: absent; norm: even indices of 32, then odd
  int32_t* starts;              // [N padded]: where sums of unsigned bytes begin
  BlockPanel* panel_blocks;     // [panels + 1], of a weight in blocks; else null
  NodeSlices nodes;
  mutable std::atomic<const Cut*> cuts;  // that were needed so far

  bool whole() const { return bits < 16 && !panel_blocks; }  // whether sums are whole numbers
  long panel_bytes() const { return steps * 2 * TILE; }
  char* start_of(long panel) const {
    return weight + (panel_blocks ? panel_blocks[panel].offset : panel * panel_bytes());
  }
  long lines(long panel) const {  // of a step, 64 bytes each
    if (!panel_blocks) return 2 * TILE / 64;
    const BlockFormat& format = *panel_blocks[panel].format;
    return ceil_div(format.unit_bytes(), format.unit_steps() * 64);
  }
  char* tiles(long panel, long step) const {
    if (panel_blocks) {
      const BlockFormat& format = *panel_blocks[panel].format;
      return start_of(panel) + step / format.unit_steps() * format.unit_bytes();
    }
    return weight + panel * panel_bytes() + step * 2 * TILE;
  }
};

struct RowGroup {            // 32 numbers of a row, times a layer in blocks
  float scale, negated_sum;  // negated_sum: -scale · the sum of the whole numbers
  int32_t negated[2];        // minus the sums of the first 16 and of the others
};

struct Call {  // some rows of one product
  const Layer& layer;
  const uint16_t *x = nullptr, *residual = nullptr;
  char* y = nullptr;
  long M = 0, x_stride = 0;
  RowFormat format = RowFormat::PAIRS;
  char* packed = nullptr;          // x
  float* row_scales = nullptr;     // int8
  RowGroup* row_groups = nullptr;  // blocks: [rows, 2 · steps]
  float* split_sums = nullptr;     // [splits, groups of a block of rows, SUMS]
  Phase* firsts = nullptr;         // [splits]: parts that begin them
  long groups = 0, row_blocks = 0, num_packs = 0;
  const Cut& cut;
  PartCounters parts;
  std::atomic<long> next_pack{0};
  Phase packs{};

  Call(const Layer& of, const Cut& by) : layer(of), cut(by), parts(by.ends.data(), by.ends.size()) {}
  long row_bytes() const { return format == RowFormat::FLOATS || format == RowFormat::WORDS ? 128 : 64; }
  int tiles_in(long group) const { return M - group * SIDE > 16 ? 2 : 1; }
  long rows_in(long group) const { return std::min<long>(SIDE, M - group * SIDE); }
  long step_bytes(long group) const {  // of a group's x
    return layer.kernels->tiles ? tiles_in(group) * TILE : rows_in(group) * row_bytes();
  }
  // Block of K by block of K, so that what an item reads of one is together and spreads over the
  // sets of the cache; in a block group by group.
  char* tiles(long group, long step) const {
    const long most = layer.kernels->block_steps, k = step / most * most, steps = std::min(most, layer.steps - k);
    const long each = groups > 1 ? SIDE * row_bytes() : step_bytes(group);
    return packed + (k * groups + group * steps) * each + (step - k) * step_bytes(group);
  }
  const char* start_of(const Part* part) const {  // its weights; null: anything that is cached
    return part ? layer.tiles(part->panel, part->begin) : layer.weight;
  }
  const Part* take(int& node) {  // null: none is left
    const long part = parts.take(node);
    return part < 0 ? nullptr : &cut.parts[(size_t)part];
  }
  long first_group(long row_block) const { return groups * row_block / row_blocks; }
};

// The panels to which rows of W come that become columns from `column` on, node by node.
class SourcePanels {
 public:
  SourcePanels(const Layer& layer, long column, long rows)
      : first_(layer.gate ? 0 : column / SIDE),
        end_(layer.gate ? layer.panels : ceil_div(column + rows, SIDE)),
        panels_(layer.nodes.ends.data(), layer.nodes.ends.size()) {}

  long take(int& node) {  // -1: none is left
    for (long panel; (panel = panels_.take(node)) >= 0;)
      if (first_ <= panel && panel < end_) return panel;
    return -1;
  }

 private:
  const long first_, end_;
  PartCounters panels_;
};

struct Packing {
  const Layer& layer;
  const uint16_t* source;
  long rows, stride, column;
  SourcePanels panels{layer, column, rows};
  const int8_t* whole = nullptr;  // instead of `source`: rows that are in int8 already, and
  const float* scales = nullptr;  // their scales
};

}  // namespace linear
