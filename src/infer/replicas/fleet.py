"""`Fleet`: an `EngineClient` over replicas, which may die while their streams go on elsewhere"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from infer.engine.engine_client import Deliver
from infer.errors import EngineDeadError, MovedStreamError
from infer.replicas.contract import ReplicaContract
from infer.replicas.journal import RequestJournal
from infer.replicas.messages import Loss
from infer.replicas.router import LeastRouter, ReplicaLoad, Router, num_tokens_of
from infer.threads import BackgroundThread
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineCounters, EngineGauges, EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

LINK_TIMEOUT_S = 5.0
"""Seconds of silence after which a replica's requests move to others."""
RETURN_S = 3.0
"""Seconds after an engine's death for which the requests that it had wait for its next generation
rather than behind the streams of others."""
WATCH_S = 0.2
"""Interval in seconds at which silent and draining replicas are looked at."""

MovedStreams = Literal["any", "exact"]


@dataclass(eq=False, slots=True)
class _Generation:
    """One generation of a replica; the holder of its requests in the journal."""

    slot: _Slot
    number: int
    load: ReplicaLoad
    fingerprint: Fingerprint


@dataclass(eq=False, slots=True)
class _Slot:
    """What the fleet knows about a replica over all its generations."""

    replica: ReplicaContract
    generation: _Generation | None = None
    """None while the replica has no engine that takes requests, and after its generation was
    abandoned."""
    numbers: str | None = None
    """`Fingerprint.numbers` of its latest generation; None before the first."""
    returns_by_s: float = 0.0
    """Until when its next generation is expected, while it has none."""
    drain_ends_s: float | None = None
    """When what it has left moves; None while it does not drain."""
    is_gone: bool = False
    why_kept_out: str = ""
    """Why it gets no requests: it is not of this fleet."""

    @property
    def has_future(self) -> bool:
        """Whether requests may wait for it."""
        return self.replica.is_alive and not self.is_gone and not self.why_kept_out

    def is_silent(self, link_timeout_s: float) -> bool:
        """Whether nothing comes from it any more."""
        return self.replica.link_silence_s >= link_timeout_s


@dataclass(slots=True)
class _Counts:
    """What only the fleet can count."""

    num_moved: int = 0
    num_moved_unequal: int = 0
    departed: EngineCounters = field(default_factory=EngineCounters)
    """Counters of the replicas that have left."""


class Fleet:
    """An `EngineClient` and the listener of its replicas.

    The fleet holds the journal (`RequestJournal`). A request is sent to one generation of one
    replica; where that generation ends, the request waits for another one and goes on there behind
    the tokens that its caller has. `Router` chooses among the replicas that are ready and have
    room. Without any, requests wait here, in order of arrival.

    A generation ends in three ways. The replica reports it as lost: its engine has died. Or the
    replica has been silent for `link_timeout_s`, and others are ready: the fleet abandons the
    generation. Or the replica drains and its time is over: what it has left moves, and no request
    is a suspect for that. What comes from a generation that has ended is ignored. After a crash a
    request begins in a step of its own, whichever replica computes it, and one that is alone in a
    second crash is given up (`replicas.blame`): a request takes two replicas with it at most.

    Tokens are the same wherever a stream goes on if both engines compute the same bits, so replicas
    with equal `Fingerprint`s are taken first. `moved_streams` says what happens where there is
    none: "any" goes on with another one and counts it; "exact" ends the stream with a
    `MovedStreamError`. A request without tokens may go anywhere. A replica with another model is
    kept out, and named.

    Lock: one for all of it. It is held while outputs are delivered, so that those of one request
    stay in order though it moves between threads. It is taken before a replica's own lock, never
    after.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaContract],
        *,
        router: Router | None = None,
        link_timeout_s: float = LINK_TIMEOUT_S,
        moved_streams: MovedStreams = "any",
        watch_s: float = WATCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`replicas`: with different names; others may join later. `clock` is for drains."""
        self._clock = clock
        self._router = router or LeastRouter()
        self._link_timeout_s = link_timeout_s
        self._moved_streams = moved_streams
        self._watch_s = watch_s
        self._lock = threading.RLock()
        self._journal = RequestJournal()
        self._slots = {replica.name: _Slot(replica) for replica in replicas}
        self._has_names = len(replicas) != 1
        """Whether steps name their replica: there are several, or others come and go."""
        if len(self._slots) < len(replicas):
            raise ValueError("two replicas have the same name")
        self._identity: Fingerprint | None = None
        """Of the first replica that was ready; others serve the same model."""
        self._limits = fleet_limits([replica.limits for replica in replicas]) if replicas else None
        self._counts = _Counts()
        self._deliver: Deliver = lambda outputs, step_events: None
        self._died: Callable[[], None] = lambda: None
        self._is_started = self._is_stopping = False
        self._ended = threading.Event()
        self._watcher: BackgroundThread | None = None

    # ---- as an `EngineClient`

    @property
    def replicas(self) -> dict[str, ReplicaContract]:
        """The replicas by name, in the order in which they joined."""
        return {name: slot.replica for name, slot in list(self._slots.items())}

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted; they may have to wait for a replica."""
        slots = list(self._slots.values())
        return self._is_started and any(slot.has_future for slot in slots)

    @property
    def is_ready(self) -> bool:
        """Whether a replica works on requests and is not silent."""
        return any(self._is_serving(slot) for slot in list(self._slots.values()))

    @property
    def is_silent(self) -> bool:
        """Whether all replicas that have an engine are silent; see `EngineClient`."""
        working = [p.replica for p in list(self._slots.values()) if p.generation is not None]
        return bool(working) and all(replica.is_silent for replica in working)

    @property
    def silence_s(self) -> float:
        """The shortest silence of a replica that has an engine; see `EngineClient`."""
        working = [p.replica for p in list(self._slots.values()) if p.generation is not None]
        return min((replica.silence_s for replica in working), default=0.0)

    def start(self, deliver: Deliver, died: Callable[[], None]) -> None:
        """See `EngineClient`. `deliver` is called with a lock held: it may not wait and not call
        the fleet."""
        self._deliver, self._died = deliver, died
        self._is_started = True
        for slot in list(self._slots.values()):
            slot.replica.start(self)
        if len(self._slots) > 1:
            self._watch()

    def join(self, replica: ReplicaContract) -> None:
        """Add a replica and start it. Raises `ValueError` for a name that a replica has."""
        with self._lock:
            old = self._slots.get(replica.name)
            if old is not None and not old.is_gone:
                raise ValueError(f"a replica {replica.name!r} is there already")
            self._slots[replica.name] = _Slot(replica)
            self._has_names = True
        replica.start(self)
        self._watch()

    def leave(self, name: str) -> None:
        """Remove a replica and stop it; what it had goes on elsewhere. Unknown names are
        ignored."""
        with self._lock:
            slot = self._slots.pop(name, None)
            if slot is None:
                return
            self._release(slot)
            self._dispatch()
        slot.replica.stop()
        with self._lock:
            departed = slot.replica.stats().counters
            self._counts.departed = self._counts.departed.plus(departed)

    def add(self, request: Request) -> None:
        """See `EngineClient`."""
        with self._lock:
            self._journal.add(request)
            self._dispatch()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `EngineClient`."""
        with self._lock:
            generation = self._journal.drop(request_id)
            if isinstance(generation, _Generation):
                generation.load.remove(request_id)
                self._router.dropped(generation.load, request_id)
                generation.slot.replica.abort(request_id, generation.number, reason)
                self._dispatch()

    def stop(self) -> None:
        """See `EngineClient`. Replicas are stopped at the same time."""
        with self._lock:
            self._is_stopping = True
        self._ended.set()
        replicas = list(self.replicas.values())
        if len(replicas) == 1:
            replicas[0].stop()
        elif replicas:
            with ThreadPoolExecutor(len(replicas)) as pool:
                list(pool.map(lambda replica: replica.stop(), replicas))
        if self._watcher is not None:
            self._watcher.stop()

    def stats(self) -> EngineStats:
        """Sums over the replicas; see `EngineClient`."""
        with self._lock:
            counts = self._counts
            counters = EngineCounters(
                num_moved=counts.num_moved, num_moved_unequal=counts.num_moved_unequal
            )
        return total(
            [replica.stats() for replica in self.replicas.values()], counters.plus(counts.departed)
        )

    def stats_of_replicas(self) -> dict[str, EngineStats]:
        """See `EngineClient`."""
        replicas = self.replicas if self._has_names else {}
        return {name: replica.stats() for name, replica in replicas.items()}

    def ready_replicas(self) -> frozenset[str]:
        """See `EngineClient`."""
        slots = list(self._slots.items()) if self._has_names else []
        return frozenset(name for name, slot in slots if self._is_serving(slot))

    # ---- as the listener of its replicas

    def ready(self, replica: ReplicaContract, generation: int) -> int:
        """See `ReplicaListener`."""
        with self._lock:
            slot = self._slots.get(replica.name)
            if slot is None or slot.replica is not replica or self._is_stopping:
                return 0
            slot.why_kept_out = self._why_keep_out(replica)
            if slot.why_kept_out:
                log.error("%s is kept out of the fleet: %s", replica.name, slot.why_kept_out)
                return 0
            load = ReplicaLoad(replica.name, replica.limits)
            begun = slot.generation = _Generation(slot, generation, load, replica.fingerprint)
            slot.numbers = replica.fingerprint.numbers
            self._follow(begun)
            self._dispatch()
            return begun.load.num_unfinished

    def reported(
        self,
        replica: ReplicaContract,
        generation: int,
        outputs: list[StepOutput],
        step_events: StepEvents | None,
    ) -> None:
        """See `ReplicaListener`."""
        with self._lock:
            held = self._find(replica, generation)
            if held is None:
                return
            if step_events is not None:
                held.load.stepped(step_events)
                if self._has_names:
                    step_events = msgspec.structs.replace(step_events, replica=replica.name)
            step = self._journal.record(outputs, held) if outputs else []
            self._router.reported(held.load, step, step_events)
            for output in step:
                if output.finish_reason is not None:
                    held.load.remove(output.request_id)
            self._follow(held)
            if step_events is not None and step_events.is_idle:
                step_events = None  # it was for the router only
            if step or step_events:
                self._deliver(step, step_events)
            self._dispatch()

    def lost(self, replica: ReplicaContract, generation: int, loss: Loss) -> bool:
        """See `ReplicaListener`."""
        with self._lock:
            held = self._find(replica, generation)
            if held is None or self._is_stopping:
                return False
            ends = self._crash(held, loss)
            held.slot.returns_by_s = self._clock() + RETURN_S
            self._dispatch()
            return bool(ends)

    def draining(self, replica: ReplicaContract, timeout_s: float) -> None:
        """See `ReplicaListener`."""
        with self._lock:
            slot = self._slots.get(replica.name)
            if slot is None or slot.replica is not replica or slot.drain_ends_s is not None:
                return
            slot.drain_ends_s = self._clock() + timeout_s
            num = 0 if slot.generation is None else self._journal.num_held(slot.generation)
            log.info("%s drains: it has %d requests", replica.name, num)
        self._watch()

    def computes_isolated(self, replica: ReplicaContract) -> None:
        """See `ReplicaListener`: `isolated` is asked for when it is needed."""

    def failing(self, replica: ReplicaContract, reason: str) -> None:
        """See `ReplicaListener`."""
        with self._lock:
            if any(slot.has_future for slot in self._slots.values()):
                log.error("%s: %s; the others serve", replica.name, reason)
                self._dispatch()
            else:
                log.error("%s: requests are refused", reason)
                self._fail_all()

    def gone(self, replica: ReplicaContract) -> None:
        """See `ReplicaListener`."""
        with self._lock:
            slot = self._slots.get(replica.name)
            if slot is None or slot.replica is not replica or self._is_stopping:
                return
            slot.is_gone = True
            if slot.generation is not None:
                self._crash(slot.generation, Loss(f"{replica.name} has gone", from_outside=True))
            if all(slot_of_replica.is_gone for slot_of_replica in self._slots.values()):
                self._died()
            elif not any(slot_of_replica.has_future for slot_of_replica in self._slots.values()):
                self._fail_all()
            else:
                self._dispatch()

    # ---- inside; the lock is held

    def _find(self, replica: ReplicaContract, number: int) -> _Generation | None:
        """A generation of a replica if it is the present one."""
        slot = self._slots.get(replica.name)
        generation = None if slot is None or slot.replica is not replica else slot.generation
        return generation if generation is not None and generation.number == number else None

    def _follow(self, generation: _Generation) -> None:
        """Have the pages of a replica reported if the router needs them."""
        if len(self._slots) > 1 and self._router.should_follow(generation.load):
            generation.slot.replica.follow_pages(generation.number)

    def _is_serving(self, slot: _Slot) -> bool:
        if slot.generation is None or not slot.replica.is_ready:
            return False
        # Where there is nobody else, only the replica itself says when it is silent for too long.
        return len(self._slots) == 1 or not slot.is_silent(self._link_timeout_s)

    def _why_keep_out(self, replica: ReplicaContract) -> str:
        """Why a replica is not of this fleet; "" if it is."""
        fingerprint, limits = replica.fingerprint, self._limits
        if self._identity is None:
            self._identity = fingerprint
        if limits is None:
            self._limits = limits = replica.limits
        wanted = self._identity
        if fingerprint.protocol != wanted.protocol:
            return (
                f"it speaks version {fingerprint.protocol} of the protocol, not {wanted.protocol}"
            )
        if fingerprint.model and wanted.model and fingerprint.model != wanted.model:
            return (
                f"its model (config and tokenizer {fingerprint.model[:12]}) is not the fleet's"
                f" ({wanted.model[:12]})"
            )
        if replica.limits.max_seq_len < limits.max_seq_len:
            return (
                f"its max_seq_len is {replica.limits.max_seq_len}, and requests may have"
                f" {limits.max_seq_len} tokens; start it with --max-seq-len {limits.max_seq_len}"
            )
        if replica.limits.vocab_size != limits.vocab_size:
            return f"its vocabulary has {replica.limits.vocab_size} ids, not {limits.vocab_size}"
        return ""

    def _crash(self, generation: _Generation, loss: Loss) -> list[StepOutput]:
        """End a generation that takes its requests' engine with it; returns the ends of those that
        are given up."""
        count = self._journal.num_held(generation)
        where = f"{generation.slot.replica.name}: " if len(self._slots) > 1 else ""
        log.error("%s%s with %d requests unfinished", where, loss.reason, count)
        generation.slot.generation = None
        self._router.forget(generation.load)
        ends = self._journal.crashed(
            loss.isolated, from_outside=loss.from_outside, holder=generation
        )
        if ends:
            log.error("request %s is to blame and is given up", loss.isolated)
            self._deliver(ends, None)
        return ends

    def _release(self, slot: _Slot) -> None:
        """Move what a living replica has left; nobody is a suspect for that."""
        generation, slot.generation = slot.generation, None
        if generation is None:
            return
        released = self._journal.release(generation)
        for request_id in released:
            slot.replica.abort(request_id, generation.number)
        self._router.forget(generation.load)
        if released:
            log.info("%s: its %d requests go on elsewhere", slot.replica.name, len(released))

    def _dispatch(self) -> None:
        """Send what waits to replicas with room, in order of arrival. While an engine that has died
        is expected back, what engines have died with takes free seats only."""
        if self._is_stopping or not self._journal.num_unassigned:
            return
        for request in self._journal.unassigned():
            numbers = self._journal.numbers_of(request.request_id)
            generations = self._generations_for(request)
            equal = [
                candidate
                for candidate in generations
                if numbers in (None, candidate.fingerprint.numbers)
            ]
            if generations and not equal and self._moved_streams == "exact":
                if not self._may_wait_for(numbers):
                    self._end_unequal(request)
                continue
            generations = equal or generations
            if request.num_crashes:
                # Behind the streams of a survivor it might wait for longer than for a new engine.
                free = [candidate for candidate in generations if candidate.load.has_seat]
                generations = free if free or self._is_one_expected() else generations
            generation = self._choose(request, generations)
            if generation is None:
                return
            self._send(request, generation, is_unequal=generation not in equal)

    def _generations_for(self, request: Request) -> list[_Generation]:
        """The generations that take a request now; silent ones only where all are silent."""
        num_tokens = num_tokens_of(request)
        generations = [
            slot.generation
            for slot in self._slots.values()
            if slot.generation is not None
            and slot.drain_ends_s is None
            and slot.generation.load.has_room(num_tokens, is_resumed=request.num_crashes > 0)
        ]
        if len(generations) < 2:
            return generations
        return [
            generation for generation in generations if self._is_serving(generation.slot)
        ] or generations

    def _is_one_expected(self) -> bool:
        """Whether a replica has lost its engine and will have the next one soon."""
        now_s = self._clock()
        slots = self._slots.values()
        return any(p.generation is None and now_s < p.returns_by_s and p.has_future for p in slots)

    def _choose(self, request: Request, generations: Sequence[_Generation]) -> _Generation | None:
        if len(generations) < 2:
            return generations[0] if generations else None
        chosen = self._router.choose(request, [generation.load for generation in generations])
        return next(generation for generation in generations if generation.load is chosen)

    def _send(self, request: Request, generation: _Generation, *, is_unequal: bool) -> None:
        request_id, name = request.request_id, generation.slot.replica.name
        is_moved = request.num_crashes > 0 or bool(request.output_token_ids)
        self._counts.num_moved += is_moved
        if is_unequal:
            request = replace(request, has_other_bits=True)
            self._counts.num_moved_unequal += 1
            log.warning(
                "request %s goes on at %s, which may compute other tokens: its fingerprint differs",
                *(request_id, name),
            )
        self._journal.assign(request_id, generation, generation.fingerprint.numbers)
        generation.load.add(request)
        generation.slot.replica.add(request, generation.number)

    def _may_wait_for(self, numbers: str | None) -> bool:
        """Whether a replica that computes these numbers may come back."""
        return any(p.numbers == numbers and p.has_future for p in self._slots.values())

    def _end_unequal(self, request: Request) -> None:
        error = MovedStreamError(
            "the engine of this stream has gone, and no other one computes the same bits"
            " (moved_streams is 'exact')"
        )
        log.error("request %s ends: %s", request.request_id, error)
        self._deliver([self._journal.end(request.request_id, ErrorRecord.of(error))], None)

    def _fail_all(self) -> None:
        error = EngineDeadError("the engine has died and does not start again")
        ends = self._journal.fail_all(ErrorRecord.of(error))
        if ends:
            self._deliver(ends, None)

    # ---- the watcher

    def _watch(self) -> None:
        """Have a thread that looks for silent replicas and for drains that are over."""
        with self._lock:
            if self._watcher is None and not self._is_stopping:
                self._watcher = BackgroundThread(self._run, self._ended.set, "infer-fleet")
                self._watcher.start()

    def _run(self) -> None:
        while not self._ended.wait(self._watch_s):
            self.check_health()

    def check_health(self) -> None:
        """Move what silent replicas have, and what drains have left when they are over; called
        every `watch_s` seconds while there are several replicas or one drains."""
        with self._lock:
            now_s = self._clock()
            for slot in list(self._slots.values()):
                if slot.drain_ends_s is not None and now_s >= slot.drain_ends_s:
                    self._release(slot)
                self._leave_silent(slot)
            self._dispatch()

    def _leave_silent(self, slot: _Slot) -> None:
        """Move the requests of a silent replica if another one is ready."""
        generation, replica = slot.generation, slot.replica
        if generation is None or not slot.is_silent(self._link_timeout_s):
            return
        others = (other for other in self._slots.values() if other is not slot)
        if not any(self._is_serving(other) and other.drain_ends_s is None for other in others):
            return
        reason = f"silent for {replica.link_silence_s:.1f} s"
        self._crash(generation, Loss(reason, from_outside=True, isolated=replica.isolated))
        replica.abandon(generation.number)


def fleet_limits(limits: Sequence[EngineLimits]) -> EngineLimits:
    """The limits of several engines as those of one: seats and queues are summed, and a request
    must fit into each of them."""
    first = limits[0]
    tokens = [
        limits_of_replica.max_waiting_tokens
        for limits_of_replica in limits
        if limits_of_replica.max_waiting_tokens is not None
    ]
    return EngineLimits(
        vocab_size=first.vocab_size,
        max_seq_len=min(limits_of_replica.max_seq_len for limits_of_replica in limits),
        num_seats=sum(limits_of_replica.num_seats for limits_of_replica in limits),
        max_waiting_requests=sum(
            limits_of_replica.max_waiting_requests for limits_of_replica in limits
        ),
        max_waiting_tokens=sum(tokens) if len(tokens) == len(limits) else None,
        batching_mode=first.batching_mode,
        page_size=first.page_size,
        prefix_caching=first.prefix_caching,
        weights=first.weights,
        weight_bytes=sum(limits_of_replica.weight_bytes for limits_of_replica in limits),
    )


def total(stats: Sequence[EngineStats], counters: EngineCounters) -> EngineStats:
    """Sums over engines, and further counters."""
    gauges: Mapping[str, Any] = {
        name: sum(getattr(stats_of_replica.gauges, name) for stats_of_replica in stats)
        for name in EngineGauges.__struct_fields__
    }
    for stats_of_replica in stats:
        counters = counters.plus(stats_of_replica.counters)
    return EngineStats(EngineGauges(**gauges), counters)
