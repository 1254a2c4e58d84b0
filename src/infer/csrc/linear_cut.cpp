// Cutting a linear layer's products into parts: plain arithmetic, once for each layer and number of threads.

#include "linear_cut.h"

namespace linear {

namespace {

constexpr long STEPS = 4;        // between which a panel may be cut: a unit of blocks
constexpr double ENOUGH = 0.95;  // of the threads' time with work: no splits are needed

// Panels [first, end) × the rows' blocks, in parts of whole panels.
void add_whole(Cut& cut, long first, long end, long steps) {
  for (long panel = first; panel < end; panel += cut.shape.item_panels)
    for (long block = 0; block < cut.shape.row_blocks; ++block)
      cut.parts.push_back(
          {(int)panel, (int)std::min(panel + cut.shape.item_panels, end), (int)block, 0, (int)steps, -1});
}

// The same for one panel after the other, of which some are split.
void add_split(Cut& cut, long first, long steps, long count, long threads) {
  const auto part_of = [&](long unit, long begin, long end, int split) {
    const int panel = (int)(first + unit / cut.shape.row_blocks);
    return Part{panel, panel + 1, (int)(unit % cut.shape.row_blocks), (int)begin, (int)end, split};
  };
  // The last threads + rest parts are laid on a line, which is cut into equal pieces, one for each thread.
  const long line = threads + count % threads, before = count - line;
  std::vector<Part> seconds;
  std::vector<bool> is_split((size_t)count);
  for (long thread = 1; thread < threads; ++thread) {
    const long at = thread * line * steps / threads / STEPS * STEPS, unit = before + at / steps, second = at % steps;
    if (!second || is_split[(size_t)unit]) continue;
    is_split[(size_t)unit] = true;
    cut.parts.push_back(part_of(unit, 0, steps - second, cut.num_splits));
    seconds.push_back(part_of(unit, steps - second, steps, cut.num_splits++));
  }
  for (long unit = 0; unit < count; ++unit)
    if (!is_split[(size_t)unit]) cut.parts.push_back(part_of(unit, 0, steps, -1));
  // Who is free first has most time left.
  std::stable_sort(seconds.begin(), seconds.end(),
                   [](const Part& a, const Part& b) { return a.end - a.begin > b.end - b.begin; });
  cut.parts.insert(cut.parts.end(), seconds.begin(), seconds.end());
}

}  // namespace

Cut cut_panels(const NodeSlices& panels, long steps, const CutShape& shape) {
  Cut cut{shape, {}, {}};
  long all = 0, sum = 0, first = 0;
  for (const NodeThreads& node : panels.nodes) all += node.threads;
  for (size_t i = 0; i < panels.ends.size(); ++i) {
    const long begin = shape.threads * sum / all,
               threads = shape.threads * (sum + panels.nodes[i].threads) / all - begin;
    const long end = panels.ends[i], count = ceil_div(end - first, shape.item_panels) * shape.row_blocks;
    const bool is_even =
        threads < 2 || count < threads || (double)count >= ENOUGH * (double)(ceil_div(count, threads) * threads);
    if (is_even || shape.item_panels > 1)
      add_whole(cut, first, end, steps);
    else
      add_split(cut, first, steps, count, threads);
    cut.ends.push_back((long)cut.parts.size());
    sum += panels.nodes[i].threads, first = end;
  }
  return cut;
}

}  // namespace linear
