// A group of rows × a panel of 32 columns on vectors, for CPUs without tiles; linear.cpp includes it.
//
// A line of a panel is 16 columns × 4 bytes of inputs, which is what a product of vectors takes: for
// each line 4 bytes of a row are spread over a vector and multiplied by both halves of the panel. The
// sums of some rows stay in registers over a slice of K.

INLINE float* place(float* sums, long row, int half) {  // as tiles leave them
  return sums + (row >> 4) * 512 + half * 256 + (row & 15) * 16;
}

INLINE __m512i four_bytes(const char* from) {
  int four;
  std::memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}

struct Ahead {  // asks for a line 16 times a step and goes on by so many in all: of 32, every other one
  const char* next;
  long lines;
};

// sums (= start or +=) R rows × a panel over some steps; meanwhile prefetches two streams, evenly: bursts
// cost a sixth at 8 rows. One or two rows wait for memory alone, and ask it into the L1 cache. `a`: the
// first row's bytes of the first step; the next step's lie `a_step` behind.
template <bool WHOLE, int R, bool FIRST>
void multiply_rows(const char* a, long a_step, const char* b, long steps, float* sums, long row,
                   const int32_t* start, Ahead one, Ahead two) {
  constexpr auto LEVEL = R > 2 ? _MM_HINT_T1 : _MM_HINT_T0;
  __m512i sum[R][2];
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half)
      sum[r][half] = !FIRST  ? _mm512_load_si512(place(sums, row + r, half))
                     : WHOLE ? _mm512_loadu_si512(start + half * 16)
                             : _mm512_setzero_si512();
  for (long step = 0; step < steps; ++step, a += a_step, b += 2 * TILE) {
    if (!FIRST && step < R)  // the next group's sums
      for (int half = 0; half < 2; ++half)
        _mm_prefetch((const char*)(place(sums, row + step, half) + SUMS), _MM_HINT_T0);
#pragma GCC unroll 2
    for (long i = 0; i < 64; i += 4, one.next += one.lines * 4, two.next += two.lines * 4) {
      _mm_prefetch(one.next, LEVEL);
      _mm_prefetch(two.next, LEVEL);
      const __m512i line[2] = {_mm512_load_si512(b + i * 16), _mm512_load_si512(b + TILE + i * 16)};
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        const __m512i x = four_bytes(a + r * 64 + i);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
          sum[r][half] = WHOLE ? _mm512_dpbusd_epi32(sum[r][half], x, line[half])
                               : (__m512i)_mm512_dpbf16_ps((__m512)sum[r][half], (__m512bh)x,
                                                           (__m512bh)line[half]);
      }
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half) _mm512_store_si512(place(sums, row + r, half), sum[r][half]);
}

// The same with weights in int4 as they are: sums of n in 0 … 15 times a row's numbers, which begin at
// -8 times these; the multiple comes in when a step is done.
template <int R>
void multiply_nibbles(const char* a, long a_step, const char* b, long steps, float* sums, long row,
                      const int32_t* eights, long eights_stride, const char* multiples, bool first,
                      Ahead stream) {
  constexpr auto LEVEL = R > 2 ? _MM_HINT_T1 : _MM_HINT_T0;
  const __m512i half_byte = _mm512_set1_epi8(15);
  for (int r = 0; first && r < R; ++r)
    for (int half = 0; half < 2; ++half) _mm512_store_si512(place(sums, row + r, half), _mm512_setzero_si512());
  for (long step = 0; step < steps; ++step, a += a_step, b += TILE, multiples += SIDE) {
    __m512i sum[R][2];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_set1_epi32(eights[r * eights_stride + step]);
#pragma GCC unroll 2
    for (long i = 0; i < 64; i += 4, stream.next += stream.lines * 4) {
      _mm_prefetch(stream.next, LEVEL);
      const __m512i both = _mm512_load_si512(b + i * 16);
      const __m512i line[2] = {_mm512_and_si512(both, half_byte),
                               _mm512_and_si512(_mm512_srli_epi16(both, 4), half_byte)};
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        const __m512i x = four_bytes(a + r * 64 + i);
        add_products(sum[r][0], line[0], x);
        add_products(sum[r][1], line[1], x);
      }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i by = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(multiples + half * 16)));
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        float* to = place(sums, row + r, half);
        const __m512i own = _mm512_mullo_epi32(sum[r][half], by);
        _mm512_store_si512(to, _mm512_add_epi32(_mm512_load_si512(to), own));
      }
    }
  }
}

// One of these for some number of rows.
#define FOR_SO_MANY(rows, CALL) \
  switch (rows) { \
    case 1: CALL(1); case 2: CALL(2); case 3: CALL(3); case 4: CALL(4); case 5: CALL(5); \
    case 6: CALL(6); case 7: CALL(7); case 8: CALL(8); case 9: CALL(9); case 10: CALL(10); \
    case 11: CALL(11); case 12: CALL(12); case 13: CALL(13); default: CALL(14); \
  }
using MultiplyRows = decltype(&multiply_rows<false, 1, false>);
using MultiplyNibbles = decltype(&multiply_nibbles<1>);

template <bool WHOLE, bool FIRST>
MultiplyRows multiply_so_many(long rows) {
#define CALL(R) return multiply_rows<WHOLE, R, FIRST>
  FOR_SO_MANY(rows, CALL)
#undef CALL
}
MultiplyNibbles multiply_so_many_nibbles(long rows) {
#define CALL(R) return multiply_nibbles<R>
  FOR_SO_MANY(rows, CALL)
#undef CALL
}
#undef FOR_SO_MANY

// A group × some steps of a panel, which lie at `b`; the streams' lines are for all of the group's rows.
void multiply_by_rows(const Call& c, long group, const char* b, long panel, long k, long steps, float* sums,
                      Ahead one, Ahead two) {
  const Layer& layer = c.layer;
  const long rows = c.rows_in(group), parts = ceil_div(rows, FEW_ROWS);
  const int32_t* start = layer.whole() ? layer.starts + panel * SIDE : nullptr;
  const auto product = layer.whole() ? (k ? multiply_so_many<true, false> : multiply_so_many<true, true>)
                                     : (k ? multiply_so_many<false, false> : multiply_so_many<false, true>);
  one.lines = ceil_div(one.lines, parts), two.lines = ceil_div(two.lines, parts);
  for (long part = 0; part < parts; ++part) {
    const long row = rows * part / parts, count = rows * (part + 1) / parts - row;
    const char* a = c.tiles(group, k) + row * 64;
    if (c.nibbles())
      multiply_so_many_nibbles(count)(a, c.step_bytes(group), b, steps, sums, row, c.eights + row * layer.steps + k,
                                      layer.steps, layer.multiples(panel, k), k == 0, one);
    else product(count)(a, c.step_bytes(group), b, steps, sums, row, start, one, two);
    one.next += steps * one.lines * 64, two.next += steps * two.lines * 64;
  }
}
