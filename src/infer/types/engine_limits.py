"""`EngineLimits`: how much an engine can take, for whoever makes its requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine, found out when it is built."""

    vocab_size: int
    """width of the logits; every token id is smaller"""
    max_seq_len: int
    """maximum length of prompt and output together, in tokens"""
    num_seats: int
    """maximum number of sequences in the batch"""
    max_waiting_requests: int
    """maximum number of requests in the queue"""
    batching_mode: str = "continuous"
    page_size: int = 0
    """tokens in a page of the KV cache; 0 where nobody has said it"""

    @property
    def max_unfinished(self) -> int:
        """Maximum number of requests that are running or waiting."""
        return self.num_seats + self.max_waiting_requests
