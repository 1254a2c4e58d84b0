"""`SchedulerStats`: the scheduler's counters since it was made

No counter ever decreases. The scheduler writes them; `EngineCore.stats` reads them as
`EngineCounters`, whose docstrings say what each number is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from infer.types import FinishReason
from infer.types.engine_stats import EngineCounters
from infer.types.stats_summary import wait_bucket
from infer.types.step_events import BatchEnded, BatchFormed


@dataclass(slots=True)
class SchedulerStats:
    """The counters of one scheduler; `EngineCounters` describes them."""

    num_submitted: int = 0
    num_requests_refused: int = 0
    num_finished: Counter[FinishReason] = field(default_factory=Counter)
    """Requests that have ended, by finish reason."""
    num_steps: int = 0
    """Steps committed."""
    num_rows: int = 0
    num_computed_tokens: int = 0
    """Prompt and output tokens whose keys and values were computed, recomputed ones included."""
    num_sampled_tokens: int = 0
    """Output tokens that were sampled and delivered."""
    num_late_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests admitted."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    num_preemptions: int = 0
    """Times a running sequence lost its pages."""
    wait_s: float = 0.0
    wait_counts: Counter[int] = field(default_factory=Counter)
    """First seats, by the bucket of the wait for them."""
    processing_s: float = 0.0
    num_batches_formed: int = 0
    num_batch_requests: int = 0
    num_batches: int = 0
    num_batch_tokens: int = 0
    num_padded_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: Counter[int] = field(default_factory=Counter)

    def count_wait(self, wait_s: float) -> None:
        """Count a request that gets its first seat after `wait_s` seconds."""
        self.wait_s += wait_s
        self.wait_counts[wait_bucket(wait_s)] += 1

    def count_formed(self, batch: BatchFormed) -> None:
        """Count a static batch that begins."""
        self.num_batches_formed += 1
        self.num_batch_requests += batch.num_requests

    def count_batch(self, batch: BatchEnded) -> None:
        """Count a static batch that has ended."""
        self.num_batches += 1
        self.num_batch_tokens += batch.num_tokens
        self.num_padded_tokens += batch.num_padded_tokens

    def counters(self, *, num_evictions: int) -> EngineCounters:
        """A copy of the current values; `num_evictions` comes from the page allocator."""
        return EngineCounters(
            num_evictions=num_evictions,
            num_submitted=self.num_submitted,
            num_requests_refused=self.num_requests_refused,
            num_steps=self.num_steps,
            num_rows=self.num_rows,
            num_computed_tokens=self.num_computed_tokens,
            num_sampled_tokens=self.num_sampled_tokens,
            num_late_tokens=self.num_late_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            wait_s=self.wait_s,
            processing_s=self.processing_s,
            num_batches_formed=self.num_batches_formed,
            num_batch_requests=self.num_batch_requests,
            num_batches=self.num_batches,
            num_batch_tokens=self.num_batch_tokens,
            num_padded_tokens=self.num_padded_tokens,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_accepted_at=dict(self.num_accepted_at),
            wait_counts=dict(self.wait_counts),
            num_finished=dict(self.num_finished),
        )
