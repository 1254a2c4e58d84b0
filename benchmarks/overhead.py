"""The time that scheduling takes in a step: `python benchmarks/overhead.py`.

The steps are decode only, over a runner that computes nothing. The table has microseconds for each
sequence and step: of `schedule`, of `commit` and of a whole `EngineCore.step`, for several numbers
of sequences and two lengths of context, with which the time must not grow. A further line is
`match` for a long cached prompt. `--follow` reports the pages of the prefix index, too, as where
several engines are routed to. Numbers are medians over the steps of one run; page faults and
garbage collection are included.
"""

from __future__ import annotations

import argparse
import statistics
import time

from infer.config import SchedulerConfig
from infer.engine.core import EngineCore
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.schedule.sequence import Plan, Sampled
from infer.types import Request, SamplingParams

PAGE_SIZE = 16
STEPS = 200


class NullRunner:
    """A runner that samples the same token for every sequence."""

    def execute(self, plan: Plan) -> list[Sampled]:
        """One result for each chunk that samples."""
        return [Sampled(7) for chunk in plan if chunk.samples]


def decoding_core(num_sequences: int, num_context: int, is_followed: bool) -> EngineCore:
    """A core whose sequences are all past their prompts of about `num_context` tokens."""
    num_pages = num_sequences * (num_context + 4 * STEPS) // PAGE_SIZE + num_sequences + 1
    config = SchedulerConfig(
        max_batch_size=num_sequences, max_num_batched_tokens=1_000_000, max_seq_len=100_000
    )
    scheduler = Scheduler(config, PageAllocator(num_pages, PAGE_SIZE), time.monotonic)
    core = EngineCore(scheduler, NullRunner())
    if is_followed:
        core.follow_pages()
    for i in range(num_sequences):
        prompt = tuple((i + 1) * p % 1009 for p in range(num_context))
        core.add(Request(f"r{i}", prompt, SamplingParams(), seed=0, max_tokens=3 * STEPS))
    while any(s.num_output < 2 for s in scheduler.running) or scheduler.waiting:
        core.step()
    return core


def microseconds(
    num_sequences: int, num_context: int, is_followed: bool
) -> tuple[float, float, float]:
    """Medians of schedule, commit and step, a sequence."""
    core = decoding_core(num_sequences, num_context, is_followed)
    scheduler, runner = core.scheduler, core.runner
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    for _ in range(STEPS):
        before = time.perf_counter_ns()
        plan = scheduler.schedule()
        planned = time.perf_counter_ns()
        sampled = runner.execute(plan)
        executed = time.perf_counter_ns()
        scheduler.commit(scheduler.advance(plan), sampled)
        committed = time.perf_counter_ns()
        core.step()
        stepped = time.perf_counter_ns()
        for part, spent in zip(
            parts, (planned - before, committed - executed, stepped - committed), strict=True
        ):
            part.append(spent)
        assert len(plan) == num_sequences
    schedule, commit, step = (statistics.median(part) / 1000 / num_sequences for part in parts)
    return schedule, commit, step


def match_microseconds(num_tokens: int) -> float:
    """Median of a look-up of a prompt that is wholly in the cache, and of giving it back."""
    allocator = PageAllocator(2 * num_tokens // PAGE_SIZE, PAGE_SIZE)
    tokens = [p * 31 % 50_021 for p in range(num_tokens + 1)]
    table = allocator.match(tokens)
    allocator.grow(table, len(tokens))
    allocator.commit(table, tokens, num_tokens)
    allocator.release(table)
    times = []
    for _ in range(STEPS):
        before = time.perf_counter_ns()
        table = allocator.match(tokens)
        times.append(time.perf_counter_ns() - before)
        assert len(table.pages) * PAGE_SIZE == num_tokens
        allocator.release(table)
    return statistics.median(times) / 1000


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--follow", action="store_true", help="report the prefix index's pages")
    is_followed = parser.parse_args().follow
    print("| sequences | context | schedule µs | commit µs | both | core.step µs |")
    print("|---|---|---|---|---|---|")
    for num_sequences in (1, 8, 32, 128):
        for num_context in (200, 2000):
            schedule, commit, step = microseconds(num_sequences, num_context, is_followed)
            print(
                f"| {num_sequences} | {num_context} | {schedule:.2f} | {commit:.2f}"
                f" | {schedule + commit:.2f} | {step:.2f} |"
            )
    print(f"\nmatch of 1,024 cached tokens: {match_microseconds(1024):.1f} µs")


if __name__ == "__main__":
    main()
