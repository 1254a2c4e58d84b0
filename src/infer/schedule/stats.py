"""`SchedulerStats`: the scheduler's counters since it was made

No counter ever decreases. The scheduler writes them; `EngineCore.stats` reads them for /health,
logs and tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from infer.types import FinishReason


@dataclass(slots=True)
class SchedulerStats:
    """Counters."""

    num_submitted: int = 0
    """requests accepted; equals waiting + running + preempted + finished"""
    num_requests_refused: int = 0
    """requests refused because the queue was full; a façade that checks the queue itself adds the
    requests that it refused"""
    num_finished: Counter[FinishReason] = field(default_factory=Counter)
    """requests that have ended, by finish reason"""
    num_steps: int = 0
    """steps committed"""
    num_computed_tokens: int = 0
    """prompt and output tokens whose keys and values were computed, recomputed ones included"""
    num_sampled_tokens: int = 0
    """output tokens that were sampled and delivered"""
    num_late_tokens: int = 0
    """tokens that were dropped because their sequence ended while the step was computed"""
    num_prompt_tokens: int = 0
    """prompt tokens of all requests admitted"""
    num_cached_tokens: int = 0
    """prompt tokens taken from the prefix cache"""
    num_preemptions: int = 0
    """times a running sequence lost its pages"""
    num_batches: int = 0
    """static mode: batches that have ended"""
    num_batch_tokens: int = 0
    """static mode: prompt and output tokens of those batches"""
    num_padded_tokens: int = 0
    """static mode: tokens those batches would take if every sequence were padded to the longest,
    as classical implementations do; reported only, nothing is padded here"""

    def count_batch(self, lengths: Seq[int]) -> None:
        """Count a static batch that has ended; `lengths` are its sequences' lengths in tokens."""
        self.num_batches += 1
        self.num_batch_tokens += sum(lengths)
        self.num_padded_tokens += max(lengths) * len(lengths)
