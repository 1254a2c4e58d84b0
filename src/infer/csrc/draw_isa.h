// What draw.cpp does to a row, compiled once for each instruction set: included in a namespace, behind a
// TARGET, and so without a guard. The compiler makes 16 numbers of what the set has; it does so badly for
// comparisons, hence masks are the signs of differences: floats that are not negative order as their bits do.

INLINE Words below(Words a, Words b) { return (a - b) >> 31; }
INLINE Floats where(Words mask, Floats x) { return (Floats)(mask & (Words)x); }

// 2^x for x <= 0, relative error 1e-7; exactly 1 at 0, and 0 where a result would be less than 2^-125.
INLINE Floats exp2(Floats x) {
  constexpr float MAGIC = 12582912.f;  // 1.5 · 2^23: adding it rounds, and leaves a whole number in the low bits
  const Floats rounded = x + MAGIC, f = x - (rounded - MAGIC);
  Floats p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  const Words near = below((Words)x & 0x7fffffff, Words{} + bits_of(125.f));
  return where(near, (Floats)((Words)p + ((Words)rounded << 23)));
}

// Puts weight(i, numbers i … i + 15) into `to`, and the sum of each block into `sums`.
template <class Weight>
INLINE void pass(const float* from, float* to, long n, double* sums, Weight weight) {
  for (long begin = 0; begin < n; begin += BLOCK) {
    Floats lanes{};
    for (long i = begin; i < std::min(begin + BLOCK, n); i += LANES) {
      Floats x;
      std::memcpy(&x, from + i, sizeof x);
      x = weight((int)i, x);
      std::memcpy(to + i, &x, sizeof x);
      lanes += x;
    }
    double sum = 0;
    for (int i = 0; i < LANES; ++i) sum += lanes[i];
    *sums++ = (float)sum;  // no finer than the weights: what they sum to, up to their rounding
  }
}

inline int64_t draw(const float* row, long n, float top, const Wish& wish, float* weights, double* sums) {
  const float factor = 1.44269504f / (float)wish.temperature;
  pass(row, weights, n, sums, [=](int, Floats x) { return exp2((x - top) * factor); });
  const double limit = wish.top_p * total(sums, n);
  if (wish.min_p > 0) {
    const int least = bits_of((float)wish.min_p);
    pass(weights, weights, n, sums,
         [=](int, Floats w) { return where(below(Words{} + (least - 1), (Words)w), w); });
  }
  uint64_t state = splitmix64(splitmix64(wish.seed) + wish.position);
  for (;;) {
    const int token = (int)pick(weights, n, sums, (double)(state >> 11) * 0x1p-53);
    if (wish.top_p >= 1) return token;
    const int weight = bits_of(weights[token]);
    pass(weights, weights, n, sums, [=](int i, Floats w) {  // what does not go before the token is out
      const Words lower = below(INDEX + i, Words{} + token);  // -1 or 0; of equals the lower go before
      return where(below(lower + weight, (Words)w), w);
    });
    if (total(sums, n) < limit) return token;
    state = splitmix64(state);
  }
}
