"""`SchedulerStats`: what the scheduler has counted since it was made; only ever grows.

The scheduler writes it; `EngineCore.stats` reads it as `EngineCounters`, whose docstrings say what
each number is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from infer.types import FinishReason
from infer.types.engine_stats import EngineCounters


@dataclass(slots=True)
class SchedulerStats:
    """The counters of one scheduler while they grow; see `EngineCounters`."""

    num_submitted: int = 0
    num_requests_refused: int = 0
    num_finished: Counter[FinishReason] = field(default_factory=Counter)
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_late_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_batches: int = 0
    num_batch_tokens: int = 0
    num_padded_tokens: int = 0

    def count_batch(self, lengths: Seq[int]) -> None:
        """One more static batch has ended, whose members had these lengths."""
        self.num_batches += 1
        self.num_batch_tokens += sum(lengths)
        self.num_padded_tokens += max(lengths) * len(lengths)

    def counters(self, *, num_evictions: int) -> EngineCounters:
        """A copy of now; `num_evictions`: what the page allocator has counted."""
        return EngineCounters(
            num_evictions=num_evictions,
            num_submitted=self.num_submitted,
            num_requests_refused=self.num_requests_refused,
            num_steps=self.num_steps,
            num_computed_tokens=self.num_computed_tokens,
            num_sampled_tokens=self.num_sampled_tokens,
            num_late_tokens=self.num_late_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_batches=self.num_batches,
            num_batch_tokens=self.num_batch_tokens,
            num_padded_tokens=self.num_padded_tokens,
            num_finished=dict(self.num_finished),
        )
