"""Percentiles, rates and goodput against values computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from infer.bench.drive import Record
from infer.bench.results import engine_summary, median_run, percentile, run_document, summarize
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineCounters, EngineGauges, EngineStats, RequestCounters
from infer.types.stats_summary import ServingStats


def record(arrival_s: float, token_s: list[float], **fields: Any) -> Record:
    fields = {"end_s": token_s[-1], "output_tokens": len(token_s), **fields}
    return Record(fields.pop("group", ""), arrival_s, arrival_s, token_s, **fields)


def test_percentiles_interpolate() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([1, 2, 3, 4], 0) == 1
    assert percentile([1, 2, 3, 4], 100) == 4
    assert percentile([10, 20], 95) == pytest.approx(19.5)
    assert percentile([7], 99) == 7


def test_a_summary_by_hand() -> None:
    records = [
        record(0.0, [0.1, 0.2, 0.4], prompt_tokens=10, cached_tokens=4, wanted_tokens=3),
        record(1.0, [1.3, 1.4], end_s=1.5, prompt_tokens=20, wanted_tokens=3),
        record(0.0, [0.5], error="http_503", end_s=2.0, prompt_tokens=99),
    ]
    summary = summarize(records)
    assert summary["duration_s"] == 2.0
    assert (summary["num_requests"], summary["num_answered"]) == (3, 2)
    assert summary["num_short"] == 1
    assert summary["errors"] == {"http_503": 1}
    assert (summary["prompt_tokens"], summary["cached_tokens"]) == (30, 4)
    assert summary["output_tok_s"] == 2.5
    assert summary["total_tok_s"] == 17.5
    assert summary["requests_per_s"] == 1.0
    assert summary["ttft_ms"] == {
        "mean": 200.0, "p50": 200.0, "p95": 290.0, "p99": 298.0, "max": 300.0
    }  # fmt: skip
    assert summary["itl_ms"]["p50"] == pytest.approx(100.0)  # of 100, 200 and 100
    assert summary["itl_ms"]["p95"] == pytest.approx(190.0)
    assert summary["e2e_ms"]["mean"] == pytest.approx(450.0)
    assert "goodput" not in summary


def test_goodput_is_what_meets_both_objectives() -> None:
    records = [
        record(0.0, [0.1, 0.2, 0.3]),  # good: 100 ms, then 100 ms a token
        record(0.0, [0.3, 0.4, 0.5]),  # late
        record(0.0, [0.1, 0.2, 0.6]),  # slow: 250 ms a token
        record(0.0, [0.1], error="cut_off", end_s=1.0),
    ]
    goodput = summarize(records, slo_ttft_ms=200, slo_itl_ms=150)["goodput"]
    assert (goodput["num_requests"], goodput["share"]) == (1, 0.25)
    assert goodput["requests_per_s"] == 1.0
    assert summarize(records, slo_ttft_ms=200)["goodput"]["num_requests"] == 2
    assert summarize(records, slo_itl_ms=150)["goodput"]["num_requests"] == 2


def test_several_tokens_in_a_piece_count_in_the_mean() -> None:
    assert record(0.0, [0.0, 0.4], output_tokens=5).mean_itl_s == pytest.approx(0.1)


def test_nothing_was_answered() -> None:
    summary = summarize([Record("", error="connection", end_s=0.0)])
    assert summary["ttft_ms"] is None
    assert summary["output_tok_s"] == 0.0


def test_streams_beside_a_long_prompt() -> None:
    """The prompt is computed from 1.0 to 2.0."""
    records = [
        record(0.0, [0.1, 0.2, 0.9, 1.4, 2.0, 2.3], group="streams"),
        record(0.0, [0.5, 1.0], group="streams"),
        record(1.0, [2.0, 2.1], group="long"),
    ]
    groups = summarize(records)["groups"]
    quiet, beside = groups["streams, quiet"], groups["streams, long prompt running"]
    assert quiet["itl_ms"]["max"] == pytest.approx(500)  # 0.5 → 1.0; 2.0 → 2.3
    assert quiet["itl_ms"]["mean"] == pytest.approx(400)  # not 0.1 → 0.2: not all have begun
    assert beside["itl_ms"]["mean"] == pytest.approx(550)  # 0.9 → 1.4 → 2.0
    assert set(groups) == {"streams", "long", "streams, quiet", "streams, long prompt running"}


def test_the_median_run_is_one_of_them() -> None:
    runs = [{"summary": {"output_tok_s": rate}} for rate in (30.0, 10.0, 20.0)]
    assert median_run(runs) == 2
    assert median_run(runs[:2]) == 1


def test_a_timeline_can_be_read_back() -> None:
    kept = record(0.25, [0.5, 0.300000001], group="x", message="y")
    (row,) = run_document({}, [kept])["requests"]
    kept.token_s, kept.end_s = [0.5, 0.3], 0.3
    assert Record(**row) == kept


def test_counters_are_those_of_the_run() -> None:
    def reading(factor: int) -> ServingStats:
        counters = EngineCounters(
            num_steps=4 * factor,
            num_rows=12 * factor,
            num_sampled_tokens=11 * factor,
            num_batches_formed=2 * factor,
            num_batch_requests=3 * factor,
        )
        return ServingStats(EngineStats(EngineGauges(), counters), RequestCounters(), LIMITS, 0)

    counted = engine_summary(reading(2), reading(3), duration_s=30.0)
    wanted = {
        **{"mode": "static", "mean_rows_per_step": 3.0, "num_steps": 4, "num_sampled_tokens": 11},
        **{"batches_formed": 2, "batches_per_minute": 4.0, "mean_batch_size": 1.5},
    }
    assert {name: counted[name] for name in wanted} == wanted
    assert "mean_wait_ms" not in counted


LIMITS = EngineLimits(
    vocab_size=9, max_seq_len=9, num_seats=9, max_waiting_requests=9, batching_mode="static"
)
