// The teams of threads that execute calls: each thread that calls has one, which ends with it.
//
// A call is a number of tickets. Members that are awake take one each and begin; the first thread that finds no part
// left takes the others back, so nobody waits for a member that has not begun: it may be asleep, or another process
// has its core. Who waits for a call, or for its end, looks for a moment, because the calls of a step follow each other
// within microseconds, and sleeps after that.
//
// Not OpenMP: its threads must all have been there before a call ends, and look for milliseconds. Beside one other
// busy process two of them were 4 to 48 times slower than one.

#include "threads.h"

#include <pthread.h>
#include <time.h>

#include <memory>
#include <system_error>
#include <thread>

#include "governor.h"

namespace {

constexpr int MOST_THREADS = 4096;
constexpr uint32_t TICKET = 1 << 16;  // of a call's state; below it: how many members are inside

bool has_tickets(uint32_t state) { return state >= TICKET; }
uint32_t inside(uint32_t state) { return state % TICKET; }

// Of the process; each call that was measured stands for some.
std::atomic<int64_t> cores_ns{0}, lost_ns{0};
std::atomic<int> last_limit{0};
std::atomic<bool> is_governed{true};

int64_t nanoseconds(clockid_t clock) {
  timespec at{};
  clock_gettime(clock, &at);
  return at.tv_sec * 1000000000ll + at.tv_nsec;
}

class Team {
 public:
  ~Team() {
    ending_.store(true);
    wake_members(INT32_MAX);
    for (std::thread& member : members_) member.join();
  }

  void run(void (*body)(void*), void* data, int threads) noexcept {
    const bool governed = is_governed.load(std::memory_order_relaxed);
    const int limit = governed ? governor_.limit(threads, processors_) : threads;
    if (!governor_.measures_next()) return call(body, data, limit);
    const int stride = governor_.stride();
    is_measured_ = true, cores_ = lost_ = 0;
    const int64_t began = nanoseconds(CLOCK_MONOTONIC);
    call(body, data, limit);
    const int64_t now = nanoseconds(CLOCK_MONOTONIC);
    is_measured_ = false;
    const Measured measured{now - began, cores_, lost_};
    cores_ns.fetch_add(measured.cores * stride);
    lost_ns.fetch_add(measured.lost * stride);
    last_limit.store(limit);
    if (governed) governor_.add(limit, measured, now);
  }

  void expect(int threads) {
    const int limit = is_governed.load(std::memory_order_relaxed) ? governor_.limit(threads, processors_) : threads;
    if (limit > 1 && asleep_.load()) wake_members(std::min(limit - 1, 2));
  }

 private:
  void call(void (*body)(void*), void* data, int threads) {
    if (threads > 1) {
      grow(threads - 1);
      body_ = body, data_ = data;  // nobody is inside
      state_.store(TICKET * (uint32_t)std::min<size_t>((size_t)threads - 1, members_.size()));
      wake_some();
    }
    execute(body, data);
    if (threads > 1 && inside(state_.fetch_and(TICKET - 1))) await_members();
  }

  void execute(void (*body)(void*), void* data) {
    if (!is_measured_) return body(data);
    const int64_t began = nanoseconds(CLOCK_MONOTONIC), had = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    body(data);
    const int64_t cores = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - had;
    cores_ += cores;
    lost_ += std::max<int64_t>(nanoseconds(CLOCK_MONOTONIC) - began - cores, 0);
  }

  void grow(int wanted) {
    try {
      while ((int)members_.size() < std::min(wanted, MOST_THREADS)) members_.emplace_back([this] { live(); });
    } catch (const std::system_error&) {  // the system gives no more threads
    }
  }

  void await_members() {
    for (Looking looking; inside(state_.load());) {
      if (looking.again()) continue;
      caller_sleeps_.store(1);
      if (inside(state_.load())) sleep_while(caller_sleeps_, 1);
    }
    caller_sleeps_.store(0);
  }

  // Two threads, which wake others in turn: to wake one takes microseconds.
  void wake_some() {
    if (asleep_.load() && has_tickets(state_.load())) wake_members(2);
  }
  void wake_members(int count) {
    woken_.fetch_add(1);
    wake(woken_, count);
  }

  void live() noexcept {
    while (take_ticket()) {
      wake_some();
      execute(body_, data_);
      leave();
    }
  }

  // Returns false when the team ends.
  bool take_ticket() {
    for (Looking looking; !ending_.load();) {
      if (try_to_take_ticket()) return true;
      if (looking.again()) continue;
      const uint32_t woken = woken_.load();
      asleep_.fetch_add(1);
      if (!has_tickets(state_.load()) && !ending_.load()) sleep_while(woken_, woken);
      asleep_.fetch_sub(1);
      looking = {};
    }
    return false;
  }
  bool try_to_take_ticket() {
    uint32_t state = state_.load();
    while (has_tickets(state))
      if (state_.compare_exchange_weak(state, state - TICKET + 1)) return true;
    return false;
  }

  void leave() {  // no part is left
    uint32_t state = state_.load();
    while (!state_.compare_exchange_weak(state, inside(state) - 1)) continue;
    if (inside(state) == 1 && caller_sleeps_.exchange(0)) wake(caller_sleeps_, 1);
  }

  // Written by the caller while nobody is inside.
  void (*body_)(void*) = nullptr;
  void* data_ = nullptr;
  bool is_measured_ = false;

  alignas(64) std::atomic<uint32_t> state_{0};  // tickets and members inside
  alignas(64) Word woken_{0};                   // on which members sleep
  std::atomic<int> asleep_{0};
  Word caller_sleeps_{0};
  std::atomic<bool> ending_{false};
  std::atomic<int64_t> cores_{0}, lost_{0};  // of a call that is measured
  Governor governor_;
  const int processors_ = std::max(1, (int)std::thread::hardware_concurrency());
  std::vector<std::thread> members_;
};

thread_local std::unique_ptr<Team> team;
thread_local int wanted_threads = 0;

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
thread_local Parallel openmp = nullptr;

// In the child of a fork the threads do not exist, so nothing can be said to them.
void forget_team() { (void)team.release(); }

}  // namespace

extern "C" {

void infer_set_threads(int threads) { wanted_threads = threads; }
int infer_threads(void) { return wanted_threads; }

void infer_use_openmp(void* parallel) { openmp = (Parallel)parallel; }

void infer_govern_threads(int wanted) { is_governed.store(wanted != 0); }

int infer_company(int64_t* numbers) {
  numbers[0] = cores_ns.load(), numbers[1] = lost_ns.load();
  return last_limit.load();
}

}  // extern "C"

void expect_threads(int threads) {
  if (team && threads > 1 && !openmp) team->expect(threads);
}

void run_threads(void (*body)(void*), void* data, int threads) {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_team);
  (void)registered;
  if (threads <= 1) return body(data);
  if (openmp) return openmp(body, data, (unsigned)threads, 0);
  if (!team) team = std::make_unique<Team>();
  team->run(body, data, threads);
}
