"""`Command`: what an engine is asked between two steps, wherever it runs.

The same records go through the queue of a thread and over the socket of a process, where msgspec
decodes them.
"""

from __future__ import annotations

import msgspec

from infer.types import FinishReason, Request


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Accept a request."""

    request: Request
    sent_s: float | None = None
    """Time at which it was handed over, on the clock of `StepEvents`; None: when it is taken."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End a request now; unknown ids are ignored."""

    request_id: str
    reason: FinishReason = FinishReason.ABORT


class FollowPages(msgspec.Struct, frozen=True, array_like=True, tag="pages"):
    """Report which pages the prefix index holds: all of them, then changes; again if it did so
    before. See `StepEvents.page_changes`."""


class Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """End all requests now; nobody waits for them here any more. Another generation of the engine
    begins; see `replicas.messages`."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End the engine after the step that runs; whatever is in flight is dropped."""


Command = Add | Abort | FollowPages | Reset | Stop
