"""Scorecard S1: a fleet of a hundred engines under 100,000 streams of 10,000 keys"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import random
import resource
import time
from collections import Counter, defaultdict
from typing import Any

import pytest

from infer import SamplingParams
from infer.replicas.fleet import WATCH_S, Fleet
from infer.replicas.routing import PrefixRouter
from infer.server.observe.key_usage import MAX_SHOWN, KeyUsage
from infer.server.tenancy.limit_messages import LimitAsk
from infer.server.tenancy.local_limits import LocalLimits
from infer.types import Request, StepOutput
from infer.types.step_events import StepEvents
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fleet_replicas import Caller, HashReplica
from tests.support.hash_engine import solo
from tests.support.server_process import Findings
from tests.support.virtual_time import run_in_virtual_time

STEP_S = 0.05
ARRIVE_S = 1.0
"""Seconds within which all streams come; each needs longer than that."""
RETURN_S = 1.0
"""Seconds after which an engine that has died is there again."""
MAX_STEPS = 20_000
NUM_STREAMS = int(os.environ.get("INFER_SIMULATED_STREAMS", "100000"))
"""Streams of the scorecard's row S1."""


class TimedFleet(Fleet):
    """A fleet that measures the time that its calls take on the event loop."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.took_s: defaultdict[str, float] = defaultdict(float)
        self.num_calls: Counter[str] = Counter()
        self.longest_s: defaultdict[str, float] = defaultdict(float)

    def _note(self, name: str, began_s: float) -> None:
        took_s = time.perf_counter() - began_s
        self.took_s[name] += took_s
        self.num_calls[name] += 1
        self.longest_s[name] = max(self.longest_s[name], took_s)

    def add(self, request: Request) -> None:
        began_s = time.perf_counter()
        super().add(request)
        self._note("add", began_s)

    def reported(
        self,
        replica: Any,
        generation: int,
        outputs: list[StepOutput],
        step_events: StepEvents | None,
    ) -> None:
        began_s = time.perf_counter()
        super().reported(replica, generation, outputs, step_events)
        self._note("report", began_s)

    def lost(self, replica: Any, generation: int, loss: Any) -> bool:
        began_s = time.perf_counter()
        given_up = super().lost(replica, generation, loss)
        self._note("death", began_s)
        return given_up


class FleetSimulation:
    """In virtual time. The fleet, its router and journal, the keys' limits and their usage are the
    real ones, on one event loop, as in a front. The engines are real cores over hash runners,
    without processes. Engines die and come back. What is counted: nothing is lost, every stream has
    the tokens that it has alone, and all counts add up at the end."""

    def __init__(
        self, num_engines: int, num_streams: int, num_keys: int, *, num_deaths: int, seed: int = 0
    ) -> None:
        self.dice = random.Random(seed)
        self.num_keys, self.num_deaths = num_keys, num_deaths
        # The last streams wait: there are seats for nine tenths of them.
        self.num_seats = max(1, num_streams * 9 // (10 * num_engines))
        self.requests = {f"r{i}": self._request(f"r{i}") for i in range(num_streams)}
        self.replicas = [self._replica(f"m{i}") for i in range(num_engines)]
        self.seen: Counter[str] = Counter()
        self.max_open = 0
        self.caller = Caller()
        self.usage = KeyUsage("hash", None, 10.0)

    def key_of(self, request_id: str) -> str:
        return f"key-{int(request_id[1:]) % self.num_keys}"

    def _request(self, name: str) -> Request:
        dice = self.dice
        prompt = [1 + dice.randrange(5)] * 4 + [dice.randrange(90) for _ in range(4)]
        sampling = SamplingParams(temperature=dice.choice([0.0, 1.0]))
        scope = self.key_of(name)
        number = dice.randrange(1 << 30)
        return Request(name, tuple(prompt), sampling, number, 24, cache_scope=scope)

    def _replica(self, name: str) -> HashReplica:
        return HashReplica(
            name,
            num_pages=9 * self.num_seats + 8,
            page_size=4,
            max_batch_size=self.num_seats,
            max_num_batched_tokens=4 * self.num_seats + 8,
            max_seq_len=64,
            max_waiting_requests=max(4, self.num_seats // 4),
        )

    async def simulate(self) -> None:
        """Run to the end and judge."""
        clock = asyncio.get_running_loop().time
        self.limits = LocalLimits(clock)
        self.router = PrefixRouter()
        # The watcher's thread would not be in virtual time: it is called by hand.
        self.fleet = TimedFleet(self.replicas, router=self.router, watch_s=3600, clock=clock)
        self.fleet.start(self._deliver, self.caller.died)
        coming = [(self.dice.random() * ARRIVE_S, name) for name in self.requests]
        heapq.heapify(coming)
        ends = len(self.requests)
        for step in range(MAX_STEPS):
            while coming and coming[0][0] <= clock():
                _, name = heapq.heappop(coming)
                if wait_s := await self._ask(name):
                    heapq.heappush(coming, (clock() + wait_s, name))
            self._disturb()
            for replica in self.replicas:
                replica.step()
            if step % round(WATCH_S / STEP_S) == 0:
                self.fleet.check_health()
            self.max_open = max(self.max_open, self.seen["sent"] - len(self.caller.ends))
            if len(self.caller.ends) == ends:
                break
            await asyncio.sleep(STEP_S)
        self.seconds = clock()
        self._judge()
        self.fleet.stop()

    async def _ask(self, name: str) -> float:
        """Send a request if its key's limits let it; returns for how long it has to wait."""
        request, key = self.requests[name], self.key_of(name)
        amount = len(request.prompt_token_ids) + request.max_tokens
        num_of_key = len(self.requests) // self.num_keys
        # The last request of a key waits until its bucket has been filled again.
        size = amount * max(1, num_of_key * 9 // 10)
        ask = LimitAsk(key, "tokens", size, amount, 1, 2 * num_of_key)
        verdict = await self.limits.acquire(ask)
        if not verdict.is_granted:
            self.seen["refused by a limit"] += 1
            return verdict.wait_s or STEP_S
        self.seen["sent"] += 1
        self.fleet.add(request)
        return 0.0

    def _deliver(self, outputs: list[StepOutput], step_events: StepEvents | None) -> None:
        self.caller.deliver(outputs, step_events)
        for output in outputs:
            if output.finish_reason is not None:
                name = output.request_id
                counts = {"requests": 1, "generation_tokens": len(self.caller.tokens[name])}
                self.usage.add(self.key_of(name), counts)
                self.limits.leave(self.key_of(name))

    def _disturb(self) -> None:
        """An engine dies in one step of three, and comes back after `RETURN_S`."""
        if self.seen["deaths"] < self.num_deaths and self.dice.random() < 0.3:
            replica = self.dice.choice(self.replicas)
            if replica.core is not None:
                self.seen["deaths"] += 1
                replica.die(from_outside=True)
                asyncio.get_running_loop().call_later(RETURN_S, replica.revive)

    def _judge(self) -> None:
        assert self.caller.ends.keys() == self.requests.keys(), "streams without an end"
        for name, request in self.requests.items():
            assert self.caller.ends[name].error is None, name
            assert self.caller.tokens[name] == solo(request, VOCAB_SIZE), name
        keys = {self.key_of(name) for name in self.requests}
        assert not any(map(self.limits.num_open, keys)), "requests that the limits take for open"
        used = self.usage.totals()
        for count, wanted in (
            ("requests", len(self.requests)),
            ("generation_tokens", sum(map(len, self.caller.tokens.values()))),
        ):
            assert sum(each[count] for each in used.values()) == wanted
        assert len(self.usage.shown("requests")) <= MAX_SHOWN + 1, "series that grow with keys"
        assert len(self.router.known) == len(self.replicas)
        for load, known in self.router.known.items():
            assert load.num_unfinished == 0
            assert not known.sent
            assert known.num_left == 0
            assert not known.promised
        restarts = self.fleet.stats().counters.num_restarts
        assert restarts == self.seen["deaths"] == self.num_deaths
        self.seen["moved"] = self.fleet.stats().counters.num_moved
        assert self.seen["moved"] > 0

    def report(self) -> dict[str, Any]:
        """What the event loop had to do for it."""
        fleet = self.fleet
        found: dict[str, Any] = {**self.seen, "open at once": self.max_open}
        for name, took_s in fleet.took_s.items():
            found[f"{name}, µs"] = round(1e6 * took_s / fleet.num_calls[name])
            found[f"longest {name}, ms"] = round(1e3 * fleet.longest_s[name], 1)
        found["messages a second"] = round(fleet.num_calls["report"] / self.seconds)
        return found


@pytest.fixture(autouse=True)
def _without_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "infer")
    logging.getLogger("infer").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_loses_nothing_and_counts_all(seed: int) -> None:
    """As the large one, small."""
    simulation = FleetSimulation(12, 400, 60, num_deaths=8, seed=seed)
    run_in_virtual_time(simulation.simulate())
    assert simulation.max_open > 250
    assert simulation.seen["refused by a limit"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_engines_and_a_hundred_thousand_streams() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    simulation = FleetSimulation(100, NUM_STREAMS, NUM_STREAMS // 10, num_deaths=40)
    run_in_virtual_time(simulation.simulate())
    found = simulation.report()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found["KiB a stream, engines and tokens included"] = round(grown_kib / NUM_STREAMS, 1)
    load = f"100 engines, {NUM_STREAMS:,} streams, {NUM_STREAMS // 10:,} keys, virtual time"
    Findings().note("S1", "a simulated fleet", load, **found)
    assert simulation.max_open > 0.7 * NUM_STREAMS
