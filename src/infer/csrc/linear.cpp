// Linear layers: memory, items of work and threads. linear.h says what is computed; linear_*.h compute it, for
// each instruction set.

#include "linear.h"

#include <new>

#include "isa/dispatch.h"

namespace {

using namespace linear;

constexpr long MANY_ROWS = 64;  // of a prompt: its products wait for arithmetic, not for memory

long panels_of(long N, int gate) { return gate ? ceil_div(N / 2, 16) : ceil_div(N, SIDE); }

// What a weight's shape says of its layer.
void shape(Layer& layer, char* packed, long N, long K, int bits, int gate) {
  layer.weight = packed, layer.N = N, layer.K = K, layer.bits = bits, layer.gate = (Gate)gate;
  layer.steps = ceil_div(K, bits < 16 ? 64 : 32);
  layer.panels = panels_of(N, gate);
  layer.width = gate ? N / 2 : N;
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

size_t round_to_line(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The weight of each node's panels comes to its memory when it is written.
void keep_near(const Layer& layer) {
  const NodeSlices& nodes = layer.nodes;
  for (size_t i = 0; nodes.ends.size() > 1 && i < nodes.ends.size(); ++i) {
    char* begin = layer.start_of(i ? nodes.ends[i - 1] : 0);
    prefer_node(begin, (size_t)(layer.start_of(nodes.ends[i]) - begin), nodes.nodes[i].number);
  }
}

// Enough parts that no thread waits long for another, up to as many panels as the cache holds.
CutShape shape_of_cut(const Layer& layer, long M, int threads) {
  const long groups = ceil_div(M, SIDE), row_blocks = ceil_div(groups, BLOCK_GROUPS);
  const bool tiny = layer.panels * layer.steps * groups < 256;  // less than waking a thread
  if (tiny) threads = 1;
  const long share = layer.panels * row_blocks / (8 * threads);
  return {threads, row_blocks, std::clamp(share, 1L, groups > 1 ? layer.kernels->block_panels : ITEM_PANELS)};
}

const Cut& cut_of(const Layer& layer, const CutShape& shape) {
  const Cut* first = layer.cuts.load(std::memory_order_acquire);
  for (const Cut* cut = first; cut; cut = cut->next)
    if (cut->shape == shape) return *cut;
  Cut* made = new Cut(cut_panels(layer.nodes, layer.steps, shape));
  made->next = first;  // another thread may add the same at the same time
  while (!layer.cuts.compare_exchange_weak(made->next, made, std::memory_order_release)) continue;
  return *made;
}

void take_memory(Call& c, ThreadMemory& memory) {
  const size_t splits = (size_t)c.cut.num_splits, most_groups = (size_t)ceil_div(c.groups, c.row_blocks);
  const size_t sizes[] = {
      MOST_ROWS * sizeof(float),                                                        // row_scales
      c.layer.panel_blocks ? (size_t)(c.M * c.layer.steps * 2) * sizeof(RowGroup) : 0,  // row_groups
      (size_t)(c.groups * c.layer.steps * SIDE * c.row_bytes()),                        // packed
      splits * most_groups * SUMS * sizeof(float),                                      // split_sums
      splits * sizeof(Phase),                                                           // firsts
  };
  char* at[5] = {};
  size_t all = 0;
  for (const size_t size : sizes) all += round_to_line(size);
  char* next = memory.reserve(all);
  for (int i = 0; i < 5; next += round_to_line(sizes[i++])) at[i] = next;
  c.row_scales = (float*)at[0], c.row_groups = (RowGroup*)at[1], c.packed = at[2], c.split_sums = (float*)at[3];
  c.firsts = (Phase*)at[4];
  for (size_t i = 0; i < splits; ++i) new (c.firsts + i) Phase;
}

}  // namespace

extern "C" {

int infer_linear_runs_here(const char* isa_name) {
  const IsaKernels* isa = usable_isa(isa_name);
  return isa && isa->linear;
}

long infer_linear_packed_bytes(long N, long K, int bits, int gate) {
  Layer layer{};
  shape(layer, nullptr, N, K, bits, gate);
  return layer.panels * layer.panel_bytes();
}

void* infer_linear_new(const char* isa_name, char* packed, long N, long K, int bits, int gate, int float_out,
                       int rotated, const float* bias, const float* norm, float eps, const int* blocks) {
  const IsaKernels* isa = usable_isa(isa_name);
  if (!isa || !isa->linear) return nullptr;
  Layer* layer = new Layer{};
  shape(*layer, packed, N, K, bits, gate);
  layer->float_out = float_out != 0;
  layer->rotated = rotated != 0;
  layer->kernels = blocks ? isa->blocks : isa->linear;
  layer->panel_blocks = blocks ? panels_in_blocks(*layer, blocks) : nullptr;
  layer->eps = eps;
  layer->norm = norm ? new float[ceil_div(K, 64) * 64]() : nullptr;
  for (long k = 0; norm && k < K; ++k) layer->norm[k / 32 * 32 + k % 2 * 16 + k % 32 / 2] = norm[k];
  layer->bias = bias ? new float[N] : nullptr;
  if (bias) std::memcpy(layer->bias, bias, (size_t)N * sizeof(float));
  layer->scales = layer->whole() ? new float[layer->panels * SIDE]() : nullptr;
  layer->starts = layer->whole() && isa->linear->has_starts ? new int32_t[layer->panels * SIDE]() : nullptr;
  layer->nodes = slices_of(layer->panels);
  keep_near(*layer);
  return layer;
}

void infer_linear_free(void* handle) {
  Layer* layer = (Layer*)handle;
  for (float* numbers : {layer->norm, layer->bias, layer->scales}) delete[] numbers;
  delete[] layer->starts;
  delete[] layer->panel_blocks;
  for (const Cut *cut = layer->cuts, *next; cut; cut = next) {
    next = cut->next;
    delete cut;
  }
  delete layer;
}

void infer_linear_pack(void* handle, const uint16_t* source, long rows, long stride, long column, int threads) {
  const Layer& layer = *(Layer*)handle;
  Packing packing{layer, source, rows, stride, column};
  run_threads(layer.kernels->pack_weight, &packing, threads);
}

void infer_linear_pack_int8(void* handle, const int8_t* source, const float* scales, long rows, long stride,
                            long column, int threads) {
  const Layer& layer = *(Layer*)handle;
  Packing packing{layer, nullptr, rows, stride, column};
  packing.whole = source, packing.scales = scales;
  run_threads(layer.kernels->pack_weight, &packing, threads);
}

long infer_linear_parts(void* handle, long M, int threads, int64_t* parts, long most) {
  const Layer& layer = *(Layer*)handle;
  const Cut& cut = cut_of(layer, shape_of_cut(layer, M, threads));
  const long count = (long)cut.parts.size();
  for (long i = 0, node = 0; i < std::min(count, most); ++i) {
    while (i >= cut.ends[(size_t)node]) ++node;
    const Part& part = cut.parts[(size_t)i];
    for (const long number :
         {node, (long)part.panel, (long)part.panel_end, (long)part.row_block, (long)part.begin, (long)part.end})
      *parts++ = number;
  }
  return count;
}

void infer_linear(void* handle, const uint16_t* x, long x_stride, const uint16_t* residual, char* y, long M,
                  int threads) {
  static thread_local ThreadMemory memory;
  const Layer& layer = *(Layer*)handle;
  if (M >= MANY_ROWS) threads = threads_of_many_rows(threads);
  for (long row = 0; row < M; row += MOST_ROWS) {
    const long count = std::min(MOST_ROWS, M - row);
    const CutShape shape = shape_of_cut(layer, count, threads);
    Call c(layer, cut_of(layer, shape));
    c.x = x + row * x_stride;
    c.residual = residual ? residual + row * layer.width : nullptr;
    c.y = y + row * layer.width * (layer.float_out ? 4 : 2);
    c.M = count;
    c.x_stride = x_stride;
    c.groups = ceil_div(c.M, SIDE);
    c.row_blocks = shape.row_blocks;
    c.format = layer.kernels->row_format(layer, c.M);
    c.num_packs = ceil_div(c.M, 16) * (16 / PACK_ROWS);
    take_memory(c, memory);
    run_threads(layer.kernels->compute, &c, shape.threads);
  }
}

}  // extern "C"
