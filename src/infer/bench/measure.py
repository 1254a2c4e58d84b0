"""`measure`: warms up, runs a workload as often as asked, and makes the JSON document.

`BenchOptions` has the options of a measurement; the command line is made from it. The document has
the workload with all its options, the machine and the versions, the summary of the run with the
median throughput, and every run with a timeline of every request.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from infer.bench import results
from infer.bench.drive import Drive, Target
from infer.bench.workloads import WORKLOADS, Draw, Planned, resolve_options
from infer.config import MAX_SEED, PositiveInt, at_least, check_fields, option
from infer.errors import ConfigError
from infer.types.stats_summary import ServingStats

OF_WORKLOAD = (
    *("num_requests", "num_turns", "input_len", "output_len", "rate", "arrivals", "trace_file"),
)
"""The options that only some workloads have."""
MAX_PROMPT_TOKENS = 100_000_000
"""Maximum of the tokens of all prompts together, which are made before the measurement."""
MAX_REQUESTS = 1_000_000
Number = Annotated[int, Meta(ge=1, le=MAX_REQUESTS)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Milliseconds = Annotated[float, at_least(0)]
_SIZES = ("num_requests", "num_turns", "input_len")
_WARMUP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of a measurement. The constructor raises `ConfigError`."""

    workload: str = option("single", "Name of the workload; `infer bench --help` lists them.")
    num_requests: Number | None = option(None, "Requests (multi_turn: conversations).")
    num_turns: Number | None = option(None, "Turns of a conversation.")
    input_len: Tokens | None = option(None, "Tokens of a prompt.")
    output_len: Tokens | None = option(None, "Tokens of an answer (long_tail: their mean).")
    rate: Annotated[float, at_least(1e-6)] | None = option(None, "Open loop: requests a second.")
    arrivals: str | None = option(None, "With a rate: fixed or poisson.")
    trace_file: str | None = option(None, "The file of the workload trace.")
    concurrency: PositiveInt | None = option(None, "Closed loop: requests in flight, at most.")
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = option(0, "Equal seeds make equal requests.")
    warmup: Annotated[int, Meta(ge=0, le=MAX_REQUESTS)] = option(
        2, "Short requests before the first run, not measured."
    )
    repeat: Number = option(1, "Runs; the one with the median throughput is shown.")
    ignore_eos: bool = option(True, "Answers are as long as asked.")
    timeout_s: Annotated[float, at_least(0)] = option(
        600.0, "A request that takes longer is an error."
    )
    slo_ttft_ms: Milliseconds | None = option(None, "Goodput: time to first token, at most.")
    slo_itl_ms: Milliseconds | None = option(None, "Goodput: mean inter-token latency, at most.")
    label: str | None = option(None, "What reports call this.")
    json: str | None = option(None, "File for the result with the timeline of every request.")

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = self.workload_options
        num_tokens = math.prod(sizes.get(name) or 1 for name in _SIZES)
        if num_tokens > MAX_PROMPT_TOKENS:
            raise ConfigError(
                "num_requests", f"prompts of {num_tokens:,} tokens; at most {MAX_PROMPT_TOKENS:,}"
            )
        planned = self.plan(0, vocab_size=2)  # refuses what it has to
        if self.concurrency is not None and any(request.arrival_s for request in planned):
            message = f"a closed loop has no arrival times, but {self.workload!r} has here"
            raise ConfigError("concurrency", message)

    @property
    def workload_options(self) -> dict[str, Any]:
        """All options of the workload. Raises `ConfigError` for those that it does not have."""
        given = {name: getattr(self, name) for name in OF_WORKLOAD}
        given = {name: value for name, value in given.items() if value is not None}
        return resolve_options(self.workload, given)

    def plan(self, run: int, vocab_size: int) -> list[Planned]:
        """The planned requests of a run, for a vocabulary of `vocab_size` tokens."""
        options = self.workload_options
        return WORKLOADS[self.workload](Draw(self.seed, run, vocab_size), **options)


async def measure(
    options: BenchOptions,
    target: Target,
    described: Mapping[str, Any],
    *,
    vocab_size: int = 1 << 30,
    stats: Callable[[], ServingStats] | None = None,
    on_run: Callable[[int, int], Any] = lambda run, total: None,
    on_end: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Measures a target; returns the JSON document.

    `described` is what the document says about the target. `stats` reads the engine's own
    statistics. `on_run` is called with the number of a run and of its requests when it begins,
    `on_end` when a request has ended.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")

    how: dict[str, Any] = {"concurrency": options.concurrency, "timeout_s": options.timeout_s}
    warm = [
        Planned(0.0, request.prompt, min(_WARMUP_TOKENS, request.output_len))
        for request in options.plan(-1, vocab_size)[: options.warmup]
    ]
    if warm:
        await Drive(warm, target, **how).run()
    runs = []
    for run in range(options.repeat):
        plan = options.plan(run, vocab_size)
        on_run(run, len(plan))
        before = stats() if stats else None
        records = await Drive(plan, target, **how, on_end=on_end).run()
        summary = results.summarize(records, options.slo_ttft_ms, options.slo_itl_ms)
        if stats and before:
            summary["engine"] = results.engine_summary(before, stats(), summary["duration_s"])
        runs.append(results.run_document(summary, records))
    median = results.median_run(runs)
    return {
        "format": results.FORMAT,
        "label": options.label or str(described["model"]),
        "target": dict(described),
        "workload": {"name": options.workload, **options.workload_options},
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k not in OF_WORKLOAD},
        "started": started,
        **results.environment(),
        "summary": runs[median]["summary"],
        "median_run": median,
        "runs": runs,
    }
