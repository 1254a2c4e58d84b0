"""`infer bench` whole: the engine in the process, our server on a socket, what it prints."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from infer.bench.drive import Record
from infer.bench.engine import EngineTarget
from infer.bench.measure import BenchOptions, measure
from infer.cli.bench import app
from infer.engine.client.async_llm import AsyncLLM
from infer.errors import ConfigError, InferError
from tests.support.command_line import CliRunner
from tests.support.doubles import make_hash_llm
from tests.support.serving import live

ROOT = Path(__file__).parents[2]


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def last_line(result: Result) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document


def offline(llm: AsyncLLM, **options: Any) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with llm:
            target = EngineTarget(llm)
            how: dict[str, Any] = {"vocab_size": llm.vocab_size, "stats": target.stats}
            return await measure(BenchOptions(**options), target, {"model": "hash"}, **how)

    return asyncio.run(main())


def records(document: dict[str, Any]) -> list[Record]:
    return [Record(**row) for row in document["runs"][document["median_run"]]["requests"]]


def test_the_engine_without_http() -> None:
    document = offline(make_hash_llm(), workload="burst", num_requests=6, input_len=9, output_len=5)
    summary = document["summary"]
    assert (summary["num_answered"], summary["errors"]) == (6, {})
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (54, 30)
    engine = summary["engine"]
    assert engine["num_prompt_tokens"] == 54  # the warm-up is not in it
    assert engine["num_sampled_tokens"] == 30
    assert engine["mean_rows_per_step"] == round(30 / engine["num_steps"], 3)
    for record in records(document):
        assert record.arrival_s == 0 < record.sent_s < record.token_s[0]
        assert len(record.token_s) == record.output_tokens == record.wanted_tokens == 5
        assert record.token_s == sorted(record.token_s)
        assert record.end_s >= record.token_s[-1]


def test_a_repeated_run_finds_nothing_in_the_cache() -> None:
    document = offline(make_hash_llm(), workload="burst", num_requests=2, repeat=3)
    assert [run["summary"]["cached_tokens"] for run in document["runs"]] == [0, 0, 0]
    assert document["summary"] == document["runs"][document["median_run"]]["summary"]


def test_followers_find_the_prefix() -> None:
    document = offline(make_hash_llm(), workload="shared_prefix", input_len=64, num_requests=4)
    first, *followers = records(document)
    assert first.cached_tokens == 0
    assert [record.cached_tokens for record in followers] == [64] * 3
    assert set(document["summary"]["groups"]) == {"first", "followers"}


def test_a_turn_finds_the_ones_before_it() -> None:
    options = {"num_requests": 2, "num_turns": 3, "input_len": 8, "output_len": 8}
    rows = records(offline(make_hash_llm(), workload="multi_turn", **options))
    assert [record.prompt_tokens for record in rows] == [8, 8, 24, 24, 40, 40]
    assert [record.cached_tokens for record in rows[2:]] == [12, 12, 28, 28]  # of the answer all
    # but the last token, in whole pages of 4


def test_what_the_engine_refuses_is_an_error_of_its_kind() -> None:
    document = offline(make_hash_llm(), workload="long_prompt", num_requests=2)
    assert document["summary"]["errors"] == {"RequestError": 1}
    assert "4096 tokens" in records(document)[-1].message


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("infer.bench.workloads._COMMON_IDS", 256)  # the double has 262
    with live(make_hash_llm()) as url:
        yield url


def test_a_server_from_the_command_line(url: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = run(
        *("serve", "--base-url", url, "--workload", "burst", "--num-requests", "5"),
        *("--input-len", "20", "--output-len", "6", "--repeat", "2", "--label", "ours"),
        *("--slo-ttft-ms", "60000", "--json", str(file)),
    )
    document = last_line(result)
    assert document["label"] == "ours"
    assert document["target"]["prompts"] == "token ids"
    assert document["summary"]["num_answered"] == 5
    assert document["summary"]["goodput"]["share"] == 1.0
    assert (document["summary"]["prompt_tokens"], document["summary"]["output_tokens"]) == (100, 30)
    assert [list(run) for run in document["runs"]] == [["summary"]] * 2
    written = json.loads(file.read_text(encoding="utf-8"))
    assert len(records(written)) == 5
    assert {**written, "runs": document["runs"]} == document
    assert "time to first token" in result.stderr
    assert "output tok/s" in result.stderr
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("workload", ["multi_turn", "shared_prefix"])
def test_a_server_is_sent_text(url: str, workload: str) -> None:
    options = ("--input-len", "30", "--output-len", "4", "--num-requests", "2")
    how = ("--prompts", "auto" if workload == "multi_turn" else "text")
    document = last_line(run("serve", "--base-url", url, "--workload", workload, *options, *how))
    assert document["target"]["prompts"].startswith("text, ")
    assert document["summary"]["errors"] == {}


def test_open_loop_at_a_server(url: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ("--workload", "burst", "--num-requests", "4", "--rate", "20", "--output-len", "2")
    run("serve", "--base-url", url, *options, "--json", str(file))
    rows = records(json.loads(file.read_text(encoding="utf-8")))
    assert [record.arrival_s for record in rows] == [0.0, 0.05, 0.1, 0.15]
    assert all(record.sent_s >= record.arrival_s for record in rows)


def test_a_server_whose_engine_dies_in_the_middle(tmp_path: Path) -> None:
    """The streams that were running end with errors and not as short answers."""
    llm = make_hash_llm(step_s=0.005)

    def die_later() -> None:
        while (stats := llm.stats())["num_running"] < 3:
            pass
        while llm.stats()["num_sampled_tokens"] < stats["num_sampled_tokens"] + 12:
            pass
        assert llm._loop is not None
        asyncio.run_coroutine_threadsafe(llm.close(), llm._loop).result(10)

    file = tmp_path / "result.json"
    with live(llm) as url:
        killer = threading.Thread(target=die_later)
        killer.start()
        options = ("--workload", "burst", "--num-requests", "3", "--output-len", "200")
        more = ("--warmup", "0", "--json", str(file))
        result = run("serve", "--base-url", url, *options, *more, code=1)
        killer.join()
    document = last_line(result)
    assert document["summary"]["num_answered"] == 0
    assert document["summary"]["errors"] == {"error_event": 3}
    assert document["summary"]["output_tok_s"] == 0.0
    rows = records(json.loads(file.read_text(encoding="utf-8")))
    assert all(0 < len(record.token_s) < 200 for record in rows)
    assert "shutting down" in result.stderr


def test_a_server_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from tests.support.doubles import *; from infer.server.address import bind\n"
        "from infer.server.serve import run\n"
        "run(make_hash_llm(step_s=0.01), bind(port=0))"
    )
    paths = [ROOT / "src", ROOT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as server:
        assert server.stdout is not None
        line = server.stdout.readline().decode()
        killer = threading.Timer(1.0, server.kill)
        killer.start()
        options = (
            "--workload",
            "burst",
            "--num-requests",
            "3",
            "--output-len",
            "400",
            "--input-len",
            "9",
        )
        url = next(word for word in line.split() if word.startswith("http"))
        result = run("serve", "--base-url", url, *options, "--warmup", "0", code=1)
        server.kill()
    assert last_line(result)["summary"]["errors"] == {"connection": 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--base-url", "x"], "base_url"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--workload", "nope"], "workload"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--prompts", "words"], "prompts"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--json", "/no/where"], "json"),
        (["offline", "--workload", "single", "--rate", "3"], "rate"),
        (["offline", "--dtype", "nope"], "dtype"),
    ],
)
def test_what_is_wrong_is_said_first(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(words)


def test_ids_for_a_conversation_are_refused() -> None:
    arguments = ["--base-url", "http://127.0.0.1:9", "--workload", "multi_turn", "--prompts", "ids"]
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(result.exception, InferError)
    assert "continues the server's text" in str(result.exception)


def test_measuring_a_server_needs_no_torch(url: str) -> None:
    code = (
        "import sys; from infer.cli.bench import app\n"
        f"app(['serve', '--base-url', {url!r}, '--output-len', '3'], standalone_mode=False)\n"
        "assert not {'torch', 'starlette', 'infer.server'} & sys.modules.keys()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


def test_the_command_imports_the_server_for_no_other_command() -> None:
    """Asked for the options of `infer bench`; and with `infer serve`, that this can be seen."""
    code = (
        "import sys; from infer.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print('infer.server' in sys.modules, 'infer.bench' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for command, seen in (("bench", "False True"), ("serve", "True False")):
        arguments = [sys.executable, "-c", code, command, "--help"]
        done = subprocess.run(arguments, env=env, check=True, timeout=60, capture_output=True)
        assert done.stdout.decode().splitlines()[-1] == seen


def test_the_model_that_ships(tmp_path: Path) -> None:
    result = run("offline", "--workload", "burst", "--num-requests", "2", "--output-len", "4")
    document = last_line(result)
    assert document["label"] == "infer-demo"
    assert document["summary"]["num_answered"] == 2
    assert document["summary"]["engine"]["num_sampled_tokens"] == 8
    assert document["target"]["engine"]["batching_mode"] == "continuous"
