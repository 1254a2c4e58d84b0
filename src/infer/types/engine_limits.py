"""`EngineLimits`: how much an engine can take and how it batches, for whoever sends it requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine, found out when it is built."""

    vocab_size: int
    """Width of the logits; every token id is smaller."""
    max_seq_len: int
    """Maximum length of prompt and output together, in tokens."""
    num_seats: int
    """Maximum number of sequences in the batch."""
    max_waiting_requests: int
    """Maximum number of requests in the queue."""
    max_waiting_tokens: int | None = None
    """Maximum number of prompt tokens in the queue; None: only requests are counted."""
    batching_mode: str = "continuous"
    """See `EngineConfig.batching_mode`."""
    page_size: int = 0
    """Tokens in a page of the KV cache; 0 where nobody has said it."""
    prefix_caching: bool = True
    """Whether prompts that begin alike share pages."""
    weights: str = ""
    """Number format of the weights and where they are, such as "int8 on cpu"; empty where nobody
    has said it."""
    weight_bytes: int = 0
    """Size of the weights in bytes; 0 where nobody has said it."""

    @property
    def max_unfinished(self) -> int:
        """Maximum number of requests that are running or waiting."""
        return self.num_seats + self.max_waiting_requests
