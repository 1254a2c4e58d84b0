"""What `deploy/` holds: each file is read by the tool that is meant for it, where that is there.

Without a tool (a Docker engine, a cluster) the files are parsed, and what they say of our own names
is compared with the source: settings, ports, paths, metrics.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infer.cli.configuration import Configuration, schema, settings_by_name, variable_of
from infer.server.http.connections import PROBE_PATHS
from infer.server.observe.help_texts import help_of
from tests.support.doubles import make_hash_llm
from tests.support.serving import live

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm"
TEXTS = {
    path.relative_to(DEPLOY).as_posix(): path.read_text(encoding="utf-8")
    for path in DEPLOY.rglob("*")
    if path.is_file()
}
PLAIN_YAML = [name for name in TEXTS if name.endswith(".yaml") and "templates/" not in name]


def tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: object) -> str:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PLAIN_YAML)
def test_yaml_is_yaml(name: str) -> None:
    assert all(content for content in yaml.safe_load_all(TEXTS[name]))


@pytest.mark.parametrize("name", TEXTS)
def test_variables_and_health_paths_are_those_of_the_source(name: str) -> None:
    known = {*map(variable_of, settings_by_name()), "INFER_CONFIG", "INFER_REQUIRE_KERNELS"}
    if not name.endswith("templates/deployment.yaml"):  # a comment names one of Kubernetes
        assert set(re.findall(r"\bINFER_[A-Z_]+\b", TEXTS[name])) <= known
    assert set(re.findall(r"/health[/a-z]*", TEXTS[name])) <= PROBE_PATHS


def test_the_files_of_settings_are_valid(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for name in ("systemd/infer.toml", "container.toml"):
        jsonschema.validate(tomllib.loads(TEXTS[name]), schema())
        file = tmp_path / "infer.toml"
        file.write_text(TEXTS[name], encoding="utf-8")
        assert Configuration.read({}, file, {}).server.metrics_port == 9400
    jsonschema.validate(yaml.safe_load(TEXTS["helm/values.yaml"])["config"], schema())


def test_times_of_ending_fit_together() -> None:
    """Whoever waits for the end waits for longer than the server takes."""
    settings = tomllib.loads(TEXTS["systemd/infer.toml"])
    stop_s = int(re.findall(r"TimeoutStopSec=(\d+)", TEXTS["systemd/infer.service"])[0])
    assert stop_s > settings["drain_delay_s"] + settings_by_name()["drain_timeout_s"].default
    compose = yaml.safe_load(TEXTS["compose.yaml"])["services"]["infer"]
    assert int(compose["stop_grace_period"].rstrip("s")) > 10 + 30


def health_command(name: str) -> str:
    """The program of a Dockerfile's HEALTHCHECK."""
    text = re.sub(r"\\\n\s*", " ", TEXTS[name])
    command = json.loads(re.findall(r"HEALTHCHECK .* CMD (\[.*\])", text)[0])
    assert command[:2] == ["python", "-c"]
    return str(command[2])


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_the_health_of_a_container_is_that_of_its_server(name: str) -> None:
    """Also where Docker has given the container the proxies of the machine."""
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}

    def is_healthy() -> bool:
        program = health_command(name).replace("9400", port).replace("localhost", "127.0.0.1")
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env={**os.environ, **proxy}, stderr=subprocess.DEVNULL)
        return done.returncode == 0

    with live(make_hash_llm()) as url:
        port = url.rpartition(":")[2]
        assert is_healthy()
    assert not is_healthy()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfiles(name: str) -> None:
    """Two stages; the last one is of a user without rights, and says how its health is asked."""
    text = re.sub(r"\\\n\s*", " ", TEXTS[name])
    last = text.rpartition("\nFROM ")[2]
    assert text.count("\nFROM ") == 2
    user = re.findall(r"^USER (\S+)$", last, re.MULTILINE)
    assert user == ["10001:10001"]
    assert "/health/live" in health_command(name)
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for each in source.split():
            assert (ROOT / each).exists(), each
            assert f"!{each.removeprefix('./')}" in TEXTS[f"{name}.dockerignore"].splitlines()
    run(tool("hadolint"), DEPLOY / name)


def test_haproxy_has_the_settings_of_the_page() -> None:
    def lines(text: str) -> list[str]:
        bare = (line.partition("#")[0].strip() for line in text.splitlines())
        return [line for line in bare if line and not line.startswith("server ")]

    page = (ROOT / "docs/proxies.md").read_text(encoding="utf-8")
    block = page.split("```haproxy\n")[1].partition("```")[0]
    assert lines(TEXTS["haproxy.cfg"]) == lines(block)


def test_the_unit() -> None:
    text = TEXTS["systemd/infer.service"]
    for line in ("Type=notify", "WatchdogSec=60", "ExecReload=/bin/kill -HUP $MAINPID"):
        assert line in text.splitlines()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = tool("systemd-analyze")
    text = TEXTS["systemd/infer.service"].replace("/opt/infer/bin/infer", "/bin/true")
    unit = tmp_path / "infer.service"
    unit.write_text(text, encoding="utf-8")
    assert run(program, "verify", unit) == ""


# ---- Prometheus


def test_metrics_of_rules_and_dashboard_have_help_texts() -> None:
    dashboard = (ROOT / "docs/grafana.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"infer:(\w+)", TEXTS["prometheus/alerts.yaml"] + dashboard))
    assert len(asked) > 20
    for name in asked - {"front_up", "build_info"}:
        bare = re.sub(r"_(total|bucket)$", "", name)
        assert help_of("iteration_tokens_total" if "iteration" in name else bare), name


def test_the_dashboard_has_variables_and_a_row_for_replicas() -> None:
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text(encoding="utf-8"))
    names = [each["name"] for each in dashboard["templating"]["list"]]
    assert names == ["datasource", "model", "replica", "front"]
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Replicas", "Processes"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for selector in re.findall(r"infer:\w+(\{[^}]*\})?", target["expr"]):
                assert 'model_name=~"$model"' in selector, target["expr"]


def test_promtool_takes_rules_and_configuration() -> None:
    program = tool("promtool")
    run(program, "check", "rules", DEPLOY / "prometheus/alerts.yaml")
    run(program, "check", "config", DEPLOY / "prometheus/prometheus.yaml")
    run(program, "test", "rules", DEPLOY / "prometheus/alerts-test.yaml")


# ---- the chart


def test_the_chart_uses_the_values_that_there_are() -> None:
    values = yaml.safe_load(TEXTS["helm/values.yaml"])
    used = set()
    for name, text in TEXTS.items():
        if "templates/" in name:
            used |= set(re.findall(r"\.Values\.([\w.]+)", text))
            assert text.count("{{") == text.count("}}")
            begun = len(re.findall(r"\{\{-? (?:if|range|with) ", text))
            assert begun == len(re.findall(r"\{\{-? end ", text)), name
    for path in used:
        place: Any = values
        for part in path.split("."):
            assert part in place, path
            place = place[part]
    assert {path.split(".")[0] for path in used} == values.keys()


@pytest.mark.parametrize(
    "options",
    [
        ["keys=text"],
        ["insecure=true"],
        ["existingSecret=mine", "models.existingClaim=ours", "hpa.enabled=true"],
        ["keys=text", "keda.enabled=true", "serviceMonitor.enabled=true"],
    ],
)
def test_helm_renders_what_kubernetes_takes(options: list[str]) -> None:
    program = tool("helm")
    run(program, "lint", CHART)
    chosen = [
        part
        for option in options
        for part in ("--set-string" if "keys" in option else "--set", option)
    ]
    manifests = [
        each for each in yaml.safe_load_all(run(program, "template", "x", CHART, *chosen)) if each
    ]
    kinds = {each["kind"] for each in manifests}
    assert kinds >= {"Deployment", "Service", "ConfigMap", "PodDisruptionBudget"}
    config = next(each for each in manifests if each["kind"] == "ConfigMap")["data"]["infer.toml"]
    pytest.importorskip("jsonschema").validate(tomllib.loads(config), schema())
    checker = pytest.importorskip("kubernetes_validate")
    for each in manifests:
        if each["apiVersion"].split("/")[0] not in ("keda.sh", "monitoring.coreos.com"):
            checker.validate(each, checker.latest_version(), strict=True)
