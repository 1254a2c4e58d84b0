// Causal attention over a paged cache: dividing a step into items, and threads that compute them.
//
// plan() cuts a step into items: some query tokens of one sequence × some key/value heads, with a
// few whole segments of 512 keys if one sequence must feed several threads. attend() writes the
// step's cells, then threads take items from a counter; which thread computes an item, and how a
// step was cut, changes no bit of the result (attention_item.h says why; segments lie at absolute
// positions and are always folded in order). Sequences that decode side by side and begin with the
// same pages have one item for the whole segments they share, which so are read once for all. The
// arithmetic is in attention_item.h, compiled once for each instruction set and chosen when a plan is made.

#include "attention.h"

#include "isa/dispatch.h"
#include "parts.h"

namespace {

using namespace attention;

class FloatMode {
 public:
  explicit FloatMode(const IsaKernels& isa) : isa_(isa), flush_(true) {
    if (isa_.save_tiles) isa_.save_tiles(&config_);
  }
  ~FloatMode() {  // others on this thread (oneDNN) may count on the tiles' shape
    if (isa_.restore_tiles) isa_.restore_tiles(&config_);
  }

 private:
  const IsaKernels& isa_;
  const FlushDenormals flush_;
  alignas(64) TileConfig config_;
};

struct Cut {  // the items of a step for one window
  std::vector<Item> items;
  std::vector<Join> joins;
  double cost = 0;
  std::vector<long> ends;  // of the items of each node
};

struct AttentionPlan {
  const IsaKernels& isa;
  RunItem run;
  WriteCell write;         // a cell of a strip
  bool tiles;              // in use
  long strip, head_bytes;  // as in LayerCall
  std::vector<HeadPlace> heads;
  std::vector<long> head_ends;  // of each node
  int H, G, D, element;
  long page_size;
  float scale, cap, rounded;
  std::vector<float> slopes;  // empty: none
  std::vector<int64_t> windows;
  // Of the step that was planned last:
  int threads = 1;
  int64_t num_tokens = 0, table_width = 0;
  const int64_t *slots = nullptr, *tables = nullptr;
  std::vector<Cut> cuts{};  // one per window
  std::vector<float> workspace{};
};

int node_of(const AttentionPlan& e, int group) {
  int node = 0;
  while (group >= e.head_ends[(size_t)node]) ++node;
  return node;
}
// Behind `groups` heads from `group` on, which are of one node.
int end_of_heads(const AttentionPlan& e, int group, int groups) {
  return std::min(group + groups, (int)e.head_ends[(size_t)node_of(e, group)]);
}

int tokens_together(const AttentionPlan& e) { return std::max<int64_t>(1, TILE_FLOATS / (e.D * (e.H / e.G))); }

// Numbers of keys and rows, weighted: packing a block costs about as much as a few rows of it.
double cost_of(const AttentionPlan& e, const Item& item, int64_t window) {
  const Span keys = visible(item, window);
  return double(keys.end - keys.begin + BLOCK) * (item.tokens * (e.H / e.G) + 16);
}

void cut_item(const AttentionPlan& e, Cut& cut, Item item, int64_t window, double share, size_t& floats) {
  const Span keys = visible(item, window);
  const int rows = item.tokens * (e.H / e.G);
  const int64_t first = keys.begin / SEGMENT, last = (keys.end - 1) / SEGMENT + 1;
  const double cost = cost_of(e, item, window);
  // Few rows: all heads of a cell at once, as it lies in memory. Many: one head, kept in cache.
  int groups = rows >= 32 ? 1 : e.G;
  const int64_t wish = (int64_t)std::ceil(cost * groups / share);
  const int64_t parts = std::clamp<int64_t>(wish, 1, last - first);
  if (wish > parts) groups = std::max<int64_t>(1, groups * parts / wish);
  for (int group = 0; group < e.G; group = item.group_end) {
    item.group = group;
    item.group_end = end_of_heads(e, group, groups);
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
void cut_shared(const AttentionPlan& e, Cut& cut, Item shared, const int64_t* lengths, double share, size_t& floats) {
  const int rep = e.H / e.G;
  const double cost = cost_of(e, shared, 0);
  const int64_t num_segments = (shared.position + 1) / SEGMENT;
  const int64_t wish = (int64_t)std::ceil(cost * e.G / share);
  const int64_t parts = std::clamp<int64_t>(wish, 1, num_segments);
  const int groups = (int)(wish > parts ? std::max<int64_t>(1, e.G * parts / wish) : e.G);
  for (int group = 0; group < e.G; group = shared.group_end) {
    shared.group = group;
    shared.group_end = end_of_heads(e, group, groups);
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
      own.cost = double(own.position - shared.position + BLOCK) * (rep + 16) * (own.group_end - group);
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
int shared_from(const AttentionPlan& e, int s, int B, const int64_t* starts, const int64_t* lengths,
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

size_t cut_step(const AttentionPlan& e, Cut& cut, int64_t window, int B, const int64_t* starts,
                const int64_t* lengths) {
  const int most = tokens_together(e);
  std::vector<Item> whole;
  for (int s = 0; s < B; ++s) {
    // With slopes, the members of a shared item would need a position each.
    if (!window && e.slopes.empty() && starts[s + 1] - starts[s] == 1) {
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
    if (item.members)
      cut_shared(e, cut, item, lengths, share, floats);
    else
      cut_item(e, cut, item, window, share, floats);
  const auto order = [&](const Item& a, const Item& b) {
    const int one = node_of(e, a.group), other = node_of(e, b.group);
    return one != other ? one < other : a.cost > b.cost;
  };
  std::stable_sort(cut.items.begin(), cut.items.end(), order);
  cut.ends.assign(e.head_ends.size(), 0);
  for (const Item& item : cut.items) ++cut.ends[(size_t)node_of(e, item.group)];
  for (size_t node = 1; node < cut.ends.size(); ++node) cut.ends[node] += cut.ends[node - 1];
  return floats;
}

constexpr int64_t MANY_TOKENS = 31;  // are worth a second thread

struct Writing {
  const rotary::Rotation* rotation;  // of k; or null
  rotary::RotateHeads rotate_heads;
  WriteCell put;  // a cell of a strip
  const char *k, *v;
  char *keys, *values;
  const int64_t* slots;
  const AttentionPlan& plan;
  int64_t num_tokens, num_heads, dim, k_bytes, v_bytes, strip, head_bytes;
  std::atomic<int64_t> next{0};
};

// A cell's keys and values as they are, those of each node together.
void write_plain(const Writing& w, const char* k, const char* v, int64_t cell) {
  long first = 0;
  for (const long end : w.plan.head_ends) {
    if (end == first) continue;
    const HeadPlace& own = w.plan.heads[(size_t)first];
    std::memcpy(w.keys + own.at + cell * own.cell_bytes, k + first * w.head_bytes, (size_t)own.cell_bytes);
    std::memcpy(w.values + own.at + cell * own.cell_bytes, v + first * w.head_bytes, (size_t)own.cell_bytes);
    first = end;
  }
}

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
        w.rotate_heads(*w.rotation, (const uint16_t*)k, turned.data(), w.num_heads, t, 1);
        k = (const char*)turned.data();
      }
      const int64_t lane = w.slots[t] % w.strip, cell = w.slots[t] - lane;
      if (w.strip == 1) {
        write_plain(w, k, v, cell);
        continue;
      }
      for (int64_t head = 0; head < w.num_heads; ++head) {
        const HeadPlace& own = w.plan.heads[(size_t)head];
        const int64_t at = own.at + cell * own.cell_bytes;
        w.put((const uint16_t*)k + head * w.dim, (const uint16_t*)v + head * w.dim, w.keys + at, w.values + at,
              (int)lane, (int)w.dim);
      }
    }
  }
}

struct Reading {
  const LayerCall* call;
  const std::vector<Item>* items;
  const AttentionPlan* plan;
  int threads;
  PartCounters parts;
};

void read_cells(void* data) {
  static thread_local Scratch scratch;
  Reading& r = *(Reading*)data;
  const FloatMode mode(r.plan->isa);
  const std::vector<Item>& items = *r.items;
  int node = own_node();
  for (long i = r.parts.take(node); i >= 0;) {
    // Taken before it is due, so that its keys can be asked for; the last ones go to whoever is free.
    const bool many = r.parts.has_many(node, r.threads);
    const long next = many ? r.parts.take(node) : -1;
    r.plan->run(*r.call, items[(size_t)i], next >= 0 ? &items[(size_t)next] : nullptr, scratch);
    i = many ? next : r.parts.take(node);
  }
}

}  // namespace

extern "C" {

void* infer_attention_new(const char* isa_name, int H, int G, int D, long page_size, int element, float scale,
                          float cap, const float* slopes, float rounded, const int64_t* windows, int num_windows,
                          long num_pages) {
  constexpr float LOG2_E = 1.4426950408889634f;
  const IsaKernels* isa = usable_isa(isa_name);
  if (!isa) return nullptr;
  const bool strips = element == 1 || (element == 2 && isa->strips && D % 16 == 0 && page_size % STRIP == 0);
  const RunItem run = element == 1 ? isa->int8 : strips ? isa->strips : element == 2 ? isa->bfloat16 : isa->float32;
  if (!run) return nullptr;
  std::vector<float> kept(slopes, slopes ? slopes + H : slopes);
  for (float& slope : kept) slope *= rounded ? 1.f : LOG2_E;
  const long strip = strips ? STRIP : 1, head_bytes = strip * (element == 1 ? D + 4L : (long)D * element);
  std::vector<long> head_ends = num_pages ? slices_of(G).ends : std::vector<long>{G};
  std::vector<HeadPlace> heads;
  for (long node = 0, group = 0; node < (long)head_ends.size(); ++node)
    for (const long first = group, end = head_ends[(size_t)node]; group < end; ++group)
      heads.push_back({first * head_bytes / strip * num_pages * page_size + (group - first) * head_bytes,
                       (end - first) * head_bytes / strip});
  return new AttentionPlan{*isa,
                           run,
                           element == 1 ? isa->write_int8 : isa->write_strip,
                           element < 4 && isa->save_tiles,
                           strip,
                           head_bytes,
                           std::move(heads),
                           std::move(head_ends),
                           H,
                           G,
                           D,
                           element,
                           page_size,
                           scale * LOG2_E,
                           cap * LOG2_E,
                           rounded * LOG2_E,
                           std::move(kept),
                           {windows, windows + num_windows}};
}

int infer_attention_heads(int G, int* ends, int* nodes) {
  const NodeSlices divided = slices_of(G);
  for (size_t i = 0; i < divided.ends.size(); ++i) {
    ends[i] = (int)divided.ends[i];
    nodes[i] = divided.nodes[i].number;
  }
  return (int)divided.ends.size();
}

void infer_attention_free(void* plan) { delete (AttentionPlan*)plan; }

int infer_attention_plan(void* plan, int B, const int64_t* starts, const int64_t* lengths, const int64_t* slots,
                         const int64_t* tables, long table_width, int threads) {
  AttentionPlan& e = *(AttentionPlan*)plan;
  expect_threads(threads);
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

void infer_attention_attend(void* plan, int window, void* keys, void* values, const void* q, const void* k,
                            const void* v, void* out, long q_stride, long k_stride, long v_stride, const float* cos,
                            const float* sin, const float* q_norm, const float* k_norm, float eps,
                            const float* q_factor, const float* growth, const float* sinks) {
  AttentionPlan& e = *(AttentionPlan*)plan;
  const rotary::Rotation rotation{cos, sin, {q_norm, k_norm}, q_factor, growth, e.D, eps};
  const rotary::Rotation* turned = cos || q_norm || q_factor || growth ? &rotation : nullptr;
  Cut& cut = e.cuts[window];
  const bool bytes = e.element == 1;
  const long element = bytes ? 2 : e.element;
  Writing writing{turned,
                  e.isa.rotate_heads,
                  e.write,
                  (const char*)k,
                  (const char*)v,
                  (char*)keys,
                  (char*)values,
                  e.slots,
                  e,
                  e.num_tokens,
                  e.G,
                  e.D,
                  k_stride * element,
                  v_stride * element,
                  e.strip,
                  e.head_bytes};
  run_threads(write_cells, &writing, e.num_tokens > MANY_TOKENS ? e.threads : 1);
  LayerCall call{};
  call.keys = (const char*)keys;
  call.values = (const char*)values;
  call.q = (const char*)q;
  call.rotation = turned;
  call.rotate_heads = e.isa.rotate_heads;
  call.out = out;
  call.tables = e.tables;
  call.joins = cut.joins.data();
  call.workspace = e.workspace.data();
  call.table_width = e.table_width;
  call.page_size = e.page_size;
  call.heads = e.heads.data();
  call.strip = e.strip;
  call.head_bytes = e.head_bytes;
  call.q_bytes = q_stride * element;
  call.padded = round_up(e.D, 32);
  // So a head's block and what meets it suit an L1 cache, and all heads' block and the next one an L2.
  call.block = e.tiles && (bytes || call.padded > 64) ? BLOCK : 64;
  call.state_words = state_words_of(e.D);
  call.window = e.windows[window];
  call.H = e.H;
  call.D = e.D;
  call.rep = e.H / e.G;
  call.scale = e.scale;
  call.cap = e.cap;
  call.rounded = e.rounded;
  call.sinks = sinks;
  call.slopes = e.slopes.empty() ? nullptr : e.slopes.data();
  call.shapes_scores = call.cap || call.slopes;
  const bool tiny = cut.cost < 20000;  // less than waking a thread
  const int threads = tiny ? 1 : (int)std::min<size_t>(e.threads, cut.items.size());
  Reading reading{&call, &cut.items, &e, threads, {cut.ends.data(), cut.ends.size()}};
  run_threads(read_cells, &reading, threads);
}

}  // extern "C"
