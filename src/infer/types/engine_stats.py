"""`EngineStats`: what an engine is doing and has done, as numbers; gauges and counters apart.

A gauge is a state of now: it belongs to the engine that works. A counter only ever grows and goes
on over the engines that follow one another. They are fields of different records, so a new one is
summed over restarts, or not, by where it stands.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from infer.types.ends import EndCounter, FinishReason


class EngineGauges(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine holds now; all zeros where there is none."""

    num_waiting: int = 0
    """requests without a seat"""
    num_running: int = 0
    """requests with a seat and pages"""
    num_preempted: int = 0
    """requests that have lost their pages and will be recomputed"""
    num_pages: int = 0
    """pages of the KV cache that requests may use"""
    num_free_pages: int = 0
    """pages that no request uses; their content may still be found"""
    num_indexed_pages: int = 0
    """pages whose content the prefix index knows"""

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the pages that requests use; 0 to 1."""
        return 1 - self.num_free_pages / self.num_pages if self.num_pages else 0.0


class EngineCounters(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine, or several one after the other, have done; tokens unless the name says
    otherwise."""

    num_evictions: int = 0
    """pages of the prefix index that were overwritten"""
    num_submitted: int = 0
    """requests that were accepted; equals waiting + running + preempted + finished"""
    num_requests_refused: int = 0
    """requests that the scheduler refused because its queue was full"""
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_late_tokens: int = 0
    """tokens sampled for sequences that had ended while the step was being computed; dropped"""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """prompt tokens that were taken from the prefix cache"""
    num_preemptions: int = 0
    num_batches: int = 0
    """static mode: batches that have ended"""
    num_batch_tokens: int = 0
    """static mode: prompt and output tokens of those batches"""
    num_padded_tokens: int = 0
    """static mode: tokens that rows padded to the longest one would have had; never computed"""
    num_drafts: int = 0
    """speculation: proposals that were verified, of one or more tokens each"""
    num_draft_tokens: int = 0
    """speculation: proposed tokens"""
    num_accepted_tokens: int = 0
    """speculation: proposed tokens that were accepted; each of them saved a step of its sequence"""
    num_restarts: int = 0
    """engines that have died"""
    num_accepted_at: dict[int, int] = {}
    """speculation: accepted tokens by their place in the proposal, from 0"""
    num_finished: dict[FinishReason, int] = {}
    """requests that have ended, by reason; reasons that did not occur are left out"""

    def plus(self, other: EngineCounters) -> EngineCounters:
        """The sum, field by field."""
        sums: dict[str, int | dict[FinishReason, int] | dict[int, int]] = {}
        for name in self.__struct_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                sums[name] = {r: mine.get(r, 0) + others.get(r, 0) for r in {**mine, **others}}
            else:
                sums[name] = mine + others
        return EngineCounters(**sums)  # type: ignore[arg-type]


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Both of one moment."""

    gauges: EngineGauges = EngineGauges()
    counters: EngineCounters = EngineCounters()

    def by_name(self) -> dict[str, int]:
        """All numbers in one mapping, for people and for JSON."""
        names = {**msgspec.structs.asdict(self.gauges), **msgspec.structs.asdict(self.counters)}
        finished, accepted = names.pop("num_finished"), names.pop("num_accepted_at")
        names |= {f"num_accepted_at_{position}": n for position, n in sorted(accepted.items())}
        return {**names, **{f"num_finished_{reason}": n for reason, n in finished.items()}}


class RequestCounters(msgspec.Struct):
    """The balance of a façade: admitted = open + finished + cancelled + failed, at any moment."""

    num_requests_admitted: int = 0
    num_requests_refused: int = 0
    """requests that found no room, or no engine"""
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


class ServingStats(msgspec.Struct, frozen=True):
    """An engine's statistics, and those of the façade in front of it."""

    engine: EngineStats
    requests: RequestCounters
    num_open: int
    """requests that callers hold open"""

    def by_name(self) -> dict[str, int]:
        """All numbers in one mapping, for people and for JSON."""
        names = self.engine.by_name()
        requests = msgspec.structs.asdict(self.requests)
        requests["num_requests_refused"] += names["num_requests_refused"]
        return {**names, "num_open": self.num_open, **requests}
