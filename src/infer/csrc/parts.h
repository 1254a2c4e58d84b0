// Parts of a call that threads take one after the other, and the NUMA nodes whose memory they are in.
#pragma once

#include "threads.h"

constexpr int MOST_NODES = 8;

// A number of things, neighbours together, by the NUMA nodes of the threads: node i has those from ends[i - 1] to
// ends[i].
struct NodeSlices {
  std::vector<NodeThreads> nodes;
  std::vector<long> ends;
};
inline NodeSlices slices_of(long count) {
  NodeSlices slices{nodes_of_threads(), {}};
  long all = 0, sum = 0;
  for (const NodeThreads& node : slices.nodes) all += node.threads;
  for (const NodeThreads& node : slices.nodes) slices.ends.push_back(count * (sum += node.threads) / all);
  return slices;
}

// Counters of parts, one for each node: a thread takes those of its own node first, then the others'.
class PartCounters {
 public:
  // The parts of node i are those from ends[i - 1] (the first node's: 0) to ends[i].
  PartCounters(const long* ends, size_t num_nodes) : num_nodes_((int)num_nodes) {
    for (int i = 0; i < num_nodes_; ++i) nodes_[i].next.store(i ? ends[i - 1] : 0), nodes_[i].end = ends[i];
  }

  // Whether a node has more parts left than its share of some threads.
  bool has_many(int node, int threads) const {
    return nodes_[node].end - nodes_[node].next.load() > threads / num_nodes_;
  }

  // The next part, -1: none is left. `node`: from which this thread has taken before; it may become another one.
  long take(int& node) {
    if (node >= num_nodes_) node = 0;
    for (int tried = 0; tried < num_nodes_; ++tried, node = node + 1 < num_nodes_ ? node + 1 : 0) {
      const long part = nodes_[node].next.fetch_add(1);
      if (part < nodes_[node].end) return part;
    }
    return -1;
  }

 private:
  struct alignas(64) Node {
    std::atomic<long> next;
    long end;
  };
  Node nodes_[MOST_NODES];
  const int num_nodes_;
};
