// Attention over a cache in int8: the cells, and what products on tiles and on vectors share.
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
#pragma once

#include "attention_products.h"

namespace attention {
namespace {

constexpr float TOP = 127 * 256;       // the largest number of two digits
constexpr float LEAST_SCALE = 1e-20f;  // of a query; no product with it is seen

template <bool EXACT>
INLINE F16 exp2_16(F16 x) {
#if VECTOR_WIDTH == 16
  return exp2_vf<EXACT>(x);
#elif VECTOR_WIDTH == 8
  return {exp2_vf<EXACT>(x.lo), exp2_vf<EXACT>(x.hi)};
#else
  return {{exp2_vf<EXACT>(x.of[0]), exp2_vf<EXACT>(x.of[1]), exp2_vf<EXACT>(x.of[2]), exp2_vf<EXACT>(x.of[3])}};
#endif
}

struct ByteScale {  // of numbers that become whole ones
  float scale, inverse;
  INLINE explicit ByteScale(I16 magnitudes, float top) {  // `top`: what the largest becomes
    constexpr uint32_t INFINITE = 0x7f800000;
    const uint32_t bits = greatest_magnitude(magnitudes);
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    // What is not finite stays so: its numbers are lost, its scale makes NaN of them.
    scale = bits < INFINITE ? largest / top : std::nanf("");
    inverse = bits && bits < INFINITE ? top / largest : 0.f;
  }
};

// The numbers of one head in vectors; N = D / 16.
template <int N>
struct Head {
  F16 x[N];

  INLINE explicit Head(const uint16_t* from) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = widen16(from + i * 16, 16);
  }
  INLINE void spread() {
#pragma GCC unroll 4
    for (int far = 1; far < N; far *= 2)
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i)
        if (!(i & far)) {
          const F16 sum = x[i] + x[i + far];
          x[i + far] = x[i] - x[i + far];
          x[i] = sum;
        }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = butterfly8(butterfly4(butterfly2(butterfly1(x[i]))));
  }
  INLINE ByteScale fit() const {
    I16 most = zeros16();
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) most = greater_magnitude(most, magnitude(x[i]));
    return ByteScale(most, 127.f);
  }

  // D numbers and the scale.
  INLINE void put_query(char* to) {
    spread();
    const ByteScale by = fit();
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) put_bytes16(to + i * 16, whole16(x[i] * splat(by.inverse)));
    // By N · 16 spreading both sides has multiplied products. Never 0, which times -∞ is NaN, as of a query of zeros.
    const float scale = std::max(by.scale / (N * 16), LEAST_SCALE);
    __builtin_memcpy(to + N * 16, &scale, 4);
  }
  INLINE void put_key(char* strip, int lane) {
    spread();
    const ByteScale by = fit();
    alignas(64) char dims[N * 16];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) put_bytes16(dims + i * 16, whole16(x[i] * splat(by.inverse)));
    for (int line = 0; line < N * 4; ++line) __builtin_memcpy(strip + line * 64 + lane * 4, dims + line * 4, 4);
    __builtin_memcpy(strip + N * 256 + lane * 4, &by.scale, 4);
  }
  INLINE void put_value(char* strip, int lane) {
    const ByteScale by = fit();
    for (int i = 0; i < N; ++i)
      put_every_fourth(strip + i * 256 + lane / 4 * 64, lane % 4, whole16(x[i] * splat(by.inverse)));
    __builtin_memcpy(strip + N * 256 + lane * 4, &by.scale, 4);
  }
};

template <class Use>
INLINE void with_head(int D, const uint16_t* from, Use use) {
  switch (D) {
    case 64: return use(Head<4>(from));
    case 128: return use(Head<8>(from));
    default: return use(Head<16>(from));
  }
}

inline void write_bytes(const uint16_t* k, const uint16_t* v, char* keys, char* values, int lane, int D) {
  with_head(D, k, [=](auto head) ALWAYS_INLINE { head.put_key(keys, lane); });
  with_head(D, v, [=](auto head) ALWAYS_INLINE { head.put_value(values, lane); });
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
  static constexpr bool BYTES = true, DIRECT = true, RAW_KEYS = false;
  static int key_words(int d) { return (d + 64) / 4; }
  static int row_block_steps(const LayerCall& call, int n) { return n / 32 + call.D / 32; }
  static bool takes_raw_keys(const LayerCall&, int) { return false; }

  // Of a strip's values.
  INLINE static void read_scales(const LayerCall& call, const Cells& cells, const char* strip, int key, Digits& at) {
    // Behind the end there may be anything, and 0 · NaN is NaN.
    const F16 scales = load16((const float*)(strip + call.D * 16), cells.count - key);
    store16(at.scales + key, scales);
    at.has_nan = (key && at.has_nan) || has_nan(scales);
  }
  INLINE static void scales(const LayerCall& call, const RowBlock& some, float* scales) {
    for (int i = 0; i < some.count; ++i) {
      float own;
      __builtin_memcpy(&own, (const char*)some.queries + (long)i * 4 * key_words(call.D) + call.D, 4);
      scales[i] = own * call.scale;
    }
  }
  // As weigh_row, and P times the values' scales in digits: of a block's greatest, as many as there are.
  template <int N>
  INLINE static void weigh(const float* scores, float scale, float greatest, float alpha, float* lanes, Digits& to,
                           int row) {
    F16 sum = from_lanes(load(lanes) * set1(alpha)), p[8];
    I16 most = zeros16();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      if (i >= N) {
        p[i] = splat(0.f);
        continue;
      }
      p[i] = exp2_16<Products::EXACT>(fma(load16(scores + i * 16), splat(scale), splat(-greatest)));
      sum = sum + p[i];
      F16 by = load16(to.scales + i * 16);
      if (to.has_nan) by = where_not_zero(p[i], by);
      p[i] = p[i] * by;
      most = greater_magnitude(most, magnitude(p[i]));
    }
    store(lanes, to_lanes(sum));
    const ByteScale by(most, TOP);
    to.units[row] = by.scale;
    const F16 inverse = splat(by.inverse);
#pragma GCC unroll 2
    for (int i = 0; i < N; i += 4)
      put_digits(to.of[row][0] + i * 16, to.of[row][1] + i * 16, whole16(p[i] * inverse), whole16(p[i + 1] * inverse),
                 whole16(p[i + 2] * inverse), whole16(p[i + 3] * inverse));
  }
  INLINE static void weigh_row(const float* scores, int n, float scale, float greatest, float alpha, float* lanes,
                               uint32_t* digits, int row) {
    Digits& to = *(Digits*)digits;
    switch (n) {
      case 32: return weigh<2>(scores, scale, greatest, alpha, lanes, to, row);
      case 64: return weigh<4>(scores, scale, greatest, alpha, lanes, to, row);
      case 96: return weigh<6>(scores, scale, greatest, alpha, lanes, to, row);
      default: return weigh<8>(scores, scale, greatest, alpha, lanes, to, row);
    }
  }
  // Columns of a row's state: sums of products with its digits.
  INLINE static void add_digits(float* to, vb high, vb low, vf unit, vf alpha) {
    store(to, fma(float_lanes(add_lanes(times_256(high), low)), unit, load(to) * alpha));
  }
  static void natural_order(float*, int) {}
};

}  // namespace
}  // namespace attention
