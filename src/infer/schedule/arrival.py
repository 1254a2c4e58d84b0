"""Checks of a request when it arrives: whether it can ever be served, and what it waits behind

The functions are called by `Scheduler.add`.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence as Seq

from infer.errors import RequestError, too_long
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.sequence import Sequence
from infer.types import Request
from infer.types.step_events import Queued, Resumed

MAX_NAMED = 4
"""maximum number of requests ahead in the queue that a "queued" event names"""


def check_fits(request: Request, max_seq_len: int, allocator: PageAllocator) -> None:
    """Raise `RequestError` if a request could not be served even by an idle engine.

    `max_seq_len` is in tokens. The code of both errors is `context_length_exceeded`.
    """
    num_prompt = len(request.prompt_token_ids)
    total = num_prompt + request.max_tokens
    if total > max_seq_len:
        found = f"prompt ({num_prompt}) + max_tokens ({request.max_tokens}) is {total}"
        raise too_long(max_seq_len, found, param="max_tokens")
    # The last token is sampled but never computed, so it takes no place in the cache.
    pages, usable = allocator.pages_for(total - 1), allocator.num_usable
    if pages > usable:
        raise RequestError(
            f"prompt ({num_prompt} tokens) + max_tokens ({request.max_tokens}) needs"
            f" {pages} pages of KV cache; the whole cache has {usable}",
            param="max_tokens",
            code="context_length_exceeded",
        )


def queued(sequence: Sequence, waiting: Seq[Sequence], num_running: int) -> Queued | Resumed:
    """The event that a sequence waits; `waiting` is in order of rank and does not contain it."""
    place = bisect(waiting, sequence.rank, key=lambda other: other.rank)
    before = tuple(s.request_id for s in waiting[max(0, place - MAX_NAMED) : place])
    request = sequence.request
    if request.num_crashes or request.output_token_ids:
        other_bits = request.has_other_bits
        return Resumed(sequence.request_id, place, num_running, before, other_bits)
    return Queued(sequence.request_id, place, num_running, before)
