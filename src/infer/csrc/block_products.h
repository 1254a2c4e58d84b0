// Products of blocks as one instruction set gives them to another, which has the same on vectors.
#pragma once

#include "linear.h"

namespace linear {

struct PrefetchStream {  // asks for a line 16 times a step and goes on by so many in all: of 32, every other one
  const char* next;
  long lines;
};

struct BlockRows {  // a part of a group of rows, from a step on
  const char* bytes;
  long step_bytes;
  const RowGroup* groups;  // of the first row; two each, row after row
  long step_groups;
};

// Two streams of lines to ask for, into the L2 cache: the L1 cache has few places for lines that are under way, and
// blocks take longer than a line needs from the L2 (one row of Q8_0 reads at 0.79 of the read rate, not at 0.72).
struct Ahead {
  PrefetchStream one, two;

  INLINE void quarter() {  // of a step
    quarter_of(one);
    quarter_of(two);
  }
  INLINE static void quarter_of(PrefetchStream& stream) {
    const char* end = stream.next + stream.lines * 16;
    for (const char* line = stream.next; line < end; line += 64) __builtin_prefetch(line, 0, 2);
    stream.next = end;
  }
};

using MultiplyBlocks = void (*)(BlockRows rows, const char* b, long column, long steps, float* sums, bool first,
                                Ahead ahead);

struct BlockProducts {
  MultiplyBlocks (*product)(BlockType type, int rows, bool unpacked);
  void (*unpack)(BlockType type, const char* from, long steps, char* to);
};

}  // namespace linear
