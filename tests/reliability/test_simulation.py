"""Scorecard 7 and 26: the engine in virtual time, with faults drawn from a seed; a seed replays."""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

import msgspec
import pytest

from infer.engine.core import EngineCore, Runner
from infer.errors import OverloadedError, RequestError
from infer.replicas.journal import RequestJournal
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler import Scheduler
from infer.schedule.sequence import NOT_FINITE, Plan, Sampled
from infer.types import FinishReason, StepOutput
from tests.support.hash_engine import HashRunner, solo
from tests.support.server_process import Findings
from tests.support.workloads import MAX_STEPS, VOCAB_SIZE, Workload

KINDS = ("memory", "nan", "raise", "none of a request")
NUM_SEEDS = int(os.environ.get("INFER_SIMULATED_SEEDS", "10000"))
"""Simulations of the scorecard's row 7."""
NUM_FAULTS = int(os.environ.get("INFER_SIMULATED_FAULTS", "2000"))
"""Faults of its row 26, one in each 50th step."""


class FailingRunner:
    """A runner that fails as a device does.

    "memory": a step does not fit, unless it is one request's; "nan": a request's logits are not
    finite; "raise": every step with a request raises from now on; "none of a request": a step
    raises once, and its halves do not.
    """

    def __init__(self, runner: Runner, every: int, dice: random.Random) -> None:
        """`every`: about one step of so many fails."""
        self._runner, self._every, self._dice = runner, every, dice
        self.poisonous: set[str] = set()
        """Ids of the requests with which every step raises."""
        self.not_finite: set[str] = set()
        """Ids of the requests that had logits that were not finite."""
        self.seen: Counter[str] = Counter()
        self._is_retried = False

    def execute(self, plan: Plan) -> Seq[Sampled]:
        """See the class's docstring."""
        ids = [chunk.sequence.request_id for chunk in plan]
        if self.poisonous.intersection(ids):
            raise RuntimeError("a fault on purpose")
        if self._is_retried or self._dice.randrange(self._every):
            self._is_retried = False
            return self._runner.execute(plan)
        kind = self._dice.choice(KINDS)
        if kind in ("memory", "none of a request") and len(plan) == 1:
            kind = "raise"
        self.seen[kind] += 1
        if kind == "raise":
            self.poisonous.add(self._dice.choice(ids))
        if kind == "nan":
            return self._with_nan(plan)
        self._is_retried = True
        raise MemoryError("full") if kind == "memory" else RuntimeError("a fault on purpose")

    def _with_nan(self, plan: Plan) -> Seq[Sampled]:
        sampling = [chunk.sequence.request_id for chunk in plan if chunk.samples]
        results = list(self._runner.execute(plan))
        if sampling:
            row = self._dice.randrange(len(sampling))
            results[row] = Sampled(0, error=NOT_FINITE)
            self.not_finite.add(sampling[row])
        return results


class Simulation(Workload):
    """A simulation is a `Workload` (arrivals, aborts, preemptions, all drawn from a seed) whose
    runner fails and whose engine dies. `RequestJournal` gives the next engine what was unfinished,
    as the supervisor does. Clocks, faults and arrivals follow from the seed alone, so two runs of a
    seed write the same bytes."""

    def __init__(self, seed: int, *, fails_every: int = 20, dies_every: int = 60) -> None:
        super().__init__(seed)
        self.dice = random.Random(f"faults {seed}")
        self._fails_every, self._dies_every = fails_every, dies_every
        self.journal = RequestJournal()
        self.failed: set[str] = set()
        """Ids of the requests that a fault has hit."""
        self.faults: Counter[str] = Counter()
        self.record = bytearray()
        """All that came out, and when, in msgpack."""
        self.failing = self._build()

    def _build(self) -> FailingRunner:
        """An engine over an empty cache."""
        old = self.allocator
        self.allocator = PageAllocator(
            old.num_usable + 1, old.page_size, enable_prefix_caching=old.enable_prefix_caching
        )
        self.scheduler = Scheduler(self.scheduler.config, self.allocator, self._clock)
        self.runner = HashRunner(old.num_usable + 1, old.page_size, VOCAB_SIZE)
        self.failing = FailingRunner(self.runner, self._fails_every, self.dice)
        self.alone: str | None = None
        self.core = EngineCore(self.scheduler, self.failing, self._note_alone)
        return self.failing

    def _note_alone(self, request_id: str | None) -> None:
        self.alone = request_id

    def simulate(self, num_requests: int = 12) -> bytes:
        """Run to the end and judge; returns the record."""
        arrived = steps = 0
        while arrived < num_requests or self.core.has_work:
            while arrived < num_requests and self.random.random() < 0.5:
                self._arrive(f"r{arrived}")
                arrived += 1
            self._take(self.core.step())
            self.scheduler.check()
            self._disturb()
            self.now_s += 0.02
            steps += 1
            assert steps < MAX_STEPS, "no progress"
        self._count()
        self._judge_all()
        return bytes(self.record)

    def _arrive(self, name: str) -> None:
        request = self.new_request(name)
        before = len(self.requests)
        self._add(request)
        if len(self.requests) > before:
            self.journal.add(request)

    def _take(self, outputs: list[StepOutput]) -> None:
        for output in self.journal.record(outputs):
            self.outputs[output.request_id].append(output)
        self.record += msgspec.msgpack.encode((self.now_s, outputs, self.core.step_events))

    def _disturb(self) -> None:
        if self.scheduler.running and self.dice.random() < 0.1:
            self.scheduler.preempt(self.dice.choice(self.scheduler.running))
        if self.requests and self.dice.random() < 0.05:
            self._abort(self.dice.choice(list(self.requests)))
        if self._dies_every and self.dice.randrange(self._dies_every) == 0:
            self._die()

    def _abort(self, name: str) -> None:
        ended = self.core.abort(name)
        self.journal.drop(name)
        assert self.core.abort(name) is None, "an end after the end"
        if ended is not None:
            self.aborted.add(name)
            self.outputs[name].append(ended)

    def _die(self) -> None:
        """The process is killed from outside; the next one goes on with what is unfinished."""
        self.faults["engine killed"] += 1
        self._count()
        for output in self.journal.crashed(None, from_outside=True):
            raise AssertionError(f"given up: {output.request_id}")
        self._build()
        for request in self.journal.unassigned():
            try:
                self.core.add(replace(request))
            except (OverloadedError, RequestError) as error:
                raise AssertionError(f"the next engine refuses {request.request_id}") from error

    def _count(self) -> None:
        self.faults += self.failing.seen
        self.failed |= self.failing.poisonous | self.failing.not_finite

    def _judge_all(self) -> None:
        assert not len(self.journal), "in the journal after the end"
        everyone, hit = self.requests, self.failed - self.aborted
        for name in everyone:
            *before, last = self.outputs[name]
            assert all(output.finish_reason is None for output in before), "after the end"
            is_error = last.finish_reason is FinishReason.ERROR
            assert not is_error or name in self.failed, f"{name} fails for another"
            if is_error:
                tokens = [o.token_id for o in before]
                assert tokens == solo(everyone[name], VOCAB_SIZE)[: len(tokens)], name
                assert last.error is not None, "an error without words"
        failed = {n for n in hit if self.outputs[n][-1].finish_reason is FinishReason.ERROR}
        self.requests = {name: each for name, each in everyone.items() if name not in failed}
        self._judge()
        self.requests = everyone


@pytest.fixture(autouse=True)
def _without_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "infer")
    logging.getLogger("infer").setLevel(logging.CRITICAL)


def simulate_seeds(seeds: range) -> Counter[str]:
    """Simulate each seed, each tenth one twice; returns counts."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            record = simulation.simulate()
            if seed % 10 == 0:
                assert Simulation(seed).simulate() == record, "it does not replay"
                seen["replayed, byte-equal"] += 1
        except AssertionError as error:
            raise AssertionError(f"simulation {seed}: {error}") from error
        seen += simulation.faults
        seen["requests"] += len(simulation.requests)
        seen["requests that a fault hit"] += len(simulation.failed)
    return seen


def test_three_hundred_simulations() -> None:
    seen = simulate_seeds(range(300))
    assert seen["replayed, byte-equal"] == 30
    assert min(seen[kind] for kind in (*KINDS, "engine killed")) > 20, seen


def test_seeds_differ() -> None:
    assert len({Simulation(seed).simulate() for seed in range(20)}) == 20


@pytest.mark.slow
def test_ten_thousand_simulations() -> None:
    seen = simulate_seeds(range(NUM_SEEDS))
    Findings().note(
        7, "simulation", f"{NUM_SEEDS:,} seeds, hash model, virtual time", **seen, violations=0
    )


def fail_each_fiftieth_step(num_faults: int) -> Counter[str]:
    """Simulations in which one step of fifty fails, until so many have."""
    seen: Counter[str] = Counter()
    seed = 0
    while sum(seen[kind] for kind in KINDS) < num_faults:
        simulation = Simulation(seed, fails_every=50, dies_every=0)
        simulation.simulate(40)
        seen += simulation.faults
        seen["requests"] += len(simulation.requests)
        ended = [outputs[-1].finish_reason for outputs in simulation.outputs.values()]
        seen["requests failed, each hit itself"] += ended.count(FinishReason.ERROR)
        seed += 1
    return seen


def test_only_the_culprit_of_a_fault_fails() -> None:
    seen = fail_each_fiftieth_step(60)
    assert 0 < seen["requests failed, each hit itself"] < seen["requests"] / 4


@pytest.mark.slow
def test_device_faults_for_longer() -> None:
    load = "memory, NaN and exceptions in one step of 50, hash model"
    Findings().note(26, "device faults", load, **fail_each_fiftieth_step(NUM_FAULTS))
