// y = x Wᵀ + b in bfloat16 on the tile registers (AMX): plain C functions, loaded by native.py.
//
// Shape letters: M rows, N output columns, K inputs; x [M, K], W [N, K], b [N], y [M, N].
//
// A row's result is the same bit for bit in any company: every output element is one float32 sum
// over all of K in ascending order, in whichever tile, thread and cache block it is computed. A
// block of K that does not fit the cache stores its sums and goes on from them, which is exact,
// and no sum is split between threads. Rows do not meet in a tile product (TDPBF16PS), so rows of
// zeros that fill the last tile change nothing, and zeros that fill up K add zeros at its end.
//
// W is packed once. A panel is 32 columns; in it, for every 32 inputs (a step), two tiles of 16
// columns, in each 16 lines of 16 columns × 2 inputs, as the product wants them: a panel is read
// in one sweep. x is packed at every call into tiles of 16 rows × 32 inputs, rows in groups of 32,
// because tiles read at x's own stride would fall into few sets of the cache.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "cpu.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#ifdef X86

namespace {

constexpr int STEP = 32;             // inputs of a tile
constexpr int SIDE = 32;             // rows of a group, columns of a panel: two tiles each
constexpr long TILE = 1024;          // bytes
constexpr long SUMS = SIDE * SIDE;   // float32 sums of a group × a panel
constexpr long K_STEPS = 16;         // steps of a block of K: 32 KB of a panel, in the L1 cache
constexpr long BLOCK_GROUPS = 8;     // groups of an item: with K_STEPS 256 KB of x, in the L2
constexpr long BLOCK_PANELS = 16;    // panels of an item of several groups, at most
constexpr long MOST_ROWS = 1024;     // rows that are packed at a time: bounds the memory
constexpr long AHEAD = 32 * TILE;    // how far a sweep over panels prefetches

inline long ceil_div(long n, long by) { return (n + by - 1) / by; }

struct Call {  // some rows of one product
  const uint16_t *x, *bias;
  const char* weight;
  uint16_t* y;
  long M, N, K, x_stride, steps, panels;
  char* packed;                                    // x
  long groups, row_blocks, item_panels, num_items, num_packs;
  std::atomic<long> next_pack{0}, done_packs{0}, next_item{0};

  int tiles_in(long group) const { return M - group * SIDE > 16 ? 2 : 1; }
};

struct Packing {  // rows of W that become columns from `column` on
  const uint16_t* source;
  char* weight;
  long rows, K, stride, column, steps;
  std::atomic<long> next{0};
};

// Fewer misses of the page table while W and x stream by. Partly filled pages would be waste.
constexpr uintptr_t HUGE_PAGE = 1 << 21;

inline void ask_for_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__)
  const uintptr_t from = ((uintptr_t)memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t end = ((uintptr_t)memory + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (end > from) madvise((void*)from, end - from, MADV_HUGEPAGE);
#endif
}

// Memory of a thread; grows, and is given back when the thread ends.
class Memory {
 public:
  ~Memory() { std::free(at_); }
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(at_);
      size_ = ceil_div(bytes, HUGE_PAGE) * HUGE_PAGE;
      at_ = (char*)std::aligned_alloc(HUGE_PAGE, size_);
      if (!at_) std::abort();
      ask_for_huge_pages(at_, bytes);
    }
    return at_;
  }

 private:
  char* at_ = nullptr;
  size_t size_ = 0;
};

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

// ---- Packing -----------------------------------------------------------------------------------

INLINE __mmask32 first_of_32(long n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// One panel's tiles, as far as they come from this source: the others' columns stay untouched.
void pack_panel(const Packing& p, long panel) {
  const __m512i lines = _mm512_mullo_epi32(
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(16));
  for (int half = 0; half < 2; ++half) {
    const long first = panel * SIDE + half * 16 - p.column;  // the source's row of lane 0
    __mmask16 lanes = 0;
    for (int i = 0; i < 16; ++i) lanes |= (first + i >= 0 && first + i < p.rows) << i;
    if (!lanes) continue;
    for (long step = 0; step < p.steps; ++step) {
      // Whole lines first: gathering straight from rows that lie 4 KB apart would thrash the L1.
      alignas(64) uint32_t square[16][16];
      const __mmask32 inputs = first_of_32(p.K - step * STEP);
      for (int i = 0; i < 16; ++i)
        if (lanes >> i & 1)
          _mm512_store_si512(square[i], _mm512_maskz_loadu_epi16(
              inputs, p.source + (first + i) * p.stride + step * STEP));
      char* to = p.weight + ((panel * p.steps + step) * 2 + half) * TILE;
      for (int pair = 0; pair < 16; ++pair)
        _mm512_mask_storeu_epi32(
            to + pair * 64, lanes,
            _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, lines, &square[0][pair], 4));
    }
  }
}

void pack_weight(void* data) {
  Packing& p = *(Packing*)data;
  const long first = p.column / SIDE, end = ceil_div(p.column + p.rows, SIDE);
  for (long panel; (panel = first + p.next.fetch_add(1)) < end;) pack_panel(p, panel);
}

constexpr long PACK_STEPS = 32;  // of one tile row of x: what a thread packs at a time

void pack_rows(const Call& c, long item) {
  const long parts = ceil_div(c.steps, PACK_STEPS), tile_row = item / parts;
  const long group = tile_row / 2, tiles = c.tiles_in(group), row = tile_row * 16;
  const long begin = item % parts * PACK_STEPS, end = std::min(begin + PACK_STEPS, c.steps);
  char* to = c.packed + (group * c.steps * 2 + begin * tiles + tile_row % 2) * TILE;
  for (long step = begin; step < end; ++step, to += tiles * TILE) {
    const __mmask32 inputs = first_of_32(c.K - step * STEP);
    const uint16_t* from = c.x + row * c.x_stride + step * STEP;
    for (long i = 0; i < 16; ++i, from += c.x_stride)  // rows behind the end are zeros
      _mm512_store_si512(to + i * 64, _mm512_maskz_loadu_epi16(row + i < c.M ? inputs : 0, from));
  }
}

// ---- Product -----------------------------------------------------------------------------------

// sums (= or +=) a group × a panel over some steps; meanwhile prefetches lines from `next` on.
template <int ROWS, bool FIRST>
void multiply(const char* a, const char* b, long steps, float* sums, const char* next, long lines) {
  FENCE();
  if (FIRST) {
    _tile_zero(0);
    _tile_zero(1);
    if (ROWS == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    if (ROWS == 2) {
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    }
  }
  for (long step = 0; step < steps; ++step) {
    for (long i = 0; i < lines; ++i) _mm_prefetch(next + i * 64, _MM_HINT_T1);
    next += lines * 64;
    _tile_loadd(6, b, 64);
    _tile_stream_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + TILE, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (ROWS == 2) {
      _tile_stream_loadd(5, a + TILE, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    a += ROWS * TILE;
    b += 2 * TILE;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (ROWS == 2) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
  FENCE();
}

void multiply(int tiles, bool first, const char* a, const char* b, long steps, float* sums,
              const char* next, long lines) {
  if (tiles == 2) (first ? multiply<2, true> : multiply<2, false>)(a, b, steps, sums, next, lines);
  else (first ? multiply<1, true> : multiply<1, false>)(a, b, steps, sums, next, lines);
}

INLINE __m512 widen(__mmask16 lanes, const uint16_t* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// The bias, the rounding to bfloat16, and out.
void finish(const Call& c, const float* sums, long group, long panel) {
  const long column = panel * SIDE, row = group * SIDE, rows = std::min<long>(SIDE, c.M - row);
  const __mmask32 columns = first_of_32(c.N - column);
  __m512 low = _mm512_setzero_ps(), high = low;
  if (c.bias) {
    low = widen((__mmask16)columns, c.bias + column);
    high = widen((__mmask16)(columns >> 16), c.bias + column + 16);
  }
  uint16_t* to = c.y + row * c.N + column;
  for (long r = 0; r < rows; ++r, to += c.N) {
    const float* from = sums + r / 16 * 512 + r % 16 * 16;
    const __m512 left = _mm512_add_ps(_mm512_load_ps(from), low);
    const __m512 right = _mm512_add_ps(_mm512_load_ps(from + 256), high);
    _mm512_mask_storeu_epi16(to, columns, (__m512i)_mm512_cvtne2ps_pbh(right, left));
  }
}

// One group: W is read once from end to end, each panel's sums stay in the tiles.
void sweep(const Call& c, long group, long begin, long end, float* sums) {
  const long panel_bytes = c.steps * 2 * TILE;
  for (long panel = begin; panel < end; ++panel) {
    const char* b = c.weight + panel * panel_bytes;
    multiply(c.tiles_in(group), true, c.packed + group * panel_bytes, b, c.steps, sums, b + AHEAD,
             2 * TILE / 64);
    finish(c, sums, group, panel);
  }
}

// Several groups: a slice of a panel stays in the L1 cache while the groups' tiles pass by.
void block(const Call& c, long group, long group_end, long begin, long end, float* sums) {
  const long panel_bytes = c.steps * 2 * TILE, groups = group_end - group;
  for (long k = 0; k < c.steps; k += K_STEPS) {
    const long steps = std::min(K_STEPS, c.steps - k);
    for (long panel = begin; panel < end; ++panel) {
      const char* b = c.weight + panel * panel_bytes + k * 2 * TILE;
      const char* next = panel + 1 < end ? b + panel_bytes
                                         : c.weight + begin * panel_bytes + (k + K_STEPS) * 2 * TILE;
      const long lines = ceil_div(2 * TILE / 64, groups);
      for (long g = 0; g < groups; ++g) {
        const int tiles = c.tiles_in(group + g);
        float* own = sums + ((panel - begin) * groups + g) * SUMS;
        multiply(tiles, k == 0, c.packed + (group + g) * panel_bytes + k * tiles * TILE, b, steps,
                 own, next + g * steps * lines * 64, lines);
        if (k + steps == c.steps) finish(c, own, group + g, panel);
      }
    }
  }
}

void compute(void* data) {
  static thread_local Memory memory;
  Call& c = *(Call*)data;
  for (long item; (item = c.next_pack.fetch_add(1)) < c.num_packs; c.done_packs.fetch_add(1))
    pack_rows(c, item);
  for (int tries = 0; c.done_packs.load() < c.num_packs; ++tries)
    if (tries < 4000) _mm_pause();
    else std::this_thread::yield();
  TileConfig before, config;
  save_tiles(&before);
  config.palette = 1;
  for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.colsb[i] = 64;
  FENCE();
  _tile_loadconfig(&config);
  float* sums = (float*)memory.reserve(BLOCK_GROUPS * BLOCK_PANELS * SUMS * sizeof(float));
  for (long item; (item = c.next_item.fetch_add(1)) < c.num_items;) {
    const long panel = item / c.row_blocks * c.item_panels, part = item % c.row_blocks;
    const long panel_end = std::min(panel + c.item_panels, c.panels);
    const long group = c.groups * part / c.row_blocks;
    const long group_end = c.groups * (part + 1) / c.row_blocks;
    if (group_end - group == 1) sweep(c, group, panel, panel_end, sums);
    else block(c, group, group_end, panel, panel_end, sums);
  }
  restore_tiles(&before);  // others on this thread (oneDNN) may count on the tiles' shape
}
END_TARGET

}  // namespace

extern "C" {

int infer_linear_runs_here() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") && may_use_tiles();
}

long infer_linear_packed_bytes(long N, long K) {
  return ceil_div(N, SIDE) * ceil_div(K, STEP) * 2 * TILE;
}

// Rows of a weight (bfloat16, `stride` elements apart) → columns from `column` on of `packed`, which
// holds N columns; the sources of a fused layer come one by one. Columns that fill up the last panel
// stay as they are: columns do not meet in a product either.
void infer_linear_pack(const uint16_t* source, long rows, long K, long stride, char* packed,
                       long column, long N, void* parallel, int threads) {
  if (column == 0) ask_for_huge_pages(packed, infer_linear_packed_bytes(N, K));
  Packing packing{source, packed, rows, K, stride, column, ceil_div(K, STEP)};
  run_threads((Parallel)parallel, pack_weight, &packing, threads);
}

// Strides in elements; `bias` may be null; y is dense.
void infer_linear(const uint16_t* x, const char* packed, const uint16_t* bias, uint16_t* y, long M,
                  long N, long K, long x_stride, void* parallel, int threads) {
  static thread_local Memory memory;
  for (long row = 0; row < M; row += MOST_ROWS) {
    Call c{};
    c.x = x + row * x_stride;
    c.bias = bias;
    c.weight = packed;
    c.y = y + row * N;
    c.M = std::min(MOST_ROWS, M - row);
    c.N = N;
    c.K = K;
    c.x_stride = x_stride;
    c.steps = ceil_div(K, STEP);
    c.panels = ceil_div(N, SIDE);
    c.groups = ceil_div(c.M, SIDE);
    c.packed = memory.reserve(c.groups * c.steps * 2 * TILE);
    c.num_packs = ceil_div(c.M, 16) * ceil_div(c.steps, PACK_STEPS);
    c.row_blocks = ceil_div(c.groups, BLOCK_GROUPS);
    // Enough items that no thread waits long for another, up to as many panels as the cache holds.
    const long share = c.panels * c.row_blocks / (8 * threads);
    c.item_panels = std::clamp(share, 1L, BLOCK_PANELS);
    c.num_items = ceil_div(c.panels, c.item_panels) * c.row_blocks;
    const bool tiny = c.panels * c.steps * c.groups < 256;  // less work than waking a thread
    run_threads((Parallel)parallel, compute, &c, tiny ? 1 : threads);
  }
}

}  // extern "C"

#else

extern "C" {  // nobody calls the others where this says no
int infer_linear_runs_here() { return 0; }
long infer_linear_packed_bytes(long, long) { return 0; }
void infer_linear_pack() {}
void infer_linear() {}
}

#endif
