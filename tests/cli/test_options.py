"""The options of `infer`: what the help says of them, and values that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer import Context
from typer.main import get_command

from infer.cli.configuration import KINDS
from infer.cli.main import app
from infer.config import EngineConfig, settings_of
from infer.errors import ConfigError
from infer.server.settings import ServerSettings
from tests.support.command_line import CliRunner


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        (["serve"], [EngineConfig, ServerSettings]),
        (["plan"], [EngineConfig]),
        (["bench", "offline"], [EngineConfig]),
    ],
)
def test_the_whole_help_has_whole_names(command: list[str], kinds: list[Any]) -> None:
    done = CliRunner().invoke(app, [*command, "--help-all"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    shown = set(re.findall(r"--[a-z0-9-]+", done.output))
    for kind in kinds:
        names = {f"--{each.name.replace('_', '-')}" for each in settings_of(kind)}
        assert names - {"--model"} <= shown


def commands() -> Iterator[tuple[list[str], Any]]:
    """Every command and how it is called."""
    groups: list[tuple[list[str], Any]] = [([], get_command(app))]
    for path, command in groups:
        if hasattr(command, "list_commands"):
            context = Context(command)
            for name in command.list_commands(context):
                groups.append(([*path, name], command.get_command(context, name)))
        else:
            yield path, command


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands()]
)
def test_help_is_a_screen_and_the_rest_has_an_option(path: list[str], command: Any) -> None:
    """With `--help-all` every option of every command; without it those that are common."""
    rare: frozenset[str] = getattr(command, "rare", frozenset())
    names = {each.name: each.opts[0] for each in command.params if not getattr(each, "hidden", 0)}
    texts, first_columns = {}, {}
    for flag in ("--help", *(["--help-all"] if rare else [])):
        done = CliRunner().invoke(app, [*path, flag], env={"COLUMNS": "100"})
        assert done.exit_code == 0, done.output
        texts[flag] = set(re.findall(r"--[a-z0-9-]+", done.output))
        first_columns[flag] = set(re.findall(r"^ +(--[a-z0-9-]+)", done.output, re.MULTILINE))
    options = {name: flag for name, flag in names.items() if flag.startswith("--")}
    common = {flag for name, flag in options.items() if name not in rare}
    assert common <= texts["--help"] | {"--version"}
    assert not {options[name] for name in rare} & first_columns["--help"]
    if rare:
        assert set(options.values()) <= first_columns["--help-all"]
        marked = [each.name for kind in KINDS for each in settings_of(kind) if each.is_common]
        assert not rare & set(marked)


def test_a_dozen_settings_are_common() -> None:
    common = [each.name for kind in KINDS for each in settings_of(kind) if each.is_common]
    assert 10 <= len(common) <= 15
    assert {"model", "host", "port", "max_seq_len", "api_keys"} <= set(common)


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands()]
)
def test_the_address_of_a_server_is_url_everywhere(path: list[str], command: Any) -> None:
    talks = [each for each in command.params if re.search(r"(^|_)url$|^api_key$", each.name)]
    assert not talks or any("--url" in each.opts for each in talks), path


def test_top_takes_its_address_either_way() -> None:
    for arguments in (["http://127.0.0.1:9"], ["--url", "http://127.0.0.1:9"]):
        done = CliRunner().invoke(app, ["top", *arguments])
        assert "no infer server answers at http://127.0.0.1:9" in str(done.exception)
    done = CliRunner().invoke(app, ["top", "http://127.0.0.1:9", "--url", "http://127.0.0.1:8"])
    assert "given twice" in str(done.exception)


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
