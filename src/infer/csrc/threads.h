// Threads for a call: a team of this library's own.
#pragma once

#include <vector>

#include "waiting.h"

// Have up to `threads` threads execute body(data), of which this is one; returns when all that have begun have ended.
// A body takes parts from a counter until none is left, so it is complete with any number of threads. It must not
// throw.
void run_threads(void (*body)(void*), void* data, int threads);

// How many threads a call with many rows may have where one with few has `threads`: those on slower cores, too.
int threads_of_many_rows(int threads);

// A NUMA node: its number in the system, and how many threads of a team live there.
struct NodeThreads {
  int number, threads;
};
// The nodes of the threads of teams that begin from now on; one of number -1 where nothing is said of them.
std::vector<NodeThreads> nodes_of_threads();

// The index among them of the one on which this thread lives.
int own_node();

// Have whole pages of memory come from a node when they are first written, if it has some left. Best effort: a
// container may forbid it.
void prefer_node(char* from, size_t bytes, int number);

// Says that such a call comes within microseconds: members that sleep wake up meanwhile.
void expect_threads(int threads);
