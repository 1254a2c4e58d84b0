// Causal attention over a paged cache: what the driver (attention.cpp) and the kernels of each instruction set
// (attention_item.h) share.
//
// Shape letters: T tokens in the step, B sequences, H query heads, G key/value heads, D head size.
// A cache is [pages, page_size, G, D], or strips of 16 cells in the order of the products (`Strips`, `Bytes`);
// queries and outputs are [T, H, D].
#pragma once

#include "common.h"
#include "rotary.h"

namespace attention {

constexpr int BLOCK = 128;          // at most: keys that are scored together, from a multiple of LayerCall::block
constexpr int MOST_DIM = 512;       // attention.cpu asks for no more
constexpr int ROW_BLOCK = 16;       // rows of a head that meet a block together, at most
constexpr int STRIP = 16;           // cells that lie as one, head by head, in a cache that products read as it lies
constexpr int SEGMENT = 512;        // keys whose partial result may come from another thread
constexpr int TILE_FLOATS = 65536;  // of sums of P·V that an item keeps: they stay in its core's cache
constexpr float RISE = 2.f;         // more would cost accuracy: the greatest P is rounded unless it is 1
constexpr float LOWEST = -1e30f;    // below every score, and its difference to one is finite

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

struct Join {   // the segments of some rows, computed by several items
  long offset;  // of the partial results in the workspace, in floats
  int64_t segment, num_segments;
  int parts, missing;
};

struct Item {
  int sequence, row, tokens;   // row: of the first of its tokens, among T
  int64_t position;            // of that token
  int group, group_end, join;  // join < 0: the item is complete by itself
  int64_t segment, segment_end;
  double cost;
  int members;  // 0; or its tokens are of so many sequences, with a join each, and see all its keys
};

struct Span {
  int64_t begin, end;
};

// The keys that some row of an item sees, from the start of a block.
inline Span visible(const Item& item, int64_t window) {
  const int64_t low = window ? std::max<int64_t>(0, item.position - window + 1) : 0;
  return {low / BLOCK * BLOCK, item.position + (item.members ? 1 : item.tokens)};
}

// Where a head lies in a cache: bytes from its beginning to the head in the first cell, and bytes of a cell. The heads
// of a NUMA node are a cache of their own: all its cells, then those of the next node.
struct HeadPlace {
  long at, cell_bytes;
};

struct LayerCall {  // one layer of one step
  const char *keys, *values, *q;
  void* out;
  const int64_t* tables;
  Join* joins;
  float* workspace;
  const rotary::Rotation* rotation;  // of queries that are not turned yet; or null
  rotary::RotateHeads rotate_heads;
  const HeadPlace* heads;  // [G]
  long table_width, page_size, q_bytes, state_words;
  long strip, head_bytes;        // cells that lie as one, head by head; and a head's bytes in all of them
  int64_t window;                // 0: all
  int H, D, rep, padded, block;  // rep = H / G; padded = D up to a multiple of 32
  float scale;                   // times log2(e)
  float cap, rounded;            // times log2(e); 0: none
  const float* slopes;           // [H], times log2(e) unless they are of rounded products; null: none
  bool shapes_scores;            // by a cap or slopes
  const float* sinks;            // [H], scores without a key; null: none
};

inline long state_words_of(int D) { return round_up(D, 32) + 16; }                  // of a row; its maximum lies apart
inline long state_size(int D, int rows) { return rows * (state_words_of(D) + 1); }  // of a head

alignas(64) const char ZEROS[16384] = {};  // stands for the cells behind the end

// Where the keys of one block lie, and an item's heads in them.
struct Cells {
  int64_t at[BLOCK];  // bytes from the first of its head in a cache
  int count = 0;
  long cell_bytes = 0;

  void list(const LayerCall& call, const Item& item, int64_t first) {
    const int64_t* table = call.tables + item.sequence * call.table_width;
    cell_bytes = call.heads[item.group].cell_bytes;
    count = (int)std::clamp<int64_t>(visible(item, call.window).end - first, 0, call.block);
    int64_t page = first / call.page_size, offset = first % call.page_size;
    for (int j = 0; j < count; ++j) {
      const int64_t slot = table[page] * call.page_size + offset, lane = slot % call.strip;
      at[j] = (slot - lane) * cell_bytes + lane * (call.head_bytes / call.strip);
      if (++offset == call.page_size) ++page, offset = 0;
    }
  }
  // One head's row in a cache, or the strip that begins with it.
  const char* row(const char* heads, int key) const { return key < count ? heads + at[key] : ZEROS; }
  void point(const char* heads, int n, const char** rows) const {
    for (int j = 0; j < n; ++j) rows[j] = row(heads, j);
  }
  void point_strips(const char* heads, int n, const char** strips) const {
    for (int j = 0; j < n; j += STRIP) strips[j / STRIP] = row(heads, j);
  }
};

inline int64_t first_key(const LayerCall& call, const Item& item) {
  return std::max(item.segment * SEGMENT, visible(item, call.window).begin);
}
inline int64_t end_of_keys(const LayerCall& call, const Item& item) {
  return std::min(item.segment_end * SEGMENT, visible(item, call.window).end);
}

// Asks for what a thread reads next, so that memory always has something to do: LEAD cells ahead of
// where it is, in this item and in the next, as many lines in each step as the step uses up; many at once
// would stop the thread until memory has taken them.
class Prefetcher {
 public:
  void begin(const LayerCall& call, const Item& item, const Item* next) {
    here_ = after_.item == &item ? after_ : Cursor(call, &item);
    after_ = Cursor(call, next);
    now_ = &here_;
  }
  // A block that ends at `end` will be read in so many steps.
  void expect(const LayerCall& call, int64_t end, int steps) {
    const int64_t cells = end + LEAD - here_.position - after_.position + after_.first;
    const int groups = here_.item->group_end - here_.item->group;
    left_ = std::max<int64_t>(0, cells) * 2 * groups * call.head_bytes / (64 * call.strip);
    each_ = left_ * ONE / steps;
  }
  void finish(const LayerCall& call) { ask(call, left_); }
  INLINE void step(const LayerCall& call, int steps) {
    credit_ += each_ * steps;
    ask(call, std::min(credit_ / ONE, left_));
    credit_ %= ONE;
  }

 private:
  static constexpr int64_t LEAD = 64;
  static constexpr long ONE = 1024;

  struct Cursor {
    const Item* item = nullptr;
    int64_t first = 0, position = 0, end = 0;  // of the strip that is being asked for
    bool with_values = false;                  // its keys have been asked for
    const char *line = nullptr, *stop = nullptr;

    Cursor() = default;
    Cursor(const LayerCall& call, const Item* of) : item(of) {
      if (!of) return;
      first = position = first_key(call, *of), end = end_of_keys(call, *of);
      if (position < end) point(call, call.keys);
    }
    void point(const LayerCall& call, const char* cache) {
      const int64_t page = call.tables[item->sequence * call.table_width + position / call.page_size];
      const HeadPlace& head = call.heads[item->group];
      line = cache + head.at + (page * call.page_size + position % call.page_size) * head.cell_bytes;
      stop = line + (item->group_end - item->group) * call.head_bytes;
    }
    // Keys, then values of all heads; whether there are more.
    bool advance(const LayerCall& call) {
      if (position >= end) return false;
      with_values = !with_values;
      if (!with_values && (position += call.strip) >= end) return false;
      point(call, with_values ? call.values : call.keys);
      return true;
    }
  };
  bool advance(const LayerCall& call) {
    if (now_->advance(call)) return true;
    now_ = &after_;
    return after_.line < after_.stop || after_.advance(call);
  }
  INLINE void ask(const LayerCall& call, long lines) {
    for (left_ -= lines; lines > 0; --lines, now_->line += 64) {
      if (now_->line >= now_->stop && !advance(call)) break;
      __builtin_prefetch(now_->line, 0, 2);
    }
  }
  Cursor here_, after_, *now_ = &here_;
  long left_ = 0, each_ = 0, credit_ = 0;
};

struct RowBlock {  // a few rows of one head, and the block that they meet
  const uint32_t* queries;
  float *state, *greatest;
  int64_t first;               // position of the block's first key
  int rows, row, count, keys;  // rows: of the item; keys: of the block that some row sees, up to a multiple of 32
  int group;                   // of heads
};
struct Buffers {
  Cells cells;
  uint32_t *keys, *values;  // one block of one head, packed
  float* scores;            // of a unit; P takes their place, row by row
  uint32_t* queries;
  float *total, *part;  // a row's state over all segments, and over one of them
};

// A thread's own memory; grows, and is given back when the thread ends.
class Scratch {
 public:
  Prefetcher prefetcher;

  ~Scratch() { std::free(memory_); }

  void reserve(const LayerCall& call, int groups, int rows, int words, Buffers& at) {
    const size_t queries = (size_t)groups * rows * words, block = (size_t)call.block * call.padded;
    const size_t states = groups * (size_t)state_size(call.D, rows);
    const size_t need = (2 * block + ROW_BLOCK * BLOCK + queries + 2 * states + 15) / 16 * 64;
    if (need > size_) {
      std::free(memory_);
      memory_ = (float*)std::aligned_alloc(64, size_ = need);
      if (!memory_) std::abort();
      std::memset(memory_, 0, size_);
    }
    at.keys = (uint32_t*)memory_;
    at.values = at.keys + block;
    at.scores = (float*)at.values + block;
    at.total = at.scores + ROW_BLOCK * BLOCK;
    at.part = at.total + states;
    at.queries = (uint32_t*)at.part + states;
  }

 private:
  float* memory_ = nullptr;
  size_t size_ = 0;
};

using RunItem = void (*)(const LayerCall&, const Item&, const Item*, Scratch&);

// The key and value [D] of a head in bfloat16 → lane `lane` of a strip of keys and of one of values.
using WriteCell = void (*)(const uint16_t* k, const uint16_t* v, char* keys, char* values, int lane, int D);

}  // namespace attention
