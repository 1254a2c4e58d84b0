"""The results of a run: percentiles, rates and goodput, and the JSON document that holds them.

Percentiles interpolate linearly between the two nearest values. Inter-token latency is the time
from one piece of a stream to the next, over all pieces of all answered requests. A request with an
error is counted as an error and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from infer.bench.drive import Record
from infer.types.engine_stats import EngineStats
from infer.types.stats_summary import ServingStats, summary_of
from infer.version import VERSION

FORMAT = 1
PERCENTILES = (50, 95, 99)
COUNTED = (
    *("num_steps", "num_computed_tokens", "num_sampled_tokens", "num_prompt_tokens"),
    *("num_cached_tokens", "num_preemptions", "num_evictions"),
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens"),
    *("num_batches", "num_batch_tokens", "num_padded_tokens"),
)
"""The counters of the engine that are in a summary, those of batches in static mode."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of one or more values, which are in ascending order."""
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution_ms(values_s: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds; None where there are no values."""
    ordered = sorted(1000 * value for value in values_s)
    if not ordered:
        return None
    figures = {"mean": sum(ordered) / len(ordered)}
    figures |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {name: round(value, 3) for name, value in (figures | {"max": ordered[-1]}).items()}


def latencies(records: Iterable[Record]) -> dict[str, dict[str, float] | None]:
    """The three distributions over the requests that were answered."""
    good = [record for record in records if record.error is None]
    return {
        "ttft_ms": distribution_ms(record.ttft_s for record in good),
        "itl_ms": distribution_ms(b - a for record in good for a, b in record.gaps),
        "e2e_ms": distribution_ms(record.e2e_s for record in good),
    }


def summarize(
    records: Sequence[Record],
    slo_ttft_ms: float | None = None,
    slo_itl_ms: float | None = None,
) -> dict[str, Any]:
    """The summary of a run: counts, rates, latencies, and goodput where there are objectives.

    A request meets the objective for inter-token latency with the mean over its own tokens.
    """
    good = [record for record in records if record.error is None]
    duration_s = max(r.end_s for r in records) - min(r.arrival_s for r in records)
    output = sum(record.output_tokens for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    rate = 1 / duration_s if duration_s > 0 else 0.0
    summary: dict[str, Any] = {
        "duration_s": round(duration_s, 4),
        "num_requests": len(records),
        "num_answered": len(good),
        "num_short": sum(record.output_tokens < record.wanted_tokens for record in good),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "prompt_tokens": prompt,
        "cached_tokens": sum(record.cached_tokens for record in good),
        "output_tokens": output,
        "requests_per_s": round(len(good) * rate, 4),
        "output_tok_s": round(output * rate, 3),
        "total_tok_s": round((prompt + output) * rate, 3),
        **latencies(records),
    }
    if slo_ttft_ms is not None or slo_itl_ms is not None:
        ttft_s = float("inf") if slo_ttft_ms is None else slo_ttft_ms / 1000
        itl_s = float("inf") if slo_itl_ms is None else slo_itl_ms / 1000
        met = [r for r in good if r.ttft_s <= ttft_s and r.mean_itl_s <= itl_s]
        summary["goodput"] = {
            "slo_ttft_ms": slo_ttft_ms,
            "slo_itl_ms": slo_itl_ms,
            "num_requests": len(met),
            "share": round(len(met) / len(records), 4),
            "requests_per_s": round(len(met) * rate, 4),
        }
    groups = list(dict.fromkeys(record.group for record in records if record.group))
    if groups:
        members = {name: [r for r in records if r.group == name] for name in groups}
        summary["groups"] = {name: latencies(these) for name, these in members.items()}
        if "long" in members and "streams" in members:
            summary["groups"] |= _beside_long_prompt(members["streams"], members["long"][0])
    return summary


def _beside_long_prompt(streams: list[Record], long: Record) -> dict[str, Any]:
    """The inter-token latency of the streams while a long prompt is computed, and without one.

    Time counts from the first token of the stream that began last.
    """
    streams = [record for record in streams if record.error is None]
    if long.error is not None or not streams:
        return {}
    begun_s = max(record.token_s[0] for record in streams)
    quiet, beside = [], []
    for start_s, stop_s in (gap for record in streams for gap in record.gaps):
        if stop_s > long.arrival_s and start_s < long.token_s[0]:
            beside.append(stop_s - start_s)
        elif start_s >= begun_s:
            quiet.append(stop_s - start_s)
    return {
        "streams, quiet": {"itl_ms": distribution_ms(quiet)},
        "streams, long prompt running": {"itl_ms": distribution_ms(beside)},
    }


def engine_summary(
    before: ServingStats, after: ServingStats, duration_s: float
) -> dict[str, str | int | float]:
    """The engine's statistics of the time between two readings, of `duration_s` seconds, with the
    names of `types.stats_summary`; and some of its counters."""
    counters = after.engine.counters.minus(before.engine.counters)
    engine = EngineStats(after.engine.gauges, counters)
    summary = summary_of(engine, after.limits)
    if "batches_formed" in summary and duration_s > 0:
        summary["batches_per_minute"] = round(60 * counters.num_batches_formed / duration_s, 3)
    names = engine.by_name(after.limits.batching_mode)
    return summary | {name: names[name] for name in COUNTED if name in names}


def run_document(summary: dict[str, Any], records: Iterable[Record]) -> dict[str, Any]:
    """A run as plain data, with the timeline of every request."""
    rows = [dataclasses.asdict(record) for record in records]
    for row in rows:
        row["token_s"] = [round(at, 5) for at in row["token_s"]]
        row |= {name: round(row[name], 5) for name in ("arrival_s", "sent_s", "end_s")}
    return {"summary": summary, "requests": rows}


def median_run(runs: Sequence[dict[str, Any]]) -> int:
    """The index of the run with the median output throughput."""
    order = sorted(range(len(runs)), key=lambda i: float(runs[i]["summary"]["output_tok_s"]))
    return order[(len(order) - 1) // 2]


def environment() -> dict[str, Any]:
    """The versions and the machine, found without importing torch."""
    versions = {"infer": VERSION, "python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["torch"] = metadata.version("torch")
    name = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {"cpu": name, "logical_cpus": cores, "platform": platform.platform()}
    return {"versions": versions, "machine": machine}
