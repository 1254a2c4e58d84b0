"""Metrics, logs, spans, health, CORS and comments in idle streams."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infer.errors import ConfigError
from infer.server.observe.logs import JsonLines
from infer.server.settings import ServerSettings
from tests.support.doubles import core_of, launch_hash_llm, make_hash_llm
from tests.support.serving import CHAT, COMPLETIONS, App, chat_body, completion_body, with_app

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
SOFT_LIMIT_S = 1.0
"""Without a word of the engine."""
SECRET = "the canary sings"


async def some_requests(app: App) -> None:
    body = completion_body(max_tokens=10, ignore_eos=True, prompt=SECRET * 9)
    await asyncio.gather(*(app.post(COMPLETIONS, body) for _ in range(3)))
    await app.post(CHAT, chat_body(stream=True, max_tokens=5, ignore_eos=True))
    leave = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, leave.set)
    await app.post(COMPLETIONS, {**body, "max_tokens": 300}, leave=leave)
    assert (await app.post(COMPLETIONS, completion_body(prompt=""))).status == 400


async def samples(app: App) -> dict[tuple[str, str], float]:
    """The metrics' values by name and the last label that is not the model's name."""
    reply = await app.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert SECRET.encode() not in reply.body
    found = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            # Metrics of connections have no model.
            assert labels.pop("model_name", "hash-model") == "hash-model"
            found[sample.name, next(iter(labels.values()), "")] = sample.value
    return found


def test_the_metrics_add_up() -> None:
    async def use(app: App) -> None:
        await some_requests(app)
        await app.idle()
        found = await samples(app)
        assert found["infer:request_success_total", "length"] == 4
        assert found["infer:request_success_total", "disconnected"] == 1
        histograms = {name for name, _ in found if name.endswith("_bucket")}
        assert len(histograms) == 14
        for name in histograms:
            buckets = [value for (other, _), value in found.items() if other == name]
            assert buckets == sorted(buckets)
            assert buckets[-1] == found[name.replace("_bucket", "_count"), ""] > 0, name
        assert found["infer:request_prompt_tokens_count", ""] == 5
        assert found["infer:request_generation_tokens_sum", ""] == (
            found["infer:inter_token_latency_seconds_count", ""] + 5
        )
        stats = app.engine.stats()
        assert found["infer:prompt_tokens_total", ""] == stats["num_prompt_tokens"]
        computed = stats["num_computed_tokens"]
        assert found["infer:iteration_tokens_total_sum", ""] == computed
        assert found["infer:kv_cache_usage_perc", ""] == 0
        reported = (await app.get("/stats")).json()
        assert reported["queue_depth"] == reported["running"] == 0
        assert 1 < reported["mean_rows_per_step"] < 3
        assert reported["mode"] == "continuous"
        assert 0 < reported["p50_wait_ms"] <= reported["p95_wait_ms"] <= reported["p99_wait_ms"]
        assert reported["success_rate"] == 1
        shared = reported.keys() & stats.keys()
        assert {name: stats[name] for name in shared} == {name: reported[name] for name in shared}
        assert found["infer:engine_mode", "continuous"] == 1
        for name in shared - {"mode"}:
            assert found[f"infer:{name}", ""] == reported[name]
        assert shared >= {"mode", "mean_wait_ms", "mean_processing_ms", "prefix_hit_rate"}
        assert not {name for name, _ in found if "batch" in name}
        assert not {name for name in (*reported, *reported["engine"]) if "batch" in name}
        again = await samples(app)
        assert all(again[key] >= found[key] for key in found)

    with_app(make_hash_llm(step_s=0.002), use)


def test_static_mode_has_statistics_of_its_batches() -> None:
    async def use(app: App) -> None:
        body = completion_body(max_tokens=3, ignore_eos=True)
        await asyncio.gather(*(app.post(COMPLETIONS, body) for _ in range(4)))
        await app.idle()
        reported = (await app.get("/stats")).json()
        assert (reported["mode"], reported["batches_formed"]) == ("static", 2)
        assert reported["batches_per_minute"] == 2
        assert reported["mean_batch_size"] == 2.0
        found = await samples(app)
        assert found["infer:batches_formed_total", ""] == 2
        assert found["infer:mean_batch_size", ""] == 2.0

    with_app(make_hash_llm(batching_mode="static", max_batch_size=2), use)


def test_the_dashboard_asks_for_what_there_is() -> None:
    async def use(app: App) -> None:
        await some_requests(app)
        names = {name for name, _ in await samples(app)}
        asked = set(re.findall(r"infer:\w+", DASHBOARD.read_text(encoding="utf-8")))
        optional = {"infer:key_generation_tokens_total", "infer:admission_rejections_total"}
        assert {name for name in asked - names if ":replica_" not in name} == optional
        assert len(asked) > 15

    with_app(make_hash_llm(), use)


def test_another_prefix() -> None:
    async def use(app: App) -> None:
        body = (await app.get("/metrics")).body
        assert b"vllm:num_requests_running{" in body
        assert b"infer:" not in body

    with_app(make_hash_llm(), use, metrics_prefix="vllm")


def test_logs_are_lines_of_json_without_prompts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infer")

    async def use(app: App) -> None:
        await some_requests(app)
        await app.get("/no\nsuch", **{"x-request-id": "mine"})

    with_app(make_hash_llm(step_s=0.001), use)
    lines = [JsonLines().format(record) for record in caplog.records]
    assert all("\n" not in line and SECRET not in line for line in lines)
    entries = [json.loads(line) for line in lines]
    by_id = {e["request_id"]: e for e in entries if e["message"] == "request"}
    traces = [context for context in by_id.values() if "outcome" in context]
    assert [trace["outcome"] for trace in traces].count("length") == 4
    assert all(trace["total_ms"] >= trace["first_token_ms"] > 0 for trace in traces[:4])
    statuses = [context["status"] for context in by_id.values()]
    assert sorted(statuses) == [200, 200, 200, 200, 400, 404, 499]
    (last,) = [context for context in by_id.values() if context["status"] == 404]
    assert (last["client_request_id"], last["path"]) == ("mine", "/no\nsuch")
    assert {context["model"] for context in by_id.values()} == {"hash-model"}


@pytest.mark.parametrize(
    ("slow_ms", "num_tokens", "is_live"),
    [(1600, 1, False), pytest.param(200, 8, True, marks=pytest.mark.slow)],
)
def test_an_engine_that_makes_no_progress_is_not_live(
    slow_ms: int, num_tokens: int, is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the soft limit has passed. An engine with slow steps or without work is live."""
    monkeypatch.setenv("INFER_WRAP_CORE", "tests.support.faults:wrapped")
    monkeypatch.setenv("INFER_FAULT_SLOW_STEP_MS", str(slow_ms))

    async def use(app: App) -> None:
        await asyncio.sleep(1.1)
        assert (await app.get("/health/live")).status == 200  # idle
        body = completion_body(max_tokens=num_tokens, ignore_eos=True)
        asking = asyncio.ensure_future(app.post(COMPLETIONS, body))
        statuses, loop = [], asyncio.get_running_loop()
        # While it was idle it may have spoken some time before.
        spoke_s = loop.time() - app.engine.engine_client.silence_s
        while not asking.done():
            await asyncio.sleep(0.05)
            statuses.append((await app.get("/health/live")).status)
            assert loop.time() - spoke_s >= SOFT_LIMIT_S or statuses[-1] == 200
        assert (503 in statuses) is not is_live
        assert (await asking).status == 200
        assert (await app.get("/health/live")).status == 200

    with_app(launch_hash_llm(soft_limit_s=SOFT_LIMIT_S), use)


@pytest.mark.parametrize("keep_alive_s", [0.0, 0.05])
def test_a_silent_stream_says_so_in_a_chunk(keep_alive_s: float) -> None:
    async def use(app: App) -> None:
        body = chat_body(stream=True, max_tokens=60, ignore_eos=True)
        assert (
            b'"delta":{},"logprobs":null,"finish_reason":null'
            not in (await app.post(CHAT, body)).body
        )
        runner: Any = core_of(app.engine).runner
        runner.step_s = 0.2
        reply = await app.post(CHAT, chat_body(stream=True, max_tokens=2))
        *chunks, _ = reply.events()
        empty = [chunk for chunk in chunks if chunk["choices"][0]["delta"] == {}]
        assert bool(empty) is bool(keep_alive_s)

    with_app(make_hash_llm(step_s=0.002), use, keep_alive_s=keep_alive_s)


def test_other_origins_only_where_they_are_named() -> None:
    ask = {"origin": "https://a.org", "access-control-request-method": "POST"}

    async def off(app: App) -> None:
        reply = await app.send("OPTIONS", COMPLETIONS, headers=ask)
        assert reply.status == 403
        assert not any(name.startswith("access-control") for name in reply.headers)

    async def on(app: App) -> None:
        reply = await app.send("OPTIONS", COMPLETIONS, headers=ask)
        assert reply.headers["access-control-allow-origin"] == "https://a.org"
        reply = await app.send("OPTIONS", COMPLETIONS, headers={**ask, "origin": "https://b.org"})
        assert "access-control-allow-origin" not in reply.headers

    with_app(make_hash_llm(), off)
    with_app(make_hash_llm(), on, cors_origins="https://a.org,http://localhost:3000")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cors_origins", "*"),
        ("metrics_prefix", "a b"),
        ("log_format", "xml"),
        ("keep_alive_s", -1.0),
    ],
)
def test_settings_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**{name: value})
    assert caught.value.field == name


def test_a_span_for_each_request() -> None:
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}

    async def use(app: App) -> None:
        body = chat_body(max_tokens=5, ignore_eos=True)
        usage = (await app.post(CHAT, body, headers=parent)).json()["usage"]
        (span,) = memory.get_finished_spans()
        assert span.name == "chat hash-model"
        assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert span.attributes["gen_ai.usage.output_tokens"] == 5
        assert [event.name for event in span.events] == ["admitted", "first token"]
        assert span.start_time < span.events[1].timestamp < span.end_time
        assert f"{span.context.trace_id:032x}" == "ab" * 16

    with_app(make_hash_llm(), use, tracing=True)
