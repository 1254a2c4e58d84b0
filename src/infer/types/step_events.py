"""`StepEvents`: what happened in a step, apart from its tokens.

The scheduler records what happens to a request: one class for each kind of event. A step in which
everybody decodes records nothing, so recording costs nothing where it would cost most. The events
go out with the step's outputs; `requests.state` makes the state of each request of them. A kind and
its fields have their public names here, which traces and frames use (`requests.event_fields`).
"""

from __future__ import annotations

import msgspec
from msgspec import field

from infer.types.page_changes import PageChanges


class _Waiting(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    num_before: int = field(name="waiting_before")
    """Requests that wait before it."""
    num_running: int = field(name="running")
    """Requests that have a seat."""
    behind: tuple[str, ...] = ()
    """Ids of the next few of those before it."""


class Queued(_Waiting, frozen=True, tag="queued"):
    """A request waits for a seat."""


class Resumed(_Waiting, frozen=True, tag="resumed"):
    """A request waits for a seat again, because the engine that had it has died or drains."""

    has_other_bits: bool = field(default=False, name="tokens_may_differ")
    """See `Request.has_other_bits`."""


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag="admitted"):
    """A request gets a seat, and pages for all its tokens."""

    request_id: str
    num_cached: int = field(name="cached_tokens")
    """Tokens that were found in the prefix cache."""
    num_tokens: int = field(name="of_tokens")
    """All tokens that it has now."""
    batch_id: str | None = None
    """Id of the static batch that it joins (see `BatchFormed`); None in the other modes."""


class ComputedChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """A part of a request's tokens is computed; a single output token is no event."""

    request_id: str
    start: int = field(name="from_token")
    """Position of the first token of the part."""
    num_tokens: int = field(name="tokens")


class Preempted(msgspec.Struct, frozen=True, array_like=True, tag="preempted"):
    """A request loses its pages, and all that was computed of it."""

    request_id: str
    num_lost: int = field(name="lost_tokens")
    """Tokens that had been computed."""
    needed_by: str | None = None
    """Id of the request that needed the pages or the seat."""


class Speculated(msgspec.Struct, frozen=True, array_like=True, tag="speculated"):
    """A request for which tokens were proposed has ended."""

    request_id: str
    num_proposed: int = field(name="proposed")
    """Tokens that were proposed."""
    num_accepted: int = field(name="accepted")
    """Tokens of them that are part of the answer."""


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="first_token"):
    """A request gets its first token. No engine records it: it follows from the outputs."""

    request_id: str
    num_cached: int = field(default=0, name="cached_tokens")
    """Prompt tokens that were found in the prefix cache, also after its admission."""


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """A request has ended. No engine records it: it follows from the outputs."""

    request_id: str
    outcome: str
    """See `types.ends`."""
    num_output: int = field(name="output_tokens")
    """All its output tokens."""


class BatchFormed(msgspec.Struct, frozen=True, array_like=True, tag="batch_formed"):
    """Static mode: a batch begins. An `Admitted` for each of its requests follows in the step."""

    batch_id: str
    """Id of the batch; no other batch of this engine, or of one before or after it, has it."""
    created_s: float
    """Time of its creation, on the clock of `StepEvents`."""
    num_requests: int
    wait_s: float
    """Longest time, in seconds, that one of its requests had waited for it."""
    num_prompt_tokens: int
    """Sum of the lengths of its requests, in tokens."""
    num_padded_tokens: int
    """The same sum if each request were padded to the longest one; never computed."""


class BatchEnded(msgspec.Struct, frozen=True, array_like=True, tag="batch_ended"):
    """Static mode: the last request of a batch has ended. There is one batch at a time."""

    batch_id: str
    num_tokens: int
    """Prompt and output tokens of its requests."""
    num_padded_tokens: int
    """The same sum if each request were padded to the longest one; never computed."""


RecordedEvent = Queued | Resumed | Admitted | ComputedChunk | Preempted | Speculated
"""An event of the request that its `request_id` names, as the scheduler records it."""
RequestEvent = RecordedEvent | FirstToken | Finished
"""All that can happen to a request, apart from its further tokens."""
BatchEvent = BatchFormed | BatchEnded
"""An event of the static batch that its `batch_id` names."""
StepEvent = RecordedEvent | BatchEvent


class ForeignLoad(msgspec.Struct, frozen=True, array_like=True):
    """The requests of the other clients of an engine."""

    num_waiting: int
    """Requests without a seat."""
    num_running: int
    """Requests with a seat."""
    num_prompt_tokens: int
    """Prompt tokens that have to be computed before their first tokens."""


class StepEvents(msgspec.Struct, frozen=True, array_like=True):
    """One step, and what happened since the one before. Times are those of `time.monotonic`, which
    all processes of a machine share."""

    number: int
    """Steps of this engine so far."""
    started_s: float
    ended_s: float
    num_sequences: int
    """Sequences that were computed in the step."""
    events: tuple[StepEvent, ...] = ()
    """In the order in which they happened."""
    num_free_pages: int = 0
    """Pages that no request uses after the step; their content may still be found."""
    num_indexed_pages: int = 0
    """Pages whose content the prefix index knows after the step."""
    page_changes: PageChanges | None = None
    """Changes of the prefix index, where somebody follows it (`FollowPages`). An engine with
    nothing to compute reports them in records without a sequence and without events."""
    foreign_load: ForeignLoad | None = None
    """What the engine has to do for other clients, where it has several."""
    replica: str = ""
    """Name of the engine among those of its fleet; "" where there is one engine."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that were computed in the step."""
        return sum(event.num_tokens for event in self.events if isinstance(event, ComputedChunk))

    @property
    def is_idle(self) -> bool:
        """Whether nothing was computed and nothing happened to a request."""
        return not self.num_sequences and not self.events
