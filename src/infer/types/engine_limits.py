"""`EngineLimits`: how much an engine can take, for whoever makes its requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can take; found out when it is built."""

    vocab_size: int
    """width of the logits: token ids are below it"""
    max_seq_len: int
    """longest prompt + output, in tokens"""
    num_seats: int
    """requests that are computed at the same time"""
    max_waiting_requests: int
    """requests that may wait for a seat"""

    @property
    def max_unfinished(self) -> int:
        """Requests that may be running or waiting at the same time."""
        return self.num_seats + self.max_waiting_requests
