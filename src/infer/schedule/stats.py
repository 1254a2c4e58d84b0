"""`SchedulerStats`: the scheduler's counters since it was made

No counter ever decreases. The scheduler writes them; `EngineCore.stats` reads them as
`EngineCounters`, whose docstrings say what each number is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from infer.types import FinishReason
from infer.types.engine_stats import EngineCounters


@dataclass(slots=True)
class SchedulerStats:
    """The counters of one scheduler; `EngineCounters` describes them."""

    num_submitted: int = 0
    num_requests_refused: int = 0
    num_finished: Counter[FinishReason] = field(default_factory=Counter)
    """requests that have ended, by finish reason"""
    num_steps: int = 0
    """steps committed"""
    num_computed_tokens: int = 0
    """prompt and output tokens whose keys and values were computed, recomputed ones included"""
    num_sampled_tokens: int = 0
    """output tokens that were sampled and delivered"""
    num_late_tokens: int = 0
    num_prompt_tokens: int = 0
    """prompt tokens of all requests admitted"""
    num_cached_tokens: int = 0
    """prompt tokens taken from the prefix cache"""
    num_preemptions: int = 0
    """times a running sequence lost its pages"""
    num_batches: int = 0
    num_batch_tokens: int = 0
    num_padded_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: Counter[int] = field(default_factory=Counter)

    def count_batch(self, lengths: Seq[int]) -> None:
        """Count a static batch that has ended; `lengths` are its sequences' lengths in tokens."""
        self.num_batches += 1
        self.num_batch_tokens += sum(lengths)
        self.num_padded_tokens += max(lengths) * len(lengths)

    def counters(self, *, num_evictions: int) -> EngineCounters:
        """A copy of the current values; `num_evictions` comes from the page allocator."""
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
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_accepted_at=dict(self.num_accepted_at),
            num_finished=dict(self.num_finished),
        )
