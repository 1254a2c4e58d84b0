// Linear layers: memory, items of work and threads. linear.h says what is computed; linear_*.h compute it, for
// each instruction set.

#include "linear.h"

#include "isa/dispatch.h"

namespace {

using namespace linear;

constexpr long MANY_ROWS = 64;  // of a prompt: its products wait for arithmetic, not for memory

long panels_of(long N, int gate) { return gate ? ceil_div(N / 2, 16) : ceil_div(N, SIDE); }

Layer layer_of(char* packed, long N, long K, int bits, int gate) {
  Layer layer{};
  layer.weight = packed, layer.N = N, layer.K = K, layer.bits = bits, layer.gate = (Gate)gate;
  layer.steps = ceil_div(K, bits < 16 ? 64 : 32);
  layer.panels = panels_of(N, gate);
  layer.width = gate ? N / 2 : N;
  return layer;
}

// Where the panels of a weight in blocks begin; the last entry is its end.
BlockPanel* panels_in_blocks(const Layer& layer, const int* types) {
  BlockPanel* panels = new BlockPanel[layer.panels + 1]();
  for (long i = 0; i < layer.panels; ++i) {
    panels[i].format = block_format((BlockType)types[i]);
    panels[i + 1].offset = panels[i].offset + infer_blocks_panel_bytes(types[i], layer.K);
  }
  panels[layer.panels].format = panels[layer.panels - 1].format;
  return panels;
}

// Blocks are multiplied on vectors: tiles would spend most of their time on sums of 32 inputs.
const Kernels* kernels_for_blocks(const IsaKernels* isa) {
  for (const char* name : {"avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"}) {
    if (!isa->linear->tiles) break;
    if (const IsaKernels* other = usable_isa(name)) isa = other;
  }
  return isa->linear;
}

size_t round_to_line(long bytes) { return (size_t)ceil_div(bytes, 64) * 64; }

}  // namespace

extern "C" {

int infer_linear_runs_here(const char* isa_name) {
  const IsaKernels* isa = usable_isa(isa_name);
  return isa && isa->linear;
}

long infer_linear_packed_bytes(long N, long K, int bits, int gate) {
  const Layer layer = layer_of(nullptr, N, K, bits, gate);
  return layer.panels * layer.panel_bytes();
}

void* infer_linear_new(const char* isa_name, char* packed, long N, long K, int bits, int gate, int float_out,
                       int rotated, const float* bias, const float* norm, float eps, const int* blocks) {
  const IsaKernels* isa = usable_isa(isa_name);
  if (!isa || !isa->linear) return nullptr;
  Layer* layer = new Layer(layer_of(packed, N, K, bits, gate));
  layer->float_out = float_out != 0;
  layer->rotated = rotated != 0;
  layer->kernels = blocks ? kernels_for_blocks(isa) : isa->linear;
  layer->panel_blocks = blocks ? panels_in_blocks(*layer, blocks) : nullptr;
  layer->eps = eps;
  layer->norm = norm ? new float[ceil_div(K, 64) * 64]() : nullptr;
  for (long k = 0; norm && k < K; ++k) layer->norm[k / 32 * 32 + k % 2 * 16 + k % 32 / 2] = norm[k];
  layer->bias = bias ? new float[N] : nullptr;
  if (bias) std::memcpy(layer->bias, bias, (size_t)N * sizeof(float));
  layer->scales = layer->whole() ? new float[layer->panels * SIDE]() : nullptr;
  layer->starts = layer->whole() && isa->linear->has_starts ? new int32_t[layer->panels * SIDE]() : nullptr;
  return layer;
}

void infer_linear_free(void* handle) {
  Layer* layer = (Layer*)handle;
  for (float* numbers : {layer->norm, layer->bias, layer->scales}) delete[] numbers;
  delete[] layer->starts;
  delete[] layer->panel_blocks;
  delete layer;
}

void infer_linear_pack(void* handle, const uint16_t* source, long rows, long stride, long column, int threads) {
  const Layer& layer = *(Layer*)handle;
  const long first = column / SIDE, end = ceil_div(column + rows, SIDE);
  Packing packing{layer, source, rows, stride, column, layer.gate ? 0 : first, layer.gate ? layer.panels : end};
  run_threads(layer.kernels->pack_weight, &packing, threads);
}

void infer_linear_pack_int8(void* handle, const int8_t* source, const float* scales, long rows, long stride,
                            long column, int threads) {
  const Layer& layer = *(Layer*)handle;
  const long first = column / SIDE, end = ceil_div(column + rows, SIDE);
  Packing packing{layer,  nullptr, rows, stride, column, layer.gate ? 0 : first, layer.gate ? layer.panels : end,
                  source, scales};
  run_threads(layer.kernels->pack_weight, &packing, threads);
}

void infer_linear(void* handle, const uint16_t* x, long x_stride, const uint16_t* residual, char* y, long M,
                  int threads) {
  static thread_local ThreadMemory memory;
  const Layer& layer = *(Layer*)handle;
  if (M >= MANY_ROWS) threads = threads_of_many_rows(threads);
  for (long row = 0; row < M; row += MOST_ROWS) {
    Call c(layer);
    c.x = x + row * x_stride;
    c.residual = residual ? residual + row * layer.width : nullptr;
    c.y = y + row * layer.width * (layer.float_out ? 4 : 2);
    c.M = std::min(MOST_ROWS, M - row);
    c.x_stride = x_stride;
    c.groups = ceil_div(c.M, SIDE);
    c.format = layer.kernels->row_format(layer, c.M);
    const size_t blocks = layer.panel_blocks ? (size_t)(c.M * layer.steps * 2) * sizeof(RowGroup) : 0;
    const size_t rows = (size_t)(c.groups * layer.steps * SIDE * c.row_bytes());
    c.row_scales = (float*)memory.reserve(MOST_ROWS * sizeof(float) + round_to_line((long)blocks) + rows);
    c.row_groups = (RowGroup*)(c.row_scales + MOST_ROWS);
    c.packed = (char*)c.row_groups + round_to_line((long)blocks);
    c.num_packs = ceil_div(c.M, 16) * (16 / PACK_ROWS);
    c.row_blocks = ceil_div(c.groups, BLOCK_GROUPS);
    // Enough items that no thread waits long for another, up to as many panels as the cache holds.
    const long share = layer.panels * c.row_blocks / (8 * threads);
    c.item_panels = std::clamp(share, 1L, c.groups > 1 ? layer.kernels->block_panels : ITEM_PANELS);
    c.num_items = ceil_div(layer.panels, c.item_panels) * c.row_blocks;
    const bool tiny = layer.panels * layer.steps * c.groups < 256;  // less than waking a thread
    run_threads(layer.kernels->compute, &c, tiny ? 1 : threads);
  }
}

}  // extern "C"
