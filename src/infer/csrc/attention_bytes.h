// Attention over a cache in int8, on tiles or on vectors; attention_products.h includes it.
//
// A head's key or value in a cell is D whole numbers and one scale; largest magnitude = 127. Keys are
// spread first: they and the queries are multiplied by a Hadamard matrix, which changes no product of
// the two, and of a few large numbers, as many models have them in every key, makes many of middling
// size. Queries are rounded like keys; P, small where there are many keys, has two digits of 8 bits. The
// sums of products are whole and exact in any order.
//
// Cells lie in strips of 16, as the tiles want them. Keys of a strip's head: for every 64 dims a tile of
// 16 lines, 4 dims of 16 keys each; its values: for every 16 dims 4 lines, 4 keys of 16 dims each; and
// behind either the 16 scales. So neither is packed when it is read, but for tiles values of 4 strips are
// copied to one. A line is what a product of vectors takes, too.

constexpr float TOP = 127 * 256;  // the largest number of two digits

// The numbers of one head in vectors; N = D / 16.
template <int N>
struct Head {
  vf x[N];

  explicit Head(const uint16_t* from) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = widen(from + i * W);
  }
  INLINE void spread() {
#pragma GCC unroll 4
    for (int far = 1; far < N; far *= 2)
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i)
        if (!(i & far)) {
          const vf sum = x[i] + x[i + far];
          x[i + far] = x[i] - x[i + far];
          x[i] = sum;
        }
    const auto signs = [](int lanes) { return _mm512_mask_mov_ps(set1(1.f), lanes, set1(-1.f)); };
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      x[i] = fma(x[i], signs(0xaaaa), _mm512_permute_ps(x[i], 0xb1));
      x[i] = fma(x[i], signs(0xcccc), _mm512_permute_ps(x[i], 0x4e));
      x[i] = fma(x[i], signs(0xf0f0), _mm512_shuffle_f32x4(x[i], x[i], 0xb1));
      x[i] = fma(x[i], signs(0xff00), _mm512_shuffle_f32x4(x[i], x[i], 0x4e));
    }
  }
  INLINE Scale fit(float top) const {
    __m512i most = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      most = _mm512_max_epu32(most, magnitude(x[i]));
    return Scale(most, top);
  }
  INLINE __m512i whole(int i, float inverse) const { return _mm512_cvtps_epi32(x[i] * set1(inverse)); }

  // D numbers and the scale.
  INLINE void put_query(char* to) {
    spread();
    const Scale by = fit(127.f);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      _mm_store_si128((__m128i*)(to + i * W), _mm512_cvtepi32_epi8(whole(i, by.inverse)));
    const float scale = by.scale / (N * W);  // what spreading both sides has multiplied products by
    __builtin_memcpy(to + N * W, &scale, 4);
  }
  INLINE void put_key(char* strip, int lane) {
    spread();
    const Scale by = fit(127.f);
    const __m512i lines = multiples_to_15(64);
    for (int i = 0; i < N; i += 4) {
      alignas(64) char dims[64];
      for (int j = 0; j < 4; ++j)
        _mm_store_si128((__m128i*)(dims + j * W), _mm512_cvtepi32_epi8(whole(i + j, by.inverse)));
      _mm512_i32scatter_epi32(strip + i * 256 + lane * 4, lines, _mm512_load_si512(dims), 1);
    }
    __builtin_memcpy(strip + N * 256 + lane * 4, &by.scale, 4);
  }
  INLINE void put_value(char* strip, int lane) {
    const Scale by = fit(127.f);
    const __mmask64 own = 0x1111111111111111ull << lane % 4;
    for (int i = 0; i < N; ++i) {
      const __m512i moved = _mm512_sllv_epi32(whole(i, by.inverse), _mm512_set1_epi32(lane % 4 * 8));
      _mm512_mask_storeu_epi8(strip + i * 256 + lane / 4 * 64, own, moved);
    }
    __builtin_memcpy(strip + N * 256 + lane * 4, &by.scale, 4);
  }
};

#define WITH_HEAD(D, from, call) \
  switch (D) { \
    case 64: Head<4>(from).call; break; \
    case 128: Head<8>(from).call; break; \
    default: Head<16>(from).call; \
  }

inline void write_bytes(const uint16_t* k, const uint16_t* v, char* keys, char* values, int lane, int D) {
  WITH_HEAD(D, k, put_key(keys, lane))
  WITH_HEAD(D, v, put_value(values, lane))
}

// Between the two products; it takes the place of packed keys.
struct Digits {
  uint8_t of[16][2][BLOCK];  // high and low ones, of P times the values' scales, in the tiles' order
  float units[16];           // what 1 means in a row of them
  float scales[BLOCK];       // of the head's values
  bool has_nan;              // among them
};

// What both ways share.
template <class Products>
struct WholeNumbers : Products {
  static constexpr bool BYTES = true, DIRECT = true;
  static int key_words(int d) { return (d + 64) / 4; }
  static int unit_steps(const Job& job, int n) { return n / 32 + job.D / 32; }
  static bool takes_raw_keys(const Job&, int) { return false; }

  // Of a strip's values.
  INLINE static void read_scales(const Job& job, const Cells& cells, const char* strip, int key, Digits& at) {
    // Behind the end there may be anything, and 0 · NaN is NaN.
    const int left = cells.count - key;
    const __mmask16 there = left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
    const vf scales = _mm512_maskz_loadu_ps(there, strip + job.D * 16);
    store(at.scales + key, scales);
    at.has_nan = (key && at.has_nan) || _mm512_cmp_ps_mask(scales, scales, _CMP_UNORD_Q);
  }
  INLINE static vf scales(const Job& job, const Unit& unit) {
    const __m512i rows = multiples_to_15(4 * key_words(job.D));
    return _mm512_i32gather_ps(rows, (const char*)unit.queries + job.D, 1) * set1(job.scale);
  }
  // As weigh_row, and P times the values' scales in digits: of a block's greatest, as many as there are.
  template <int N>
  INLINE static void weigh(const float* scores, float scale, float greatest, float alpha, float* lanes,
                           Digits& to, int row) {
    vf sum = load(lanes) * set1(alpha), p[8];
    __m512i most = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      if (i >= N) {
        p[i] = set1(0.f);
        continue;
      }
      p[i] = exp2_vf<Products::EXACT>(fma(load(scores + i * W), set1(scale), set1(-greatest)));
      sum = sum + p[i];
      vf by = load(to.scales + i * W);
      if (to.has_nan) by = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(p[i], set1(0.f), _CMP_NEQ_UQ), by);
      p[i] = p[i] * by;
      most = _mm512_max_epu32(most, (__m512i)p[i]);
    }
    store(lanes, sum);
    const Scale by(most, TOP);
    to.units[row] = by.scale;
    const vf inverse = set1(by.inverse);
#pragma GCC unroll 2
    for (int i = 0; i < N; i += 4) {
      const auto whole = [&](int at) { return _mm512_cvtps_epi32(p[i + at] * inverse); };
      const __m512i a = _mm512_packs_epi32(whole(0), whole(1)), b = _mm512_packs_epi32(whole(2), whole(3));
      const __m512i low = _mm512_set1_epi16(255);
      _mm512_store_si512(to.of[row][0] + i * W,
                         _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
      _mm512_store_si512(to.of[row][1] + i * W,
                         _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
    }
  }
  INLINE static void weigh_row(const float* scores, int n, float scale, float greatest, float alpha,
                               float* lanes, uint32_t* digits, int row) {
    Digits& to = *(Digits*)digits;
    switch (n) {
      case 32: return weigh<2>(scores, scale, greatest, alpha, lanes, to, row);
      case 64: return weigh<4>(scores, scale, greatest, alpha, lanes, to, row);
      case 96: return weigh<6>(scores, scale, greatest, alpha, lanes, to, row);
      default: return weigh<8>(scores, scale, greatest, alpha, lanes, to, row);
    }
  }
  // Columns of a row's state: sums of products with its digits.
  INLINE static void add_digits(float* to, __m512i high, __m512i low, vf unit, vf alpha) {
    const vf sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    store(to, fma(sum, unit, load(to) * alpha));
  }
  static void natural_order(float*, int) {}
};

#if LEVEL >= 4
struct Bytes : WholeNumbers<Tiles> {
  // Tiles 5 · 6 and 5 · 7 give scores in 1 and 3. Digits in 4 and 5, times 6 and 7: sums of high ones in
  // 0 and 2, of low ones in 1 and 3; of up to 8 rows both are rows of 4, and their sums of 0 and 2.
  static bool narrow(int rows) { return rows <= 8; }
  static void begin(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.colsb[i] = 64;
      const int own = narrow(rows) && i % 2 == 0 ? 2 * rows : rows;
      config.rows[i] = i > 5 || own > 16 ? 16 : own;
    }
    FENCE();
    _tile_loadconfig(&config);
  }
  static void pack_query(const char* from, int d, uint32_t* to) {
    WITH_HEAD(d, (const uint16_t*)from, put_query((char*)to))
  }
  // Values of 4 strips become a tile for each 16 dims, its lines in the order in which digits are packed:
  // first those of the strips' first 4 keys.
  static void copy_values(const Job& job, const Cells& cells, const char* heads, int key, uint32_t* tiles,
                          uint32_t* digits) {
    const char* from = cells.row(heads, key);
    char* to = (char*)tiles + key / 64 * 64 * job.D + key % 64 / 16 * 64;
    for (int i = 0; i < job.D; i += 16, from += 256, to += 1024)
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) store((float*)(to + line * 256), bits(from + line * 64));
    read_scales(job, cells, cells.row(heads, key), key, *(Digits*)digits);
  }
  static void scores(const Job& job, const Unit& unit, const Cells& cells, const char* heads, float* out,
                     Ahead& ahead) {
    // All products first: what waits for a tile's sums waits for everything before them.
    alignas(64) int32_t sums[BLOCK / 16][16][16];
    FENCE();
    for (int key = 0; key < unit.keys; key += 32) {
      const char *one = cells.row(heads, key), *other = cells.row(heads, key + 16);
      _tile_zero(1);
      _tile_zero(3);
      for (int d = 0; d < job.D; d += 64) {
        _tile_loadd(5, (const char*)unit.queries + d, job.D + 64);
        _tile_loadd(6, one + d * 16, 64);
        _tile_dpbssd(1, 5, 6);
        _tile_loadd(7, other + d * 16, 64);
        _tile_dpbssd(3, 5, 7);
      }
      _tile_stored(1, sums[key / 16], 64);
      _tile_stored(3, sums[key / 16 + 1], 64);
      ahead.step(job, 1);
    }
    FENCE();
    for (int key = 0; key < unit.keys; key += 16) {
      const vf scales = bits(cells.row(heads, key) + job.D * 16);
      for (int r = 0; r < unit.count; ++r)
        store(out + r * job.block + key,
              _mm512_cvtepi32_ps(_mm512_load_si512(sums[key / 16][r])) * scales);
    }
  }
  template <bool NARROW>
  static void some_mix(const Job& job, const Unit& unit, const Digits& digits, const char* tiles,
                       const float* alpha, Ahead& ahead) {
    constexpr int PAIRS = 4;  // of columns, whose sums are kept
    alignas(64) int32_t sums[PAIRS][4][16][16];
    for (int first = 0; first < job.D; first += 32 * PAIRS) {
      const int pairs = std::min(PAIRS, (job.D - first) / 32);
      FENCE();
      for (int i = 0; i < pairs; ++i) {
        _tile_zero(0);
        _tile_zero(2);
        if (!NARROW) {
          _tile_zero(1);
          _tile_zero(3);
        }
        for (int key = 0; key < unit.keys; key += 64) {
          const char* from = tiles + key * job.D + (first + i * 32) * 64;
          _tile_loadd(4, digits.of[0][0] + key, NARROW ? BLOCK : 2 * BLOCK);
          _tile_loadd(6, from, 64);
          _tile_dpbusd(0, 4, 6);
          _tile_loadd(7, from + 1024, 64);
          _tile_dpbusd(2, 4, 7);
          if (NARROW) continue;
          _tile_loadd(5, digits.of[0][1] + key, 2 * BLOCK);
          _tile_dpbusd(1, 5, 6);
          _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(0, sums[i][0], 64);
        _tile_stored(2, sums[i][2], 64);
        if (!NARROW) {
          _tile_stored(1, sums[i][1], 64);
          _tile_stored(3, sums[i][3], 64);
        }
        ahead.step(job, 1);
      }
      FENCE();
      for (int r = 0; r < unit.count; ++r) {
        float* to = unit.state + r * job.state_words + first;
        const vf unit_here = set1(digits.units[r]), before = set1(alpha[r]);
        for (int i = 0; i < 2 * pairs; ++i, to += 16) {
          const auto& pair = sums[i / 2];
          const int32_t* high = NARROW ? pair[i % 2 * 2][2 * r] : pair[i % 2 * 2][r];
          const int32_t* low = NARROW ? high + 16 : pair[i % 2 * 2 + 1][r];
          add_digits(to, _mm512_load_si512(high), _mm512_load_si512(low), unit_here, before);
        }
      }
    }
  }
  static void mix(const Job& job, const Unit& unit, const Buffers& at, const char*, const float* alpha,
                  Ahead& ahead) {
    const Digits& digits = *(const Digits*)at.keys;
    const char* tiles = (const char*)at.values;
    if (narrow(unit.rows)) some_mix<true>(job, unit, digits, tiles, alpha, ahead);
    else some_mix<false>(job, unit, digits, tiles, alpha, ahead);
  }
};
#else
// Bytes without a sign are multiplied by bytes with one: queries are 128 too large, and what that adds, 128
// times the sum of a key's numbers, is found beside the products.
struct Bytes : WholeNumbers<Pairs> {
  static void begin(int) {}
  static void pack_query(const char* from, int d, uint32_t* to) {
    WITH_HEAD(d, (const uint16_t*)from, put_query((char*)to))
    for (int i = 0; i < d / 4; ++i) to[i] ^= 0x80808080;
  }
  static void copy_values(const Job& job, const Cells& cells, const char* heads, int key, uint32_t*,
                          uint32_t* digits) {
    read_scales(job, cells, cells.row(heads, key), key, *(Digits*)digits);
  }
  static constexpr int SCORED = 8, MIXED = 6;  // rows whose sums are in registers, of 32 keys or dims
  // Of some rows, with 32 keys. Here and in `some_mix`: a call of its own, so what is added up stays in
  // registers, whatever is asked for in between.
  template <int R>
  NOINLINE static void some_scores(const Job& job, const uint32_t* queries, const char* const* strips, float* out) {
    const int words = key_words(job.D);
    __m512i sums[R][2], too_much[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
    for (int line = 0; line < job.D / 4; ++line) {
      __m512i keys[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        keys[i] = (__m512i)bits(strips[i] + 64 * line);
        add_products(too_much[i], _mm512_set1_epi8((char)128), keys[i]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i four = (__m512i)word(queries + r * words + line);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) add_products(sums[r][i], four, keys[i]);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const vf scales = bits(strips[i] + job.D * 16);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        store(out + r * job.block + i * W,
              _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][i], too_much[i])) * scales);
    }
  }
  // Of some rows, for 32 dims from `dim` on.
  template <int R>
  NOINLINE static void some_mix(const Job& job, const Unit& unit, int row, int dim, const char* const* strips,
                                const Digits& digits, const float* alpha) {
    __m512i sums[R][2][2];  // columns; high and low digits
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sums[r][j / 2][j % 2] = _mm512_setzero_si512();
    for (int at = 0; at < unit.keys / 4; ++at) {  // 4 keys of a strip
      const char* from = strips[at / 4] + dim * 16 + at % 4 * 64;
      const __m512i values[2] = {(__m512i)bits(from), (__m512i)bits(from + 256)};
      const int place = at / 16 * 64 + (at % 4 * 4 + at / 4 % 4) * 4;
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int digit = 0; digit < 2; ++digit) {
          const __m512i four = (__m512i)word((const uint32_t*)(digits.of[row + r][digit] + place));
#pragma GCC unroll 2
          for (int c = 0; c < 2; ++c) add_products(sums[r][c][digit], four, values[c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c)
        add_digits(unit.state + (row + r) * job.state_words + dim + c * W, sums[r][c][0], sums[r][c][1],
                   set1(digits.units[row + r]), set1(alpha[row + r]));
  }
  static void scores(const Job& job, const Unit& unit, const Cells& cells, const char* heads, float* out,
                     Ahead& ahead) {
    constexpr decltype(&some_scores<1>) KINDS[SCORED] = {
        some_scores<1>, some_scores<2>, some_scores<3>, some_scores<4>,
        some_scores<5>, some_scores<6>, some_scores<7>, some_scores<8>};
    const char* strips[BLOCK / STRIP];
    cells.point_strips(heads, unit.keys, strips);
    for (int key = 0; key < unit.keys; key += 32) {
      for (int row = 0; row < unit.count; row += SCORED)
        KINDS[std::min(SCORED, unit.count - row) - 1](job, unit.queries + row * key_words(job.D),
                                                      strips + key / STRIP, out + row * job.block + key);
      ahead.step(job, 1);
    }
  }
  static void mix(const Job& job, const Unit& unit, const Buffers& at, const char* heads, const float* alpha,
                  Ahead& ahead) {
    constexpr decltype(&some_mix<1>) KINDS[MIXED] = {some_mix<1>, some_mix<2>, some_mix<3>,
                                                     some_mix<4>, some_mix<5>, some_mix<6>};
    const char* strips[BLOCK / STRIP];
    at.cells.point_strips(heads, unit.keys, strips);
    for (int dim = 0; dim < job.D; dim += 32) {
      for (int row = 0; row < unit.count; row += MIXED)
        KINDS[std::min(MIXED, unit.count - row) - 1](job, unit, row, dim, strips, *(const Digits*)at.keys, alpha);
      ahead.step(job, 1);
    }
  }
};
#endif
#undef WITH_HEAD
