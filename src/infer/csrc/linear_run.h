// The road of a linear layer's call through its weight, for one instruction set, whose products an isa/*.cpp
// has included before: `unpacked_panel` (some steps of a panel), `multiply_panel` (a group of rows × these steps).
#pragma once

#include "linear_finish.h"
#include "linear_pack.h"

namespace linear {
namespace {

// Several groups, or some steps of a panel: a slice of the panel stays in a near cache while the groups' rows pass by.
void block(const Call& c, const Part& part, float* sums, char* unpacked) {
  const Layer& layer = c.layer;
  const long group = c.first_group(part.row_block), groups = c.first_group(part.row_block + 1) - group;
  const long block_steps = KERNELS.block_steps;
  for (long k = part.begin, steps; k < part.end; k += steps) {
    steps = std::min(k / block_steps * block_steps + block_steps, (long)part.end) - k;
    const long next_k = k + steps < part.end ? k + steps : part.begin;
    const auto rows_ahead = [&](long g) {  // the first panel asks for the rows that the others find near
      return PrefetchStream{g + 1 < groups ? c.tiles(group + g + 1, k) : c.tiles(group, next_k), SIDE};
    };
    for (long panel = part.panel; panel < part.panel_end; ++panel) {
      const long lines = ceil_div(layer.lines(panel), groups);
      const char* next = panel + 1 < part.panel_end ? layer.tiles(panel + 1, k) : layer.tiles(part.panel, next_k);
      const char* b = unpacked_panel(c, panel, k, steps, unpacked);
      for (long g = 0; g < groups; ++g) {
        const char* ahead = next + g * steps * lines * 64;
        float* own = sums + ((panel - part.panel) * groups + g) * SUMS;
        multiply_panel(c, group + g, b, panel, k, steps, own, {ahead, lines},
                       panel == part.panel && c.groups > 1 ? rows_ahead(g) : PrefetchStream{ahead, 0});
      }
    }
  }
  for (long g = 0; part.end == layer.steps && g < groups; ++g)
    finish(c, sums + g * SUMS, groups * SUMS, group + g, part.panel, part.panel_end);
}

// One of the two parts in which the steps of a panel are: what the first one sums up, the second one goes on from.
void split(const Call& c, const Part& part, char* unpacked) {
  float* sums = c.split_sums + part.split * ceil_div(c.groups, c.row_blocks) * SUMS;
  if (part.begin) c.firsts[part.split].wait(1);
  block(c, part, sums, unpacked);
  if (!part.begin) c.firsts[part.split].end_part(1);
}

void compute(void* data) {
  static thread_local ThreadMemory memory;
  Call& c = *(Call*)data;
  const long sum_bytes = BLOCK_GROUPS * KERNELS.block_panels * SUMS * (long)sizeof(float);
  char* own = memory.reserve((size_t)(sum_bytes + KERNELS.block_steps * MOST_UNPACKED));
  int node = own_node();
  const Part* part = c.take(node);
  if (c.groups == 1)
    for (long i = 0; i < LEAD_BYTES; i += 64) __builtin_prefetch(c.start_of(part) + i, 0, 2);
  for (long pack; (pack = c.next_pack.fetch_add(1)) < c.num_packs; c.packs.end_part((uint32_t)c.num_packs))
    pack_these_rows(c, pack);
  c.packs.wait((uint32_t)c.num_packs);
  const ProductState state(c);
  float* sums = (float*)own;
  char* unpacked = own + sum_bytes;  // blocks
  // Taken before it is due, so that its weights can be asked for. Where parts are few, they go to whoever is free.
  const bool early = !c.cut.num_splits;
  for (const Part* following; part; part = following) {
    following = early ? c.take(node) : nullptr;
    if (part->split >= 0)
      split(c, *part, unpacked);
    else if (c.groups == 1)
      sweep(c, part->panel, part->panel_end, c.start_of(following), sums, unpacked);
    else
      block(c, *part, sums, unpacked);
    if (!early) following = c.take(node);
  }
}

}  // namespace
}  // namespace linear
