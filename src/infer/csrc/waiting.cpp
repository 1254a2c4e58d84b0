// Sleeping on a word in memory: Linux's futex; elsewhere a condition variable for all words whose addresses have the
// same remainder.

#include "waiting.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <new>
#endif

#if defined(__linux__)

static_assert(sizeof(Word) == 4, "the kernel looks at four bytes");

void sleep_while(Word& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(Word& word, int count) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0); }

#else

namespace {

struct Bed {
  std::mutex lock;
  std::condition_variable woken;
};

constexpr size_t NUM_BEDS = 64;
Bed beds[NUM_BEDS];

Bed& bed_of(const Word& word) { return beds[(uintptr_t)&word / 64 % NUM_BEDS]; }

// In the child of a fork the locks' owners do not exist.
void make_new_beds() {
  for (Bed& bed : beds) new (&bed) Bed;
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, make_new_beds);

}  // namespace

void sleep_while(Word& word, uint32_t value) {
  Bed& bed = bed_of(word);
  std::unique_lock<std::mutex> held(bed.lock);
  if (word.load() == value) bed.woken.wait(held);
}

void wake(Word& word, int) {
  Bed& bed = bed_of(word);
  {
    std::lock_guard<std::mutex> held(bed.lock);
  }  // who has seen the old value sleeps by now
  bed.woken.notify_all();
}

#endif

void Phase::end_part(uint32_t of) {
  if (ended_.fetch_add(1) + 1 == of && sleeping_.load()) wake(ended_, INT32_MAX);
}

void Phase::wait(uint32_t parts) {
  for (Looking looking; ended_.load() < parts;) {
    if (looking.again()) continue;
    sleeping_.fetch_add(1);
    for (uint32_t ended; (ended = ended_.load()) < parts;) sleep_while(ended_, ended);
    return;
  }
}
