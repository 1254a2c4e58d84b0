"""`Fleet`: an `EngineClient` over members, any of which may die while its streams go on elsewhere

The fleet holds the journal (`RequestJournal`). A request is sent to one life of one member; where
that life ends, the request waits for another one and goes on there behind the tokens that its
caller has. `Router` chooses among the members that are ready and have room. Without any, requests
wait here, in order of arrival.

A life ends in three ways. The member reports it as lost: its engine has died. Or the member has
been silent for `link_timeout_s`, and others are ready: the fleet abandons the life. Or the member
drains and its time is over: what it has left moves, and no request is a suspect for that. What
comes from a life that has ended is ignored. After a crash a request begins in a step of its own,
whichever member computes it, and one that is alone in a second crash is given up
(`replicas.blame`): a request takes two members with it at most.

Tokens are the same wherever a stream goes on if both engines compute the same bits, so members with
equal `Fingerprint`s are taken first. `moved_streams` says what happens where there is none: "any"
goes on with another one and counts it; "exact" ends the stream with a `MovedStreamError`. A
request without tokens may go anywhere. A member with another model is kept out, and named.

Lock: one for all of it. It is held while outputs are delivered, so that those of one request stay
in order though it moves between threads. It is taken before a member's own lock, never after.
"""

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
from infer.replicas.journal import RequestJournal
from infer.replicas.member import Loss, Member
from infer.replicas.router import LeastRouter, MemberLoad, Router, num_tokens_of
from infer.threads import BackgroundThread
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineCounters, EngineGauges, EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

LINK_TIMEOUT_S = 5.0
"""seconds of silence after which a member's requests move to others"""
RETURN_S = 3.0
"""seconds after an engine's death for which the requests that it had wait for its next life rather
than behind the streams of others"""
WATCH_S = 0.2
"""interval in seconds at which silent and draining members are looked at"""

MovedStreams = Literal["any", "exact"]


@dataclass(eq=False, slots=True)
class _Life:
    """One life of a member; the holder of its requests in the journal."""

    place: _Place
    number: int
    load: MemberLoad
    fingerprint: Fingerprint


@dataclass(eq=False, slots=True)
class _Place:
    """What the fleet knows about a member over all its lives."""

    member: Member
    life: _Life | None = None
    """None while the member has no engine that takes requests, and after its life was abandoned"""
    numbers: str | None = None
    """`Fingerprint.numbers` of its latest life; None before the first"""
    returns_by_s: float = 0.0
    """until when its next life is expected, while it has none"""
    drain_ends_s: float | None = None
    """when what it has left moves; None while it does not drain"""
    is_gone: bool = False
    why_kept_out: str = ""
    """why it gets no requests: it is not of this fleet"""

    @property
    def has_future(self) -> bool:
        """Whether requests may wait for it."""
        return self.member.is_alive and not self.is_gone and not self.why_kept_out

    def is_silent(self, link_timeout_s: float) -> bool:
        """Whether nothing comes from it any more."""
        return self.member.link_silence_s >= link_timeout_s


@dataclass(slots=True)
class _Counts:
    """What only the fleet can count."""

    num_moved: int = 0
    num_moved_unequal: int = 0
    departed: EngineCounters = field(default_factory=EngineCounters)
    """counters of the members that have left"""


class Fleet:
    """An `EngineClient` and the listener of its members; see the module's docstring."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        router: Router | None = None,
        link_timeout_s: float = LINK_TIMEOUT_S,
        moved_streams: MovedStreams = "any",
        watch_s: float = WATCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`members`: with different names; others may join later. `clock` is for drains."""
        self._clock = clock
        self._router = router or LeastRouter()
        self._link_timeout_s = link_timeout_s
        self._moved_streams = moved_streams
        self._watch_s = watch_s
        self._lock = threading.RLock()
        self._journal = RequestJournal()
        self._places = {member.name: _Place(member) for member in members}
        self._has_names = len(members) != 1
        """whether steps name their member: there are several, or others come and go"""
        if len(self._places) < len(members):
            raise ValueError("two members have the same name")
        self._identity: Fingerprint | None = None
        """of the first member that was ready; others serve the same model"""
        self._limits = fleet_limits([member.limits for member in members]) if members else None
        self._counts = _Counts()
        self._deliver: Deliver = lambda outputs, step_events: None
        self._died: Callable[[], None] = lambda: None
        self._is_started = self._is_stopping = False
        self._ended = threading.Event()
        self._watcher: BackgroundThread | None = None

    # ---- as an `EngineClient`

    @property
    def members(self) -> dict[str, Member]:
        """The members by name, in the order in which they joined."""
        return {name: place.member for name, place in list(self._places.items())}

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted; they may have to wait for a member."""
        places = list(self._places.values())
        return self._is_started and any(place.has_future for place in places)

    @property
    def is_ready(self) -> bool:
        """Whether a member works on requests and is not silent."""
        return any(self._is_serving(place) for place in list(self._places.values()))

    @property
    def is_silent(self) -> bool:
        """Whether all members that have an engine are silent; see `EngineClient`."""
        working = [p.member for p in list(self._places.values()) if p.life is not None]
        return bool(working) and all(member.is_silent for member in working)

    @property
    def silence_s(self) -> float:
        """The shortest silence of a member that has an engine; see `EngineClient`."""
        working = [p.member for p in list(self._places.values()) if p.life is not None]
        return min((member.silence_s for member in working), default=0.0)

    def start(self, deliver: Deliver, died: Callable[[], None]) -> None:
        """See `EngineClient`. `deliver` is called with a lock held: it may not wait and not call
        the fleet."""
        self._deliver, self._died = deliver, died
        self._is_started = True
        for place in list(self._places.values()):
            place.member.start(self)
        if len(self._places) > 1:
            self._watch()

    def join(self, member: Member) -> None:
        """Add a member and start it. Raises `ValueError` for a name that a member has."""
        with self._lock:
            old = self._places.get(member.name)
            if old is not None and not old.is_gone:
                raise ValueError(f"a member {member.name!r} is there already")
            self._places[member.name] = _Place(member)
            self._has_names = True
        member.start(self)
        self._watch()

    def leave(self, name: str) -> None:
        """Remove a member and stop it; what it had goes on elsewhere. Unknown names are ignored."""
        with self._lock:
            place = self._places.pop(name, None)
            if place is None:
                return
            self._release(place)
            self._dispatch()
        place.member.stop()
        with self._lock:
            departed = place.member.stats().counters
            self._counts.departed = self._counts.departed.plus(departed)

    def add(self, request: Request) -> None:
        """See `EngineClient`."""
        with self._lock:
            self._journal.add(request)
            self._dispatch()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `EngineClient`."""
        with self._lock:
            life = self._journal.drop(request_id)
            if isinstance(life, _Life):
                life.load.remove(request_id)
                life.place.member.abort(request_id, life.number, reason)
                self._dispatch()

    def stop(self) -> None:
        """See `EngineClient`. Members are stopped at the same time."""
        with self._lock:
            self._is_stopping = True
        self._ended.set()
        members = list(self.members.values())
        if len(members) == 1:
            members[0].stop()
        elif members:
            with ThreadPoolExecutor(len(members)) as pool:
                list(pool.map(lambda member: member.stop(), members))
        if self._watcher is not None:
            self._watcher.stop()

    def stats(self) -> EngineStats:
        """Sums over the members; see `EngineClient`."""
        with self._lock:
            counts = self._counts
            own = EngineCounters(
                num_moved=counts.num_moved, num_moved_unequal=counts.num_moved_unequal
            )
        return total([each.stats() for each in self.members.values()], own.plus(counts.departed))

    def stats_of_members(self) -> dict[str, EngineStats]:
        """See `EngineClient`."""
        members = self.members if self._has_names else {}
        return {name: member.stats() for name, member in members.items()}

    def ready_members(self) -> frozenset[str]:
        """See `EngineClient`."""
        places = list(self._places.items()) if self._has_names else []
        return frozenset(name for name, place in places if self._is_serving(place))

    # ---- as the listener of its members

    def ready(self, member: Member, life: int) -> int:
        """See `MemberListener`."""
        with self._lock:
            place = self._places.get(member.name)
            if place is None or place.member is not member or self._is_stopping:
                return 0
            place.why_kept_out = self._why_keep_out(member)
            if place.why_kept_out:
                log.error("%s is kept out of the fleet: %s", member.name, place.why_kept_out)
                return 0
            load = MemberLoad(member.name, member.limits)
            found = place.life = _Life(place, life, load, member.fingerprint)
            place.numbers = member.fingerprint.numbers
            self._follow(found)
            self._dispatch()
            return found.load.num_unfinished

    def reported(
        self,
        member: Member,
        life: int,
        outputs: list[StepOutput],
        step_events: StepEvents | None,
    ) -> None:
        """See `MemberListener`."""
        with self._lock:
            held = self._find(member, life)
            if held is None:
                return
            if step_events is not None:
                held.load.stepped(step_events)
                if self._has_names:
                    step_events = msgspec.structs.replace(step_events, member=member.name)
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

    def lost(self, member: Member, life: int, loss: Loss) -> bool:
        """See `MemberListener`."""
        with self._lock:
            held = self._find(member, life)
            if held is None or self._is_stopping:
                return False
            ends = self._crash(held, loss)
            held.place.returns_by_s = self._clock() + RETURN_S
            self._dispatch()
            return bool(ends)

    def draining(self, member: Member, timeout_s: float) -> None:
        """See `MemberListener`."""
        with self._lock:
            place = self._places.get(member.name)
            if place is None or place.member is not member or place.drain_ends_s is not None:
                return
            place.drain_ends_s = self._clock() + timeout_s
            num = 0 if place.life is None else self._journal.num_held(place.life)
            log.info("%s drains: it has %d requests", member.name, num)
        self._watch()

    def failing(self, member: Member, reason: str) -> None:
        """See `MemberListener`."""
        with self._lock:
            if any(place.has_future for place in self._places.values()):
                log.error("%s: %s; the others serve", member.name, reason)
                self._dispatch()
            else:
                log.error("%s: requests are refused", reason)
                self._fail_all()

    def gone(self, member: Member) -> None:
        """See `MemberListener`."""
        with self._lock:
            place = self._places.get(member.name)
            if place is None or place.member is not member or self._is_stopping:
                return
            place.is_gone = True
            if place.life is not None:
                self._crash(place.life, Loss(f"{member.name} has gone", from_outside=True))
            if all(each.is_gone for each in self._places.values()):
                self._died()
            elif not any(each.has_future for each in self._places.values()):
                self._fail_all()
            else:
                self._dispatch()

    # ---- inside; the lock is held

    def _find(self, member: Member, number: int) -> _Life | None:
        """A life of a member if it is the present one."""
        place = self._places.get(member.name)
        life = None if place is None or place.member is not member else place.life
        return life if life is not None and life.number == number else None

    def _follow(self, life: _Life) -> None:
        """Have the pages of a member reported if the router needs them."""
        if len(self._places) > 1 and self._router.should_follow(life.load):
            life.place.member.follow_pages(life.number)

    def _is_serving(self, place: _Place) -> bool:
        if place.life is None or not place.member.is_ready:
            return False
        # Where there is nobody else, only the member itself says when it is silent for too long.
        return len(self._places) == 1 or not place.is_silent(self._link_timeout_s)

    def _why_keep_out(self, member: Member) -> str:
        """Why a member is not of this fleet; "" if it is."""
        found, limits = member.fingerprint, self._limits
        if self._identity is None:
            self._identity = found
        if limits is None:
            self._limits = limits = member.limits
        wanted = self._identity
        if found.protocol != wanted.protocol:
            return f"it speaks version {found.protocol} of the protocol, not {wanted.protocol}"
        if found.model and wanted.model and found.model != wanted.model:
            return (
                f"its model (config and tokenizer {found.model[:12]}) is not the fleet's"
                f" ({wanted.model[:12]})"
            )
        if member.limits.max_seq_len < limits.max_seq_len:
            return (
                f"its max_seq_len is {member.limits.max_seq_len}, and requests may have"
                f" {limits.max_seq_len} tokens; start it with --max-seq-len {limits.max_seq_len}"
            )
        if member.limits.vocab_size != limits.vocab_size:
            return f"its vocabulary has {member.limits.vocab_size} ids, not {limits.vocab_size}"
        return ""

    def _crash(self, life: _Life, loss: Loss) -> list[StepOutput]:
        """End a life that takes its requests' engine with it; returns the ends of those that are
        given up."""
        count = self._journal.num_held(life)
        where = f"{life.place.member.name}: " if len(self._places) > 1 else ""
        log.error("%s%s with %d requests unfinished", where, loss.reason, count)
        life.place.life = None
        self._router.forget(life.load)
        ends = self._journal.crashed(loss.alone, from_outside=loss.from_outside, holder=life)
        if ends:
            log.error("request %s is to blame and is given up", loss.alone)
            self._deliver(ends, None)
        return ends

    def _release(self, place: _Place) -> None:
        """Move what a living member has left; nobody is a suspect for that."""
        life, place.life = place.life, None
        if life is None:
            return
        released = self._journal.release(life)
        for request_id in released:
            place.member.abort(request_id, life.number)
        self._router.forget(life.load)
        if released:
            log.info("%s: its %d requests go on elsewhere", place.member.name, len(released))

    def _dispatch(self) -> None:
        """Send what waits to members with room, in order of arrival. While an engine that has died
        is expected back, what engines have died with takes free seats only."""
        if self._is_stopping or not self._journal.num_unassigned:
            return
        for request in self._journal.unassigned():
            numbers = self._journal.numbers_of(request.request_id)
            lives = self._lives_for(request)
            equal = [life for life in lives if numbers in (None, life.fingerprint.numbers)]
            if lives and not equal and self._moved_streams == "exact":
                if not self._may_wait_for(numbers):
                    self._end_unequal(request)
                continue
            lives = equal or lives
            if request.num_crashes:
                # Behind the streams of a survivor it might wait for longer than for a new engine.
                free = [life for life in lives if life.load.has_seat]
                lives = free if free or self._is_one_expected() else lives
            life = self._choose(request, lives)
            if life is None:
                return
            self._send(request, life, is_unequal=life not in equal)

    def _lives_for(self, request: Request) -> list[_Life]:
        """The lives that take a request now; silent ones only where all are silent."""
        num_tokens = num_tokens_of(request)
        lives = [
            place.life
            for place in self._places.values()
            if place.life is not None
            and place.drain_ends_s is None
            and place.life.load.has_room(num_tokens, is_resumed=request.num_crashes > 0)
        ]
        if len(lives) < 2:
            return lives
        return [life for life in lives if self._is_serving(life.place)] or lives

    def _is_one_expected(self) -> bool:
        """Whether a member has lost its engine and will have the next one soon."""
        now_s = self._clock()
        places = self._places.values()
        return any(p.life is None and now_s < p.returns_by_s and p.has_future for p in places)

    def _choose(self, request: Request, lives: Sequence[_Life]) -> _Life | None:
        if len(lives) < 2:
            return lives[0] if lives else None
        chosen = self._router.choose(request, [life.load for life in lives])
        return next(life for life in lives if life.load is chosen)

    def _send(self, request: Request, life: _Life, *, is_unequal: bool) -> None:
        request_id, name = request.request_id, life.place.member.name
        is_moved = request.num_crashes > 0 or bool(request.output_token_ids)
        self._counts.num_moved += is_moved
        if is_unequal:
            request = replace(request, has_other_bits=True)
            self._counts.num_moved_unequal += 1
            log.warning(
                "request %s goes on at %s, which may compute other tokens: its fingerprint differs",
                *(request_id, name),
            )
        self._journal.assign(request_id, life, life.fingerprint.numbers)
        life.load.add(request)
        life.place.member.add(request, life.number)

    def _may_wait_for(self, numbers: str | None) -> bool:
        """Whether a member that computes these numbers may come back."""
        return any(p.numbers == numbers and p.has_future for p in self._places.values())

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
        """Have a thread that looks for silent members and for drains that are over."""
        with self._lock:
            if self._watcher is None and not self._is_stopping:
                self._watcher = BackgroundThread(self._run, self._ended.set, "infer-fleet")
                self._watcher.start()

    def _run(self) -> None:
        while not self._ended.wait(self._watch_s):
            self.check_health()

    def check_health(self) -> None:
        """Move what silent members have, and what drains have left when they are over; called every
        `watch_s` seconds while there are several members or one drains."""
        with self._lock:
            now_s = self._clock()
            for place in list(self._places.values()):
                if place.drain_ends_s is not None and now_s >= place.drain_ends_s:
                    self._release(place)
                self._leave_silent(place)
            self._dispatch()

    def _leave_silent(self, place: _Place) -> None:
        """Move the requests of a silent member if another one is ready."""
        life, member = place.life, place.member
        if life is None or not place.is_silent(self._link_timeout_s):
            return
        others = (each for each in self._places.values() if each is not place)
        if not any(self._is_serving(each) and each.drain_ends_s is None for each in others):
            return
        reason = f"silent for {member.link_silence_s:.1f} s"
        self._crash(life, Loss(reason, from_outside=True, alone=member.alone))
        member.abandon(life.number)


def fleet_limits(limits: Sequence[EngineLimits]) -> EngineLimits:
    """The limits of several engines as those of one: seats and queues are summed, and a request
    must fit into each of them."""
    first = limits[0]
    tokens = [each.max_waiting_tokens for each in limits if each.max_waiting_tokens is not None]
    return EngineLimits(
        vocab_size=first.vocab_size,
        max_seq_len=min(each.max_seq_len for each in limits),
        num_seats=sum(each.num_seats for each in limits),
        max_waiting_requests=sum(each.max_waiting_requests for each in limits),
        max_waiting_tokens=sum(tokens) if len(tokens) == len(limits) else None,
        batching_mode=first.batching_mode,
        page_size=first.page_size,
        prefix_caching=first.prefix_caching,
    )


def total(stats: Sequence[EngineStats], counters: EngineCounters) -> EngineStats:
    """Sums over engines, and further counters."""
    gauges: Mapping[str, Any] = {
        name: sum(getattr(each.gauges, name) for each in stats)
        for name in EngineGauges.__struct_fields__
    }
    for each in stats:
        counters = counters.plus(each.counters)
    return EngineStats(EngineGauges(**gauges), counters)
