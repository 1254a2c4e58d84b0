// Causal attention over a paged cache, for CPUs: plain C functions, loaded by ctypes (native.py).
//
// Shape letters: T tokens in the step, B sequences, H query heads, G key/value heads, D head size.
// A cache is [pages, page_size, G, D], or strips of 16 cells in the order of the products (`Strips`, `Bytes`);
// queries and outputs are [T, H, D].
//
// plan() cuts a step into items: some query tokens of one sequence × some key/value heads, with a
// few whole segments of 512 keys if one sequence must feed several threads. attend() writes the
// step's cells, then threads take items from a counter; which thread computes an item, and how a
// step was cut, changes no bit of the result (attention_isa.h says why; segments lie at absolute
// positions and are always folded in order). Sequences that decode side by side and begin with the
// same pages have one item for the whole segments they share, which so are read once for all. The
// arithmetic is in attention_isa.h, compiled once per instruction set and chosen when a plan is made;
// this file is built for the plain baseline.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cpu.h"
#include "kernels.h"
#include "rotary.h"

namespace {

constexpr int BLOCK = 128;    // at most: keys that are scored together, from a multiple of Job::block
constexpr int MOST_DIM = 256;  // native.py asks for no more
constexpr int UNIT = 16;      // rows of a head that meet a block together, at most
constexpr int STRIP = 16;     // cells that lie as one, head by head, in a cache that products read as it lies
constexpr int SEGMENT = 512;  // keys whose partial result may come from another thread
constexpr int TILE_FLOATS = 65536;  // of sums of P·V that an item keeps: they stay in its core's cache
constexpr float RISE = 2.f;  // more would cost accuracy: the greatest P is rounded unless it is 1
constexpr float LOWEST = -1e30f;  // below every score, and its difference to one is finite

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

struct Join {  // the segments of some rows, computed by several items
  long offset;  // of the partial results in the workspace, in floats
  int64_t segment, num_segments;
  int parts, missing;
};

struct Item {
  int sequence, row, tokens;  // row: of the first of its tokens, among T
  int64_t position;           // of that token
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

struct Job {  // one layer of one step
  const char *keys, *values, *q;
  void* out;
  const int64_t* tables;
  Join* joins;
  float* workspace;
  const Rotation* rotation;  // of queries that are not turned yet; or null
  long table_width, page_size, cell_bytes, q_bytes, state_words;
  long strip, head_bytes;  // cells that lie as one, head by head; and a head's bytes in all of them
  int64_t window;  // 0: all
  int H, D, rep, padded, block;  // rep = H / G; padded = D up to a multiple of 32
  float scale;            // times log2(e)
};

inline long state_words_of(int D) { return round_up(D, 32) + 16; }  // of a row; its maximum lies apart
inline long state_size(int D, int rows) { return rows * (state_words_of(D) + 1); }  // of a head

alignas(64) const char ZEROS[8192] = {};  // stands for the cells behind the end

// Where the keys of one block lie, and an item's heads in them.
struct Cells {
  int64_t at[BLOCK];  // bytes from the first of its head in a cache
  int count = 0;

  void list(const Job& job, const Item& item, int64_t first) {
    const int64_t* table = job.tables + item.sequence * job.table_width;
    count = (int)std::clamp<int64_t>(visible(item, job.window).end - first, 0, job.block);
    int64_t page = first / job.page_size, offset = first % job.page_size;
    for (int j = 0; j < count; ++j) {
      const int64_t slot = table[page] * job.page_size + offset, lane = slot % job.strip;
      at[j] = (slot - lane) * job.cell_bytes + lane * (job.head_bytes / job.strip);
      if (++offset == job.page_size) ++page, offset = 0;
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

inline int64_t first_key(const Job& job, const Item& item) {
  return std::max(item.segment * SEGMENT, visible(item, job.window).begin);
}
inline int64_t end_of_keys(const Job& job, const Item& item) {
  return std::min(item.segment_end * SEGMENT, visible(item, job.window).end);
}

// Asks for what a thread reads next, so that memory always has something to do: LEAD cells ahead of
// where it is, in this item and in the next, as many lines in each step as the step uses up; many at once
// would stop the thread until memory has taken them.
class Ahead {
 public:
  void begin(const Job& job, const Item& item, const Item* next) {
    here_ = after_.item == &item ? after_ : Cursor(job, &item);
    after_ = Cursor(job, next);
    now_ = &here_;
  }
  // A block that ends at `end` will be read in so many steps.
  void expect(const Job& job, int64_t end, int steps) {
    const int64_t cells = end + LEAD - here_.position - after_.position + after_.first;
    const int groups = here_.item->group_end - here_.item->group;
    left_ = std::max<int64_t>(0, cells) * 2 * groups * job.head_bytes / (64 * job.strip);
    each_ = left_ * ONE / steps;
  }
  void finish(const Job& job) { ask(job, left_); }
  INLINE void step(const Job& job, int steps) {
    credit_ += each_ * steps;
    ask(job, std::min(credit_ / ONE, left_));
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
    Cursor(const Job& job, const Item* of) : item(of) {
      if (!of) return;
      first = position = first_key(job, *of), end = end_of_keys(job, *of);
      if (position < end) point(job, job.keys);
    }
    void point(const Job& job, const char* cache) {
      const int64_t page = job.tables[item->sequence * job.table_width + position / job.page_size];
      line = cache + (page * job.page_size + position % job.page_size) * job.cell_bytes;
      line += item->group * job.head_bytes;
      stop = line + (item->group_end - item->group) * job.head_bytes;
    }
    // Keys, then values of all heads; whether there are more.
    bool advance(const Job& job) {
      if (position >= end) return false;
      with_values = !with_values;
      if (!with_values && (position += job.strip) >= end) return false;
      point(job, with_values ? job.values : job.keys);
      return true;
    }
  };
  bool advance(const Job& job) {
    if (now_->advance(job)) return true;
    now_ = &after_;
    return after_.line < after_.stop || after_.advance(job);
  }
  INLINE void ask(const Job& job, long lines) {
    for (left_ -= lines; lines > 0; --lines, now_->line += 64) {
      if (now_->line >= now_->stop && !advance(job)) break;
      __builtin_prefetch(now_->line, 0, 2);
    }
  }
  Cursor here_, after_, *now_ = &here_;
  long left_ = 0, each_ = 0, credit_ = 0;
};

struct Unit {  // a few rows of one head, and the block that they meet
  const uint32_t* queries;
  float *state, *greatest;
  int64_t first;  // position of the block's first key
  int rows, row, count, keys;  // rows: of the item; keys: of the block that some row sees, up to a multiple of 32
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
  Ahead ahead;

  ~Scratch() { std::free(memory_); }

  void reserve(const Job& job, int groups, int rows, int words, Buffers& at) {
    const size_t queries = (size_t)groups * rows * words, block = (size_t)job.block * job.padded;
    const size_t states = groups * (size_t)state_size(job.D, rows);
    const size_t need = (2 * block + UNIT * BLOCK + queries + 2 * states + 15) / 16 * 64;
    if (need > size_) {
      std::free(memory_);
      memory_ = (float*)std::aligned_alloc(64, size_ = need);
      if (!memory_) std::abort();
      std::memset(memory_, 0, size_);
    }
    at.keys = (uint32_t*)memory_;
    at.values = at.keys + block;
    at.scores = (float*)at.values + block;
    at.total = at.scores + UNIT * BLOCK;
    at.part = at.total + states;
    at.queries = (uint32_t*)at.part + states;
  }

 private:
  float* memory_ = nullptr;
  size_t size_ = 0;
};

using RunItem = void (*)(const Job&, const Item&, const Item*, Scratch&);

namespace portable {
#define LEVEL 0
#include "attention_isa.h"
#undef LEVEL
}  // namespace portable

#ifdef X86
TARGET("avx2,fma")
namespace avx2 {
#define LEVEL 1
#include "attention_isa.h"
#undef LEVEL
}  // namespace avx2
END_TARGET

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define LEVEL 2
#include "attention_isa.h"
#undef LEVEL
}  // namespace avx512
END_TARGET

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")
namespace avx512_bf16 {
#define LEVEL 3
#include "attention_isa.h"
#undef LEVEL
}  // namespace avx512_bf16
END_TARGET

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,amx-int8")
namespace amx {
#define LEVEL 4
#include "attention_isa.h"
#undef LEVEL
}  // namespace amx
END_TARGET
#endif

struct Isa {
  const char* name;
  RunItem float32, bfloat16, bytes = nullptr, strips = nullptr;  // strips: bfloat16 in those
};
const Isa ISAS[] = {
#ifdef X86
    {"amx", amx::run_item<amx::Float32<float>>, amx::run_item<amx::Tiles>,
     amx::run_item<amx::Bytes>},
    {"avx512_bf16", avx512_bf16::run_item<avx512_bf16::Float32<float>>,
     avx512_bf16::run_item<avx512_bf16::Pairs>, avx512_bf16::run_item<avx512_bf16::Bytes>,
     avx512_bf16::run_item<avx512_bf16::Strips>},
    {"avx512", avx512::run_item<avx512::Float32<float>>,
     avx512::run_item<avx512::Float32<uint16_t>>},
    {"avx2", avx2::run_item<avx2::Float32<float>>, avx2::run_item<avx2::Float32<uint16_t>>},
#endif
    {"portable", portable::run_item<portable::Float32<float>>,
     portable::run_item<portable::Float32<uint16_t>>},
};
constexpr int NUM_ISAS = sizeof ISAS / sizeof *ISAS;

bool runs_here(const Isa& isa) {
#ifdef X86
  __builtin_cpu_init();
  const std::string_view name = isa.name;
  const bool has512 = has_avx512();
  if (name == "amx") return has512 && __builtin_cpu_supports("avx512bf16") && may_use_tiles();
  if (name == "avx512_bf16")
    return has512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (name == "avx512") return has512;
  if (name == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return true;
}

// Denormal numbers count as zero, as they always do for vdpbf16ps and tiles; else they would be slow.
class FloatMode {
 public:
#ifdef X86
  explicit FloatMode(bool tiles) : mode_(_mm_getcsr()), tiles_(tiles) {
    _mm_setcsr(mode_ | 0x8040);
    if (tiles_) save_tiles(&config_);
  }
  ~FloatMode() {  // others on this thread (oneDNN) may count on the tiles' shape
    _mm_setcsr(mode_);
    if (tiles_) restore_tiles(&config_);
  }

 private:
  unsigned mode_;
  bool tiles_;
  alignas(64) TileConfig config_;
#else
  explicit FloatMode(bool) {}
#endif
};

struct Cut {  // the items of a step for one window
  std::vector<Item> items;
  std::vector<Join> joins;
  double cost = 0;
};

struct Engine {
  RunItem run;
  bool tiles, strips;
  Parallel parallel;
  int H, G, D, element;
  long page_size;
  float scale;
  std::vector<int64_t> windows;
  // Of the step that was planned last:
  int threads = 1;
  int64_t num_tokens = 0, table_width = 0;
  const int64_t *slots = nullptr, *tables = nullptr;
  std::vector<Cut> cuts{};  // one per window
  std::vector<float> workspace{};
};

int tokens_together(const Engine& e) {
  return std::max<int64_t>(1, TILE_FLOATS / (e.D * (e.H / e.G)));
}

// Numbers of keys and rows, weighted: packing a block costs about as much as a few rows of it.
double cost_of(const Engine& e, const Item& item, int64_t window) {
  const Span keys = visible(item, window);
  return double(keys.end - keys.begin + BLOCK) * (item.tokens * (e.H / e.G) + 16);
}

void cut_item(const Engine& e, Cut& cut, Item item, int64_t window, double share, size_t& floats) {
  const Span keys = visible(item, window);
  const int rows = item.tokens * (e.H / e.G);
  const int64_t first = keys.begin / SEGMENT, last = (keys.end - 1) / SEGMENT + 1;
  const double cost = cost_of(e, item, window);
  // Few rows: all heads of a cell at once, as it lies in memory. Many: one head, kept in cache.
  int groups = rows >= 32 ? 1 : e.G;
  const int64_t wish = (int64_t)std::ceil(cost * groups / share);
  const int64_t parts = std::clamp<int64_t>(wish, 1, last - first);
  if (wish > parts) groups = std::max<int64_t>(1, groups * parts / wish);
  for (int group = 0; group < e.G; group += groups) {
    item.group = group;
    item.group_end = std::min(group + groups, e.G);
    item.join = parts > 1 ? (int)cut.joins.size() : -1;
    item.cost = cost * (item.group_end - group) / parts;
    for (int64_t i = 0; i < parts; ++i) {
      item.segment = first + (last - first) * i / parts;
      item.segment_end = first + (last - first) * (i + 1) / parts;
      cut.items.push_back(item);
    }
    if (parts > 1) {
      cut.joins.push_back({(long)floats, first, last - first, (int)parts, (int)parts});
      floats += (last - first) * (item.group_end - group) * state_size(e.D, round_up(rows, 16));
    }
  }
}

// The segments that are shared, by a few items; what follows them, by one for each sequence.
void cut_shared(const Engine& e, Cut& cut, Item shared, const int64_t* lengths, double share,
                size_t& floats) {
  const int rep = e.H / e.G;
  const double cost = cost_of(e, shared, 0);
  const int64_t num_segments = (shared.position + 1) / SEGMENT;
  const int64_t wish = (int64_t)std::ceil(cost * e.G / share);
  const int64_t parts = std::clamp<int64_t>(wish, 1, num_segments);
  const int groups = (int)(wish > parts ? std::max<int64_t>(1, e.G * parts / wish) : e.G);
  for (int group = 0; group < e.G; group += groups) {
    shared.group = group;
    shared.group_end = std::min(group + groups, e.G);
    shared.join = (int)cut.joins.size();
    shared.cost = cost * (shared.group_end - group) / parts;
    for (int64_t i = 0; i < parts; ++i) {
      shared.segment = num_segments * i / parts;
      shared.segment_end = num_segments * (i + 1) / parts;
      cut.items.push_back(shared);
    }
    for (int m = 0; m < shared.members; ++m) {
      Item own = shared;
      own.sequence += m;
      own.row += m;
      own.tokens = 1;
      own.members = 0;
      own.position = lengths[own.sequence] - 1;
      own.join += m;
      own.segment = num_segments;
      own.segment_end = own.position / SEGMENT + 1;
      own.cost = double(own.position - shared.position + BLOCK) * (rep + 16) *
                 (own.group_end - group);
      const bool is_more = own.segment_end > own.segment;
      if (is_more) cut.items.push_back(own);
      const int all = (int)parts + is_more;
      cut.joins.push_back({(long)floats, 0, own.segment_end, all, all});
      floats += own.segment_end * (own.group_end - group) * state_size(e.D, round_up(rep, 16));
    }
  }
}

// How many sequences from `s` on have one token each and begin with the same whole segments; and
// the last position in these.
int shared_from(const Engine& e, int s, int B, const int64_t* starts, const int64_t* lengths,
                int64_t& position) {
  const int most = tokens_together(e);
  int64_t segments = lengths[s] / SEGMENT;
  int members = 1;
  for (; segments && members < most && s + members < B; ++members) {
    const int other = s + members;
    if (starts[other + 1] - starts[s] != members + 1) break;
    const int64_t *a = e.tables + s * e.table_width, *b = e.tables + other * e.table_width;
    const int64_t keys = std::min(lengths[s], lengths[other]);
    int64_t same = 0;
    while (same * e.page_size < keys && a[same] == b[same]) ++same;
    const int64_t common = std::min(keys, same * e.page_size) / SEGMENT;
    if (!common || (members > 1 && common < segments)) break;
    segments = std::min(segments, common);
  }
  position = segments * SEGMENT - 1;
  return members;
}

size_t cut_step(const Engine& e, Cut& cut, int64_t window, int B, const int64_t* starts,
                const int64_t* lengths) {
  const int most = tokens_together(e);
  std::vector<Item> whole;
  for (int s = 0; s < B; ++s) {
    if (!window && starts[s + 1] - starts[s] == 1) {
      Item item{};
      const int members = shared_from(e, s, B, starts, lengths, item.position);
      if (members > 1) {
        item.sequence = s;
        item.row = (int)starts[s];
        item.tokens = item.members = members;
        whole.push_back(item);
        cut.cost += cost_of(e, item, 0) * e.G;
        s += members - 1;
        continue;
      }
    }
    for (int64_t row = starts[s]; row < starts[s + 1]; row += most) {
      Item item{};
      item.sequence = s;
      item.row = (int)row;
      item.tokens = (int)std::min<int64_t>(most, starts[s + 1] - row);
      item.position = lengths[s] - (starts[s + 1] - row);
      whole.push_back(item);
      cut.cost += cost_of(e, item, window) * e.G;
    }
  }
  const double share = e.threads > 1 ? std::max(cut.cost / (4 * e.threads), 20000.) : INFINITY;
  size_t floats = 0;
  for (const Item& item : whole)
    if (item.members) cut_shared(e, cut, item, lengths, share, floats);
    else cut_item(e, cut, item, window, share, floats);
  std::stable_sort(cut.items.begin(), cut.items.end(),
                   [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return floats;
}

constexpr int64_t MANY_TOKENS = 31;  // are worth a second thread

struct Writing {
  const Rotation* rotation;  // of k; or null
  const char *k, *v;
  char *keys, *values;
  const int64_t* slots;
  int64_t num_tokens, num_heads, dim, k_bytes, v_bytes, cell_bytes, strip, head_bytes;
  bool bytes;
  std::atomic<int64_t> next{0};
};

// A thread takes whole strips: tokens that are neighbours in one share its lines.
void write_cells(void* data) {
  Writing& w = *(Writing*)data;
  constexpr int64_t MANY = 32;
  const auto begin_of_strip = [&](int64_t t) {
    while (t && t < w.num_tokens && w.slots[t] % STRIP && w.slots[t] == w.slots[t - 1] + 1) ++t;
    return std::min(t, w.num_tokens);
  };
  std::vector<uint16_t> turned(w.rotation ? w.num_heads * w.dim : 0);
  for (int64_t t; (t = w.next.fetch_add(MANY)) < w.num_tokens;) {
    const int64_t end = begin_of_strip(t + MANY);
    for (t = begin_of_strip(t); t < end; ++t) {
      const char *k = w.k + t * w.k_bytes, *v = w.v + t * w.v_bytes;
      if (w.rotation) {
        turn_heads(*w.rotation, (const uint16_t*)k, turned.data(), w.num_heads, t, 1);
        k = (const char*)turned.data();
      }
      const int64_t lane = w.slots[t] % w.strip, at = (w.slots[t] - lane) * w.cell_bytes;
      if (w.strip == 1) {
        std::memcpy(w.keys + at, k, w.cell_bytes);
        std::memcpy(w.values + at, v, w.cell_bytes);
        continue;
      }
#ifdef X86
      const auto put = w.bytes ? avx512_bf16::write_bytes : avx512_bf16::Strips::write;
      for (int64_t head = 0; head < w.num_heads; ++head)
        put((const uint16_t*)k + head * w.dim, (const uint16_t*)v + head * w.dim, w.keys + at + head * w.head_bytes,
            w.values + at + head * w.head_bytes, (int)lane, (int)w.dim);
#endif
    }
  }
}

struct Reading {
  const Job* job;
  const std::vector<Item>* items;
  RunItem run;
  bool tiles;
  int threads;
  std::atomic<size_t> next{0};
};

void read_cells(void* data) {
  static thread_local Scratch scratch;
  Reading& r = *(Reading*)data;
  const FloatMode mode(r.tiles);
  const std::vector<Item>& items = *r.items;
  for (size_t i = r.next++; i < items.size();) {
    // Taken before it is due, so that its keys can be asked for; the last ones go to whoever is free.
    const bool many = r.next + r.threads < items.size();
    const size_t next = many ? r.next++ : items.size();
    r.run(*r.job, items[i], next < items.size() ? &items[next] : nullptr, scratch);
    i = many ? next : r.next++;
  }
}

}  // namespace

extern "C" {

int infer_kernels_version() { return 10; }  // of all interfaces; native.py compares

// Nothing above this instruction set is used from now on, by any kernel; a plan of attention keeps its own.
void infer_set_isa(const char* name) { isa_limit = level_of(name); }

// Names of the instruction sets that run here, best first, with a space after each.
int infer_attention_isas(char* names, int size) {
  names[0] = 0;
  for (const Isa& isa : ISAS)
    if (runs_here(isa) && (int)(std::strlen(names) + std::strlen(isa.name)) + 2 < size)
      std::strcat(std::strcat(names, isa.name), " ");
#ifdef X86
  return __builtin_cpu_is("amd");
#else
  return 0;
#endif
}

// `element`: bytes of a number in the caches; 1: int8, of 64, 128 or 256 numbers a head and pages of
// strips (attention_bytes.h), with everything else in bfloat16; null if the set does not have it.
// `windows`: 0 = none. `parallel`: GOMP_parallel of the OpenMP runtime in use, or null.
void* infer_attention_new(const char* isa_name, int H, int G, int D, long page_size, int element,
                          float scale, const int64_t* windows, int num_windows, void* parallel) {
  for (const Isa& isa : ISAS)
    if (!std::strcmp(isa.name, isa_name) && runs_here(isa)) {
      const bool strips = element == 1 || (element == 2 && isa.strips && D % 16 == 0 && page_size % STRIP == 0);
      const RunItem run = element == 1 ? isa.bytes : strips ? isa.strips : element == 2 ? isa.bfloat16 : isa.float32;
      const bool tiles = element < 4 && !std::strcmp(isa_name, "amx");
      if (run)
        return new Engine{run, tiles, strips, (Parallel)parallel, H, G, D, element, page_size,
                          scale * 1.4426950408889634f, {windows, windows + num_windows}};
    }
  return nullptr;
}

void infer_attention_free(void* engine) { delete (Engine*)engine; }

// starts [B+1], lengths [B], slots [T], tables [B, table_width]; slots, tables: kept, not copied.
int infer_attention_plan(void* engine, int B, const int64_t* starts, const int64_t* lengths,
                         const int64_t* slots, const int64_t* tables, long table_width,
                         int threads) {
  Engine& e = *(Engine*)engine;
  e.threads = threads;
  e.num_tokens = starts[B];
  e.slots = slots;
  e.tables = tables;
  e.table_width = table_width;
  e.cuts.assign(e.windows.size(), {});
  size_t floats = 0;
  for (size_t i = 0; i < e.windows.size(); ++i)
    floats = std::max(floats, cut_step(e, e.cuts[i], e.windows[i], B, starts, lengths));
  if (e.workspace.size() < floats) e.workspace.resize(floats);
  size_t items = 0;
  for (const Cut& cut : e.cuts) items += cut.items.size();
  return (int)items;
}

// One layer: write k, v to their cells, then attend. *_stride: elements from token to token. With
// `cos` and `sin` [T, D / 2] (bfloat16 only) q and k are turned when they are read, behind norms
// [D] of their heads if there are any.
void infer_attention_attend(void* engine, int window, void* keys, void* values, const void* q,
                            const void* k, const void* v, void* out, long q_stride, long k_stride,
                            long v_stride, const float* cos, const float* sin, const float* q_norm,
                            const float* k_norm, float eps) {
  Engine& e = *(Engine*)engine;
  const Rotation rotation{cos, sin, {q_norm, k_norm}, e.D, eps};
  const Rotation* turned = cos ? &rotation : nullptr;
  Cut& cut = e.cuts[window];
  const bool bytes = e.element == 1;
  const long element = bytes ? 2 : e.element, strip = e.strips ? STRIP : 1;
  const long head_bytes = strip * (bytes ? e.D + 4L : e.D * element);
  const long cell_bytes = e.G * head_bytes / strip;
  Writing writing{turned, (const char*)k, (const char*)v, (char*)keys, (char*)values, e.slots, e.num_tokens,
                  e.G, e.D, k_stride * element, v_stride * element, cell_bytes, strip, head_bytes, bytes};
  run_threads(e.parallel, write_cells, &writing, e.num_tokens > MANY_TOKENS ? e.threads : 1);
  Job job{};
  job.keys = (const char*)keys;
  job.values = (const char*)values;
  job.q = (const char*)q;
  job.rotation = turned;
  job.out = out;
  job.tables = e.tables;
  job.joins = cut.joins.data();
  job.workspace = e.workspace.data();
  job.table_width = e.table_width;
  job.page_size = e.page_size;
  job.cell_bytes = cell_bytes;
  job.strip = strip;
  job.head_bytes = head_bytes;
  job.q_bytes = q_stride * element;
  job.padded = round_up(e.D, 32);
  // So a head's block and what meets it suit an L1 cache, and all heads' block and the next one an L2.
  job.block = e.tiles && (bytes || job.padded > 64) ? BLOCK : 64;
  job.state_words = state_words_of(e.D);
  job.window = e.windows[window];
  job.H = e.H;
  job.D = e.D;
  job.rep = e.H / e.G;
  job.scale = e.scale;
  const bool tiny = cut.cost < 20000;  // less than waking a thread
  const int threads = tiny ? 1 : (int)std::min<size_t>(e.threads, cut.items.size());
  Reading reading{&job, &cut.items, e.run, e.tiles, threads};
  run_threads(e.parallel, read_cells, &reading, threads);
}

}  // extern "C"
