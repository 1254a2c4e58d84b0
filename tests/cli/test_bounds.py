"""Numbers that no option takes, and the highest that each takes: one sentence, or it works."""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args
from urllib.request import Request, urlopen

import pytest
import typer

from infer.bench.measure import BenchOptions
from infer.cli.main import COMMANDS, app, main
from infer.cluster.cluster_settings import AllSettings, ClusterSettings
from infer.config import MAX_REPLICAS, EngineConfig, Setting, settings_of
from infer.engine.build.machine_share import shares_of
from infer.engine.build.planner import plan_for
from infer.engine.build.processors import may_have_gpu
from infer.errors import ConfigError
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits

NUMBERS = (
    *(f"{sign}{2**bits}" for bits in (63, 64) for sign in ("", "-")),
    *(str(10**300), "1e300", "-1e300", "nan", "inf", "-inf", str(10**21), "9" * 5000),
)
"""Numbers that no option takes."""
NEEDED = {
    ("generate",): ["Hello"],
    ("bench", "gpu"): ["--model", "/nonexistent"],
    ("bench", "serve"): ["--base-url", "http://127.0.0.1:9/v1"],
    ("keys", "create"): ["name", "--file", "/nonexistent/keys.json"],
}
"""What a command must be given besides."""
GROUPS = {
    **{"serve": "serving", "bench": "bench", "keys": "api_keys", "cluster": "cluster_file"},
    "config": "config_command",
}
CLASSES: tuple[Any, ...] = (
    *(EngineConfig, ServerSettings, ClusterSettings, KeyLimits, BenchOptions),
)


def _is_number(annotation: Any) -> bool:
    return any(each in (int, float) for each in _kinds(annotation))


def _kinds(annotation: Any) -> list[Any]:
    inner = [kind for each in get_args(annotation) for kind in _kinds(each)]
    return [annotation, *inner]


def _commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words of each command of `infer`, and its function."""
    places: list[tuple[tuple[str, ...], Any]] = [((), app)]
    places += [((name,), import_module(f"infer.cli.{file}").app) for name, file in GROUPS.items()]
    for words, place in places:
        found: typer.Typer = place
        for each in found.registered_commands:
            assert each.callback is not None
            name = each.name or each.callback.__name__.strip("_").replace("_", "-")
            yield (words if words == (name,) else (*words, name)), each.callback


def _options() -> list[tuple[tuple[str, ...], str]]:
    """Each option that is a number, with its command."""
    found = []
    for words, function in _commands():
        for each in inspect.signature(function, eval_str=True).parameters.values():
            if _is_number(each.annotation):
                found.append((words, f"--{each.name.replace('_', '-')}"))
    return found


def test_every_command_is_walked() -> None:
    assert {words[0] for words, _ in _commands()} == set(COMMANDS)
    assert len(_options()) > 60


def _tried() -> Iterator[Any]:
    """Each option with all numbers, with `-m slow`; by default each twelfth with three of them."""
    for i, (words, option) in enumerate(_options()):
        yield pytest.param(words, option, NUMBERS, marks=pytest.mark.slow)
        if i % 12 == 0:
            yield words, option, NUMBERS[i // 12 % 4 :: 4]


@pytest.mark.parametrize(("words", "option", "numbers"), list(_tried()))
def test_a_number_that_is_too_large_is_one_sentence(
    words: tuple[str, ...],
    option: str,
    numbers: Sequence[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    for number in numbers:
        with pytest.raises(SystemExit) as ended:
            main([*words, *NEEDED.get(words, []), f"{option}={number}"])
        out, err = capfd.readouterr()
        assert ended.value.code == 2, (number, out, err)
        assert "Traceback" not in err
        assert len(err) < 2000
        assert option.lstrip("-").replace("-", "_") in err.replace("-", "_"), (number, err)


@pytest.mark.parametrize("command", [["serve", "--seed", str(10**23)], ["serve", "--port", "-1"]])
def test_the_real_command_says_it_too(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infer", *command], capture_output=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_number_has_bounds_from_its_type(kind: Any) -> None:
    for setting in settings_of(kind):
        if setting.kind in (int, float):
            assert setting.low is not None, setting.name
            assert setting.high is not None, setting.name
            with pytest.raises(ConfigError, match=setting.name):
                kind(**{setting.name: setting.kind(setting.high * 2 + 1)})


def _numbers(kind: Any) -> list[Setting]:
    return [each for each in settings_of(kind) if each.kind in (int, float)]


@pytest.mark.parametrize("setting", _numbers(EngineConfig), ids=lambda setting: setting.name)
def test_the_highest_number_of_an_engine_is_planned_or_refused(setting: Setting) -> None:
    value = setting.kind(setting.high or 0)
    modes: dict[str, dict[str, Any]] = {
        "batch_wait_timeout_s": {"batching_mode": "static"},
        "min_batch_size": {"batching_mode": "static", "max_batch_size": value},
    }
    how = {**modes.get(setting.name, {}), setting.name: value}
    with contextlib.suppress(ConfigError):  # no `LoadError` that the file is damaged
        plan_for(EngineConfig(**how))


def test_the_highest_numbers_of_a_server_serve(tmp_path: Path) -> None:
    # Processes, models with names, and a port that may be in use.
    left_out = ("replicas", "fronts", "idle_unload_s", "metrics_port", "models_memory_bytes")
    options = [
        f"--{each.name.replace('_', '-')}={each.kind(each.high or 0)}"
        for each in _numbers(ServerSettings)
        if each.name not in left_out
    ]
    command = [sys.executable, "-m", "infer", "serve", "--port", "0", "--no-standby", *options]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            assert "infer serves" in line, (tmp_path / "log").read_bytes()
            url = line.split(" at ")[1].split()[0] + "/v1/completions"
            body = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
            asked = Request(url, body, {"content-type": "application/json"})
            with urlopen(asked, timeout=60) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):  # it waits out `drain_delay_s`
                process.wait(1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert b"Traceback" not in (tmp_path / "log").read_bytes()


def test_more_threads_than_the_machine_has_are_named_as_the_cause() -> None:
    with pytest.raises(ConfigError, match="num_threads: must be between 1 and 4096"):
        EngineConfig(num_threads=100_000)
    from infer.engine.build.hardware import num_threads

    with pytest.raises(ConfigError, match=r"num_threads: must be at most .* on this machine"):
        num_threads(EngineConfig(num_threads=4096))


def test_replicas_are_checked_as_the_device_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """device=auto is a CPU where there is no GPU; and no machine gets engines without end."""
    import infer.engine.build.machine_share as machine_share

    monkeypatch.setattr(machine_share, "may_have_gpu", lambda: False)
    with pytest.raises(ConfigError, match="replicas: 64 do not fit: an engine needs a core"):
        shares_of(64, "auto")
    monkeypatch.setattr(machine_share, "may_have_gpu", lambda: True)
    for device in ("auto", "cpu", "cuda"):
        with pytest.raises(ConfigError, match="replicas: must be at most 64, not 65"):
            shares_of(MAX_REPLICAS + 1, device)
    assert len(shares_of(64, "cuda")) == 64


def test_a_gpu_is_known_by_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not may_have_gpu(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not may_have_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert may_have_gpu(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not may_have_gpu(tmp_path)


@pytest.mark.parametrize("replicas", ["4097", "1-5000", "9" * 5000, "-1", "2-1", "nan"])
def test_engines_of_a_cluster_have_a_bound(replicas: str) -> None:
    with pytest.raises(ConfigError, match="replicas: ") as caught:
        AllSettings.of({"replicas": replicas})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "options",
    [
        {"workload": "burst", "num_requests": 1_000_000},
        {"workload": "multi_turn", "num_requests": 1_000_000, "num_turns": 1_000},
        {"workload": "single", "input_len": 10**18},
    ],
)
def test_a_measurement_has_a_bound(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"num_requests: prompts of|must be between"):
        BenchOptions(**options)
