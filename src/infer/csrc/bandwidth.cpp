// How fast this machine reads memory, as a kernel sees it: all threads, prefetching.

#include "threads.h"

namespace {

constexpr long CHUNK = 1 << 21, LINE = 64, AHEAD = 1 << 15;  // bytes

struct Reading {
  const char* from;
  long bytes;
  std::atomic<long> next{0};
  std::atomic<uint64_t> sum{0};
};

EVERY_ISA uint64_t sum_of(const char* from, long bytes) {
  uint64_t lanes[8] = {};
  for (long at = 0; at < bytes; at += LINE) {
    __builtin_prefetch(from + at + AHEAD, 0, 2);  // behind the end it does nothing
    const uint64_t* line = (const uint64_t*)(from + at);
    for (int i = 0; i < 8; ++i) lanes[i] += line[i];
  }
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  return sum;
}

void read_chunks(void* data) {
  Reading& r = *(Reading*)data;
  uint64_t sum = 0;
  for (long at; (at = r.next.fetch_add(CHUNK)) < r.bytes;) sum += sum_of(r.from + at, std::min(CHUNK, r.bytes - at));
  r.sum += sum;
}

}  // namespace

// Reads whole lines of 64 bytes once; the sum keeps the compiler from leaving it out.
extern "C" uint64_t infer_read(const char* from, long bytes, int threads) {
  Reading reading{from, bytes / LINE * LINE, {}, {}};
  run_threads(read_chunks, &reading, threads);
  return reading.sum;
}
