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
#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "governor.h"
#include "parts.h"

namespace {

constexpr int MOST_THREADS = 4096;
constexpr uint32_t TICKET = 1 << 16;  // of a call's state; below it: how many members are inside

bool has_tickets(uint32_t state) { return state >= TICKET; }
uint32_t inside(uint32_t state) { return state % TICKET; }

// Of the process; each call that was measured stands for some.
std::atomic<int64_t> cores_ns{0}, lost_ns{0};
std::atomic<int> last_limit{0};
std::atomic<bool> is_governed{true};

// Where the threads of a team live.
struct Places {
  std::vector<std::vector<int>> cpus;  // of each thread
  int num_fast = INT32_MAX;            // threads behind them are on slower cores
  std::vector<int> node_of;            // of each thread: index among the nodes
  std::vector<NodeThreads> nodes{{-1, 1}};

  int node(int thread) const { return thread < (int)node_of.size() ? node_of[(size_t)thread] : 0; }

  // Best effort: a container may forbid it, and a processor may be taken away.
  void stay(int thread) const {
#if defined(__linux__)
    if (thread >= (int)cpus.size() || cpus[(size_t)thread].empty()) return;
    const std::vector<int>& own = cpus[(size_t)thread];
    const int most = *std::max_element(own.begin(), own.end()) + 1;
    cpu_set_t* set = CPU_ALLOC(most);
    if (!set) return;
    CPU_ZERO_S(CPU_ALLOC_SIZE(most), set);
    for (int cpu : own) CPU_SET_S(cpu, CPU_ALLOC_SIZE(most), set);
    pthread_setaffinity_np(pthread_self(), CPU_ALLOC_SIZE(most), set);
    CPU_FREE(set);
#else
    (void)thread;
#endif
  }
};
std::mutex places_mutex;
std::shared_ptr<const Places> places = std::make_shared<Places>();  // of teams that begin
std::atomic<int> num_slow{0};
thread_local int node_of_thread = 0;

std::shared_ptr<const Places> places_now() {
  const std::lock_guard<std::mutex> lock(places_mutex);
  return places;
}

// The index of a node, which is new or has one more thread, if it is on a fast core.
int index_of(std::vector<NodeThreads>& nodes, int number, bool is_fast) {
  size_t i = 0;
  while (i < nodes.size() && nodes[i].number != number) ++i;
  if (i == MOST_NODES) return MOST_NODES - 1;
  if (i == nodes.size()) nodes.push_back({number, 0});
  nodes[i].threads += is_fast;
  return (int)i;
}

int64_t nanoseconds(clockid_t clock) {
  timespec at{};
  clock_gettime(clock, &at);
  return at.tv_sec * 1000000000ll + at.tv_nsec;
}

class Team {
 public:
  Team() { node_of_thread = places_->node(0); }
  ~Team() {
    ending_.store(true);
    for (Group& group : groups_) group.wake_members(INT32_MAX);
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
    if (limit > 1) groups_[0].wake_some(std::min(limit - 1, 2));
  }

 private:
  void call(void (*body)(void*), void* data, int threads) {
    if (threads > 1) {
      grow(threads - 1);
      body_ = body, data_ = data;  // nobody is inside
      wanted_.store(threads);
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
      while ((int)members_.size() < std::min(wanted, MOST_THREADS)) {
        const int thread = (int)members_.size() + 1;
        members_.emplace_back([this, thread] { live(thread); });
      }
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

  // Members that are woken together.
  struct Group {
    alignas(64) Word woken{0};  // on which they sleep
    std::atomic<int> asleep{0};

    void wake_some(int count) {
      if (asleep.load()) wake_members(count);
    }
    void wake_members(int count) {
      woken.fetch_add(1);
      wake(woken, count);
    }
  };

  // Two threads, which wake others in turn: to wake one takes microseconds.
  void wake_some() {
    if (!has_tickets(state_.load())) return;
    groups_[0].wake_some(2);
    if (wanted_.load() > places_->num_fast) groups_[1].wake_some(2);
  }

  void live(int thread) noexcept {
    places_->stay(thread);
    node_of_thread = places_->node(thread);
    while (take_ticket(thread)) {
      wake_some();
      execute(body_, data_);
      leave();
    }
  }

  // Returns false when the team ends.
  bool take_ticket(int thread) {
    Group& group = groups_[thread >= places_->num_fast];
    for (Looking looking; !ending_.load();) {
      if (try_to_take_ticket(thread)) return true;
      if (looking.again()) continue;
      const uint32_t woken = group.woken.load();
      group.asleep.fetch_add(1);
      if (!may_begin(thread, state_.load()) && !ending_.load()) sleep_while(group.woken, woken);
      group.asleep.fetch_sub(1);
      looking = {};
    }
    return false;
  }
  // A call with few threads leaves those on slower cores asleep.
  bool may_begin(int thread, uint32_t state) const {
    return has_tickets(state) && (thread < places_->num_fast || thread < wanted_.load());
  }
  bool try_to_take_ticket(int thread) {
    uint32_t state = state_.load();
    while (may_begin(thread, state))
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
  std::atomic<int> wanted_{0};                  // threads of the call
  Group groups_[2];                             // on fast cores, on slower ones
  const std::shared_ptr<const Places> places_ = places_now();
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

void infer_pin_threads(const int* cpus, const int* ends, const int* nodes, int num_threads, int num_fast) {
  auto wanted = std::make_shared<Places>();
  if (nodes && num_threads) wanted->nodes.clear();
  for (int i = 0; nodes && i < num_threads; ++i)
    wanted->node_of.push_back(index_of(wanted->nodes, nodes[i], i < num_fast));
  for (int i = 0; i < num_threads; ++i) wanted->cpus.emplace_back(cpus + (i ? ends[i - 1] : 0), cpus + ends[i]);
  if (num_threads) wanted->num_fast = num_fast;
  num_slow.store(num_threads ? std::max(num_threads - num_fast, 0) : 0);
  const std::lock_guard<std::mutex> lock(places_mutex);
  places = std::move(wanted);
}

void infer_prefer_node(void* from, long bytes, int node) { prefer_node((char*)from, (size_t)bytes, node); }

void infer_use_openmp(void* parallel) { openmp = (Parallel)parallel; }

void infer_govern_threads(int wanted) { is_governed.store(wanted != 0); }

int infer_company(int64_t* numbers) {
  numbers[0] = cores_ns.load(), numbers[1] = lost_ns.load();
  return last_limit.load();
}

}  // extern "C"

std::vector<NodeThreads> nodes_of_threads() { return places_now()->nodes; }
int own_node() { return node_of_thread; }

void prefer_node(char* from, size_t bytes, int number) {
#if defined(__linux__)
  constexpr size_t BITS = 8 * sizeof(unsigned long);
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), skipped = (size_t)(-(intptr_t)from) % page;
  if (number < 0 || bytes < skipped + page) return;
  std::vector<unsigned long> mask((size_t)number / BITS + 1);
  mask[(size_t)number / BITS] = 1ul << (size_t)number % BITS;
  syscall(SYS_mbind, from + skipped, (bytes - skipped) / page * page, MPOL_PREFERRED, mask.data(),
          mask.size() * BITS + 1, 0u);
#else
  (void)from, (void)bytes, (void)number;
#endif
}

int threads_of_many_rows(int threads) { return threads > 1 && !openmp ? threads + num_slow.load() : threads; }

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
