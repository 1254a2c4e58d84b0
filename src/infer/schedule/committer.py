"""`Committer`: what a step changes: numbers at its launch, tokens when it has been computed"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from infer.schedule.scheduler_state import SchedulerState
from infer.schedule.seats import Seats
from infer.schedule.sequence import PENDING, Advanced, Plan, Sampled, Sequence, Status
from infer.schedule.speculation import Speculator
from infer.types import ErrorRecord, FinishReason, StepOutput
from infer.types.ends import end_of
from infer.types.step_events import ComputedChunk, Speculated


class Committer:
    """`advance` moves the numbers of a step that has been launched; its sampled tokens are then
    pending. `commit` stores the tokens, indexes full pages, decides finish reasons and gives pages
    back. A runner that works ahead has the next step scheduled and launched between the two."""

    def __init__(self, state: SchedulerState, seats: Seats, speculator: Speculator | None) -> None:
        self._state, self._seats, self._speculator = state, seats, speculator
        self._allocator, self._stats = state.allocator, state.stats
        self.launched: tuple[Advanced, ...] = ()
        """Chunks of the step launched last; empty after it has been committed."""

    def advance(self, plan: Plan) -> tuple[Advanced, ...]:
        """Move the numbers of a step that has been launched; see `Scheduler.advance`."""
        step, total, keeps_computed = [], 0, self._allocator.keeps_computed
        for chunk in plan:
            sequence, start, num_tokens = chunk.sequence, chunk.start, chunk.num_tokens
            tokens = sequence.tokens
            length = len(tokens)
            samples, event = start + num_tokens == length, None
            # Without a cache every output token would be such an event.
            if (start < sequence.num_prompt or num_tokens > 1) and (
                keeps_computed or length == sequence.num_prompt
            ):
                event = ComputedChunk(sequence.request_id, start, num_tokens)
            is_prompt, num_preemptions = start + 1 < length, sequence.num_preemptions
            step.append(Advanced(chunk, samples, is_prompt, num_preemptions, event))
            if samples:
                tokens.append(PENDING)
            sequence.num_computed = start + num_tokens if keeps_computed or not samples else 0
            sequence.tenant_share.num_tokens += num_tokens
            total += num_tokens
        self._stats.num_computed_tokens += total
        self.launched = tuple(step)
        return self.launched

    def retract(self, step: Seq[Advanced]) -> None:
        """Undo `advance`; see `Scheduler.retract`."""
        if self.launched is step:
            self.launched = ()
        for advanced in step:
            chunk = advanced.chunk
            sequence, table = chunk.sequence, chunk.sequence.table
            if sequence.status is Status.FINISHED:
                continue
            if advanced.samples:
                assert sequence.is_pending, "the step launched last is retracted first"
                sequence.tokens.pop()
            if sequence.num_preemptions == advanced.num_preemptions:
                # Pages that it has adopted since stay.
                num_adopted = table.num_indexed * self._allocator.page_size
                sequence.num_computed = max(chunk.start, num_adopted)
            sequence.tenant_share.num_tokens -= chunk.num_tokens
            self._stats.num_computed_tokens -= chunk.num_tokens

    def commit(self, step: Seq[Advanced], sampled: Seq[Sampled]) -> list[StepOutput]:
        """Store the results of a step that has been computed; see `Scheduler.commit`."""
        outputs: list[StepOutput] = []
        results: Iterator[Sampled] = iter(sampled)
        stats, allocator, page_size = self._stats, self._allocator, self._allocator.page_size
        if self.launched is step:
            self.launched = ()
        self._state.pending_events += [
            advanced.event
            for advanced in step
            if advanced.event is not None and advanced.chunk.sequence.status is not Status.FINISHED
        ]
        for advanced in step:
            sequence, end = advanced.chunk.sequence, advanced.end
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
                outputs.append(self.end(sequence, FinishReason.ERROR, error))
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
        self._seats.end_batch()
        return outputs

    def _take_back(self, advanced: Advanced) -> None:
        """Have the last token of a chunk computed again, since no token was sampled behind it."""
        sequence = advanced.chunk.sequence
        assert len(sequence.tokens) == advanced.end + 1, "nothing flies behind a late mask"
        sequence.tokens.pop()
        if sequence.num_preemptions == advanced.num_preemptions:
            sequence.num_computed = advanced.end - 1 if self._allocator.keeps_computed else 0
        sequence.tenant_share.num_tokens -= 1
        self._stats.num_computed_tokens -= 1

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
        for end, following in enumerate(result.following, advanced.end + 1):
            if outputs[-1].finish_reason is not None or (error := following.error_record):
                break
            sequence.tokens.append(PENDING)
            outputs.append(self._append_token(sequence, end, following))
        if advanced.chunk.proposed:
            assert self._speculator is not None
            self._speculator.settle(advanced, len(result.following), len(outputs) - 1)
        assert sequence.guesses is not None
        if text := sequence.guesses.prediction:
            outputs[-1] = outputs[-1]._replace(num_predicted=(text.num_accepted, text.num_rejected))
        if (reason := outputs[-1].finish_reason) is not None:
            self._finish(sequence, reason)
        elif error is not None:
            outputs.append(self.end(sequence, FinishReason.ERROR, error))
        return outputs

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
        return FinishReason.LENGTH if num_output >= sequence.request.max_tokens else None

    def end(
        self, sequence: Sequence, reason: FinishReason, error: ErrorRecord | None = None
    ) -> StepOutput:
        """End an unfinished sequence now, in whatever queue it is; returns its last output."""
        self._finish(sequence, reason)
        self._seats.end_batch()
        name, num_cached = sequence.request_id, sequence.num_cached
        return StepOutput(name, None, reason, num_cached=num_cached, error=error)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        state = self._state
        if sequence.is_pending:
            sequence.tokens.pop()
        if (guesses := sequence.guesses) is not None and guesses.num_proposed:
            state.pending_events.append(
                Speculated(sequence.request_id, guesses.num_proposed, guesses.num_accepted)
            )
        self._seats.leave(sequence)
        sequence.status = Status.FINISHED
        del state.by_id[sequence.request_id]
        state.fair_share.leave(sequence)
        state.stats.num_finished[reason] += 1
        if sequence.admitted_s is not None and end_of(reason).counter == "num_requests_finished":
            state.stats.processing_s += state.clock() - sequence.admitted_s
