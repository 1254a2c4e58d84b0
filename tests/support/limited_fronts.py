"""Several fronts that share the limits of keys, without Ray and in virtual time.

Requests of one key arrive at them; the network to the authority, the authority and the fronts fail
as `Fault`s say. One front without an authority is what they are compared with.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infer.requests.state import RequestState
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import HttpError
from infer.server.observe.request_trace import ChoiceTrace, RequestTrace
from infer.server.tenancy.front_limits import AuthorityError, FrontLimits
from infer.server.tenancy.keys import Key, KeyLimits
from infer.server.tenancy.limit_authority import LimitAuthority
from infer.server.tenancy.limit_messages import decode_sync, encode
from infer.server.tenancy.limits import Tenant
from infer.server.tenancy.local_limits import LocalLimits
from infer.types import Request, SamplingParams
from tests.support.virtual_time import run_in_virtual_time

ROUND_TRIP_S = 0.003
NUM_FRONTS = 4
SAMPLING = SamplingParams()

FaultKind = Literal[
    "authority dies", "no authority", "slow", "questions lost", "answers lost", "front dies"
]


@dataclass(frozen=True)
class Fault:
    """What goes wrong."""

    kind: FaultKind
    at_s: float
    lasts_s: float = 0.0
    front: int | None = None
    """Whose network it is; None = that of all."""

    def is_now(self, now_s: float, front: int) -> bool:
        return self.at_s <= now_s < self.at_s + self.lasts_s and self.front in (None, front)


@dataclass(frozen=True)
class Arrival:
    """A request."""

    at_s: float
    front: int
    num_prompt: int
    max_tokens: int
    num_tokens: int
    """Tokens that it makes."""
    takes_s: float
    is_refused: bool
    """Whether the engine has no room for it, once its key's limits have let it in."""


@dataclass
class Admitted:
    """What became of the arrivals."""

    num_requests: int = 0
    num_tokens: int = 0
    """Tokens of prompts and answers that were computed."""
    most_open: int = 0
    num_open: int = 0
    longest_wait_s: float = 0.0
    """The longest time that a decision took."""


def arrivals(
    *, seed: int, lasts_s: float, per_s: float, max_tokens: int, skew: float = 0.25
) -> list[Arrival]:
    """Requests at random times; a share `skew` of them arrives at front 0."""
    rng = random.Random(seed)
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(per_s)) < lasts_s:
        front = 0 if rng.random() < skew else rng.randrange(1, NUM_FRONTS)
        most = rng.randint(max_tokens // 2, max_tokens)
        sizes = (rng.randint(5, 20), most, rng.randint(1, most))
        found.append(Arrival(at_s, front, *sizes, rng.uniform(0, 2), rng.random() < 0.15))
    return found


class World:
    """The fronts of a cluster and their authority."""

    def __init__(self, key: Key, faults: Sequence[Fault]) -> None:
        self._key = key
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._names = itertools.count()
        self._authority = self._new_authority()
        self._fronts: list[FrontLimits] = []
        self.tenants: list[Tenant] = []
        for index in range(NUM_FRONTS):
            self._fronts.append(self._new_front(index))
            self.tenants.append(Tenant(key, self._fronts[-1]))

    def _new_authority(self) -> LimitAuthority:
        return LimitAuthority(NUM_FRONTS, clock=self._loop.time)

    def _new_front(self, index: int) -> FrontLimits:
        async def carry(said: bytes) -> bytes:
            now = [f.kind for f in self._faults if f.is_now(self._loop.time(), index)]
            if "no authority" in now:
                raise AuthorityError("its process has gone")
            await asyncio.sleep((0.2 if "slow" in now else ROUND_TRIP_S) / 2)
            if "questions lost" in now:
                await asyncio.sleep(60)
            authority = self._authority
            answer = encode(authority.sync(decode_sync(said)))
            await asyncio.sleep(ROUND_TRIP_S / 2)
            if "answers lost" in now:
                await asyncio.sleep(60)
            return answer

        name = f"front-{next(self._names)}"
        front = FrontLimits(name, NUM_FRONTS, carry, clock=self._loop.time)
        front.start()
        return front

    async def fail(self) -> None:
        """Let authority and fronts die when the faults say so."""
        for fault in sorted(self._faults, key=lambda fault: fault.at_s):
            if fault.kind in ("authority dies", "no authority", "front dies"):
                await asyncio.sleep(fault.at_s - self._loop.time())
                if fault.kind == "front dies":
                    index = fault.front or 0
                    await self._fronts[index].close()
                    self._fronts[index] = self._new_front(index)
                    self.tenants[index] = Tenant(self._key, self._fronts[index])
                else:
                    self._authority = self._new_authority()

    async def close(self) -> None:
        for front in self._fronts:
            await front.close()


def _trace(arrival: Arrival, context: RequestContext) -> RequestTrace:
    trace = RequestTrace("r", "k", context, arrival.num_prompt, arrival.max_tokens)
    trace.choices["r-0"] = ChoiceTrace(
        trace, 0, RequestState("r-0", 1, num_output=arrival.num_tokens)
    )
    return trace


async def _request(tenants: list[Tenant], arrival: Arrival, admitted: Admitted) -> None:
    """What the server does with a request."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(arrival.at_s - loop.time())
    tenant, context = tenants[arrival.front % len(tenants)], RequestContext()
    request = Request("r", (1,) * arrival.num_prompt, SAMPLING, 0, arrival.max_tokens)
    with context.cleanup:
        began_s = loop.time()
        try:
            await tenant.enter(context)
            admitted.longest_wait_s = max(admitted.longest_wait_s, loop.time() - began_s)
            async with tenant.acquire([request], context) as grant:
                if arrival.is_refused:
                    return
                grant.use(context, _trace(arrival, context))
        except HttpError as error:
            if error.status != 429 or not error.retry_after_s:
                raise
            return
        admitted.num_requests += 1
        admitted.num_open += 1
        admitted.most_open = max(admitted.most_open, admitted.num_open)
        await asyncio.sleep(arrival.takes_s)
        admitted.num_tokens += arrival.num_prompt + arrival.num_tokens
        admitted.num_open -= 1


def admitted_by(
    limits: KeyLimits,
    load: Sequence[Arrival],
    faults: Sequence[Fault] = (),
    *,
    is_alone: bool = False,
) -> Admitted:
    """What the fronts let in; with `is_alone` what one front lets in that nobody helps."""

    async def run() -> Admitted:
        key, admitted = Key(id="k", name="n", sha256="", limits=limits), Admitted()
        if is_alone:
            tenants = [Tenant(key, LocalLimits(asyncio.get_running_loop().time))]
            await asyncio.gather(*(_request(tenants, each, admitted) for each in load))
            return admitted
        world = World(key, faults)
        failing = asyncio.ensure_future(world.fail())
        await asyncio.gather(*(_request(world.tenants, each, admitted) for each in load))
        await failing
        await world.close()
        return admitted

    return run_in_virtual_time(run())
