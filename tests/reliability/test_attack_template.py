"""Scorecard A12: attacks through text that other processes work on: chat templates and grammars.

They run against a real server. A hostile checkpoint is the shipped one with another template, which
does its work only when a message asks for it, so that it passes every probe at the start.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from infer.models.hub import SHIPPED_FOLDER
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.hostile_checkpoints import replace
from tests.support.server_process import Findings, Served, model_server, served

BIG = "(0).from_bytes(({0} * 1500000).encode(), 'big')"
HOSTILE = {
    "for ever": BIG.format("'f'") + " // " + BIG.format("'e'").replace("1500000", "750000"),
    "for seconds": "{% for a in range(9000) %}{% for b in range(9500) %}{% endfor %}{% endfor %}",
}
"""By the message that asks for it."""


def hostile_checkpoint(folder: Path) -> Path:
    plain = json.loads((SHIPPED_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))[
        "chat_template"
    ]
    branches = [
        f"{{% if messages[0].content == '{name}' %}}"
        + (work if "{%" in work else "{{ " + work + " }}")
        + "{% endif %}"
        for name, work in HOSTILE.items()
    ]
    folder.mkdir()
    for source in SHIPPED_FOLDER.iterdir():
        (folder / source.name).symlink_to(source)
    replace(folder, "chat_template.jinja", "".join(branches) + plain)
    return folder


@contextmanager
def hostile_server(folder: Path) -> Iterator[Served]:
    checkpoint = hostile_checkpoint(folder / "checkpoint")
    with served(model_server("--model", str(checkpoint)), folder / "log") as server:
        yield server


def post(server: Served, path: str, body: Any, key: str = "") -> tuple[int, Any, float]:
    """(status, body, seconds)"""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    url = f"http://127.0.0.1:{server.port}{path}"
    started_s = time.monotonic()
    try:
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=120) as answer:
            return answer.status, json.load(answer), time.monotonic() - started_s
    except OSError as error:
        if not hasattr(error, "code"):
            raise
        return error.code, json.loads(error.read()), time.monotonic() - started_s  # type: ignore[attr-defined]


def chat(server: Served, content: str) -> tuple[int, Any, float]:
    messages = [{"role": "user", "content": content}]
    return post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 3})


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` in a thread; the list gets its result."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(OSError):  # the server has ended
            results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_template_that_takes_for_ever_is_its_callers_error(tmp_path: Path) -> None:
    """Meanwhile others are answered, and afterwards the server ends when it is told to, also in
    the middle of such a rendering (`served` looks)."""
    with hostile_server(tmp_path) as server:
        assert chat(server, "Hello")[0] == 200
        hanging, results = beside(lambda: chat(server, "for ever"))
        for _ in range(3):
            assert server.get("/health")[0] == 200
            assert post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        hanging.join()
        [(status, body, _)] = results
        assert status == 400
        assert "cannot render these messages: it takes" in body["error"]["message"]
        assert chat(server, "Hello")[0] == 200
        ending, _ = beside(lambda: chat(server, "for ever"))
        assert server.get("/health")[0] == 200
    ending.join()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("message", list(HOSTILE))
def test_nobody_waits_beside_a_hostile_template(tmp_path: Path, message: str) -> None:
    with hostile_server(tmp_path) as server:
        server.settle()
        chat(server, "Hello")
        working, results = beside(lambda: chat(server, message))
        times_s = []
        while working.is_alive():
            started_s = time.monotonic()
            assert server.get("/health")[0] == 200
            times_s.append(time.monotonic() - started_s)
            time.sleep(0.02)
        worst_ms = round(1000 * max(times_s), 1)
        load = f"a template that works {message}"
        counted = {"status": results[0][0], "/health at worst, in ms": worst_ms}
        Findings().note(12, "A12", load, **counted, at_most={"/health": (worst_ms, 100)})
        assert worst_ms < 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_keys_beside_a_flood_of_hard_grammars(tmp_path: Path) -> None:
    """Key a sends the hardest grammars that are compiled; b and c send a harmless grammar and a
    long text."""
    file = tmp_path / "keys.json"
    keys = {name: Keys(file, must_exist=False).create(name, KeyLimits()) for name in "abc"}
    arguments = model_server("--api-keys", str(file))
    numbers = iter(range(10**6))

    def hard(server: Served) -> int:
        # Each is new, and the largest that is compiled; a larger number is left out with a warning.
        number = 99_989 - 2 * next(numbers)
        parts = [{"type": "integer", "multipleOf": number}, {"type": "number"}]
        schema = {"type": "array", "prefixItems": parts * 40, "items": False}
        body = {"prompt": "x", "max_tokens": 1, "guided_json": schema}
        return post(server, "/v1/completions", body, keys["a"])[0]

    def ordinary(server: Served) -> dict[str, float]:
        grammar = {"prompt": "x", "max_tokens": 2, "guided_choice": [f"x{next(numbers)}"]}
        grammar_s = post(server, "/v1/completions", grammar, keys["b"])[2]
        long_s = post(server, "/tokenize", {"prompt": "word " * 8000}, keys["c"])[2]
        return {"b": grammar_s, "c": long_s}

    with served(arguments, tmp_path / "log") as server:
        time.sleep(5)
        alone = [ordinary(server) for _ in range(12)]
        is_over = threading.Event()

        def flood() -> list[int]:
            statuses = []
            while not is_over.is_set():
                statuses.append(hard(server))
            return statuses

        floods = [beside(flood) for _ in range(6)]
        time.sleep(2)
        flooded = []
        for _ in range(24):  # for as long as several of a's grammars end their processes
            flooded.append(ordinary(server))
            time.sleep(0.5)
        is_over.set()
        for thread, _ in floods:
            thread.join()
        statuses = [status for _, results in floods for some in results for status in some]
        most: dict[str, tuple[float, float]] = {}
        for name in "bc":
            before_s, after_s = (max(each[name] for each in some) for some in (alone, flooded))
            most[name] = (round(after_s, 2), round(2 * before_s + 0.5, 2))
        medians_s = {name: statistics.median(each[name] for each in flooded) for name in "bc"}
        counted = {"statuses": dict(Counter(statuses)), "medians in s, b and c": medians_s}
        load = "six requests of key a with hard grammars, b with easy ones, c with long texts"
        Findings().note(12, "A12", load, **counted, at_most=most)
        assert all(seconds < bound for seconds, bound in most.values()), most
        assert set(statuses) <= {200, 400, 429, 503}
