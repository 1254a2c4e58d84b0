// Head norms and rotary embedding of heads in bfloat16: rotary.cpp has the code, attention.cpp calls
// it for queries and keys when it first reads them.
#pragma once

#include <cstdint>

struct Rotation {
  const float *cos, *sin;  // [tokens, dim / 2]
  const float* norms[2];   // of q and of k, [dim]; null: none
  long dim;
  float eps;
};

// `heads` heads of a token, one behind the other; which: 0 = q, 1 = k; `to` may be `from`.
void turn_heads(const Rotation& rotation, const uint16_t* from, uint16_t* to, long heads, long token,
                int which);
