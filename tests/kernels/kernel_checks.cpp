// Checks of the kernels through csrc/abi.h alone, for machines without Python: other processors under emulation, and
// sanitizers. Each instruction set that runs here, at even and odd shapes, against double precision, against the
// portable kernels where all sets give the same bits, and alone against in company.
//
//   kernel_checks [short | quick] [instruction set …]
//
// Short: a second; quick: as much as suits an emulator. Prints a line for each failure and then "N passed, N
// failed". What is not asked for is checked for all sets.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../src/infer/csrc/abi.h"
#include "../../src/infer/csrc/governor.h"

namespace {

long num_passed = 0, num_failed = 0;

template <class... Values>
void check(bool holds, const char* format, Values... values) {
  if (holds) {
    ++num_passed;
    return;
  }
  ++num_failed;
  std::printf(format, values...);
  std::printf("\n");
}

enum Extent { SHORT, QUICK, ALL };

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15 + 1) {}
  double uniform() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return (double)(state_ >> 11) * 0x1p-53;
  }
  double normal() {  // nearly
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

uint16_t to_bfloat16(double x) {
  const float narrow = (float)x;
  uint32_t bits;
  std::memcpy(&bits, &narrow, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float to_float(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
std::vector<uint16_t> random_bfloat16(long count, double scale, uint64_t seed) {
  Random random(seed);
  std::vector<uint16_t> made((size_t)count);
  for (uint16_t& x : made) x = to_bfloat16(random.normal() * scale);
  return made;
}

struct Aligned {  // to a cache line, with nothing behind the end
  explicit Aligned(long bytes) : at((char*)std::aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64)) {
    std::memset(at, 0, (size_t)(bytes + 63) / 64 * 64);
  }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { std::free(at); }
  char* const at;
};

// ---- Linear layers -----------------------------------------------------------------------------

struct LinearShape {
  long K, N;
  int bits, gate;
  bool with_norm, with_bias;
};

// The weight [N, K] that a layer holds.
std::vector<uint16_t> columns_of(void* layer, long N, long K) {
  std::vector<int64_t> columns;
  for (long n = 0; n < N; ++n) columns.push_back(n);
  std::vector<uint16_t> y((size_t)(N * K));
  infer_linear_columns(layer, columns.data(), N, y.data(), 2);
  return y;
}

class LinearLayer {
 public:
  LinearLayer(const char* isa, const LinearShape& shape, const std::vector<uint16_t>& weight,
              const std::vector<float>& bias, const std::vector<float>& norm)
      : shape_(shape), packed_(infer_linear_packed_bytes(shape.N, shape.K, shape.bits, shape.gate)) {
    layer_ = infer_linear_new(isa, packed_.at, shape.N, shape.K, shape.bits, shape.gate, 0, shape.bits < 16,
                              shape.with_bias ? bias.data() : nullptr, shape.with_norm ? norm.data() : nullptr, 1e-6f,
                              nullptr);
    // Two sources, as the parts of a fused layer come.
    const long first = shape.N / 3;
    if (first) infer_linear_pack(layer_, weight.data(), first, shape.K, 0, 2);
    infer_linear_pack(layer_, weight.data() + first * shape.K, shape.N - first, shape.K, first, 2);
  }
  LinearLayer(const LinearLayer&) = delete;
  LinearLayer& operator=(const LinearLayer&) = delete;
  ~LinearLayer() { infer_linear_free(layer_); }
  long width() const { return shape_.gate ? shape_.N / 2 : shape_.N; }
  std::vector<uint16_t> weights() const { return columns_of(layer_, shape_.N, shape_.K); }
  std::vector<uint16_t> operator()(const uint16_t* x, long M, const uint16_t* residual, int threads) const {
    std::vector<uint16_t> y((size_t)(M * width()));
    infer_linear(layer_, x, shape_.K, residual, (char*)y.data(), M, threads);
    return y;
  }

 private:
  const LinearShape shape_;
  Aligned packed_;
  void* layer_;
};

double activated(int gate, double x) {
  if (gate == 1) return x / (1 + std::exp(-x));
  return x / (1 + std::exp(-1.5957691216 * (x + 0.044715 * x * x * x)));
}

// A row of whole numbers and its scale, by the definition of int8: 64 by 64 numbers are rotated, not yet divided by 8.
struct Quantized {
  std::vector<int> numbers;
  float scale;
  Quantized(const uint16_t* x, long count) : numbers((size_t)((count + 63) / 64 * 64)) {
    std::vector<float> wide(numbers.size());
    for (long i = 0; i < count; ++i) wide[(size_t)i] = to_float(x[i]);
    for (size_t distance = 1; distance < 64; distance *= 2)
      for (size_t i = 0; i < wide.size(); ++i)
        if (!(i & distance)) {
          const float a = wide[i], b = wide[i + distance];
          wide[i] = a + b, wide[i + distance] = a - b;
        }
    float largest = 0;
    for (const float one : wide) largest = std::max(largest, std::fabs(one));
    scale = largest / 127.f;
    const float inverse = largest != 0.f ? 127.f / largest : 0.f;
    for (size_t i = 0; i < wide.size(); ++i) numbers[i] = (int)std::nearbyintf(wide[i] * inverse);
  }
};

// All rows against double precision; whole numbers without norm and gate exactly.
void check_values(const char* isa, const LinearShape& s, const std::vector<uint16_t>& x, long M,
                  const std::vector<uint16_t>& weight, const std::vector<float>& bias, const std::vector<float>& norm,
                  const std::vector<uint16_t>& y, long width) {
  const bool exact = s.bits == 8 && !s.with_norm && !s.gate;
  std::vector<Quantized> columns;
  for (long n = 0; exact && n < s.N; ++n) columns.emplace_back(&weight[(size_t)(n * s.K)], s.K);
  double squares = 0, errors = 0;
  long wrong = 0;
  for (long m = 0; m < M; ++m) {
    std::vector<double> row((size_t)s.K), product((size_t)s.N), terms((size_t)s.N);
    double sum = 0;
    for (long k = 0; k < s.K; ++k) sum += std::pow(to_float(x[(size_t)(m * s.K + k)]), 2);
    const double factor = s.with_norm ? 1 / std::sqrt(sum / (double)s.K + 1e-6) : 1;
    for (long k = 0; k < s.K; ++k)
      row[(size_t)k] = to_float(x[(size_t)(m * s.K + k)]) * factor * (s.with_norm ? norm[(size_t)k] : 1.f);
    for (long n = 0; n < s.N; ++n) {
      const size_t at = (size_t)n;
      product[at] = s.with_bias ? bias[at] : 0.;
      for (long k = 0; k < s.K; ++k) {
        const double term = row[(size_t)k] * to_float(weight[(size_t)(n * s.K + k)]);
        product[at] += term, terms[at] += std::fabs(term);
      }
    }
    const Quantized whole(&x[(size_t)(m * s.K)], exact ? s.K : 0);
    for (long i = 0; i < width; ++i) {
      const size_t at = (size_t)i, other = (size_t)(i + width);
      const uint16_t found = y[(size_t)(m * width + i)];
      if (exact) {
        int total = 0;
        for (size_t k = 0; k < whole.numbers.size(); ++k) total += whole.numbers[k] * columns[at].numbers[k];
        float value = (float)total * (columns[at].scale / 64 * whole.scale);
        if (s.with_bias) value += bias[at];
        wrong += found != to_bfloat16(value);
        continue;
      }
      double value = s.gate ? activated(s.gate, product[at]) * product[other] : product[at];
      const double error = to_float(found) - value;
      squares += value * value, errors += error * error;
      if (s.bits < 16) continue;
      double bound = std::fabs(value) * 0x1p-8 + (terms[at] + 1) * 0x1p-20;
      if (s.with_norm) bound += terms[at] * 0x1p-9;  // n(x) is rounded to bfloat16
      if (s.gate) bound = bound * 3 + 0x1p-9 * (terms[at] + 1) * (std::fabs(product[other]) + terms[other] + 1);
      wrong += !(std::fabs(error) <= bound);
    }
  }
  check(!wrong, "%s: linear K %ld N %ld bits %d gate %d norm %d M %ld: %ld numbers are wrong", isa, s.K, s.N, s.bits,
        s.gate, s.with_norm, M, wrong);
  const double most = s.bits == 16 ? 0.01 : s.bits == 8 ? 0.05 : 0.35;
  check(errors <= most * most * squares + 1e-6, "%s: linear K %ld N %ld bits %d gate %d M %ld: error %g of %g", isa,
        s.K, s.N, s.bits, s.gate, M, std::sqrt(errors), std::sqrt(squares));
}

void check_linear(const char* isa, const LinearShape& s, Extent extent) {
  const long most = extent == SHORT ? 18 : extent == QUICK ? 35 : 70;
  const std::vector<uint16_t> x = random_bfloat16(most * s.K, 1, 1 + (uint64_t)s.K);
  const std::vector<uint16_t> weight = random_bfloat16(s.N * s.K, 1 / std::sqrt((double)s.K), 2 + (uint64_t)s.N);
  std::vector<float> bias((size_t)s.N), norm((size_t)s.K);
  Random random(3);
  for (float& value : bias) value = to_float(to_bfloat16(random.normal()));
  for (float& value : norm) value = to_float(to_bfloat16(1 + random.uniform()));
  const LinearLayer layer(isa, s, weight, bias, norm), reference("portable", s, weight, bias, norm);
  const long width = layer.width();
  const std::vector<uint16_t> all = layer(x.data(), most, nullptr, 1);
  check_values(isa, s, x, extent == ALL ? most : 5, weight, bias, norm, all, width);
  if (s.bits < 16 && s.gate != 1 && s.gate != 2)
    check(all == reference(x.data(), most, nullptr, 2), "%s: K %ld N %ld bits %d norm %d: not what portable gives", isa,
          s.K, s.N, s.bits, s.with_norm);
  if (s.bits == 16 && !s.gate)
    check(layer.weights() == weight, "%s: K %ld N %ld: columns are not the weight", isa, s.K, s.N);
  for (const long M : {1L, 2L, 3L, 5L, 7L, 13L, 16L, 17L, 32L, 33L, 64L, 70L}) {
    if (M > most) break;
    const long first = (M * 7) % (most - M + 1);
    const std::vector<uint16_t> some = layer(x.data() + first * s.K, M, nullptr, 1 + (int)(M % 3));
    check(std::equal(some.begin(), some.end(), all.begin() + first * width),
          "%s: K %ld N %ld bits %d gate %d norm %d: %ld rows are not what they are alone", isa, s.K, s.N, s.bits,
          s.gate, s.with_norm, M);
  }
  const std::vector<uint16_t> residual = random_bfloat16(3 * width, 1, 4),
                              sums = layer(x.data(), 3, residual.data(), 1);
  long wrong = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    const double value = (double)to_float(all[i]) + to_float(residual[i]);
    wrong += !(std::fabs(to_float(sums[i]) - value) <=
               0x1p-7 * (std::fabs(to_float(all[i])) + std::fabs(to_float(residual[i])) + 1e-6));
  }
  check(!wrong, "%s: K %ld N %ld bits %d: %ld numbers are wrong with a residual", isa, s.K, s.N, s.bits, wrong);
}

// ---- Weights in the blocks of GGUF files --------------------------------------------------------

struct BlockShape {
  int type;
  long inputs, bytes;        // of a block
  std::vector<long> halves;  // where its numbers in float16 are
  long exponent = -1;        // where its exponent of 2 is, if it has one

  long row_bytes(long K) const { return (K + inputs - 1) / inputs * bytes; }
};

const BlockShape BLOCK_SHAPES[] = {
    {2, 32, 18, {0}},       {3, 32, 20, {0, 2}},     {6, 32, 22, {0}},      {7, 32, 24, {0, 2}},
    {8, 32, 34, {0}},       {10, 256, 84, {80, 82}}, {11, 256, 110, {108}}, {12, 256, 144, {0, 2}},
    {13, 256, 176, {0, 2}}, {14, 256, 210, {208}},   {20, 32, 18, {0}},     {23, 256, 136, {0}},
    {39, 32, 17, {}, 0},    {256, 32, 20, {0}},      {257, 64, 36, {0}},    {258, 128, 68, {0}},
    {259, 128, 132, {0}},
};

// Rows of blocks with any codes and scales of some thousandths.
std::vector<uint8_t> random_blocks(const BlockShape& s, long count, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> made((size_t)(count * s.bytes));
  for (uint8_t& byte : made) byte = (uint8_t)(random.uniform() * 256);
  for (long block = 0; block < count; ++block)
    for (const long at : s.halves) {
      const int half = 0x1800 + (int)(random.uniform() * 0x0c00);
      made[(size_t)(block * s.bytes + at)] = (uint8_t)half,
                                      made[(size_t)(block * s.bytes + at + 1)] = (uint8_t)(half >> 8);
    }
  for (long block = 0; block < count && s.exponent >= 0; ++block)
    made[(size_t)(block * s.bytes + s.exponent)] = (uint8_t)(116 + random.uniform() * 4);
  return made;
}

class BlockLayer {
 public:
  BlockLayer(const char* isa, const BlockShape& s, long N, long K, const std::vector<uint8_t>& rows)
      : N_(N),
        K_(K),
        types_((size_t)((N + 31) / 32), s.type),
        packed_((N + 31) / 32 * infer_blocks_panel_bytes(s.type, K)) {
    layer_ = infer_linear_new(isa, packed_.at, N, K, 8, 0, 0, 0, nullptr, nullptr, 0, types_.data());
    infer_linear_pack_blocks(layer_, rows.data(), s.type, N, s.row_bytes(K), 0, 2);
  }
  BlockLayer(const BlockLayer&) = delete;
  BlockLayer& operator=(const BlockLayer&) = delete;
  ~BlockLayer() { infer_linear_free(layer_); }
  std::vector<uint16_t> operator()(const uint16_t* x, long M, int threads) const {
    std::vector<uint16_t> y((size_t)(M * N_));
    infer_linear(layer_, x, K_, nullptr, (char*)y.data(), M, threads);
    return y;
  }
  std::vector<uint16_t> weights() const { return columns_of(layer_, N_, K_); }

 private:
  const long N_, K_;
  const std::vector<int> types_;
  Aligned packed_;
  void* layer_;
};

void check_blocks(const char* isa, const BlockShape& s, Extent extent) {
  const long N = 70, K = extent == ALL ? 1536 : 512, most = extent == ALL ? 67 : 19;
  const std::vector<uint8_t> rows = random_blocks(s, N * K / s.inputs, (uint64_t)s.type);
  const std::vector<uint16_t> x = random_bfloat16(most * K, 1, 21);
  const BlockLayer layer(isa, s, N, K, rows), reference("portable", s, N, K, rows);
  const std::vector<uint16_t> all = layer(x.data(), most, 1), weights = layer.weights();
  check(all == reference(x.data(), most, 2), "%s: blocks of type %d: not what portable gives", isa, s.type);
  for (const long M : {1L, 2L, 3L, 4L, 5L, 9L, 16L, 18L, 33L, 65L}) {
    if (M > most) break;
    const long first = most - M;
    const std::vector<uint16_t> some = layer(x.data() + first * K, M, 1 + (int)(M % 3));
    check(std::equal(some.begin(), some.end(), all.begin() + first * N),
          "%s: blocks of type %d: %ld rows are not what they are alone", isa, s.type, M);
  }
  double squares = 0, errors = 0;
  for (long m = 0; m < most; ++m)
    for (long n = 0; n < N; ++n) {
      double value = 0;
      for (long k = 0; k < K; ++k) value += to_float(x[(size_t)(m * K + k)]) * to_float(weights[(size_t)(n * K + k)]);
      squares += value * value, errors += std::pow(to_float(all[(size_t)(m * N + n)]) - value, 2);
    }
  check(errors <= 0.03 * 0.03 * squares && squares > 0, "%s: blocks of type %d: error %g of %g", isa, s.type,
        std::sqrt(errors), std::sqrt(squares));
}

// Weights of any width that are made into blocks are read back, and nothing behind them is written.
void check_fitted(const char* isa, const BlockShape& s, long K) {
  const long N = 35;
  const std::vector<uint16_t> weight = random_bfloat16(N * K, 1, 31 + (uint64_t)K);
  std::vector<uint8_t> rows((size_t)(N * s.row_bytes(K)));
  infer_fit_blocks(s.type, weight.data(), K, N, K, rows.data(), 2);
  const std::vector<uint16_t> found = BlockLayer(isa, s, N, K, rows).weights();
  double squares = 0, errors = 0;
  for (size_t i = 0; i < weight.size(); ++i) {
    squares += std::pow(to_float(weight[i]), 2);
    errors += std::pow(to_float(found[i]) - to_float(weight[i]), 2);
  }
  check(errors <= 0.12 * 0.12 * squares, "%s: %ld inputs in blocks of type %d: error %g of %g", isa, K, s.type,
        std::sqrt(errors), std::sqrt(squares));
}

// ---- Attention ---------------------------------------------------------------------------------

struct AttentionShape {
  int H, G, D, element;
  long page_size;
  int64_t window;
};

// Sequences of some lengths, computed in steps of some tokens of each.
class World {
 public:
  World(const AttentionShape& shape, std::vector<long> lengths) : s_(shape), lengths_(std::move(lengths)) {
    for (const long length : lengths_) {
      firsts_.push_back(total_);
      total_ += length;
      pages_ = std::max(pages_, (length + s_.page_size - 1) / s_.page_size);
    }
    q_ = numbers(s_.H, 11), k_ = numbers(s_.G, 12), v_ = numbers(s_.G, 13);
  }

  // The results [total, H, D] in the bytes of the elements; `chunk`: tokens of a sequence in a step. Only sequences
  // from `first` on, if they are asked for alone.
  std::vector<char> run(const char* isa, long chunk, int threads, size_t first, size_t end) const {
    const long size = s_.element == 4 ? 4 : 2, cell = s_.element == 1 ? s_.D + 4 : (long)s_.D * size;
    const long num_pages = pages_ * (long)lengths_.size() + 1;
    Aligned keys(num_pages * s_.page_size * s_.G * cell), values(num_pages * s_.page_size * s_.G * cell);
    std::vector<char> results((size_t)(total_ * s_.H * s_.D * size));
    void* plan = infer_attention_new(isa, s_.H, s_.G, s_.D, s_.page_size, s_.element, (float)(1 / std::sqrt(s_.D)), 0,
                                     nullptr, 0, &s_.window, 1, num_pages);
    if (!plan) return {};
    for (long done = 0;; done += chunk) {
      std::vector<int64_t> starts{0}, lengths, slots, tables;
      std::vector<long> tokens;
      for (size_t i = first; i < end; ++i) {
        const long count = std::min(chunk, lengths_[i] - done);
        if (count <= 0) continue;
        starts.push_back(starts.back() + count);
        lengths.push_back(done + count);
        for (long page = 0; page < pages_; ++page) tables.push_back(page_of(i, page));
        for (long t = done; t < done + count; ++t) {
          slots.push_back(page_of(i, t / s_.page_size) * s_.page_size + t % s_.page_size);
          tokens.push_back(firsts_[i] + t);
        }
      }
      if (tokens.empty()) break;
      infer_attention_plan(plan, (int)lengths.size(), starts.data(), lengths.data(), slots.data(), tables.data(),
                           pages_, threads);
      const std::vector<char> q = rows(q_, tokens, s_.H), k = rows(k_, tokens, s_.G), v = rows(v_, tokens, s_.G);
      std::vector<char> out((size_t)((long)tokens.size() * s_.H * s_.D * size));
      infer_attention_attend(plan, 0, keys.at, values.at, q.data(), k.data(), v.data(), out.data(), s_.H * s_.D,
                             s_.G * s_.D, s_.G * s_.D, nullptr, nullptr, nullptr, nullptr, 0, nullptr, nullptr,
                             nullptr);
      const long row = s_.H * s_.D * size;
      for (size_t t = 0; t < tokens.size(); ++t)
        std::memcpy(results.data() + tokens[t] * row, out.data() + (long)t * row, (size_t)row);
    }
    infer_attention_free(plan);
    return results;
  }
  std::vector<char> run(const char* isa, long chunk, int threads) const {
    return run(isa, chunk, threads, 0, lengths_.size());
  }

  // The greatest difference from double precision.
  double error(const std::vector<char>& results) const {
    double most = 0;
    for (size_t i = 0; i < lengths_.size(); ++i)
      for (long t = 0; t < lengths_[i]; ++t)
        for (int h = 0; h < s_.H; ++h) {
          const long low = s_.window ? std::max(0L, t - (long)s_.window + 1) : 0;
          std::vector<double> weights, sums((size_t)s_.D);
          double top = -1e300, total = 0;
          for (long j = low; j <= t; ++j) {
            double score = 0;
            for (int d = 0; d < s_.D; ++d)
              score += number(q_, firsts_[i] + t, s_.H, h, d) * number(k_, firsts_[i] + j, s_.G, h * s_.G / s_.H, d);
            weights.push_back(score / std::sqrt((double)s_.D));
            top = std::max(top, weights.back());
          }
          for (double& weight : weights) total += weight = std::exp(weight - top);
          for (long j = low; j <= t; ++j)
            for (int d = 0; d < s_.D; ++d)
              sums[(size_t)d] +=
                  weights[(size_t)(j - low)] / total * number(v_, firsts_[i] + j, s_.G, h * s_.G / s_.H, d);
          for (int d = 0; d < s_.D; ++d) {
            const double difference = std::fabs(sums[(size_t)d] - number(results, firsts_[i] + t, s_.H, h, d));
            if (!(difference <= most)) most = difference;
          }
        }
    return most;
  }
  size_t begin_of(size_t sequence) const {
    return (size_t)(firsts_[sequence] * s_.H * s_.D * (s_.element == 4 ? 4 : 2));
  }
  size_t end_of(size_t sequence) const {
    return begin_of(sequence) + (size_t)(lengths_[sequence] * s_.H * s_.D * (s_.element == 4 ? 4 : 2));
  }

 private:
  int64_t page_of(size_t sequence, long page) const {  // pages of sequences lie in turns, and 0 is nobody's
    return 1 + page * (long)lengths_.size() + (long)sequence;
  }
  std::vector<char> numbers(int heads, uint64_t seed) const {
    const long count = total_ * heads * s_.D;
    const std::vector<uint16_t> narrow = random_bfloat16(count, 1, seed);
    std::vector<float> wide;
    for (const uint16_t x : narrow) wide.push_back(to_float(x));
    const char* from = s_.element == 4 ? (const char*)wide.data() : (const char*)narrow.data();
    return {from, from + count * (s_.element == 4 ? 4 : 2)};
  }
  std::vector<char> rows(const std::vector<char>& from, const std::vector<long>& tokens, int heads) const {
    const long row = (long)heads * s_.D * (s_.element == 4 ? 4 : 2);
    std::vector<char> some;
    for (const long token : tokens)
      some.insert(some.end(), from.begin() + token * row, from.begin() + (token + 1) * row);
    return some;
  }
  double number(const std::vector<char>& from, long token, int heads, int head, int d) const {
    const long at = (token * heads + head) * s_.D + d;
    return s_.element == 4 ? ((const float*)from.data())[at] : to_float(((const uint16_t*)from.data())[at]);
  }

  const AttentionShape s_;
  const std::vector<long> lengths_;
  std::vector<long> firsts_;
  long total_ = 0, pages_ = 0;
  std::vector<char> q_, k_, v_;
};

void check_attention(const char* isa, const AttentionShape& s, Extent extent) {
  const World world(s, extent == ALL ? std::vector<long>{37, 1, 150, 600, 33} : std::vector<long>{37, 1, 150});
  const size_t num_sequences = extent == ALL ? 5 : 3;
  const std::vector<char> whole = world.run(isa, 1000, 1);
  char name[96];
  std::snprintf(name, sizeof name, "%s: attention H %d G %d D %d element %d page %ld window %ld", isa, s.H, s.G, s.D,
                s.element, s.page_size, (long)s.window);
  if (whole.empty()) return check(false, "%s: there is no plan", name);
  const double error = world.error(whole), bound = s.element == 4 ? 2e-5 : s.element == 2 ? 3e-2 : 8e-2;
  check(error <= bound, "%s: error %g", name, error);
  for (const long chunk : {29L, 300L})
    check(world.run(isa, chunk, 3) == whole, "%s: other bits in chunks of %ld", name, chunk);
  for (size_t i = 0; i < num_sequences; i += 2) {
    const std::vector<char> alone = world.run(isa, 1000, 2, i, i + 1);
    check(std::equal(whole.begin() + (long)world.begin_of(i), whole.begin() + (long)world.end_of(i),
                     alone.begin() + (long)world.begin_of(i)),
          "%s: sequence %zu has other bits alone", name, i);
  }
}

// Keys that are normed and rotated on their way into the cache.
std::vector<uint16_t> rotated_keys(const char* isa, int D, bool with_norms) {
  constexpr int HEADS = 3, TOKENS = 21, PAGE = 8;
  const std::vector<uint16_t> q = random_bfloat16(TOKENS * HEADS * D, 1, 5);
  std::vector<float> cos, sin, norm;
  Random random(6);
  for (int i = 0; i < TOKENS * D / 2; ++i) {
    const double angle = 100 * random.uniform();
    cos.push_back((float)std::cos(angle)), sin.push_back((float)std::sin(angle));
  }
  for (int i = 0; i < D; ++i) norm.push_back((float)(1 + random.uniform()));
  const int64_t starts[] = {0, TOKENS}, lengths[] = {TOKENS}, table[] = {0, 1, 2}, window = 0;
  std::vector<int64_t> slots;
  for (int t = 0; t < TOKENS; ++t) slots.push_back(t);
  Aligned keys(3 * PAGE * HEADS * D * 2), values(3 * PAGE * HEADS * D * 2);
  std::vector<uint16_t> out((size_t)(TOKENS * HEADS * D));
  void* plan = infer_attention_new(isa, HEADS, HEADS, D, PAGE, 2, 1.f, 0, nullptr, 0, &window, 1, 0);
  infer_attention_plan(plan, 1, starts, lengths, slots.data(), table, 3, 1);
  const float* norms = with_norms ? norm.data() : nullptr;
  infer_attention_attend(plan, 0, keys.at, values.at, q.data(), q.data(), q.data(), out.data(), HEADS * D, HEADS * D,
                         HEADS * D, cos.data(), sin.data(), norms, norms, 1e-6f, nullptr, nullptr, nullptr);
  infer_attention_free(plan);
  const uint16_t* found = (const uint16_t*)keys.at;
  return {found, found + TOKENS * HEADS * D};
}

// ---- Draws ---------------------------------------------------------------------------------------

std::vector<int64_t> drawn_tokens(const char* isa) {
  constexpr long ROWS = 24, N = 2064;
  infer_set_isa(isa);
  std::vector<float> logits, tops;
  std::vector<DrawRow> wanted;
  Random random(7);
  for (long row = 0; row < ROWS; ++row) {
    float top = -INFINITY;
    for (long i = 0; i < N; ++i) {
      logits.push_back((float)(3 * random.normal()));
      top = std::max(top, logits.back());
    }
    tops.push_back(top);
    const bool narrow = row % 2;
    wanted.push_back({0.5 + (double)row / 24, narrow ? 0.7 : 1, narrow ? 0.01 : 0, (uint64_t)row, (uint64_t)row, 10});
  }
  std::vector<int64_t> tokens((size_t)ROWS);
  infer_draw(logits.data(), tops.data(), N, N, 1, wanted.data(), ROWS, tokens.data(), 2);
  return tokens;
}

// ---- Threads -------------------------------------------------------------------------------------

// Several callers at the same time, each with a team whose members are awake, asleep or more than there are processors.
void check_threads(Extent extent) {
  const LinearShape shape{512, 1000, 16, 0, false, false};
  const std::vector<uint16_t> weight = random_bfloat16(shape.N * shape.K, 0.04, 31),
                              x = random_bfloat16(40 * shape.K, 1, 32);
  const LinearLayer layer("portable", shape, weight, {}, {});
  const std::vector<uint16_t> alone = layer(x.data(), 40, nullptr, 1);
  std::atomic<long> wrong{0};
  const auto call_often = [&](int caller) {
    for (int i = 0; i < (extent == SHORT ? 12 : 60); ++i) {
      infer_govern_threads(i % 2);
      const int threads = i % 6 == 5 ? 100 : 1 + (i * 7 + caller) % 9;
      const long M = i % 4 ? 1 + i % 40 : 40, first = (40 - M) / 2;
      const std::vector<uint16_t> some = layer(x.data() + first * shape.K, M, nullptr, threads);
      wrong += !std::equal(some.begin(), some.end(), alone.begin() + first * shape.N);
      if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(i * 20));
    }
  };
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) callers.emplace_back(call_often, caller);
  for (std::thread& caller : callers) caller.join();
  check(!wrong, "threads: %ld calls gave other bits", wrong.load());
  infer_govern_threads(1);
}

// Computes something in a thread whose team lives on some NUMA nodes.
template <class Body>
void on_nodes(int num_nodes, Body body) {
  constexpr int THREADS = 8;
  int ends[THREADS] = {}, nodes[THREADS];
  for (int i = 0; i < THREADS; ++i) nodes[i] = i * num_nodes / THREADS;
  infer_govern_threads(0);
  infer_pin_threads(ends, ends, nodes, THREADS, THREADS);
  std::thread(body).join();
  infer_pin_threads(nullptr, nullptr, nullptr, 0, 0);
  infer_govern_threads(1);
}

// Weights and caches that are divided among nodes, and panels whose steps two threads share.
void check_nodes(const char* isa) {
  const World world({6, 3, 64, 2, 16, 0}, {37, 1, 150}), whole({6, 3, 64, 4, 16, 0}, {37, 1, 150});
  const std::vector<char> narrow = world.run(isa, 1000, 1), wide = whole.run(isa, 1000, 1);
  for (const int bits : {16, 8}) {
    const LinearShape shape{512, 1000, bits, 0, false, false};
    const std::vector<uint16_t> weight = random_bfloat16(shape.N * shape.K, 0.04, 41),
                                x = random_bfloat16(40 * shape.K, 1, 42);
    const std::vector<uint16_t> alone = LinearLayer(isa, shape, weight, {}, {})(x.data(), 40, nullptr, 1);
    for (const int num_nodes : {1, 2, 3})
      on_nodes(num_nodes, [&] {
        const LinearLayer layer(isa, shape, weight, {}, {});
        for (const long M : {1L, 5L, 40L})
          for (const int threads : {3, 7, 8}) {
            const std::vector<uint16_t> some = layer(x.data(), M, nullptr, threads);
            check(std::equal(some.begin(), some.end(), alone.begin()), "%s: bits %d, %ld rows: other bits on %d nodes",
                  isa, bits, M, num_nodes);
          }
        check(world.run(isa, 29, 5) == narrow, "%s: attention in bfloat16: other bits on %d nodes", isa, num_nodes);
        check(whole.run(isa, 300, 8) == wide, "%s: attention in float32: other bits on %d nodes", isa, num_nodes);
      });
  }
}

// A machine in virtual time: calls of a millisecond of work, beside others that want some of its processors.
class Machine {
 public:
  Governor governor;
  int64_t now = 0;
  int wanted, processors;

  Machine(int of_threads, int of_processors) : wanted(of_threads), processors(of_processors) {}

  // How many threads the calls of some milliseconds have, on average. `speed`: what all of `threads` compute in the
  // time of one that has a core; `taken`: the share of their time that they have none.
  template <class Speed, class Taken>
  double run(int64_t milliseconds, Speed speed, Taken taken) {
    const int64_t end = now + milliseconds * 1000000;
    double sum = 0;
    long calls = 0;
    for (; now < end; ++calls) {
      const bool measured = governor.measures_next();
      const int threads = governor.limit(wanted, processors);
      const int64_t wall = (int64_t)(1000000 / speed(threads)), cores = 1000000;
      const double share = taken(threads);
      now += wall;
      sum += threads;
      if (measured) governor.add(threads, {wall, cores, (int64_t)((double)cores * share / (1 - share))}, now);
    }
    return sum / (double)calls;
  }
};

void check_governor() {
  const auto as_many = [](int threads) { return (double)threads; };
  const auto none = [](int) { return 0.02; };
  for (const int processors : {2, 5, 64}) {
    Machine machine(processors, processors);
    check(machine.run(20000, as_many, none) == processors, "governor: an idle machine has fewer than %d threads",
          processors);
    const auto like_one = [](int threads) { return threads > 1 ? 0.5 : 0.6; };
    const auto most = [](int threads) { return threads > 1 ? 0.5 : 0.4; };
    machine.run(12000, like_one, most);
    const double few = machine.run(20000, like_one, most);
    check(few < 1.5, "governor: %g of %d threads where one computes as much", few, processors);
    machine.run(12000, as_many, none);
    const double again = machine.run(10000, as_many, none);
    check(again > 0.97 * processors, "governor: %g of %d threads when the cores are free again", again, processors);
    const auto half = [](int threads) { return threads / 2.; };
    const auto taken = [](int) { return 0.5; };
    machine.run(3000, half, taken);
    const double all = machine.run(30000, half, taken);
    check(all > 0.9 * processors, "governor: %g of %d threads where each computes something", all, processors);
  }
  Machine many(100, 2);
  check(many.run(5000, as_many, none) == 2, "governor: more threads than processors");
}

void check_all(const char* isa, Extent extent) {
  const std::vector<std::pair<long, long>> shapes =
      extent == SHORT   ? std::vector<std::pair<long, long>>{{100, 66}}
      : extent == QUICK ? std::vector<std::pair<long, long>>{{100, 66}, {513, 34}}
                        : std::vector<std::pair<long, long>>{{1, 2},    {31, 34},    {64, 96},  {100, 258},
                                                             {513, 66}, {1055, 130}, {2048, 32}};
  for (const auto& [K, N] : shapes)
    for (const int bits : {16, 8, 4}) {
      check_linear(isa, {K, N, bits, 0, false, true}, extent);
      check_linear(isa, {K, N, bits, bits % 3, true, false}, extent);  // 16: silu, 8: gelu, 4: silu
      if (extent == ALL) check_linear(isa, {K, N - 1, bits, 0, true, true}, extent);
    }
  for (const BlockShape& s : BLOCK_SHAPES) check_blocks(isa, s, extent);
  for (const long K : {1L, 33L, 40L, 48L, 80L, 300L})
    for (const BlockShape& s : BLOCK_SHAPES)
      if (s.type == 3 || s.type == 12) check_fitted(isa, s, K);
  for (const int element : {4, 2, 1})
    for (const int D : {64, 128, 256, 40, 8}) {
      if (element == 1 && D < 64) continue;
      if (extent == SHORT && D != 64 && D != 40) continue;
      check_attention(isa, {6, 2, D, element, 16, 0}, extent);
      if (extent == ALL && D < 200) {
        check_attention(isa, {4, 4, D, element, 32, 70}, extent);
        check_attention(isa, {17, 1, D, element, 16, 0}, extent);
      }
    }
  for (const int D : {64, 40, 128})
    for (const bool with_norms : {false, true})
      check(rotated_keys(isa, D, with_norms) == rotated_keys("portable", D, with_norms),
            "%s: keys of D %d are rotated to other bits", isa, D);
  check_nodes(isa);
  const std::vector<int64_t> tokens = drawn_tokens("portable"), own = drawn_tokens(isa);
  check(tokens == own, "%s: other tokens are drawn", isa);
  check(std::any_of(own.begin(), own.end(), [&](int64_t token) { return token != own[0]; }), "%s: one token", isa);
}

}  // namespace

int main(int num_arguments, char** arguments) {
  Extent extent = ALL;
  std::vector<std::string> wanted;
  for (int i = 1; i < num_arguments; ++i)
    if (!std::strcmp(arguments[i], "quick"))
      extent = QUICK;
    else if (!std::strcmp(arguments[i], "short"))
      extent = SHORT;
    else
      wanted.push_back(arguments[i]);
  char names[256];
  infer_set_isa("");
  infer_instruction_sets(names, sizeof names);
  std::printf("%s\n", names);
  std::string name;
  for (const char* at = names; *at; ++at) {
    if (*at != ' ') {
      name += *at;
      continue;
    }
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end()) {
      infer_set_isa("");
      check_all(name.c_str(), extent);
      infer_set_isa("");
      std::printf("%s: %ld passed, %ld failed so far\n", name.c_str(), num_passed, num_failed);
    }
    name.clear();
  }
  infer_set_isa("");
  check_threads(extent);
  check_governor();
  std::printf("%ld passed, %ld failed\n", num_passed, num_failed);
  return num_failed || !num_passed;
}
