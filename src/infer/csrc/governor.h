// How many threads a team uses while other processes need the cores.
//
// Some calls are measured: how long they took, how long their threads had a core meanwhile, and how long they were kept
// from one. As long as they have their cores nothing happens. Else fewer threads are tried in turns with all of them,
// and stay if about as much is computed in the same time: nobody waits then for a thread that has lost its core, and
// the others have theirs. More are tried again later, so a thread comes back when its core does.
#pragma once

#include "common.h"

struct Measured {     // of some calls, in nanoseconds
  int64_t wall = 0;   // from beginning to end
  int64_t cores = 0;  // that threads had a core, added up
  int64_t lost = 0;   // that they were kept from one

  void add(const Measured& other) { wall += other.wall, cores += other.cores, lost += other.lost; }
  double parallel() const { return (double)cores / (double)std::max<int64_t>(wall, 1); }
  double taken() const { return (double)lost / (double)std::max<int64_t>(lost + cores, 1); }
};

class Governor {
 public:
  // How many of the threads that a call wants it gets; more than processors only take turns.
  int limit(int wanted, int processors) {
    most_ = std::min(std::max(most_, wanted), processors);
    if (!threads_ || threads_ > most_) threads_ = most_;
    return std::min(wanted, threads_);
  }

  // Whether the next call is to be measured, and for how many calls it stands.
  int stride() const { return is_trying() ? 4 : 32; }
  bool measures_next() { return ++calls_ % (unsigned)stride() == 0; }

  // A call of some threads that ended at `now`, in nanoseconds.
  void add(int threads, const Measured& call, int64_t now) {
    if (threads != threads_) return;  // it wanted fewer
    if (now - last_ > GAP) window_ = {}, num_measured_ = 0;
    if (!num_measured_++) window_began_ = last_ = now;
    last_ = now;
    window_.add(call);
    if (num_measured_ < LEAST_MEASURED || now - window_began_ < WINDOW) return;
    if (is_trying())
      end_of_turn(now);
    else
      look(now);
    window_ = {}, num_measured_ = 0;
  }

 private:
  static constexpr int64_t MS = 1000000, WINDOW = 40 * MS, GAP = 500 * MS;
  static constexpr int64_t FIRST_PAUSE = 300 * MS, CALM_PAUSE = 2000 * MS, LONGEST_PAUSE = 8000 * MS;
  static constexpr int LEAST_MEASURED = 12, NUM_TURNS = 4;
  static constexpr double TAKEN = 0.1;   // of the threads' time: others need the cores
  static constexpr double ENOUGH = 0.9;  // of what more threads compute

  bool is_trying() const { return turns_left_ > 0; }

  void look(int64_t now) {
    const bool contended = window_.taken() > TAKEN;
    if (!contended && threads_ == most_) pause_ = FIRST_PAUSE, next_trial_ = now;
    if (!contended) next_trial_ = std::min(next_trial_, last_trial_ + CALM_PAUSE);
    if (now < next_trial_) return;
    const bool can_be_fewer = contended && threads_ > 1, can_be_more = threads_ < most_;
    if (!can_be_fewer && !can_be_more) return;
    upwards_ = can_be_more && (!can_be_fewer || !upwards_);
    candidates_[0] = threads_;
    candidates_[1] = upwards_ ? std::min(2 * threads_, most_) : (threads_ + 1) / 2;
    results_[0] = results_[1] = {};
    turns_left_ = NUM_TURNS;
    threads_ = candidates_[turns_left_ % 2];
  }

  void end_of_turn(int64_t now) {
    results_[turns_left_ % 2].add(window_);
    threads_ = candidates_[--turns_left_ % 2];
    if (is_trying()) return;
    const int more = upwards_ ? 1 : 0, fewer = 1 - more;
    const bool have_cores = results_[more].taken() < TAKEN / 2;
    const bool is_enough = results_[fewer].parallel() >= ENOUGH * results_[more].parallel();
    threads_ = candidates_[!have_cores && is_enough ? fewer : more];
    pause_ = threads_ == candidates_[0] ? std::min(2 * pause_, LONGEST_PAUSE) : FIRST_PAUSE;
    last_trial_ = now, next_trial_ = now + pause_;
  }

  int most_ = 0, threads_ = 0;
  unsigned calls_ = 0;
  Measured window_;
  int num_measured_ = 0;
  int64_t window_began_ = 0, last_ = 0;
  // A trial takes turns between two numbers of threads.
  int turns_left_ = 0, candidates_[2] = {};
  bool upwards_ = false;
  Measured results_[2];
  int64_t pause_ = FIRST_PAUSE, last_trial_ = 0, next_trial_ = 0;
};
