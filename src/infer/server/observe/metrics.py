"""`Metrics`: the numbers of `/metrics` and `/stats`, with the names that vLLM's dashboards use"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from infer.engine.client.async_llm import AsyncLLM
from infer.server.http.connections import Connections
from infer.server.http.context import RequestContext
from infer.server.observe.help_texts import help_of
from infer.server.observe.key_usage import KeyUsage
from infer.server.observe.process_metrics import ProcessMetrics
from infer.server.observe.request_trace import GAP_BUCKETS_S, Histogram, RequestTrace, RequestTraces
from infer.types.engine_stats import EngineCounters, EngineGauges
from infer.types.server_limits import SERVER_LIMITS, ServerLimits
from infer.types.stats_summary import ServingStats
from infer.types.step_events import ComputedChunk, StepEvents
from infer.version import VERSION

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COUNTS = tuple(2**i for i in range(18))

_TIMES = {
    "time_to_first_token_seconds": ("received", "first_s"),
    "request_queue_time_seconds": ("received", "admitted_s"),
    "request_prefill_time_seconds": ("admitted_s", "first_s"),
    "request_decode_time_seconds": ("first_s", "end"),
    "request_inference_time_seconds": ("admitted_s", "end"),
    "e2e_request_latency_seconds": ("received", "end"),
}
"""Name of a time → the two points of a trace between which it is measured."""
_SIZES: dict[str, Callable[[RequestTrace], int]] = {
    "request_prompt_tokens": lambda trace: trace.num_prompt,
    "request_generation_tokens": lambda trace: trace.sum_of("num_tokens"),
    "request_params_max_tokens": lambda trace: trace.max_tokens,
    "request_params_n": lambda trace: len(trace.choices),
    "request_num_preemptions": lambda trace: trace.num_preemptions,
}
_GAUGES: dict[str, Callable[[EngineGauges], float]] = {
    "num_requests_running": lambda gauges: gauges.num_running,
    "num_requests_waiting": lambda gauges: gauges.num_waiting,
    "num_requests_preempted": lambda gauges: gauges.num_preempted,
    "kv_cache_usage_perc": lambda gauges: gauges.kv_cache_usage,
    "cores_taken": lambda gauges: gauges.cores_taken,
}
_COUNTERS: dict[str, Callable[[EngineCounters], float]] = {
    "prompt_tokens": lambda counters: counters.num_prompt_tokens,
    "prompt_tokens_cached": lambda counters: counters.num_cached_tokens,
    "prefix_cache_queries": lambda counters: counters.num_prompt_tokens,
    "prefix_cache_hits": lambda counters: counters.num_cached_tokens,
    "generation_tokens": lambda counters: counters.num_sampled_tokens,
    "num_preemptions": lambda counters: counters.num_preemptions,
    "spec_decode_num_drafts": lambda counters: counters.num_drafts,
    "spec_decode_num_draft_tokens": lambda counters: counters.num_draft_tokens,
    "spec_decode_num_accepted_tokens": lambda counters: counters.num_accepted_tokens,
    "engine_steps": lambda counters: counters.num_steps,
    "engine_restarts": lambda counters: counters.num_restarts,
    "requests_moved": lambda counters: counters.num_moved,
    "requests_moved_unequal": lambda counters: counters.num_moved_unequal,
}
_COUNTERS_OF_REPLICAS = {
    name: _COUNTERS[name]
    for name in ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "engine_restarts")
}
_COUNTED = ("batches_formed",)
"""The statistics of `ServingStats.summary` that are counters; the others are gauges."""

DEFAULT_PREFIX = "infer"


class _Together:
    """A collector over several engines: samples of one name are put into one family, because a
    scrape may have each family once."""

    def __init__(self, all_metrics: Sequence[Metrics]) -> None:
        self._all = all_metrics

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metrics in self._all:
            for family in metrics.collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()


class _OfConnections:
    """A collector of the numbers of the server's connections, which belong to no model."""

    def __init__(self, prefix: str, connections: Connections) -> None:
        self._prefix = prefix
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        prefix, connections = self._prefix, self._connections
        text = "connections that are open"
        yield GaugeMetricFamily(f"{prefix}:open_connections", text, connections.num_open)
        text = "connections that gave way to new ones"
        yield CounterMetricFamily(f"{prefix}:connections_gave_way", text, connections.num_gave_way)
        text = "what was refused before it was a request"
        refusals = CounterMetricFamily(f"{prefix}:protocol_refusals", text, labels=["reason"])
        for reason, count in connections.refusals.counts.items():
            refusals.add_metric([reason], count)
        yield refusals


class _Collected:
    """A collector of families that have been made already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def snapshot_of(
    all_metrics: Sequence[Metrics], connections: Connections | None = None
) -> Callable[[], bytes]:
    """What makes the body of `/metrics`, in any thread, of the numbers as they are now; with those
    of connections if they are given. The samples of several engines differ in `model_name`."""
    prefix = next((metrics.prefix for metrics in all_metrics), DEFAULT_PREFIX)
    families = [*_Together(all_metrics).collect()]
    if connections is not None:
        families += _OfConnections(prefix, connections).collect()

    def render() -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected([*families, _build_info(prefix), *ProcessMetrics().collect()]))
        return generate_latest(registry)

    return render


def _build_info(prefix: str) -> Metric:
    labels = {"version": VERSION, "python": platform.python_version()}
    text = "Always 1; the labels say which version answers."
    family = GaugeMetricFamily(f"{prefix}:build_info", text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


class Metrics:
    """Each number is counted in one place. Counters and gauges are the engine's own and are read
    for each answer. Times and sizes are taken from each trace when it ends. `RequestTraces` counts
    the gaps between tokens. The prometheus client only formats. Labels are the name of the model
    and of the key, which a client cannot choose. It is a collector for the prometheus client."""

    def __init__(
        self,
        engine: AsyncLLM,
        traces: RequestTraces,
        prefix: str,
        usage: Path | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> None:
        """`usage`: file that keeps the totals of the keys, by model and key, over restarts of the
        server. A server that dies loses the last `save_usage_s` seconds of `limits`. Servers may
        share a file."""
        self._engine = engine
        self._traces = traces
        self.prefix = prefix
        self._times = {name: Histogram(_SECONDS) for name in _TIMES}
        self._sizes = {name: Histogram(_COUNTS) for name in _SIZES}
        self._per_token = Histogram(GAP_BUCKETS_S)
        self._per_step = Histogram(_COUNTS)
        self._outcomes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._usage = KeyUsage(engine.model_name, usage, limits.save_usage_s)
        traces.on_step.append(self._stepped)
        traces.on_end.append(self._ended)

    def _stepped(self, step_events: StepEvents) -> None:
        chunks = [e.num_tokens for e in step_events.events if isinstance(e, ComputedChunk)]
        self._per_step.add(sum(chunks) + step_events.num_sequences - len(chunks))

    def _ended(self, trace: RequestTrace) -> None:
        assert trace.outcome is not None
        points = {name: trace.earliest(name) for name in ("admitted_s", "first_s")}
        points |= {"received": trace.context.received_s, "end": trace.ended_s}
        for name, (begin, end) in _TIMES.items():
            begin_s, end_s = points[begin], points[end]
            if begin_s is not None and end_s is not None:
                self._times[name].add(end_s - begin_s)
        for name, size in _SIZES.items():
            self._sizes[name].add(size(trace))
        num_tokens, first_s = trace.sum_of("num_tokens"), points["first_s"]
        if num_tokens > 1 and first_s is not None and trace.ended_s is not None:
            self._per_token.add((trace.ended_s - first_s) / (num_tokens - 1))
        self._outcomes[trace.outcome] += 1
        if trace.context.key_name:
            self.add_usage(
                trace.context.key_name,
                requests=1,
                prompt_tokens=trace.num_prompt,
                cached_tokens=trace.sum_of("num_cached"),
                generation_tokens=num_tokens,
            )

    def add_usage(self, key_name: str, **counts: int) -> None:
        """Add to the totals of a key, by the names that `/stats` has for them."""
        self._usage.add(key_name, counts)

    def save(self) -> None:
        """Add the totals of the keys to the file; entries of other models are not changed."""
        self._usage.save()

    def seen(self, context: RequestContext) -> None:
        """Count the status of an HTTP request that has ended."""
        if context.status in (401, 429, 503):
            self._refusals[str(context.status)] += 1

    def stats(self) -> dict[str, Any]:
        """The body of `/stats`: what the scheduler does, for people."""
        stats = self._engine.read_stats()
        gauges = stats.engine.gauges
        num_steps = sum(self._per_step.counts)
        per_step = {"mean_tokens_per_step": round(self._per_step.sum / max(1, num_steps), 3)}
        return {
            **stats.summary(),
            "queue_depth": gauges.num_waiting,
            "running": gauges.num_running,
            "preempted": gauges.num_preempted,
            **(per_step if num_steps else {}),
            "keys": self._usage.totals(),
            "engine": stats.by_name(),
            **self._replicas(),
        }

    def _replicas(self) -> dict[str, Any]:
        """The numbers of each engine, where there are several."""
        mode, ready = self._engine.batching_mode, self._engine.ready_replicas()
        replicas = {
            name: {"ready": name in ready, **stats.by_name(mode)}
            for name, stats in self._engine.stats_of_replicas().items()
        }
        return {"replicas": replicas} if replicas else {}

    # ---- for the prometheus client

    def collect(self) -> Iterator[Metric]:
        """All families of metrics; called by the prometheus client."""
        serving = self._engine.read_stats()
        stats = serving.engine
        for name, gauge in _GAUGES.items():
            yield self._one(GaugeMetricFamily, name, gauge(stats.gauges))
        for name, counter in _COUNTERS.items():
            yield self._one(CounterMetricFamily, name, counter(stats.counters))
        at = {str(place): n for place, n in sorted(stats.counters.num_accepted_at.items())}
        yield self._labelled("spec_decode_num_accepted_tokens_per_pos", "position", at)
        yield from self._summary(serving)
        yield self._cache_config(serving)
        if replicas := self._engine.stats_of_replicas():
            ready = self._engine.ready_replicas()
            states = {replica: float(replica in ready) for replica in replicas}
            yield self._labelled("replica_ready", "replica", states, GaugeMetricFamily)
            for name, gauge in _GAUGES.items():
                values = {
                    replica: gauge(of_replica.gauges) for replica, of_replica in replicas.items()
                }
                yield self._labelled(f"replica_{name}", "replica", values, GaugeMetricFamily)
            for name, counter in _COUNTERS_OF_REPLICAS.items():
                values = {
                    replica: counter(of_replica.counters)
                    for replica, of_replica in replicas.items()
                }
                yield self._labelled(f"replica_{name}", "replica", values)
        yield self._labelled("request_success", "finished_reason", self._outcomes)
        yield self._labelled("admission_rejections", "reason", self._refusals)
        for name in ("requests", "prompt_tokens", "cached_tokens", "generation_tokens"):
            yield self._labelled(f"key_{name}", "key", self._usage.shown(name))
        histograms = {**self._times, **self._sizes}
        histograms["inter_token_latency_seconds"] = self._traces.gaps
        histograms["request_time_per_output_token_seconds"] = self._per_token
        histograms["iteration_tokens_total"] = self._per_step
        for name, histogram in histograms.items():
            yield self._histogram(name, histogram)

    def _summary(self, serving: ServingStats) -> Iterator[Metric]:
        """What `/stats` and `LLM.stats()` say too, under the same names."""
        for name, value in serving.summary().items():
            if isinstance(value, str):
                yield self._labelled(f"engine_{name}", name, {value: 1}, GaugeMetricFamily)
            elif name in _COUNTED:
                yield self._one(CounterMetricFamily, name, value)
            else:
                yield self._one(GaugeMetricFamily, name, value)

    def _cache_config(self, serving: ServingStats) -> Metric:
        """With vLLM's labels, by which llm-d's scheduler knows how much fits."""
        limits, gauges = serving.limits, serving.engine.gauges
        labels = {
            "model_name": self._engine.model_name,
            "block_size": str(limits.page_size),
            "num_gpu_blocks": str(gauges.num_pages),
            "enable_prefix_caching": str(limits.prefix_caching),
        }
        name = "cache_config_info"
        family = GaugeMetricFamily(f"{self.prefix}:{name}", help_of(name), labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _one(self, kind: type[Any], name: str, value: float) -> Metric:
        family = kind(f"{self.prefix}:{name}", help_of(name), labels=["model_name"])
        family.add_metric([self._engine.model_name], value)
        assert isinstance(family, Metric)
        return family

    def _labelled(
        self,
        name: str,
        label: str,
        counts: Mapping[str, float],
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        name, words = f"{self.prefix}:{name}", help_of(name)
        family = kind(name, words, labels=["model_name", label])
        for value, count in counts.items():
            family.add_metric([self._engine.model_name, value], count)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        name, words = f"{self.prefix}:{name}", help_of(name)
        family = HistogramMetricFamily(name, words, labels=["model_name"])
        bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric([self._engine.model_name], buckets, histogram.sum)
        return family
