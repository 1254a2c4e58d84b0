"""`Seats`: the sequences of the batch and their pages"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from infer.schedule.admission import make_admission
from infer.schedule.fair_share import FairShare
from infer.schedule.page_allocator import PageTable
from infer.schedule.scheduler_state import SchedulerState
from infer.schedule.sequence import Sequence, Status
from infer.schedule.waiting_queue import WaitingQueue, rank_of
from infer.types.step_events import Admitted, Preempted


class Seats:
    """A seat is a place in the batch. Its sequence runs, or has lost its pages and waits for them
    to be free again. The admission decides who gets a seat; pages belong to the allocator. Pages
    are handed out in order of rank: a sequence that needs one more may preempt those behind it.
    Used by the scheduler and its parts. It is the `Room` that an admission fills."""

    def __init__(
        self, state: SchedulerState, queue: WaitingQueue, forget: Callable[[Sequence], None]
    ) -> None:
        """`forget` is called with a sequence that loses its pages."""
        self._state, self._queue, self._forget = state, queue, forget
        self._allocator = state.allocator
        self.admission = make_admission(state.config, state.clock)
        self.waiting, self.clock = queue.sequences, state.clock
        self.running: list[Sequence] = []
        """Sequences with pages, in order of rank."""
        self.preempted: list[Sequence] = []
        """Sequences that have a seat and no pages, in order of rank."""
        self.queues = {
            Status.WAITING: self.waiting,
            Status.RUNNING: self.running,
            Status.PREEMPTED: self.preempted,
        }
        """The queue of the unfinished sequences of each status."""
        self.held: list[PageTable] = []
        """Pages of sequences that have ended, held until their batch ends."""

    @property
    def fair_share(self) -> FairShare:
        """See `Room`."""
        return self._state.fair_share

    @property
    def num_free(self) -> int:
        """Number of seats that a newcomer could get."""
        return self.admission.num_free(len(self.running) + len(self.preempted))

    # Growing and losing pages.

    def grow_running(self) -> None:
        """Give each running sequence the pages for all its tokens, in order of rank."""
        running, grow, page_size = self.running, self._allocator.grow, self._allocator.page_size
        for sequence in list(running):
            num_tokens = len(sequence.tokens)
            if num_tokens <= len(sequence.table.pages) * page_size:
                continue
            if num_tokens >= sequence.max_length:
                continue  # its last token is never computed
            while sequence.status is Status.RUNNING and not grow(
                sequence.table, len(sequence.tokens)
            ):
                share = self.fair_share
                victim = share.richest(running)[0] if share.several else running[-1]
                self.preempt(victim, sequence)

    def preempt(self, sequence: Sequence, needed_by: Sequence | None = None) -> None:
        """Take a running sequence's pages; see `Scheduler.preempt`."""
        assert sequence.status is Status.RUNNING
        self.running.remove(sequence)
        needed_by_id = None if needed_by is None else needed_by.request_id
        self._state.pending_events.append(
            Preempted(sequence.request_id, sequence.num_computed, needed_by_id)
        )
        self._allocator.release(sequence.table)
        self._forget(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self._state.stats.num_preemptions += 1
        if self.fair_share.several and not self.admission.keeps_seats:
            self._queue.put_back(sequence)
        else:
            sequence.status = Status.PREEMPTED
            insort(self.preempted, sequence, key=rank_of)

    def keep_within_limit(self) -> None:
        """Preempt those that use more pages than the allocator's `limit`; the first one goes on."""
        while len(self.running) > 1 and self._allocator.num_used > self._allocator.limit:
            self.preempt(self.running[-1], self.running[0])

    # Getting a seat. Preempted sequences come back first; no sequence is skipped.

    def admit(self, flush: bool) -> None:
        """Give preempted sequences their pages back, then open seats to those that wait.

        `flush`: no further request will arrive."""
        while self.preempted:
            if not self.seat(self.preempted[0]):
                return
            del self.preempted[0]
        num_waiting, num_running = len(self.waiting), len(self.running)
        num_open = self.admission.num_open(self.clock(), num_waiting, num_running, flush)
        events = self._state.pending_events
        index = len(events)
        if (event := self.admission.fill(self, num_open)) is not None:
            events.insert(index, event)
            self._state.stats.count_formed(event)

    def free_seat(self, sequence: Sequence) -> bool:
        """Preempt a sequence of the tenant with most seats, if that tenant then still has at least
        as many as the newcomer's tenant gets. So seats are shared evenly, and two tenants can never
        take the same seat from each other in turn."""
        if not self.running or not self.fair_share.several:
            return False
        victim, seats = self.fair_share.richest(self.running)
        if seats[victim.tenant_share] < seats[sequence.tenant_share] + 2:
            return False
        self.preempt(victim, sequence)
        return True

    def seat(self, sequence: Sequence) -> bool:
        """Admit a sequence if the pages for all its tokens are free; returns whether it was."""
        if sequence.is_pending:
            return False  # it was preempted and can be recomputed only when its token is known
        allocator, state = self._allocator, self._state
        request = sequence.request
        table = allocator.match(sequence.tokens, request.cache_scope, request.num_public)
        needed = allocator.pages_for(len(sequence.tokens)) - len(table.pages)
        # Leave a page for each running sequence that will need one; else it would preempt at once.
        reserve = sum(1 for running in self.running if self._wants_pages(running))
        if needed + reserve > allocator.num_available:
            allocator.release(table)
            return False
        grown = allocator.grow(table, len(sequence.tokens))
        assert grown
        sequence.table = table
        self.skip_cached(sequence)
        if sequence.admitted_s is None:
            sequence.admitted_s = self.clock()
            state.stats.num_prompt_tokens += sequence.num_prompt
            if not request.output_token_ids:  # its wait was counted by the engine that had it
                state.stats.count_wait(sequence.admitted_s - sequence.queued_s)
        num_tokens, batch_id = len(sequence.tokens), self.admission.batch_id
        state.pending_events.append(
            Admitted(sequence.request_id, sequence.num_computed, num_tokens, batch_id)
        )
        sequence.status = Status.RUNNING
        sequence.last_turn = state.num_turns
        insort(self.running, sequence, key=rank_of)
        return True

    def skip_cached(self, sequence: Sequence) -> None:
        """Move `num_computed` to the end of the pages that were found in the index."""
        num_cached = sequence.table.num_indexed * self._allocator.page_size
        if num_cached > sequence.num_computed:
            spared = min(num_cached, sequence.num_prompt) - sequence.num_computed
            if not sequence.num_preemptions and spared > 0:  # pages it computed itself do not count
                sequence.num_cached += spared
                self._state.stats.num_cached_tokens += spared
            sequence.num_computed = num_cached

    def _wants_pages(self, sequence: Sequence) -> bool:
        final = sequence.num_prompt + sequence.request.max_tokens - 1
        return self._allocator.pages_for(final) > len(sequence.table.pages)

    # Ending.

    def leave(self, sequence: Sequence) -> None:
        """Take an unfinished sequence out of its queue, and its pages, which are held until its
        batch ends where the settings say so."""
        self.queues[sequence.status].remove(sequence)
        if sequence.admitted_s is not None:
            self.admission.leave(sequence)
        if self._state.config.hold_pages_until_batch_ends:
            self.held.append(sequence.table)
        else:
            self._allocator.release(sequence.table)
        self._forget(sequence)

    def end_batch(self) -> None:
        """When the batch has ended, give held pages back and count what padding would cost."""
        if self.running or self.preempted:
            return
        for table in self.held:
            self._allocator.release(table)
        self.held.clear()
        if (event := self.admission.end_batch()) is not None:
            self._state.pending_events.append(event)
            self._state.stats.count_batch(event)
