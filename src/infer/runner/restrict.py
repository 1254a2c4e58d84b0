"""`Restrictions`: for the sequences of a step that have a grammar, which tokens may be next.

Worked out in one thread of its own while the model computes: llguidance lets go of the interpreter.
What a sequence may say depends on its tokens alone, so preemption, company, a step that is executed
again and another engine that goes on with it change nothing. Used by `ModelRunner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from infer.grammar import Grammar
from infer.schedule.sequence import Plan, Sampled, Sequence
from infer.text.grammar import Compiler, Constraint, compiling_thread

log = logging.getLogger(__name__)

FAILED = "the grammar of this request could not be followed any further"


class Restrictions:
    """See the module's docstring."""

    def __init__(self, compiler: Callable[[], Compiler]) -> None:
        """`compiler` is called at once, in the thread; large vocabularies take it a second."""
        self._thread = compiling_thread("infer-grammar")
        self._compiler = self._thread.submit(compiler)

    def begin(self, plan: Plan) -> Future[dict[str, Tensor | None]] | None:
        """Start on a step; None if nobody in it has a grammar. The result: by request id the
        tokens that are forbidden, [V] bool on the CPU, or None where the grammar has failed."""
        chunks = [chunk for chunk in plan if chunk.sequence.request.sampling.grammar is not None]
        if not chunks:
            return None
        # Those that do not sample yet are compiled already.
        return self._thread.submit(self._work, [(c.sequence, c.samples) for c in chunks])

    def _work(self, rows: Seq[tuple[Sequence, bool]]) -> dict[str, Tensor | None]:
        result: dict[str, Tensor | None] = {}
        for sequence, samples in rows:
            try:
                constraint = self._constraint(sequence)
                if samples:
                    constraint.follow(sequence.tokens[sequence.num_prompt :])
                    result[sequence.request_id] = torch.from_numpy(constraint.forbidden())
            except Exception:
                log.warning("request %s: its grammar fails", sequence.request_id, exc_info=True)
                result[sequence.request_id] = None
        return result

    def _constraint(self, sequence: Sequence) -> Constraint:
        if not isinstance(sequence.constraint, Constraint):
            grammar = sequence.request.sampling.grammar
            assert isinstance(grammar, Grammar)
            num_bytes = sequence.request.grammar_bytes
            sequence.constraint = self._compiler.result().constraint(grammar, num_bytes)
        assert isinstance(sequence.constraint, Constraint)
        return sequence.constraint

    @staticmethod
    def settle(
        sequences: Seq[Sequence], sampled: Seq[Sampled], forbidden: Mapping[str, Tensor | None]
    ) -> list[Sampled]:
        """The sampled tokens, with those marked that complete what a grammar wants."""
        settled = list(sampled)
        for row, (sequence, result) in enumerate(zip(sequences, sampled, strict=True)):
            if sequence.request_id not in forbidden or result.error:
                continue
            constraint = sequence.constraint
            if forbidden[sequence.request_id] is None or not isinstance(constraint, Constraint):
                settled[row] = Sampled(0, error=FAILED, is_refused=True)
            elif constraint.take(result.token_id):
                settled[row] = replace(result, completes=True)
        return settled
