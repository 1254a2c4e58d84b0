// Threads for a call: those of torch's OpenMP runtime, or a team of this library's own.
#pragma once

#include <thread>

#include "common.h"

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);  // libgomp's GOMP_parallel

// Have `threads` threads execute body(data), of which this is one; returns when all have ended. `parallel` may be null.
// A body takes items from a counter, so it is complete with any number of threads, and some may be missing where the
// system gives no more.
void run_threads(Parallel parallel, void (*body)(void*), void* data, int threads);

// Waits for what another thread writes soon: looks often at first, then lets others run.
class Waiting {
 public:
  void once() {
    if (++tries_ < 4000)
      relax();
    else
      std::this_thread::yield();
  }

 private:
  int tries_ = 0;
};
