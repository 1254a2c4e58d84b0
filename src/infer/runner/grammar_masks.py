"""`Restrictions`: which tokens a grammar allows next, for the sequences of a step that have one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from weakref import ref as weakref

import numpy as np
import torch
from torch import Tensor

from infer.runner.compiling_threads import CompilingThreads
from infer.schedule.sequence import Plan, Sampled, Sequence
from infer.text.grammars.compiler import Compiler, Constraint, compiling_thread
from infer.text.grammars.grammar_thoughts import BehindThoughts
from infer.text.grammars.thought_budget import ThoughtBudget, Unconstrained
from infer.types import Request

log = logging.getLogger(__name__)

FAILED = "the grammar of this request could not be followed any further"
"""Error of a sequence whose grammar has failed."""
MASKS_S = 0.05
"""Maximum time that a step waits for masks, in seconds."""
OTHERS_S = 0.003
"""Maximum time that a step waits for the masks of slow or new sequences, in seconds.

A step waits once for a mask; the steps that begin while it is still being made do not wait.
"""
SLOW_S = OTHERS_S
"""CPU time of a mask, in seconds, above which its sequence counts as slow: one that the step would
wait for in any case is quick."""
_Mask = Tensor | None


@dataclass(slots=True, eq=False)
class _GrammarState:
    """The state of a sequence's grammar, kept in `Sequence.constraint`."""

    constraint: Future[Constraint]
    """The compiled grammar."""
    is_slow: bool = True
    """Whether the last mask was slow; True until there is a first one."""
    begun: Future[_Mask] | None = None
    """Mask that no step has used, because it was late or the step failed.

    It stays valid because the sequence's tokens have not changed.
    """

    @property
    def thread(self) -> int:
        """The thread that has compiled the grammar, if there is one."""
        if not self.constraint.done() or self.constraint.exception() is not None:
            return 0
        return self.constraint.result().thread

    @property
    def is_quick(self) -> bool:
        """Whether the grammar is compiled and the last mask was not slow."""
        return self.constraint.done() and not self.is_slow


class Masks:
    """The masks of one step, which are still being made.

    A mask is [V] bool on the CPU and True for forbidden tokens; None if the grammar has failed.
    With proposed tokens it is [n, V]: one mask for the next token, and one behind each proposed
    token that the grammar allows.
    """

    def __init__(
        self,
        masks: Mapping[str, tuple[_GrammarState, Future[_Mask]]],
        waited_for: Set[str],
        only_grammars: bool,
    ) -> None:
        """`masks` by request id. `waited_for`: the requests for whose mask an earlier step has
        waited. `only_grammars`: no sequence of the step could go on without waiting."""
        self._masks = masks
        now_s = time.monotonic()
        self._until_s: dict[str, float] = {}
        for name, (state, _) in masks.items():
            if only_grammars or state.is_quick:
                timeout_s = MASKS_S
            else:
                timeout_s = 0.0 if name in waited_for else OTHERS_S
            self._until_s[name] = now_s + timeout_s

    def in_time(self) -> tuple[dict[str, _Mask], set[str]]:
        """(masks that are complete in time, by request id; request ids of the others)"""
        masks: dict[str, _Mask] = {}
        late: set[str] = set()
        for name, (state, mask) in self._masks.items():
            left_s = self._until_s[name] - time.monotonic()
            if not mask.done() and left_s > 0:
                wait_for([mask], left_s)
            if mask.done():
                masks[name] = mask.result()
                state.begun = None
            else:
                late.add(name)
        return masks, late


class Restrictions:
    """The token masks of all sequences that have a grammar.

    Threads work while the model computes, since llguidance releases the interpreter lock: those
    that compile grammars (`runner.compiling_threads`), and one that makes masks. A step waits for
    masks only briefly. If a mask takes longer, its sequence skips steps until the mask is complete.
    While a sequence's masks are slow, the compiling threads make them. The allowed tokens depend
    only on the sequence's own tokens. So they are the same after preemption, in any batch, in a
    repeated step, and in another engine that continues the request. The runners use this module.
    """

    def __init__(self, compiler: Callable[[], Compiler]) -> None:
        """`compiler` makes the compiler; it is called at once in a compiling thread.

        For a large vocabulary that takes about a second.
        """
        self._compiling = CompilingThreads()
        self._compiler = self._compiling.submit("", partial(self._made, compiler))
        self._masking = compiling_thread("infer-masks")
        self._used: list[tuple[weakref[Sequence], _GrammarState]] = []

    def _made(self, make: Callable[[], Compiler]) -> Compiler:
        compiler = make()
        compiler.cache.free = self._compiling.free
        return compiler

    def _free_unused(self) -> None:
        """Free the grammars of sequences that have ended."""
        if not any(sequence() is None for sequence, _ in self._used):
            return
        used, self._used = self._used, []
        while used:
            if used[-1][0]() is not None:
                self._used.append(used.pop())
            else:  # no local name may refer to it, or this thread could be the last that does
                thread = used[-1][1].thread
                self._compiling.free(thread, [used.pop()])

    def begin(self, plan: Plan) -> Masks | None:
        """Start making the masks of a step; None if no sequence of the step has a grammar."""
        self._free_unused()
        chunks = [chunk for chunk in plan if chunk.sequence.request.is_restricted]
        if not chunks:
            return None
        masks: dict[str, tuple[_GrammarState, Future[_Mask]]] = {}
        waited_for: set[str] = set()
        for chunk in chunks:
            sequence = chunk.sequence
            # Compiling starts now, even if the sequence does not sample yet.
            state = self._state_of(sequence)
            if chunk.samples:
                if state.begun is not None:
                    waited_for.add(sequence.request_id)
                # A mask that was begun for other proposals is right for the next token.
                mask = state.begun or self._begin_mask(sequence, state, chunk.proposed)
                state.begun = mask
                masks[sequence.request_id] = (state, mask)
        is_quick = any(state.is_quick for state, _ in masks.values())
        return Masks(masks, waited_for, len(chunks) == len(plan) and not is_quick)

    def _state_of(self, sequence: Sequence) -> _GrammarState:
        state = sequence.constraint
        if not isinstance(state, _GrammarState):
            request = sequence.request
            compiled = self._compiling.submit(request.tenant, partial(self._compile, request))
            sequence.constraint = state = _GrammarState(compiled)
            self._used.append((weakref(sequence), state))
        return state

    def _compile(self, request: Request) -> Constraint:
        compiler, sampling, thoughts = self._compiler.result(), request.sampling, request.thoughts
        constraint: Constraint = Unconstrained(compiler.width)
        if sampling.grammar is not None:
            constraint = compiler.constraint(sampling.grammar, request.grammar_bytes)
            if thoughts is not None:
                constraint = BehindThoughts(constraint, compiler.token_bytes(), *thoughts)
        budget = sampling.thinking_token_budget
        if budget is None or thoughts is None or not request.thought_end:
            return constraint
        pieces = compiler.token_bytes()
        return ThoughtBudget(constraint, pieces, thoughts, budget, request.thought_end)

    def allowed(self, sequence: Sequence, proposed: tuple[int, ...]) -> tuple[int, ...]:
        """The leading tokens of `proposed` that the sequence's grammar allows to follow.

        None of them while the grammar is compiled or slow, or a mask is being made. To be called
        between steps.
        """
        state = sequence.constraint
        if not isinstance(state, _GrammarState) or not state.is_quick or state.begun is not None:
            return ()
        try:
            constraint = state.constraint.result()
            constraint.follow(sequence.tokens[sequence.num_prompt :])
            return proposed[: constraint.num_allowed(proposed)]
        except Exception:  # the step's mask has the same error, with which the request ends
            log.debug("request %s: nothing is proposed", sequence.request_id, exc_info=True)
            return ()

    def _begin_mask(
        self, sequence: Sequence, state: _GrammarState, proposed: tuple[int, ...]
    ) -> Future[_Mask]:
        # A copy: the sequence's own list may grow while the mask is being made.
        tokens = sequence.tokens[sequence.num_prompt :]
        make = partial(self._mask, sequence.request_id, state, tokens, proposed)
        if state.is_quick:
            return self._masking.submit(make)
        return self._compiling.submit(sequence.request.tenant, make)

    @staticmethod
    def _mask(
        request_id: str, state: _GrammarState, tokens: list[int], proposed: tuple[int, ...]
    ) -> _Mask:
        try:
            constraint = state.constraint.result()
            started_s = time.thread_time()
            constraint.follow(tokens)
            masks = [constraint.forbidden()]
            if proposed:
                masks += _masks_behind(constraint.copy(), masks[0], proposed)
            state.is_slow = time.thread_time() - started_s > SLOW_S * len(masks)
        except Exception:
            log.warning("request %s: following its grammar failed", request_id, exc_info=True)
            return None
        return torch.from_numpy(np.stack(masks) if proposed else masks[0])

    @staticmethod
    def mark_complete(
        sequences: Seq[Sequence],
        sampled: Seq[Sampled],
        forbidden: Mapping[str, _Mask],
        late: Seq[str] | set[str] = (),
    ) -> list[Sampled]:
        """The results of a step, with `completes` set where a token completes its grammar's text.

        `sampled`: one verified result per sequence. A sequence in `late`, whose mask was not
        complete in time, gets a result with `is_late`; one whose grammar has failed gets an error.
        """
        results = list(sampled)
        for row, (sequence, result) in enumerate(zip(sequences, sampled, strict=True)):
            name, state = sequence.request_id, sequence.constraint
            if name in late:
                results[row] = Sampled(0, is_late=True)
            elif name not in forbidden or result.error:
                continue
            elif (mask := forbidden[name]) is None or not isinstance(state, _GrammarState):
                results[row] = Sampled(0, error=FAILED, is_refused=True)
            else:
                num_masks = len(mask) if mask.dim() == 2 else 1
                results[row] = _taken(state.constraint.result(), result, num_masks)
        return results


def _masks_behind(
    trial: Constraint, first: np.ndarray, proposed: tuple[int, ...]
) -> list[np.ndarray]:
    """The masks [V] behind each of the proposed tokens, up to one that the grammar forbids or that
    completes its text. `trial` is changed; `first`: the mask before the first token."""
    masks = [first]
    for token in proposed:
        if masks[-1][token] or trial.take(token):
            break
        masks.append(trial.forbidden())
    return masks[1:]


def _taken(constraint: Constraint, result: Sampled, num_masks: int) -> Sampled:
    """A verified result whose tokens the constraint has taken, up to one that completes the text.

    Only the first `num_masks` tokens were sampled with a mask of their own; the others are dropped.
    """
    kept: list[Sampled] = []
    for mask in (result, *result.following[: num_masks - 1]):
        kept.append(mask)
        if mask.error:
            break
        if constraint.take(mask.token_id):
            kept[-1] = replace(mask, completes=True)
            break
    if len(kept) == 1 and not result.following:
        return kept[0]
    return replace(kept[0], following=tuple(kept[1:]))
