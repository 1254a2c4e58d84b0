// Head norms and rotary embedding of heads in bfloat16: rotary_heads.h has the code, attention calls it for
// queries and keys when it first reads them.
#pragma once

#include "common.h"

namespace rotary {

struct Rotation {
  const float *cos, *sin;  // [tokens, dim / 2]; null: no rotation
  const float* norms[2];   // of q and of k, [dim]; null: none
  const float* factor;     // of rotated queries, [dim]; null: none
  const float* growth;     // of rotated queries, [tokens]; null: none
  long dim;
  float eps;
};

// `heads` heads of a token, one behind the other; which: 0 = q, 1 = k; `to` may be `from`.
using RotateHeads = void (*)(const Rotation& rotation, const uint16_t* from, uint16_t* to, long heads, long token,
                             int which);

}  // namespace rotary
