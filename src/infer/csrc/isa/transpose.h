// For headers of sets whose vectors are several of 128 bits: columns of some rows.
#pragma once

namespace {

// 128 bits of each of W rows → 4 vectors: word i of every row.
INLINE void columns(const char* const* rows, long at, vf out[4]) {
  vf a[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) a[i] = fourths(rows + i, at);
  const vf low[2] = {low_words(a[0], a[1]), low_words(a[2], a[3])};
  const vf high[2] = {high_words(a[0], a[1]), high_words(a[2], a[3])};
  out[0] = low_pairs(low[0], low[1]);
  out[1] = high_pairs(low[0], low[1]);
  out[2] = low_pairs(high[0], high[1]);
  out[3] = high_pairs(high[0], high[1]);
}

}  // namespace
