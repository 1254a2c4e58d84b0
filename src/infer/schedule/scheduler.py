"""`Scheduler`: which sequences move forward in the next step, and by how many tokens

A step distributes three resources in three passes. Pages belong to the allocator: a running
sequence that needs one more page may preempt those behind it. Seats are places in the batch; the
admission decides how many waiting sequences get one, and a sequence takes it only if the pages for
all its tokens are free. Tokens come from the step's budget and are offered in the policy's order.

`advance` moves the numbers of a step that has been launched; its sampled tokens are then pending.
`commit` stores the tokens, indexes full pages, decides finish reasons and gives pages back. A
runner that works ahead has the next step scheduled and launched between the two.

Liveness. Sequences are totally ordered by rank, and only finitely many ever go before a given one
(`Sequence.rank`). `add` refuses a request whose maximum length does not fit the whole pool. The
first in rank of the running sequences can preempt all others, so it always gets its pages, and no
running sequence is passed over for long (`_hand_out_tokens`). So it finishes. Its seat and pages
then go to the first in rank of those that wait, because admission never skips a sequence. So every
sequence is served eventually. Between tenants, `schedule.fair_share` decides about seats and tokens
by the number of tokens that each tenant has been given.

Called by `engine.core` only. It knows no tensors, no text and no threads; its clock is injected.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from operator import attrgetter

from infer.config import SchedulerConfig
from infer.errors import OverloadedError, RequestError, too_many_tokens
from infer.schedule.admission import make_admission
from infer.schedule.arrival import check_fits, queued
from infer.schedule.drafting import Drafter
from infer.schedule.fair_share import FairShare
from infer.schedule.page_allocator import Key, PageAllocator, PageTable
from infer.schedule.policy import MAX_IDLE_STEPS, find_policy
from infer.schedule.sequence import (
    PENDING,
    Advanced,
    Chunk,
    Plan,
    Sampled,
    Sequence,
    Status,
    TenantShare,
)
from infer.schedule.speculation import Allowed, Speculator
from infer.schedule.static_batches import StaticBatches
from infer.schedule.stats import SchedulerStats
from infer.schedule.step_budget import StepBudget
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.ends import end_of
from infer.types.step_events import Admitted, ComputedChunk, Preempted, Speculated, StepEvent

_rank = attrgetter("rank")
_last_turn = attrgetter("last_turn")


class Scheduler:
    """See the module's docstring."""

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        clock: Callable[[], float],
        allowed: Allowed | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`clock` gives seconds. `allowed` cuts proposed tokens where a grammar forbids them; None:
        sequences with grammars are not proposed for. `drafter`: the draft model of speculation."""
        self.config = config
        self.allocator = allocator
        self.stats = SchedulerStats()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self._queues = {
            Status.WAITING: self.waiting,
            Status.RUNNING: self.running,
            Status.PREEMPTED: self.preempted,
        }
        self.pending_events: list[StepEvent] = []
        """events since the last step; the caller that steps takes them and clears the list"""
        self.fair_share = FairShare()
        """counts the tokens computed for each tenant"""
        self._admission = make_admission(config)
        is_static = config.batching_mode == "static"
        self._static_batches = StaticBatches(config.static_order, clock()) if is_static else None
        self._policy = find_policy(config.scheduler_policy)
        self._recomputes = not config.keep_computed
        self.clock = clock
        self.by_id: dict[str, Sequence] = {}
        """the unfinished requests by id; not to be changed from outside"""
        self._num_arrived = 0
        self._num_turns = 0
        self._step_budget = StepBudget(config.max_step_ms) if config.max_step_ms else None
        self._speculator = (
            Speculator(config.speculative, allocator, self.stats, allowed, drafter)
            if config.speculative
            else None
        )
        self._planned_s = 0.0
        self._held: list[PageTable] = []
        self._launched: tuple[Advanced, ...] = ()
        """chunks of the step launched last; empty after it has been committed"""

    @property
    def num_seats(self) -> int:
        """Maximum number of sequences in the batch."""
        return self._admission.num_seats

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self.by_id)

    @property
    def unfinished(self) -> list[Sequence]:
        """The requests that have not ended, in order of arrival."""
        return list(self.by_id.values())

    def find(self, request_id: str) -> Sequence:
        """The unfinished request of this id; raises `RequestError` if there is none."""
        sequence = self.by_id.get(request_id)
        if sequence is None:
            message = f"there is no unfinished request with id {request_id!r}"
            raise RequestError(message, param="request_id", code="request_not_found")
        return sequence

    def num_batches_last_minute(self) -> int:
        """Number of static batches that were formed in the last minute; 0 in the other modes."""
        batches = self._static_batches
        return 0 if batches is None else batches.num_formed_since(self.clock() - 60)

    def add(self, request: Request, sent_s: float | None = None) -> Sequence:
        """Put a request into the waiting queue; `sent_s`: see `EngineCore.add`.

        Raises `OverloadedError` if the queue is full, in requests or in prompt tokens;
        `RequestError` if the request can never fit or its id is in use.
        """
        if request.request_id in self.by_id:
            raise RequestError(f"a request with id {request.request_id!r} is already running")
        check_fits(request, self.config.max_seq_len, self.allocator)
        if error := self._overload(request):
            self.stats.num_requests_refused += 1
            raise error
        sequence = Sequence.from_request(request, self._num_arrived)
        sequence.queued_s = self.clock() if sent_s is None else sent_s
        self._num_arrived += 1
        self.by_id[request.request_id] = sequence
        self.fair_share.join(sequence)
        self.pending_events.append(queued(sequence, self.waiting, len(self.running)))
        insort(self.waiting, sequence, key=_rank)
        self.stats.num_submitted += 1
        return sequence

    def _overload(self, request: Request) -> OverloadedError | None:
        if self.num_unfinished >= self.num_seats + self.config.max_waiting_requests:
            message = f"the queue is full: {self.num_unfinished} requests are running or waiting"
            return OverloadedError(message)
        # What an engine before this one had accepted is not refused.
        if request.num_crashes or self.may_wait(num_prompt := len(request.prompt_token_ids)):
            return None
        assert self.config.max_waiting_tokens is not None
        waiting = self._num_waiting_tokens()
        return too_many_tokens(waiting, num_prompt, self.config.max_waiting_tokens)

    def may_wait(self, num_prompt: int) -> bool:
        """Whether one more request with a prompt of `num_prompt` tokens stays within
        `max_waiting_tokens`. Requests for which seats are free do not count."""
        limit = self.config.max_waiting_tokens
        if limit is None or len(self.waiting) < self._num_free_seats():
            return True
        return self._num_waiting_tokens() + num_prompt <= limit

    def _num_waiting_tokens(self) -> int:
        return sum(s.num_prompt for s in self.waiting[self._num_free_seats() :])

    def _num_free_seats(self) -> int:
        num_seated = len(self.running) + len(self.preempted)
        if num_seated and self._static_batches is not None:
            return 0  # nobody joins a batch that runs
        return max(0, self.num_seats - num_seated)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> StepOutput | None:
        """End a request now, in whatever queue it is; None, and no change, for an unknown id."""
        return self._end(request_id, reason)

    def fail(self, request_id: str, error: ErrorRecord) -> StepOutput | None:
        """Like `abort`, for a request that failed with `error`."""
        return self._end(request_id, FinishReason.ERROR, error)

    def _end(
        self, request_id: str, reason: FinishReason, error: ErrorRecord | None = None
    ) -> StepOutput | None:
        sequence = self.by_id.get(request_id)
        if sequence is None:
            return None
        self._finish(sequence, reason)
        self._end_batch()
        return StepOutput(request_id, None, reason, num_cached=sequence.num_cached, error=error)

    def schedule(self, *, flush: bool = False) -> Plan:
        """Decide the next step.

        `flush`: no further request will arrive, so a static batch that is not full need not wait.
        """
        if self._step_budget or self._speculator:
            self._planned_s = self.clock()
        self._grow_running()
        self._admit(flush)
        plan = self._hand_out_tokens()
        if self._speculator is None or not plan:
            return plan
        budget = self.config.max_num_batched_tokens
        if not self._recomputes:
            budget = min(budget, self.config.max_tokens_beside_streams or budget)
        num_left = budget - sum(chunk.num_tokens for chunk in plan)
        return tuple(self._speculator.extend(plan, num_left))

    def wait_s(self) -> float | None:
        """Seconds until a step may do something without a further event; None if only an event can
        change anything."""
        opens_at_s = self._admission.opens_at_s()
        if opens_at_s is None:
            return None
        return max(0.0, opens_at_s - self.clock())

    # Pages. In order of rank, so that the sequence preempted is behind the one that needs the page.

    def _grow_running(self) -> None:
        running, grow, page_size = self.running, self.allocator.grow, self.allocator.page_size
        for sequence in list(running):
            num_tokens = len(sequence.tokens)
            if num_tokens <= len(sequence.table.pages) * page_size:
                continue
            if num_tokens >= sequence.max_length:
                continue  # its last token is never computed
            while sequence.status is Status.RUNNING and not grow(
                sequence.table, len(sequence.tokens)
            ):
                several = self.fair_share.several
                victim = self.fair_share.richest(running)[0] if several else running[-1]
                self.preempt(victim, sequence)

    def preempt(self, sequence: Sequence, needed_by: Sequence | None = None) -> None:
        """Take a running sequence's pages; it keeps its tokens and recomputes their keys and values
        later. It keeps its seat unless other tenants are present, who may go first.

        `needed_by`: the sequence that gets the pages, for the event."""
        assert sequence.status is Status.RUNNING
        self.running.remove(sequence)
        needed_by_id = None if needed_by is None else needed_by.request_id
        self.pending_events.append(
            Preempted(sequence.request_id, sequence.num_computed, needed_by_id)
        )
        self.allocator.release(sequence.table)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        if self.fair_share.several and self.config.batching_mode != "static":
            sequence.status = Status.WAITING
            insort(self.waiting, sequence, key=_rank)
        else:
            sequence.status = Status.PREEMPTED
            insort(self.preempted, sequence, key=_rank)

    def keep_within_limit(self) -> None:
        """Preempt sequences, the last in rank first, while those that run use more pages than the
        allocator's `limit`; the first one goes on."""
        while len(self.running) > 1 and self.allocator.num_used > self.allocator.limit:
            self.preempt(self.running[-1], self.running[0])

    # Seats. Preempted sequences come back first; no sequence is skipped.

    def _admit(self, flush: bool) -> None:
        while self.preempted:
            if not self._seat(self.preempted[0]):
                return
            del self.preempted[0]
        seats = self._admission.seats(self.clock(), len(self.waiting), len(self.running))
        if flush and seats == 0 and not self.running:
            seats = self.num_seats
        if self._static_batches is not None:
            self._form_batch(self._static_batches, seats)
            return
        while self.waiting:
            several = self.fair_share.several
            sequence = self.fair_share.next_of(self.waiting) if several else self.waiting[0]
            while seats <= 0 or not self._seat(sequence):
                if not several or not self._free_seat(sequence):
                    return
                seats += 1
            self.waiting.remove(sequence)
            seats -= 1

    def _form_batch(self, batches: StaticBatches, num_seats: int) -> None:
        """Admit a static batch of at most `num_seats`, as large as the free pages allow. Between
        several tenants, fair sharing decides who is in it."""
        if not self.waiting or num_seats <= 0:
            return
        several, members = self.fair_share.several, list[Sequence]()
        place = len(self.pending_events)
        batches.open()
        chosen = [] if several else list(batches.choose(self.waiting, num_seats))
        while self.waiting and len(members) < num_seats:
            number = len(members)
            sequence = self.fair_share.next_of(self.waiting) if several else chosen[number]
            if not self._seat(sequence):
                break
            self.waiting.remove(sequence)
            members.append(sequence)
        if members:
            event = batches.form(members, self.waiting, self.clock())
            self.pending_events.insert(place, event)
            self.stats.count_formed(event)

    def _free_seat(self, sequence: Sequence) -> bool:
        """Preempt a sequence of the tenant with most seats, if that tenant then still has at least
        as many as the newcomer's tenant gets. So seats are shared evenly, and two tenants can never
        take the same seat from each other in turn."""
        if not self.running:
            return False
        victim, seats = self.fair_share.richest(self.running)
        if seats[victim.tenant_share] < seats[sequence.tenant_share] + 2:
            return False
        self.preempt(victim, sequence)
        return True

    def _seat(self, sequence: Sequence) -> bool:
        """Admit a sequence if the pages for all its tokens are free; returns whether it was."""
        if sequence.is_pending:
            return False  # it was preempted and can be recomputed only when its token is known
        allocator = self.allocator
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
        self._skip_cached(sequence)
        if sequence.admitted_s is None:
            sequence.admitted_s = self.clock()
            self.stats.num_prompt_tokens += sequence.num_prompt
            if not request.output_token_ids:  # its wait was counted by the engine that had it
                self.stats.count_wait(sequence.admitted_s - sequence.queued_s)
        batch_id = None if self._static_batches is None else self._static_batches.current_id
        self.pending_events.append(
            Admitted(sequence.request_id, sequence.num_computed, len(sequence.tokens), batch_id)
        )
        sequence.status = Status.RUNNING
        sequence.last_turn = self._num_turns
        insort(self.running, sequence, key=_rank)
        return True

    def _skip_cached(self, sequence: Sequence) -> None:
        """Move `num_computed` to the end of the pages that were found in the index."""
        num_cached = sequence.table.num_indexed * self.allocator.page_size
        if num_cached > sequence.num_computed:
            spared = min(num_cached, sequence.num_prompt) - sequence.num_computed
            if not sequence.num_preemptions and spared > 0:  # pages it computed itself do not count
                sequence.num_cached += spared
                self.stats.num_cached_tokens += spared
            sequence.num_computed = num_cached

    def _wants_pages(self, sequence: Sequence) -> bool:
        final = sequence.num_prompt + sequence.request.max_tokens - 1
        return self.allocator.pages_for(final) > len(sequence.table.pages)

    # Tokens. First one for each sequence that was passed over too long, then by the policy.
    #
    # If several sequences have the same next page, one computes it and the others wait until it is
    # in the index. They wait only for a sequence that computes the page in this very step; if that
    # one ends, another takes its place at once. Such a wait counts as a turn, because it makes
    # progress. A sequence that has had no turn for MAX_IDLE_STEPS is owed a token. Owed tokens are
    # given first, in order of the last turn, at least one per step. So with S seats every sequence
    # gets a turn within MAX_IDLE_STEPS + S steps, whatever the policy and the budget.

    def _hand_out_tokens(self) -> Plan:
        allocator = self.allocator
        self._num_turns = turn = self._num_turns + 1
        running = []
        for sequence in self.running:
            tokens = sequence.tokens
            if tokens[-1] == PENDING and (
                len(tokens) >= sequence.max_length or sequence.reads_output or self._recomputes
            ):
                sequence.last_turn = turn  # it is being computed
            else:
                running.append(sequence)
        if self._recomputes:
            return self._hand_out_wholes(running)
        if self._all_may_decode(running):
            for sequence in running:
                sequence.last_turn = turn
            return tuple([Chunk(sequence, sequence.num_computed, 1) for sequence in running])
        streams = any(s.num_remaining == 1 for s in running)
        budget = self.config.max_num_batched_tokens
        if streams:
            budget = min(budget, self.config.max_tokens_beside_streams or budget)
        idle = [s for s in running if s.last_turn < turn - MAX_IDLE_STEPS]
        owed = sorted(idle, key=_last_turn)[:budget]
        budget -= len(owed)
        # Without streams no client waits for the end of this step, so its length is not bounded.
        step_budget = self._step_budget if streams else None
        prompt_limit, num_prompt = budget, 0
        computing = self._keys_being_computed()
        chunks = []
        several, ordered = self.fair_share.several, self.fair_share.ordered
        offered = ordered(self._policy(running)) if several else self._policy(running)
        first: TenantShare | None = None
        for sequence in offered:
            own = 1 if owed and sequence in owed else 0
            room = budget
            if is_prompt := sequence.num_remaining > 1:
                key = allocator.adopt(sequence.table, sequence.tokens)
                self._skip_cached(sequence)
                if key is not None and computing.get(key, sequence) is not sequence:
                    sequence.last_turn = turn
                    continue
                if step_budget:
                    prompt_limit = min(prompt_limit, step_budget.limit(sequence.num_computed))
                    room = max(0, min(room, prompt_limit - num_prompt))
                if first not in (None, sequence.tenant_share):
                    room = 0  # this chunk would delay another tenant's first token
            num_tokens = own + min(sequence.num_remaining - own, room)
            if not num_tokens:
                continue
            if is_prompt:
                if several and num_tokens == sequence.num_remaining:
                    first = first or sequence.tenant_share
                num_prompt += num_tokens
                if key is not None:
                    computing[key] = sequence
            budget -= num_tokens - own
            sequence.last_turn = turn
            chunks.append(Chunk(sequence, sequence.num_computed, num_tokens))
        return tuple(chunks)

    def _hand_out_wholes(self, running: Seq[Sequence]) -> Plan:
        """Chunks of all remaining tokens, for the sequences whose last turn is longest ago; as many
        as the budget has room for. It always has room for one."""
        budget, chunks = self.config.max_num_batched_tokens, []
        for sequence in sorted(running, key=_last_turn):
            budget -= sequence.num_remaining
            if budget < 0:
                break  # nobody goes before it, so it has its turn soon
            sequence.last_turn = self._num_turns
            chunks.append(Chunk(sequence, sequence.num_computed, sequence.num_remaining))
        return tuple(chunks)

    def _all_may_decode(self, running: Seq[Sequence]) -> bool:
        """Whether every sequence needs one token and the budget suffices for all of them, so that
        there is nothing to decide."""
        budget = self.config.max_num_batched_tokens
        budget = min(budget, self.config.max_tokens_beside_streams or budget)
        return len(running) <= budget and not [s for s in running if s.num_remaining != 1]

    def _keys_being_computed(self) -> dict[Key, Sequence]:
        """The key of the next page of each prompt that the launched step computes, with the
        sequence that computes it."""
        computing: dict[Key, Sequence] = {}
        for advanced in self._launched:
            sequence = advanced.chunk.sequence
            alive = sequence.num_preemptions == advanced.num_preemptions
            if advanced.is_prompt and alive and sequence.status is Status.RUNNING:
                key = self.allocator.next_key(sequence.table, sequence.tokens)
                if key is not None:
                    computing[key] = sequence
        return computing

    def advance(self, plan: Plan) -> tuple[Advanced, ...]:
        """Move the numbers of a step that has been launched; the tokens it samples are `PENDING`
        until `commit`. Returns the step's chunks for `commit`."""
        step, total = [], 0
        for chunk in plan:
            sequence, start, num_tokens = chunk.sequence, chunk.start, chunk.num_tokens
            tokens = sequence.tokens
            length = len(tokens)
            samples = start + num_tokens == length
            step.append(Advanced(chunk, samples, start + 1 < length, sequence.num_preemptions))
            if samples:
                tokens.append(PENDING)
            sequence.num_computed = 0 if samples and self._recomputes else start + num_tokens
            sequence.tenant_share.num_tokens += num_tokens
            total += num_tokens
            # Without a cache every output token would be such an event.
            if (start < sequence.num_prompt or num_tokens > 1) and (
                not self._recomputes or length == sequence.num_prompt
            ):
                self.pending_events.append(ComputedChunk(sequence.request_id, start, num_tokens))
        self.stats.num_computed_tokens += total
        self._launched = tuple(step)
        return self._launched

    def commit(
        self, step: Seq[Advanced], sampled: Seq[Sampled], step_ms: float | None = None
    ) -> list[StepOutput]:
        """Store the results of a step that has been computed; returns one output per sequence that
        got a token or failed.

        `sampled` has one entry per chunk that samples, in the plan's order. `step_ms` is how long
        the step took, in milliseconds; None means the time since it was scheduled."""
        outputs: list[StepOutput] = []
        results: Iterator[Sampled] = iter(sampled)
        stats, allocator = self.stats, self.allocator
        page_size = allocator.page_size
        if self._step_budget or self._speculator:
            took_ms = 1000 * (self.clock() - self._planned_s) if step_ms is None else step_ms
            if self._speculator is not None:
                took_ms -= self._speculator.drafting_ms()
            for learner in (self._step_budget, self._speculator):
                if learner is not None:
                    learner.record(step, took_ms)
        if self._launched is step:
            self._launched = ()
        for advanced in step:
            chunk = advanced.chunk
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            result = next(results) if advanced.samples else None
            if sequence.status is Status.FINISHED:
                # It ended while this was computed; its pages may already belong to others.
                stats.num_late_tokens += result is not None
                continue
            is_late = result is not None and result.is_late
            if is_late:
                end -= 1
                self._take_back(advanced)
            if sequence.num_preemptions == advanced.num_preemptions:
                table = sequence.table
                if (table.num_indexed + 1) * page_size <= end:
                    allocator.commit(table, sequence.tokens, end)
            if result is None or is_late:
                continue
            if result.error and (error := result.error_record):
                failed = self.fail(sequence.request_id, error)
                assert failed is not None
                outputs.append(failed)
                continue
            if sequence.guesses is not None:
                outputs += self._append(advanced, result)
                continue
            outputs.append(output := self._append_token(sequence, end, result))
            if output.finish_reason is not None:
                self._finish(sequence, output.finish_reason)
        stats.num_steps += 1
        stats.num_rows += len(step)
        stats.num_sampled_tokens += sum(output.token_id is not None for output in outputs)
        self._end_batch()
        return outputs

    def _take_back(self, advanced: Advanced) -> None:
        """Have the last token of a chunk computed again, since no token was sampled behind it."""
        sequence = advanced.chunk.sequence
        assert len(sequence.tokens) == advanced.end + 1, "nothing flies behind a late mask"
        sequence.tokens.pop()
        if sequence.num_preemptions == advanced.num_preemptions:
            sequence.num_computed = 0 if self._recomputes else advanced.end - 1
        sequence.tenant_share.num_tokens -= 1
        self.stats.num_computed_tokens -= 1

    def _append_token(self, sequence: Sequence, end: int, result: Sampled) -> StepOutput:
        """Store the token at position `end`, whose place is there, and decide whether it is the
        last one. A token behind the last one, of the step after this one, is dropped."""
        sequence.tokens[end] = result.token_id
        num_output = end + 1 - sequence.num_prompt
        reason = self._finish_reason(sequence, result, num_output)
        if reason is not None:
            del sequence.tokens[end + 1 :]
        return StepOutput(
            sequence.request.request_id,
            result.token_id,
            reason,
            result.logprobs,
            sequence.num_cached,
            None,
            sequence.prompt_logprobs() if num_output == 1 else None,
        )

    def _append(self, advanced: Advanced, result: Sampled) -> list[StepOutput]:
        """Append the token of a chunk, then those that were sampled as proposed, until one ends the
        sequence. So nothing else counts, indexes or reads a proposed token."""
        sequence, error = advanced.chunk.sequence, None
        outputs = [self._append_token(sequence, advanced.end, result)]
        for end, each in enumerate(result.following, advanced.end + 1):
            if outputs[-1].finish_reason is not None or (error := each.error_record):
                break
            sequence.tokens.append(PENDING)
            outputs.append(self._append_token(sequence, end, each))
        if advanced.chunk.proposed:
            self._settle_proposals(advanced, len(result.following), len(outputs) - 1)
        assert sequence.guesses is not None
        if text := sequence.guesses.prediction:
            counts = (text.num_accepted, text.num_rejected)
            outputs[-1] = outputs[-1]._replace(num_predicted=counts)
        if (reason := outputs[-1].finish_reason) is not None:
            self._finish(sequence, reason)
        elif error is not None:
            failed = self.fail(sequence.request_id, error)
            assert failed is not None
            outputs.append(failed)
        return outputs

    def _settle_proposals(self, advanced: Advanced, num_accepted: int, num_kept: int) -> None:
        """Count the proposed tokens that the sequence got as computed. The cells of the others are
        written again, or given back.

        `num_accepted`: tokens that were sampled as proposed; `num_kept`: those before the end."""
        sequence, allocator = advanced.chunk.sequence, self.allocator
        self.stats.num_computed_tokens += num_kept
        sequence.tenant_share.num_tokens += num_kept
        if sequence.num_preemptions == advanced.num_preemptions:
            if not self._recomputes:
                sequence.num_computed = end = advanced.end + num_kept
                if (sequence.table.num_indexed + 1) * allocator.page_size <= end:
                    allocator.commit(sequence.table, sequence.tokens, end)
            allocator.shrink(sequence.table, len(sequence.tokens))
        assert self._speculator is not None
        self._speculator.learn(advanced.chunk, num_accepted, num_kept)

    @staticmethod
    def _finish_reason(sequence: Sequence, result: Sampled, num_output: int) -> FinishReason | None:
        token_id = result.token_id
        if token_id in sequence.end_token_ids:
            request = sequence.request
            if num_output > request.sampling.min_tokens:
                ended = token_id in request.eos_token_ids
                return FinishReason.EOS if ended else FinishReason.STOP
        if result.completes:
            return FinishReason.COMPLETE
        if num_output >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._queues[sequence.status].remove(sequence)
        if sequence.is_pending:
            sequence.tokens.pop()
        if (guesses := sequence.guesses) is not None and guesses.num_proposed:
            self.pending_events.append(
                Speculated(sequence.request_id, guesses.num_proposed, guesses.num_accepted)
            )
        if sequence.admitted_s is not None and self._static_batches is not None:
            self._static_batches.leave(sequence)
        if self.config.hold_pages_until_batch_ends:
            self._held.append(sequence.table)
        else:
            self.allocator.release(sequence.table)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        sequence.status = Status.FINISHED
        del self.by_id[sequence.request_id]
        self.fair_share.leave(sequence)
        self.stats.num_finished[reason] += 1
        if sequence.admitted_s is not None and end_of(reason).counter == "num_requests_finished":
            self.stats.processing_s += self.clock() - sequence.admitted_s

    def _end_batch(self) -> None:
        """When the batch has ended, give held pages back and count what padding would cost."""
        if self.running or self.preempted:
            return
        for table in self._held:
            self.allocator.release(table)
        self._held.clear()
        if self._static_batches is not None and (event := self._static_batches.end()):
            self.pending_events.append(event)
            self.stats.count_batch(event)

    def check(self) -> None:
        """Assert the invariants between sequences, pages and counters. For tests."""
        seated = [*self.running, *self.preempted]
        assert len(seated) <= self.num_seats
        for status, queue in self._queues.items():
            assert [s.rank for s in queue] == sorted(s.rank for s in queue)
            assert all(s.status is status for s in queue)
        everyone = [*self.waiting, *seated]
        assert {s.request_id: s for s in everyone} == self.by_id
        assert len(everyone) == len(self.by_id)
        for sequence in self.running:
            table, page_size = sequence.table, self.allocator.page_size
            assert table.num_indexed * page_size <= sequence.num_computed < len(sequence.tokens)
            assert PENDING not in sequence.tokens[:-1]
            assert len(sequence.tokens) - 1 <= len(table.pages) * page_size
            assert self._num_turns - sequence.last_turn <= MAX_IDLE_STEPS + self.num_seats
        for sequence in (*self.waiting, *self.preempted):
            assert sequence.num_computed == 0
            assert not sequence.table.pages
        self.allocator.check([s.table for s in self.running] + self._held)
        stats = self.stats
        assert stats.num_submitted == len(everyone) + sum(stats.num_finished.values())
