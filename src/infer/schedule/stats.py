"""`SchedulerStats`: what the scheduler counted since it was made; only ever grows.

Written by the scheduler, read by `EngineCore.stats` (and from there by /health, logs, tests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from infer.types import FinishReason


@dataclass(slots=True)
class SchedulerStats:
    """Counters; tokens unless the name says otherwise."""

    num_submitted: int = 0
    """requests that were accepted; equals waiting + running + preempted + finished"""
    num_requests_refused: int = 0
    """because the queue was full; a façade that looks first adds those that it refused"""
    num_finished: Counter[FinishReason] = field(default_factory=Counter)
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_late_tokens: int = 0
    """sampled for sequences that had ended while the step was being computed; dropped"""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_batches: int = 0
    """static mode: batches that have ended"""
    num_batch_tokens: int = 0
    """static mode: prompt and output tokens of those batches"""
    num_padded_tokens: int = 0
    """static mode: what the classical implementation would have computed for them, which pads
    every row to the longest; reported, never computed"""

    def count_batch(self, lengths: Seq[int]) -> None:
        """One more static batch has ended, whose members had these lengths."""
        self.num_batches += 1
        self.num_batch_tokens += sum(lengths)
        self.num_padded_tokens += max(lengths) * len(lengths)
