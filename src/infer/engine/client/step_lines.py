"""`StepLines`: what each step of a batch did, as lines of text

`LLM.generate(..., progress="steps")` writes them to stderr. A line has the step's number, its rows
(one for each sequence), its tokens of prompts and of decoding, and the requests that got a seat,
lost their pages or ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from infer.types import FinishReason
from infer.types.step_events import Admitted, ComputedChunk, Preempted, StepEvents


class StepLines:
    """Writes a line for each step. Requests are called by their place among `request_ids`."""

    def __init__(self, request_ids: Iterable[str], out: TextIO) -> None:
        self._names = {name: str(number) for number, name in enumerate(request_ids)}
        self._out = out

    def show(self, step: StepEvents | None, ended: Sequence[tuple[str, FinishReason]]) -> None:
        """Write the line of a step, with the requests that it ended; nothing for an empty step."""
        if step is None or not (step.num_sequences or ended):
            return
        chunks = [event for event in step.events if isinstance(event, ComputedChunk)]
        num_prompt = sum(chunk.num_tokens for chunk in chunks)
        parts = [
            f"step {step.number:>4}",
            f"{step.num_sequences:>3} rows",
            f"{num_prompt:>5} prompt + {step.num_sequences - len(chunks):>3} decode tokens",
        ]
        for verb, kind in (("preempted", Preempted), ("joined", Admitted)):
            names = [self._name(e.request_id) for e in step.events if isinstance(e, kind)]
            if names:
                parts.append(f"{verb} {', '.join(names)}")
        if ended:
            left = [f"{self._name(request_id)} ({reason})" for request_id, reason in ended]
            parts.append(f"left {', '.join(left)}")
        print("  ".join(parts), file=self._out, flush=True)

    def _name(self, request_id: str) -> str:
        """The number of a request; requests of other callers have none."""
        return self._names.get(request_id, "another")
