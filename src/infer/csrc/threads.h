// Threads for a call: a team of this library's own.
#pragma once

#include "waiting.h"

// Have up to `threads` threads execute body(data), of which this is one; returns when all that have begun have ended.
// A body takes parts from a counter until none is left, so it is complete with any number of threads. It must not
// throw.
void run_threads(void (*body)(void*), void* data, int threads);

// How many threads a call with many rows may have where one with few has `threads`: those on slower cores, too.
int threads_of_many_rows(int threads);

// Says that such a call comes within microseconds: members that sleep wake up meanwhile.
void expect_threads(int threads);
