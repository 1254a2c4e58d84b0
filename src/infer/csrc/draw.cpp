// A token of each row of logits: the most probable one, or one that is drawn with temperature, top-p and min-p, as
// runner/sampler.py says it.
//
// A row of a vocabulary stays in its core's cache from the logits to the token; its result depends on that row
// alone, and sums are made in one order.

#include "draw.h"

#include "isa/dispatch.h"
#include "threads.h"

namespace {

using sampling::BLOCK;

struct Drawing {
  const float *rows, *tops;  // tops: null where they are not known
  long stride, n, num_tops;
  const DrawRow* wanted;
  long count;
  int64_t* tokens;
  std::atomic<long> next{0};
};

int64_t sample_row(const float* row, long n, const DrawRow& wanted, float* weights) {
  double* blocks = (double*)(weights + n);
  const float top = best_isa().find_top(row, n, blocks);
  if (!std::isfinite(top)) return -1;
  if (wanted.temperature > 0) return best_isa().draw(row, n, top, wanted, weights, blocks);
  const long begin = BLOCK * (std::find(blocks, blocks + ceil_div(n, BLOCK), top) - blocks);
  return std::find(row + begin, row + n, top) - row;
}

int64_t draw_row(const Drawing& d, const DrawRow& wanted, float* weights) {
  const float* tops = d.tops + wanted.row * d.num_tops;
  const float top = *std::max_element(tops, tops + d.num_tops);
  if (top == -INFINITY) return 0;  // where nothing is allowed nothing can be drawn; the caller says so
  return best_isa().draw(d.rows + wanted.row * d.stride, d.n, top, wanted, weights, (double*)(weights + d.n));
}

void draw_rows(void* data) {
  static thread_local ThreadMemory memory;
  Drawing& d = *(Drawing*)data;
  float* weights = (float*)memory.reserve(4 * d.n + 8 * ceil_div(d.n, BLOCK));
  for (long i; (i = d.next++) < d.count;) {
    const DrawRow& wanted = d.wanted[i];
    d.tokens[i] =
        d.tops ? draw_row(d, wanted, weights) : sample_row(d.rows + wanted.row * d.stride, d.n, wanted, weights);
  }
}

}  // namespace

extern "C" {

void infer_draw(const float* rows, const float* tops, long stride, long n, long num_tops, const DrawRow* wanted,
                long count, int64_t* tokens, int threads) {
  Drawing drawing{rows, tops, stride, n, num_tops, wanted, count, tokens};
  run_threads(draw_rows, &drawing, (int)std::min<long>(threads, count));
}

void infer_sample(const float* rows, long stride, long n, const DrawRow* wanted, long count, int64_t* tokens,
                  int threads) {
  Drawing drawing{rows, nullptr, stride, n, 0, wanted, count, tokens};
  run_threads(draw_rows, &drawing, (int)std::min<long>(threads, count));
}

}  // extern "C"
