"""`StepPlanner`: how many tokens of which running sequence the next step computes"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import attrgetter

from infer.schedule.page_allocator import Key
from infer.schedule.policy import MAX_IDLE_STEPS, find_policy
from infer.schedule.scheduler_state import SchedulerState
from infer.schedule.seats import Seats
from infer.schedule.sequence import (
    PENDING,
    Advanced,
    Chunk,
    Plan,
    Sequence,
    Status,
    TenantShare,
)
from infer.schedule.step_budget import StepBudget

_last_turn = attrgetter("last_turn")


class StepPlanner:
    """Each sequence that was passed over too long gets one token first; the policy gives the
    others.

    If several sequences have the same next page, one computes it and the others wait until it is in
    the index. They wait only for a sequence that computes the page in this very step; if that one
    ends, another takes its place at once. Such a wait counts as a turn, because it makes progress.
    A sequence that has had no turn for `MAX_IDLE_STEPS` is owed a token. Owed tokens are given
    first, in order of the last turn, at least one per step. So with S seats every sequence gets a
    turn within `MAX_IDLE_STEPS` + S steps, whatever the policy and the budget. Used by the
    scheduler.
    """

    def __init__(self, state: SchedulerState, seats: Seats, step_budget: StepBudget | None) -> None:
        """`step_budget`: how many prompt tokens a step with streams has; None: no bound."""
        self._state, self._seats, self._step_budget = state, seats, step_budget
        self.config, self._allocator = state.config, state.allocator
        self._policy = find_policy(state.config.scheduler_policy)

    @property
    def budget_beside_streams(self) -> int:
        """Maximum number of tokens in a step that a stream waits for."""
        budget = self.config.max_num_batched_tokens
        if not self._allocator.keeps_computed:
            return budget  # a chunk is a whole sequence
        return min(budget, self.config.max_tokens_beside_streams or budget)

    def plan(self, launched: Seq[Advanced]) -> Plan:
        """Decide the next step. `launched`: chunks of the step that is being computed."""
        self._state.num_turns = turn = self._state.num_turns + 1
        keeps_computed = self._allocator.keeps_computed
        running = []
        for sequence in self._seats.running:
            tokens = sequence.tokens
            if tokens[-1] == PENDING and (
                len(tokens) >= sequence.max_length or sequence.reads_output or not keeps_computed
            ):
                sequence.last_turn = turn  # it is being computed
            else:
                running.append(sequence)
        if not keeps_computed:
            return self._hand_out_wholes(running)
        if self._all_may_decode(running):
            for sequence in running:
                sequence.last_turn = turn
            return tuple([Chunk(sequence, sequence.num_computed, 1) for sequence in running])
        return self._hand_out_tokens(running, self._keys_being_computed(launched))

    def _all_may_decode(self, running: Seq[Sequence]) -> bool:
        """Whether every sequence needs one token and the budget suffices for all of them, so that
        there is nothing to decide."""
        return len(running) <= self.budget_beside_streams and not [
            s for s in running if s.num_remaining != 1
        ]

    def _hand_out_tokens(self, running: Seq[Sequence], computing: dict[Key, Sequence]) -> Plan:
        """Chunks within the budget. `computing`: the next page of each prompt that the launched
        step computes; see `_keys_being_computed`."""
        turn, share = self._state.num_turns, self._state.fair_share
        streams = any(s.num_remaining == 1 for s in running)
        budget = self.budget_beside_streams if streams else self.config.max_num_batched_tokens
        idle = [s for s in running if s.last_turn < turn - MAX_IDLE_STEPS]
        owed = sorted(idle, key=_last_turn)[:budget]
        budget -= len(owed)
        # Without streams no client waits for the end of this step, so its length is not bounded.
        step_budget = self._step_budget if streams else None
        prompt_limit, num_prompt = budget, 0
        chunks, several = [], share.several
        offered = share.ordered(self._policy(running)) if several else self._policy(running)
        first: TenantShare | None = None
        for sequence in offered:
            num_owed = 1 if owed and sequence in owed else 0
            room = budget
            if is_prompt := sequence.num_remaining > 1:
                key = self._allocator.adopt(sequence.table, sequence.tokens)
                self._seats.skip_cached(sequence)
                if key is not None and computing.get(key, sequence) is not sequence:
                    sequence.last_turn = turn
                    continue
                if step_budget:
                    prompt_limit = min(prompt_limit, step_budget.limit(sequence.num_computed))
                    room = max(0, min(room, prompt_limit - num_prompt))
                if first not in (None, sequence.tenant_share):
                    room = 0  # this chunk would delay another tenant's first token
            num_tokens = num_owed + min(sequence.num_remaining - num_owed, room)
            if not num_tokens:
                continue
            if is_prompt:
                if several and num_tokens == sequence.num_remaining:
                    first = first or sequence.tenant_share
                num_prompt += num_tokens
                if key is not None:
                    computing[key] = sequence
            budget -= num_tokens - num_owed
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
            sequence.last_turn = self._state.num_turns
            chunks.append(Chunk(sequence, sequence.num_computed, sequence.num_remaining))
        return tuple(chunks)

    def _keys_being_computed(self, launched: Seq[Advanced]) -> dict[Key, Sequence]:
        """The key of the next page of each prompt that the launched step computes, with the
        sequence that computes it."""
        computing: dict[Key, Sequence] = {}
        for advanced in launched:
            sequence = advanced.chunk.sequence
            alive = sequence.num_preemptions == advanced.num_preemptions
            if advanced.is_prompt and alive and sequence.status is Status.RUNNING:
                key = self._allocator.next_key(sequence.table, sequence.tokens)
                if key is not None:
                    computing[key] = sequence
        return computing
