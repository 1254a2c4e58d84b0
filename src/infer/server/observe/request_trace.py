"""`Stories`: what happened to each request, told by the engine's steps, for whoever asks why.

An `Observer` of the engine. A story is kept from the moment when a request is accepted until
`MAX_RECENT` others of its owner have ended after it (or so many of all that those with the most
give theirs up); it has at most `MAX_EVENTS` events and the `NUM_GAPS`
slowest gaps between two tokens, each with what the slowest step in it was doing. What is paid for
each token of each request is one look-up, one subtraction and two comparisons. Ids are those that
the server makes; the names of other owners' requests are not shown.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import CancelledError, RequestError
from infer.server.http.context import Visit
from infer.server.http.error_responses import HttpError
from infer.types import FinishReason, Request, StepOutput
from infer.types.ends import outcome_of
from infer.types.step_events import Happening, StepFacts

MAX_RECENT = 256
"""of one owner"""
MAX_RECENT_IN_ALL = 1024
MAX_EVENTS = 128
NUM_GAPS = 5
MAX_STEPS = 256
"""steps back to which a slow gap can be explained"""
GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


@dataclass(slots=True)
class Track:
    """One choice of a request: what the engine calls a request."""

    story: Story
    index: int
    state: str = "queued"
    num_tokens: int = 0
    num_cached: int = 0
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    reason: FinishReason | None = None


@dataclass(slots=True)
class Story:
    """One request of a client."""

    id: str
    owner: str
    visit: Visit
    num_prompt: int
    max_tokens: int
    tracks: dict[str, Track] = field(default_factory=dict)
    """by the engine's ids"""
    events: list[dict[str, Any]] = field(default_factory=list)
    num_untold: int = 0
    gaps: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """the slowest first; seconds, and what is told of it"""
    ended_s: float | None = None
    outcome: str | None = None
    error: RequestError | None = None
    """with which it was cancelled"""

    def tell(self, at_s: float, choice: int, kind: str, **details: Any) -> None:
        """Add an event, while there is room; the last place is kept for the end."""
        if len(self.events) < MAX_EVENTS - (kind != "finished"):
            own = {"choice": choice} if choice else {}
            self.events.append({"at_ms": self.ms(at_s), "event": kind, **own, **details})
        else:
            self.num_untold += 1

    @property
    def state(self) -> str:
        """The furthest that one of its choices has got."""
        if self.outcome is not None:
            return "finished"
        states = [track.state for track in self.tracks.values() if track.reason is None]
        order = ("running", "preempted", "queued")
        return next((state for state in order if state in states), "running")

    def sum_of(self, name: str) -> int:
        """Of a count of its choices."""
        return sum(getattr(track, name) for track in self.tracks.values())

    @property
    def num_preemptions(self) -> int:
        """Of those that were told."""
        return sum(event["event"] == "preempted" for event in self.events)

    def ms(self, time_s: float | None) -> float | None:
        """Since it was received."""
        return None if time_s is None else round(1000 * (time_s - self.visit.received_s), 3)

    def earliest(self, name: str) -> float | None:
        """When the first of its choices got to a point."""
        times = [getattr(track, name) for track in self.tracks.values()]
        return min((time_s for time_s in times if time_s is not None), default=None)


class Histogram:
    """Counts by size."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Stories:
    """See the module's docstring. Lives on the event loop."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._open: dict[str, Story] = {}
        self._ended: dict[str, Story] = {}
        self._ended_of: dict[str, dict[str, None]] = {}
        """the ids of those of each owner, the oldest first"""
        self._tracks: dict[str, Track] = {}
        self._steps: deque[StepFacts] = deque(maxlen=MAX_STEPS)
        self.on_step: list[Callable[[StepFacts], None]] = []
        self.on_end: list[Callable[[Story], None]] = []
        self.gaps = Histogram(GAP_BUCKETS_S)
        engine.observer = self

    # ---- from the server

    def begin(
        self, answer_id: str, visit: Visit, owner: str, requests: Sequence[Request], num_prompt: int
    ) -> Story:
        """A request is accepted; its story ends when its visit does."""
        story = Story(answer_id, owner, visit, num_prompt, requests[0].max_tokens)
        for index, request in enumerate(requests):
            track = Track(story, index)
            story.tracks[request.request_id] = self._tracks[request.request_id] = track
        self._open[visit.id] = story
        story.tell(visit.received_s, 0, "received")
        visit.leaving.callback(self._end, story)
        return story

    def _end(self, story: Story) -> None:
        for name in story.tracks:
            del self._tracks[name]
        story.ended_s = time.monotonic()
        reasons = {track.reason for track in story.tracks.values()}
        if story.error is not None:
            story.outcome = story.error.code
        else:
            story.outcome = outcome_of(reasons, failed=story.visit.status >= 400)
        story.tell(story.ended_s, 0, "finished", outcome=story.outcome)
        del self._open[story.visit.id]
        self._ended[story.visit.id] = story
        own = self._ended_of.setdefault(story.owner, {})
        own[story.visit.id] = None
        if len(own) > MAX_RECENT:
            self._forget(story.owner)
        elif len(self._ended) > MAX_RECENT_IN_ALL:
            self._forget(max(self._ended_of, key=lambda owner: len(self._ended_of[owner])))
        story.visit.told = summary(story)
        for listener in self.on_end:
            listener(story)

    def _forget(self, owner: str) -> None:
        """The oldest one of an owner."""
        own = self._ended_of[owner]
        oldest = self._ended.pop(next(iter(own)))
        oldest.tracks.clear()  # they hold it: only the garbage collector would find it
        del own[oldest.visit.id]
        if not own:
            del self._ended_of[owner]

    def cancel(self, story: Story, error: RequestError | None = None) -> bool:
        """End a request that runs; its client gets `error`. False if it has ended already."""
        if story.outcome is not None or story.error is not None:
            return False
        message = "this request was cancelled"
        story.error = error or CancelledError(message, code="request_cancelled")
        for name in story.tracks:
            self._engine.cancel(name, story.error)
        return True

    def find(self, name: str, owner: str | None) -> Story:
        """By the id of the answer, or of its `x-request-id` where the client sent none; somebody
        else's is not found (`owner` None: everybody's are one's own)."""
        key = name.rpartition("-")[2]
        story = self._open.get(key) or self._ended.get(key)
        if story is None or name not in (key, story.id) or owner not in (None, story.owner):
            raise not_found()
        return story

    def all(self, owner: str | None) -> Iterator[Story]:
        """Those that run, then those that have ended, the newest first."""
        for stories in (self._open, self._ended):
            for story in reversed(stories.values()):
                if owner in (None, story.owner):
                    yield story

    @property
    def num_choices(self) -> int:
        """Of everybody's requests, that have not ended."""
        return sum(track.reason is None for track in self._tracks.values())

    def num_queued(self, owner: str) -> int:
        """Choices of an owner's requests that wait for a seat. Not counted where nobody has a key:
        it looks at everything that is open."""
        tracks = self._tracks.values() if owner else ()
        return sum(t.story.owner == owner and t.state == "queued" for t in tracks)

    # ---- from the engine

    def stepped(self, outputs: list[StepOutput], facts: StepFacts | None) -> None:
        """See `Observer`. This is the hot path: B sequences pass here in each step."""
        if facts is None:
            return
        self._steps.append(facts)
        tracks, now_s = self._tracks, facts.ended_s
        for fact in facts.happenings:
            if (track := tracks.get(fact.request_id)) is not None:
                self._happened(track, fact, facts)
        known_s, bucket = -1.0, 0
        for output in outputs:
            track = tracks.get(output.request_id)
            if track is None or output.token_id is None:
                continue
            track.num_tokens += 1
            if track.first_s is None:
                track.first_s, track.num_cached = now_s, output.num_cached
                track.story.tell(now_s, track.index, "first_token")
            else:
                gap_s = now_s - track.last_s
                if gap_s != known_s:  # most of a step's have waited for the same time
                    known_s, bucket = gap_s, bisect_left(GAP_BUCKETS_S, gap_s)
                self.gaps.counts[bucket] += 1
                self.gaps.sum += gap_s
                gaps = track.story.gaps
                if len(gaps) < NUM_GAPS or gap_s > gaps[-1][0]:
                    self._note_gap(track, gap_s, facts)
            track.last_s = now_s
        for listener in self.on_step:
            listener(facts)

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """See `Observer`."""
        if (track := self._tracks.get(request_id)) is not None:
            track.reason = reason

    def _happened(self, track: Track, fact: Happening, facts: StepFacts) -> None:
        at_s = facts.ended_s if fact.kind == "chunk" else facts.started_s
        if fact.kind == "admitted":
            track.state = "running"
            if track.admitted_s is None:
                track.admitted_s = at_s
        elif fact.kind != "chunk":
            track.state = "preempted" if fact.kind == "preempted" else "queued"
        others = [self._shown(name, track.story) for name in fact.others]
        match fact.kind:
            case "queued" | "resumed":
                details = {"waiting_before": fact.num, "running": fact.total, "behind": others}
            case "admitted":
                details = {"cached_tokens": fact.num, "of_tokens": fact.total}
            case "chunk":
                details = {"from_token": fact.num, "tokens": fact.total}
            case _:
                details = {"lost_tokens": fact.num, "needed_by": others}
        details["step"] = facts.number
        track.story.tell(at_s, track.index, fact.kind, **details)

    def _shown(self, name: str, story: Story) -> str:
        """How a request is called in the story of another one."""
        track = self._tracks.get(name)
        if track is None or track.story.owner != story.owner:
            return "somebody else's"
        return "another choice of it" if track.story is story else track.story.id

    def _note_gap(self, track: Track, gap_s: float, facts: StepFacts) -> None:
        story = track.story
        within = [step for step in self._steps if step.started_s >= track.last_s]
        slowest = max(within, key=lambda step: step.ended_s - step.started_s, default=facts)
        chunks = [fact for fact in slowest.happenings if fact.kind == "chunk"]
        told = {
            "gap_ms": round(1000 * gap_s, 3),
            "at_ms": story.ms(facts.ended_s),
            "token": track.num_tokens,
            "choice": track.index,
            "steps": max(1, len(within)),
            "slowest_step": {
                "step": slowest.number,
                "step_ms": round(1000 * (slowest.ended_s - slowest.started_s), 3),
                "sequences": slowest.num_sequences,
                "prompt_tokens": sum(fact.total for fact in chunks),
                "prompts_of": [self._shown(fact.request_id, story) for fact in chunks[:4]],
            },
        }
        story.gaps.append((gap_s, told))
        story.gaps.sort(key=lambda gap: -gap[0])
        del story.gaps[NUM_GAPS:]


def not_found() -> HttpError:
    """There is none of this name, or it is somebody else's."""
    message = "there is no such request; the server remembers those that run and"
    return HttpError(404, f"{message} {MAX_RECENT} more", code="request_not_found")


def summary(story: Story) -> dict[str, Any]:
    """What a list shows."""
    return story.visit.told or {
        "id": story.id,
        "object": "request",
        "client_request_id": story.visit.client_id,
        "path": story.visit.path,
        "created": int(story.visit.received_at),
        "state": story.state,
        "outcome": story.outcome,
        "choices": len(story.tracks),
        "prompt_tokens": story.num_prompt,
        "cached_tokens": story.sum_of("num_cached"),
        "completion_tokens": story.sum_of("num_tokens"),
        "max_tokens": story.max_tokens,
        "preemptions": story.num_preemptions,
        "admitted_ms": story.ms(story.earliest("admitted_s")),
        "first_token_ms": story.ms(story.earliest("first_s")),
        "total_ms": story.ms(story.ended_s),
    }


def view(story: Story) -> dict[str, Any]:
    """The whole story. Times are milliseconds since the request was received."""
    return {
        **summary(story),
        "events": sorted(story.events, key=itemgetter("at_ms")),
        "events_left_out": story.num_untold,
        "slowest_gaps": [told for _, told in story.gaps],
    }
