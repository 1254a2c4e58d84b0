"""`WaitingQueue`: the requests without a seat, in order of rank, and who may join them"""

from __future__ import annotations

from bisect import bisect, insort
from operator import attrgetter

from infer.errors import OverloadedError, RequestError, too_long, too_many_tokens
from infer.schedule.scheduler_state import SchedulerState
from infer.schedule.sequence import Sequence, Status
from infer.types import Request
from infer.types.step_events import Queued, Resumed

MAX_NAMED = 4
"""Maximum number of requests ahead in the queue that a "queued" event names."""

rank_of = attrgetter("rank")
"""The rank of a sequence, by which all queues are ordered."""


class WaitingQueue:
    """A request is refused at once if it could never be served, or if the queue is full, in
    requests or in prompt tokens. Requests for which seats are free do not count as waiting: the
    caller says how many seats are free. Used by the scheduler and its `Seats`."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.sequences: list[Sequence] = []
        """The sequences that wait, in order of rank."""

    def check(self, request: Request, num_seats: int, num_free_seats: int) -> None:
        """Raise `RequestError` if a request can never be served or its id is in use, and
        `OverloadedError` if the queue is full."""
        state = self._state
        if request.request_id in state.by_id:
            raise RequestError(f"a request with id {request.request_id!r} is already running")
        self._check_fits(request)
        if error := self._overload(request, num_seats, num_free_seats):
            state.stats.num_requests_refused += 1
            raise error

    def _check_fits(self, request: Request) -> None:
        """Raise `RequestError` if a request could not be served even by an idle engine; the code is
        `context_length_exceeded`."""
        max_seq_len, allocator = self._state.config.max_seq_len, self._state.allocator
        num_prompt = len(request.prompt_token_ids)
        total = num_prompt + request.max_tokens
        if total > max_seq_len:
            excess = f"prompt ({num_prompt}) + max_tokens ({request.max_tokens}) is {total}"
            raise too_long(max_seq_len, excess, param="max_tokens")
        # The last token is sampled but never computed, so it takes no place in the cache.
        pages, usable = allocator.pages_for(total - 1), allocator.num_usable
        if pages > usable:
            raise RequestError(
                f"prompt ({num_prompt} tokens) + max_tokens ({request.max_tokens}) needs"
                f" {pages} pages of KV cache; the whole cache has {usable}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _overload(
        self, request: Request, num_seats: int, num_free_seats: int
    ) -> OverloadedError | None:
        config, num_unfinished = self._state.config, len(self._state.by_id)
        if num_unfinished >= num_seats + config.max_waiting_requests:
            message = f"the queue is full: {num_unfinished} requests are running or waiting"
            return OverloadedError(message)
        num_prompt = len(request.prompt_token_ids)
        # What an engine before this one had accepted is not refused.
        if request.num_crashes or self.may_wait(num_prompt, num_free_seats):
            return None
        assert config.max_waiting_tokens is not None
        waiting = self._num_tokens(num_free_seats)
        return too_many_tokens(waiting, num_prompt, config.max_waiting_tokens)

    def may_wait(self, num_prompt: int, num_free_seats: int) -> bool:
        """Whether one more request with a prompt of `num_prompt` tokens stays within
        `max_waiting_tokens`."""
        limit = self._state.config.max_waiting_tokens
        if limit is None or len(self.sequences) < num_free_seats:
            return True
        return self._num_tokens(num_free_seats) + num_prompt <= limit

    def _num_tokens(self, num_free_seats: int) -> int:
        return sum(sequence.num_prompt for sequence in self.sequences[num_free_seats:])

    def add(self, sequence: Sequence, num_running: int) -> None:
        """Accept a sequence that has arrived, and record the event."""
        self._state.pending_events.append(self._event(sequence, num_running))
        insort(self.sequences, sequence, key=rank_of)

    def _event(self, sequence: Sequence, num_running: int) -> Queued | Resumed:
        waiting = self.sequences
        index = bisect(waiting, sequence.rank, key=rank_of)
        before = tuple(s.request_id for s in waiting[max(0, index - MAX_NAMED) : index])
        request = sequence.request
        if request.num_crashes or request.output_token_ids:
            other_bits = request.has_other_bits
            return Resumed(sequence.request_id, index, num_running, before, other_bits)
        return Queued(sequence.request_id, index, num_running, before)

    def put_back(self, sequence: Sequence) -> None:
        """Have a sequence that has lost its seat wait again."""
        sequence.status = Status.WAITING
        insort(self.sequences, sequence, key=rank_of)
