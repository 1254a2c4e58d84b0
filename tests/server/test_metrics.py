"""What `/metrics` has beside the numbers of requests, and what it does not grow with."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infer.server.observe.key_usage import MAX_SHOWN, REST, KeyUsage, usage_file
from tests.support.doubles import launch_hash_llm, make_hash_llm
from tests.support.serving import COMPLETIONS, App, completion_body, with_app


def counts(num_tokens: int) -> dict[str, int]:
    return {
        "requests": 1,
        "prompt_tokens": num_tokens,
        "cached_tokens": 0,
        "generation_tokens": num_tokens,
    }


def test_the_series_do_not_grow_with_the_keys(tmp_path: Path) -> None:
    """The keys that use most are shown, none falls, and no token is counted twice or lost."""
    usage = KeyUsage("m", tmp_path / "usage", 1000)
    before: Counter[str] = Counter()
    total = 0
    for turn in range(3):
        for number in range(2000):
            used = number if turn else 2000 - number  # those that were large become small
            usage.add(f"key {number}", counts(used * (turn + 1)))
            total += used * (turn + 1)
            if number % 500 == 0:
                now = Counter(usage.shown("generation_tokens"))
                assert len(now) <= MAX_SHOWN + 1
                assert now[REST] >= before[REST]
                before = now
    usage.add("large", counts(100_000))
    total += 100_000
    shown = usage.shown("generation_tokens")
    assert shown["large"] == 100_000
    assert len(shown) == MAX_SHOWN + 1
    assert sum(shown.values()) <= total
    totals = usage.totals()
    assert sum(each["generation_tokens"] for each in totals.values()) == total
    usage.save()
    again = KeyUsage("m", tmp_path / "usage", 1000)
    assert sum(again.shown("generation_tokens").values()) == total
    most = sorted(totals, key=lambda key: totals[key]["generation_tokens"])[-MAX_SHOWN:]
    assert set(again.shown("requests")) == {*most, REST}


def test_few_keys_have_no_rest() -> None:
    usage = KeyUsage("m", None, 1000)
    usage.add("a", counts(3))
    assert usage.shown("prompt_tokens") == {"a": 3}


def test_usage_of_keys_that_are_mounted_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys" / "keys.json"
    keys.parent.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert usage_file(keys) == keys.with_name("keys.json.usage")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    found = usage_file(keys)
    assert found.parent == tmp_path / "state" / "infer"
    assert "cannot be written: the usage of the keys is in" in caplog.text
    usage = KeyUsage("m", found, 0)
    usage.add("a", counts(3))
    assert KeyUsage("m", found, 0).shown("requests") == {"a": 1}
    monkeypatch.setenv("XDG_STATE_HOME", str(found))  # a file
    assert usage_file(keys) == keys.with_name("keys.json.usage")
    assert "the usage of the keys is not kept" in caplog.text


def test_every_metric_says_what_it_is() -> None:
    async def use(app: App) -> None:
        await app.post(COMPLETIONS, completion_body(max_tokens=3))
        await app.idle()
        text = (await app.get("/metrics")).body.decode()
        families = {each.name: each for each in text_string_to_metric_families(text)}
        for name, family in families.items():
            words = name.partition(":")[2].replace("_", " ")
            assert len(family.documentation) > 10, name
            assert family.documentation.lower() not in (words, f"{words}."), name
        (info,) = families["infer:build_info"].samples
        assert info.value == 1
        assert set(info.labels) == {"version", "python"}
        (cache,) = families["infer:cache_config_info"].samples
        assert int(cache.labels["block_size"]) > 0
        assert int(cache.labels["num_gpu_blocks"]) > 0
        assert cache.labels["enable_prefix_caching"] == "True"

    with_app(make_hash_llm(), use)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_processes_of_server_and_engine() -> None:
    async def use(app: App) -> None:
        text = (await app.get("/metrics")).body.decode()
        families = {each.name: each for each in text_string_to_metric_families(text)}
        for name in ("resident_memory_bytes", "open_fds", "cpu_seconds", "start_time_seconds"):
            found = {s.labels["process"]: s.value for s in families[f"process_{name}"].samples}
            assert set(found) == {"api", "engine-0"}
            assert all(value > 0 for value in found.values())

    with_app(launch_hash_llm(), use)


def test_probes_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infer")

    async def use(app: App) -> None:
        for path in ("/health", "/health/live", "/health/ready", "/v1/models"):
            assert (await app.get(path)).status == 200

    with_app(make_hash_llm(), use)
    paths = [record.fields["path"] for record in caplog.records if hasattr(record, "fields")]
    assert paths == ["/v1/models"]
