"""The options of `infer`: what the help says of them, and values that are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from infer.cli.main import app
from infer.config import EngineConfig, settings_of
from infer.errors import ConfigError
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        (["serve"], [EngineConfig, ServerSettings]),
        (["plan"], [EngineConfig]),
        (["bench", "offline"], [EngineConfig]),
        (["keys", "create"], [KeyLimits]),
    ],
)
def test_the_help_has_whole_names(command: list[str], kinds: list[Any]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    shown = set(re.findall(r"--[a-z0-9-]+", done.output))
    for kind in kinds:
        names = {f"--{each.name.replace('_', '-')}" for each in settings_of(kind)}
        assert names - {"--model"} <= shown


@pytest.mark.parametrize("free", ["nan", "inf", "1e308", "-1"])
def test_memory_that_no_machine_has(free: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--free-gib", free])
    assert isinstance(done.exception, ConfigError)
    assert "free_gib: must be between 0 and" in str(done.exception)


def test_the_contexts_of_an_agent_are_planned() -> None:
    done = CliRunner().invoke(app, ["plan", "--agent", "--json"])
    plan = json.loads(done.stdout)
    token = plan["kv_bytes_per_token"]
    assert plan["agent_window_bytes"] == {"32768": 32768 * token, "65536": 65536 * token}
    assert "agent_window_bytes" not in json.loads(
        CliRunner().invoke(app, ["plan", "--json"]).stdout
    )
    shown = CliRunner().invoke(app, ["plan", "--agent"]).stdout
    assert "context of 32,768" in shown
    assert "context of 65,536" in shown
