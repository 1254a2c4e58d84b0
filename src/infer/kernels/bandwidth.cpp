// How fast this machine reads memory, as a kernel sees it: all threads, prefetching.

#include <atomic>

#include "cpu.h"

#if defined(X86) && defined(__linux__) && defined(__GNUC__)
#define EVERY_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_ISA
#endif

namespace {

constexpr long CHUNK = 1 << 21, LINE = 64, AHEAD = 1 << 15;  // bytes

struct Reading {
  const char* from;
  long chunks;
  std::atomic<long> next{0};
  std::atomic<uint64_t> sum{0};
};

EVERY_ISA uint64_t sum_of(const char* from) {
  uint64_t lanes[8] = {};
  for (long at = 0; at < CHUNK; at += LINE) {
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
  for (long chunk; (chunk = r.next.fetch_add(1)) < r.chunks;) sum += sum_of(r.from + chunk * CHUNK);
  r.sum += sum;
}

}  // namespace

// Reads whole chunks of 2 MiB once; the sum keeps the compiler from leaving it out.
extern "C" uint64_t infer_read(const char* from, long bytes, void* parallel, int threads) {
  Reading reading{from, bytes / CHUNK, {}, {}};
  run_threads((Parallel)parallel, read_chunks, &reading, threads);
  return reading.sum;
}
