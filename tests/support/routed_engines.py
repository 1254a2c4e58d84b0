"""Several engines behind a router, in virtual time: hash cores, whose steps take a set time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import msgspec

from infer.engine.core import EngineCore
from infer.replicas.router import ReplicaLoad, Router
from infer.types import Request, StepOutput
from tests.support.hash_engine import limits_of, make_hash_core

COSTS_S = (10e-3, 3e-4, 3e-4)
"""Seconds of a step, of each prompt token and of each sequence in it."""


class RoutedEngine:
    """One engine with a clock of its own."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.now_s = 0.0
        self.core: EngineCore = make_hash_core(clock=lambda: self.now_s, **settings)
        self.load = ReplicaLoad(name, limits_of(self.core))
        self.num_requests = 0
        self.is_stepping = False


class RoutedEngines:
    """It has no threads and no fleet. What a fleet tells a router is told here, in that order."""

    def __init__(
        self,
        num: int,
        router: Router,
        *,
        costs_s: tuple[float, float, float] = COSTS_S,
        **settings: Any,
    ) -> None:
        """`costs_s`: as `COSTS_S`; `settings`: of `make_hash_core`, for each engine."""
        self.router = router
        self._costs_s = costs_s
        self.engines = [RoutedEngine(f"engine-{i}", **settings) for i in range(num)]
        self.now_s = 0.0
        self.on_end: Callable[[StepOutput], None] = lambda output: None
        self.first_token_s: dict[str, float] = {}
        """Seconds until the first token of each request."""
        self._waiting_since_s: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_events = 0
        for engine in self.engines:
            self._obey(engine)

    def at(self, time_s: float, call: Callable[[], object]) -> None:
        """Call something at a time."""
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, call))

    def add(self, request: Request) -> RoutedEngine:
        """Send a request to the engine that the router chooses."""
        load = self.router.choose(request, [each.load for each in self.engines])
        (engine,) = (each for each in self.engines if each.load is load)
        engine.num_requests += 1
        self._waiting_since_s[request.request_id] = self.now_s
        load.add(request)
        engine.now_s = max(engine.now_s, self.now_s)
        engine.core.add(request)
        if not engine.is_stepping:
            engine.is_stepping = True
            self.at(self.now_s, lambda: self._step(engine))
        return engine

    def run(self) -> None:
        """Let time pass until nothing happens any more."""
        while self._events:
            time_s, _, call = heapq.heappop(self._events)
            self.now_s = max(self.now_s, time_s)
            call()

    def cached_share(self) -> float:
        """Share of all prompt tokens that were found in a cache."""
        counters = [each.core.stats().counters for each in self.engines]
        cached = sum(each.num_cached_tokens for each in counters)
        return cached / sum(each.num_prompt_tokens for each in counters)

    def _step(self, engine: RoutedEngine) -> None:
        if not engine.core.has_work:
            engine.is_stepping = False
            return
        engine.now_s = self.now_s
        before = engine.core.stats().counters
        # The step's length is known when it has been computed, and its outputs come at its end.
        outputs = engine.core.step()
        counters = engine.core.stats().counters
        num_tokens = counters.num_computed_tokens - before.num_computed_tokens
        step_s, token_s, row_s = self._costs_s
        took_s = step_s + token_s * num_tokens + row_s * (counters.num_rows - before.num_rows)
        self.at(self.now_s + took_s, lambda: self._report(engine, outputs, took_s))

    def _report(self, engine: RoutedEngine, outputs: list[StepOutput], took_s: float) -> None:
        engine.now_s = self.now_s
        if (step_events := engine.core.step_events) is not None:
            times = {"started_s": self.now_s - took_s, "ended_s": self.now_s}
            step_events = msgspec.structs.replace(step_events, **times)
            engine.load.stepped(step_events)
        for output in outputs:
            if output.token_id is not None and output.request_id in self._waiting_since_s:
                since_s = self._waiting_since_s.pop(output.request_id)
                self.first_token_s[output.request_id] = self.now_s - since_s
        self.router.reported(engine.load, outputs, step_events)
        for output in outputs:
            if output.finish_reason is not None:
                engine.load.remove(output.request_id)
        self._obey(engine)
        for output in outputs:
            if output.finish_reason is not None:
                self.on_end(output)
        self._step(engine)

    def _obey(self, engine: RoutedEngine) -> None:
        if self.router.should_follow(engine.load):
            engine.core.follow_pages()
