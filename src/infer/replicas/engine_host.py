"""`EngineHost`: one engine that serves several fronts, and its ends of their links

It is the listener of its engine. Each front gets the outputs of its own requests and the events of
all steps, through a queue that is bounded in bytes: an engine never waits for a front. A link whose
queue is full, or whose front is silent, is dropped with its requests; the front's journal has them.
It knows no Ray: `take` and `command` are called by whatever carries the items.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from infer.replicas.link_messages import (
    LinkAbandon,
    LinkAbort,
    LinkAdd,
    LinkBeat,
    LinkCommand,
    LinkDraining,
    LinkEvent,
    LinkFailing,
    LinkFollow,
    LinkLost,
    LinkReady,
    LinkReport,
    LinkSign,
    decode_commands,
    encode,
)
from infer.replicas.member import Loss, Member
from infer.replicas.router import MemberLoad
from infer.types import StepOutput
from infer.types.step_events import ForeignLoad, StepEvents

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 32 << 20
"""bytes that wait for one front before its link is dropped"""
MAX_SILENCE_S = 10.0
"""seconds without a sign of a front after which its link is dropped"""
MISSING_S = 3.0
"""seconds for which commands wait for an earlier one before their link is dropped"""
ITEM_S = 0.02
"""seconds from an item of a link to the next one: short steps share an item, for Ray takes some
milliseconds of CPU for each. Where steps take longer, nothing waits"""
SILENT_S = 2.5
"""seconds without a sign of the engine's process, which gives one every `HEARTBEAT_S`, after which
no life of a link begins"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What one engine has to do."""

    num_waiting_tokens: float = 0.0
    """prompt tokens of requests without a seat"""
    prompt_tokens_per_s: float = 0.0
    """measured; 0 where nothing has been measured"""
    num_unfinished: float = 0.0
    """requests with or without a seat"""
    num_seats: float = 1.0


class FrontLink:
    """The queue of one front, and the requests that it has here."""

    def __init__(self, front: str, load: MemberLoad, wake: Callable[[], None]) -> None:
        """`wake` is called, by any thread, when there is something to take."""
        self.front = front
        """name of the front"""
        self.epoch = 0
        """number of its present life; 0 before the first"""
        self.is_waiting = False
        """whether its next life begins as soon as the engine's process answers"""
        self.load = load
        """its requests"""
        self.requests: set[str] = set()
        """ids of its requests"""
        self.heard_s = time.monotonic()
        self.is_closed = False
        self._wake = wake
        self._lock = threading.Lock()
        self._events: list[bytes] = []
        self._num_bytes = 0

    def touch(self) -> None:
        """The front has given a sign."""
        self.heard_s = time.monotonic()

    def end_life(self) -> None:
        """The front has ended its life, and waits for the next one."""
        self.is_waiting = True

    def begin(self, load: MemberLoad, epoch: int) -> None:
        """Another life begins, with nothing to do."""
        self.epoch, self.load, self.is_waiting = epoch, load, False

    def put(self, event: LinkEvent) -> bool:
        """Queue an event; returns False, and closes the link, where the queue is full."""
        body = encode(event)
        with self._lock:
            if self._num_bytes + len(body) > MAX_QUEUED_BYTES:
                self.close()
                return False
            self._num_bytes += len(body)
            self._events.append(body)
        self._wake()
        return True

    def take(self) -> bytes | None:
        """All events that wait, as one item; None if there are none."""
        with self._lock:
            bodies = list(self._events)
            self._events.clear()
            self._num_bytes = 0
        return encode([msgspec.Raw(body) for body in bodies]) if bodies else None

    def close(self) -> None:
        """Nothing more comes."""
        self.is_closed = True
        self._wake()


class EngineHost:
    """See the module's docstring. A `MemberListener`."""

    def __init__(self, member: Member, *, first_epoch: int = 1) -> None:
        """`first_epoch`: above all numbers of a host whose place this one takes."""
        self._member = member
        self._next_epoch = first_epoch
        self._lock = threading.RLock()
        self._links: dict[str, FrontLink] = {}
        self._owners: dict[str, FrontLink] = {}
        self._life = 0
        """number of the engine's life; 0 while it has none"""
        self._drain_timeout_s: float | None = None
        self._prompt_tokens = self._prompt_s = 0.0

    # ---- for whoever carries the items

    def attach(self, front: str, wake: Callable[[], None]) -> FrontLink:
        """A link to a front, in place of the one that it had."""
        with self._lock:
            self.detach(front)
            link = FrontLink(front, MemberLoad(front, self._member.limits), wake)
            self._links[front] = link
            self._send_heartbeat(link)
            if self._drain_timeout_s is not None:
                link.put(LinkDraining(self._drain_timeout_s))
            elif self._life:
                self._begin(link)
            return link

    def detach(self, front: str, only: FrontLink | None = None) -> None:
        """Drop a link and the requests of its front; `only`: if it is this one."""
        with self._lock:
            link = self._links.get(front)
            if link is None or (only is not None and link is not only):
                return
            del self._links[front]
            self._drop_requests(link)
            link.close()

    def command(self, front: str, item: bytes) -> None:
        """Obey the commands of a front."""
        with self._lock:
            link = self._links.get(front)
            if link is None:
                return
            link.touch()
            for command in decode_commands(item):
                self._obey(link, command)

    def heartbeat(self) -> None:
        """Say that this machine is alive, and drop the links of fronts that do not; called every
        `BEAT_S`."""
        with self._lock:
            for link in list(self._links.values()):
                if time.monotonic() - link.heard_s > MAX_SILENCE_S or link.is_closed:
                    log.warning("the link to %s is dropped", link.front)
                    self.detach(link.front)
                else:
                    self._send_heartbeat(link)
                    if link.is_waiting and self._life and not self._is_silent:
                        self._begin(link)

    def computes_alone(self) -> None:
        """Say which request the engine computes alone: this machine may vanish with it."""
        with self._lock:
            for link in self._links.values():
                self._send_heartbeat(link)

    def drain(self, timeout_s: float) -> None:
        """Tell all fronts that this engine will end."""
        with self._lock:
            self._drain_timeout_s = timeout_s
            for link in self._links.values():
                link.put(LinkDraining(timeout_s))

    @property
    def is_draining(self) -> bool:
        """Whether the engine will end."""
        return self._drain_timeout_s is not None

    @property
    def num_unfinished(self) -> int:
        """Requests of all fronts."""
        return len(self._owners)

    def load(self) -> EngineLoad:
        """What the engine has to do."""
        with self._lock:
            rate = self._prompt_tokens / self._prompt_s if self._prompt_s else 0.0
            return EngineLoad(
                num_waiting_tokens=sum(x.load.num_waiting_tokens for x in self._links.values()),
                prompt_tokens_per_s=rate,
                num_unfinished=len(self._owners),
                num_seats=self._member.limits.num_seats,
            )

    # ---- as the listener of the engine

    def ready(self, member: Member, life: int) -> int:
        """See `MemberListener`."""
        with self._lock:
            self._life = life
            if not self.is_draining:
                for link in self._links.values():
                    self._begin(link)
        return 0

    def reported(
        self, member: Member, life: int, outputs: list[StepOutput], step_events: StepEvents | None
    ) -> None:
        """See `MemberListener`."""
        with self._lock:
            if life != self._life:
                return
            self._measure(step_events)
            parts: dict[str, list[StepOutput]] = {name: [] for name in self._links}
            for output in outputs:
                if (link := self._owners.get(output.request_id)) is None:
                    continue
                if output.prompt_logprobs:
                    output = output._replace(prompt_logprobs=tuple(output.prompt_logprobs))
                parts[link.front].append(output)
                if output.finish_reason is not None:
                    self._forget(link, output.request_id)
            for link in list(self._links.values()):
                if step_events is not None:
                    link.load.stepped(step_events)
            stats = member.stats()
            for link in list(self._links.values()):
                if link.epoch and (parts[link.front] or step_events is not None):
                    events = self._events_for(link, step_events)
                    if not link.put(LinkReport(link.epoch, parts[link.front], events, stats)):
                        log.warning("%s reads too slowly: its link is dropped", link.front)
                        self.detach(link.front)

    def lost(self, member: Member, life: int, loss: Loss) -> bool:
        """See `MemberListener`. The fronts decide who is to blame."""
        with self._lock:
            self._life = 0
            for link in self._links.values():
                if link.epoch:
                    link.put(LinkLost(link.epoch, loss.reason, loss.from_outside, loss.alone))
                self._drop_requests(link, is_engine_alive=False)
        return False

    def draining(self, member: Member, timeout_s: float) -> None:
        """See `MemberListener`."""
        self.drain(timeout_s)

    def failing(self, member: Member, reason: str) -> None:
        """See `MemberListener`."""
        with self._lock:
            for link in self._links.values():
                self._send_heartbeat(link)
                link.put(LinkFailing(reason))

    def gone(self, member: Member) -> None:
        """See `MemberListener`: all links end."""
        with self._lock:
            for front in list(self._links):
                self.detach(front)

    # ---- inside; the lock is held

    @property
    def _is_silent(self) -> bool:
        return self._member.link_silence_s > SILENT_S

    def _begin(self, link: FrontLink) -> None:
        link.begin(MemberLoad(link.front, self._member.limits), self._next_epoch)
        self._next_epoch += 1
        link.put(LinkReady(link.epoch, self._member.fingerprint))

    def _send_heartbeat(self, link: FrontLink) -> None:
        member = self._member
        link.put(
            LinkBeat(
                member.stats(),
                member.silence_s,
                member.link_silence_s,
                member.alone,
                member.is_ready and member.link_silence_s < MAX_SILENCE_S,
                member.is_alive,
            )
        )

    def _obey(self, link: FrontLink, command: LinkCommand) -> None:
        if isinstance(command, LinkSign) or command.epoch != link.epoch or not self._life:
            return
        match command:
            case LinkAdd(_, request):
                self._owners[request.request_id] = link
                link.requests.add(request.request_id)
                link.load.add(request)
                self._member.add(request, self._life)
            case LinkAbort(_, request_id, reason):
                if request_id in link.requests:
                    self._forget(link, request_id)
                    self._member.abort(request_id, self._life, reason)
            case LinkFollow():
                self._member.follow_pages(self._life)
            case LinkAbandon():
                self._drop_requests(link)
                if not self.is_draining:
                    link.end_life()
                    if not self._is_silent:
                        self._begin(link)

    def _forget(self, link: FrontLink, request_id: str) -> None:
        self._owners.pop(request_id, None)
        link.requests.discard(request_id)
        link.load.remove(request_id)

    def _drop_requests(self, link: FrontLink, *, is_engine_alive: bool = True) -> None:
        for request_id in list(link.requests):
            self._forget(link, request_id)
            if is_engine_alive and self._life:
                self._member.abort(request_id, self._life)

    def _events_for(self, link: FrontLink, step_events: StepEvents | None) -> StepEvents | None:
        """The events of a step, with what the engine has to do for the other fronts."""
        if step_events is None or len(self._links) == 1:
            return step_events
        others = [each.load for each in self._links.values() if each is not link]
        load = ForeignLoad(
            sum(each.num_waiting for each in others),
            sum(each.num_running for each in others),
            sum(each.num_waiting_tokens for each in others),
        )
        return msgspec.structs.replace(step_events, foreign_load=load)

    def _measure(self, step_events: StepEvents | None) -> None:
        if step_events is None:
            return
        if num_prompt := step_events.num_prompt_tokens:
            self._prompt_tokens = 0.98 * self._prompt_tokens + num_prompt
            took_s = step_events.ended_s - step_events.started_s
            self._prompt_s = 0.98 * self._prompt_s + took_s


class CommandOrder:
    """Puts the commands of fronts in order, where what carries them keeps none.

    A front numbers its links, and its commands on each link from 0. A command that never comes is
    noticed by those behind it, for a living front gives a sign every `BEAT_S`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fronts: dict[str, _Arrivals] = {}

    def arrived(self, front: str, link: int, number: int, item: bytes) -> list[bytes]:
        """The commands that may be obeyed now that this one has come."""
        with self._lock:
            arrivals = self._fronts.get(front)
            if arrivals is None or arrivals.link < link:
                arrivals = self._fronts[front] = _Arrivals(link)
            return arrivals.add(number, item) if arrivals.link == link else []

    def incomplete(self) -> list[str]:
        """The fronts of which a command is missing for `MISSING_S`; each is named once."""
        with self._lock:
            late = [name for name, each in self._fronts.items() if each.is_incomplete]
            for front in late:
                del self._fronts[front]
            return late

    def forget(self, front: str, link: int) -> None:
        """A link has ended."""
        with self._lock:
            arrivals = self._fronts.get(front)
            if arrivals is not None and arrivals.link == link:
                del self._fronts[front]


class _Arrivals:
    """What has come on the latest link of a front."""

    def __init__(self, link: int) -> None:
        self.link = link
        self._next_number = 0
        self._early: dict[int, bytes] = {}
        """commands that have come before an earlier one"""
        self._complete_s = time.monotonic()
        """when a command could be obeyed for the last time"""

    def add(self, number: int, item: bytes) -> list[bytes]:
        """See `CommandOrder.arrived`."""
        self._early[number] = item
        ready = []
        while (found := self._early.pop(self._next_number, None)) is not None:
            ready.append(found)
            self._next_number += 1
        if ready:
            self._complete_s = time.monotonic()
        return ready

    @property
    def is_incomplete(self) -> bool:
        """See `CommandOrder.incomplete`."""
        return bool(self._early) and time.monotonic() - self._complete_s > MISSING_S


async def link_items(
    host: EngineHost, front: str, *, every_s: float = ITEM_S
) -> AsyncIterator[bytes]:
    """The items for a front until its link ends, each with all that has happened since the last.

    `every_s`: seconds between two of them, at least.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    next_s = loop.time()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so will the link
            loop.call_soon_threadsafe(arrived.set)

    link = host.attach(front, wake)
    try:
        while True:
            if (early_s := next_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            arrived.clear()
            if (item := link.take()) is not None:
                next_s = loop.time() + every_s
                yield item
            elif link.is_closed:
                return
            else:
                await arrived.wait()
    finally:
        host.detach(front, link)
