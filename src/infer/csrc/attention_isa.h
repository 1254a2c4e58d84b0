// The attention of one work item. attention.cpp includes this file once per instruction set, inside
// a namespace and a `target` region: LEVEL 0 portable, 1 AVX2+FMA, 2 AVX-512, 3 AVX-512-BF16, 4 AMX.
//
// Blocks of 64 or 128 keys at absolute positions: pack K transposed and V by rows, where the cache does
// not hold them so, then for a few query rows at a time: scores = Q·K, online softmax, out += P·V. Every
// sum runs in one fixed order that only the key's position decides, and a key that a row may not see adds
// exact zeros; so a row's result does not depend on the rows beside it, nor on how many there are.

#include "attention_products.h"

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
INLINE void pack_block(const Job& job, int group, int n, bool with_keys, Buffers& at, Ahead& ahead) {
  if constexpr (M::DIRECT) {
    for (int key = 0; key < n; key += 16) {
      M::copy_values(job, at.cells, job.values + group * job.head_bytes, key, at.values, at.keys);
      ahead.step(job, 1);
    }
    return;
  }
  const char *keys[BLOCK], *values[BLOCK];
  const long offset = group * (long)job.D * sizeof(typename M::Storage);
  if (with_keys) at.cells.point(job.keys + offset, n, keys);
  at.cells.point(job.values + offset, n, values);
  for (int key = 0; key < n; key += 16) {
    if (with_keys) M::pack_keys(keys + key, 16, job.D, at.keys + key, job.block);
    M::pack_values(values + key, 16, job.D, job.padded,
                   at.values + (long)M::prob_words(key) * job.padded);
    ahead.step(job, 1);
  }
}

// From scores to P, and into `alpha` what earlier sums count from now on.
template <class M>
INLINE void soften_rows(const Job& job, const Item& item, const Unit& unit, Buffers& at, float* alpha) {
  float* scores = at.scores;
  const int n = unit.keys;
  const int64_t first = unit.first;
  const int64_t low = item.position + unit.row / job.rep;
  const int64_t high = item.position + (unit.row + unit.count - 1) / job.rep;
  const bool partly = low < first + n - 1 || (job.window && high - job.window + 1 > first);
  if (partly)
    for (int i = 0; i < unit.count; ++i) {
      float* row = scores + i * job.block;
      const int64_t position = item.position + (unit.row + i) / job.rep;
      const int64_t from = job.window ? position - job.window + 1 - first : 0;
      for (int j = 0; j < n && j < from; ++j) row[j] = -INFINITY;
      for (int64_t j = position + 1 < first ? 0 : position + 1 - first; j < n; ++j)
        row[j] = -INFINITY;
    }
  float now[UNIT];
  vf scale = set1(job.scale);
  if constexpr (M::BYTES) scale = M::scales(job, unit);
#if LEVEL >= 2
  const __mmask16 rows = (__mmask16)((1 << unit.count) - 1);
  vf most[UNIT];
#pragma GCC unroll 16
  for (int i = 0; i < UNIT; ++i)
    most[i] = i < unit.count ? greatest_of(scores + i * job.block, n) : set1(0.f);
  const vf before = _mm512_maskz_loadu_ps(rows, unit.greatest);
  const vf here = greatest_lanes(most) * scale;
  const __mmask16 rises = _mm512_cmp_ps_mask(here, before + set1(RISE), _CMP_GT_OQ);
  const vf chosen = _mm512_mask_mov_ps(before, rises, here);
  _mm512_mask_storeu_ps(unit.greatest, rows, chosen);
  store(now, chosen);
  store(alpha, exp2_vf<M::EXACT>(before - chosen));
#else
  for (int i = 0; i < unit.count; ++i) {
    float* greatest = unit.greatest + i;
    const float here = hmax(greatest_of(scores + i * job.block, n)) * scale[0];
    now[i] = here > *greatest + RISE ? here : *greatest;
    alpha[i] = exp2_vf<M::EXACT>(set1(*greatest - now[i]))[0];
    *greatest = now[i];
  }
#endif
  for (int i = 0; i < unit.count; ++i) {
    float *row = scores + i * job.block, *lanes = unit.state + (long)i * job.state_words + job.padded;
    if constexpr (M::BYTES)
      M::weigh_row(row, n, scale[i], now[i], alpha[i], lanes, at.keys, i);
    else weigh_row<M>(row, n, job.scale, now[i], alpha[i], lanes);
  }
}

// One block of keys for all rows of an item.
template <class M>
void attend_block(const Job& job, const Item& item, Buffers& at, Ahead& ahead, int64_t first, int n,
                  int words, int padded_rows, float* state) {
  const int rows = item.tokens * job.rep, groups = item.group_end - item.group;
  const bool raw_keys = M::takes_raw_keys(job, rows);
  const int units = (rows + UNIT - 1) / UNIT;
  ahead.expect(job, first + n, groups * (n / 16 + units * M::unit_steps(job, n)));
  for (int g = 0; g < groups; ++g) {
    pack_block<M>(job, item.group + g, n, !raw_keys, at, ahead);
    for (int r = 0; r < rows; r += UNIT) {
      const int count = std::min(UNIT, rows - r);
      const int64_t low = item.position + r / job.rep;
      const int64_t high = item.position + (r + count - 1) / job.rep;
      if (high < first || (job.window && low - job.window + 1 >= first + n)) continue;
      float* head = state + g * state_size(job.D, padded_rows);
      const Unit unit{at.queries + ((long)padded_rows * g + r) * words,
                      head + (long)r * job.state_words,
                      head + (long)padded_rows * job.state_words + r, first, rows, r, count,
                      high - first + 1 < n ? round_up((int)(high - first + 1), 32) : n};
      float alpha[UNIT];
      if constexpr (M::DIRECT) {
        M::scores(job, unit, at.cells, job.keys + (item.group + g) * job.head_bytes, at.scores, ahead);
        soften_rows<M>(job, item, unit, at, alpha);
        M::mix(job, unit, at, job.values + (item.group + g) * job.head_bytes, alpha, ahead);
      } else {
#if LEVEL == 4
        if constexpr (std::is_same_v<M, Tiles>)
          if (raw_keys)
            M::raw_scores(job, count, unit.queries, job.keys + (item.group + g) * job.head_bytes,
                          at.cells, unit.keys, (float*)at.keys, at.scores, ahead);
#endif
        if (!raw_keys)
          M::scores(count, unit.queries, job.D, at.keys, job.block, unit.keys, at.scores);
        soften_rows<M>(job, item, unit, at, alpha);
        M::mix(count, (const uint32_t*)at.scores, job.block, unit.keys, at.values, job.padded,
               unit.state, job.state_words, alpha);
        if (!raw_keys) ahead.step(job, M::unit_steps(job, n));
      }
    }
  }
  ahead.finish(job);
}

// Fold a head's partial results of the next segment into the total of those before it.
inline void combine(const Job& job, int rows, int padded_rows, float* total, const float* part) {
  float* greatest = total + (long)padded_rows * job.state_words;
  const float* other = part + (long)padded_rows * job.state_words;
  for (int r = 0; r < rows; ++r, total += job.state_words, part += job.state_words) {
    const float before = greatest[r], now = std::max(before, other[r]);
    const vf a = set1(exp2_vf<true>(set1(before - now))[0]);
    const vf b = set1(exp2_vf<true>(set1(other[r] - now))[0]);
    for (int i = 0; i < job.state_words; i += W)
      store(total + i, fma(load(part + i), b, load(total + i) * a));
    greatest[r] = now;
  }
}

template <class M>
void finish(const Job& job, const Item& item, int group, float* state) {
  using T = typename M::Storage;
  for (int r = 0; r < item.tokens * job.rep; ++r, state += job.state_words) {
    const long token = item.row + r / job.rep, head = group * job.rep + r % job.rep;
    T* to = (T*)job.out + (token * job.H + head) * job.D;
    M::natural_order(state, job.padded);
    const vf inverse = set1(1.f / hsum(load(state + job.padded)));
    const vf zero = set1(0.f);  // + 0: there is one zero, not two
    int i = 0;
    for (; i + W <= job.D; i += W) put_rounded(to + i, fma(load(state + i), inverse, zero));
    if (i < job.D) {
      T rest[W];
      put_rounded(rest, fma(load(state + i), inverse, zero));
      __builtin_memcpy(to + i, rest, sizeof(T) * (job.D - i));
    }
  }
}

inline void clear(const Job& job, int rows, int padded_rows, float* head) {
  std::fill_n(head, (long)rows * job.state_words, 0.f);
  std::fill_n(head + (long)padded_rows * job.state_words, rows, LOWEST);
}

// Whoever comes last folds all segments, in their order.
template <class M>
void fold(const Job& job, const Item& item, Join& join, float* total) {
  if (__atomic_sub_fetch(&join.missing, 1, __ATOMIC_ACQ_REL) > 0) return;
  join.missing = join.parts;
  const int groups = item.group_end - item.group, rows = item.tokens * job.rep;
  const int padded_rows = round_up(rows, 16);
  const long size = state_size(job.D, padded_rows);
  for (int g = 0; g < groups; ++g) {
    clear(job, rows, padded_rows, total);
    for (int64_t s = 0; s < join.num_segments; ++s)
      combine(job, rows, padded_rows, total,
              job.workspace + join.offset + (s * groups + g) * size);
    finish<M>(job, item, item.group + g, total);
  }
}

// Hand a segment's partial results to the sequences that share it.
inline void hand_out(const Job& job, const Item& item, int64_t segment, int rows, const float* state) {
  const int groups = item.group_end - item.group, own_rows = round_up(job.rep, 16);
  for (int m = 0; m < item.members; ++m)
    for (int g = 0; g < groups; ++g) {
      const float* head = state + g * state_size(job.D, rows);
      float* own = job.workspace + job.joins[item.join + m].offset +
                   (segment * groups + g) * state_size(job.D, own_rows);
      std::copy_n(head + (long)m * job.rep * job.state_words, (long)job.rep * job.state_words, own);
      std::copy_n(head + (long)rows * job.state_words + m * job.rep, job.rep,
                  own + (long)own_rows * job.state_words);
    }
}

template <class M>
void run_item(const Job& job, const Item& item, const Item* next, Scratch& scratch) {
  const int groups = item.group_end - item.group, rows = item.tokens * job.rep;
  const int words = M::key_words(job.D), padded_rows = round_up(rows, 16);
  const long size = state_size(job.D, padded_rows);
  const long head_bytes = (long)job.D * sizeof(typename M::Storage);
  Buffers at;
  scratch.reserve(job, groups, padded_rows, words, at);
  M::begin(rows);
  constexpr int TOGETHER = 8;
  alignas(64) uint16_t turned_heads[TOGETHER * MOST_DIM];
  for (int g = 0; g < groups; ++g) {
    const char* from = job.q + item.row * job.q_bytes + (item.group + g) * job.rep * head_bytes;
    uint32_t* to = at.queries + (long)g * padded_rows * words;
    for (int t = 0; t < item.tokens; ++t, from += job.q_bytes) {
      for (long i = 0; i < job.rep * head_bytes; i += 64)  // tokens lie apart: ask for what comes
        __builtin_prefetch(from + 8 * job.q_bytes + i);
      for (int h = 0; h < job.rep; h += TOGETHER) {
        const int heads = std::min(TOGETHER, job.rep - h);
        const char* q = from + h * head_bytes;
        if (job.rotation) {
          turn_heads(*job.rotation, (const uint16_t*)q, turned_heads, heads, item.row + t, 0);
          q = (const char*)turned_heads;
        }
        for (int i = 0; i < heads; ++i, to += words) M::pack_query(q + i * head_bytes, job.D, to);
      }
    }
    if (M::takes_raw_keys(job, rows)) {
      uint32_t *packed = to - rows * words, *turned = (uint32_t*)at.scores;
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < words; ++i) turned[i * rows + r] = packed[r * words + i];
      std::copy_n(turned, rows * words, packed);
    }
  }
  Join* join = item.join < 0 ? nullptr : job.joins + item.join;
  const Span keys = visible(item, job.window);
  scratch.ahead.begin(job, item, next);
  for (int64_t segment = item.segment; segment < item.segment_end; ++segment) {
    const bool is_first = segment == item.segment;
    float* state = item.members ? at.total
                   : join       ? job.workspace + join->offset +
                              (segment - join->segment) * groups * size
                        : (is_first ? at.total : at.part);
    for (int g = 0; g < groups; ++g) clear(job, rows, padded_rows, state + g * size);
    const int64_t from = segment * SEGMENT > keys.begin ? segment * SEGMENT : keys.begin;
    const int64_t to = (segment + 1) * SEGMENT < keys.end ? (segment + 1) * SEGMENT : keys.end;
    for (int64_t first = from; first < to; first += job.block) {
      const int n = round_up(to - first < job.block ? (int)(to - first) : job.block, 32);
      at.cells.list(job, item, first);
      attend_block<M>(job, item, at, scratch.ahead, first, n, words, padded_rows, state);
    }
    if (item.members) hand_out(job, item, segment, padded_rows, state);
    for (int g = 0; g < groups && !join && !is_first; ++g)
      combine(job, rows, padded_rows, at.total + g * size, at.part + g * size);
  }
  if (item.members) {
    Item one = item;
    for (one.tokens = 1; one.row < item.row + item.members; ++one.row, ++join)
      fold<M>(job, one, *join, at.total);
    return;
  }
  if (join) return fold<M>(job, item, *join, at.total);
  for (int g = 0; g < groups; ++g) finish<M>(job, item, item.group + g, at.total + g * size);
}
