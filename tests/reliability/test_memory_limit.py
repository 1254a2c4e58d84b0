"""Scorecard M1: a limit of 1 GiB survives mixed load, for `INFER_SOAK_MINUTES`.

SmolLM2 serves in a control group of its own, which all processes of the server are in. What the
kernel's counters say decides: it has ended no process for want of memory.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.control_groups import JOIN, control_group
from tests.support.server_process import ENV, Findings, Served, served
from tests.weights.published import SMOLLM2, installed

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(4000)]

LIMIT_BYTES = 1 << 30
CLIENTS = 12
WORDS = ("the", "a", "day", "little", "big", "cat", "dog", "tree", "ran", "saw", "and", "house")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Group:
    """A control group with a limit of memory, of either version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_second = (folder / "memory.max").exists()

    def limit(self, num_bytes: int) -> None:
        name = "memory.max" if self.is_second else "memory.limit_in_bytes"
        (self.folder / name).write_text(str(num_bytes), encoding="ascii")

    def used(self) -> int:
        name = "memory.current" if self.is_second else "memory.usage_in_bytes"
        return int((self.folder / name).read_text(encoding="ascii"))

    def anonymous(self) -> int:
        lines = (self.folder / "memory.stat").read_text(encoding="ascii").splitlines()
        wanted = "anon" if self.is_second else "total_rss"
        return next(int(line.split()[1]) for line in lines if line.split()[0] == wanted)

    def ended(self) -> int:
        """Processes that the kernel has ended for want of memory."""
        name = "memory.events" if self.is_second else "memory.oom_control"
        for line in (self.folder / name).read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        pytest.skip("this kernel does not count what it ends")


@contextmanager
def memory_group() -> Iterator[Group]:
    """A group with the limit; see `control_group`."""
    with control_group("memory") as folder:
        group = Group(folder)
        try:
            group.limit(LIMIT_BYTES)
        except OSError as error:
            pytest.skip(f"a control group cannot have a limit of memory here: {error}")
        yield group


def words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choices(WORDS, k=count))


def chat(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """A request: what it is, and its body."""
    kind = dice.choice(["short", "short", "long prompt", "schema", "choices", "long answer"])
    length = {"long prompt": dice.randint(1500, 6000), "choices": 200}.get(kind, 20)
    body: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct.Q4_1",
        "messages": [{"role": "user", "content": words(dice, length)}],
        "max_tokens": {"long answer": 400, "long prompt": 40}.get(kind, 60),
        "temperature": dice.choice([0, 0.8]),
        "seed": dice.randrange(1000),
    }
    if kind == "schema":
        format_ = {"name": "person", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": format_}
    if kind == "choices":
        body |= {"n": 4, "temperature": 0.8}
    return kind, body


def ask(server: Served, dice: random.Random) -> str:
    """One request; what became of it. Some clients leave after a moment."""
    kind, body = chat(dice)
    leaves = dice.random() < 0.1
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps(body | {"stream": leaves}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=1200) as answer:
            if leaves:
                answer.readline()
                return "left early"
            found = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return f"{error.code}: {json.loads(error.read())['error']['message'][:60]}"
    if kind == "schema" and found["choices"][0]["finish_reason"] == "stop":
        assert set(json.loads(found["choices"][0]["message"]["content"])) == {"name", "age"}
    return f"{kind}, 200"


def live(server: Served, group: Group, minutes: float) -> dict[str, Any]:
    """Mixed load, and the memory of the group meanwhile."""
    ends_s = time.monotonic() + 60 * minutes
    seen: Counter[str] = Counter()
    lock = threading.Lock()

    def client(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < ends_s:
            outcome = ask(server, dice)
            with lock:
                seen[outcome] += 1

    looks: list[tuple[int, int]] = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client, number) for number in range(CLIENTS)]
        while not all(each.done() for each in running):
            looks.append((group.used(), group.anonymous()))
            time.sleep(0.5)
        for each in running:
            each.result()
    return {
        "minutes": minutes,
        **dict(sorted(seen.items())),
        "most used by the group, MiB": max(used for used, _ in looks) >> 20,
        "most of it anonymous, MiB": max(held for _, held in looks) >> 20,
        "anonymous at the end, MiB": looks[-1][1] >> 20,
        "ended by the kernel": group.ended(),
        "restarts": server.num_restarts(),
    }


def test_a_limit_of_1_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = float(os.environ.get("INFER_SOAK_MINUTES", "1"))
    log, site = tmp_path / "log", installed(SMOLLM2)
    monkeypatch.setitem(ENV, "PYTHONPATH", os.pathsep.join((ENV["PYTHONPATH"], str(site))))
    command = ["-m", "infer.cli.main", "serve", SMOLLM2.model, "--port", "0", "--sessions", "off"]
    with (
        memory_group() as group,
        served(["-c", JOIN, str(group.folder), *command], log) as server,
    ):
        found = live(server, group, minutes)
    load = f"{CLIENTS} clients of SmolLM2 in a control group of 1 GiB"
    Findings().note("M1", "a limit of 1 GiB", load, **found)
    text = log.read_text(encoding="utf-8")
    assert found["ended by the kernel"] == found["restarts"] == 0, found
    assert "Traceback" not in text, text[-2000:]
    answered = sum(count for outcome, count in found.items() if str(outcome).endswith(", 200"))
    refused = {name for name in found if name[:1].isdigit()}
    assert answered > 10 * minutes, found
    assert all(name.startswith(("429", "503")) for name in refused), found
