"""`Restrictions`: for the sequences of a step that have a grammar, which tokens may be next.

Worked out in two threads while the model computes: llguidance lets go of the interpreter. One
compiles; the other makes masks. A step waits for masks, but not for long: where one needs more time
than others should wait, its sequence sits out steps until it is there, and from then on its masks
are made beside the compiling. What a sequence may say depends on its tokens alone, so preemption,
company, a step that is executed again and another engine that goes on with it change nothing. Used
by the runners.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infer.schedule.sequence import Plan, Sampled, Sequence
from infer.text.grammars.compiler import Compiler, Constraint, compiling_thread
from infer.text.grammars.grammar_thoughts import BehindThoughts
from infer.types import Request
from infer.types.grammar import Grammar

log = logging.getLogger(__name__)

FAILED = "the grammar of this request could not be followed any further"
MASKS_S = 0.05
"""how long a step waits for masks"""
SLOW_S = 0.01
"""of computing for one mask, from which on its sequence is slow"""
OTHERS_S = 0.003
"""how long those who are not slow wait for the mask of one who is, or for a first mask; once, and
not in the steps that begin while it is still being made"""
_NICE = 5
_Mask = Tensor | None


@dataclass(slots=True, eq=False)
class _Following:
    """How a sequence follows its grammar; in `Sequence.constraint`."""

    constraint: Future[Constraint]
    is_slow: bool = True
    """as its last mask was; until there is one it may be anything"""
    begun: Future[_Mask] | None = None
    """the mask that no step has used: it came late, or the step failed; the tokens are the same"""

    @property
    def is_quick(self) -> bool:
        """Whether its mask is worth waiting for."""
        return self.constraint.done() and not self.is_slow


class Masks:
    """Those of one step, on their way: by request id [V] bool on the CPU, the tokens that are
    forbidden, or None where the grammar has failed."""

    def __init__(
        self,
        masks: Mapping[str, tuple[_Following, Future[_Mask]]],
        waited_for: Set[str],
        alone: bool,
    ) -> None:
        """`waited_for`: of whom an earlier step has waited for this mask; `alone`: nobody in the
        step would wait for nothing."""
        self._masks = masks
        now_s = time.monotonic()
        self._until_s: dict[str, float] = {}
        for name, (following, _) in masks.items():
            if alone or following.is_quick:
                patience_s = MASKS_S
            else:
                patience_s = 0.0 if name in waited_for else OTHERS_S
            self._until_s[name] = now_s + patience_s

    def result(self) -> dict[str, _Mask]:
        """All of them, however long it takes."""
        for following, mask in self._masks.values():
            wait_for([mask])
            following.begun = None
        return {name: mask.result() for name, (_, mask) in self._masks.items()}

    def in_time(self) -> tuple[dict[str, _Mask], set[str]]:
        """(those that came in time, request ids of the others)"""
        found: dict[str, _Mask] = {}
        late: set[str] = set()
        for name, (following, mask) in self._masks.items():
            left_s = self._until_s[name] - time.monotonic()
            if not mask.done() and left_s > 0:
                wait_for([mask], left_s)
            if mask.done():
                found[name] = mask.result()
                following.begun = None
            else:
                late.add(name)
        return found, late


class Restrictions:
    """See the module's docstring."""

    def __init__(self, compiler: Callable[[], Compiler]) -> None:
        """`compiler` is called at once, in the thread; large vocabularies take it a second."""
        self._compiling = compiling_thread("infer-grammar")
        self._compiling.submit(_give_way)
        self._masking = compiling_thread("infer-masks")
        self._compiler = self._compiling.submit(compiler)

    def begin(self, plan: Plan) -> Masks | None:
        """Start on a step; None if nobody who samples in it has a grammar."""
        chunks = [chunk for chunk in plan if chunk.sequence.request.sampling.grammar is not None]
        if not chunks:
            return None
        masks: dict[str, tuple[_Following, Future[_Mask]]] = {}
        waited_for: set[str] = set()
        for chunk in chunks:
            sequence = chunk.sequence
            following = self._following(sequence)  # those who do not sample yet are compiled
            if chunk.samples:
                if following.begun is not None:
                    waited_for.add(sequence.request_id)
                mask = following.begun or self._begin_mask(sequence, following)
                following.begun = mask
                masks[sequence.request_id] = (following, mask)
        alone = len(chunks) == len(plan) and not any(each.is_quick for each, _ in masks.values())
        return Masks(masks, waited_for, alone)

    def _following(self, sequence: Sequence) -> _Following:
        following = sequence.constraint
        if not isinstance(following, _Following):
            grammar = sequence.request.sampling.grammar
            assert isinstance(grammar, Grammar)
            compiled = self._compiling.submit(self._compile, grammar, sequence.request)
            sequence.constraint = following = _Following(compiled)
        return following

    def _compile(self, grammar: Grammar, request: Request) -> Constraint:
        compiler = self._compiler.result()
        constraint = compiler.constraint(grammar, request.grammar_bytes)
        if request.thoughts is None:
            return constraint
        return BehindThoughts(constraint, compiler.token_bytes(), *request.thoughts)

    def _begin_mask(self, sequence: Sequence, following: _Following) -> Future[_Mask]:
        # Its list may go on while the mask is being made.
        tokens = sequence.tokens[sequence.num_prompt :]
        thread = self._masking if following.is_quick else self._compiling
        return thread.submit(self._mask, sequence.request_id, following, tokens)

    @staticmethod
    def _mask(request_id: str, following: _Following, tokens: list[int]) -> _Mask:
        try:
            constraint = following.constraint.result()
            started_s = time.thread_time()
            constraint.follow(tokens)
            mask = torch.from_numpy(constraint.forbidden())
            following.is_slow = time.thread_time() - started_s > SLOW_S
        except Exception:
            log.warning("request %s: its grammar fails", request_id, exc_info=True)
            return None
        return mask

    @staticmethod
    def mark_complete(
        sequences: Seq[Sequence],
        sampled: Seq[Sampled],
        forbidden: Mapping[str, _Mask],
        late: Seq[str] | set[str] = (),
    ) -> list[Sampled]:
        """The sampled tokens, with those marked that complete what a grammar wants; `late` are
        requests whose masks have not come, and which have none."""
        settled = list(sampled)
        for row, (sequence, result) in enumerate(zip(sequences, sampled, strict=True)):
            name, following = sequence.request_id, sequence.constraint
            if name in late:
                settled[row] = Sampled(0, is_late=True)
            elif name not in forbidden or result.error:
                continue
            elif forbidden[name] is None or not isinstance(following, _Following):
                settled[row] = Sampled(0, error=FAILED, is_refused=True)
            elif following.constraint.result().take(result.token_id):
                settled[row] = replace(result, completes=True)
        return settled


def _give_way() -> None:
    """Compiling is less urgent than steps are."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
