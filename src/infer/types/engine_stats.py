"""`EngineStats`: what an engine is doing and has done, as numbers; gauges and counters apart.

A gauge is a state of now: it belongs to the engine that works. A counter only ever grows and goes
on over the engines that follow one another. They are fields of different records, so a new one is
summed over restarts, or not, by where it stands.
"""

from __future__ import annotations

from typing import Any, assert_never

import msgspec

from infer.types.ends import EndCounter, FinishReason

OF_STATIC_BATCHES = (
    *("num_batches_last_minute", "num_batches_formed", "num_batch_requests"),
    *("num_batches", "num_batch_tokens", "num_padded_tokens"),
)
"""The fields that have a meaning in static mode only."""


class EngineGauges(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine holds now; all zeros where there is none."""

    num_waiting: int = 0
    """Requests without a seat."""
    num_running: int = 0
    """Requests with a seat and pages."""
    num_preempted: int = 0
    """Requests that have lost their pages and will be recomputed."""
    num_pages: int = 0
    """Pages of the KV cache that requests may use."""
    num_free_pages: int = 0
    """Pages that no request uses; their content may still be found."""
    num_indexed_pages: int = 0
    """Pages whose content the prefix index knows."""
    kv_bytes: int = 0
    """Size of the KV cache in bytes; 0 where it is not known."""
    cores_taken: float = 0.0
    """Cores that other processes had in the last seconds while threads of the kernels needed them.
    """
    num_batches_last_minute: int = 0
    """Static mode: batches that were formed in the last minute."""
    num_touched_pages: int = 0
    """Pages that take memory, in use or not."""
    num_allowed_pages: int = 0
    """Pages that may take memory now; fewer than `num_pages` while main memory is scarce."""

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the pages that requests use; 0 to 1."""
        return 1 - self.num_free_pages / self.num_pages if self.num_pages else 0.0


class EngineCounters(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine, or several one after the other, have done; tokens unless the name says
    otherwise."""

    num_evictions: int = 0
    """Pages that left the prefix index: overwritten, or their memory was given back."""
    num_submitted: int = 0
    """Requests that were accepted; equals waiting + running + preempted + finished."""
    num_requests_refused: int = 0
    """Requests that the scheduler refused because its queue was full."""
    num_steps: int = 0
    num_rows: int = 0
    """Sequences that were computed, summed over the steps."""
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_late_tokens: int = 0
    """Tokens sampled for sequences that had ended while the step was being computed; dropped."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache."""
    num_preemptions: int = 0
    wait_s: float = 0.0
    """Seconds from the hand-over to the engine until the first seat, summed over the requests."""
    processing_s: float = 0.0
    """Seconds from the first seat to the end, summed over the requests that ended normally."""
    num_batches_formed: int = 0
    """Static mode: batches that have begun."""
    num_batch_requests: int = 0
    """Static mode: requests of those batches."""
    num_batches: int = 0
    """Static mode: batches that have ended."""
    num_batch_tokens: int = 0
    """Static mode: prompt and output tokens of those batches."""
    num_padded_tokens: int = 0
    """Static mode: tokens that rows padded to the longest one would have had; never computed."""
    num_drafts: int = 0
    """Speculation: proposals that were verified, of one or more tokens each."""
    num_draft_tokens: int = 0
    """Speculation: proposed tokens."""
    num_accepted_tokens: int = 0
    """Speculation: proposed tokens that were accepted; each of them saved a step of its sequence.
    """
    num_restarts: int = 0
    """Engines that have died."""
    num_moved: int = 0
    """Requests that went on in another engine, or in the next one of the same replica."""
    num_moved_unequal: int = 0
    """Those of them that went on in an engine with another fingerprint: from there their tokens may
    be others than they would have been."""
    num_accepted_at: dict[int, int] = {}
    """Speculation: accepted tokens by their place in the proposal, from 0."""
    wait_counts: dict[int, int] = {}
    """Requests that got a first seat, by the bucket of their wait; see `types.stats_summary`."""
    num_finished: dict[FinishReason, int] = {}
    """Requests that have ended, by reason; reasons that did not occur are left out."""

    def plus(self, other: EngineCounters) -> EngineCounters:
        """The sum, field by field."""
        return self._added(other, 1)

    def minus(self, other: EngineCounters) -> EngineCounters:
        """The difference, field by field."""
        return self._added(other, -1)

    def _added(self, other: EngineCounters, sign: int) -> EngineCounters:
        sums: dict[str, Any] = {}
        for name in self.__struct_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                both = {**mine, **others}
                sums[name] = {key: mine.get(key, 0) + sign * others.get(key, 0) for key in both}
            else:
                sums[name] = mine + sign * others
        return EngineCounters(**sums)


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Both of one moment."""

    gauges: EngineGauges = EngineGauges()
    counters: EngineCounters = EngineCounters()

    def by_name(self, batching_mode: str = "static") -> dict[str, int | float]:
        """All numbers in one mapping, for people and for JSON; those of static batches in static
        mode only."""
        names = {**msgspec.structs.asdict(self.gauges), **msgspec.structs.asdict(self.counters)}
        del names["wait_counts"]
        if batching_mode != "static":
            for name in OF_STATIC_BATCHES:
                del names[name]
        finished, accepted = names.pop("num_finished"), names.pop("num_accepted_at")
        names |= {f"num_accepted_at_{position}": n for position, n in sorted(accepted.items())}
        return {**names, **{f"num_finished_{reason}": n for reason, n in finished.items()}}


class RequestCounters(msgspec.Struct):
    """The balance of a façade: admitted = open + finished + cancelled + failed, at any moment."""

    num_requests_admitted: int = 0
    num_requests_refused: int = 0
    """Requests that found no room, or no engine."""
    num_requests_finished: int = 0
    num_requests_cancelled: int = 0
    num_requests_failed: int = 0

    def count_end(self, counter: EndCounter) -> None:
        """One more request has ended; `counter`: see `end_of`."""
        match counter:
            case "num_requests_finished":
                self.num_requests_finished += 1
            case "num_requests_cancelled":
                self.num_requests_cancelled += 1
            case "num_requests_failed":
                self.num_requests_failed += 1
            case _:
                assert_never(counter)
