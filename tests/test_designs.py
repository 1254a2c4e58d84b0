"""docs/designs.md: the line that starts each design does so, and no row stands twice."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from tests.support.server_process import served

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/designs.md").read_text(encoding="utf-8")
SECTIONS = re.findall(
    r"^## ([^\n]+)\n\n```sh\n(.+?)\n```\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
)
ALIKE = 0.9
"""Likeness of two rows from which they say the same."""


def doubles(text: str) -> Iterator[tuple[str, str]]:
    """Pairs of rows of one table that have the same words, or the same tests."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    for one, other in combinations([row for row in rows if "shown by" not in row[-1]], 2):
        words = [row[0].strip().lower() for row in (one, other)]
        tests = [set(re.findall(r"`(tests/[^`]+)`", row[-1])) for row in (one, other)]
        is_alike = difflib.SequenceMatcher(None, words[0], words[1]).ratio() > ALIKE
        if is_alike or (len(tests[0]) > 1 and tests[0] == tests[1]):
            yield one[0], other[0]


def test_all_five_have_a_line_and_a_table() -> None:
    assert len(SECTIONS) == PAGE.count("\n## ") == 5
    assert all(table.count("\n| ") > 5 for _, _, table in SECTIONS)


@pytest.mark.parametrize("name", [name for name, _, _ in SECTIONS])
def test_no_row_stands_twice(name: str) -> None:
    (table,) = [table for other, _, table in SECTIONS if other == name]
    assert list(doubles(table)) == []
    row = next(line for line in table.splitlines() if "`tests/" in line)
    first = row.strip("|").split(" | ")[0]
    assert list(doubles(f"{table}\n{row}"))
    assert list(doubles(f"{table}\n| {first.strip()}s | elsewhere | `tests/x.py::test_y` |"))


@pytest.mark.parametrize("line", [line for _, line, _ in SECTIONS])
def test_the_line_starts_it(line: str, tmp_path: Path) -> None:
    """A server of the line answers, and a program of it ends well; both on a port that is free."""
    program, *arguments = shlex.split(line.replace("\\\n", ""))
    if arguments[0].endswith(".py"):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
        return
    module = ["-m", "infer"] if program == "infer" else []
    sessions = f"sqlite:///{tmp_path / 'sessions.db'}"
    command = [*module, *arguments, "--port", "0", "--sessions", sessions]
    with served(command, tmp_path / "log") as server:
        body = {"prompt": "Once upon a time", "max_tokens": 5}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode("utf-8")
    typed = "event: done" in text
    assert typed == ("typed" in arguments)
    assert typed or json.loads(text)["usage"]["completion_tokens"] == 5
