"""The programs of `examples/` and of docs/core.md.

One of them runs in a process of its own, as a reader would run it; the others run in this process,
which has imported torch.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer import EngineConfig
from infer.config import own_function
from infer.errors import ConfigError, RequestError

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a program with arguments; returns what it has printed."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_all_examples_are_listed_and_tested() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert programs == set(re.findall(r"\[(\w+\.py)\]", readme))
    tested = re.findall(
        r'(?:run\(|EXAMPLES / )"(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")
    )
    assert programs == set(tested)


def test_chat(run: Run) -> None:
    shown = run("chat.py")
    questions = [line for line in shown.splitlines() if line.startswith("> ")]
    assert len(questions) == 2
    assert len(shown.split()) > 40


def test_batch_file(run: Run, tmp_path: Path) -> None:
    rows = [{"prompt": "Once upon a time", "max_tokens": 5}, {"prompt": "The fox", "id": 7}]
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert "2 answers" in run("batch_file.py", str(source), str(target))
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [answer["prompt"] for answer in answers] == [row["prompt"] for row in rows]
    assert answers[1]["id"] == 7
    assert all(answer["text"] and answer["finish_reason"] for answer in answers)


def test_own_policy(run: Run) -> None:
    shown = run("own_policy.py")
    assert "shortest_prompt_first: first tokens in the order ['short', 'long']" in shown


def test_own_sampler(run: Run) -> None:
    shown = run("own_sampler.py").splitlines()
    assert shown[1].startswith("own_sampler:never_twice: 0 repeats")


def test_core() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "core.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert shown[0].startswith("waiting 1, tokens {")
    assert shown[-1].startswith("waiting 0, tokens {'2'")


def test_smallest_core(run: Run) -> None:
    """The third request has a seat in the tick after the first one has ended."""
    gets = [line.split() for line in run("smallest_core.py").splitlines() if "gets" in line]
    ticks = {(line[1].strip(":"), line[2]): line[4].strip(",") for line in gets}
    assert ticks == {
        ("1", "A"): "12",
        ("1", "B"): "23",
        ("2", "A"): "13",
        ("2", "B"): "24",
        ("3", "B"): "25",
        ("3", "C"): "31",
        ("4", "C"): "32",
    }


def test_generate_batch(run: Run) -> None:
    shown = run("generate_batch.py").splitlines()
    assert len(shown) == 7
    assert shown[0].startswith("'Once upon a time' -> ")
    assert shown[3:] == [
        "mode: static",
        "batches_formed: 1",
        "mean_batch_size: 3.0",
        "success_rate: 1.0",
    ]


def test_the_loop_of_the_page() -> None:
    [code] = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/core.md").read_text(encoding="utf-8"), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(code, names)
    core, tokens, texts = names["core"], names["tokens"], names["texts"]
    try:
        assert {name: len(ids) for name, ids in tokens.items()} == {"r0": 20, "r1": 20, "r2": 20}
        assert all(texts.values())
        with pytest.raises(RequestError, match="no unfinished request with id 'r0'"):
            core.run_until_complete("r0")
    finally:
        names["llm"].close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "cannot be imported"),
        ("infer.config:no_such", "cannot be imported"),
        ("infer.config:BATCHING_MODES", "is not a function"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler_policy: .*{message}"):
        own_function("scheduler_policy", name)


def test_a_policy_without_a_colon_must_be_a_known_one() -> None:
    with pytest.raises(ConfigError, match="or module:function of your own; not 'mine'"):
        EngineConfig(scheduler_policy="mine")
