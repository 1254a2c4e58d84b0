"""`RequestJournal`: the unfinished requests of an engine, with the tokens each of them has received

It lives on the API side and makes the engine disposable. The next engine gets the requests that a
dead one had not finished, with their tokens so far; each goes on at the same position with the same
seed, so with the same tokens. `engine.process.blame` decides which request is given up after a
crash. The journal is plain data without threads; `engine.process.supervisor` holds a lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from infer.engine.process.blame import GIVEN_UP, CrashHistory
from infer.types import ErrorRecord, FinishReason, Request, StepOutput


@dataclass(slots=True)
class _Entry:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    """output tokens that the caller has been sent"""
    crashes: CrashHistory = field(default_factory=CrashHistory)


class RequestJournal:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Add a request that is sent to this engine or will be sent to the next one."""
        self._entries[request.request_id] = _Entry(request)

    def drop(self, request_id: str) -> None:
        """Forget a request that nobody waits for; unknown ids are ignored."""
        self._entries.pop(request_id, None)

    def record(self, outputs: Iterable[StepOutput]) -> list[StepOutput]:
        """Record outputs of the engine; returns those of requests that are in the journal."""
        wanted = []
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            wanted.append(output)
            if output.token_id is not None:
                entry.token_ids.append(output.token_id)
                if entry.crashes.num_alone:
                    entry.crashes.record_token()
            if output.finish_reason is not None:
                del self._entries[output.request_id]
        return wanted

    def crashed(self, alone: str | None, *, from_outside: bool) -> list[StepOutput]:
        """The engine died with all requests; returns the end of the one that is to blame, if any.

        `alone`: id of the request that was being computed alone, if one was. `from_outside`:
        somebody else on the machine ended the engine.
        """
        ends = []
        for request_id, entry in list(self._entries.items()):
            entry.crashes.record_crash(alone=request_id == alone)
            if request_id == alone and entry.crashes.is_to_blame(from_outside=from_outside):
                ends.append(self._end(request_id, GIVEN_UP))
        return ends

    def fail_all(self, error: ErrorRecord) -> list[StepOutput]:
        """End all requests with an error; returns their outputs."""
        return [self._end(request_id, error) for request_id in list(self._entries)]

    def resumed(self) -> list[Request]:
        """The requests for the next engine, in order of arrival."""
        return [
            replace(
                entry.request,
                output_token_ids=tuple(entry.token_ids),
                num_crashes=entry.crashes.num_crashes,
            )
            for entry in self._entries.values()
        ]

    def _end(self, request_id: str, error: ErrorRecord) -> StepOutput:
        del self._entries[request_id]
        return StepOutput(request_id, None, FinishReason.ERROR, error=error)
