// How a product is cut into parts: panels × a part of the rows, as a rule over all inputs.
#pragma once

#include "parts.h"

namespace linear {

struct Part {
  int panel, panel_end, row_block;
  int begin, end;  // steps
  int split;       // index among panels whose sums a first part begins, and a second one goes on from; -1: it is whole
};

struct CutShape {  // what a cut depends on, beside the layer
  int threads;
  long row_blocks, item_panels;  // item_panels: of a part, at most

  bool operator==(const CutShape& other) const {
    return threads == other.threads && row_blocks == other.row_blocks && item_panels == other.item_panels;
  }
};

struct Cut {
  CutShape shape;
  std::vector<Part> parts;  // node by node, in the order in which they are taken
  std::vector<long> ends;   // of each node's parts
  int num_splits = 0;
  const Cut* next = nullptr;  // of the same layer
};

// The parts of a layer's products. Where whole panels would leave threads without work at the end, some panels are in
// two parts of their steps: a thread begins with the first of one and ends with the second of another, which by then
// somebody has begun (R. McNaughton, Scheduling with Deadlines and Loss Functions, 1959). So with at least as many
// panels as threads all end together. A sum goes on where it was, in the same order, so its bits are the same.
Cut cut_panels(const NodeSlices& panels, long steps, const CutShape& shape);

}  // namespace linear
