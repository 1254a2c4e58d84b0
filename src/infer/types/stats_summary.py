"""`summary_of`: an engine's statistics under the names that all reports of them share

`/stats`, `/metrics`, `LLM.stats()` and `infer bench` have these names. A number that has no meaning
is left out: those of batches where the mode is not static, a mean of nothing, the size of the cache
while no engine works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

import msgspec

from infer.types.ends import end_of
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats, RequestCounters

PERCENTILES = (50, 95, 99)
_SHORTEST_WAIT_S = 1e-4
"""Waits below this many seconds are counted as none."""
_BUCKETS_AN_OCTAVE = 8


def wait_bucket(wait_s: float) -> int:
    """The bucket of a wait; the bounds of a bucket differ by 9 %."""
    if wait_s < _SHORTEST_WAIT_S:
        return 0
    return 1 + math.floor(_BUCKETS_AN_OCTAVE * math.log2(wait_s / _SHORTEST_WAIT_S))


def wait_percentile(counts: Mapping[int, int], percent: float) -> float:
    """A percentile of one or more waits in seconds, within 5 % of the exact one; `counts` has the
    number of waits by bucket."""
    rank = math.ceil(sum(counts.values()) * percent / 100)
    buckets = sorted(counts)
    reached = accumulate(counts[bucket] for bucket in buckets)
    bucket = next(b for b, num in zip(buckets, reached, strict=True) if num >= rank)
    if bucket == 0:
        return 0.0
    return float(_SHORTEST_WAIT_S * 2 ** ((bucket - 0.5) / _BUCKETS_AN_OCTAVE))


def summary_of(stats: EngineStats, limits: EngineLimits) -> dict[str, str | int | float]:
    """The statistics of an engine by name:

    - `mode`: the batching mode
    - `batches_formed`, `batches_per_minute` (those formed in the last minute), `mean_batch_size`
      (requests of a batch): in static mode
    - `mean_rows_per_step`: sequences computed in a step
    - `mean_wait_ms`, `p50_wait_ms`, `p95_wait_ms`, `p99_wait_ms`: milliseconds from the hand-over
      of a request to the engine until its first seat; percentiles within 5 %
    - `success_rate`: requests that ended normally, of these and those that failed; 0 to 1
    - `mean_processing_ms`: milliseconds from the first seat to the end, where that was normal
    - `kv_bytes`: size that the KV cache may have; `kv_bytes_touched`: what it takes of it now;
      `kv_bytes_allowed`: what it may take of it now, less than `kv_bytes` while memory is scarce;
      `kv_pages_used`: pages that requests use now
    - `prefix_hit_rate`: prompt tokens found in the prefix cache, of all; 0 to 1
    """
    gauges, counters = stats.gauges, stats.counters
    summary: dict[str, str | int | float] = {"mode": limits.batching_mode}
    if limits.batching_mode == "static":
        summary["batches_formed"] = counters.num_batches_formed
        summary["batches_per_minute"] = gauges.num_batches_last_minute
        if counters.num_batches_formed:
            mean = counters.num_batch_requests / counters.num_batches_formed
            summary["mean_batch_size"] = round(mean, 3)
    if counters.num_steps:
        summary["mean_rows_per_step"] = round(counters.num_rows / counters.num_steps, 3)
    if num_waits := sum(counters.wait_counts.values()):
        summary["mean_wait_ms"] = round(1000 * counters.wait_s / num_waits, 3)
        for percent in PERCENTILES:
            wait_s = wait_percentile(counters.wait_counts, percent)
            summary[f"p{percent}_wait_ms"] = round(1000 * wait_s, 3)
    ends = {"num_requests_finished": 0, "num_requests_cancelled": 0, "num_requests_failed": 0}
    for reason, count in counters.num_finished.items():
        ends[end_of(reason).counter] += count
    num_finished, num_failed = ends["num_requests_finished"], ends["num_requests_failed"]
    summary |= _success_rate(num_finished, num_failed)
    if num_finished:
        summary["mean_processing_ms"] = round(1000 * counters.processing_s / num_finished, 3)
    if gauges.kv_bytes:
        summary["kv_bytes"] = gauges.kv_bytes
        page_bytes = gauges.kv_bytes // (gauges.num_pages + 1)
        summary["kv_bytes_touched"] = gauges.num_touched_pages * page_bytes
        summary["kv_bytes_allowed"] = gauges.num_allowed_pages * page_bytes
    if gauges.num_pages:
        summary["kv_pages_used"] = gauges.num_pages - gauges.num_free_pages
    if limits.prefix_caching and counters.num_prompt_tokens:
        rate = counters.num_cached_tokens / counters.num_prompt_tokens
        summary["prefix_hit_rate"] = round(rate, 4)
    return summary


class ServingStats(msgspec.Struct, frozen=True):
    """An engine's statistics, and those of the façade in front of it."""

    engine: EngineStats
    requests: RequestCounters
    limits: EngineLimits
    num_open: int
    """Requests that callers hold open."""

    def summary(self) -> dict[str, str | int | float]:
        """`summary_of` the engine. Success is that of the façade, which also counts the requests
        that failed because there was no engine."""
        summary = summary_of(self.engine, self.limits)
        requests = self.requests
        rate = _success_rate(requests.num_requests_finished, requests.num_requests_failed)
        return {**{k: v for k, v in summary.items() if k != "success_rate"}, **rate}

    def by_name(self) -> dict[str, int | float]:
        """All numbers but those of the summary in one mapping, for people and for JSON."""
        names = self.engine.by_name(self.limits.batching_mode)
        requests = msgspec.structs.asdict(self.requests)
        requests["num_requests_refused"] += names["num_requests_refused"]
        return {**names, "num_open": self.num_open, **requests}


def _success_rate(num_finished: int, num_failed: int) -> dict[str, float]:
    ended = num_finished + num_failed
    return {"success_rate": round(num_finished / ended, 4)} if ended else {}
