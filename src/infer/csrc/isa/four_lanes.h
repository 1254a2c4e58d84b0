// What headers of sets with vectors of 128 bits share: 16 lanes as four vectors, and bytes. The compiler makes it of
// what the set has. Bytes are multiplied with signs on both sides. See vectors.h.
//
// Such a header gives before: vf and its functions; fused (fma with one rounding, even where `fma` has two), nearest,
// whole (numbers of 32 bits), narrow_words, narrow_bytes (with saturation), dot_bytes, half_floats, looked_up.
#pragma once

#define HAS_BYTE_PRODUCTS 1
#define HAS_SIGNED_PRODUCTS 1

namespace {

#if defined(__clang__)
#define SHUFFLE(integers, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(integers, a, b, ...) __builtin_shuffle(a, b, integers{__VA_ARGS__})
#endif

// ---- 16 lanes ----------------------------------------------------------------------------------

struct F16 {
  vf of[4];
};
struct I16 {
  vw of[4];
};
template <class Result = F16, class Make>
INLINE Result each(Make make) {
  return {{make(0), make(1), make(2), make(3)}};
}
#define EACH [=](int i) ALWAYS_INLINE
INLINE F16 operator+(F16 a, F16 b) {
  return each(EACH { return a.of[i] + b.of[i]; });
}
INLINE F16 operator-(F16 a, F16 b) {
  return each(EACH { return a.of[i] - b.of[i]; });
}
INLINE F16 operator*(F16 a, F16 b) {
  return each(EACH { return a.of[i] * b.of[i]; });
}
INLINE F16 fma(F16 a, F16 b, F16 c) {
  return each(EACH { return fused(a.of[i], b.of[i], c.of[i]); });
}
INLINE F16 negated_fma(F16 a, F16 b, F16 c) {  // c - a · b
  return each(EACH { return fused(-a.of[i], b.of[i], c.of[i]); });
}
INLINE F16 splat(float x) { return {{set1(x), set1(x), set1(x), set1(x)}}; }
INLINE F16 from_lanes(vf x) { return {{x, set1(0.f), set1(0.f), set1(0.f)}}; }  // 16 lanes that have the same sum
INLINE vf to_lanes(F16 x) { return (x.of[0] + x.of[2]) + (x.of[1] + x.of[3]); }
INLINE F16 load16(const float* p) {
  return each(EACH { return bits(p + i * 4); });
}
INLINE void store16(float* p, F16 x) { __builtin_memcpy(p, &x, sizeof x); }
inline F16 load16(const float* p, long n) {
  if (n >= 16) return load16(p);
  float some[16] = {};
  for (long i = 0; i < n; ++i) some[i] = p[i];
  return load16(some);
}
inline void store16(float* p, F16 x, long n) {
  if (n >= 16) return store16(p, x);
  float all[16];
  store16(all, x);
  for (long i = 0; i < n; ++i) p[i] = all[i];
}
inline F16 widen16(const uint16_t* from, long n) {
  uint16_t some[16] = {};
  if (n < 16) {
    for (long i = 0; i < n; ++i) some[i] = from[i];
    from = some;
  }
  return each(EACH { return widen(from + i * 4); });
}
// Bits whose upper halves are bfloat16, as vcvtneps2bf16 rounds it: to nearest even, denormal numbers to zero, NaN to
// a quiet one.
INLINE vu narrowed(vf x) {
  const vu own = (vu)x, nearest = own + 0x7fff + (own >> 16 & 1);
  const vu finite = (own & 0x7f800000) == 0 ? own & 0x80000000 : nearest;
  return x != x ? own | 0x400000 : finite;
}
INLINE void narrow16(uint16_t* to, F16 x, long n) {
  typedef uint16_t Four __attribute__((vector_size(8)));
  Four all[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) all[i] = __builtin_convertvector(narrowed(x.of[i]) >> 16, Four);
  if (n >= 16)
    __builtin_memcpy(to, all, sizeof all);
  else if (n > 0)
    __builtin_memcpy(to, all, (size_t)n * 2);
}
INLINE F16 rounded16(F16 x) {  // to bfloat16
  return each(EACH { return (vf)(narrowed(x.of[i]) & 0xffff0000); });
}
INLINE F16 least16(F16 a, F16 b) {
  return each(EACH { return a.of[i] < b.of[i] ? a.of[i] : b.of[i]; });
}
INLINE F16 most16(F16 a, F16 b) {
  return each(EACH { return a.of[i] > b.of[i] ? a.of[i] : b.of[i]; });
}
INLINE F16 nearest16(F16 x) {
  return each(EACH { return nearest(x.of[i]); });
}
INLINE vf scaled_by_power(vf x, vf power) {  // power: whole and 127 at most, or NaN; 0 below -126
  const vf lowest = set1(-126.f), some = power > lowest ? power : lowest;
  const vf scaled = x * (vf)((whole(some) + 127) << 23);
  return power < lowest ? set1(0.f) : scaled;
}
INLINE F16 times_power_of_2(F16 x, F16 power) {
  return each(EACH { return scaled_by_power(x.of[i], power.of[i]); });
}
INLINE F16 inverse16(F16 x) {
  return each(EACH { return set1(1.f) / x.of[i]; });
}
INLINE float sum16(F16 x) {  // in the order of _mm512_reduce_add_ps
  const vf four = (x.of[1] + x.of[3]) + (x.of[0] + x.of[2]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE float greatest16(F16 x) { return hmax(vmax(vmax(x.of[0], x.of[1]), vmax(x.of[2], x.of[3]))); }

INLINE I16 splat16(int x) { return {{vw{} + x, vw{} + x, vw{} + x, vw{} + x}}; }
INLINE I16 zeros16() { return splat16(0); }
INLINE I16 load16(const int32_t* p) {
  I16 x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
INLINE void store16(int32_t* p, I16 x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE I16 add16(I16 a, I16 b) {
  return each<I16>(EACH { return a.of[i] + b.of[i]; });
}
INLINE vu greater(vu a, vu b) { return a > b ? a : b; }
INLINE I16 greater_magnitude(I16 a, I16 b) {
  return each<I16>(EACH { return (vw)greater((vu)a.of[i], (vu)b.of[i]); });
}
INLINE uint32_t greatest_magnitude(I16 x) {
  const vu four = greater(greater((vu)x.of[0], (vu)x.of[1]), greater((vu)x.of[2], (vu)x.of[3]));
  uint32_t most = four[0];
  for (int i = 1; i < 4; ++i) most = four[i] > most ? four[i] : most;
  return most;
}
INLINE I16 magnitude(F16 x) {  // as whole numbers: NaN is larger than everything
  return each<I16>(EACH { return (vw)x.of[i] & 0x7fffffff; });
}
INLINE F16 floats16(I16 x) {
  return each(EACH { return __builtin_convertvector(x.of[i], vf); });
}
INLINE I16 whole16(F16 x) {
  return each<I16>(EACH { return whole(x.of[i]); });
}
// 16 bytes, cut off at the ends of their range.
INLINE vc bytes16(I16 x) { return narrow_bytes(narrow_words(x.of[0], x.of[1]), narrow_words(x.of[2], x.of[3])); }
INLINE void put_bytes16(void* to, I16 x) {
  const vc bytes = bytes16(x);
  __builtin_memcpy(to, &bytes, sizeof bytes);
}

// Of 32 numbers in a row: those with even indices, and those with odd ones.
struct Halves {
  F16 even, odd;
  INLINE Halves times(F16 by) const { return {even * by, odd * by}; }
  INLINE Halves times(const float* by) const { return {even * load16(by), odd * load16(by + 16)}; }
};
INLINE void copy32(void* to, const uint16_t* x, long count) {  // numbers of 16 bits
  if (count >= 32) {
    __builtin_memcpy(to, x, 64);
    return;
  }
  __builtin_memset(to, 0, 64);
  if (count > 0) __builtin_memcpy(to, x, (size_t)count * 2);
}
INLINE Halves read_halves(const uint16_t* x, long count) {
  vu pairs[4];
  copy32(pairs, x, count);
  return {{{(vf)(pairs[0] << 16), (vf)(pairs[1] << 16), (vf)(pairs[2] << 16), (vf)(pairs[3] << 16)}},
          {{(vf)(pairs[0] & 0xffff0000), (vf)(pairs[1] & 0xffff0000), (vf)(pairs[2] & 0xffff0000),
            (vf)(pairs[3] & 0xffff0000)}}};
}
// 64 bytes in order, with their signs flipped by `flip`.
INLINE void put_bytes64(char* to, Halves first, Halves second, char flip) {
  const vc sign = vc{} + (int8_t)flip;
  const Halves both[2] = {first, second};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const vc even = bytes16(whole16(both[i].even)), odd = bytes16(whole16(both[i].odd));
    const vc low = SHUFFLE(vc, even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) ^ sign;
    const vc high = SHUFFLE(vc, even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31) ^ sign;
    __builtin_memcpy(to + i * 32, &low, sizeof low);
    __builtin_memcpy(to + i * 32 + 16, &high, sizeof high);
  }
}
INLINE void put_words16(void* to, F16 x) {
  const I16 numbers = whole16(x);
  const vh words[2] = {narrow_words(numbers.of[0], numbers.of[1]), narrow_words(numbers.of[2], numbers.of[3])};
  __builtin_memcpy(to, words, sizeof words);
}
// The sums of 16 bytes with a sign, of 64 in all.
INLINE void sums_of_16(const char* from, int32_t* to) {
  for (int i = 0; i < 4; ++i) {
    to[i] = 0;
    for (int j = 0; j < 16; ++j) to[i] += (signed char)from[i * 16 + j];
  }
}

// Sums and differences of lanes 1, 2, 4 or 8 apart; the upper lane of two has the difference.
INLINE vf negated_where(vf x, vw sign_bits) { return (vf)((vw)x ^ sign_bits); }
INLINE F16 butterfly1(F16 x) {
  const vw odd = {0, INT32_MIN, 0, INT32_MIN};
  return each(EACH { return SHUFFLE(vw, x.of[i], x.of[i], 1, 0, 3, 2) + negated_where(x.of[i], odd); });
}
INLINE F16 butterfly2(F16 x) {
  const vw upper = {0, 0, INT32_MIN, INT32_MIN};
  return each(EACH { return SHUFFLE(vw, x.of[i], x.of[i], 2, 3, 0, 1) + negated_where(x.of[i], upper); });
}
INLINE F16 butterfly4(F16 x) { return {{x.of[0] + x.of[1], x.of[0] - x.of[1], x.of[2] + x.of[3], x.of[2] - x.of[3]}}; }
INLINE F16 butterfly8(F16 x) { return {{x.of[0] + x.of[2], x.of[1] + x.of[3], x.of[0] - x.of[2], x.of[1] - x.of[3]}}; }
INLINE bool has_nan(F16 x) {
  const vw found =
      (vw)(x.of[0] != x.of[0]) | (vw)(x.of[1] != x.of[1]) | (vw)(x.of[2] != x.of[2]) | (vw)(x.of[3] != x.of[3]);
  return found[0] | found[1] | found[2] | found[3];
}
INLINE F16 where_not_zero(F16 p, F16 x) {
  return each(EACH { return p.of[i] == 0.f ? set1(0.f) : x.of[i]; });
}
// A byte of every lane → byte `which` of every four of 64 bytes.
INLINE void put_every_fourth(char* to, int which, I16 x) {
  for (int i = 0; i < 16; ++i) to[i * 4 + which] = (char)x.of[i / 4][i % 4];
}
// Numbers below 2¹⁵ of 4 · 16 keys as two digits of 8 bits with signs: 4 keys of each of the four, then the next 4
// of each.
INLINE void put_digits(uint8_t* high, uint8_t* low, I16 one, I16 two, I16 three, I16 four) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const vh a = narrow_words(one.of[i], two.of[i]), b = narrow_words(three.of[i], four.of[i]);
    const vc upper = narrow_bytes((a + 128) >> 8, (b + 128) >> 8);
    const vc lower = narrow_bytes(a << 8 >> 8, b << 8 >> 8);
    __builtin_memcpy(high + i * 16, &upper, sizeof upper);
    __builtin_memcpy(low + i * 16, &lower, sizeof lower);
  }
}

// ---- Bytes of weights, keys and values ---------------------------------------------------------

using ByteOperand = vb;
INLINE void add_products(vb& sums, vb bytes, vb others) { sums = dot_bytes(sums, bytes, others); }
INLINE vb load_bytes(const void* from) {
  vb x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
INLINE void store_bytes(void* to, vb x) { __builtin_memcpy(to, &x, sizeof x); }
INLINE vb lanes_of(int x) { return vb{} + x; }
INLINE vb no_bytes() { return vb{}; }
INLINE vb all_bytes(char x) { return lanes_of((int)(0x01010101u * (uint8_t)x)); }
INLINE vb four_bytes(const void* from) {  // in every lane
  int four;
  __builtin_memcpy(&four, from, 4);
  return lanes_of(four);
}
INLINE vf lower_half(vf pairs) { return (vf)((vu)pairs << 16); }
INLINE vf upper_half(vf pairs) { return (vf)((vu)pairs & 0xffff0000); }
INLINE vb add_lanes(vb a, vb b) { return a + b; }
INLINE vb subtract_lanes(vb a, vb b) { return a - b; }
INLINE vb times_256(vb lanes) { return lanes << 8; }
INLINE vb lanes_left(vb lanes, int by) { return lanes << by; }
INLINE vb halved_lanes(vb lanes) { return lanes >> 1; }  // rounded down
INLINE vb words_left(vb words, int by) { return (vb)((vh)words << by); }
INLINE vb words_right(vb words, int by) { return (vb)((vuh)words >> by); }
INLINE vb low_nibbles(vb bytes) { return bytes & 0x0f0f0f0f; }
INLINE vb high_nibbles(vb bytes) { return (vb)((vu)bytes >> 4) & 0x0f0f0f0f; }
INLINE vf float_lanes(vb a) { return __builtin_convertvector(a, vf); }
INLINE vb widen_bytes(const char* from) {  // W of them
  return vb{(signed char)from[0], (signed char)from[1], (signed char)from[2], (signed char)from[3]};
}

#undef EACH

}  // namespace
