"""Continuous batching with nothing around it: scheduler, page allocator, a model of one line.

Three requests share two seats. The third gets its seat in the step after the first one has ended.
"""

import time
from collections.abc import Sequence

from infer.config import SchedulerConfig
from infer.engine.core import EngineCore
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.schedule.sequence import Plan, Sampled
from infer.types import Request, Sampling


class CountingModel:
    """Answers each token with the number after it."""

    def execute(self, plan: Plan) -> Sequence[Sampled]:
        """One token for each chunk that reaches the end of its sequence."""
        return [Sampled(chunk.sequence.tokens[-1] + 1) for chunk in plan if chunk.samples]


def main() -> None:
    """Print what each step computes and what it gives."""
    config = SchedulerConfig(max_batch_size=2, max_num_batched_tokens=16, max_seq_len=16)
    allocator = PageAllocator(num_pages=9, page_size=4)
    core = EngineCore(Scheduler(config, allocator, time.monotonic), CountingModel())
    for name, prompt, max_tokens in [("A", (10, 11), 2), ("B", (20, 21, 22), 3), ("C", (30,), 2)]:
        core.add(Request(name, prompt, Sampling(), seed=0, max_tokens=max_tokens))
    tick = 0
    while core.has_work:
        tick += 1
        for output in core.step():
            ended = f", ended: {output.finish_reason.value}" if output.finish_reason else ""
            print(f"tick {tick}: {output.request_id} gets {output.token_id}{ended}")
        print(f"        waiting {len(core.scheduler.waiting)}, free pages {allocator.num_free}")


if __name__ == "__main__":
    main()
