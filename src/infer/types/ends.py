"""`FinishReason`: why a sequence ended; `end_of`: what that is called, wherever it is shown.

One table for answers, traces, metrics, logs, spans and counts: a reason that is added to
`FinishReason` must be added here, or nothing passes the type checker.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple, assert_never


class FinishReason(StrEnum):
    """Why a sequence ended; every request ends in exactly one of these."""

    EOS = "eos"
    """The model ended it with one of its end-of-sequence tokens."""
    STOP = "stop"
    """A stop string or a stop token id of the request was reached."""
    COMPLETE = "complete"
    """What the request's grammar wants is complete, and nothing may follow."""
    LENGTH = "length"
    """`max_tokens` were generated."""
    ABORT = "abort"
    """The caller left or cancelled."""
    ERROR = "error"
    """Refused by the engine, or the engine failed on it; `StepOutput.error` says which."""


EndCounter = Literal["num_requests_finished", "num_requests_cancelled", "num_requests_failed"]
DISCONNECTED = "disconnected"
NORMAL_OUTCOMES = ("stop", "length")


class End(NamedTuple):
    """What one end is called."""

    word: str | None
    """OpenAI's `finish_reason`; None: it was not finished but broken off."""
    outcome: str
    """In traces, metrics, logs and spans."""
    counter: EndCounter
    """The field of `RequestCounters` in which it is counted."""


def end_of(reason: FinishReason | None) -> End:
    """`reason`: None where the caller has left before the end."""
    match reason:
        case FinishReason.EOS | FinishReason.STOP | FinishReason.COMPLETE:
            return End("stop", "stop", "num_requests_finished")
        case FinishReason.LENGTH:
            return End("length", "length", "num_requests_finished")
        case FinishReason.ABORT | None:
            return End(None, DISCONNECTED, "num_requests_cancelled")
        case FinishReason.ERROR:
            return End(None, "error", "num_requests_failed")
        case _:
            assert_never(reason)


def outcome_of(reasons: set[FinishReason | None], *, failed: bool = False) -> str:
    """Of a request with several choices; `failed`: it was answered with an error."""
    outcomes = {end_of(reason).outcome for reason in reasons}
    if outcomes <= set(NORMAL_OUTCOMES):
        return "length" if "length" in outcomes else "stop"
    return "error" if failed or "error" in outcomes else DISCONNECTED
