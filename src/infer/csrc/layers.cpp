// All layers of a decoder in one call, as models/decoder.py has them, on bfloat16 activations: norms, projections,
// attention and MLP. Linear layers, attention and what is between them by the functions of abi.h.
//
// A layer in Python is five calls, and the interpreter's way between them, its data driven out of the
// caches by a layer's weights each time, took 65 µs: a tenth of a step that reads 600 MB.

#include "rows.h"

namespace {

constexpr size_t KEPT = 64 << 20;  // bytes of memory that a thread keeps from step to step

struct Sizes {
  long num_tokens, hidden, q_size, kv_size, inner;
  int threads;
};

struct Rows {  // room for a step's rows, in bfloat16
  uint16_t *heads, *attended, *between, *inner, *normed, *block;
};

// y = residual + what a linear layer makes of x, behind a norm and times a factor if there are any.
void add_block(const Sizes& s, void* linear, const RowNorm* norm, double scale, const uint16_t* x, long width,
               const uint16_t* residual, uint16_t* block, uint16_t* y) {
  if (!norm && scale == 1) return infer_linear(linear, x, width, residual, (char*)y, s.num_tokens, s.threads);
  infer_linear(linear, x, width, nullptr, (char*)block, s.num_tokens, s.threads);
  infer_norm_rows(norm, block, s.hidden, residual, (float)scale, y, s.hidden, s.num_tokens, s.hidden, s.threads);
}

// x, or in `to` what a norm makes of it.
const uint16_t* normed(const Sizes& s, const RowNorm* norm, const uint16_t* x, uint16_t* to) {
  if (!norm) return x;
  infer_norm_rows(norm, x, s.hidden, nullptr, 1, to, s.hidden, s.num_tokens, s.hidden, s.threads);
  return to;
}

void attend(const Sizes& s, const DecoderLayer& layer, void* plan, const CacheAddresses& cache,
            const AngleAddresses& angles, float eps, const Rows& rows, const uint16_t* x) {
  const long width = s.q_size + 2 * s.kv_size;
  uint16_t *q = rows.heads, *k = q + s.q_size, *v = k + s.kv_size;
  infer_linear(layer.qkv, x, s.hidden, nullptr, (char*)q, s.num_tokens, s.threads);
  if (layer.clip) clip_numbers(q, s.num_tokens * width, (float)layer.clip);
  if (layer.all_queries)
    infer_norm_rows(layer.all_queries, q, width, nullptr, 1, q, width, s.num_tokens, s.q_size, s.threads);
  if (layer.all_keys)
    infer_norm_rows(layer.all_keys, k, width, nullptr, 1, k, width, s.num_tokens, s.kv_size, s.threads);
  infer_attention_attend(plan, (int)cache.window, cache.keys, cache.values, q, k, v, rows.attended, width, width, width,
                         angles.cos, angles.sin, layer.q_norm, layer.k_norm, eps, layer.q_factor, angles.growth,
                         nullptr);
}

void apply(const Sizes& s, const DecoderLayer& layer, void* plan, const CacheAddresses& cache,
           const AngleAddresses& angles, float eps, const Rows& rows, const uint16_t* x, uint16_t* y) {
  const uint16_t* into = normed(s, layer.before_attention, x, rows.normed);
  attend(s, layer, plan, cache, angles, eps, rows, into);
  add_block(s, layer.o, layer.after_attention, layer.residual_scale, rows.attended, s.q_size, x, rows.block,
            rows.between);
  if (layer.before_mlp || !layer.is_parallel)
    into = normed(s, layer.before_mlp, layer.is_parallel ? x : rows.between, rows.normed);
  infer_linear(layer.inner, into, s.hidden, nullptr, (char*)rows.inner, s.num_tokens, s.threads);
  if (layer.activation >= 0)
    infer_activate((int)layer.activation, (float)layer.positive, (float)layer.negative, rows.inner,
                   s.num_tokens * s.inner, s.threads);
  add_block(s, layer.down, layer.after_mlp, layer.residual_scale, rows.inner, s.inner, rows.between, rows.block, y);
}

}  // namespace

extern "C" {

void infer_layers(void* plan, const DecoderLayer* layers, const CacheAddresses* caches, const AngleAddresses* angles,
                  int num_layers, float eps, const uint16_t* x, uint16_t* y, long num_tokens, long hidden, long q_size,
                  long kv_size, long inner, int threads) {
  static thread_local ThreadMemory kept;
  ThreadMemory own;
  const Sizes sizes{num_tokens, hidden, q_size, kv_size, inner, threads};
  bool apart = false;  // whether something lies between linear layers and attention
  for (int i = 0; i < num_layers; ++i) {
    const DecoderLayer& l = layers[i];
    apart |= l.before_attention || l.before_mlp || l.after_attention || l.after_mlp || l.residual_scale != 1;
  }
  const long width = q_size + 2 * kv_size;
  const size_t bytes = num_tokens * (width + q_size + hidden + inner + (apart ? 2 * hidden : 0)) * sizeof(uint16_t);
  Rows rows{};
  rows.heads = (uint16_t*)(bytes > KEPT ? own : kept).reserve(bytes);
  rows.attended = rows.heads + num_tokens * width;
  rows.between = rows.attended + num_tokens * q_size;
  rows.inner = rows.between + num_tokens * hidden;
  rows.normed = rows.inner + num_tokens * inner;
  rows.block = rows.normed + num_tokens * hidden;
  for (int i = 0; i < num_layers; ++i, x = y) apply(sizes, layers[i], plan, caches[i], angles[i], eps, rows, x, y);
}

}  // extern "C"
