"""The time that scheduling takes in a step: `python benchmarks/overhead.py`.

The steps are decode only, over a runner that computes nothing. The table has microseconds for each
sequence and step: of `schedule`, of `commit` and of a whole `EngineCore.step`, for several numbers
of sequences and two lengths of context, with which the time must not grow. A further line is
`match` for a long cached prompt. `--follow` reports the pages of the prefix index, too, as where
several engines are routed to. `--ahead` measures `EngineCore.step` over the runner for GPUs, one
step ahead, with all that the host does for a step but starting it; it needs Triton, and no GPU.
`--steps` measures whole steps of an engine on this machine's kernels: how much of their time is
outside of the kernels, one step ahead and not (`overhead_steps.py --help` has its options).
Numbers are medians over the steps of one run; page faults and garbage collection are included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any, cast

import overhead_steps
import torch

from infer.config import SchedulerConfig
from infer.engine.core import EngineCore, Runner
from infer.models.model import Model
from infer.runner.grammar_masks import Restrictions
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.schedule.sequence import Plan, Sampled
from infer.types import Request, SamplingParams

PAGE_SIZE = 16
STEPS = 200
AHEAD_COUNTS = (1, 32, 256)
BUDGET = 65_536
"""Number of tokens that a step may have."""


class NullRunner:
    """A runner that samples the same token for every sequence."""

    def execute(self, plan: Plan) -> list[Sampled]:
        """One result for each chunk that samples."""
        return [Sampled(7) for chunk in plan if chunk.samples]


def decoding_core(
    num_sequences: int, num_context: int, is_followed: bool, runner: Runner | None = None
) -> EngineCore:
    """A core whose sequences are all past their prompts of about `num_context` tokens."""
    num_pages = num_sequences * (num_context + 4 * STEPS) // PAGE_SIZE + num_sequences + 1
    config = SchedulerConfig(
        max_batch_size=num_sequences, max_num_batched_tokens=BUDGET, max_seq_len=100_000
    )
    scheduler = Scheduler(config, PageAllocator(num_pages, PAGE_SIZE), time.monotonic)
    core = EngineCore(scheduler, NullRunner() if runner is None else runner)
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


def ahead_microseconds(num_sequences: int, num_context: int) -> float:
    """Median of a step of `DeviceRunner`, a sequence, with the shape of Qwen3 0.6B on an H100."""
    from infer.attention.triton import TritonBackend
    from infer.engine.loop import freeze_heap
    from infer.runner.device_runner import DeviceRunner
    from infer.runner.graphs import Graphs

    class NothingStarted(Graphs):
        def run(self, key: Hashable, compute: Callable[[], None]) -> None:
            pass

    cache = torch.zeros(1, PAGE_SIZE, 8, 128, dtype=torch.bfloat16)
    backend = TritonBackend([cache], [cache], num_heads=16, scale=1.0)
    backend.num_programs, backend.max_partial_rows = 4 * 132, 16_131
    runner = DeviceRunner(
        cast(Model, SimpleNamespace(config=SimpleNamespace(vocab_size=151_936))),
        backend,
        Restrictions(lambda: cast(Any, None)),
        (cache, cache),
        torch.device("cpu"),
        max_tokens=BUDGET,
        max_sequences=num_sequences,
        max_seq_len=num_context + 4 * STEPS,
        graphs=NothingStarted(lambda compute: compute),
    )
    core = decoding_core(num_sequences, num_context, False, runner)
    freeze_heap()  # as an engine's process does
    times = []
    for _ in range(STEPS):
        before = time.perf_counter_ns()
        core.step()
        times.append(time.perf_counter_ns() - before)
    gc.unfreeze()  # else Triton's library complains at the end of what was never freed
    return statistics.median(times) / 1000 / num_sequences


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
    parser.add_argument("--ahead", action="store_true", help="of the runner for GPUs alone")
    parser.add_argument("--steps", action="store_true", help="of an engine on CPUs alone")
    options, rest = parser.parse_known_args()
    if options.steps:
        overhead_steps.main(rest)
        return
    if rest:
        parser.error(f"unknown: {rest}")
    if options.ahead:
        print("| sequences | context | core.step µs |")
        print("|---|---|---|")
        for num_sequences in AHEAD_COUNTS:
            step = ahead_microseconds(num_sequences, 512)
            print(f"| {num_sequences} | 512 | {step:.2f} |")
        return
    is_followed = options.follow
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
