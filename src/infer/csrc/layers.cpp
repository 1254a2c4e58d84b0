// All layers of a decoder in one call: norm, projection, attention, projection, norm, gated MLP, as
// models/decoder.py has them, on bfloat16 activations. Linear layers and attention by the functions of abi.h.
//
// A layer in Python is five calls, and the interpreter's way between them, its data driven out of the
// caches by a layer's weights each time, took 65 µs: a tenth of a step that reads 600 MB.

#include "common.h"

namespace {

constexpr size_t KEPT = 64 << 20;  // bytes of memory that a thread keeps from step to step

}  // namespace

extern "C" {

void infer_layers(void* plan, const LayerAddresses* layers, const CacheAddresses* caches, const AngleAddresses* angles,
                  int num_layers, float eps, const uint16_t* x, uint16_t* y, long num_tokens, long hidden, long q_size,
                  long kv_size, long inner, int threads) {
  static thread_local ThreadMemory kept;
  ThreadMemory own;
  const long width = q_size + 2 * kv_size;
  const size_t bytes = num_tokens * (width + q_size + hidden + inner) * sizeof(uint16_t);
  uint16_t* heads = (uint16_t*)(bytes > KEPT ? own : kept).reserve(bytes);
  uint16_t* attended = heads + num_tokens * width;
  uint16_t* between = attended + num_tokens * q_size;
  uint16_t* gated = between + num_tokens * hidden;
  for (int i = 0; i < num_layers; ++i, x = y) {
    const LayerAddresses& layer = layers[i];
    const CacheAddresses& cache = caches[i];
    infer_linear(layer.qkv, x, hidden, nullptr, (char*)heads, num_tokens, threads);
    infer_attention_attend(plan, (int)cache.window, cache.keys, cache.values, heads, heads + q_size,
                           heads + q_size + kv_size, attended, width, width, width, angles[i].cos, angles[i].sin,
                           layer.q_norm, layer.k_norm, eps);
    infer_linear(layer.o, attended, q_size, x, (char*)between, num_tokens, threads);
    infer_linear(layer.gate_up, between, hidden, nullptr, (char*)gated, num_tokens, threads);
    infer_linear(layer.down, gated, inner, between, (char*)y, num_tokens, threads);
  }
}

}  // extern "C"
