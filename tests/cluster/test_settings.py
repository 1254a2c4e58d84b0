"""What `serve run infer.cluster:app KEY=VALUE …` may say, and how many engines a load needs."""

from __future__ import annotations

import re
from typing import Any

import pytest

import infer.cluster
from infer.cli.cluster_file import write_yaml
from infer.cluster.cluster_settings import (
    AllSettings,
    ClusterSettings,
    engine_settings,
    open_requests,
    resources_of,
    why_too_many,
)
from infer.cluster.front_identity import new_front_name, seed_of_front
from infer.cluster.ray_version import check_version, warn_without_haproxy
from infer.cluster.scaling import engines_wanted
from infer.config import EngineConfig
from infer.errors import ConfigError
from infer.replicas.host import EngineLoad


def test_strings_become_what_the_settings_are() -> None:
    settings = AllSettings.of(
        {
            **{"model": "x", "replicas": "1-3", "fronts": "2", "insecure": "true"},
            **{"max_batch_size": "8", "request_timeout_s": "2.5", "ui": "no", "seed": 7},
        }
    )
    assert settings.cluster.range == (1, 3)
    assert settings.cluster.fronts == 2
    assert settings.engine.model == "x"
    assert settings.engine.max_batch_size == 8
    assert settings.server.request_timeout_s == 2.5
    assert settings.server.ui is False
    assert AllSettings.from_plain(settings.to_plain()) == settings


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [
        ({"replicsa": "2"}, "replicsa", "did you mean 'replicas'"),
        ({"replicas": "3-1"}, "replicas", "such as 1-3"),
        ({"replicas": "many"}, "replicas", "such as 2"),
        ({"fronts": "two"}, "fronts", "integer"),
        ({"fronts": "0"}, "fronts", "at least 1"),
        ({"memory_gib": "-1"}, "memory_gib", "at least 0"),
        ({"accelerator": "H100"}, "accelerator", "give gpus=1"),
        ({"ui": "perhaps"}, "ui", "true or false"),
        ({"routing": "random"}, "routing", "prefix, least, round-robin"),
        ({"uds": "/tmp/x"}, "uds", "Ray Serve decides"),
        ({"page_size": "16", "kv_cache_backend": "none"}, "page_size", "leave page_size out"),
        ({"insecure": "false"}, "api_keys", "infer keys create"),
        ({"fronts": "2", "sessions": "sqlite:///x.db"}, "sessions", r"postgresql\+psycopg://"),
        ({"fronts": 2, "sessions": "mysql://me@host/x"}, "sessions", "not mysql: give a postgres"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_right(
    arguments: dict[str, Any], name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        AllSettings.of({"insecure": "true", **arguments})
    assert refused.value.field == name


def test_one_front_may_have_its_sessions_in_a_file() -> None:
    AllSettings.of({"insecure": "true", "sessions": "sqlite:///x.db"})


def test_sessions_of_several_fronts() -> None:
    """Without a database there are none, rather than a file of each front's machine."""
    settings = {"insecure": "true", "fronts": "2"}
    assert AllSettings.of(settings).server.sessions == "off"
    assert AllSettings.of({**settings, "fronts": "1"}).server.sessions is None
    for url in ("postgresql://me@host/x", "postgresql+psycopg://me@host/x", "off"):
        assert AllSettings.of({**settings, "sessions": url}).server.sessions == url


def test_a_warning_where_haproxy_is_off(caplog: pytest.LogCaptureFixture) -> None:
    warn_without_haproxy({"RAY_SERVE_ENABLE_HA_PROXY": "1"})
    assert "RAY_SERVE" not in caplog.text
    warn_without_haproxy({})
    assert "RAY_SERVE_ENABLE_HA_PROXY is off" in caplog.text


def test_fronts_draw_different_seeds() -> None:
    names = {new_front_name() for _ in range(100)}
    assert all(re.fullmatch("front-[0-9a-f]{8}", name) for name in names)
    for seed in (7, None):
        drawn = {seed_of_front(seed, name) for name in names}
        assert len(drawn) == len(names) == 100
        assert all(0 <= each < 2**62 for each in drawn)
    assert seed_of_front(7, "front-1") == seed_of_front(7, "front-1") != seed_of_front(8, "front-1")


def test_an_engine_has_as_many_threads_as_cores() -> None:
    cluster = ClusterSettings(cpus=4)
    assert engine_settings(EngineConfig(), cluster)["num_threads"] == 4
    assert engine_settings(EngineConfig(num_threads=2), cluster)["num_threads"] == 2
    assert engine_settings(EngineConfig(), ClusterSettings(gpus=1.0))["num_threads"] is None


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "pip install .*(cluster|ray)"),
        ("2.59.1", "2.59.1 is installed.*>=2.60,<3"),
        ("3.0.0", "3.0.0 is installed"),
    ],
)
def test_another_ray_is_refused(version: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_version(version)


def test_a_ray_of_the_range_is_taken() -> None:
    check_version("2.60.0")
    check_version("2.71.0rc1")


def test_without_ray_the_application_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*(cluster|ray)"):
        infer.cluster.app({})


def load(tokens: float = 0, unfinished: float = 0, rate: float = 1000) -> EngineLoad:
    return EngineLoad(
        num_waiting_tokens=tokens,
        prompt_tokens_per_s=rate,
        num_unfinished=unfinished,
        num_seats=10,
    )


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([], 1),
        ([load()], 1),
        ([load(tokens=1900)], 1),
        ([load(tokens=2100)], 2),
        ([load(tokens=100_000)], 5),
        ([load(tokens=10, rate=0)], 2),
        ([load(unfinished=8)], 1),
        ([load(unfinished=9)], 2),
        ([load(unfinished=9), load(unfinished=9), load(unfinished=9)], 4),
        ([load(), load(), load()], 1),
        ([load(tokens=3000, rate=500), load(tokens=1000, rate=1500)], 2),
    ],
)
def test_engines_for_a_load(loads: list[EngineLoad], wanted: int) -> None:
    assert engines_wanted(loads, low=1, high=5, target_wait_s=2.0) == wanted


def test_never_fewer_than_the_fewest() -> None:
    assert engines_wanted([load()], low=2, high=5, target_wait_s=2.0) == 2


def test_the_file_for_serve_deploy_has_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    write_yaml(["model=a: b", "replicas=1-3", "insecure=true"], "stories", "127.0.0.1", 8000)
    lines = capsys.readouterr().out.splitlines()
    assert "    import_path: infer.cluster:app" in lines
    assert '      model: "a: b"' in lines
    assert '      replicas: "1-3"' in lines
    assert '  - name: "stories"' in lines


@pytest.mark.parametrize("pair", ["replicas", "replicas=", "modle=x", "insecure=false"])
def test_a_file_that_could_not_be_served_is_not_written(pair: str) -> None:
    with pytest.raises(ConfigError):
        write_yaml([pair], "infer", "127.0.0.1", 8000)


@pytest.mark.parametrize(("said", "count"), [({}, 10_000), ({"max_connections": "50000"}, 50_000)])
def test_a_front_may_have_as_many_requests_as_connections(said: dict[str, str], count: int) -> None:
    settings = AllSettings.of({"insecure": "true", **said})
    assert open_requests(settings.server) == count


def test_memory_and_accelerators_are_reserved_and_counted() -> None:
    cluster = ClusterSettings(cpus=4, gpus=1, memory_gib=10, accelerator="H100")
    kind = "accelerator_type:H100"
    assert resources_of(cluster) == {"CPU": 4, "GPU": 1, "memory": 10 * 2**30, kind: 0.001}
    assert resources_of(ClusterSettings()) == {"CPU": 1}
    one = {"CPU": 64.0, "GPU": 8.0, "memory": 25 * 2.0**30, kind: 1.0}
    other = {**one, "accelerator_type:A100": 1.0}
    del other[kind]
    assert why_too_many(cluster, [one, other], 2) == ""
    assert why_too_many(cluster, [one, other], 3) == (
        "3 engines with cpus=4, gpus=1, memory_gib=10, accelerator=H100 do not fit the 2 machines"
        " of this cluster; 2 do"
    )
