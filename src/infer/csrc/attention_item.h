// The attention of one work item. An isa/*.cpp includes it.
//
// Blocks of 64 or 128 keys at absolute positions: pack K transposed and V by rows, where the cache does
// not hold them so, then for a few query rows at a time: scores = Q·K, online softmax, out += P·V. Every
// sum runs in one fixed order that only the key's position decides, and a key that a row may not see adds
// exact zeros; so a row's result does not depend on the rows beside it, nor on how many there are.
#pragma once

#include "attention.h"
#include "attention_products.h"

namespace attention {
namespace {

// The state of a head's rows: for each its `padded` sums of P·V and 16 lanes of the sum of P; behind
// them for each the score that counts as 2^0: the greatest so far, or one that is less by RISE at
// most (changing it costs).
INLINE vf greatest_of(const float* scores, int n) {
  vf most = load(scores);
  for (int i = W; i < n; i += W) most = vmax(most, load(scores + i));
  return most;
}

template <class M>
INLINE void weigh_row(float* scores, int n, float scale, float greatest, float alpha, float* lanes) {
  uint32_t* probs = (uint32_t*)scores;  // never ahead of what has been read
  vf sum = load(lanes) * set1(alpha);
  for (int i = 0; i < n; i += 2 * W) {
    const vf p0 = exp2_vf<M::EXACT>(fma(load(scores + i), set1(scale), set1(-greatest)));
    const vf p1 = exp2_vf<M::EXACT>(fma(load(scores + i + W), set1(scale), set1(-greatest)));
    M::put(probs, i, p0, p1, sum);
  }
  store(lanes, sum);
}

// Packs one head of a block.
template <class M>
INLINE void pack_block(const LayerCall& call, int group, int n, bool with_keys, Buffers& at, Prefetcher& prefetcher) {
  if constexpr (M::DIRECT) {
    for (int key = 0; key < n; key += 16) {
      M::copy_values(call, at.cells, call.values + call.heads[group].at, key, at.values, at.keys);
      prefetcher.step(call, 1);
    }
    return;
  }
  const char *keys[BLOCK], *values[BLOCK];
  const long offset = call.heads[group].at;
  if (with_keys) at.cells.point(call.keys + offset, n, keys);
  at.cells.point(call.values + offset, n, values);
  for (int key = 0; key < n; key += 16) {
    if (with_keys) M::pack_keys(keys + key, 16, call.D, at.keys + key, call.block);
    M::pack_values(values + key, 16, call.D, call.padded, at.values + (long)M::prob_words(key) * call.padded);
    prefetcher.step(call, 1);
  }
}

INLINE vf rounded_to_bfloat16(vf x) {
  const vi bits = (vi)x;
  return (vf)((bits + 0x7fff + (bits >> 16 & 1)) & -65536);
}

// cap · tanh(x / cap). NaN stays NaN.
INLINE vf capped(vf x, float cap) {
  const vf size = (vf)((vi)x & 0x7fffffff);
  const vf power = exp2_vf<true>(size * set1(-2.885390082f / cap));  // exp(-2 · size / cap)
  const vf y = (set1(1.f) - power) / (set1(1.f) + power) * set1(cap);
  return (vf)((vi)y | ((vi)x & ~0x7fffffff));
}

// Scores become what the softmax takes, so that `scale` is 1 from then on: under a cap, and lowered by distance.
inline void shape_scores(const LayerCall& call, const Item& item, const RowBlock& some, float* scores, float* scale) {
  alignas(64) static const float LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vf lanes = load(LANES);
  for (int i = 0; i < some.count; ++i) {
    float* row = scores + (long)i * call.block;
    const int at = some.row + i;
    const int64_t position = item.position + at / call.rep;
    const vf slope = set1(call.slopes ? call.slopes[some.group * call.rep + at % call.rep] : 0.f);
    for (int j = 0; j < some.keys; j += W) {
      vf x = load(row + j) * set1(scale[i]);
      if (call.cap) x = capped(x, call.cap);
      if (call.slopes && call.rounded)
        x = fma(rounded_to_bfloat16(slope * rounded_to_bfloat16(lanes + set1((float)(some.first + j)))),
                set1(call.rounded), x);
      else if (call.slopes)
        x = fma(slope, lanes + set1((float)(some.first + j - position)), x);
      store(row + j, x);
    }
    scale[i] = 1.f;
  }
}

// From scores to P, and into `alpha` what earlier sums count from now on.
template <class M>
INLINE void soften_rows(const LayerCall& call, const Item& item, const RowBlock& some, Buffers& at, float* alpha) {
  float* scores = at.scores;
  const int n = some.keys;
  const int64_t first = some.first;
  float scale[ROW_BLOCK];
  std::fill_n(scale, ROW_BLOCK, call.scale);
  if constexpr (M::BYTES) M::scales(call, some, scale);
  if (call.shapes_scores) shape_scores(call, item, some, scores, scale);
  const int64_t low = item.position + some.row / call.rep;
  const int64_t high = item.position + (some.row + some.count - 1) / call.rep;
  const bool partly = low < first + n - 1 || (call.window && high - call.window + 1 > first);
  if (partly)
    for (int i = 0; i < some.count; ++i) {
      float* row = scores + i * call.block;
      const int64_t position = item.position + (some.row + i) / call.rep;
      const int64_t from = call.window ? position - call.window + 1 - first : 0;
      for (int j = 0; j < n && j < from; ++j) row[j] = -INFINITY;
      for (int64_t j = position + 1 < first ? 0 : position + 1 - first; j < n; ++j) row[j] = -INFINITY;
    }
  float now[ROW_BLOCK];
#if VECTOR_WIDTH == 16
  const __mmask16 rows = (__mmask16)((1 << some.count) - 1);
  vf most[ROW_BLOCK];
#pragma GCC unroll 16
  for (int i = 0; i < ROW_BLOCK; ++i) most[i] = i < some.count ? greatest_of(scores + i * call.block, n) : set1(0.f);
  const vf before = _mm512_maskz_loadu_ps(rows, some.greatest);
  const vf here = greatest_lanes(most) * load(scale);
  const __mmask16 rises = _mm512_cmp_ps_mask(here, before + set1(RISE), _CMP_GT_OQ);
  const vf chosen = _mm512_mask_mov_ps(before, rises, here);
  _mm512_mask_storeu_ps(some.greatest, rows, chosen);
  store(now, chosen);
  store(alpha, exp2_vf<M::EXACT>(before - chosen));
#else
  for (int i = 0; i < some.count; ++i) {
    float* greatest = some.greatest + i;
    const float here = hmax(greatest_of(scores + i * call.block, n)) * scale[i];
    now[i] = here > *greatest + RISE ? here : *greatest;
    alpha[i] = exp2_vf<M::EXACT>(set1(*greatest - now[i]))[0];
    *greatest = now[i];
  }
#endif
  for (int i = 0; i < some.count; ++i) {
    float *row = scores + i * call.block, *lanes = some.state + (long)i * call.state_words + call.padded;
    if constexpr (M::BYTES)
      M::weigh_row(row, n, scale[i], now[i], alpha[i], lanes, at.keys, i);
    else
      weigh_row<M>(row, n, scale[i], now[i], alpha[i], lanes);
  }
}

// One block of keys for all rows of an item.
template <class M>
void attend_block(const LayerCall& call, const Item& item, Buffers& at, Prefetcher& prefetcher, int64_t first, int n,
                  int words, int padded_rows, float* state) {
  const int rows = item.tokens * call.rep, groups = item.group_end - item.group;
  const bool raw_keys = M::takes_raw_keys(call, rows);
  const int row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  prefetcher.expect(call, first + n, groups * (n / 16 + row_blocks * M::row_block_steps(call, n)));
  for (int g = 0; g < groups; ++g) {
    pack_block<M>(call, item.group + g, n, !raw_keys, at, prefetcher);
    for (int r = 0; r < rows; r += ROW_BLOCK) {
      const int count = std::min(ROW_BLOCK, rows - r);
      const int64_t low = item.position + r / call.rep;
      const int64_t high = item.position + (r + count - 1) / call.rep;
      if (high < first || (call.window && low - call.window + 1 >= first + n)) continue;
      float* head = state + g * state_size(call.D, padded_rows);
      const RowBlock some{at.queries + ((long)padded_rows * g + r) * words,
                          head + (long)r * call.state_words,
                          head + (long)padded_rows * call.state_words + r,
                          first,
                          rows,
                          r,
                          count,
                          high - first + 1 < n ? round_up((int)(high - first + 1), 32) : n,
                          item.group + g};
      float alpha[ROW_BLOCK];
      if constexpr (M::DIRECT) {
        M::scores(call, some, at.cells, call.keys + call.heads[item.group + g].at, at.scores, prefetcher);
        soften_rows<M>(call, item, some, at, alpha);
        M::mix(call, some, at, call.values + call.heads[item.group + g].at, alpha, prefetcher);
      } else {
        if constexpr (M::RAW_KEYS)
          if (raw_keys)
            M::raw_scores(call, count, some.queries, call.keys + call.heads[item.group + g].at, at.cells, some.keys,
                          (float*)at.keys, at.scores, prefetcher);
        if (!raw_keys) M::scores(count, some.queries, call.D, at.keys, call.block, some.keys, at.scores);
        soften_rows<M>(call, item, some, at, alpha);
        M::mix(count, (const uint32_t*)at.scores, call.block, some.keys, at.values, call.padded, some.state,
               call.state_words, alpha);
        if (!raw_keys) prefetcher.step(call, M::row_block_steps(call, n));
      }
    }
  }
  prefetcher.finish(call);
}

// Fold a head's partial results of the next segment into the total of those before it.
inline void combine(const LayerCall& call, int rows, int padded_rows, float* total, const float* part) {
  float* greatest = total + (long)padded_rows * call.state_words;
  const float* other = part + (long)padded_rows * call.state_words;
  for (int r = 0; r < rows; ++r, total += call.state_words, part += call.state_words) {
    const float before = greatest[r], now = std::max(before, other[r]);
    const vf a = set1(exp2_vf<true>(set1(before - now))[0]);
    const vf b = set1(exp2_vf<true>(set1(other[r] - now))[0]);
    for (int i = 0; i < call.state_words; i += W) store(total + i, fma(load(part + i), b, load(total + i) * a));
    greatest[r] = now;
  }
}

// What a row's sums are multiplied by: one over the sum of all weights, that of a sink (Xiao et al. 2023,
// arXiv:2309.17453) included. `greatest`: the score whose weight is 1, times log2(e).
inline float inverse_of_weights(const LayerCall& call, long head, float weights, float greatest) {
  if (!call.sinks) return 1.f / weights;
  const float sink = call.sinks[head] * 1.4426950408889634f, most = std::max(greatest, sink);
  const float of_keys = exp2_vf<true>(set1(greatest - most))[0];
  return of_keys / (weights * of_keys + exp2_vf<true>(set1(sink - most))[0]);
}

template <class M>
void finish(const LayerCall& call, const Item& item, int group, float* state) {
  using T = typename M::Storage;
  const int rows = item.tokens * call.rep;
  const float* greatest = state + (long)round_up(rows, 16) * call.state_words;
  for (int r = 0; r < rows; ++r, state += call.state_words) {
    const long token = item.row + r / call.rep, head = group * call.rep + r % call.rep;
    T* to = (T*)call.out + (token * call.H + head) * call.D;
    M::natural_order(state, call.padded);
    const vf inverse = set1(inverse_of_weights(call, head, hsum(load(state + call.padded)), greatest[r]));
    const vf zero = set1(0.f);  // + 0: there is one zero, not two
    int i = 0;
    for (; i + W <= call.D; i += W) put_rounded(to + i, fma(load(state + i), inverse, zero));
    if (i < call.D) {
      T rest[W];
      put_rounded(rest, fma(load(state + i), inverse, zero));
      __builtin_memcpy(to + i, rest, sizeof(T) * (call.D - i));
    }
  }
}

inline void clear(const LayerCall& call, int rows, int padded_rows, float* head) {
  std::fill_n(head, (long)rows * call.state_words, 0.f);
  std::fill_n(head + (long)padded_rows * call.state_words, rows, LOWEST);
}

// Whoever comes last folds all segments, in their order.
template <class M>
void fold(const LayerCall& call, const Item& item, Join& join, float* total) {
  if (__atomic_sub_fetch(&join.missing, 1, __ATOMIC_ACQ_REL) > 0) return;
  join.missing = join.parts;
  const int groups = item.group_end - item.group, rows = item.tokens * call.rep;
  const int padded_rows = round_up(rows, 16);
  const long size = state_size(call.D, padded_rows);
  for (int g = 0; g < groups; ++g) {
    clear(call, rows, padded_rows, total);
    for (int64_t s = 0; s < join.num_segments; ++s)
      combine(call, rows, padded_rows, total, call.workspace + join.offset + (s * groups + g) * size);
    finish<M>(call, item, item.group + g, total);
  }
}

// Hand a segment's partial results to the sequences that share it.
inline void hand_out(const LayerCall& call, const Item& item, int64_t segment, int rows, const float* state) {
  const int groups = item.group_end - item.group, own_rows = round_up(call.rep, 16);
  for (int m = 0; m < item.members; ++m)
    for (int g = 0; g < groups; ++g) {
      const float* head = state + g * state_size(call.D, rows);
      float* own =
          call.workspace + call.joins[item.join + m].offset + (segment * groups + g) * state_size(call.D, own_rows);
      std::copy_n(head + (long)m * call.rep * call.state_words, (long)call.rep * call.state_words, own);
      std::copy_n(head + (long)rows * call.state_words + m * call.rep, call.rep,
                  own + (long)own_rows * call.state_words);
    }
}

template <class M>
void run_item(const LayerCall& call, const Item& item, const Item* next, Scratch& scratch) {
  const int groups = item.group_end - item.group, rows = item.tokens * call.rep;
  const int words = M::key_words(call.D), padded_rows = round_up(rows, 16);
  const long size = state_size(call.D, padded_rows);
  const long head_bytes = (long)call.D * sizeof(typename M::Storage);
  Buffers at;
  scratch.reserve(call, groups, padded_rows, words, at);
  M::begin(rows);
  constexpr int TOGETHER = 8;
  alignas(64) uint16_t turned_heads[TOGETHER * MOST_DIM];
  for (int g = 0; g < groups; ++g) {
    const char* from = call.q + item.row * call.q_bytes + (item.group + g) * call.rep * head_bytes;
    uint32_t* to = at.queries + (long)g * padded_rows * words;
    for (int t = 0; t < item.tokens; ++t, from += call.q_bytes) {
      for (long i = 0; i < call.rep * head_bytes; i += 64)  // tokens lie apart: ask for what comes
        __builtin_prefetch(from + 8 * call.q_bytes + i);
      for (int h = 0; h < call.rep; h += TOGETHER) {
        const int heads = std::min(TOGETHER, call.rep - h);
        const char* q = from + h * head_bytes;
        if (call.rotation) {
          call.rotate_heads(*call.rotation, (const uint16_t*)q, turned_heads, heads, item.row + t, 0);
          q = (const char*)turned_heads;
        }
        for (int i = 0; i < heads; ++i, to += words) M::pack_query(q + i * head_bytes, call.D, to);
      }
    }
    if (M::takes_raw_keys(call, rows)) {
      uint32_t *packed = to - rows * words, *turned = (uint32_t*)at.total;
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < words; ++i) turned[i * rows + r] = packed[r * words + i];
      std::copy_n(turned, rows * words, packed);
    }
  }
  Join* join = item.join < 0 ? nullptr : call.joins + item.join;
  const Span keys = visible(item, call.window);
  scratch.prefetcher.begin(call, item, next);
  for (int64_t segment = item.segment; segment < item.segment_end; ++segment) {
    const bool is_first = segment == item.segment;
    float* state = item.members ? at.total
                   : join       ? call.workspace + join->offset + (segment - join->segment) * groups * size
                                : (is_first ? at.total : at.part);
    for (int g = 0; g < groups; ++g) clear(call, rows, padded_rows, state + g * size);
    const int64_t from = segment * SEGMENT > keys.begin ? segment * SEGMENT : keys.begin;
    const int64_t to = (segment + 1) * SEGMENT < keys.end ? (segment + 1) * SEGMENT : keys.end;
    for (int64_t first = from; first < to; first += call.block) {
      const int n = round_up(to - first < call.block ? (int)(to - first) : call.block, 32);
      at.cells.list(call, item, first);
      attend_block<M>(call, item, at, scratch.prefetcher, first, n, words, padded_rows, state);
    }
    if (item.members) hand_out(call, item, segment, padded_rows, state);
    for (int g = 0; g < groups && !join && !is_first; ++g)
      combine(call, rows, padded_rows, at.total + g * size, at.part + g * size);
  }
  if (item.members) {
    Item one = item;
    for (one.tokens = 1; one.row < item.row + item.members; ++one.row, ++join) fold<M>(call, one, *join, at.total);
    return;
  }
  if (join) return fold<M>(call, item, *join, at.total);
  for (int g = 0; g < groups; ++g) finish<M>(call, item, item.group + g, at.total + g * size);
}

}  // namespace
}  // namespace attention
