"""Injected faults: environment variables that make an engine process fail.

`INFER_WRAP_CORE=tests.support.faults:wrapped` activates them in the process.

`INFER_FAULT_PREEMPT_EVERY=k`   before each k-th step the last in rank loses its pages
`INFER_FAULT_AT=step:row:kind`  from that step on, the request in that row of its plan is poisonous;
                                kind is raise, nan, memory (when not alone), crash or hang
`INFER_FAULT_SEEDS=k:kind`      so is each request whose seed is a multiple of k, from its third
                                token on, so that a client knows which ones
`INFER_FAULT_SLOW_STEP_MS=ms`   each step takes this much longer
`INFER_FAULT_STRICT_LEDGER=1`   the scheduler's invariants are checked after each step
`INFER_FAULT_POISON=1`          a page that a sequence takes is full of NaN until it is written
                                (no other memory is reused by another sequence)

They are read once, when the engine is built, and logged if any is set.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any

from infer.engine.core import EngineCore, Runner
from infer.errors import ConfigError
from infer.schedule.page_allocator import PageAllocator, PageTable
from infer.schedule.sequence import NOT_FINITE, Chunk, Plan, Sampled
from infer.types import StepOutput

log = logging.getLogger("infer.faults")

PREFIX = "INFER_FAULT_"
KINDS = ("raise", "nan", "memory", "crash", "hang")


@dataclass(frozen=True)
class Faults:
    """The faults that the environment asks for."""

    preempt_every: int = 0
    at: tuple[int, int, str] | None = None
    slow_step_ms: float = 0.0
    strict_ledger: bool = False
    poison: bool = False
    seeds: tuple[int, str] | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Faults:
        """Read the variables; raises `ConfigError` for an unknown name or value."""
        known = {f"{PREFIX}{spec.name.upper()}": spec.name for spec in fields(cls)}
        given = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
        found: dict[str, object] = {}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(name, f"there is no such fault; known: {', '.join(known)}")
            try:
                found[known[name]] = _read(known[name], value)
            except ValueError:
                raise ConfigError(name, f"{value!r} is not what it takes; see {__name__}") from None
        if given:
            log.warning("faults on purpose, for tests only: %s", given)
        return cls(**found)  # type: ignore[arg-type]


def _read(name: str, value: str) -> object:
    if name not in ("at", "seeds"):
        return float(value) if name == "slow_step_ms" else int(value)
    *numbers, kind = value.split(":")
    if kind not in KINDS or len(numbers) != (2 if name == "at" else 1):
        raise ValueError
    return *map(int, numbers), kind


class _FaultyRunner:
    """A runner that fails with poisonous requests; a poisonous request stays so when its step is
    executed in halves."""

    def __init__(self, runner: Runner, faults: Faults) -> None:
        self.runner = runner
        self._faults = faults
        self._num_steps = 0
        self._poisonous: str | None = None

    def execute(self, plan: Plan) -> Seq[Sampled]:
        self._num_steps += 1
        if self._faults.at is not None:
            step, row, _ = self._faults.at
            if self._num_steps >= step and self._poisonous is None and row < len(plan):
                self._poisonous = plan[row].sequence.request_id
        kinds = list(map(self._kind, plan))
        for kind in filter(None, kinds):
            _fail(kind, len(plan))
        sampling = [kind for kind, chunk in zip(kinds, plan, strict=True) if chunk.samples]
        return [
            Sampled(0, error=NOT_FINITE) if kind == "nan" else result
            for kind, result in zip(sampling, self.runner.execute(plan), strict=True)
        ]

    def _kind(self, chunk: Chunk) -> str | None:
        """How a chunk fails; None if it does not."""
        sequence, faults = chunk.sequence, self._faults
        if faults.at is not None and sequence.request_id == self._poisonous:
            return faults.at[2]
        if faults.seeds is not None and sequence.request.seed % faults.seeds[0] == 0:
            return faults.seeds[1] if sequence.num_output >= 2 else None
        return None


def _fail(kind: str, num_rows: int) -> None:
    if kind == "raise":
        raise RuntimeError("a fault on purpose")
    if kind == "memory" and num_rows > 1:
        raise MemoryError("a fault on purpose")
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "hang":
        time.sleep(1e6)


def fill_with_nan(runner: Any, pages: list[int]) -> None:
    """Fill pages with NaN, so that a read of unwritten cells becomes visible."""
    if hasattr(runner, "poison"):
        return runner.poison(pages)
    for cache in runner.caches:
        cache[pages] = float("nan") if cache.is_floating_point() else -1  # NaN as a scale


def _poison_what_is_taken(allocator: PageAllocator, runner: Any) -> None:
    take = allocator.grow

    def grow(table: PageTable, num_tokens: int) -> bool:
        num_before = len(table.pages)
        taken = take(table, num_tokens)
        if len(table.pages) > num_before:
            fill_with_nan(runner, table.pages[num_before:])
        return taken

    allocator.grow = grow  # type: ignore[method-assign]


class FaultyCore(EngineCore):
    """An engine core with injected faults."""

    def __init__(self, core: EngineCore, faults: Faults) -> None:
        super().__init__(core.scheduler, _FaultyRunner(core.runner, faults), core.announce)
        self._faults = faults
        self._num_steps = 0
        if faults.poison:
            _poison_what_is_taken(self.scheduler.allocator, core.runner)

    def step(self, *, flush: bool = False) -> list[StepOutput]:
        """Like the core's, with the faults that happen between two steps."""
        self._num_steps += 1
        every = self._faults.preempt_every
        if every and self._num_steps % every == 0 and self.scheduler.running:
            self.scheduler.preempt(self.scheduler.running[-1])
        time.sleep(self._faults.slow_step_ms / 1000)
        outputs = super().step(flush=flush)
        if self._faults.strict_ledger:
            self.scheduler.check()
        return outputs


def wrapped(core: EngineCore) -> EngineCore:
    """The value of `INFER_WRAP_CORE`: a core with the faults of the environment."""
    return FaultyCore(core, Faults.from_environment())
