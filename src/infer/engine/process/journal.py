"""`RequestJournal`: the requests an engine has been given, and the tokens each of them has
received.

It lives on the API side and makes the engine disposable: what a dead engine had not finished is
given to the next one with its tokens so far, and goes on at the same position with the same seed,
so with the same tokens. A request that takes engines with it must not go on for ever: after a crash
each request begins in a step of its own (`EngineCore.step`), and who was alone in the step in which
an engine has died again is not tried any more. The others are innocent, however often an engine
dies under them. Plain data, no threads; `engine.process.supervisor` holds the lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from infer.types import ErrorRecord, FinishReason, Request, StepOutput


@dataclass(slots=True)
class _Entry:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    num_crashes: int = 0
    num_alone: int = 0
    """crashes in a row in a step that computed nobody else"""


MAX_FROM_OUTSIDE = 3


class RequestJournal:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """A request is sent, or will be to the next engine."""
        self._entries[request.request_id] = _Entry(request)

    def drop(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        self._entries.pop(request_id, None)

    def record(self, outputs: Iterable[StepOutput]) -> list[StepOutput]:
        """Note what the engine has sent; returns the part that somebody waits for."""
        wanted = []
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            wanted.append(output)
            if output.token_id is not None:
                entry.token_ids.append(output.token_id)
                entry.num_alone = 0
            if output.finish_reason is not None:
                del self._entries[output.request_id]
        return wanted

    def crashed(self, alone: str | None, *, from_outside: bool) -> list[StepOutput]:
        """The engine died with all of these; returns the end of the one that is to blame, if any.

        `alone`: the request that was being computed by itself, if one was. `from_outside`: somebody
        else on the machine did it, so that once, and even twice, may be chance.
        """
        for entry in self._entries.values():
            entry.num_crashes += 1
        suspect = None if alone is None else self._entries.get(alone)
        if alone is None or suspect is None:
            return []
        suspect.num_alone += 1
        if suspect.num_alone < (MAX_FROM_OUTSIDE if from_outside else 1):
            return []
        message = "the engine died more than once while computing this request; it is given up"
        return [self._end(alone, ErrorRecord(message))]

    def fail_all(self, error: ErrorRecord) -> list[StepOutput]:
        """The ends of all."""
        return [self._end(request_id, error) for request_id in list(self._entries)]

    def resumed(self) -> list[Request]:
        """What the next engine is given, in order of arrival."""
        return [
            replace(
                entry.request,
                output_token_ids=tuple(entry.token_ids),
                num_crashes=entry.num_crashes,
            )
            for entry in self._entries.values()
        ]

    def _end(self, request_id: str, error: ErrorRecord) -> StepOutput:
        del self._entries[request_id]
        return StepOutput(request_id, None, FinishReason.ERROR, error=error)
