"""`HashReplica`: a replica of a fleet without a process or thread, driven step by step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from infer.engine.core import EngineCore
from infer.errors import RequestError
from infer.replicas.contract import ReplicaListener
from infer.replicas.messages import Loss
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.engine_stats import EngineCounters, EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents
from tests.support.hash_engine import limits_of, make_hash_core

EQUAL = Fingerprint(model="model", numbers="numbers")


def steady_clock() -> Callable[[], float]:
    """A clock for engines with which steps are equally long; a router learns how long they take."""
    return itertools.count(0.0, 0.001).__next__


class EngineDies(BaseException):
    """Raised by a runner: its engine dies in this step."""


class HashReplica:
    """A `ReplicaContract`.

    Tests decide when it computes, when its frames arrive, when it is silent, dies and comes back.
    """

    def __init__(self, name: str, *, fingerprint: Fingerprint = EQUAL, **settings: Any) -> None:
        self.name, self.fingerprint, self.settings = name, fingerprint, settings
        self.isolated: str | None = None
        self.core: EngineCore | None = self._make()
        self.limits = limits_of(self._make())
        self.generation = 0
        self.is_abandoned = self.is_stopped = False
        self.is_alive = True
        self.is_silent, self.silence_s, self.link_silence_s = False, 0.0, 0.0
        self.is_cut = False
        """Whether nothing passes between it and the fleet; its engine goes on."""
        self.num_sent = self.num_applied = 0
        self._num_taken = 0
        self.frames: list[tuple[int, list[StepOutput], StepEvents | None, int]] = []
        """Frames that have not arrived."""
        self.commands: list[Callable[[], object]] = []
        self.num_deaths = 0
        self.listener: ReplicaListener | None = None

    def _make(self) -> EngineCore:
        self.isolated = None
        return make_hash_core(announce=self._announce, **self.settings)

    def _announce(self, request_id: str | None) -> None:
        self.isolated = request_id

    # ---- as a replica

    @property
    def is_ready(self) -> bool:
        return self.core is not None and not self.is_abandoned and self.generation > 0

    def start(self, listener: ReplicaListener) -> None:
        self.listener = listener
        self.begin_generation()

    def add(self, request: Request, generation: int) -> None:
        self._command(generation, lambda core: self._take(core, generation, request))

    def abort(
        self, request_id: str, generation: int, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        self._command(generation, lambda core: core.abort(request_id, reason))

    def follow_pages(self, generation: int) -> None:
        self._command(generation, lambda core: core.follow_pages())

    def abandon(self, generation: int) -> None:
        if generation == self.generation and self.core is not None and not self.is_abandoned:
            self.is_abandoned = True
            self.commands.append(self._reset)
            # An answer within this call would be a second call of the listener at the same time.

    def stop(self) -> None:
        self.core, self.is_stopped, self.is_alive = None, True, False

    def stats(self) -> EngineStats:
        return EngineStats(counters=EngineCounters(num_restarts=self.num_deaths))

    def _command(self, generation: int, apply: Callable[[EngineCore], object]) -> None:
        if generation == self.generation and self.core is not None and not self.is_abandoned:
            core = self.core
            self.commands.append(lambda: apply(core))
            self.num_sent += 1
            if not self.is_cut:
                self._apply_commands()

    def _take(self, core: EngineCore, generation: int, request: Request) -> None:
        try:
            core.add(request)
        except RequestError as error:
            record = ErrorRecord.of(error)
            refusal = StepOutput(request.request_id, None, FinishReason.ERROR, error=record)
            self.frames.append((generation, [refusal], None, self._num_taken))

    def _reset(self) -> None:
        assert self.core is not None
        self.core.abort_all()
        self.deliver()
        self.begin_generation()

    def _apply_commands(self) -> None:
        commands, self.commands = self.commands, []
        for command in commands:
            self._num_taken += 1
            command()

    # ---- what a test does with it

    def begin_generation(self) -> None:
        """Begin a generation with the engine that there is."""
        assert self.listener is not None
        self.generation += 1
        self.is_abandoned = False
        self.num_sent = self.num_applied = self._num_taken = 0
        self.listener.ready(self, self.generation)

    def step(self) -> None:
        """Compute a step; its frame arrives unless the link is cut."""
        if self.core is None:
            return
        if not self.is_cut:
            self._apply_commands()
        if self.core is None or not self.core.has_work:
            if self.core is not None and not self.is_cut:
                self.num_applied = self._num_taken
            return
        try:
            outputs = self.core.step()
        except EngineDies:
            self.die(from_outside=False)
            return
        self.isolated = None
        self.frames.append((self.generation, outputs, self.core.step_events, self._num_taken))
        if not self.is_cut:
            self.deliver()

    def deliver(self) -> None:
        """Have all frames arrive, those of ended generations included."""
        assert self.listener is not None
        frames, self.frames = self.frames, []
        for generation, outputs, events, num_applied in frames:
            if generation == self.generation:
                self.num_applied = num_applied
            self.listener.reported(self, generation, outputs, events)

    def die(self, *, from_outside: bool) -> None:
        """Lose the engine; frames that have not arrived may arrive later."""
        if self.core is None or self.is_stopped:
            return
        assert self.listener is not None
        self.num_deaths += 1
        self.core, self.is_cut, self.link_silence_s = None, False, 0.0
        self.commands.clear()
        isolated, self.isolated = self.isolated, None
        if not self.is_abandoned:
            self.listener.lost(self, self.generation, Loss("it has died", from_outside, isolated))

    def revive(self) -> None:
        """Get another engine."""
        if self.core is None and not self.is_stopped:
            self.core = self._make()
            self.begin_generation()

    def cut(self) -> None:
        """Be silent from now on."""
        if self.core is not None:
            self.is_cut, self.link_silence_s = True, 99.0

    def heal(self) -> None:
        """Have all arrive that was under way, in both directions."""
        if self.is_cut:
            self.is_cut, self.link_silence_s = False, 0.0
            self.deliver()
            self._apply_commands()


class Caller:
    """What the caller of a fleet has got."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, StepOutput] = {}
        self.replicas: dict[str, set[str]] = defaultdict(set)
        """Id → replicas that have reported a token of it."""
        self.has_died = False

    def deliver(self, outputs: list[StepOutput], step_events: StepEvents | None) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.ends, f"{name} goes on after its end"
            if output.token_id is not None:
                self.tokens[name].append(output.token_id)
                if step_events is not None:
                    self.replicas[name].add(step_events.replica)
            if output.finish_reason is not None:
                self.ends[name] = output

    def died(self) -> None:
        self.has_died = True
