"""What `serve run infer.cluster:app KEY=VALUE …` may say, and how many engines a load needs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import infer.cluster
from infer.cli.cluster_file import write_yaml
from infer.cluster.cluster_settings import (
    AllSettings,
    ClusterSettings,
    Machine,
    actor_options,
    engine_settings,
    open_requests,
    resources_of,
    settings_of_models,
    why_too_many,
    why_too_many_together,
)
from infer.cluster.ray_version import check_version, warn_without_haproxy
from infer.cluster.scaling import engines_wanted
from infer.config import EngineConfig
from infer.errors import ConfigError
from infer.replicas.host import EngineLoad
from infer.server.front_identity import new_front_name, seed_of_front


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
        ({"node_selector": "zone"}, "node_selector", "such as zone=a"),
        ({"node_selector": "zone=a,=b"}, "node_selector", "'=b' is not a label"),
        ({"node_selector": "zone=in(a"}, "node_selector", "'zone=in[(]a' is not a label"),
        ({"engines_per_machine": "0"}, "engines_per_machine", "between 1 and 100"),
        ({"engines_per_machine": "101"}, "engines_per_machine", "not 101"),
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
    table = '{"a": {"path": "/a"}}'
    write_yaml([f"models={table}", "insecure=true"], "stories", "127.0.0.1", 8000)
    assert f"      models: {json.dumps(table)}" in capsys.readouterr().out.splitlines()


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
    resources = {"CPU": 64.0, "GPU": 8.0, "memory": 25 * 2.0**30}
    machines = [Machine({**resources, kind: 1.0}), Machine({**resources, "accelerator_type:A": 1})]
    assert why_too_many(cluster, machines, 2) == ""
    assert why_too_many(cluster, machines, 3) == (
        "3 engines with cpus=4, gpus=1, memory_gib=10, accelerator=H100 do not fit the 2 machines"
        " of this cluster; 2 do"
    )


def test_engines_are_counted_on_the_machines_that_may_have_them() -> None:
    machines = [
        Machine({"CPU": 8.0}, {"zone": "a", "disk": "hdd"}),
        Machine({"CPU": 8.0}, {"zone": "a"}),
        Machine({"CPU": 8.0}, {"zone": "b"}),
        Machine({"CPU": 1.0}, {"zone": "a"}),
    ]
    for said, most in (
        ({}, 25),
        ({"node_selector": "zone=a"}, 17),
        ({"node_selector": "zone=a, disk=!hdd"}, 9),
        ({"engines_per_machine": 2}, 7),
        ({"node_selector": "zone=b", "engines_per_machine": 2}, 2),
        ({"node_selector": "zone=c"}, 0),
    ):
        cluster = ClusterSettings(**said)
        assert why_too_many(cluster, machines, most) == "", said
        refused = why_too_many(cluster, machines, most + 1)
        assert f"; {most} do" in refused
        assert all(f"{name}={value}" in refused for name, value in said.items())
    cluster = ClusterSettings(
        cpus=2, gpus=0.5, memory_gib=1, accelerator="H100", node_selector="zone=a,disk=!hdd"
    )
    assert actor_options(cluster) == {
        "num_cpus": 2.0,
        "num_gpus": 0.5,
        "memory": 2.0**30,
        "resources": {"accelerator_type:H100": 0.001},
        "label_selector": {"zone": "a", "disk": "!hdd"},
    }


def test_logs_are_settings_of_a_cluster_too() -> None:
    settings = AllSettings.of({"insecure": "true", "log_format": "json", "log_level": "debug"})
    assert (settings.server.log_format, settings.server.log_level) == ("json", "debug")


MODELS = {
    "small": {"path": "/s", "replicas": "1-3"},
    "large-2.5": {"path": "/l", "cpus": 8, "max_seq_len": "4096", "node_selector": "zone=a"},
}


@pytest.mark.parametrize("models", [MODELS, json.dumps(MODELS)])
def test_several_models_have_engines_of_their_own(models: Any) -> None:
    found = settings_of_models({"insecure": "true", "models": models, "max_batch_size": "8"})
    assert list(found) == list(MODELS)
    small, large = found.values()
    assert (small.cluster.range, small.cluster.cpus, small.engine.model) == ((1, 3), 1, "/s")
    assert (large.cluster.range, large.cluster.cpus, large.engine.model) == ((1, 1), 8, "/l")
    assert [each.engine.served_model_name for each in found.values()] == list(MODELS)
    assert [each.engine.max_batch_size for each in found.values()] == [8, 8]
    assert large.engine.max_seq_len == 4096
    assert small.server == large.server


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"models": "{"}, "models", "is no JSON"),
        ({"models": "[]"}, "models", "such as"),
        ({"models": {}}, "models", "such as"),
        ({"models": {"a": "/a"}}, "models", "'a': path: is missing"),
        ({"models": {"a": {}}}, "models", "'a': path: is missing"),
        ({"models": {"a/b": {"path": "/a"}}}, "models", "'a/b': name: must be"),
        ({"models": {"load": {"path": "/a"}}}, "models", "'load': name: must be"),
        ({"models": {"a": {"path": "/a", "fronts": 2}}}, "models", "'a': fronts: is no setting"),
        ({"models": {"a": {"path": "/a", "api_keys": "x"}}}, "models", "'a': api_keys: is no set"),
        ({"models": {"a": {"path": "/a", "replicas": "0"}}}, "models", "'a': replicas: '0' is"),
        ({"models": MODELS, "model": "/x"}, "model", "each has its name"),
        ({"models": MODELS, "served_model_name": "x"}, "served_model_name", "each has its name"),
        ({"models": MODELS, "fronts": "2"}, "fronts", "have one front"),
        ({"models": MODELS, "models_dir": "/x"}, "models_dir", "give models"),
        ({"when_not_loaded": "refuse"}, "when_not_loaded", "engines of a cluster stay"),
    ],
)
def test_models_that_cannot_be_are_refused(
    arguments: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        settings_of_models({"insecure": "true", **arguments})
    assert refused.value.field == field


def test_models_need_room_together() -> None:
    clusters = [ClusterSettings(cpus=3), ClusterSettings(replicas="2-9", cpus=2)]
    machines = [Machine({"CPU": 3.0}), Machine({"CPU": 4.0})]
    assert why_too_many_together(clusters, machines) == ""
    assert why_too_many_together(clusters, machines[1:]) == (
        "all engines together need CPU=7, and this cluster has 4"
    )
