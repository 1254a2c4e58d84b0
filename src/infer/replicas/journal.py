"""`RequestJournal`: the unfinished requests of a fleet, with the tokens that each has received"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from infer.replicas.blame import GIVEN_UP, CrashHistory
from infer.types import ErrorRecord, FinishReason, Request, StepOutput


@dataclass(slots=True)
class _Entry:
    request: Request
    number: int
    """Number of arrival."""
    holder: object = None
    """The generation of an engine that has it; None while it waits for one."""
    token_ids: list[int] = field(default_factory=list)
    """Output tokens that the caller has been sent."""
    crashes: CrashHistory = field(default_factory=CrashHistory)
    numbers: str = ""
    """`Fingerprint.numbers` of the engine that computed its latest token."""

    def resumed(self) -> Request:
        """The request for another engine."""
        return replace(
            self.request,
            output_token_ids=tuple(self.token_ids),
            num_crashes=self.crashes.num_crashes,
        )


class RequestJournal:
    """It lives on the API side and makes every engine disposable. A request is held by one
    generation of one engine, or waits for one. Another engine gets the requests that a dead one had
    not finished, with their tokens so far; each goes on at the same position with the same seed, so
    with the same tokens. What a holder reports of a request that it no longer holds is ignored.
    `replicas.blame` decides which request is given up after a crash, over all engines. The journal
    is plain data without threads; `replicas.fleet` holds a lock. A holder is any object; it is
    compared by identity."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._unassigned: dict[str, _Entry] = {}
        """The entries without a holder, in order of arrival."""
        self._held: dict[int, dict[str, _Entry]] = {}
        """`id` of each holder → its entries, so that a death costs what it had."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_unassigned(self) -> int:
        """Number of requests that wait for an engine."""
        return len(self._unassigned)

    def add(self, request: Request) -> None:
        """Add a request that nobody holds yet."""
        entry = _Entry(request, self._num_added)
        self._num_added += 1
        self._entries[request.request_id] = self._unassigned[request.request_id] = entry

    def drop(self, request_id: str) -> object:
        """Forget a request that nobody waits for; returns its holder. Unknown ids are ignored."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        held = self._of(entry.holder)
        held.pop(request_id, None)
        if not held:
            self._held.pop(id(entry.holder), None)
        return entry.holder

    def _of(self, holder: object) -> dict[str, _Entry]:
        """The entries of a holder; those without one for None."""
        return self._unassigned if holder is None else self._held.get(id(holder), {})

    def unassigned(self) -> Iterator[Request]:
        """The requests that wait for an engine, with their tokens so far, in order of arrival. The
        caller may assign and end each of them."""
        # A step of any engine asks for the first of those that wait, however many there are.
        while (first := next(iter(self._unassigned.values()), None)) is not None:
            yield first.resumed()
            if first.request.request_id in self._unassigned:
                break  # left where it is
        for entry in list(self._unassigned.values())[1:]:
            if entry.request.request_id in self._unassigned:
                yield entry.resumed()

    def numbers_of(self, request_id: str) -> str | None:
        """`Fingerprint.numbers` of the engine that computed the tokens of a request so far; None
        where it has none."""
        entry = self._entries[request_id]
        return entry.numbers if entry.token_ids else None

    def assign(self, request_id: str, holder: object, numbers: str = "") -> None:
        """Give a request that waits to a holder; `numbers`: `Fingerprint.numbers` of its engine."""
        entry = self._unassigned.pop(request_id)
        entry.holder, entry.numbers = holder, numbers
        self._held.setdefault(id(holder), {})[request_id] = entry

    def record(self, outputs: Iterable[StepOutput], holder: object = None) -> list[StepOutput]:
        """Record outputs of a holder; returns those of requests that it holds."""
        wanted = []
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None or entry.holder is not holder:
                continue
            wanted.append(output)
            if output.token_id is not None:
                entry.token_ids.append(output.token_id)
                if entry.crashes.num_isolated:
                    entry.crashes.record_token()
            if output.finish_reason is not None:
                self.drop(output.request_id)
        return wanted

    def num_held(self, holder: object) -> int:
        """Number of requests that a holder has."""
        return len(self._of(holder))

    def crashed(
        self, isolated: str | None, *, from_outside: bool, holder: object = None
    ) -> list[StepOutput]:
        """A holder died with all its requests, which wait for another one now; returns the end of
        the one that is to blame, if any.

        `isolated`: id of the request that was being computed alone, if one was. `from_outside`:
        somebody else on the machine ended the engine.
        """
        ends = []
        for request_id, entry in list(self._of(holder).items()):
            entry.crashes.record_crash(isolated=request_id == isolated)
            if request_id == isolated and entry.crashes.is_to_blame(from_outside=from_outside):
                ends.append(self.end(request_id, GIVEN_UP))
        self.release(holder)
        return ends

    def release(self, holder: object) -> list[str]:
        """Have all requests of a holder wait for another one; returns their ids. Unlike a crash it
        says nothing about the requests."""
        if holder is None:
            return list(self._unassigned)
        released = self._held.pop(id(holder), {})
        for name, entry in released.items():
            entry.holder = None
            self._unassigned[name] = entry
        if released:
            by_arrival = sorted(self._unassigned.items(), key=lambda item: item[1].number)
            self._unassigned = dict(by_arrival)
        return list(released)

    def fail_all(self, error: ErrorRecord) -> list[StepOutput]:
        """End all requests with an error; returns their outputs."""
        return [self.end(request_id, error) for request_id in list(self._entries)]

    def end(self, request_id: str, error: ErrorRecord) -> StepOutput:
        """End a request with an error; returns its last output."""
        self.drop(request_id)
        return StepOutput(request_id, None, FinishReason.ERROR, error=error)
