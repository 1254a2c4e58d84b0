// Vectors, exp2 and the two products of attention, for one instruction set; attention_isa.h includes it.
//
// Float32, Pairs, Strips and Tiles are ways to multiply: how a block's K and V are packed, scores = Q·K, and
// out += P·V. Each sums in one fixed order.

#if LEVEL >= 2
using vf = __m512;
constexpr int ROWS = 4, COLS = 4;
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vf bits(const void* words) { return _mm512_loadu_ps(words); }
INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a); }
INLINE float hsum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE vf widen(const uint16_t* p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
// Of two vectors, in every 128 bits: the lower or upper words and pairs of words, in turns.
INLINE vf low_words(vf a, vf b) { return _mm512_unpacklo_ps(a, b); }
INLINE vf high_words(vf a, vf b) { return _mm512_unpackhi_ps(a, b); }
INLINE vf low_pairs(vf a, vf b) { return (vf)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); }
INLINE vf high_pairs(vf a, vf b) { return (vf)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); }
// 128 bits of every fourth row.
INLINE vf fourths(const char* const* rows, long at) {
#define ROW(i) _mm_loadu_ps((const float*)(rows[i] + at))
  vf a = _mm512_castps128_ps512(ROW(0));
  a = _mm512_insertf32x4(a, ROW(4), 1);
  a = _mm512_insertf32x4(a, ROW(8), 2);
  return _mm512_insertf32x4(a, ROW(12), 3);
#undef ROW
}
// 16 vectors → the greatest lane of each.
INLINE vf greatest_lanes(const vf rows[16]) {
  vf two[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    two[i] = vmax(low_words(rows[2 * i], rows[2 * i + 1]), high_words(rows[2 * i], rows[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    four[i] = vmax(low_pairs(two[2 * i], two[2 * i + 1]), high_pairs(two[2 * i], two[2 * i + 1]));
  const vf a = vmax(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                    _mm512_shuffle_f32x4(four[0], four[1], 0xee));
  const vf b = vmax(_mm512_shuffle_f32x4(four[2], four[3], 0x44),
                    _mm512_shuffle_f32x4(four[2], four[3], 0xee));
  return vmax(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
#elif LEVEL == 1
using vf = __m256;
constexpr int ROWS = 4, COLS = 2;
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf set1(float x) { return _mm256_set1_ps(x); }
INLINE vf bits(const void* words) { return _mm256_loadu_ps((const float*)words); }
INLINE float hmax(vf a) {
  float most = a[0];
  for (int i = 1; i < 8; ++i) most = a[i] > most ? a[i] : most;
  return most;
}
INLINE float hsum(vf a) { return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])); }
INLINE vf widen(const uint16_t* p) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
INLINE vf low_words(vf a, vf b) { return _mm256_unpacklo_ps(a, b); }
INLINE vf high_words(vf a, vf b) { return _mm256_unpackhi_ps(a, b); }
INLINE vf low_pairs(vf a, vf b) { return (vf)_mm256_unpacklo_pd((__m256d)a, (__m256d)b); }
INLINE vf high_pairs(vf a, vf b) { return (vf)_mm256_unpackhi_pd((__m256d)a, (__m256d)b); }
INLINE vf fourths(const char* const* rows, long at) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float*)(rows[0] + at))),
                              _mm_loadu_ps((const float*)(rows[4] + at)), 1);
}
#else
typedef float vf __attribute__((vector_size(16)));
constexpr int ROWS = 2, COLS = 2;
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }  // built without contraction
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf set1(float x) { return vf{x, x, x, x}; }
INLINE vf bits(const void* words) {
  vf v;
  __builtin_memcpy(&v, words, sizeof v);
  return v;
}
INLINE float hmax(vf a) {
  const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
INLINE float hsum(vf a) { return (a[0] + a[1]) + (a[2] + a[3]); }
INLINE vf widen(const uint16_t* p) {
  typedef uint32_t vu __attribute__((vector_size(16)));
  return (vf)(vu{p[0], p[1], p[2], p[3]} << 16);
}
#endif

// 128 bits of each of W rows → 4 vectors: word i of every row.
INLINE void columns(const char* const* rows, long at, vf out[4]) {
#if LEVEL >= 1
  vf a[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) a[i] = fourths(rows + i, at);
  const vf low[2] = {low_words(a[0], a[1]), low_words(a[2], a[3])};
  const vf high[2] = {high_words(a[0], a[1]), high_words(a[2], a[3])};
  out[0] = low_pairs(low[0], low[1]);
  out[1] = high_pairs(low[0], low[1]);
  out[2] = low_pairs(high[0], high[1]);
  out[3] = high_pairs(high[0], high[1]);
#else
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) __builtin_memcpy((char*)&out[i] + 4 * j, rows[j] + at + 4 * i, 4);
#endif
}

constexpr int W = sizeof(vf) / 4;
typedef int32_t vi __attribute__((vector_size(sizeof(vf))));

INLINE vf load(const float* p) { return bits(p); }
INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }

INLINE void put_rounded(float* to, vf x) { store(to, x); }
INLINE void put_rounded(uint16_t* to, vf x) {  // to the nearest, ties to even
  typedef uint32_t vu __attribute__((vector_size(sizeof(vf))));
  typedef uint16_t vh __attribute__((vector_size(sizeof(vf) / 2)));
  const vu bits = (vu)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const vh half = __builtin_convertvector(x == x ? rounded : bits * 0 + 0x7fc0, vh);
  __builtin_memcpy(to, &half, sizeof half);
}

template <int N>
INLINE vf polynomial(vf x, const float (&c)[N]) {
  vf sum = set1(c[N - 1]);
#pragma GCC unroll 8
  for (int i = N - 2; i >= 0; --i) sum = fma(sum, x, set1(c[i]));
  return sum;
}

// 2^x for x <= 0 (or a rounding error above it); exactly 1 at 0, exactly 0 far below and at -inf.
// Relative error 1e-7, or 1e-4 for what is rounded to bfloat16.
template <bool EXACT>
INLINE vf exp2_vf(vf x) {
#if LEVEL >= 2
  const vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // x - floor(x), and 0 for -inf
  if constexpr (EXACT)
    return _mm512_scalef_ps(polynomial(f, {1.f, 6.9315130e-1f, 2.4016445e-1f, 5.5799916e-2f,
                                           9.0170279e-3f, 1.8671310e-3f}), x);
  return _mm512_scalef_ps(polynomial(f, {1.f, 6.9511682e-1f, 2.2764491e-1f, 7.7067064e-2f}), x);
#else
  // Adding 1.5 · 2^23 rounds, and leaves n + 127 in the low bits.
  const vf magic = set1(12582912.f + 127.f);
  x = vmax(set1(-127.f), x);
  const vf r = x + magic, f = x - (r - magic);
  const vf p = polynomial(f, {1.f, 6.9314718e-1f, 2.4022651e-1f, 5.5504109e-2f, 9.6181291e-3f,
                              1.3333558e-3f, 1.5403530e-4f});
  return p * (vf)((vi)r << 23);
#endif
}

INLINE vf word(const uint32_t* from) {  // one in every lane
  float word;
  __builtin_memcpy(&word, from, 4);
  return set1(word);
}

// out[R][N] (= or +=) A[R][k] · B[k][N], one accumulator per element, summed in the order of k.
template <class M, int R, int C, bool ADD>
void tile_product(const uint32_t* a, long lda, int k, const uint32_t* b, long ldb, float* out,
                  long ldo, const float* alpha) {
  vf sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      sum[r][c] = ADD ? load(out + r * ldo + c * W) * set1(alpha[r]) : set1(0.f);
  for (int i = 0; i < k; ++i) {
    vf column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = bits(b + i * ldb + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf row = word(a + r * lda + i);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = M::mac(row, column[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(out + r * ldo + c * W, sum[r][c]);
}

template <class M, int R, bool ADD>
void rows_product(const uint32_t* a, long lda, int k, const uint32_t* b, long ldb, float* out,
                  long ldo, int n, const float* alpha) {
  int c = 0;
  for (; c + COLS * W <= n; c += COLS * W)
    tile_product<M, R, COLS, ADD>(a, lda, k, b + c, ldb, out + c, ldo, alpha);
  if (c < n) tile_product<M, R, 2, ADD>(a, lda, k, b + c, ldb, out + c, ldo, alpha);
}

template <class M, bool ADD>
INLINE void product(int rows, const uint32_t* a, long lda, int k, const uint32_t* b, long ldb,
                    float* out, long ldo, int n, const float* alpha) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * lda, out += ROWS * ldo) {
    rows_product<M, ROWS, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
    if (ADD) alpha += ROWS;
  }
  if (rows == 1) rows_product<M, 1, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
  if constexpr (ROWS > 2) {
    if (rows == 2) rows_product<M, 2, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
    if (rows == 3) rows_product<M, 3, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
  }
}

// Multiplies in float32; K and V of either dtype are widened when packed.
template <class T>
struct Float32 {
  using Storage = T;
  static constexpr bool EXACT = sizeof(T) == 4, BYTES = false, DIRECT = false;
  static int key_words(int d) { return d; }
  static int prob_words(int keys) { return keys; }
  static int unit_steps(const Job&, int n) { return n / 16; }
  static bool takes_raw_keys(const Job&, int) { return false; }
  static void begin(int) {}
  INLINE static vf mac(vf a, vf b, vf c) { return fma(a, b, c); }

  static void pack_query(const char* from, int d, uint32_t* to) {
    for (int i = 0; i < d; ++i) {
      if constexpr (sizeof(T) == 2)
        to[i] = (uint32_t)((const uint16_t*)from)[i] << 16;
      else
        to[i] = ((const uint32_t*)from)[i];
    }
  }
  static void pack_keys(const char* const* rows, int n, int d, uint32_t* to, long block) {
    for (int key = 0; key < n; key += W)
      for (int i = 0; i < d; i += 16 / (int)sizeof(T)) {
        vf words[4];
        columns(rows + key, i * sizeof(T), words);
        for (int w = 0; w < 4; ++w) {
          float* at = (float*)to + key;
          if constexpr (sizeof(T) == 2) {
            store(at + (i + 2 * w) * block, (vf)((vi)words[w] << 16));
            store(at + (i + 2 * w + 1) * block, (vf)((vi)words[w] & -65536));
          } else {
            store(at + (i + w) * block, words[w]);
          }
        }
      }
  }
  static void pack_values(const char* const* rows, int n, int d, int padded, uint32_t* to) {
    for (int key = 0; key < n; ++key) {
      float* at = (float*)to + (long)key * padded;
      int i = 0;
      if constexpr (sizeof(T) == 2) {
        for (; i + W <= d; i += W) store(at + i, widen((const uint16_t*)rows[key] + i));
        for (; i < d; ++i) ((uint32_t*)at)[i] = (uint32_t)((const uint16_t*)rows[key])[i] << 16;
      } else {
        for (; i < d; i += 4) __builtin_memcpy(at + i, rows[key] + 4L * i, 16);
      }
    }
  }
  INLINE static void put(uint32_t* to, int i, vf p0, vf p1, vf& sum) {
    store((float*)to + i, p0);
    store((float*)to + i + W, p1);
    sum = sum + p0;
    sum = sum + p1;
  }
  static void scores(int rows, const uint32_t* q, int d, const uint32_t* keys, long block, int n,
                     float* out) {
    product<Float32, false>(rows, q, d, d, keys, block, out, block, n, nullptr);
  }
  static void mix(int rows, const uint32_t* probs, long block, int n, const uint32_t* values,
                  int padded, float* out, long ldo, const float* alpha) {
    product<Float32, true>(rows, probs, block, n, values, padded, out, ldo, padded, alpha);
  }
  static void natural_order(float*, int) {}
};

#if LEVEL >= 3
// Multiplies pairs of bfloat16 (also P, like the keys' neighbour), sums in float32.
struct Pairs {
  using Storage = uint16_t;
  static constexpr bool EXACT = false, BYTES = false, DIRECT = false;
  static int key_words(int d) { return (d + 31) / 32 * 16; }
  static int prob_words(int keys) { return keys / 2; }
  static int unit_steps(const Job&, int n) { return n / 16; }
  static bool takes_raw_keys(const Job&, int) { return false; }
  static void begin(int) {}
  INLINE static vf mac(vf a, vf b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

  static void pack_query(const char* from, int d, uint32_t* to) {
    if (d % 32) __builtin_memset(to, 0, 4 * key_words(d));
    __builtin_memcpy(to, from, 2 * d);
  }
  static void pack_keys(const char* const* rows, int n, int d, uint32_t* to, long block) {
    for (int key = 0; key < n; key += W)
      for (int i = 0; i < d; i += 8) {
        vf words[4];
        columns(rows + key, 2 * i, words);
        for (int w = 0; w < 4; ++w) store((float*)to + (i / 2 + w) * block + key, words[w]);
      }
    for (int i = d / 2; i < key_words(d); ++i) __builtin_memset(to + i * block, 0, 4 * n);
  }
  // The two halves of 32 values come out shuffled; natural_order() undoes it once per row.
  static void pack_values(const char* const* rows, int n, int d, int padded, uint32_t* to) {
    for (int key = 0; key < n; key += 2) {
      uint32_t* at = to + (long)(key / 2) * padded;
      for (int i = 0; i < d; i += 32) {
        const __mmask32 mask = d - i >= 32 ? ~0u : (1u << (d - i)) - 1;
        const __m512i a = _mm512_maskz_loadu_epi16(mask, rows[key] + 2 * i);
        const __m512i b = _mm512_maskz_loadu_epi16(mask, rows[key + 1] + 2 * i);
        _mm512_storeu_si512(at + i, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(at + i + 16, _mm512_unpackhi_epi16(a, b));
      }
    }
  }
  INLINE static void put(uint32_t* to, int i, vf p0, vf p1, vf& sum) {
    const __m512bh p = _mm512_cvtne2ps_pbh(p1, p0);
    __builtin_memcpy(to + i / 2, &p, sizeof p);
    sum = sum + (vf)_mm512_slli_epi32((__m512i)p, 16);  // of what is multiplied
    sum = sum + (vf)_mm512_and_si512((__m512i)p, _mm512_set1_epi32(-65536));
  }
  static void scores(int rows, const uint32_t* q, int d, const uint32_t* keys, long block, int n,
                     float* out) {
    product<Pairs, false>(rows, q, key_words(d), d / 2, keys, block, out, block, n, nullptr);
  }
  static void mix(int rows, const uint32_t* probs, long block, int n, const uint32_t* values,
                  int padded, float* out, long ldo, const float* alpha) {
    product<Pairs, true>(rows, probs, block, n / 2, values, padded, out, ldo, padded, alpha);
  }
  static void natural_order(float* row, int padded) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int i = 0; i < padded; i += 32) {
      const vf a = load(row + i), b = load(row + i + 16);
      store(row + i, _mm512_permutex2var_ps(a, low, b));
      store(row + i + 16, _mm512_permutex2var_ps(a, high, b));
    }
  }
};
#endif

#if LEVEL == 3
// The same sums in the same order, from cells that lie as the products want them, in strips of 16. Of a
// strip's head: keys are a line for each 2 dims, of all 16 keys; values 2 keys of 16 dims to a line, first
// all dims of the first 2 keys. So nothing is packed, and a thread reads its cells in order.
struct Strips : Pairs {
  static constexpr bool DIRECT = true;
  static int unit_steps(const Job& job, int n) { return n * job.D / 64; }  // of 256 bytes

  static void write(const uint16_t* k, const uint16_t* v, char* keys, char* values, int lane, int d) {
    values += lane / 2 * d * 4;
    const __mmask32 own = lane % 2 ? 0xaaaaaaaa : 0x55555555;
    for (long i = 0; i < d / 2; ++i) __builtin_memcpy(keys + i * 64 + lane * 4, k + 2 * i, 4);
    for (long i = 0; i < d; i += 16) {
      const __m512i dims = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v + i)));
      _mm512_mask_storeu_epi16(values + i * 4, own, _mm512_or_si512(dims, _mm512_slli_epi32(dims, 16)));
    }
  }
  static void copy_values(const Job&, const Cells&, const char*, int, uint32_t*, uint32_t*) {}

  template <int R, int C>
  static void some_scores(const Job& job, const uint32_t* q, const char* const* strips, float* out,
                          Ahead* ahead) {
    const long words = key_words(job.D);  // of a query, which may end with zeros
    vf sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = set1(0.f);
    for (long i = 0; i < job.D / 2; i += 4) {
#pragma GCC unroll 4
      for (long w = i; w < i + 4; ++w) {
        vf keys[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) keys[c] = bits(strips[c] + w * 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const vf row = word(q + r * words + w);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sum[r][c] = mac(row, keys[c], sum[r][c]);
        }
      }
      if (ahead) ahead->step(job, C);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) store(out + r * job.block + c * W, sum[r][c]);
  }
  template <int C>
  INLINE static void unit_scores(const Job& job, const Unit& unit, const char* const* strips, float* out,
                                 Ahead* ahead) {
    constexpr decltype(&some_scores<1, C>) KINDS[] = {some_scores<1, C>, some_scores<2, C>, some_scores<3, C>,
                                                      some_scores<4, C>};
    for (int r = 0; r < unit.count; r += ROWS)
      KINDS[std::min(ROWS, unit.count - r) - 1](job, unit.queries + r * key_words(job.D), strips,
                                                out + r * job.block, ahead);
  }
  static void scores(const Job& job, const Unit& unit, const Cells& cells, const char* heads, float* out,
                     Ahead& ahead) {
    const char* strips[BLOCK / STRIP];
    cells.point_strips(heads, unit.keys, strips);
    Ahead* often = unit.count > ROWS ? nullptr : &ahead;
    if (unit.keys == 64) unit_scores<4>(job, unit, strips, out, often);
    else unit_scores<2>(job, unit, strips, out, often);
    if (!often) ahead.step(job, unit_steps(job, unit.keys) / 2);
  }

  // Some rows × C · 16 dims. `count`: cells that are there; what lies behind them may be anything.
  template <int R, int C>
  static void some_mix(const Job& job, const uint32_t* probs, const char* const* strips, int count, long dim,
                       float* out, const float* alpha, Ahead* ahead) {
    vf sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = load(out + r * job.state_words + dim + c * W) * set1(alpha[r]);
    const auto add = [&](const char* from, const uint32_t* weights, bool half) ALWAYS_INLINE {
      vf values[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        values[c] = bits(from + c * 64);
        if (half) values[c] = (vf)_mm512_and_si512((__m512i)values[c], _mm512_set1_epi32(0xffff));
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vf row = word(weights + r * job.block);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sum[r][c] = mac(row, values[c], sum[r][c]);
      }
    };
    const long stride = job.D * 4L;
    for (int key = 0; key < count; key += STRIP) {
      const char* from = strips[key / STRIP] + dim * 4;
      const int here = std::min(STRIP, count - key);
      for (int i = 0; i < here / 2; ++i, from += stride, ++probs) add(from, probs, false);
      if (here % 2) add(from, probs, true);
      if (ahead) ahead->step(job, 2 * C);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) store(out + r * job.state_words + dim + c * W, sum[r][c]);
  }
  template <int C>
  INLINE static long unit_mix(const Job& job, const Unit& unit, const Buffers& at, const char* const* strips,
                              long dim, const float* alpha, Ahead* ahead) {
    constexpr decltype(&some_mix<1, C>) KINDS[] = {some_mix<1, C>, some_mix<2, C>, some_mix<3, C>, some_mix<4, C>};
    const int count = std::min(unit.keys, at.cells.count);
    for (; dim + C * W <= job.D; dim += C * W)
      for (int r = 0; r < unit.count; r += ROWS)
        KINDS[std::min(ROWS, unit.count - r) - 1](job, (const uint32_t*)at.scores + r * job.block, strips, count,
                                                  dim, unit.state + r * job.state_words, alpha + r, ahead);
    return dim;
  }
  static void mix(const Job& job, const Unit& unit, const Buffers& at, const char* heads, const float* alpha,
                  Ahead& ahead) {
    const char* strips[BLOCK / STRIP];
    at.cells.point_strips(heads, unit.keys, strips);
    Ahead* often = unit.count > ROWS ? nullptr : &ahead;
    unit_mix<1>(job, unit, at, strips, unit_mix<4>(job, unit, at, strips, 0, alpha, often), alpha, often);
    if (!often) ahead.step(job, unit_steps(job, unit.keys) / 2);
  }
  static void natural_order(float*, int) {}
};
#endif

#if LEVEL >= 4
// The same layouts through the tile unit, for decode and prefill alike (its order of summation is
// not that of vdpbf16ps). Tiles 0–3 collect, 4 holds rows of A, 5 a piece of B.
struct Tiles : Pairs {
  // Keys of a cell's head that are the rows of a tile as they lie there need no packing; it is the
  // queries, few, that are turned. Products and sums are the same ones in the same order.
  static bool takes_raw_keys(const Job& job, int rows) {
    return rows <= UNIT && job.D % 32 == 0 && job.page_size % 16 == 0;
  }

  static void begin(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.colsb[i] = i > 5 && rows < 16 ? 4 * rows : 64;
      config.rows[i] = i < 5 && rows < 16 ? rows : 16;
    }
    FENCE();
    _tile_loadconfig(&config);
  }
  // `heads`: the head in the cache's first cell; `turned`: room for a block's scores, key by key.
  static void raw_scores(const Job& job, int rows, const uint32_t* queries, const char* heads,
                         const Cells& cells, int n, float* turned, float* out, Ahead& ahead) {
    FENCE();
    for (int key = 0; key < cells.count && key < n; key += 16) {
      _tile_zero(6);
      for (int i = 0; i < job.D / 2; i += 16) {
        _tile_loadd(5, heads + cells.at[key] + 4 * i, job.cell_bytes);
        _tile_loadd(7, queries + i * rows, 4 * rows);
        _tile_dpbf16ps(6, 5, 7);
      }
      _tile_stored(6, turned + key * rows, 4 * rows);
      ahead.step(job, 1);
    }
    FENCE();
    const __m512i at = multiples_to_15(rows);
    for (int r = 0; r < rows; ++r)
      for (int key = 0; key < n; key += 16)
        store(out + r * job.block + key, _mm512_i32gather_ps(at, turned + key * rows + r, 4));
  }
  template <int C, bool ADD>
  INLINE static void tiles(const uint32_t* a, long lda, int k, const uint32_t* b, long ldb,
                           float* out, long ldo) {
    FENCE();  // the intrinsics do not tell the compiler that they read memory
    if constexpr (ADD) {
      _tile_loadd(0, out, ldo * 4);
      _tile_loadd(1, out + 16, ldo * 4);
      if constexpr (C == 4) {
        _tile_loadd(2, out + 32, ldo * 4);
        _tile_loadd(3, out + 48, ldo * 4);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (C == 4) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    for (int i = 0; i < k; i += 16) {
      const uint32_t* from = b + i * ldb;
      _tile_loadd(4, a + i, lda * 4);
      _tile_loadd(5, from, ldb * 4);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, from + 16, ldb * 4);
      _tile_dpbf16ps(1, 4, 5);
      if constexpr (C == 4) {
        _tile_loadd(5, from + 32, ldb * 4);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, from + 48, ldb * 4);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, out, ldo * 4);
    _tile_stored(1, out + 16, ldo * 4);
    if constexpr (C == 4) {
      _tile_stored(2, out + 32, ldo * 4);
      _tile_stored(3, out + 48, ldo * 4);
    }
    FENCE();
  }
  template <bool ADD>
  static void all(const uint32_t* a, long lda, int k, const uint32_t* b, long ldb, float* out,
                  long ldo, int n) {
    int c = 0;
    for (; c + 64 <= n; c += 64) tiles<4, ADD>(a, lda, k, b + c, ldb, out + c, ldo);
    if (c < n) tiles<2, ADD>(a, lda, k, b + c, ldb, out + c, ldo);
  }
  static void scores(int, const uint32_t* q, int d, const uint32_t* keys, long block, int n,
                     float* out) {
    all<false>(q, key_words(d), key_words(d), keys, block, out, block, n);
  }
  static void mix(int rows, const uint32_t* probs, long block, int n, const uint32_t* values,
                  int padded, float* out, long ldo, const float* alpha) {
    for (int r = 0; r < rows; ++r)
      if (alpha[r] != 1.f)
        for (int i = 0; i < padded; i += W)
          store(out + r * ldo + i, load(out + r * ldo + i) * set1(alpha[r]));
    all<true>(probs, block, n / 2, values, padded, out, ldo, padded);
  }
};
#endif

#if LEVEL >= 3
#include "attention_bytes.h"
#endif
