"""`PrefixRouter`: a request goes where its first token is expected first"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, assert_never

from infer.replicas.router import LeastRouter, ReplicaLoad, Router, num_tokens_of
from infer.schedule.index_changes import chain
from infer.types import Request, StepOutput
from infer.types.page_changes import HASH_BYTES, PageChanges
from infer.types.step_events import BatchEvent, ForeignLoad, StepEvents

Routing = Literal["prefix", "least", "round-robin"]
"""How requests are divided between replicas."""

MAX_SHARE = 1.5
"""Share of the unfinished requests that a replica may have, beside its share of the seats."""
SPARE = 0.125
"""Share of its own seats by which a replica may have more; few requests are never divided evenly.
"""
TOLERANCE = 1.25
"""Factor between expected times that are taken as equal."""
MAX_CHAIN = 1024
"""Pages at the beginning of a prompt that are looked for; hashing them takes a millisecond."""
MAX_UNANSWERED = 16
"""Reports that a replica may send before it answers."""
TOKEN_S = 1e-3
"""Seconds of a prompt token where no replica has been measured."""
SEATED_S = 1.0
"""Seconds for which a request keeps its seat where no replica has been measured."""
_DECAY = 0.98
"""Weight of all older measurements at each new one."""
_NO_LOAD = ForeignLoad(0, 0, 0)


def make_router(routing: Routing) -> Router:
    """The router of a name."""
    match routing:
        case "prefix":
            return PrefixRouter()
        case "least":
            return LeastRouter()
        case "round-robin":
            return RoundRobinRouter()
        case _:
            assert_never(routing)


class PageView:
    """The pages that one engine's prefix index holds, as far as it has reported them."""

    def __init__(self) -> None:
        self.pages: set[bytes] = set()
        """Hashes of the pages."""
        self.is_stale = True
        """Whether changes were lost, so that the index has to be reported from the beginning."""
        self._digest = 0
        self._next: set[bytes] | None = None
        """Pages of an index that is being reported from the beginning."""

    def apply(self, changes: PageChanges) -> None:
        """Follow the index. Until an index from the beginning is complete, the old pages stay."""
        if changes.is_reset:
            self._next, self._digest, self.is_stale = set(), 0, False
        pages = self.pages if self._next is None else self._next
        for name in _hashes(changes.left):
            if name in pages:
                pages.remove(name)
                self._digest ^= int.from_bytes(name)
        for name in _hashes(changes.entered):
            if name not in pages:
                pages.add(name)
                self._digest ^= int.from_bytes(name)
        if not changes.is_complete:
            return
        if self._next is not None:
            self.pages, self._next = self._next, None
        if self._digest != int.from_bytes(changes.digest):
            self.pages, self._digest, self.is_stale = set(), 0, True


def _hashes(joined: bytes) -> list[bytes]:
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


class _Mean:
    """A weighted mean in which old values count less and less; None before the first one."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._sum = self._weight = 0.0

    def add(self, amount: float, weight: float = 1.0) -> None:
        self._sum = self._sum * _DECAY + amount
        self._weight = self._weight * _DECAY + weight
        self.value = self._sum / self._weight


@dataclass(slots=True)
class _Sent:
    """A request that has no first token yet."""

    num_tokens: int
    """Tokens that are expected to be computed for it."""
    pages: Sequence[bytes]
    """Hashes of its pages."""
    num_left: int = 0
    """Tokens that are not computed yet."""


@dataclass(slots=True)
class KnownReplica:
    """What a router knows about one generation of a replica, beside its `ReplicaLoad`."""

    view: PageView = field(default_factory=PageView)
    num_awaited: int = 0
    """Complete reports of pages after which the replica is asked again for all of them; the answer
    to the last time may be on its way, or lost."""
    sent: dict[str, _Sent] = field(default_factory=dict)
    """The requests without a first token."""
    num_left: int = 0
    """Sum of their `_Sent.num_left`: a choice costs the same however many there are."""
    promised: Counter[bytes] = field(default_factory=Counter)
    """Pages that requests without a first token are going to fill."""
    token_s: _Mean = field(default_factory=_Mean)
    """Seconds of a prompt token."""
    stay_s: _Mean = field(default_factory=_Mean)
    """Seconds for which a request keeps its seat."""
    num_pages: float = float("inf")
    """Pages of the cache, as far as they have been seen."""
    num_indexed: int = 0
    foreign: ForeignLoad = _NO_LOAD
    last_choice: int = 0
    """Number of the request that it got last."""

    def num_cached(self, pages: Sequence[bytes]) -> int:
        """Number of leading pages that its engine has, or will have when it has done what it has to
        do before."""
        known, promised = self.view.pages, self.promised
        for number, name in enumerate(pages):
            if name not in known and name not in promised:
                return number
        return len(pages)

    def num_empty(self, num_running: int) -> float:
        """Pages that can be filled without dropping others; a running request holds one that is
        not indexed."""
        return max(0.0, self.num_pages - self.num_indexed - num_running)

    def send(self, request_id: str, sent: _Sent) -> None:
        """A request goes to the replica."""
        self.drop(request_id)
        self.sent[request_id] = sent
        sent.num_left = sent.num_tokens
        self.num_left += sent.num_left
        self.promised.update(sent.pages)

    def drop(self, request_id: str) -> None:
        """A request has its first token, or has left."""
        if (sent := self.sent.pop(request_id, None)) is not None:
            self.num_left -= sent.num_left
            for name in sent.pages:
                if self.promised[name] == 1:
                    del self.promised[name]
                else:
                    self.promised[name] -= 1

    def stepped(self, step_events: StepEvents, load: ReplicaLoad) -> None:
        """Follow what happened in a step, after `load` has."""
        for event in step_events.events:
            if not isinstance(event, BatchEvent) and (sent := self.sent.get(event.request_id)):
                num_left = load.num_left(event.request_id, sent.num_tokens)
                self.num_left += num_left - sent.num_left
                sent.num_left = num_left
        if num_prompt := step_events.num_prompt_tokens:
            self.token_s.add(step_events.ended_s - step_events.started_s, num_prompt)
        seen = max(step_events.num_free_pages, step_events.num_indexed_pages)
        self.num_pages = seen if self.num_pages == float("inf") else max(self.num_pages, seen)
        self.num_indexed = step_events.num_indexed_pages
        self.foreign = step_events.foreign_load or _NO_LOAD
        if step_events.page_changes is not None:
            self.view.apply(step_events.page_changes)
            self.num_awaited -= self.num_awaited > 0 and step_events.page_changes.is_complete


def _typical(values: Sequence[float | None], default: float) -> list[float]:
    """The values, with the mean of the known ones for those that are not known."""
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else default
    return [mean if value is None else value for value in values]


def _page_size(load: ReplicaLoad) -> int:
    """Tokens in a page that requests may share at a replica; 0: they share nothing."""
    return load.limits.page_size if load.limits.prefix_caching else 0


def _pages(request: Request, size: int) -> list[bytes]:
    """Hashes of the pages of a request."""
    if not size:
        return []
    tokens = (*request.prompt_token_ids, *request.output_token_ids)
    return chain(tokens, size, request.cache_scope, request.num_public, MAX_CHAIN)


def _rank(conversation: str, replica: str) -> bytes:
    """The place of a replica among those for a conversation; the lowest is preferred."""
    return blake2b(f"{conversation}/{replica}".encode(), digest_size=8).digest()


class PrefixRouter(Router):
    """The time until a request's first token is the prompt tokens that a replica has to compute
    before it, times the measured time of a prompt token, plus the expected wait for a seat. The
    tokens are those of requests without a first token, and the request's own that are not cached
    there. A router knows the pages that each replica's prefix index holds, as hashes that begin at
    the cache scope (`schedule.index_changes`). So another tenant's cache attracts nobody, and says
    nothing about what that tenant has asked.

    Three things stand beside the formula:

    - A token computed in a full cache pushes out one that was computed before, so it counts twice.
    - Times within `TOLERANCE` of the shortest are equal, because they are measured. Of equal
      replicas those are taken that compute the fewest tokens for it, within `TOLERANCE` again; of
      these the one with the fewest requests, then the one that a hash prefers for the request's
      conversation, then the one with the most empty pages. The hash keeps a conversation together
      where no pages are known yet, at all fronts alike and without a memory. (Thaler and
      Ravishankar 1998, "Using Name-Based Mappings to Increase Hit Rates".)
    - No replica gets much more than `MAX_SHARE` times its share of the unfinished requests. A first
      token says nothing about the tokens after it, which are slower in a large batch. So a prefix
      that everybody uses is soon cached by several. (Mirrokni et al. 2018, "Consistent Hashing with
      Bounded Loads".)

    `RoundRobinRouter` takes one replica after the other, for comparison.
    """

    def __init__(self, *, max_share: float = MAX_SHARE) -> None:
        """`max_share`: see `MAX_SHARE`."""
        self._max_share = max_share
        self._known: dict[ReplicaLoad, KnownReplica] = {}
        self._num_chosen = 0

    def choose(self, request: Request, replicas: Sequence[ReplicaLoad]) -> ReplicaLoad:
        """See `Router`."""
        num_tokens = num_tokens_of(request)
        sizes = {size: _pages(request, size) for size in {_page_size(load) for load in replicas}}
        known = [self._know(load) for load in replicas]
        to_compute = []
        for load, of_replica in zip(replicas, known, strict=True):
            size = _page_size(load)
            to_compute.append(num_tokens - of_replica.num_cached(sizes[size]) * size)
        times_s = self._expected_s(replicas, known, to_compute)
        chosen = self._best(replicas, known, times_s, to_compute, request.conversation)
        self._num_chosen += 1
        known[chosen].last_choice = self._num_chosen
        sent = _Sent(to_compute[chosen], sizes[_page_size(replicas[chosen])])
        known[chosen].send(request.request_id, sent)
        return replicas[chosen]

    def num_cached(self, request: Request, replica: ReplicaLoad) -> int:
        """Leading tokens of a request that a replica has in its cache, as far as is known."""
        size = _page_size(replica)
        return self._known[replica].num_cached(_pages(request, size)) * size

    def reported(
        self, replica: ReplicaLoad, outputs: Sequence[StepOutput], step_events: StepEvents | None
    ) -> None:
        """See `Router`."""
        known = self._know(replica)
        if step_events is not None:
            known.stepped(step_events, replica)
        now_s = None if step_events is None else step_events.ended_s
        for output in outputs:
            known.drop(output.request_id)
            if output.finish_reason is not None and now_s is not None:
                began_s = replica.seated_s(output.request_id)
                if began_s is not None:
                    known.stay_s.add(now_s - began_s)

    @property
    def known(self) -> Mapping[ReplicaLoad, KnownReplica]:
        """What is known about each generation that may be chosen."""
        return self._known

    def _know(self, replica: ReplicaLoad) -> KnownReplica:
        known = self._known.get(replica)
        if known is None:
            known = self._known[replica] = KnownReplica()
        return known

    def dropped(self, replica: ReplicaLoad, request_id: str) -> None:
        """See `Router`."""
        if (known := self._known.get(replica)) is not None:
            known.drop(request_id)

    def should_follow(self, replica: ReplicaLoad) -> bool:
        """See `Router`."""
        known = self._know(replica)
        if not known.view.is_stale or known.num_awaited or not _page_size(replica):
            return False
        known.num_awaited = MAX_UNANSWERED
        return True

    def forget(self, replica: ReplicaLoad) -> None:
        """See `Router`."""
        self._known.pop(replica, None)

    @staticmethod
    def _expected_s(
        replicas: Sequence[ReplicaLoad], known: Sequence[KnownReplica], to_compute: Sequence[int]
    ) -> list[float]:
        """Seconds until the first token, for each replica. `to_compute`: tokens of the request that
        are not cached there."""
        token_s = _typical([of_replica.token_s.value for of_replica in known], TOKEN_S)
        stay_s = _typical([of_replica.stay_s.value for of_replica in known], SEATED_S)
        times_s = []
        for index, (load, of_replica) in enumerate(zip(replicas, known, strict=True)):
            num_running = load.num_running + of_replica.foreign.num_running
            room = of_replica.num_empty(num_running) * load.limits.page_size
            dropped = max(0.0, to_compute[index] - room)
            work = (
                of_replica.num_left
                + of_replica.foreign.num_prompt_tokens
                + to_compute[index]
                + dropped
            )
            queue = load.num_waiting + of_replica.foreign.num_waiting + 1
            behind = max(0, queue - max(0, load.limits.num_seats - num_running))
            seat_s = behind * stay_s[index] / load.limits.num_seats
            times_s.append(work * token_s[index] + seat_s)
        return times_s

    def _best(
        self,
        replicas: Sequence[ReplicaLoad],
        known: Sequence[KnownReplica],
        times_s: Sequence[float],
        to_compute: Sequence[int],
        conversation: str,
    ) -> int:
        """Index of the replica with the shortest time, of those that have not too much to do.
        `to_compute`: see `_expected_s`."""
        unfinished = [
            load.num_unfinished + of_replica.foreign.num_running + of_replica.foreign.num_waiting
            for load, of_replica in zip(replicas, known, strict=True)
        ]
        num_seats = sum(load.limits.num_seats for load in replicas)
        share = self._max_share * (sum(unfinished) + 1) / num_seats + SPARE
        indices = [
            index
            for index, load in enumerate(replicas)
            if unfinished[index] < share * load.limits.num_seats
        ]
        for costs in (times_s, to_compute):
            limit = TOLERANCE * min(costs[index] for index in indices)
            indices = [index for index in indices if costs[index] <= limit]

        def order(index: int) -> tuple[float, bytes, float, int]:
            load, of_replica = replicas[index], known[index]
            busy = unfinished[index] / load.limits.num_seats
            rank = _rank(conversation, load.name) if conversation else b""
            return busy, rank, -of_replica.num_empty(load.num_running), of_replica.last_choice

        return min(indices, key=order)


class RoundRobinRouter(Router):
    """Takes one replica after the other, in the order of their names."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: Request, replicas: Sequence[ReplicaLoad]) -> ReplicaLoad:
        """See `Router`."""
        ordered = sorted(replicas, key=lambda load: load.name)
        chosen = next((load for load in ordered if load.name > self._last), ordered[0])
        self._last = chosen.name
        return chosen
