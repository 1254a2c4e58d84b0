// The road of a linear layer's call through its weight, for one instruction set, whose products an isa/*.cpp
// has included before: `unpacked_panel` (some steps of a panel), `multiply_panel` (a group of rows × these steps).
#pragma once

#include "linear_finish.h"
#include "linear_pack.h"

namespace linear {
namespace {

// Several groups: a slice of a panel stays in a near cache while the groups' rows pass by.
void block(const Call& c, long group, long group_end, long begin, long end, float* sums, char* unpacked) {
  const Layer& layer = c.layer;
  const long groups = group_end - group;
  const long block_steps = KERNELS.block_steps;
  for (long k = 0; k < layer.steps; k += block_steps) {
    const long steps = std::min(block_steps, layer.steps - k);
    const long next_k = k + block_steps < layer.steps ? k + block_steps : 0;
    const auto rows_ahead = [&](long g) {  // the first panel asks for the rows that the others find near
      return PrefetchStream{g + 1 < groups ? c.tiles(group + g + 1, k) : c.tiles(group, next_k), SIDE};
    };
    for (long panel = begin; panel < end; ++panel) {
      const long lines = ceil_div(layer.lines(panel), groups);
      const char* next = panel + 1 < end ? layer.tiles(panel + 1, k) : layer.tiles(begin, next_k);
      const char* b = unpacked_panel(c, panel, k, steps, unpacked);
      for (long g = 0; g < groups; ++g) {
        const char* ahead = next + g * steps * lines * 64;
        float* own = sums + ((panel - begin) * groups + g) * SUMS;
        multiply_panel(c, group + g, b, panel, k, steps, own, {ahead, lines},
                       panel == begin ? rows_ahead(g) : PrefetchStream{ahead, 0});
      }
    }
  }
  for (long g = 0; g < groups; ++g) finish(c, sums + g * SUMS, groups * SUMS, group + g, begin, end);
}

void compute(void* data) {
  static thread_local ThreadMemory memory;
  Call& c = *(Call*)data;
  const long sum_bytes = BLOCK_GROUPS * KERNELS.block_panels * SUMS * (long)sizeof(float);
  char* own = memory.reserve((size_t)(sum_bytes + KERNELS.block_steps * MOST_UNPACKED));
  long item = c.next_item.fetch_add(1);
  if (c.groups == 1)
    for (long i = 0; i < LEAD_BYTES; i += 64) __builtin_prefetch(c.start_of(item) + i, 0, 2);
  for (long pack; (pack = c.next_pack.fetch_add(1)) < c.num_packs; c.packs.end_part((uint32_t)c.num_packs))
    pack_these_rows(c, pack);
  c.packs.wait((uint32_t)c.num_packs);
  const ProductState state(c);
  float* sums = (float*)own;
  char* unpacked = own + sum_bytes;  // blocks
  for (long following; item < c.num_items; item = following) {
    following = c.next_item.fetch_add(1);
    const long panel = item / c.row_blocks * c.item_panels, part = item % c.row_blocks;
    const long panel_end = std::min(panel + c.item_panels, c.layer.panels);
    const long group = c.groups * part / c.row_blocks;
    const long group_end = c.groups * (part + 1) / c.row_blocks;
    if (c.groups == 1)
      sweep(c, panel, panel_end, c.start_of(following), sums, unpacked);
    else
      block(c, group, group_end, panel, panel_end, sums, unpacked);
  }
}

}  // namespace
}  // namespace linear
