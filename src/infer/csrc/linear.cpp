// y = g(n(x) Wᵀ + b) + r in bfloat16, with weights in bfloat16, int8 or int4, on the tile registers
// (AMX) or on vectors (AVX-512 with BF16 and VNNI): plain C functions, loaded by native.py. n: RMSNorm
// or nothing; g: two columns become one, as the gate of an MLP wants it, or nothing; r: a residual or
// nothing.
//
// Shape letters: M rows, N columns of the product, K inputs; x [M, K], W [N, K], b [N].
//
// A row's result is the same bit for bit in any company: every sum runs over all of K in ascending
// order in float32 (exactly, in int32, if W is int8), in whichever tile, thread and cache block it
// is computed. A block of K that does not fit the cache stores its sums and goes on from them, which
// is exact, and no sum is split between threads. Rows do not meet in a tile product, so rows of
// zeros that fill the last tile change nothing, and zeros that fill up K add zeros at its end.
//
// int8: each row of W has one scale, each row of n(x) one that is found when it is packed; largest
// magnitude = 127.
//
// int4: a weight is scale · multiple · (n - 8), n in 0 … 15, with a scale for each row of W and a
// multiple in 1 … 16 for each 64 inputs of it. multiple · (n - 8) is an int8 number, so everything
// behind the unpacking is int8's, exact sums included.
//
// W is packed once. A panel is 32 columns; in it, for every 64 bytes of inputs (a step), two tiles
// of 16 columns, in each 16 lines of 16 columns × 4 bytes, as the product wants them: a panel is
// read in one sweep. In int4 the two tiles share theirs, low halves of bytes and high ones, and a panel
// begins with its multiples, 32 for each step. With a gate, one tile holds columns of the first half of W, the other theirs of
// the second. x is packed at every call into tiles of 16 rows × 64 bytes, rows in groups of 32,
// because tiles read at x's own stride would fall into few sets of the cache. Vectors read the same
// layouts (linear_vectors.h); their sums in bfloat16 are other ones than the tiles', in int8 the same.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu.h"
#include "kernels.h"

#ifdef X86

namespace {

constexpr int SIDE = 32;             // rows of a group, columns of a panel: two tiles each
constexpr long TILE = 1024;          // bytes: 16 lines of 64
constexpr long SUMS = SIDE * SIDE;   // sums of a group × a panel, 4 bytes each
constexpr long SLICE = 16;           // steps: 32 KB of a panel
constexpr long BLOCK_GROUPS = 8;     // groups of an item: with a slice 256 KB of x, in the L2
constexpr long ITEM_PANELS = 16;     // panels of an item, at most
constexpr long MOST_ROWS = 1024;     // rows that are packed at a time: bounds the memory
constexpr long PACK_ROWS = 4;        // rows that a thread packs at a time; divides 16
constexpr long AHEAD = 32 * TILE;    // how far a sweep over panels prefetches
constexpr long FEW_ROWS = 14;        // that vectors take together: 28 sums and what meets in 32 registers
constexpr long LEAD = 2, RING = 4;   // steps of int4 that are unpacked ahead, and that are kept

enum Gate { NONE, SILU, GELU };

struct Layer {  // what does not change between calls
  char* weight;
  long N, K, steps, panels, width;  // width: columns of y
  int bits;
  bool float_out;
  Gate gate;
  bool amx;  // in use; else vectors
  float eps;
  float *norm, *bias, *scales;  // [K padded], [N], [N padded]; null: absent; norm: in `Halves`
  int32_t* starts;              // [N padded]: where whole sums of vectors begin
  Parallel parallel;

  bool whole() const { return bits < 16; }
  // An item of several groups: steps of a block of K, and panels. With tiles a slice of a panel stays in
  // the L1 cache; with vectors, which are slower, sums come and go less often and all fits half the L2.
  long block_steps() const { return amx ? SLICE : 2 * SLICE; }
  long block_panels() const { return amx ? ITEM_PANELS : ITEM_PANELS / 4; }
  long step_bytes() const { return bits == 4 ? TILE : 2 * TILE; }
  long head_bytes() const { return bits == 4 ? ceil_div(steps * SIDE, 64) * 64 : 0; }
  long panel_bytes() const { return head_bytes() + steps * step_bytes(); }
  char* multiples(long panel, long step) const { return weight + panel * panel_bytes() + step * SIDE; }
  char* tiles(long panel, long step) const {
    return weight + panel * panel_bytes() + head_bytes() + step * step_bytes();
  }
};

struct Call {  // some rows of one product
  const Layer& layer;
  const uint16_t *x, *residual;
  char* y;
  long M, x_stride;
  char* packed;       // x
  float* row_scales;  // int8
  int32_t* eights;    // nibbles: [rows, steps], -8 · the sum of a row's numbers in a step
  long groups, row_blocks, item_panels, num_items, num_packs;
  std::atomic<long> next_pack{0}, done_packs{0}, next_item{0};

  bool nibbles() const { return layer.bits == 4 && !layer.amx && M <= FEW_ROWS; }  // multiplied as they are
  int tiles_in(long group) const { return M - group * SIDE > 16 ? 2 : 1; }
  long rows_in(long group) const { return std::min<long>(SIDE, M - group * SIDE); }
  long step_bytes(long group) const {  // of a group's x
    return layer.amx ? tiles_in(group) * TILE : rows_in(group) * 64;
  }
  // Block of K by block of K, so that what an item reads of one is together and spreads over the
  // sets of the cache; in a block group by group.
  char* tiles(long group, long step) const {
    const long block = layer.block_steps(), k = step / block * block, steps = std::min(block, layer.steps - k);
    const long each = groups > 1 ? 2 * TILE : step_bytes(group);
    return packed + (k * groups + group * steps) * each + (step - k) * step_bytes(group);
  }
  const char* start_of(long item) const {  // its weights; behind the end: anything that is cached
    const long panel = item < num_items ? item / row_blocks * item_panels : 0;
    return layer.weight + panel * layer.panel_bytes();
  }
};

struct Packing {  // rows of W that become columns from `column` on
  const Layer& layer;
  const uint16_t* source;
  long rows, stride, column;
  long first, end;  // panels
  std::atomic<long> next{0};
};

TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")

INLINE __mmask32 first_of_32(long n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }
INLINE __mmask16 first_of_16(long n) { return (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }

INLINE __m512 widen(__mmask16 lanes, const uint16_t* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// ---- int8, int4 --------------------------------------------------------------------------------

INLINE __m128i quantized(__m512 x, float inverse) {
  return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse))));
}

constexpr float MOST_MULTIPLE = 16.f, TOP4 = 7.5f * MOST_MULTIPLE;

INLINE __m512 quantized4(__m512 x, float inverse) {  // whole numbers, -8 … 7
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(inverse)), 8);
  return _mm512_min_ps(_mm512_max_ps(whole, _mm512_set1_ps(-8.f)), _mm512_set1_ps(7.f));
}

// Of the multiple of a column's scale that takes in the largest of 64 weights, and those below it,
// which cut that one off and divide the others more finely: the one with the least squared error.
INLINE float best_multiple(const uint16_t* row, long count, const Scale& column) {
  __m512 x[4];
  __m512i most = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) {
    x[i] = widen(first_of_16(count - i * 16), row + i * 16);
    most = _mm512_max_epu32(most, magnitude(x[i]));
  }
  float largest = _mm512_reduce_max_ps(_mm512_castsi512_ps(most)) * column.inverse / 7.5f;
  // 8 may have become 8.000001; also if NaN.
  largest = largest > 1.f ? std::min(std::ceil(largest - 1e-5f), MOST_MULTIPLE) : 1.f;
  float best = largest, least = INFINITY;
  for (float multiple = largest; multiple >= 1.f && multiple > largest - 4.f; --multiple) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      const __m512 whole = quantized4(x[i], column.inverse / multiple);
      const __m512 error = _mm512_fnmadd_ps(whole, _mm512_set1_ps(column.scale * multiple), x[i]);
      sum = _mm512_fmadd_ps(error, error, sum);
    }
    const float error = _mm512_reduce_add_ps(sum);
    if (error < least) least = error, best = multiple;
  }
  return best;
}

// A step's two tiles in int8. A product of 16 bits by a multiple is two of 8: nothing is carried.
INLINE void unpack(const char* from, const char* multiples, char* to) {
  const __m512i spread = multiples_to_15(0x01010101);
  const __m512i half = _mm512_set1_epi8(15);
  __m512i by[2], zero[2];
  for (int i = 0; i < 2; ++i) {
    const __m128i sixteen = _mm_loadu_si128((const __m128i*)(multiples + i * 16));
    const __m512i each = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), spread);
    by[i] = _mm512_and_si512(each, _mm512_set1_epi16(255));
    zero[i] = _mm512_slli_epi16(each, 3);
  }
#pragma GCC unroll 4
  for (long i = 0; i < TILE; i += 64) {
    const __m512i both = _mm512_load_si512(from + i);
    const __m512i low = _mm512_and_si512(both, half);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
    _mm512_store_si512(to + i, _mm512_sub_epi8(_mm512_mullo_epi16(low, by[0]), zero[0]));
    _mm512_store_si512(to + TILE + i, _mm512_sub_epi8(_mm512_mullo_epi16(high, by[1]), zero[1]));
  }
}

// Some steps of a panel; returns `to`.
const char* unpack_some(const Layer& layer, long panel, long first, long steps, char* to) {
  for (long step = 0; step < steps; ++step)
    unpack(layer.tiles(panel, first + step), layer.multiples(panel, first + step), to + step * 2 * TILE);
  return to;
}

// ---- Packing -----------------------------------------------------------------------------------

// Numbers [first, …) of a row of W as one line of a tile.
INLINE __m512i line_of(const Layer& layer, const uint16_t* row, long step, float inverse) {
  if (!layer.whole()) return _mm512_maskz_loadu_epi16(first_of_32(layer.K - step * 32), row + step * 32);
  alignas(64) char line[64];
  for (int i = 0; i < 4; ++i) {
    const long first = step * 64 + i * 16;
    const __m512 x = widen(first_of_16(layer.K - first), row + first);
    _mm_store_si128((__m128i*)(line + i * 16),
                    layer.bits == 8 ? quantized(x, inverse)
                                    : _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_add_ps(
                                          quantized4(x, inverse), _mm512_set1_ps(8.f)))));
  }
  return _mm512_load_si512(line);
}

// One panel's tiles, as far as they come from this source: the others' columns stay untouched.
void pack_panel(const Packing& p, long panel) {
  const Layer& layer = p.layer;
  const __m512i lines = multiples_to_15(16);
  for (int half = 0; half < 2; ++half) {
    // The column of lane 0, and the source's row that it is.
    const long column = layer.gate ? half * layer.width + panel * 16 : panel * SIDE + half * 16;
    const long column_end = layer.gate ? (half + 1) * layer.width : layer.N;
    const long first = column - p.column;
    __mmask16 lanes = 0;
    std::vector<float> inverses(16 * layer.steps);
    for (int i = 0; i < 16; ++i) {
      if (first + i < 0 || first + i >= p.rows || column + i >= column_end) continue;
      lanes |= 1 << i;
      if (!layer.whole()) continue;
      const uint16_t* row = p.source + (first + i) * p.stride;
      __m512i most = _mm512_setzero_si512();
      for (long k = 0; k < layer.K; k += 16)
        most = _mm512_max_epu32(most, magnitude(widen(first_of_16(layer.K - k), row + k)));
      const Scale scale(most, layer.bits == 8 ? 127.f : TOP4);
      layer.scales[panel * SIDE + half * 16 + i] = scale.scale;
      for (long step = 0; step < layer.steps; ++step) {
        float multiple = 1.f;
        if (layer.bits == 4) {
          multiple = best_multiple(row + step * 64, layer.K - step * 64, scale);
          layer.multiples(panel, step)[half * 16 + i] = (char)multiple;
        }
        inverses[step * 16 + i] = scale.inverse / multiple;
      }
    }
    if (!lanes) continue;
    for (long step = 0; step < layer.steps; ++step) {
      // Whole lines first: gathering straight from rows that lie 4 KB apart would thrash the L1.
      alignas(64) uint32_t square[16][16];
      for (int i = 0; i < 16; ++i)
        if (lanes >> i & 1)
          _mm512_store_si512(square[i], line_of(layer, p.source + (first + i) * p.stride, step,
                                                inverses[step * 16 + i]));
      char* to = layer.tiles(panel, step) + (layer.bits == 4 ? 0 : half * TILE);
      for (int part = 0; part < 16; ++part, to += 64) {
        __m512i line =
            _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, lines, &square[0][part], 4);
        if (layer.bits == 4) {
          const __m512i other = _mm512_set1_epi8(half ? 15 : (char)0xf0);
          line = _mm512_or_si512(half ? _mm512_slli_epi16(line, 4) : line,
                                 _mm512_and_si512(_mm512_loadu_si512(to), other));
        }
        _mm512_mask_storeu_epi32(to, lanes, line);
      }
    }
  }
}

// Vectors multiply bytes without a sign by bytes with one, so a row's numbers are 128 too large
// there, and a column's sum begins at what that will have added.
void begin_sums(const Layer& layer, long panel) {
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  alignas(64) char unpacked[2 * TILE];
  for (long step = 0; step < layer.steps; ++step) {
    const char* from = layer.tiles(panel, step);
    if (layer.bits == 4) unpack(from, layer.multiples(panel, step), unpacked), from = unpacked;
    for (long i = 0; i < 2 * TILE; i += 64)
      sums[i / TILE] = _mm512_dpbusd_epi32(sums[i / TILE], _mm512_set1_epi8(1), _mm512_load_si512(from + i));
  }
  for (int half = 0; half < 2; ++half)
    _mm512_storeu_si512(layer.starts + panel * SIDE + half * 16,
                        _mm512_mullo_epi32(sums[half], _mm512_set1_epi32(-128)));
}

void pack_weight(void* data) {
  Packing& p = *(Packing*)data;
  for (long panel; (panel = p.first + p.next.fetch_add(1)) < p.end;) {
    pack_panel(p, panel);
    if (p.layer.starts) begin_sums(p.layer, panel);
  }
}

struct Halves {  // of 32 numbers in a row: those with even indices, and those with odd ones
  __m512 even, odd;
  Halves times(__m512 by) const { return {_mm512_mul_ps(even, by), _mm512_mul_ps(odd, by)}; }
  Halves times(const float* by) const {
    return {_mm512_mul_ps(even, _mm512_loadu_ps(by)), _mm512_mul_ps(odd, _mm512_loadu_ps(by + 16))};
  }
};

INLINE Halves read_halves(const uint16_t* x, long count) {
  const __m512i both = _mm512_maskz_loadu_epi16(first_of_32(count), x);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)))};
}

INLINE __m512i rounded(Halves x) {  // 32 bfloat16
  const __m512i sixteen = multiples_to_15(0x10001), pairs = _mm512_add_epi32(sixteen, _mm512_set1_epi32(16 << 16));
  return _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(x.odd, x.even));
}

INLINE __m512i whole_numbers(Halves x) {  // 32 of 16 bits
  const __m512i odd = _mm512_slli_epi32(_mm512_cvtps_epi32(x.odd), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_cvtps_epi32(x.even), odd);
}

INLINE __m512i bytes_of(__m512i first, __m512i second) {  // 32 + 32 numbers of 16 bits, in order
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  return _mm512_permutexvar_epi64(order, _mm512_packs_epi16(first, second));
}

// Some rows of n(x) → lines of tiles; rows behind the end are zeros. In int8 the factor that makes a
// row's norm one is a part of the row's scale only.
template <bool WHOLE, bool NORM>
void pack_some_rows(const Call& c, long first) {
  const Layer& layer = c.layer;
  const long K = layer.K, steps = layer.steps, group = first / SIDE;
  const long line = first % SIDE * 64;
  const __m512i sign = _mm512_set1_epi8(layer.amx || c.nibbles() ? 0 : (char)0x80);
  const long rows = std::clamp(c.M - first, 0L, PACK_ROWS);
  const float* norm = layer.norm;
  __m512 by[PACK_ROWS];
  for (long r = 0; r < rows && (WHOLE || NORM); ++r) {
    const uint16_t* x = c.x + (first + r) * c.x_stride;
    Halves squares{_mm512_setzero_ps(), _mm512_setzero_ps()};
    __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (long k = 0; k < K; k += 32) {
      Halves part = read_halves(x + k, K - k);
      if (NORM) {
        squares.even = _mm512_fmadd_ps(part.even, part.even, squares.even);
        squares.odd = _mm512_fmadd_ps(part.odd, part.odd, squares.odd);
      }
      if (!WHOLE) continue;
      if (NORM) part = part.times(norm + k);
      most[0] = _mm512_max_epu32(most[0], magnitude(part.even));
      most[1] = _mm512_max_epu32(most[1], magnitude(part.odd));
    }
    float factor = 1.f;
    if (NORM) {
      const float sum = _mm512_reduce_add_ps(_mm512_add_ps(squares.even, squares.odd));
      factor = 1.f / std::sqrt(sum / K + layer.eps);
    }
    if (WHOLE) {
      const Scale scale(_mm512_max_epu32(most[0], most[1]));
      c.row_scales[first + r] = scale.scale * factor;
      factor = scale.inverse;
    }
    by[r] = _mm512_set1_ps(factor);
  }
  for (long step = 0; step < steps; ++step) {
    char* to = c.tiles(group, step) + line;
    for (long r = 0; r < rows; ++r, to += 64) {
      const long k = step * (WHOLE ? 64 : 32), left = K - k;
      const uint16_t* x = c.x + (first + r) * c.x_stride + k;
      const auto part = [&](long from) {
        const Halves own = read_halves(x + from, left - from);
        return (NORM ? own.times(norm + k + from) : own).times(by[r]);
      };
      if (WHOLE) {
        const __m512i bytes = bytes_of(whole_numbers(part(0)), whole_numbers(part(32)));
        _mm512_store_si512(to, _mm512_xor_si512(sign, bytes));
        if (!c.nibbles()) continue;
        const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(8), bytes);
        c.eights[(first + r) * steps + step] = -_mm512_reduce_add_epi32(sums);
      } else {
        _mm512_store_si512(to, NORM ? rounded(part(0)) : _mm512_maskz_loadu_epi16(first_of_32(left), x));
      }
    }
    // With one group the tiles have no more rows than there are.
    for (long r = rows; r < PACK_ROWS && layer.amx && c.groups > 1; ++r, to += 64)
      _mm512_store_si512(to, _mm512_setzero_si512());
  }
}

void pack_rows(const Call& c, long item) {
  constexpr decltype(&pack_some_rows<false, false>) KINDS[2][2] = {
      {pack_some_rows<false, false>, pack_some_rows<false, true>},
      {pack_some_rows<true, false>, pack_some_rows<true, true>}};
  KINDS[c.layer.whole()][c.layer.norm != nullptr](c, item * PACK_ROWS);
}

// ---- Product -----------------------------------------------------------------------------------

// sums (= or +=) a group × a panel over some steps; meanwhile prefetches lines from `next` on, with
// TURN from step `turn` on from `elsewhere` on. int4 is unpacked into `ring`, two steps ahead, so that
// it is done beside the products and in the cache when its turn comes.
template <int BITS, int ROWS, bool FIRST, bool TURN>
void multiply(const char* a, const char* b, long steps, float* sums, const char* next, long lines,
              long turn = 0, const char* elsewhere = nullptr, const char* multiples = nullptr,
              char* ring = nullptr) {
#define PRODUCT(to, from, by) \
  if (BITS < 16) _tile_dpbssd(to, from, by); \
  else _tile_dpbf16ps(to, from, by)
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
  const char* packed = b;
  const auto unpack_step = [&](long step) {
    if (BITS != 4 || step >= steps) return;
    unpack(packed + step * TILE, multiples + step * SIDE, ring + step % RING * 2 * TILE);
    FENCE();
  };
  for (long step = 0; step < LEAD; ++step) unpack_step(step);
  for (long step = 0; step < steps; ++step) {
    if (BITS == 4) b = ring + step % RING * 2 * TILE;
    if (TURN && step == turn) next = elsewhere;
    for (long i = 0; i < lines; ++i) _mm_prefetch(next + i * 64, _MM_HINT_T1);
    next += lines * 64;
    if (!FIRST && BITS == 16)  // the sums that come after these
      for (int i = 0; i < 4; ++i) _mm_prefetch((const char*)sums + 4096 + step * 256 + i * 64, _MM_HINT_T0);
    _tile_loadd(6, b, 64);
    _tile_stream_loadd(4, a, 64);
    PRODUCT(0, 4, 6);
    _tile_loadd(7, b + TILE, 64);
    PRODUCT(1, 4, 7);
    if (ROWS == 2) {
      _tile_stream_loadd(5, a + TILE, 64);
      PRODUCT(2, 5, 6);
      PRODUCT(3, 5, 7);
    }
    a += ROWS * TILE;
    b += 2 * TILE;
    unpack_step(step + LEAD);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (ROWS == 2) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
  FENCE();
#undef PRODUCT
}

#include "linear_vectors.h"

// ---- Around it ---------------------------------------------------------------------------------

INLINE __m512 exponential(__m512 x) {  // 2¹²⁶ at most
  const __m512 most = _mm512_set1_ps(126.f);
  const __m512 scaled = _mm512_min_ps(most, _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
  const __m512 whole = _mm512_roundscale_ps(scaled, 8);  // to the nearest integer
  const __m512 r = _mm512_sub_ps(scaled, whole);         // in [-½, ½]: 2^r by its series
  __m512 p = _mm512_set1_ps(1.3333558e-3f);
  for (const float c : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, whole);
}

// silu(x) = x / (1 + exp(-x)); gelu by tanh is the same function of another argument.
INLINE __m512 activated(Gate gate, __m512 x) {
  __m512 z = x;
  if (gate == GELU) {
    const __m512 cubed = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    z = _mm512_mul_ps(_mm512_set1_ps(1.59576912f),
                      _mm512_fmadd_ps(cubed, _mm512_set1_ps(0.044715f), x));
  }
  const __m512 one = _mm512_set1_ps(1.f);
  const __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), z)));
  // A third of a division's time: an estimate of 14 bits, and one step of Newton's.
  const __m512 estimate = _mm512_rcp14_ps(below);
  const __m512 error = _mm512_fnmadd_ps(below, estimate, one);
  return _mm512_mul_ps(x, _mm512_fmadd_ps(error, estimate, estimate));
}

// Sums of a group × some panels, which lie `stride` apart → y: the scales, the bias, the gate, the
// residual, the rounding. Row by row, so that lines of y are written whole: rows are often a multiple
// of 4 KB apart, and of lines that are half written the caches keep few. EDGE: the last panel has
// columns that y has not. Everything is in locals: a store could change it anywhere else.
template <bool WHOLE, bool EDGE>
void finish_rows(const Call& c, const float* sums, long stride, long group, long begin, long end) {
  const Layer& layer = c.layer;
  const Gate gate = layer.gate;
  const bool float_out = layer.float_out;
  const long width = layer.width, N = layer.N, side = gate ? 16 : SIDE, to_other = gate ? width : 16;
  const long first = group * SIDE, rows = c.rows_in(group);
  const float *bias = layer.bias, *scales = layer.scales;
  const uint16_t* residual = c.residual;
  char* y = c.y;
  const auto put = [=](long at, __mmask16 lanes, __m512 value) {
    if (residual) value = _mm512_add_ps(value, widen(lanes, residual + at));
    if (float_out) _mm512_mask_storeu_ps((float*)y + at, lanes, value);
    else _mm256_mask_storeu_epi16((uint16_t*)y + at, lanes, (__m256i)_mm512_cvtneps_pbh(value));
  };
  for (long r = 0; r < rows; ++r) {
    const float* from = sums + r / 16 * 512 + r % 16 * 16;
    const __m512 scale = _mm512_set1_ps(WHOLE ? c.row_scales[first + r] : 1.f);
    for (long panel = begin; panel < end; ++panel, from += stride) {
      const long column = panel * side, other = column + to_other, at = (first + r) * width + column;
      const __mmask16 lanes = EDGE ? first_of_16(width - column) : (__mmask16)~0;
      const __mmask16 others = EDGE ? first_of_16((gate ? N : width) - other) : (__mmask16)~0;
      __m512 one = _mm512_load_ps(from), two = _mm512_load_ps(from + 256);
      if (WHOLE) {
        const float* own = scales + panel * SIDE;
        one = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(one)),
                            _mm512_mul_ps(_mm512_loadu_ps(own), scale));
        two = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(two)),
                            _mm512_mul_ps(_mm512_loadu_ps(own + 16), scale));
      }
      if (bias) {
        one = _mm512_add_ps(one, _mm512_maskz_loadu_ps(lanes, bias + column));
        two = _mm512_add_ps(two, _mm512_maskz_loadu_ps(others, bias + other));
      }
      if (gate) {
        put(at, lanes, _mm512_mul_ps(activated(gate, one), two));
      } else {
        put(at, lanes, one);
        put(at + 16, others, two);
      }
    }
  }
}

void finish(const Call& c, const float* sums, long stride, long group, long begin, long end) {
  constexpr decltype(&finish_rows<false, false>) KINDS[2][2] = {
      {finish_rows<false, false>, finish_rows<false, true>},
      {finish_rows<true, false>, finish_rows<true, true>}};
  const Layer& layer = c.layer;
  const bool edge = end * (layer.gate ? 16 : SIDE) > layer.width;
  KINDS[layer.whole()][edge](c, sums, stride, group, begin, end);
}

// One group: W is read once from end to end, each panel's sums stay in the tiles. The prefetch goes
// on to the panels that this thread takes next; those behind `end` may be another's.
void sweep(const Call& c, long begin, long end, const char* following, float* sums, char* ring) {
  constexpr decltype(&multiply<16, 1, true, true>) KINDS[3][2] = {
      {multiply<16, 1, true, true>, multiply<16, 2, true, true>},
      {multiply<8, 1, true, true>, multiply<8, 2, true, true>},
      {multiply<4, 1, true, true>, multiply<4, 2, true, true>}};
  const Layer& layer = c.layer;
  const auto product = KINDS[16 / layer.bits / 2][c.tiles_in(0) - 1];
  const char* last = layer.multiples(end, 0);  // where panel `end` begins
  const long lines = ceil_div(layer.panel_bytes(), layer.steps * 64);
  for (long panel = begin; panel < end; ++panel) {
    const char* b = layer.tiles(panel, 0);
    const bool behind = b + AHEAD > last;
    product(c.packed, b, layer.steps, sums, behind ? following + (b + AHEAD - last) : b + AHEAD,
            lines, behind ? -1 : (last - b - AHEAD) / (lines * 64), following,
            layer.multiples(panel, 0), ring);
    finish(c, sums, 0, 0, panel, panel + 1);
  }
}

// The same with vectors: a slice of the panel stays in the cache while the rows pass by, some at a time.
// Rows that all fit the registers need no slices, whose ends cost 4 % at one row; the last panel has them
// so that the prefetch turns in time.
void sweep_by_rows(const Call& c, long begin, long end, const char* following, float* sums, char* unpacked) {
  const Layer& layer = c.layer;
  const char* last = layer.multiples(end, 0);
  for (long panel = begin; panel < end; ++panel) {
    const long slice = c.M <= FEW_ROWS && panel + 1 < end ? layer.steps : SLICE;
    for (long k = 0; k < layer.steps; k += slice) {
      const long steps = std::min(slice, layer.steps - k);
      const char *b = layer.tiles(panel, k), *next = b + AHEAD;
      if (layer.bits == 4 && !c.nibbles()) b = unpack_some(layer, panel, k, steps, unpacked);
      if (next >= last) next = following + (next - last);
      const long lines = layer.step_bytes() / 64;
      multiply_by_rows(c, 0, b, panel, k, steps, sums, {next, lines}, {next + 64, lines});
    }
    finish(c, sums, 0, 0, panel, panel + 1);
  }
}

// Several groups: a slice of a panel stays in a near cache while the groups' rows pass by.
void block(const Call& c, long group, long group_end, long begin, long end, float* sums,
           char* unpacked) {
  constexpr decltype(&multiply<16, 1, true, false>) KINDS[2][2][2] = {
      {{multiply<16, 1, false, false>, multiply<16, 1, true, false>},
       {multiply<16, 2, false, false>, multiply<16, 2, true, false>}},
      {{multiply<8, 1, false, false>, multiply<8, 1, true, false>},
       {multiply<8, 2, false, false>, multiply<8, 2, true, false>}}};
  const Layer& layer = c.layer;
  const long groups = group_end - group, lines = ceil_div(layer.step_bytes() / 64, groups);
  const long block_steps = layer.block_steps();
  for (long k = 0; k < layer.steps; k += block_steps) {
    const long steps = std::min(block_steps, layer.steps - k);
    const long next_k = k + block_steps < layer.steps ? k + block_steps : 0;
    const auto rows_ahead = [&](long g) {  // the first panel asks for the rows that the others find near
      return Ahead{g + 1 < groups ? c.tiles(group + g + 1, k) : c.tiles(group, next_k), SIDE};
    };
    for (long panel = begin; panel < end; ++panel) {
      const char* b = layer.tiles(panel, k);
      const char* next = panel + 1 < end ? layer.tiles(panel + 1, k) : layer.tiles(begin, next_k);
      if (layer.bits == 4) b = unpack_some(layer, panel, k, steps, unpacked);
      for (long g = 0; g < groups; ++g) {
        const char* ahead = next + g * steps * lines * 64;
        float* own = sums + ((panel - begin) * groups + g) * SUMS;
        if (layer.amx)
          KINDS[layer.whole()][c.tiles_in(group + g) - 1][k == 0](
              c.tiles(group + g, k), b, steps, own, ahead, lines, 0, nullptr, nullptr, nullptr);
        else multiply_by_rows(c, group + g, b, panel, k, steps, own, {ahead, lines},
                              panel == begin ? rows_ahead(g) : Ahead{ahead, 0});
      }
    }
  }
  for (long g = 0; g < groups; ++g)
    finish(c, sums + g * SUMS, groups * SUMS, group + g, begin, end);
}

void begin_tiles(const Call& c, TileConfig* before) {
  TileConfig config;
  save_tiles(before);
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    const bool is_second = i == 2 || i == 3 || i == 5;  // of a group's two tiles of rows
    const long rows = std::clamp(is_second ? c.M - 16 : c.M, 1L, 16L);
    config.rows[i] = (uint8_t)(c.groups > 1 || i > 5 ? 16 : rows);
    config.colsb[i] = 64;
  }
  FENCE();
  _tile_loadconfig(&config);
}

void compute(void* data) {
  static thread_local Memory memory;
  Call& c = *(Call*)data;
  const long sum_bytes = BLOCK_GROUPS * c.layer.block_panels() * SUMS * (long)sizeof(float);
  char* own = memory.reserve(sum_bytes + c.layer.block_steps() * 2 * TILE);
  long item = c.next_item.fetch_add(1);
  if (c.groups == 1)
    for (long i = 0; i < AHEAD; i += 64) _mm_prefetch(c.start_of(item) + i, _MM_HINT_T1);
  for (long pack; (pack = c.next_pack.fetch_add(1)) < c.num_packs; c.done_packs.fetch_add(1))
    pack_rows(c, pack);
  for (int tries = 0; c.done_packs.load() < c.num_packs; ++tries)
    if (tries < 4000) _mm_pause();
    else std::this_thread::yield();
  TileConfig before;
  if (c.layer.amx) begin_tiles(c, &before);
  float* sums = (float*)own;
  char* unpacked = own + sum_bytes;  // int4
  for (long following; item < c.num_items; item = following) {
    following = c.next_item.fetch_add(1);
    const long panel = item / c.row_blocks * c.item_panels, part = item % c.row_blocks;
    const long panel_end = std::min(panel + c.item_panels, c.layer.panels);
    const long group = c.groups * part / c.row_blocks;
    const long group_end = c.groups * (part + 1) / c.row_blocks;
    if (c.groups == 1) (c.layer.amx ? sweep : sweep_by_rows)(c, panel, panel_end, c.start_of(following), sums, unpacked);
    else block(c, group, group_end, panel, panel_end, sums, unpacked);
  }
  if (c.layer.amx) restore_tiles(&before);  // others on this thread (oneDNN) may count on the tiles' shape
}
END_TARGET

long panels_of(long N, int gate) { return gate ? ceil_div(N / 2, 16) : ceil_div(N, SIDE); }

Layer layer_of(char* packed, long N, long K, int bits, int gate) {
  Layer layer{};
  layer.weight = packed, layer.N = N, layer.K = K, layer.bits = bits, layer.gate = (Gate)gate;
  layer.steps = ceil_div(K, bits < 16 ? 64 : 32);
  layer.panels = panels_of(N, gate);
  layer.width = gate ? N / 2 : N;
  return layer;
}

}  // namespace

extern "C" {

// Whether it does with tiles, or with vectors.
int infer_linear_runs_here(int amx) {
  return may_use(amx ? Level::AMX : Level::AVX512_BF16) && has_avx512() &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
         (!amx || may_use_tiles());
}

long infer_linear_packed_bytes(long N, long K, int bits, int gate) {
  const Layer layer = layer_of(nullptr, N, K, bits, gate);
  return layer.panels * layer.panel_bytes();
}

// A layer whose weight is to be written to `packed` by infer_linear_pack; bias [N] and norm [K] are
// copied and may be null. bits: 16, 8 or 4. gate: 0, or SILU or GELU, then y has N / 2 columns. amx:
// 1 for tiles, 0 for vectors.
void* infer_linear_new(char* packed, long N, long K, int bits, int gate, int float_out, int amx,
                       const float* bias, const float* norm, float eps, void* parallel) {
  Layer* layer = new Layer(layer_of(packed, N, K, bits, gate));
  layer->float_out = float_out != 0;
  layer->amx = amx != 0;
  layer->eps = eps;
  layer->norm = norm ? new float[ceil_div(K, 64) * 64]() : nullptr;
  for (long k = 0; norm && k < K; ++k) layer->norm[k / 32 * 32 + k % 2 * 16 + k % 32 / 2] = norm[k];
  layer->bias = bias ? new float[N] : nullptr;
  if (bias) std::memcpy(layer->bias, bias, N * sizeof(float));
  layer->scales = bits < 16 ? new float[layer->panels * SIDE]() : nullptr;
  layer->starts = bits < 16 && !amx ? new int32_t[layer->panels * SIDE]() : nullptr;
  layer->parallel = (Parallel)parallel;
  return layer;
}

void infer_linear_free(void* handle) {
  Layer* layer = (Layer*)handle;
  for (float* numbers : {layer->norm, layer->bias, layer->scales}) delete[] numbers;
  delete[] layer->starts;
  delete layer;
}

// Rows of a weight (bfloat16, `stride` elements apart) → columns from `column` on; the sources of a
// fused layer come one by one. Columns that fill up the last panel stay as they are: columns do not
// meet in a product either.
void infer_linear_pack(void* handle, const uint16_t* source, long rows, long stride, long column,
                       int threads) {
  const Layer& layer = *(Layer*)handle;
  const long first = column / SIDE, end = ceil_div(column + rows, SIDE);
  Packing packing{layer, source, rows, stride, column, layer.gate ? 0 : first,
                  layer.gate ? layer.panels : end};
  run_threads(layer.parallel, pack_weight, &packing, threads);
}

// Strides in elements; `residual` [M, width of y] may be null; y is dense.
void infer_linear(void* handle, const uint16_t* x, long x_stride, const uint16_t* residual, char* y,
                  long M, int threads) {
  static thread_local Memory memory;
  const Layer& layer = *(Layer*)handle;
  for (long row = 0; row < M; row += MOST_ROWS) {
    Call c{layer};
    c.x = x + row * x_stride;
    c.residual = residual ? residual + row * layer.width : nullptr;
    c.y = y + row * layer.width * (layer.float_out ? 4 : 2);
    c.M = std::min(MOST_ROWS, M - row);
    c.x_stride = x_stride;
    c.groups = ceil_div(c.M, SIDE);
    c.row_scales = (float*)memory.reserve((MOST_ROWS + SIDE * layer.steps) * sizeof(float) +
                                          c.groups * layer.steps * 2 * TILE);
    c.eights = (int32_t*)(c.row_scales + MOST_ROWS);
    c.packed = (char*)(c.eights + SIDE * layer.steps);
    c.num_packs = ceil_div(c.M, 16) * (16 / PACK_ROWS);
    c.row_blocks = ceil_div(c.groups, BLOCK_GROUPS);
    // Enough items that no thread waits long for another, up to as many panels as the cache holds.
    const long share = layer.panels * c.row_blocks / (8 * threads);
    c.item_panels = std::clamp(share, 1L, c.groups > 1 ? layer.block_panels() : ITEM_PANELS);
    c.num_items = ceil_div(layer.panels, c.item_panels) * c.row_blocks;
    const bool tiny = layer.panels * layer.steps * c.groups < 256;  // less than waking a thread
    run_threads(layer.parallel, compute, &c, tiny ? 1 : threads);
  }
}

}  // extern "C"

#else

extern "C" {  // nobody calls the others where this says no
int infer_linear_runs_here(int) { return 0; }
long infer_linear_packed_bytes(long, long, int, int) { return 0; }
void infer_linear_new() {}
void infer_linear_free() {}
void infer_linear_pack() {}
void infer_linear(void*, const uint16_t*, long, const uint16_t*, char*, long, int) {}
}

#endif
