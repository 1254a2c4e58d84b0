"""`infer connect`: the lines for each agent, and one sentence where there is nothing to reach"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from infer.cli import connect
from infer.cli.connect import (
    AGENTS,
    ServedModel,
    around_proxies,
    find_target,
    run_connect,
    shell_lines,
)
from infer.errors import InferError
from tests.support.doubles import make_hash_llm
from tests.support.serving import live

TARGET = ServedModel("http://127.0.0.1:8000", "a model's name", 65_536, "a key")


@pytest.mark.parametrize("agent", AGENTS)
def test_the_lines_say_all_that_an_agent_needs(agent: str) -> None:
    *exports, command = shell_lines(AGENTS[agent](TARGET))
    words = [shlex.split(line) for line in exports]
    assert all(line[0] == "export" and len(line) == 2 for line in words)
    text = "\n".join([*exports, command])
    assert shlex.split(command)[0] == agent
    for said in (TARGET.url, "name", "a key"):
        assert said in text
    assert ("65536" in text) is (agent != "qwen")  # which has no setting for it


def test_what_a_server_has(capsys: pytest.CaptureFixture[str]) -> None:
    with live(make_hash_llm(max_seq_len=512)) as url:
        assert find_target(url + "/v1/", None, None) == ServedModel(url, "hash-model", 512, "none")
        with pytest.raises(InferError, match="has no model 'other'"):
            find_target(url, "other", None)
        with pytest.raises(InferError, match="needs 32,768 or more"):
            run_connect("claude", url, None, None, False)
    assert capsys.readouterr().out == ""


PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "no_proxy",
           "NO_PROXY")  # fmt: skip


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment whose proxies answer nothing; its variables may be set."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    return monkeypatch


def test_this_machine_is_asked_without_a_proxy(proxies: pytest.MonkeyPatch) -> None:
    with live(make_hash_llm(max_seq_len=512)) as url:
        for here in (url, url.replace("127.0.0.1", "localhost")):
            assert find_target(here, None, "a key").window == 512
    with pytest.raises(InferError, match="refused"):
        find_target("http://example.invalid", None, None)  # by the proxy, not by a name server


@pytest.mark.parametrize(
    ("url", "excepted", "value"),
    [
        ("http://127.0.0.1:8000", "", "127.0.0.1"),
        ("http://[::1]:8000", "", "::1"),
        ("http://localhost:8000", "a.b,c", "a.b,c,localhost"),
        ("http://127.0.0.1:8000", "localhost,127.0.0.1", None),
        ("http://models.intern:8000", "", None),
    ],
)
def test_nor_do_agents_ask_one(
    proxies: pytest.MonkeyPatch, url: str, excepted: str, value: str | None
) -> None:
    proxies.setenv("no_proxy", excepted)
    expected = {} if value is None else {"NO_PROXY": value, "no_proxy": value}
    assert around_proxies(url) == expected
    proxies.delenv("http_proxy")
    assert around_proxies(url) == {}


def test_where_there_is_no_server_or_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InferError, match="known are codex, claude"):
        run_connect("cursor", "http://127.0.0.1:1", None, None, False)
    with pytest.raises(InferError, match="no infer server answers"):
        run_connect("codex", "http://127.0.0.1:1", None, None, False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def found(*_: Any) -> ServedModel:
        return TARGET

    monkeypatch.setattr(connect, "find_target", found)
    with pytest.raises(InferError, match="no command 'codex'"):
        run_connect("codex", TARGET.url, None, None, True)
