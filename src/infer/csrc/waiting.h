// Waiting for what another thread writes: often a moment, at times as long as another process has that thread's core.
#pragma once

#include <chrono>

#include "common.h"

using Word = std::atomic<uint32_t>;

// Sleeps while a word has a value; may return early, so the caller looks again.
void sleep_while(Word& word, uint32_t value);

// Wakes up to `count` threads that sleep on a word. Its memory need not be there any more.
void wake(Word& word, int count);

// Looks for something for a moment: `while (looking.again())`. A thread that goes to sleep comes back some ten
// microseconds late; one that looks takes its core from others.
class Looking {
 public:
  bool again() {
    relax();
    if (++tries_ % 64) return true;  // the clock is read now and then: it costs more than a look
    const Clock::time_point now = Clock::now();
    if (tries_ == 64) until_ = now + MOST;
    return now < until_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds MOST{100};

  Clock::time_point until_{};
  unsigned tries_ = 0;
};

// Parts that threads take from a counter, all of which must have ended before anything that follows. It waits for
// those that were begun only: who waits has found none that is left.
class Phase {
 public:
  void end_part(uint32_t of);  // one more of `of` has ended
  void wait(uint32_t parts);

 private:
  Word ended_{0}, sleeping_{0};
};
