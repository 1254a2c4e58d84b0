// The attention of one work item. attention.cpp includes this file once per instruction set, inside
// a namespace and a `target` region: LEVEL 0 portable, 1 AVX2+FMA, 2 AVX-512, 3 AVX-512-BF16, 4 AMX.
//
// Blocks of 128 keys at absolute positions: pack K transposed and V by rows, then for a few query
// rows at a time: scores = Q·K, online softmax, out += P·V. Every sum runs in one fixed order that
// only the key's position decides, and a key that a row may not see adds exact zeros; so a row's
// result does not depend on the rows beside it, nor on how many of them there are.

#if LEVEL >= 2
using vf = __m512;
constexpr int ROWS = 4, COLS = 4;
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vf bits(const void* words) { return _mm512_loadu_ps(words); }
INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a); }
INLINE vf widen(const uint16_t* p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
// 128 bits of each of 16 rows → 4 vectors: word i of every row.
INLINE void columns(const char* const* rows, long at, vf out[4]) {
  vf a[4];
#define ROW(i) _mm_loadu_ps((const float*)(rows[i] + at))
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_castps128_ps512(ROW(i));
    a[i] = _mm512_insertf32x4(a[i], ROW(i + 4), 1);
    a[i] = _mm512_insertf32x4(a[i], ROW(i + 8), 2);
    a[i] = _mm512_insertf32x4(a[i], ROW(i + 12), 3);
  }
#undef ROW
  const __m512d lo0 = (__m512d)_mm512_unpacklo_ps(a[0], a[1]);
  const __m512d hi0 = (__m512d)_mm512_unpackhi_ps(a[0], a[1]);
  const __m512d lo1 = (__m512d)_mm512_unpacklo_ps(a[2], a[3]);
  const __m512d hi1 = (__m512d)_mm512_unpackhi_ps(a[2], a[3]);
  out[0] = (vf)_mm512_unpacklo_pd(lo0, lo1);
  out[1] = (vf)_mm512_unpackhi_pd(lo0, lo1);
  out[2] = (vf)_mm512_unpacklo_pd(hi0, hi1);
  out[3] = (vf)_mm512_unpackhi_pd(hi0, hi1);
}
// 16 vectors → the greatest lane of each.
INLINE vf greatest_lanes(const vf rows[16]) {
  vf two[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    two[i] = vmax(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                  _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)two[2 * i], b = (__m512d)two[2 * i + 1];
    four[i] = vmax((vf)_mm512_unpacklo_pd(a, b), (vf)_mm512_unpackhi_pd(a, b));
  }
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
INLINE vf widen(const uint16_t* p) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
INLINE void columns(const char* const* rows, long at, vf out[4]) {
  vf a[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float*)(rows[i] + at))),
                                _mm_loadu_ps((const float*)(rows[i + 4] + at)), 1);
  const __m256d lo0 = (__m256d)_mm256_unpacklo_ps(a[0], a[1]);
  const __m256d hi0 = (__m256d)_mm256_unpackhi_ps(a[0], a[1]);
  const __m256d lo1 = (__m256d)_mm256_unpacklo_ps(a[2], a[3]);
  const __m256d hi1 = (__m256d)_mm256_unpackhi_ps(a[2], a[3]);
  out[0] = (vf)_mm256_unpacklo_pd(lo0, lo1);
  out[1] = (vf)_mm256_unpackhi_pd(lo0, lo1);
  out[2] = (vf)_mm256_unpacklo_pd(hi0, hi1);
  out[3] = (vf)_mm256_unpackhi_pd(hi0, hi1);
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
INLINE vf widen(const uint16_t* p) {
  typedef uint32_t vu __attribute__((vector_size(16)));
  return (vf)(vu{p[0], p[1], p[2], p[3]} << 16);
}
INLINE void columns(const char* const* rows, long at, vf out[4]) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) __builtin_memcpy((char*)&out[i] + 4 * j, rows[j] + at + 4 * i, 4);
}
#endif

constexpr int W = sizeof(vf) / 4;
typedef int32_t vi __attribute__((vector_size(sizeof(vf))));

INLINE vf load(const float* p) { return bits(p); }
INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }

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
      float word;
      __builtin_memcpy(&word, a + r * lda + i, 4);
      const vf row = set1(word);
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
  switch (rows) {
    case 1: return rows_product<M, 1, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
    case 2: return rows_product<M, 2, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
    case 3: return rows_product<M, ROWS < 3 ? 1 : 3, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
    default: return rows_product<M, ROWS, ADD>(a, lda, k, b, ldb, out, ldo, n, alpha);
  }
}

// Multiplies in float32; K and V of either dtype are widened when packed.
template <class T>
struct Float32 {
  using Storage = T;
  static constexpr int SUBTILE = ROWS;
  static constexpr bool EXACT = sizeof(T) == 4;
  static int key_words(int d) { return d; }
  static int prob_words(int keys) { return keys; }
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
  static void pack_keys(const char* const* rows, int n, int d, uint32_t* to) {
    for (int key = 0; key < n; key += W)
      for (int i = 0; i < d; i += 16 / (int)sizeof(T)) {
        vf words[4];
        columns(rows + key, i * sizeof(T), words);
        for (int w = 0; w < 4; ++w) {
          float* at = (float*)to + key;
          if constexpr (sizeof(T) == 2) {
            store(at + (i + 2 * w) * BLOCK, (vf)((vi)words[w] << 16));
            store(at + (i + 2 * w + 1) * BLOCK, (vf)((vi)words[w] & -65536));
          } else {
            store(at + (i + w) * BLOCK, words[w]);
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
  static void scores(int rows, const uint32_t* q, int d, const uint32_t* keys, int n, float* out) {
    product<Float32, false>(rows, q, d, d, keys, BLOCK, out, BLOCK, n, nullptr);
  }
  static void mix(int rows, const uint32_t* probs, int n, const uint32_t* values, int padded,
                  float* out, long ldo, const float* alpha) {
    product<Float32, true>(rows, probs, BLOCK, n, values, padded, out, ldo, padded, alpha);
  }
  static void natural_order(float*, int) {}
};

#if LEVEL >= 3
// Multiplies pairs of bfloat16 (also P, like the keys' neighbour), sums in float32.
struct Pairs {
  using Storage = uint16_t;
  static constexpr int SUBTILE = ROWS;
  static constexpr bool EXACT = false;
  static int key_words(int d) { return (d + 31) / 32 * 16; }
  static int prob_words(int keys) { return keys / 2; }
  static void begin(int) {}
  INLINE static vf mac(vf a, vf b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

  static void pack_query(const char* from, int d, uint32_t* to) {
    if (d % 32) __builtin_memset(to, 0, 4 * key_words(d));
    __builtin_memcpy(to, from, 2 * d);
  }
  static void pack_keys(const char* const* rows, int n, int d, uint32_t* to) {
    for (int key = 0; key < n; key += W)
      for (int i = 0; i < d; i += 8) {
        vf words[4];
        columns(rows + key, 2 * i, words);
        for (int w = 0; w < 4; ++w) store((float*)to + (i / 2 + w) * BLOCK + key, words[w]);
      }
    for (int i = d / 2; i < key_words(d); ++i) __builtin_memset(to + i * BLOCK, 0, 4 * n);
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
  static void scores(int rows, const uint32_t* q, int d, const uint32_t* keys, int n, float* out) {
    product<Pairs, false>(rows, q, key_words(d), d / 2, keys, BLOCK, out, BLOCK, n, nullptr);
  }
  static void mix(int rows, const uint32_t* probs, int n, const uint32_t* values, int padded,
                  float* out, long ldo, const float* alpha) {
    product<Pairs, true>(rows, probs, BLOCK, n / 2, values, padded, out, ldo, padded, alpha);
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

#if LEVEL >= 4
// The same layouts through the tile unit, for decode and prefill alike (its order of summation is
// not that of vdpbf16ps). Tiles 0–3 collect, 4 holds rows of A, 5 and 6 take turns with B.
struct Tiles : Pairs {
  static constexpr int SUBTILE = 16;

  static void begin(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int i = 0; i < 7; ++i) {
      config.colsb[i] = 64;
      config.rows[i] = i < 5 && rows < 16 ? rows : 16;
    }
    FENCE();
    _tile_loadconfig(&config);
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
      _tile_loadd(6, from + 16, ldb * 4);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (C == 4) {
        _tile_loadd(5, from + 32, ldb * 4);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, from + 48, ldb * 4);
        _tile_dpbf16ps(3, 4, 6);
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
  static void scores(int, const uint32_t* q, int d, const uint32_t* keys, int n, float* out) {
    all<false>(q, key_words(d), key_words(d), keys, BLOCK, out, BLOCK, n);
  }
  static void mix(int rows, const uint32_t* probs, int n, const uint32_t* values, int padded,
                  float* out, long ldo, const float* alpha) {
    for (int r = 0; r < rows; ++r)
      if (alpha[r] != 1.f)
        for (int i = 0; i < padded; i += W)
          store(out + r * ldo + i, load(out + r * ldo + i) * set1(alpha[r]));
    all<true>(probs, BLOCK, n / 2, values, padded, out, ldo, padded);
  }
};
#endif

// A row's state is `padded` sums of P·V, 16 lanes of the sum of P, and the score that
// counts as 2^0: the greatest so far, or one that is less by RISE at most (changing it costs).
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

// Packs one head of a block, and meanwhile asks for its share of the next block, in small pieces so
// that nothing waits for them, and in the order of addresses, which the hardware continues.
template <class M>
INLINE void pack_block(const Job& job, const Item& item, const Cells& cells, int group, int n,
                       const Packed& to) {
  const char *keys[BLOCK], *values[BLOCK];
  const long head_bytes = (long)job.D * sizeof(typename M::Storage), at = group * head_bytes;
  cells.point(job.keys + at, keys);
  cells.point(job.values + at, values);
  const int groups = item.group_end - item.group, pieces = groups * (n / 16);
  const long slice = item.group * head_bytes, slice_bytes = groups * head_bytes;
  for (int key = 0; key < n; key += 16) {
    const int piece = (group - item.group) * (n / 16) + key / 16;
    const int from = BLOCK * piece / pieces, until = BLOCK * (piece + 1) / pieces;
    cells.fetch(job.keys + slice, slice_bytes, from, until);
    M::pack_keys(keys + key, 16, job.D, to.keys + key);
    cells.fetch(job.values + slice, slice_bytes, from, until);
    M::pack_values(values + key, 16, job.D, job.padded,
                   to.values + (long)M::prob_words(key) * job.padded);
  }
}

// A few rows of one head against one block. `first` = position of the block's first key.
template <class M>
INLINE void score_rows(const Job& job, const Unit& unit) {
  M::scores(unit.count, unit.queries, job.D, unit.packed->keys, unit.keys, unit.scores);
}

template <class M>
INLINE void soften_rows(const Job& job, const Item& item, Unit& unit, int64_t first) {
  const int n = unit.keys;
  const int64_t low = item.position + unit.row / job.rep;
  const int64_t high = item.position + (unit.row + unit.count - 1) / job.rep;
  const bool partly = low < first + n - 1 || (job.window && high - job.window + 1 > first);
  if (partly)
    for (int i = 0; i < unit.count; ++i) {
      float* row = unit.scores + i * BLOCK;
      const int64_t position = item.position + (unit.row + i) / job.rep;
      const int64_t from = job.window ? position - job.window + 1 - first : 0;
      for (int j = 0; j < n && j < from; ++j) row[j] = -INFINITY;
      for (int64_t j = position + 1 < first ? 0 : position + 1 - first; j < n; ++j)
        row[j] = -INFINITY;
    }
  float now[16];
#if LEVEL >= 2
  const __m512i at = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_set1_epi32((int)job.state_words));
  const __mmask16 rows = (__mmask16)((1 << unit.count) - 1);
  vf most[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    most[i] = i < unit.count ? greatest_of(unit.scores + i * BLOCK, n) : set1(0.f);
  float* greatest = unit.state + job.padded + 16;
  const vf before = _mm512_mask_i32gather_ps(set1(0.f), rows, at, greatest, 4);
  const vf here = greatest_lanes(most) * set1(job.scale);
  const __mmask16 rises = _mm512_cmp_ps_mask(here, before + set1(RISE), _CMP_GT_OQ);
  const vf chosen = _mm512_mask_mov_ps(before, rises, here);
  _mm512_mask_i32scatter_ps(greatest, rows, at, chosen, 4);
  store(now, chosen);
  store(unit.alpha, exp2_vf<M::EXACT>(before - chosen));
#else
  for (int i = 0; i < unit.count; ++i) {
    float* greatest = unit.state + (long)i * job.state_words + job.padded + 16;
    const float here = hmax(greatest_of(unit.scores + i * BLOCK, n)) * job.scale;
    now[i] = here > *greatest + RISE ? here : *greatest;
    unit.alpha[i] = exp2_vf<M::EXACT>(set1(*greatest - now[i]))[0];
    *greatest = now[i];
  }
#endif
  for (int i = 0; i < unit.count; ++i)
    weigh_row<M>(unit.scores + i * BLOCK, n, job.scale, now[i], unit.alpha[i],
                 unit.state + (long)i * job.state_words + job.padded);
}

template <class M>
INLINE void mix_rows(const Job& job, const Unit& unit) {
  M::mix(unit.count, (const uint32_t*)unit.scores, unit.keys, unit.packed->values, job.padded,
         unit.state, job.state_words, unit.alpha);
}

// One block of keys for all rows of an item. Units are independent, so a few of them go through
// each phase together: one waits for the arithmetic unit while the next one is under way.
template <class M>
void attend_block(const Job& job, const Item& item, const Cells& cells, Buffers& at, int64_t first,
                  int n, int words, long state_size, float* state) {
  const int rows = item.tokens * job.rep, groups = item.group_end - item.group;
  const int together = rows <= M::SUBTILE ? UNITS : 1;
  for (int g0 = 0; g0 < groups; g0 += together) {
    const int g1 = g0 + together < groups ? g0 + together : groups;
    int used = 0;
    for (int g = g0; g < g1; ++g) {
      pack_block<M>(job, item, cells, item.group + g, n, at.packed[g - g0]);
      for (int r = 0; r < rows; r += M::SUBTILE) {
        const int count = rows - r < M::SUBTILE ? rows - r : M::SUBTILE;
        const int64_t low = item.position + r / job.rep;
        const int64_t high = item.position + (r + count - 1) / job.rep;
        const bool sees = high >= first && !(job.window && low - job.window + 1 >= first + n);
        if (sees) {
          Unit& unit = at.units[used++];
          unit.packed = &at.packed[g - g0];
          unit.queries = at.queries + ((state_size / job.state_words) * g + r) * words;
          unit.state = state + g * state_size + (long)r * job.state_words;
          unit.row = r;
          unit.count = count;
          unit.keys = high - first + 1 < n ? round_up((int)(high - first + 1), 32) : n;
        }
        const bool is_last = g + 1 == g1 && r + count == rows;
        if (used < UNITS && !is_last) continue;
        for (int u = 0; u < used; ++u) score_rows<M>(job, at.units[u]);
        for (int u = 0; u < used; ++u) soften_rows<M>(job, item, at.units[u], first);
        for (int u = 0; u < used; ++u) mix_rows<M>(job, at.units[u]);
        used = 0;
      }
    }
  }
}

// Fold the partial result of the next segment into the total of those before it.
inline void combine(const Job& job, int rows, float* total, const float* part) {
  for (int r = 0; r < rows; ++r, total += job.state_words, part += job.state_words) {
    float* greatest = total + job.padded + 16;
    const float before = *greatest, here = part[job.padded + 16];
    const float now = here > before ? here : before;
    const vf a = set1(exp2_vf<true>(set1(before - now))[0]), b = set1(exp2_vf<true>(set1(here - now))[0]);
    for (int i = 0; i < job.padded + 16; i += W)
      store(total + i, fma(load(part + i), b, load(total + i) * a));
    *greatest = now;
  }
}

template <class M>
void finish(const Job& job, const Item& item, int group, float* row) {
  const long element = sizeof(typename M::Storage), head_bytes = job.D * element;
  char* to = (char*)job.out + (item.row * (long)job.H + (long)group * job.rep) * head_bytes;
  for (int t = 0; t < item.tokens; ++t, to += job.H * head_bytes)
    for (int h = 0; h < job.rep; ++h, row += job.state_words) {
      float sum = 0.f;
      for (int i = 0; i < W; ++i) sum += row[job.padded + i];
      M::natural_order(row, job.padded);
      const vf inverse = set1(1.f / sum), zero = set1(0.f);  // + 0: there is one zero, not two
      for (int i = 0; i < job.padded; i += W) store(row + i, fma(load(row + i), inverse, zero));
      if constexpr (sizeof(typename M::Storage) == 2) {
        uint16_t* out = (uint16_t*)(to + h * head_bytes);
        for (int i = 0; i < job.D; ++i) out[i] = to_bfloat16(row[i]);
      } else {
        __builtin_memcpy(to + h * head_bytes, row, head_bytes);
      }
    }
}

inline void clear(const Job& job, int rows, float* state) {
  __builtin_memset(state, 0, sizeof(float) * rows * job.state_words);
  for (int r = 0; r < rows; ++r) state[(long)r * job.state_words + job.padded + 16] = LOWEST;
}

// Whoever comes last folds all segments, in their order.
template <class M>
void fold(const Job& job, const Item& item, Join& join, long state_size, float* total) {
  if (__atomic_sub_fetch(&join.missing, 1, __ATOMIC_ACQ_REL) > 0) return;
  join.missing = join.parts;
  const int groups = item.group_end - item.group, rows = groups * (int)(state_size / job.state_words);
  clear(job, rows, total);
  for (int64_t s = 0; s < join.num_segments; ++s)
    combine(job, rows, total, job.workspace + join.offset + s * groups * state_size);
  for (int g = 0; g < groups; ++g)
    finish<M>(job, item, item.group + g, total + g * state_size);
}

// Hand a segment's partial results to the sequences that share it.
inline void hand_out(const Job& job, const Item& item, int64_t segment, long state_size,
                     const float* state) {
  const int groups = item.group_end - item.group;
  const long own = job.rep * job.state_words, own_size = round_up(job.rep, 16) * job.state_words;
  for (int m = 0; m < item.members; ++m)
    for (int g = 0; g < groups; ++g)
      __builtin_memcpy(
          job.workspace + job.joins[item.join + m].offset + (segment * groups + g) * own_size,
          state + g * state_size + m * own, sizeof(float) * own);
}

template <class M>
void run_item(const Job& job, const Item& item, Scratch& scratch) {
  const int groups = item.group_end - item.group, rows = item.tokens * job.rep;
  const int words = M::key_words(job.D), padded_rows = round_up(rows, 16);
  const long state_size = (long)padded_rows * job.state_words;
  const long head_bytes = (long)job.D * sizeof(typename M::Storage);
  Buffers at;
  float* total = scratch.reserve(job, groups, padded_rows, words, at);
  float* part = total + groups * state_size;
  M::begin(rows);
  for (int g = 0; g < groups; ++g) {
    const char* from = job.q + item.row * job.q_bytes + (item.group + g) * job.rep * head_bytes;
    uint32_t* to = at.queries + (long)g * padded_rows * words;
    for (int t = 0; t < item.tokens; ++t, from += job.q_bytes) {
      for (long i = 0; i < job.rep * head_bytes; i += 64)  // tokens lie apart: ask for what comes
        __builtin_prefetch(from + 8 * job.q_bytes + i);
      for (int h = 0; h < job.rep; ++h, to += words) M::pack_query(from + h * head_bytes, job.D, to);
    }
  }
  Join* join = item.join < 0 ? nullptr : job.joins + item.join;
  const Span keys = visible(item, job.window);
  Cells cells(job, item.sequence, keys.end);
  for (int64_t segment = item.segment; segment < item.segment_end; ++segment) {
    const bool is_first = segment == item.segment;
    float* state = item.members ? total
                   : join       ? job.workspace + join->offset +
                              (segment - join->segment) * groups * state_size
                        : (is_first ? total : part);
    clear(job, groups * padded_rows, state);
    const int64_t from = segment * SEGMENT > keys.begin ? segment * SEGMENT : keys.begin;
    const int64_t to = (segment + 1) * SEGMENT < keys.end ? (segment + 1) * SEGMENT : keys.end;
    for (int64_t first = from; first < to; first += BLOCK) {
      const int n = round_up(to - first < BLOCK ? (int)(to - first) : BLOCK, 32);
      cells.move_to(first);
      attend_block<M>(job, item, cells, at, first, n, words, state_size, state);
    }
    if (item.members) hand_out(job, item, segment, state_size, state);
    else if (!join && !is_first) combine(job, groups * padded_rows, total, part);
  }
  if (item.members) {
    Item one = item;
    for (one.tokens = 1; one.row < item.row + item.members; ++one.row, ++join)
      fold<M>(job, one, *join, round_up(job.rep, 16) * job.state_words, total);
    return;
  }
  if (join) return fold<M>(job, item, *join, state_size, total);
  for (int g = 0; g < groups; ++g)
    finish<M>(job, item, item.group + g, total + g * state_size);
}
