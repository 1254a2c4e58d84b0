// The teams of threads that execute calls where torch's OpenMP runtime cannot be reached: each thread that calls has
// one, which ends with it.
//
// A member waits for its next call actively for a moment, because the calls of a step follow each other within
// microseconds, and asleep after that. A call with fewer threads does not disturb the other members.

#include "threads.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>

namespace {

constexpr std::chrono::microseconds ACTIVE{200};  // how long a member looks for a call before it sleeps

class Member {
 public:
  explicit Member(std::atomic<int>& unfinished) : unfinished_(unfinished), thread_([this] { live(); }) {}
  ~Member() {
    call(nullptr, nullptr);
    thread_.join();
  }

  void call(void (*body)(void*), void* data) {  // without a body it ends
    body_ = body, data_ = data;
    if (state_.exchange(CALLED) == ASLEEP) {
      std::lock_guard<std::mutex> held(lock_);  // it waits by now, or has seen the call
      woken_.notify_one();
    }
  }

 private:
  enum State { FREE, CALLED, ASLEEP };

  void live() {
    for (await_call(); body_; await_call()) {
      body_(data_);
      state_.store(FREE);
      unfinished_.fetch_sub(1);
    }
  }

  void await_call() {
    const auto until = std::chrono::steady_clock::now() + ACTIVE;
    do {
      for (int i = 0; i < 64; ++i, relax())
        if (state_.load() == CALLED) return;
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> held(lock_);
    State expected = FREE;
    if (!state_.compare_exchange_strong(expected, ASLEEP)) return;  // it was called just now
    woken_.wait(held, [this] { return state_.load() == CALLED; });
  }

  void (*body_)(void*) = nullptr;
  void* data_ = nullptr;
  std::atomic<State> state_{FREE};
  std::mutex lock_;
  std::condition_variable woken_;
  std::atomic<int>& unfinished_;  // members that have not ended the present call
  std::thread thread_;            // the last: it uses the others
};

class Team {
 public:
  void run(void (*body)(void*), void* data, int threads) {
    grow(threads - 1);
    const int called = std::min<int>(threads - 1, (int)members_.size());
    unfinished_.store(called);
    for (int i = 0; i < called; ++i) members_[i]->call(body, data);
    body(data);
    for (Waiting waiting; unfinished_.load() > 0;) waiting.once();
  }

 private:
  void grow(int wanted) {
    try {
      while ((int)members_.size() < wanted) members_.push_back(std::make_unique<Member>(unfinished_));
    } catch (const std::system_error&) {  // the system gives no more threads
    }
  }

  std::atomic<int> unfinished_{0};
  std::vector<std::unique_ptr<Member>> members_;
};

thread_local std::unique_ptr<Team> team;

// In the child of a fork the threads do not exist, so nothing can be said to them.
void forget_team() { (void)team.release(); }

}  // namespace

void run_threads(Parallel parallel, void (*body)(void*), void* data, int threads) {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_team);
  (void)registered;
  if (threads <= 1) return body(data);
  if (parallel) return parallel(body, data, (unsigned)threads, 0);
  if (!team) team = std::make_unique<Team>();
  team->run(body, data, threads);
}
