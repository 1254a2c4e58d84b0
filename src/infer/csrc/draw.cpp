// A token of each row of logits, drawn: temperature, top-p and min-p, as runner/sampler.py says it.
//
// A row of a vocabulary stays in its core's cache from the logits to the token; its result depends on that row
// alone, and sums are made in one order.

#include "draw.h"

#include "isa/dispatch.h"
#include "threads.h"

namespace {

using sampling::BLOCK;

struct Drawing {
  const float *rows, *tops;
  long stride, n, num_tops;
  const DrawRow* wanted;
  long count;
  int64_t* tokens;
  std::atomic<long> next{0};
};

void draw_rows(void* data) {
  const sampling::DrawToken draw = best_isa().draw;
  static thread_local ThreadMemory memory;
  Drawing& d = *(Drawing*)data;
  float* weights = (float*)memory.reserve(4 * d.n + 8 * ceil_div(d.n, BLOCK));
  for (long i; (i = d.next++) < d.count;) {
    const DrawRow& wanted = d.wanted[i];
    const float* tops = d.tops + wanted.row * d.num_tops;
    const float top = *std::max_element(tops, tops + d.num_tops);
    // Where nothing is allowed nothing can be drawn; the caller says so.
    d.tokens[i] = top == -INFINITY
                      ? 0
                      : draw(d.rows + wanted.row * d.stride, d.n, top, wanted, weights, (double*)(weights + d.n));
  }
}

}  // namespace

extern "C" {

void infer_draw(const float* rows, const float* tops, long stride, long n, long num_tops, const DrawRow* wanted,
                long count, int64_t* tokens, int threads) {
  Drawing drawing{rows, tops, stride, n, num_tops, wanted, count, tokens};
  run_threads(draw_rows, &drawing, (int)std::min<long>(threads, count));
}

}  // extern "C"
